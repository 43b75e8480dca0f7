"""DDP403 and 407: mismatched collectives, from the collective log of each rank.

Also matched by call site: a backend pairs two barriers of different lines. A rank with an extra barrier goes on, and
each later call pairs up with a later call of the others, until a rank waits for a call that no rank makes any more.
The last call is then not the cause.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

from ddpcheck.findings.evidence.steps import Call, ReductionInput
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import (
    counted,
    format_ranks,
    group_by,
    minority_ranks,
    one_finding,
    plural_verb,
)


def judge_collectives(
    logs: Sequence[Sequence[Call]], at_work: Collection[int] = (), first: Mapping[str, int] | None = None
) -> list[Finding]:
    """DDP403: first mismatched collective; at most one finding per process group."""
    findings = []
    distinct = {id(log): log for log in logs}  # most simulated ranks share one log
    groups = {call.group: call.members for log in distinct.values() for call in log}
    for group, members in sorted(groups.items()):
        ranks = [rank for rank in members if rank < len(logs)]
        kinds = list(dict.fromkeys(id(logs[rank]) for rank in ranks))
        mismatch = first_mismatch([[call for call in distinct[kind] if call.group == group] for kind in kinds])
        if mismatch is None:
            continue
        place, by_kind = mismatch[0] + (first or {}).get(group, 0), dict(zip(kinds, mismatch[1], strict=True))
        row = [by_kind[id(logs[rank])] for rank in ranks]
        calls = [call for call in row if call is not None]
        absent = [rank for rank, call in zip(ranks, row, strict=True) if call is None]
        if absent and len(set(map(_signature, calls))) == 1 and set(absent) <= set(at_work):
            continue
        present = [rank for rank in ranks if rank not in absent]
        if len(set(map(_signature, calls))) == 1:
            differing, minority = calls[0], tuple(absent)
            message = f"{format_ranks(present).capitalize()} called {calls[0]}, and {format_ranks(absent)} never did."
        else:
            minority = tuple(present[index] for index in minority_ranks([_signature(call) for call in calls]))
            differing = calls[present.index(minority[0])]
            message = f"Collective number {place} differs between the ranks."
        words = [f"{call or 'none'}{f', in {call.place}' if call is not None and call.place else ''}" for call in row]
        findings += one_finding(
            "DDP403",
            sorted({call.operation for call in calls}),
            message,
            ranks=minority,
            location=Location.parse(differing.location or next((call.location for call in calls if call.location), "")),
            evidence=[
                f"{format_ranks(rank for rank, _ in pairs)}, collective number {place}: {text}"
                for text, pairs in group_by(zip(ranks, words, strict=True), lambda pair: pair[1]).items()
            ],
            tags=tags_of_parting(place),
        )
    return findings


def not_waiting(logs: Sequence[Sequence[Call]], inside: Mapping[int, str]) -> set[int]:
    """Return the ranks inside a collective that all members have entered.

    Such a rank still transfers data or unpickles objects, while other ranks may have gone on.
    """
    ranks = set()
    for rank, words in inside.items():
        if logs[rank] and words == str(last := logs[rank][-1]):
            counts = [sum(call.group == last.group for call in logs[peer]) for peer in last.members if peer < len(logs)]
            if sum(call.group == last.group for call in logs[rank]) == min(counts):
                ranks.add(rank)
    return ranks


_PARTS_AT = "parts at "


def tags_of_parting(number: int) -> tuple[str, ...]:
    """Return the tag of a finding on the collective with this number."""
    return (f"{_PARTS_AT}{number}",)


def place_of_parting(finding: Finding) -> int | None:
    """Return the collective number in the tags of a finding, or None."""
    numbers = [tag.removeprefix(_PARTS_AT) for tag in finding.tags if tag.startswith(_PARTS_AT)]
    return int(numbers[0]) if numbers else None


def first_mismatch(sequences: Sequence[Sequence[Call]]) -> tuple[int, tuple[Call | None, ...]] | None:
    """Return the index of the first mismatch, and the call of each log."""
    places = enumerate(itertools.zip_longest(*sequences))
    return next(((index, calls) for index, calls in places if len(set(map(_signature, calls))) > 1), None)


def same_signature(call: Call, other_call: Call) -> bool:
    """Return True if two calls have the same operation and payload."""
    return _signature(call) == _signature(other_call)


def _signature(call: Call | None) -> tuple[str, str] | None:
    return None if call is None else (call.operation, call.payload)


def judge_packing(sent: Sequence[Sequence[ReductionInput]]) -> list[Finding]:
    """DDP407: reductions of equal values in a different order on some ranks.

    The ranks had the same samples. Stops at the first mismatch of operations.
    """
    findings: dict[str, list[Finding]] = {}
    for number, calls in enumerate(zip(*sent, strict=False)):
        if len({call.operation for call in calls}) > 1:
            break
        values = [call.values for call in calls]
        if not _is_reordered(values):
            continue
        ranks = minority_ranks(values)
        usual = next(rank_values for rank, rank_values in enumerate(values) if rank not in ranks)
        differing, call = values[ranks[0]], calls[ranks[0]]
        place = next(index for index, value in enumerate(differing) if value != usual[index])
        findings.setdefault(
            call.location or str(number),
            one_finding(
                "DDP407",
                (call.operation,),
                f"{format_ranks(ranks).capitalize()} {plural_verb('packs', 'pack', ranks)} the elements for "
                f"{call.operation}{f' at {call.location}' if call.location else ''} in a different order from the "
                "rest.",
                ranks=ranks,
                location=Location.parse(call.location),
                evidence=(
                    "given the same samples and random numbers, every rank sends the same "
                    f"{len(usual)} numbers, but {format_ranks(ranks)} in a different order",
                    f"element {place}: {usual[place]:.6g}; on {format_ranks(ranks[:1])}: {differing[place]:.6g}, "
                    f"which is element {usual.index(differing[place])} elsewhere",
                ),
            ),
        )
    return list(itertools.chain.from_iterable(findings.values()))


def _is_reordered(values: Sequence[tuple[float, ...]]) -> bool:
    """Return True if values are only reordered, and not in per-rank slots."""
    if len(set(values)) == 1 or len({tuple(sorted(rank_values)) for rank_values in values}) > 1:
        return False
    moved = [value for column in zip(*values, strict=True) if len(set(column)) > 1 for value in column]
    # 0, 1 and extreme values may be the initial fill of per-rank slots
    return all(value not in (0.0, 1.0, -1.0) and 1e-6 < abs(value) < 1e6 for value in moved)


ROOTED = ("broadcast", "reduce", "gather", "scatter", "broadcast_object_list", "gather_object", "scatter_object_list")
_LONGEST = 64  # longest run of extra calls to try
_TRIES = 50  # mismatched call sites to examine


def judge_partings(
    logs: Sequence[Sequence[Call]], at_work: Collection[int] = (), first: Mapping[str, int] | None = None
) -> list[Finding]:
    """DDP403: one finding per process group, by call site if possible, else by operation."""
    findings = []
    for group in sorted({call.group for log in logs for call in log}):
        group_logs = [[call for call in log if call.group == group] for log in logs]
        by_operation = judge_collectives(group_logs, at_work, first)
        findings += (by_operation and judge_call_sites(group_logs, (first or {}).get(group, 0))) or by_operation
    return findings


def judge_call_sites(logs: Sequence[Sequence[Call]], first: int = 0) -> list[Finding]:
    """DDP403: first extra call of a rank, paired with another call site."""
    members = next((call.members for log in logs for call in log), ())
    ranks = [rank for rank in members if rank < len(logs)]
    parting = _parting(logs, ranks)
    if parting is None:
        return []
    index, coded, *sides = parting
    calls = {rank: logs[rank][index] for rank in ranks if index < len(logs[rank])}
    calling, missing = ([rank for rank in calls if coded[rank][index] == coded[side][index]] for side in sides)
    return _finding(index + first, calls, calling, missing, _last_calls(logs, ranks, first))


def place_of_call_in_addition(logs: Sequence[Sequence[Call]]) -> int | None:
    """Return the index of the first extra call, by call sites, or None."""
    parting = _parting(logs, range(len(logs)))
    return None if parting is None else parting[0]


def _parting(
    logs: Sequence[Sequence[Call]], ranks: Sequence[int]
) -> tuple[int, Mapping[int, Sequence[int]], int, int] | None:
    """Return the index of the first extra call, coded logs, calling rank, missing rank."""
    mismatch = first_mismatch([logs[rank] for rank in ranks])
    if mismatch is None:
        return None
    place, calls = mismatch
    end = None if None in calls else place + 1  # nothing pairs up after operations differ
    table = _CallTable()
    coded = {rank: table.coded(logs[rank][:end]) for rank in ranks}
    classes = sorted(group_by(ranks, lambda rank: coded[rank]).values(), key=lambda group: (-len(group), group))
    partings = []
    for group in classes[1:]:
        for calling, missing in ((classes[0], group), (group, classes[0])):
            extra, without = coded[calling[0]], coded[missing[0]]
            if len(extra) > len(without) or end is not None:  # the rank with more calls waits
                index = _Comparison(table, extra, without).parting(place)
                partings += [] if index is None else [(index, calling[0], missing[0])]
    if not partings:
        return None
    index, calling_rank, missing_rank = min(partings)
    return index, coded, calling_rank, missing_rank


def _finding(
    number: int, calls: Mapping[int, Call], calling: Sequence[int], missing: Sequence[int], last_calls: Sequence[str]
) -> list[Finding]:
    extra, other_call = calls[calling[0]], calls[missing[0]]
    fewer = missing if len(missing) < len(calling) else calling
    return one_finding(
        "DDP403",
        (extra.operation,),
        f"Collective number {number} pairs up different lines: {format_ranks(calling)} "
        f"{plural_verb('calls', 'call', calling)} {extra}, {format_ranks(missing)} {other_call}; from there on "
        f"{format_ranks(missing)} {plural_verb('is', 'are', missing)} ahead of {format_ranks(calling)}.",
        ranks=fewer,
        location=Location.parse(extra.location),
        evidence=[*(f"rank {rank}, collective number {number}: {call}" for rank, call in calls.items()), *last_calls],
        fix=f"Call {extra.operation} at {extra.location} on every rank, equally often, or on none.",
        tags=tags_of_parting(number),
    )


def _last_calls(logs: Sequence[Sequence[Call]], ranks: Sequence[int], first: int) -> list[str]:
    return [
        f"rank {rank}, its last one, after {counted(first + len(logs[rank]) - 1, 'other')}: {logs[rank][-1]}"
        for rank in ranks
        if logs[rank]
    ]


class _CallTable:
    """Integer codes of calls by (operation, payload, line), for fast comparison of long logs."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._numbers: dict[tuple[str, str, str], int] = {}

    def coded(self, log: Sequence[Call]) -> tuple[int, ...]:
        return tuple(map(self._number, log))

    def _number(self, call: Call) -> int:
        number = self._numbers.setdefault((call.operation, call.payload, call.location), len(self.calls))
        if number == len(self.calls):
            self.calls.append(call)
        return number


