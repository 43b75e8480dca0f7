"""DDP403 by call site: collectives that pair up although they stand on different lines, and so pair up wrongly.

Two barriers of different lines are one collective to a backend. A rank that makes one in addition goes on, and all that
it calls from then on pairs up with a later call of the others, until one waits for a call that nobody makes any more:
that last call is innocent. Pure functions from `findings.evidence.steps.Call` to findings.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import counted, format_ranks, group_by, one_finding, plural_verb
from ddpcheck.judge.collective_order import first_mismatch, judge_collectives, same_signature

_Pair = Callable[[Call, Call], bool]
_ROOTED = ("broadcast", "reduce", "gather", "scatter", "broadcast_object_list", "gather_object", "scatter_object_list")
_LONGEST = 64  # calls that one rank makes in addition where the other makes them as well, in another number
_TRIES = 50  # places at which lines differ


def judge_partings(
    logs: Sequence[Sequence[Call]], at_work: Collection[int] = (), first: Mapping[str, int] | None = None
) -> list[Finding]:
    """At most one finding a process group (DDP403): where the lines of its ranks part, else where what they call does.

    `at_work` and `first` are those of `judge_collectives`.
    """
    findings = []
    for group in sorted({call.group for log in logs for call in log}):
        own = [[call for call in log if call.group == group] for log in logs]
        found = judge_collectives(own, at_work, first)
        findings += (found and judge_call_sites(own, (first or {}).get(group, 0))) or found
    return findings


def judge_call_sites(logs: Sequence[Sequence[Call]], first: int = 0) -> list[Finding]:
    """DDP403: a rank makes calls in addition, which pair up with calls of other lines; at most one finding.

    Args:
        logs: Of one process group that hangs or fails, by rank.
        first: The number of the first call in the logs.
    """
    members = next((call.members for log in logs for call in log), ())
    ranks = [rank for rank in members if rank < len(logs)]
    mismatch = first_mismatch([logs[rank] for rank in ranks])
    if mismatch is None:
        return []
    place, found = mismatch
    end = None if None in found else place + 1  # from where operations differ, nothing pairs up any more
    table = _CallTable()
    coded = {rank: table.coded(logs[rank][:end]) for rank in ranks}
    classes = sorted(group_by(ranks, lambda rank: coded[rank]).values(), key=lambda same: (-len(same), same))
    partings = []
    for other in classes[1:]:
        for calling, missing in ((classes[0], other), (other, classes[0])):
            extra, without = coded[calling[0]], coded[missing[0]]
            if len(extra) > len(without) or end is not None:  # who has called more waits
                at = _Comparison(table, extra, without).parting(place)
                partings += [] if at is None else [(at, calling[0], missing[0])]
    if not partings:
        return []
    at, *two = min(partings)
    calls = {rank: logs[rank][at] for rank in ranks if at < len(logs[rank])}
    calling, missing = ([rank for rank in calls if coded[rank][at] == coded[one][at]] for one in two)
    return [_finding(at + first, calls, calling, missing, _last(logs, ranks, first))]


def _finding(
    number: int, calls: Mapping[int, Call], calling: Sequence[int], missing: Sequence[int], last: Sequence[str]
) -> Finding:
    extra, other = calls[calling[0]], calls[missing[0]]
    fewer = missing if len(missing) < len(calling) else calling
    (finding,) = one_finding(
        "DDP403",
        (extra.operation,),
        f"Collective number {number} pairs up different lines: {format_ranks(calling)} "
        f"{plural_verb('calls', 'call', calling)} {extra}, {format_ranks(missing)} {other}; from there on "
        f"{format_ranks(missing)} {plural_verb('is', 'are', missing)} ahead of {format_ranks(calling)}.",
        ranks=fewer,
        location=Location.parse(extra.location),
        evidence=[*(f"rank {rank}, collective number {number}: {call}" for rank, call in calls.items()), *last],
        fix=f"Call {extra.operation} at {extra.location} on every rank, equally often, or on none.",
    )
    return finding


def _last(logs: Sequence[Sequence[Call]], ranks: Sequence[int], first: int) -> list[str]:
    return [
        f"rank {rank}, its last one, after {counted(first + len(logs[rank]) - 1, 'other')}: {logs[rank][-1]}"
        for rank in ranks
        if logs[rank]
    ]


class _CallTable:
    """Numbers for calls, the same for those of one operation, payload and line, so that long logs compare fast."""

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
    """The calls of a rank that may have made some in addition, with those of another rank.

    Healthy ranks call the same collective from different lines, too, each in its branch: lines of which neither rank
    has the other's are taken for a pair. So are rooted collectives where the root is not known: who sends calls another
    line than who receives, and ranks may take turns.
    """

    def __init__(self, table: _CallTable, extra: Sequence[int], without: Sequence[int]) -> None:
        self._calls = table.calls
        self._extra = extra
        self._without = without
        self._own = {table.calls[number].location for number in set(extra)}
        self._others = {table.calls[number].location for number in set(without)}
        self._pairs: dict[tuple[int, int], bool] = {}

    def parting(self, end: int) -> int | None:
        """The place of the first call in addition, before `end`; `None` where such calls do not explain the logs."""
        paired = enumerate(zip(self._extra[:end], self._without[:end], strict=False))
        differing = [place for place, (one, other) in paired if one != other and not self._pair(one, other)]
        for place in differing[:_TRIES]:
            if self._lines_of_its_own(place):
                return place
        return differing[0] if differing and self._one_run(differing[0]) else None

    def _pair(self, one: int, other: int) -> bool:
        """Whether a call of the one rank and a call of the other may belong together."""
        if (one, other) not in self._pairs:
            here, there = self._calls[one], self._calls[other]
            self._pairs[one, other] = same_signature(here, there) and (
                here.location == there.location
                or not (here.location and there.location)
                or (here.location not in self._others and there.location not in self._own)
                or (here.operation in _ROOTED and "root" not in here.payload)
            )
        return self._pairs[one, other]

    def _lines_of_its_own(self, start: int) -> bool:
        """Whether all is in step from `start` on, but for calls of lines that the other rank never comes to."""
        here, there = start, start
        waiting, confirmed = set[int](), set[int]()  # the calls in addition; those that a pair has followed
        while here < len(self._extra) and there < len(self._without):
            one, other = self._extra[here], self._without[there]
            line = self._calls[one].location
            if self._pair(one, other):
                if line and line == self._calls[other].location:
                    confirmed |= waiting
                there += 1
            elif line and line not in self._others:
                waiting.add(one)
            else:
                return False
            here += 1
        return bool(confirmed) and (there == len(self._without) or waiting <= confirmed)

    def _one_run(self, start: int) -> bool:
        """Whether all is in step from `start` on, but for one run of calls there.

        Ranks that take turns look like this as well; then no line has paired up with itself before.
        """
        before = zip(self._extra[:start], self._without[:start], strict=False)
        in_step = {one for one, other in before if one == other}
        for length in range(1, _LONGEST + 1):
            after, rest = self._extra[start + length :], self._without[start:]
            if not all(one == other or self._pair(one, other) for one, other in zip(after, rest, strict=False)):
                continue
            equal = {one for one, other in zip(after, rest, strict=False) if one == other}
            if same := {one for one in equal if self._calls[one].location}:
                run = self._extra[start : start + length]
                of_its_own = all(self._calls[number].location not in self._others for number in run)
                return of_its_own or bool({*run, *same} & in_step) or len(same) > 2
        return False
