"""DDP4xx: the log of the collectives that the user's code calls, and what it says when ranks fall out of step.

Every rank writes a line before it enters a collective, so that the log survives a hang, an abort and a kill; the
matching across ranks is a pure function of the logs. Collectives that the DDP reducer makes in C++ are not in it:
where a rank waits in those, its place ("step 1: backward") tells.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ddpcheck import rank as this_rank
from ddpcheck.errors import RankError, RankFailure
from ddpcheck.evidence import Call
from ddpcheck.findings import Finding, Location, Severity
from ddpcheck.locate import user_location
from ddpcheck.rules import RULES
from ddpcheck.wording import odd_ranks, spelled
from ddpcheck.worlds.failures import phrase

if TYPE_CHECKING:
    from ddpcheck.harness import World

_MATCHED_BY_PAYLOAD = ("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter")
_MATCHED_BY_NAME = (
    *("reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather", "scatter", "barrier", "monitored_barrier"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "all_gather_coalesced"),
    *("all_reduce_coalesced",),
)


def log_path(directory: Path, rank: int) -> Path:
    """Where `rank` keeps its log."""
    return directory / f"collectives-{rank}.log"


def read_log(directory: Path, rank: int) -> list[Call]:
    """The calls that `rank` has entered so far."""
    try:
        text = log_path(directory, rank).read_text()
    except FileNotFoundError:
        return []
    calls = []
    for line in text.splitlines():
        try:
            data = json.loads(line)
        except ValueError:
            break  # a line that was being written when the rank died
        calls.append(Call(**{**data, "members": tuple(data["members"])}))
    return calls


_thread = threading.local()


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Collectives that ddpcheck itself makes in the block stay out of the log."""
    depth = getattr(_thread, "depth", 0)
    _thread.depth = depth + 1
    try:
        yield
    finally:
        _thread.depth = depth