class _Comparison:
    """Comparison of a log, maybe with extra calls, to another rank's log.

    Healthy ranks also call one collective from different lines, each in its own branch. Accepted as such a pair: two
    lines that paired up before, two lines that each occur on one rank only, and rooted collectives of unknown root
    (sender and receivers use different lines, and ranks may take turns).
    """

    def __init__(self, table: _CallTable, extra: Sequence[int], without: Sequence[int]) -> None:
        self._calls = table.calls
        self._extra = extra
        self._without = without
        self._own = {table.calls[number].location for number in set(extra)}
        self._others = {table.calls[number].location for number in set(without)}
        self._known: set[tuple[int, int]] = set()  # accepted pairs of different lines so far
        self._in_step: set[int] = set()  # calls that paired up with an equal call so far

    def parting(self, end: int) -> int | None:
        """Return the index of the first extra call before `end`, or None."""
        tries = 0
        for place, pair in enumerate(zip(self._extra[:end], self._without[:end], strict=False)):
            if pair[0] == pair[1]:
                self._in_step.add(pair[0])
            elif pair not in self._known:
                if not self._are_pair(*pair):
                    tries += 1
                    if tries <= _TRIES and (self._lines_of_its_own(place) or self._one_run(place)):
                        return place
                self._known.add(pair)
        return None

    def _may_be_any(self, code: int, other_code: int) -> bool:
        """Return True if the lines of two paired calls are inconclusive."""
        call, other_call = self._calls[code], self._calls[other_code]
        rooted = call.operation in ROOTED and "root" not in call.payload
        return same_signature(call, other_call) and (rooted or not (call.location and other_call.location))

    def _are_pair(self, code: int, other_code: int) -> bool:
        """Return True if two calls of different ranks may belong together."""
        if code == other_code or (code, other_code) in self._known or self._may_be_any(code, other_code):
            return True
        call, other_call = self._calls[code], self._calls[other_code]
        return (
            same_signature(call, other_call)
            and call.location not in self._others
            and other_call.location not in self._own
            and not any(code == known_code or other_code == known_other for known_code, known_other in self._known)
        )

    def _lines_of_its_own(self, start: int) -> bool:
        """Return True if calls match from `start` on, except for lines of one rank."""
        index, other_index, matched = start, start, 0
        waiting, confirmed = list[int](), list[int]()  # extra calls not yet / already followed by a match
        while index < len(self._extra) and other_index < len(self._without):
            code, other_code = self._extra[index], self._without[other_index]
            location = self._calls[code].location
            if index > start and self._are_pair(code, other_code):
                if location and code == other_code:
                    matched += 1
                    confirmed += waiting
                    waiting = []
                other_index += 1
            elif location and location not in self._others:
                waiting.append(code)
            else:
                return False
            index += 1
        return 0 < len(confirmed) <= matched and (other_index == len(self._without) or set(waiting) <= set(confirmed))

    def _one_run(self, start: int) -> bool:
        """Return True if calls match from `start` on, after one run of extra calls.

        Ranks that take turns look the same, but then no line has paired up with itself before.
        """
        for length in range(1, _LONGEST + 1):
            after = zip(self._extra[start + length :], self._without[start:], strict=False)
            matched = []
            for code, other_code in after:
                if not self._are_pair(code, other_code):
                    break
                matched += [code] if code == other_code and self._calls[code].location else []
            else:
                to_the_end = len(self._extra) - length == len(self._without)
                if len(matched) >= (1 if to_the_end else length):
                    run = self._extra[start : start + length]
                    has_own_lines = all(self._calls[extra_code].location not in self._others for extra_code in run)
                    return has_own_lines or bool({*run, *matched} & self._in_step) or len(set(matched)) > 2
        return False
