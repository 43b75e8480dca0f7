"""Judges of copies of models and of statistics outside the wrappers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ddpcheck.findings.evidence.loop import ModuleChanged
from ddpcheck.findings.evidence.replicas import RunningStatistic, StateUsed, digest_of_values
from ddpcheck.findings.evidence.script import StateHeld
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import format_ranks, group_by, join_names, minority_ranks, one_finding, plural_verb
from ddpcheck.rules.program.ddp217_input_statistics import statistic_finding
from ddpcheck.rules.replicas.ddp214_buffer_value import batchnorm_finding
from ddpcheck.rules.replicas.ddp306_state_diverged import use_finding
from ddpcheck.trace.copies import WriteFacts, values_differ

_FEWEST_CALLS = 2  # forward calls per rank before which the statistic moved towards the mean of the samples


_FEWEST_EQUATIONS = 3  # over all these calls


_ROUNDING = 1e-5  # relative to the divisor of the inputs


def judge_statistics(stats_by_rank: Sequence[Sequence[RunningStatistic]]) -> list[Finding]:
    """DDP217: running statistics of a rank's own samples that normalise forward inputs.

    Ignored if equal on all ranks at any forward call, or passed to a collective: inputs are then normalised alike.
    `stats_by_rank`: statistics by rank.
    """
    by_name = [group_by(rank_stats, lambda stat: (stat.wrapper, stat.name)) for rank_stats in stats_by_rank]
    for name in by_name[0] if len(by_name) > 1 else ():
        by_forward = [{stat.forward: stat for stat in groups.get(name, ())} for groups in by_name]
        common = sorted(set.intersection(*map(set, by_forward)))
        calls = [[by_call[forward] for by_call in by_forward] for forward in common]
        if not calls or not all(map(_is_followed, by_forward)) or any(stat.exchanged for stat in calls[-1]):
            continue
        distances = [_distance(stats) for stats in calls]
        if min(distances) > _ROUNDING:
            return statistic_finding(calls, max(distances[-_FEWEST_CALLS:]))
    return []


def _is_followed(stats: dict[int, RunningStatistic]) -> bool:
    """Return True if most changes of the statistic follow the samples."""
    fitting = [stat for stat in stats.values() if stat.equations]
    moves = [stat for number, stat in stats.items() if number - 1 in stats and stats[number - 1].values != stat.values]
    return (
        len(fitting) >= _FEWEST_CALLS
        and sum(stat.equations for stat in fitting) >= _FEWEST_EQUATIONS
        and 2 * sum(stat.equations > 0 for stat in moves) >= len(moves)
    )


def _distance(stats: Sequence[RunningStatistic]) -> float:
    """Return the largest distance between ranks, in units of the inputs' divisor."""
    first = stats[0]
    rows = [row for stat in stats[1:] for row in zip(stat.values, first.values, first.scale, strict=False)]
    return max((abs(value - base) / scale for value, base, scale in rows if scale > 0), default=0.0)


_FEWEST = 2  # observations; the last two must differ between ranks


_FAR = 0.02  # standard deviations between running means of the same data


Changes = Sequence[Sequence[ModuleChanged]]  # writes into copies, by rank


def judge_states(states: Sequence[Sequence[StateHeld]], changes: Changes = ()) -> list[Finding]:
    """DDP306 and 214: copies, criterion buffers and other modules that differ between ranks.

    Copies that a rank neither changes nor calls are unused there (e.g. an EMA updated by rank 0 only). The finding is
    at the line that made the copy or, if once equal on all ranks, at the line that writes the copy.
    """
    by_name = [_by_name(rank_states) for rank_states in states]
    findings: list[Finding] = []
    for name in by_name[0] if by_name else ():
        if not all(name in rank_states for rank_states in by_name):
            continue
        histories = [rank_states[name] for rank_states in by_name]
        common = sorted(set.intersection(*(set(history) for history in histories)))
        steps = [[history[count] for history in histories] for count in common]
        last = steps[-_FEWEST:]
        diverged = [step for step in last if values_differ([state.values for state in step])]
        in_use = bool(last) and all(
            state.used or len({str(look.values) for look in history.values()}) > 1
            for state, history in zip(last[-1], histories, strict=True)
        )
        pairs = zip(last[0], last[-1], strict=True) if last else ()
        kept = all(not before.other or before.values == after.values for before, after in pairs)
        if len(diverged) == _FEWEST and in_use and kept and not _come_together(histories):
            equal = [number for number, step in enumerate(steps) if len({str(state.values) for state in step}) == 1]
            findings += copy_finding(steps, equal[-1] + 1 if equal else 0, _written_at(changes, name[1]))
    return findings[:1]


def _written_at(changes: Changes, copy: str) -> WriteFacts:
    """Return the line that writes a copy, preferably on some ranks; evidence; ranks."""
    ranks: dict[tuple[Location | None, str], list[int]] = {}
    for rank, rank_changes in enumerate(changes):
        for change in rank_changes:
            if copy in change.names:
                ranks.setdefault((change.location, change.how), []).append(rank)
    some = {line: writers for line, writers in ranks.items() if len(writers) < len(changes)} or ranks
    if len({line for line, _ in some}) != 1:
        return None, [], ()
    (location, how), writers = next(iter(some.items()))
    if len(writers) == len(changes):
        return location, [f"it is written there ({how}), on every rank"], ()
    return location, [f"it is written there ({how}), on {format_ranks(writers)}"], tuple(writers)