def record_collectives(directory: Path, rank: int) -> None:
    """From now on, log the collectives of this process; to be called before the user's code is imported."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    descriptor = os.open(log_path(directory, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for name in (*_MATCHED_BY_PAYLOAD, *_MATCHED_BY_NAME):
        original = getattr(distributed_c10d, name, None)
        if original is not None:
            logged = _logged(name, original, descriptor)
            setattr(distributed_c10d, name, logged)
            if getattr(dist, name, None) is original:
                setattr(dist, name, logged)


def _logged(name: str, original: Callable[..., Any], descriptor: int) -> Callable[..., Any]:
    @functools.wraps(original)
    def logged(*args: Any, **kwargs: Any) -> Any:
        if getattr(_thread, "depth", 0):
            return original(*args, **kwargs)
        call = _describe_call(name, original, args, kwargs)
        os.write(descriptor, (json.dumps(asdict(call)) + "\n").encode())
        this_rank.set_collective(str(call))
        try:
            with unlogged():
                return original(*args, **kwargs)
        finally:
            this_rank.set_collective("")

    return logged


def _describe_call(name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    import inspect

    import torch
    import torch.distributed as dist

    try:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
    except TypeError:
        given = {}  # the call itself will raise, and say why
    group = given.get("group") or dist.group.WORLD
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    tensors += [
        t
        for value in (*args, *kwargs.values())
        if isinstance(value, list | tuple)
        for t in value
        if isinstance(t, torch.Tensor)
    ]
    payload = []
    if name in _MATCHED_BY_PAYLOAD and tensors:
        first = given.get("tensor", tensors[0])
        first = first if isinstance(first, torch.Tensor) else tensors[0]
        payload.append(f"{str(first.dtype).removeprefix('torch.')} of shape {tuple(first.shape)}")
    root = next((given[key] for key in ("src", "dst", "group_src", "group_dst") if given.get(key) is not None), None)
    if root is not None:
        payload.append(f"root {root}")
    try:
        members, group_name = (
            tuple(dist.get_process_group_ranks(group)),
            str(group.group_name) if group is not None else "",
        )
    except (AttributeError, ValueError, RuntimeError, KeyError):
        members, group_name = (), ""
    where = user_location(sys._getframe(2))
    return Call(
        operation=name,
        group=group_name,
        members=members,
        payload=", ".join(payload),
        place=this_rank.own_slots()[0],
        location=str(where) if where else "",
        elements=max((tensor.numel() for tensor in tensors if tensor.is_floating_point()), default=0),
        carries_gradient=any(tensor.requires_grad for tensor in tensors),
        differentiable=_called_by_autograd_function(),
    )


def _called_by_autograd_function() -> bool:
    from torch.autograd.function import BackwardCFunction, FunctionCtx

    frame: FrameType | None = sys._getframe(3)
    for _ in range(12):
        if frame is None:
            return False
        first = frame.f_code.co_varnames[:1]
        if first and isinstance(frame.f_locals.get(first[0]), FunctionCtx | BackwardCFunction):
            return True
        frame = frame.f_back
    return False


# Judging


def judge_collectives(logs: Sequence[Sequence[Call]], at_work: Collection[int] = ()) -> list[Finding]:
    """At most one finding a process group: the first place at which the ranks' collectives do not match (DDP403).

    Args:
        logs: The calls of each rank.
        at_work: Ranks that are neither finished nor in a collective, and so may still come to the next one.
    """
    findings = []
    groups = {call.group: call.members for log in logs for call in log}
    for group, members in sorted(groups.items()):
        ranks = [rank for rank in members if rank < len(logs)]
        sequences = [[call for call in logs[rank] if call.group == group] for rank in ranks]
        place = _first_mismatch(sequences)
        if place is None:
            continue
        found = [sequence[place] if place < len(sequence) else None for sequence in sequences]
        calls = [call for call in found if call is not None]
        absent = [rank for rank, call in zip(ranks, found, strict=True) if call is None]
        if absent and len({_signature(call) for call in calls}) == 1 and set(absent) <= set(at_work):
            continue
        if absent:
            odd = tuple(absent)
            there = [rank for rank in ranks if rank not in absent]
            message = f"{spelled(there).capitalize()} called {calls[0]}, and {spelled(absent)} never did."
        else:
            odd = tuple(ranks[index] for index in odd_ranks([_signature(call) for call in calls]))
            message = f"Collective number {place} of the ranks does not match."
        findings.append(
            Finding(
                code="DDP403",
                subjects=tuple(sorted({call.operation for call in calls})),
                message=message,
                severity=RULES["DDP403"].severity,
                ranks=odd,
                location=_parse_location(calls[0].location),
                evidence=tuple(
                    f"rank {rank}, collective number {place}: {call if call is not None else 'none'}"
                    + (f", in {call.place}" if call is not None and call.place else "")
                    for rank, call in zip(ranks, found, strict=True)
                ),
            )
        )
    return findings


def _signature(call: Call) -> tuple[str, str]:
    return (call.operation, call.payload)


def _first_mismatch(sequences: Sequence[Sequence[Call]]) -> int | None:
    for place in range(max(map(len, sequences), default=0)):
        signatures = {_signature(sequence[place]) if place < len(sequence) else None for sequence in sequences}
        if len(signatures) > 1:
            return place
    return None


def _parse_location(text: str) -> Location | None:
    path, _, line = text.rpartition(":")
    return Location(path, int(line)) if path and line.isdigit() else None


class DeadlockWatch:
    """Sees a hang before the deadline: a rank waits in a collective that its peer has finished without.

    Handed to `World` as `watch`. It speaks only when nothing has moved for `patience` seconds.
    """

    def __init__(self, patience: float = 2.0) -> None:
        self._patience = patience
        self._since: dict[tuple[int, ...], float] = {}

    def __call__(self, world: World, finished: frozenset[int], running: frozenset[int]) -> str | None:
        waits = {rank: this_rank.read_slots(world.directory, rank)[1] for rank in running}
        waiting = {rank for rank, collective in waits.items() if collective}
        if not waiting or waiting != running:
            self._since.clear()  # somebody is at work: it may still come
            return None
        sizes = tuple(
            log_path(world.directory, rank).stat().st_size if log_path(world.directory, rank).exists() else 0
            for rank in range(world.world_size)
        )
        since = self._since.setdefault(sizes, time.monotonic())
        if time.monotonic() - since < self._patience:
            return None
        findings = judge_collectives([read_log(world.directory, rank) for rank in range(world.world_size)])
        return findings[0].message.rstrip(".") if findings else None


def judge_failure(error: RankError, logs: Sequence[Sequence[Call]], world_size: int) -> list[Finding]:
    """The finding behind a world that failed: DDP401 to DDP404, the root cause only.

    Args:
        error: What the world raised.
        logs: The collectives of each rank until then.
        world_size: The number of ranks.
    """
    if not error.failures:
        return []
    blamed = [failure for failure in error.failures if failure.kind in ("raised", "exited", "died")]
    stuck = [failure for failure in error.failures if failure.kind == "stuck"]
    evidence = tuple(f"{spelled([failure.rank])}: {_tell(failure)}" for failure in error.failures)
    if error.results:
        evidence += (f"{spelled(list(error.results))}: had finished",)
    mismatch = judge_collectives(logs, at_work={failure.rank for failure in stuck if not failure.collective})
    first = blamed[0] if blamed else None
    if mismatch and (first is None or _is_of_communication(first.message)):
        finding = mismatch[0]
        return [_with_evidence(finding, evidence)]
    if first is None:
        ranks = tuple(failure.rank for failure in stuck)
        idle = [f for f in stuck if not f.collective]
        lead = (idle or stuck or list(error.failures))[0]
        return [
            Finding(
                code="DDP402",
                subjects=(lead.place or "run",),
                message=f"{spelled(ranks).capitalize()} did not finish {lead.place or 'the run'}: {_tell(lead)}.",
                severity=RULES["DDP402"].severity,
                ranks=tuple(failure.rank for failure in idle) if len(idle) < len(stuck) else ranks,
                location=_parse_location(lead.location),
                evidence=evidence + tuple(_stack_lines(stuck)),
            )
        ]
    same = tuple(f.rank for f in blamed if (f.kind, f.type) == (first.kind, first.type))
    ranks = () if len(same) == world_size else same
    code = "DDP401" if first.kind == "raised" else "DDP404"
    who = "Every rank" if not ranks and world_size > 1 else spelled(same).capitalize()
    return [
        Finding(
            code=code,
            subjects=(first.place or "run",),
            message=f"{who} {phrase(first).rstrip('.')}{f', in {first.place}' if first.place else ''}.",
            severity=Severity.ERROR,
            ranks=ranks,
            location=_parse_location(first.location),
            evidence=evidence if len(evidence) > 1 else (),
        )
    ]


def _with_evidence(finding: Finding, more: tuple[str, ...]) -> Finding:
    import dataclasses

    return dataclasses.replace(finding, evidence=finding.evidence + more)


_COMMUNICATION_WORDS = ("gloo", "connection", "nccl", "timed out", "processgroup", "sigabrt", "abort", "op.preamble")


def _is_of_communication(message: str) -> bool:
    """Whether an error is how a backend fails when its peers do something else (gloo raises or aborts, nccl waits)."""
    return any(word in message.lower() for word in _COMMUNICATION_WORDS)


def _tell(failure: RankFailure) -> str:
    if failure.kind != "stuck":
        return phrase(failure)
    where = failure.place or "at work"
    if failure.collective:
        return f"waits in {failure.collective}, in {where}"
    return f"still in {where}{f', at {failure.location}' if failure.location else ''}"


def _stack_lines(failures: Sequence[RankFailure]) -> Iterator[str]:
    for failure in failures:
        for line in failure.stack.splitlines()[:8]:
            yield f"rank {failure.rank} stack: {line.strip()}"
