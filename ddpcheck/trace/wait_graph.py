"""Graph of which rank waits for which, from Flight Recorder dumps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ddpcheck.findings.evidence.endings import DEFAULT_GROUP, RankDump, RecordedCall
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import capitalized, format_ranks, group_by, new_finding, plural_verb
from ddpcheck.trace.collectives import ROOTED


def find_circle(stuck: Mapping[int, tuple[Call, Sequence[int]]]) -> list[tuple[int, int]]:
    """Return a circular wait as pairs (rank, rank waited for), or []."""
    path = list[int]()
    following = min(stuck, default=None)
    while following is not None and following not in path:
        path.append(following)
        following = next((rank for rank in stuck[path[-1]][1] if rank in stuck), None)
    circle = path[path.index(following) :] if following is not None else []
    return list(zip(circle, [*circle[1:], *circle[:1]], strict=True))


@dataclass(frozen=True, slots=True)
class GroupLogs:
    """Collectives of one process group by rank; all logs begin at the same call."""

    name: str
    members: tuple[int, ...]  # known members
    first: int  # index of the first call in the logs, from 0
    logs: Sequence[Sequence[Call]]  # by rank, empty without a dump
    waiting: frozenset[int]  # ranks whose last call has not ended


@dataclass(frozen=True, slots=True)
class RanksSeen:
    """State of the ranks of a job: Flight Recorder dumps, current lines, finished ranks."""

    dumps: Mapping[int, RankDump]  # recorder contents by rank, if recorded
    at_work: frozenset[int] = frozenset()  # running ranks that may still reach a collective
    # by rank: what it does, in words that follow its name, if known from more than the dump
    doing: Mapping[int, str] = field(default_factory=dict)
    # by rank: current program lines, innermost first, if known
    lines: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    over: frozenset[int] = frozenset()  # ranks whose program has run to its end
    missing: Mapping[int, str] = field(default_factory=dict)  # by rank: reason for a missing dump
    source: str = "dump"  # word for a dump in messages
    is_live: bool = False  # True if the job was running when queried


_MOST_LINES = 6  # evidence lines of one kind
_Group = tuple[str, tuple[int, ...]]  # name and members; disjoint groups may share a name
_Wait = tuple[int, RecordedCall, frozenset[int]]  # (rank, pending call, ranks waited for)


class WaitGraph:
    """Wait-for graph of ranks.

    Attributes:
        open_calls: Calls that have not ended, by rank, in the order of entry.
        devices: By rank, the first call that peers have completed, but the GPU of this rank has not.
        waits: Calls in which a rank waits for peers, by rank; ranks in `devices` are left out.
        stopped: Ranks that other ranks wait for, and that are in no call, or in a call that peers have completed.
        missing: Ranks that other ranks wait for, and that have no dump.
    """

    def __init__(self, dumps: Mapping[int, RankDump], groups: Iterable[_Group]) -> None:
        self.dumps = dumps
        self.open_calls = {rank: [call for call in dump.entries if not call.ended] for rank, dump in dumps.items()}
        self._groups = {(group[0], rank): group for group in groups for rank in group[1]}
        self._places = {group: dict(_positions(dumps, *group)) for group in {*self._groups.values()}}
        self._furthest = {group: max(places.values(), default=(0, False))[0] for group, places in self._places.items()}
        self._known_absent: dict[tuple[_Group, int], frozenset[int]] = {}
        self.devices = {rank: call for rank in dumps if (call := self._uncompleted_call(rank)) is not None}
        self.waits = {rank: self._waits_of(rank) for rank in dumps if rank not in self.devices}
        waited_for = {peer for waits in self.waits.values() for *_, peers in waits for peer in peers}
        self.missing = waited_for - dumps.keys()
        self.stopped = {
            rank
            for rank in waited_for - self.missing - self.devices.keys()
            if not self.waits[rank]
            and all(self._is_completed_by_peer(rank, call) for call in self.open_calls[rank][:1])
        }

    def group(self, rank: int, call: RecordedCall) -> _Group:
        """Return the process group of a call."""
        return self._groups.get((call.group, rank), (call.group, ()))

    def _is_completed_by_peer(self, rank: int, call: RecordedCall) -> bool:
        return not call.between_two and call.number < self._furthest.get(self.group(rank, call), 0)

    def _uncompleted_call(self, rank: int) -> RecordedCall | None:
        passed = [call for call in self.open_calls[rank] if self._is_completed_by_peer(rank, call)]
        if self.dumps[rank].gloo or all(call.call.operation in ROOTED for call in passed):
            return None
        return max(group_by(passed, lambda call: call.group).values(), key=len)[0]

    def _waits_of(self, rank: int) -> list[_Wait]:
        """Return calls in which a rank waits for absent peers, else for delayed peers.

        Absent peers have not entered the call. Delayed peers have a different call as their first open call.
        """
        calls = [
            call
            for call in self.open_calls[rank]
            if call.between_two or self._places.get(self.group(rank, call), {}).get(rank) == (call.number, True)
        ]
        absent = [(rank, call, peers) for call in calls if (peers := self._absent_peers(rank, call) - {rank})]
        return absent or [(rank, call, peers) for call in calls if (peers := self._delayed_peers(rank, call))]

    def _absent_peers(self, rank: int, call: RecordedCall) -> frozenset[int]:
        if call.between_two:
            answers = any(e.peer == rank and e.group == call.group for e in self.open_calls.get(call.peer, ()))
            return frozenset({call.peer} if call.peer >= 0 and (not answers or call.peer in self.devices) else ())
        key = group, number = self.group(rank, call), call.number
        if key not in self._known_absent:
            self._known_absent[key] = frozenset(
                peer
                for peer, position in self._places[group].items()
                if position < (number, True) or (position[0] == number and peer in self.devices)
            )
        return self._known_absent[key]

    def _delayed_peers(self, rank: int, call: RecordedCall) -> frozenset[int]:
        peers = {call.peer} if call.between_two else {*self.group(rank, call)[1]}
        first_calls = {peer: calls[0] for peer in peers - {rank} if (calls := self.open_calls.get(peer))}
        return frozenset(
            peer
            for peer, first in first_calls.items()
            if first.group != call.group or (first.peer != rank if call.between_two else first.between_two)
        )

    def furthest(self, rank: int, call: RecordedCall) -> tuple[list[int], int]:
        """Return the ranks furthest ahead in a group, and their last completed collective's number."""
        number = self._furthest[group := self.group(rank, call)]
        return [peer for peer, position in self._places[group].items() if position[0] == number], number - 1

    def waits_on(self, roots: Collection[int]) -> list[_Wait]:
        """Return waits for ranks in `roots`, earliest first; each wait names only these ranks."""
        waits = ((rank, call, peers & {*roots}) for all_waits in self.waits.values() for rank, call, peers in all_waits)
        return sorted((wait for wait in waits if wait[2]), key=lambda wait: wait[1].created)

    def who_waits(self, roots: Collection[int]) -> tuple[list[str], set[int]]:
        """Return evidence of waits for `roots`, direct waits first, and all waiting ranks."""
        reached, direct, indirect = set(roots), list[_Wait](), list[_Wait]()
        while True:
            waiting = {rank: waits for rank, waits in self.waits.items() if rank not in reached}
            first = (next((wait for wait in waits if wait[2] & reached), None) for waits in waiting.values())
            new = [(rank, call, peers & reached) for rank, call, peers in filter(None, first)]
            if not new:
                return first_lines([*self._evidence_lines(direct), *self._evidence_lines(indirect)]), reached - {*roots}
            indirect += new if direct else []
            direct = direct or new
            reached |= {rank for rank, *_ in new}

    def circle(self) -> list[_Wait]:
        """Return a circular wait, in which each rank waits for one rank, or []."""
        waits = {rank: rank_waits[0] for rank, rank_waits in self.waits.items() if rank_waits}
        circle = find_circle({rank: (call.call, sorted(peers)) for rank, call, peers in waits.values()})
        return [(rank, waits[rank][1], frozenset({peer})) for rank, peer in circle]

    def hang_finding(
        self,
        code: str,
        roots: Sequence[int],
        cause: str,
        fix: str,
        evidence: Sequence[str] = (),
        call: RecordedCall | None = None,
    ) -> list[Finding]:
        """Create a finding on `roots`, the ranks that other ranks wait for.

        `cause` begins the message. The location is the line of `call`, by default the first wait for a rank of `roots`.
        """
        lines, waiting = self.who_waits(roots)
        calls = [call] if call is not None else [call for _, call, _ in self.waits_on(roots)]
        others = "the other " if len(waiting) + len(roots) == len(self.dumps.keys() | self.missing) else ""
        who = f"{others}{len(waiting)} ranks wait" if len(waiting) > 1 else f"{format_ranks(waiting)} waits"
        return new_finding(
            code,
            sorted({call.call.operation.partition(" ")[0] for call in calls}),
            f"{capitalized(cause)}{f', and {who} for that' if waiting else ''}.",
            ranks=roots,
            location=Location.parse(next((call.call.location for call in calls if call.call.location), "")),
            evidence=[*first_lines(evidence), *lines],
            fix=fix,
        )

    def circle_finding(self, code: str, circle: Sequence[_Wait], fix: str) -> list[Finding]:
        """Create a finding on a circular wait."""
        ranks = sorted(rank for rank, *_ in circle)
        evidence = [f"rank {rank} waits for rank {min(peers)} in {self.words(call)}" for rank, call, peers in circle]
        return self.hang_finding(code, ranks, f"{format_ranks(ranks)} wait for each other", fix, evidence, circle[0][1])

    def _evidence_lines(self, waits: Sequence[_Wait]) -> list[str]:
        kinds = group_by(
            waits, lambda wait: (self._group_description(wait[1]), _op_name(wait[1]), wait[1].group == DEFAULT_GROUP)
        )
        return [self._evidence_line(kind) for kind in sorted(kinds.values(), key=len, reverse=True)]

    def _evidence_line(self, waits: Sequence[_Wait]) -> str:
        ranks = [rank for rank, *_ in waits]
        words = {self.words(call) for _, call, _ in waits}
        names = {call.group for _, call, _ in waits}
        description = self._group_description(waits[0][1]) or "process groups"
        label = words.pop() if len(words) == 1 else f"{_op_name(waits[0][1])} of {description} ({len(names)} groups)"
        peers = {peer for *_, peers in waits for peer in peers}
        return f"{_format_few(ranks)} {plural_verb('waits', 'wait', ranks)} for {_format_few(peers)} in {label}"

    def words(self, call: RecordedCall) -> str:
        """Describe a call in words, with its number and process group."""
        label = _op_name(call) if call.between_two else f"{call.call}, number {call.number}"
        if call.group == DEFAULT_GROUP:
            return label
        which, description = f"process group {call.group}", self._group_description(call)
        return f"{label} of {f'{description} ({which})' if description else which}"

    def _group_description(self, call: RecordedCall) -> str:
        descriptions = (dump.descriptions for dump in self.dumps.values())
        return next((names[call.group] for names in descriptions if call.group in names), "")