def judge_uses(
    uses: Sequence[Sequence[StateUsed]], states: Sequence[Sequence[StateHeld]], changes: Changes = ()
) -> list[Finding]:
    """DDP306: weights that differ between the ranks that evaluate them at one line.

    The weights are copies, or wrapped modules with a loaded state. Evaluation on a single rank, or of weights received
    from other ranks, is correct. DDP214: equal weights, but running statistics that each rank estimated separately.
    """
    by_use = [{(use.step, use.name, use.lines): use for use in rank_uses} for rank_uses in uses]
    kept = [{digest_of_values(copy.values.values()): copy for copy in entries if copy.copies} for entries in states]
    for key in dict.fromkeys(key for rank_uses in by_use for key in rank_uses):
        by_rank = {rank: rank_uses[key] for rank, rank_uses in enumerate(by_use) if key in rank_uses}
        copies = [copy for rank, use in by_rank.items() if (copy := kept[rank].get(use.digest))]
        comparable = copies or any(use.loaded or not use.wrapped for use in by_rank.values())
        if comparable and len({use.digest for use in by_rank.values()}) > 1:
            written = _written_at(changes, key[1])
            return use_finding(by_rank, states, copies[0].location if copies else None, written)
        if len(by_rank) > 1 and (distance := _apart([use.statistics for use in by_rank.values()])) > _FAR:
            return batchnorm_finding(by_rank, distance)
    return []


def _apart(statistics: Sequence[Sequence[float]]) -> float:
    """Return the largest distance between running means, in standard deviations."""
    half = len(statistics[0]) // 2
    if not half or any(len(stats) != 2 * half for stats in statistics):
        return 0.0
    columns: list[tuple[float, ...]] = list(zip(*statistics, strict=True))
    pairs = zip(columns[:half], columns[half:], strict=True)
    return max((max(means) - min(means)) / math.sqrt(max(*variances, 1e-12)) for means, variances in pairs)


def _come_together(histories: Sequence[Mapping[int, StateHeld]]) -> bool:
    """Return True if collectives synchronise a copy again after its ranks diverge."""
    common = sorted(set.intersection(*(set(history) for history in histories)))
    diverged = [count for count in common if values_differ([history[count].values for history in histories])]
    return all(history[diverged[-1]].together > history[diverged[0]].together for history in histories)


def _by_name(states: Sequence[StateHeld]) -> dict[tuple[int, str], dict[int, StateHeld]]:
    by_name = group_by(states, lambda state: (state.optimizer, state.name))
    return {name: {state.count: state for state in group} for name, group in by_name.items()}


def copy_finding(steps: Sequence[Sequence[StateHeld]], first: int, written: WriteFacts) -> list[Finding]:
    """Report a copy that diverges from index `first` of its observations `steps` on."""
    states, state = steps[first], steps[first][0]
    names = [name for name in state.values if len({peer.values.get(name) for peer in states}) > 1]
    ranks = minority_ranks([tuple(peer.values.items()) for peer in states]) if len(states) > 2 else ()
    summary = f"{len(names)} of {len(state.values)} tensors are not the same on every rank before step {state.count}"
    evidence = [f"{summary}: {join_names(names[:3])}{' ...' if len(names) > 3 else ''}"]
    evidence.append(f"before step {steps[first - 1][0].count} they were" if first else "they were not compared before")
    location, how_written, writers = written if first else (None, [], ())
    if state.other:
        return one_finding(
            "DDP306",
            (state.name,),
            f"{state.name} ({state.kind}) is in no wrapper and in no optimizer, the training loop calls it, and its "
            "parameters are not the same on every rank.",
            ranks=ranks,
            steps=(state.count,),
            location=state.location,
            evidence=[evidence[0], "they do not change from step to step"],
            severity=Severity.WARNING,
            fix="Load the same state into it on every rank, construct it under one seed, or broadcast it from rank 0.",
        )
    if state.copies:
        return one_finding(
            "DDP306",
            (state.name,),
            f"{state.name}, a copy of a wrapped module's parameters or created like it, is not the same on every rank.",
            ranks=writers or ranks,
            steps=(state.count,),
            location=location or state.location,
            evidence=[*evidence, *how_written],
            severity=Severity.WARNING,
            fix="Make the copy after DistributedDataParallel has been constructed, and make the same change on every "
            "rank (all_reduce the condition). If it is not a copy, construct it under one seed, or load one state into "
            "it.",
        )
    return one_finding(
        "DDP214",
        [f"{state.name}.{name}" for name in names],
        f"{state.name} ({state.kind}) is in no wrapper, backward comes through it, and its "
        f"{plural_verb('buffer', 'buffers', names)} {join_names(names)} {plural_verb('has', 'have', names)} other "
        "values on each rank.",
        ranks=ranks,
        steps=(state.count,),
        location=state.location,
        evidence=evidence,
        fix="all_reduce or gather the values that the buffer is computed from.",
    )
