"""DDP403 and 407: collectives that do not match between ranks, by the logs of what each rank called."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

from ddpcheck.findings.evidence.steps import Call, ReductionInput
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import format_ranks, group_by, minority_ranks, one_finding, plural_verb


def judge_collectives(
    logs: Sequence[Sequence[Call]], at_work: Collection[int] = (), first: Mapping[str, int] | None = None
) -> list[Finding]:
    """At most one finding a process group: the first place at which the ranks' collectives do not match (DDP403).

    Args:
        logs: The collectives of each rank.
        at_work: Ranks that are neither finished nor in a collective, and so may still come to the next one.
        first: The number of the first call in the logs, by process group, where it is not 0.
    """
    findings = []
    distinct = {id(log): log for log in logs}  # of many simulated ranks most have one log together
    groups = {call.group: call.members for log in distinct.values() for call in log}
    for group, members in sorted(groups.items()):
        ranks = [rank for rank in members if rank < len(logs)]
        kinds = list(dict.fromkeys(id(logs[rank]) for rank in ranks))
        mismatch = first_mismatch([[call for call in distinct[kind] if call.group == group] for kind in kinds])
        if mismatch is None:
            continue
        place, by_kind = mismatch[0] + (first or {}).get(group, 0), dict(zip(kinds, mismatch[1], strict=True))
        found = [by_kind[id(logs[rank])] for rank in ranks]
        calls = [call for call in found if call is not None]
        absent = [rank for rank, call in zip(ranks, found, strict=True) if call is None]
        if absent and len(set(map(_signature, calls))) == 1 and set(absent) <= set(at_work):
            continue
        differing = calls[0]
        if absent:
            minority = tuple(absent)
            there = [rank for rank in ranks if rank not in absent]
            message = f"{format_ranks(there).capitalize()} called {calls[0]}, and {format_ranks(absent)} never did."
        else:
            minority = tuple(ranks[index] for index in minority_ranks([_signature(call) for call in calls]))
            differing = calls[ranks.index(minority[0])]
            message = f"Collective number {place} of the ranks does not match."
        findings += one_finding(
            "DDP403",
            sorted({call.operation for call in calls}),
            message,
            ranks=minority,
            location=Location.parse(differing.location or next((call.location for call in calls if call.location), "")),
            evidence=[
                f"{format_ranks(rank for rank, _ in some)}, collective number {place}: {words}"
                for words, some in group_by(zip(ranks, found, strict=True), lambda one: _in_words(one[1])).items()
            ],
            tags=tags_of_parting(place),
        )
    return findings


def _in_words(call: Call | None) -> str:
    return f"{call or 'none'}{f', in {call.place}' if call is not None and call.place else ''}"


_PARTS_AT = "parts at "


def tags_of_parting(number: int) -> tuple[str, ...]:
    """The tag of a finding on the collective with this number."""
    return (f"{_PARTS_AT}{number}",)


def place_of_parting(finding: Finding) -> int | None:
    """The number of the collective at which ranks part, of a finding that says so."""
    found = [tag.removeprefix(_PARTS_AT) for tag in finding.tags if tag.startswith(_PARTS_AT)]
    return int(found[0]) if found else None


def first_mismatch(sequences: Sequence[Sequence[Call]]) -> tuple[int, tuple[Call | None, ...]] | None:
    """The first place at which these logs of one process group do not match, and what each has there."""
    places = enumerate(itertools.zip_longest(*sequences))
    return next(((at, of_ranks) for at, of_ranks in places if len(set(map(_signature, of_ranks))) > 1), None)


def same_signature(one: Call, other: Call) -> bool:
    """Whether two calls pair up."""
    return _signature(one) == _signature(other)


def _signature(call: Call | None) -> tuple[str, str] | None:
    return None if call is None else (call.operation, call.payload)


def judge_packing(sent: Sequence[Sequence[ReductionInput]]) -> list[Finding]:
    """DDP407: reductions into which ranks put the same numbers in another order, although they had the same samples.

    What follows a difference in the operations is not compared.
    """
    findings: dict[str, list[Finding]] = {}
    for number, calls in enumerate(zip(*sent, strict=False)):
        if len({call.operation for call in calls}) > 1:
            break
        values = [call.values for call in calls]
        if not _is_reordered(values):
            continue
        ranks = minority_ranks(values)
        usual = next(of_rank for rank, of_rank in enumerate(values) if rank not in ranks)
        here, call = values[ranks[0]], calls[ranks[0]]
        place = next(i for i, value in enumerate(here) if value != usual[i])
        findings.setdefault(
            call.location or str(number),
            one_finding(
                "DDP407",
                (call.operation,),
                f"{format_ranks(ranks).capitalize()} {plural_verb('puts', 'put', ranks)} what goes into "
                f"{call.operation}{f' at {call.location}' if call.location else ''} together in another order than the "
                "rest.",
                ranks=ranks,
                location=Location.parse(call.location),
                evidence=(
                    "given the same samples and random numbers, every rank sends the same "
                    f"{len(usual)} numbers, and {format_ranks(ranks)} in another order",
                    f"element {place}: {usual[place]:.6g}; on {format_ranks(ranks[:1])}: {here[place]:.6g}, "
                    f"which is element {usual.index(here[place])} elsewhere",
                ),
            ),
        )
    return list(itertools.chain.from_iterable(findings.values()))


def _is_reordered(values: Sequence[tuple[float, ...]]) -> bool:
    """Whether these are the same numbers in several orders, and not those of each rank in slots of its own."""
    if len(set(values)) == 1 or len({tuple(sorted(of_rank)) for of_rank in values}) > 1:
        return False
    moved = [value for at in zip(*values, strict=True) if len(set(at)) > 1 for value in at]
    # others are what a slot may be filled with before a rank writes its own
    return all(value not in (0.0, 1.0, -1.0) and 1e-6 < abs(value) < 1e6 for value in moved)