def _positions(
    dumps: Mapping[int, RankDump], name: str, members: Sequence[int]
) -> Iterator[tuple[int, tuple[int, bool]]]:
    """Yield (rank, position): each member's progress in the collectives of process group `name`.

    A position is (number, True) of the first open collective, else (number, False) of the next collective.
    """
    present = {rank: dumps[rank] for rank in members if rank in dumps}
    by_rank = {rank: dump.collectives(name) for rank, dump in present.items()}
    largest = max((call.number for calls in by_rank.values() for call in calls), default=0)
    yield from ((rank, (0, False)) for rank in members if rank not in present)
    for rank, calls in by_rank.items():
        dump = present[rank]
        # ended calls may be in no dump; a number above all in dumps counts sends and receives
        last = calls[-1].number if calls else dump.enqueued.get(name, 0)
        if (first := next((call.number for call in calls if not call.ended), None)) is not None:
            yield rank, (first, True)
        elif calls or not dump.wrapped or name in dump.enqueued:
            yield rank, (last + 1 if last <= largest else 1, False)


def _op_name(call: RecordedCall) -> str:
    return "send or recv" if call.between_two else call.call.operation


def _format_few(ranks: Collection[int]) -> str:
    return f"{len(ranks)} ranks" if (words := format_ranks(ranks)).endswith(" more") else words


def first_lines(lines: Sequence[str]) -> list[str]:
    num_left = len(lines) - _MOST_LINES
    return [*lines[:_MOST_LINES], f"and {num_left} more"] if num_left > 1 else [*lines]
