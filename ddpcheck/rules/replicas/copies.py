"""Judges of copies of models, and of other modules outside the wrappers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ddpcheck.findings.evidence.replicas import EvalCall, digest_of_values
from ddpcheck.findings.evidence.script import LocalModel
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.wording import format_ranks, group_by, join_names, minority_ranks
from ddpcheck.rules.registry import rule
from ddpcheck.rules.replicas.ddp214_buffer_value import batchnorm_finding, outer_buffers_finding
from ddpcheck.rules.replicas.ddp306_state_diverged import (
    diverged_copy_finding,
    unequal_module_finding,
    unequal_weights_finding,
)
from ddpcheck.trace.replicas import Changes, WriteFacts, aligned, common_values, copy_writes, values_differ
from ddpcheck.trace.wrappers import Copies

MAX_DISTANCE = 0.02  # standard deviations between running means of the same data


@rule
def judge_copies(copies: Copies) -> list[Finding]:
    """DDP306 and 214: modules outside of the wrappers that differ between ranks."""
    states, changes = copies.states, copies.changes
    findings = judge_copied_states(states, changes) or judge_evaluations(copies.uses, states, changes)
    if any(RULES[finding.code].values_differ for finding in findings):
        copies.require_exact_parameters()
    return [replace(finding, tags=(*finding.tags, "of a copy")) for finding in findings]


def judge_copied_states(states: Sequence[Sequence[LocalModel]], changes: Changes = ()) -> list[Finding]:
    """DDP306 and 214: copies, criterion buffers and other modules that differ between ranks.

    A copy is not reported if a rank neither changes nor calls it (e.g. an EMA that only rank 0 updates). The finding is
    at the line that made the copy or, if the copy was equal on all ranks before, at the line that writes the copy.
    """
    by_name = [_states_by_name(rank_states) for rank_states in states]
    findings: list[Finding] = []
    for name, histories in common_values(by_name).items():
        steps = aligned(histories)
        diverged = [n for n, step in enumerate(steps) if values_differ([state.values for state in step])]
        if len(steps) < 2 or diverged[-2:] != [len(steps) - 2, len(steps) - 1]:
            continue
        last = steps[-1]
        in_use = all(
            state.is_called or len({str(state_then.values) for state_then in history.values()}) > 1
            for state, history in zip(last, histories, strict=True)
        )
        kept = all(not s.is_independent or s.values == end.values for s, end in zip(steps[-2], last, strict=True))
        # collectives may synchronise a copy again after its ranks diverge
        synced = all(end.syncs > state.syncs for state, end in zip(steps[diverged[0]], last, strict=True))
        if in_use and kept and not synced:
            equal = [number for number, step in enumerate(steps) if len({str(state.values) for state in step}) == 1]
            findings += _copy_finding(steps, equal[-1] + 1 if equal else 0, copy_writes(changes, name[1]))
    return findings[:1]


def judge_evaluations(
    uses: Sequence[Sequence[EvalCall]], states: Sequence[Sequence[LocalModel]], changes: Changes = ()
) -> list[Finding]:
    """DDP306: weights that differ between the ranks that evaluate them at one line.

    The weights are copies, or wrapped modules with a loaded state. Evaluation on a single rank, or of weights received
    from other ranks, is correct. DDP214: equal weights, but running statistics that each rank estimated separately.
    """
    by_use = [{(use.step, use.name, use.lines): use for use in rank_uses} for rank_uses in uses]
    kept = [{digest_of_values(copy.values.values()): copy for copy in entries if copy.is_copy} for entries in states]
    for key in dict.fromkeys(key for rank_uses in by_use for key in rank_uses):
        by_rank = {rank: rank_uses[key] for rank, rank_uses in enumerate(by_use) if key in rank_uses}
        copies = [copy for rank, use in by_rank.items() if (copy := kept[rank].get(use.digest))]
        comparable = copies or any(use.loaded or not use.wrapped for use in by_rank.values())
        if comparable and len({use.digest for use in by_rank.values()}) > 1:
            return _use_finding(by_rank, states, copies[0].location if copies else None, copy_writes(changes, key[1]))
        if len(by_rank) > 1 and (distance := _distance_of_means([*by_rank.values()])) > MAX_DISTANCE:
            return batchnorm_finding(by_rank, distance)
    return []


def _distance_of_means(uses: Sequence[EvalCall]) -> float:
    """Return how far the ranks' BatchNorm running means are apart, in standard deviations."""
    statistics = [use.statistics for use in uses]
    half = len(statistics[0]) // 2
    if not half or any(len(stats) != 2 * half for stats in statistics):
        return 0.0
    columns: list[tuple[float, ...]] = list(zip(*statistics, strict=True))
    pairs = zip(columns[:half], columns[half:], strict=True)
    return max((max(means) - min(means)) / math.sqrt(max(*variances, 1e-12)) for means, variances in pairs)


def _states_by_name(states: Sequence[LocalModel]) -> dict[tuple[int, str], dict[int, LocalModel]]:
    by_name = group_by(states, lambda state: (state.optimizer, state.name))
    return {name: {state.count: state for state in group} for name, group in by_name.items()}


def _copy_finding(steps: Sequence[Sequence[LocalModel]], first: int, written: WriteFacts) -> list[Finding]:
    states, state = steps[first], steps[first][0]
    names = [name for name in state.values if len({peer.values.get(name) for peer in states}) > 1]
    ranks = minority_ranks([tuple(peer.values.items()) for peer in states]) if len(states) > 2 else ()
    summary = f"{len(names)} of {len(state.values)} tensors are not the same on every rank before step {state.count}"
    summary += f": {join_names(names[:3])}{' ...' if len(names) > 3 else ''}"
    if state.is_independent:
        return unequal_module_finding(state, ranks, summary)
    history = f"before step {steps[first - 1][0].count} they were" if first else "they were not compared before"
    if state.is_copy:
        return diverged_copy_finding(state, ranks, [summary, history], written if first else (None, [], ()))
    return outer_buffers_finding(state, names, ranks, [summary, history])


def _use_finding(
    uses: Mapping[int, EvalCall], states: Sequence[Sequence[LocalModel]], copied: Location | None, written: WriteFacts
) -> list[Finding]:
    """Report unequal weights at the line that loads, writes, copies or evaluates the weights."""
    ranks = list(uses)
    use = next((use for use in uses.values() if use.loaded), uses[ranks[0]])
    copies = [[state for state in rank_states if state.is_copy and state.name == use.name] for rank_states in states]
    starts = [min(rank_copies, key=lambda state: state.count).values for rank_copies in copies if rank_copies]
    is_written = not use.loaded and written[0] and len(starts) == len(states) and not values_differ(starts)
    location, how_written, writers = written if is_written else (use.location or copied, [], ())
    evidence = [f"evaluated at {use.lines[0]} on {format_ranks(ranks)}, after {use.step} optimizer steps", *how_written]
    changed = {rank: len({str(state.values) for state in copies[rank]}) > 1 for rank in ranks if len(copies[rank]) > 1}
    moved, unmoved = ([rank for rank, flag in changed.items() if flag is value] for value in (True, False))
    if moved and unmoved:
        evidence.append(f"in the training loop it has changed on {format_ranks(moved)}, not on {format_ranks(unmoved)}")
    return unequal_weights_finding(use, writers, location or Location.parse(use.lines[0]), evidence)
