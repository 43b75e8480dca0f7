"""The ranks of a job that still runs, by two looks at torch's debug server: what they are in, and who gets on.

The recorder of a rank is read at another moment than that of the next, and a rank that works may come to what others
wait in. So a rank counts as waiting only if nothing of it has changed between the looks and its main thread is in torch
where that waits for others; any other is at work, as far as can be seen.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddpcheck.findings.errors import TargetError, UsageError
from ddpcheck.findings.replace import replace
from ddpcheck.findings.stacks import (
    collective_of,
    has_no_python_left,
    of_main_thread,
    own_stack,
    program_lines,
    region_of,
    waits_for_others,
    waits_for_result,
)
from ddpcheck.findings.wording import format_ranks, group_by
from ddpcheck.report.hang.debug_server import DebugServer
from ddpcheck.report.hang.flight_recorder import Entry, RankDump, as_rank_dump

_BETWEEN = 3.0  # seconds between the two looks
_AS_ANOTHER = {"reduce_scatter": "all_reduce", "reduce_scatter_tensor": "all_reduce"}  # what gloo records


@dataclass(frozen=True, slots=True)
class RanksSeen:
    """What is known of the ranks of a job.

    Attributes:
        dumps: What the recorder of each held, of those that have one.
        at_work: Those that may still come to what others wait in.
        doing: What ranks do, in words that come after the rank's name, where more than the dump tells it.
        lines: Of the program at which each stands, innermost first, where they are known.
        over: Ranks whose program has run to its end.
        missing: Why others have no dump, by rank.
        source: What a dump is here, in words.
        is_live: Whether the job was there when it was asked.
    """

    dumps: Mapping[int, RankDump]
    at_work: frozenset[int] = frozenset()
    doing: Mapping[int, str] = field(default_factory=dict)
    lines: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    over: frozenset[int] = frozenset()
    missing: Mapping[int, str] = field(default_factory=dict)
    source: str = "dump"
    is_live: bool = False


def look_at_ranks(server: DebugServer) -> RanksSeen:
    """What the ranks of a job do, by its debug server; takes some seconds more than four requests.

    Raises:
        TargetError: The server or all ranks do not answer.
        UsageError: What answers is no debug server.
    """
    before, _ = _recorders(server)
    stacks_before = _stacks(server)
    time.sleep(_BETWEEN)
    dumps, problems = _recorders(server)
    stacks = _stacks(server)
    if not dumps:
        raise TargetError(f"no rank has answered the debug server at {server.address} ({said_of_missing(problems)})")
    at_work, doing, over = set(), {}, set()
    for rank, dump in dumps.items():
        stack = stacks.get(rank, "")
        frames, lines = own_stack(stack), program_lines(stack)
        at = f" at {lines[0]}" if lines else " in code of a library"
        is_in_call = any(not entry.ended for entry in dump.entries)
        changed = rank in before and _states(before[rank]) != _states(dump)
        if changed or (stack and stacks_before.get(rank, stack) != stack):
            at_work.add(rank)
            doing[rank] = f"was{at}, and got on" if frames else "has got on"
        elif has_no_python_left(stack):
            over.add(rank)
            doing[rank] = "has run to its end"
        elif frames and not waits_for_others(frames) and not (is_in_call and waits_for_result(frames)):
            at_work.add(rank)
            doing[rank] = f"is{at}, and in no collective"
        elif not is_in_call and (collective := collective_of(frames)):  # the store, say: nothing is recorded of it
            doing[rank] = f"waits in {collective}"
        dumps[rank] = _with_line(dump, stack)
    lines_of = {rank: program_lines(stack) for rank, stack in stacks.items()}
    return RanksSeen(dumps, frozenset(at_work), doing, lines_of, frozenset(over), problems, "answer", is_live=True)


def _recorders(server: DebugServer) -> tuple[dict[int, RankDump], dict[int, str]]:
    """What each rank's recorder holds, and why others have given nothing."""
    answers, problems = server.flight_recorder()
    active_only = False
    if not any(answer["entries"] for answer in answers.values()):
        of_nccl, silent = server.flight_recorder(nccl=True)
        if any(answer["entries"] for answer in of_nccl.values()):
            answers, problems, active_only = of_nccl, silent, True
    size, dumps = len(answers) + len(problems), {}
    for rank, answer in answers.items():
        try:
            dump = as_rank_dump(answer, f"the answer of rank {rank}")
        except UsageError as error:
            raise UsageError(f"{error}, from {server.address}") from error
        dumps[rank] = replace(dump, world_size=size, active_only=active_only)
    return dumps, problems


def _stacks(server: DebugServer) -> dict[int, str]:
    """The stack of the main thread of each rank that gives one."""
    return {rank: of_main_thread(text) for rank, text in server.stacks().items()}


def _states(dump: RankDump) -> list[tuple[str, int, bool]]:
    """What changes as long as a rank calls collectives, or one ends."""
    return [(entry.group, entry.number, entry.ended) for entry in dump.entries]


def _with_line(dump: RankDump, stack: str) -> RankDump:
    """A dump whose last calls, if the stack is in them, have the line; the server's JSON has none."""
    frames, lines = own_stack(stack), program_lines(stack)
    entries = list(dump.entries)
    last = next((at for at in range(len(entries) - 1, -1, -1) if not entries[at].ended), None)
    if last is None or not lines or not waits_for_others(frames):
        return dump
    operation = entries[last].call.operation
    name = collective_of(frames).partition(" ")[0]
    if name and operation in (_AS_ANOTHER.get(name, name), name.removesuffix("_object"), name.partition("_object")[0]):
        entries[last] = _at(entries[last], lines)
    elif not name and region_of(frames):
        for at in range(last, -1, -1):  # the buckets of a backward pass
            if entries[at].ended or entries[at].call.operation != operation:
                break
            entries[at] = _at(entries[at], lines)
    return replace(dump, entries=entries)


def _at(entry: Entry, lines: Sequence[str]) -> Entry:
    return replace(entry, call=replace(entry.call, location=lines[0], callers=tuple(lines)))


def said_of_missing(problems: Mapping[int, str]) -> str:
    """Why ranks have no dump, in words."""
    reasons = group_by(problems, lambda rank: problems[rank])
    return "; ".join(f"{format_ranks(ranks)}: {why}" for why, ranks in reasons.items())
