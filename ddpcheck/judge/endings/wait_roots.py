"""DDP402 and 403: wait-for graph of ranks, from recorder dumps.

A collective waits for group members that have not entered it or are in an earlier collective, a send or recv for its
peer. Most ranks of a hung job wait for a rank that waits itself, in a pipeline or in another group. All waits lead to a
few ranks that wait for nobody: the root cause, reported in one finding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from ddpcheck.findings.evidence.endings import DEFAULT_GROUP, RankDump, RecordedCall
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import capitalized, format_ranks, group_by, one_finding, plural_verb, told_together
from ddpcheck.judge.endings.collective_order import ROOTED
from ddpcheck.judge.endings.schedules import find_circle
from ddpcheck.judge.endings.stories import GROUP_ORDER, SEND_ORDER

_MOST_LINES = 6  # evidence lines of one kind
_Group = tuple[str, tuple[int, ...]]  # name and members; disjoint groups may share a name
_Wait = tuple[int, RecordedCall, frozenset[int]]  # (rank, pending call, ranks waited for)


class WaitGraph:
    """Wait-for graph of ranks.

    Attributes:
        open_calls: Calls that have not ended, by rank, in the order of entry.
        devices: First call completed by peers and not by the device, by rank.
        waits: Calls in which a rank waits, by rank; without the ranks of `devices`.
        stopped: Ranks that others wait for, in no call or in a call that peers have completed.
        missing: Ranks that others wait for, without a dump.
    """

    def __init__(self, dumps: Mapping[int, RankDump], groups: Iterable[_Group]) -> None:
        self.dumps = dumps
        self.open_calls = {rank: [call for call in dump.entries if not call.ended] for rank, dump in dumps.items()}
        self._groups = {(group[0], rank): group for group in groups for rank in group[1]}
        self._next = {group: dict(_positions(dumps, *group)) for group in {*self._groups.values()}}
        self._furthest = {group: max(places.values(), default=(0, False))[0] for group, places in self._next.items()}
        self._absent: dict[tuple[_Group, int], frozenset[int]] = {}
        self.devices = {rank: call for rank in dumps if (call := self._uncompleted(rank)) is not None}
        self.waits = {rank: self._waits(rank) for rank in dumps if rank not in self.devices}
        waited_for = {peer for waits in self.waits.values() for *_, peers in waits for peer in peers}
        self.missing = waited_for - dumps.keys()
        self.stopped = {
            rank
            for rank in waited_for - self.missing - self.devices.keys()
            if not self.waits[rank] and all(self._is_passed(rank, call) for call in self.open_calls[rank][:1])
        }

    def group(self, rank: int, call: RecordedCall) -> _Group:
        """Return the process group of a call."""
        return self._groups.get((call.group, rank), (call.group, ()))

    def _is_passed(self, rank: int, call: RecordedCall) -> bool:
        """Return True if a peer has completed the collective."""
        return not call.between_two and call.number < self._furthest.get(self.group(rank, call), 0)

    def _uncompleted(self, rank: int) -> RecordedCall | None:
        """Return the first call that peers completed and the device did not."""
        passed = [call for call in self.open_calls[rank] if self._is_passed(rank, call)]
        if self.dumps[rank].gloo or all(call.call.operation in ROOTED for call in passed):
            return None
        return max(group_by(passed, lambda call: call.group).values(), key=len)[0]

    def _waits(self, rank: int) -> list[_Wait]:
        """Return the pending calls of a rank with absent peers, else with delayed peers."""
        calls = [
            call
            for call in self.open_calls[rank]
            if call.between_two or self._next.get(self.group(rank, call), {}).get(rank) == (call.number, True)
        ]
        absent = [(rank, call, peers) for call in calls if (peers := self._absent_from(rank, call) - {rank})]
        return absent or [(rank, call, peers) for call in calls if (peers := self._delayed(rank, call))]

    def _absent_from(self, rank: int, call: RecordedCall) -> frozenset[int]:
        if call.between_two:
            answers = any(
                entry.peer == rank and entry.group == call.group for entry in self.open_calls.get(call.peer, ())
            )
            return frozenset({call.peer} if call.peer >= 0 and (not answers or call.peer in self.devices) else ())
        key = group, number = self.group(rank, call), call.number
        if key not in self._absent:
            self._absent[key] = frozenset(
                peer
                for peer, place in self._next[group].items()
                if place < (number, True) or (place[0] == number and peer in self.devices)
            )
        return self._absent[key]

    def _delayed(self, rank: int, call: RecordedCall) -> frozenset[int]:
        """Return the peers that entered a call after another call that has not ended."""
        peers = {call.peer} if call.between_two else {*self.group(rank, call)[1]}
        before = {peer: calls[0] for peer in peers - {rank} if (calls := self.open_calls.get(peer))}
        return frozenset(
            peer
            for peer, first in before.items()
            if first.group != call.group or (first.peer != rank if call.between_two else first.between_two)
        )

    def furthest(self, rank: int, call: RecordedCall) -> tuple[list[int], int]:
        """Return the ranks of a group that completed most collectives, and the last number."""
        number = self._furthest[group := self.group(rank, call)]
        return [peer for peer, place in self._next[group].items() if place[0] == number], number - 1

    def waits_for(self, roots: Collection[int]) -> list[_Wait]:
        """Return the waits for any of `roots`, earliest first, with peers limited to `roots`."""
        waits = ((rank, call, peers & {*roots}) for all_waits in self.waits.values() for rank, call, peers in all_waits)
        return sorted((wait for wait in waits if wait[2]), key=lambda wait: wait[1].created)

    def who_waits(self, roots: Collection[int]) -> tuple[list[str], set[int]]:
        """Return evidence of direct, then indirect waits for `roots`, and all waiting ranks."""
        reached, direct, further = set(roots), list[_Wait](), list[_Wait]()
        while True:
            waiting = {rank: waits for rank, waits in self.waits.items() if rank not in reached}
            first = (next((wait for wait in waits if wait[2] & reached), None) for waits in waiting.values())
            new = [(rank, call, peers & reached) for rank, call, peers in filter(None, first)]
            if not new:
                return _limited([*self._lines(direct), *self._lines(further)]), reached - {*roots}
            further += new if direct else []
            direct = direct or new
            reached |= {rank for rank, *_ in new}

    def _lines(self, waits: Sequence[_Wait]) -> list[str]:
        """Return one line per group description and operation."""
        kinds = group_by(
            waits, lambda wait: (self._description(wait[1]), _operation(wait[1]), wait[1].group == DEFAULT_GROUP)
        )
        return [self._line(kind) for kind in sorted(kinds.values(), key=len, reverse=True)]

    def _line(self, waits: Sequence[_Wait]) -> str:
        ranks = [rank for rank, *_ in waits]
        words = {self.words(call) for _, call, _ in waits}
        names = {call.group for _, call, _ in waits}
        description = self._description(waits[0][1]) or "process groups"
        label = words.pop() if len(words) == 1 else f"{_operation(waits[0][1])} of {description} ({len(names)} groups)"
        peers = {peer for *_, peers in waits for peer in peers}
        return f"{_few(ranks)} {plural_verb('waits', 'wait', ranks)} for {_few(peers)} in {label}"

    def words(self, call: RecordedCall) -> str:
        """Describe a call with its number and group."""
        label = _operation(call) if call.between_two else f"{call.call}, number {call.number}"
        if call.group == DEFAULT_GROUP:
            return label
        which, description = f"process group {call.group}", self._description(call)
        return f"{label} of {f'{description} ({which})' if description else which}"

    def _description(self, call: RecordedCall) -> str:
        descriptions = (dump.descriptions for dump in self.dumps.values())
        return next((names[call.group] for names in descriptions if call.group in names), "")


def _positions(
    dumps: Mapping[int, RankDump], name: str, members: Sequence[int]
) -> Iterator[tuple[int, tuple[int, bool]]]:
    """Yield per rank the next collective number, and True if entered."""
    present = {rank: dumps[rank] for rank in members if rank in dumps}
    by_rank = {rank: dump.collectives(name) for rank, dump in present.items()}
    most = max((call.number for calls in by_rank.values() for call in calls), default=0)
    yield from ((rank, (0, False)) for rank in members if rank not in present)
    for rank, calls in by_rank.items():
        dump = present[rank]
        # ended calls may be in no dump; a number above all in dumps counts sends and receives
        last = calls[-1].number if calls else dump.enqueued.get(name, 0)
        if (first := next((call.number for call in calls if not call.ended), None)) is not None:
            yield rank, (first, True)
        elif calls or not dump.wrapped or name in dump.enqueued:
            yield rank, (last + 1 if last <= most else 1, False)


def _operation(call: RecordedCall) -> str:
    return "send or recv" if call.between_two else call.call.operation


def _few(ranks: Collection[int]) -> str:
    return f"{len(ranks)} ranks" if (words := format_ranks(ranks)).endswith(" more") else words


def _limited(lines: Sequence[str]) -> list[str]:
    rest = len(lines) - _MOST_LINES
    return [*lines[:_MOST_LINES], f"and {rest} more"] if rest > 1 else [*lines]


def judge_waits(
    graph: WaitGraph, explained: Collection[int], doing: Mapping[int, str], *, names_missing: bool
) -> list[Finding]:
    """DDP402 and 403: one finding per root cause of waiting ranks.

    `explained`: ranks whose waiting peers are expected, or covered by another finding.
    """
    findings = list[Finding]()
    if ranks := sorted(graph.devices.keys() - explained):
        findings += _of_devices(graph, ranks)
    if ranks := sorted(graph.stopped.difference(explained)):
        fix = (
            f"Inspect the stacks of {format_ranks(ranks)} (py-spy dump --native --pid PID): a lock, native code that "
            "holds the GIL, data loading, a file system, or a branch that other ranks do not take. If a process is "
            "gone, its log says why."
        )
        evidence = told_together((rank, doing[rank]) for rank in ranks)
        findings += _hang(graph, ranks, f"{format_ranks(ranks)} stopped calling collectives", fix, evidence)
    if findings or explained:
        return findings
    if graph.missing:
        ranks, who = sorted(graph.missing), format_ranks(graph.missing)
        fix = f"Find out from the log of {who} why there is no dump: the process may have ended or been killed."
        return _hang(graph, ranks, f"{who} left no dump", fix) if names_missing else []
    return _of_late(graph) or _of_no_end(graph) or _of_circle(graph)


def _hang(
    graph: WaitGraph,
    roots: Sequence[int],
    cause: str,
    fix: str,
    evidence: Sequence[str] = (),
    call: RecordedCall | None = None,
    code: str = "DDP402",
) -> list[Finding]:
    """Create a finding on `roots`, located at `call` or a waiting call."""
    lines, waiting = graph.who_waits(roots)
    calls = [call] if call is not None else [call for _, call, _ in graph.waits_for(roots)]
    others = "the other " if len(waiting) + len(roots) == len(graph.dumps.keys() | graph.missing) else ""
    who = f"{others}{len(waiting)} ranks wait" if len(waiting) > 1 else f"{format_ranks(waiting)} waits"
    return one_finding(
        code,
        sorted({call.call.operation.partition(" ")[0] for call in calls}),
        f"{capitalized(cause)}{f', and {who} for that' if waiting else ''}.",
        ranks=roots,
        location=Location.parse(next((call.call.location for call in calls if call.call.location), "")),
        evidence=[*_limited(evidence), *lines],
        fix=fix,
    )


def _of_devices(graph: WaitGraph, ranks: Sequence[int]) -> list[Finding]:
    """DDP402: device that completes nothing, while its rank still enqueues calls."""
    evidence = []
    for rank in ranks:
        call = graph.devices[rank]
        peers, completed = graph.furthest(rank, call)
        last = max(open_call.number for open_call in graph.open_calls[rank] if open_call.group == call.group)
        evidence.append(
            f"rank {rank} has enqueued calls up to number {last} and not completed {graph.words(call)}; "
            f"{format_ranks(peers)} completed {completed}"
        )
    fix = (
        f"Look at the devices and machines of {format_ranks(ranks)}: Xid errors in dmesg, ECC errors in nvidia-smi -q, "
        "NVLink and network adapters. The collectives match, so that no line of the program is to be changed."
    )
    cause = f"the device stopped on {format_ranks(ranks)}: peers completed collectives that it did not complete"
    return _hang(graph, ranks, cause, fix, evidence, graph.devices[ranks[0]])


def _of_late(graph: WaitGraph) -> list[Finding]:
    """DDP402: rank that reached a call long after the other ranks."""
    calls = [
        (rank, call) for rank, calls in graph.open_calls.items() for call in calls if call.created and call.timeout
    ]
    for entries in group_by(calls, lambda item: (graph.group(*item), item[1].between_two, item[1].number)).values():
        first = min((call for _, call in entries), key=lambda call: call.created)
        delays = {rank: call.created - first.created for rank, call in entries if not call.between_two}
        if late := sorted(rank for rank, seconds in delays.items() if seconds >= first.timeout / 2):
            who = format_ranks(late)
            fix = (
                f"Check what {who} did before (loading data, saving a checkpoint, evaluating, compiling), and split "
                "the work equally over all ranks; or increase the timeout: init_process_group(timeout=...)."
            )
            cause = f"{who} came {delays[late[0]]:.0f} s late to {graph.words(first)} (timeout: {first.timeout:.0f} s)"
            return _hang(graph, late, cause, fix, call=first)
    return []


def _of_circle(graph: WaitGraph) -> list[Finding]:
    """DDP402 or 403: circular wait of ranks. Runs last, if no wait ends elsewhere."""
    waits = {rank: rank_waits[0] for rank, rank_waits in graph.waits.items() if rank_waits}
    circle = find_circle({rank: (call.call, sorted(peers)) for rank, call, peers in waits.values()})
    if not circle:
        return []
    calls = [waits[rank][1] for rank, _ in circle]
    ranks = sorted(rank for rank, _ in circle)
    evidence = [f"rank {rank} waits for rank {peer} in {graph.words(waits[rank][1])}" for rank, peer in circle]
    code, fix = ("DDP402", SEND_ORDER) if all(call.between_two for call in calls) else ("DDP403", GROUP_ORDER)
    return _hang(graph, ranks, f"{format_ranks(ranks)} wait for each other", fix, evidence, calls[0], code)


def _of_no_end(graph: WaitGraph) -> list[Finding]:
    """DDP402: call that all its ranks entered and that does not end."""
    waited_for = {peer for waits in graph.waits.values() for *_, peers in waits for peer in peers}
    idle = waited_for - {rank for rank, waits in graph.waits.items() if waits}
    first = ((rank, calls[0]) for rank, calls in graph.open_calls.items() if calls)
    rank_call = next((item for item in first if item[0] in idle or len(graph.group(*item)[1]) == 1), None)
    if rank_call is None:
        return []
    rank, call = rank_call
    ranks = sorted({rank, call.peer} if call.between_two else graph.group(rank, call)[1])
    fix = f"Look at the devices of {format_ranks(ranks)} and at the network between them (NCCL_DEBUG=INFO)."
    cause = f"{format_ranks(ranks)} entered {graph.words(call)}, which does not end"
    return _hang(graph, ranks, cause, fix if len(ranks) > 1 else "", call=call)
