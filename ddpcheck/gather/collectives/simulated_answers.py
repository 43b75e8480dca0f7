"""What simulated ranks have sent each other, so that they can be simulated again with the answers of a real world.

Only small tensors of collectives that Python calls: those on which a branch may depend, as a vote whether to skip a
step. Large ones are answered as if all ranks had sent the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ddpcheck.gather.collectives.collective_log import in_collective

_LARGEST = 1024  # bytes of one rank
_REDUCED_BY = {"SUM": "sum", "PRODUCT": "prod", "AVG": "mean", "MIN": "amin", "MAX": "amax"}
_BETWEEN = ("ddpcheck.", "torch.distributed.distributed_c10d", "torch.distributed.c10d_logger", "typing_extensions")
_Tensors = list[torch.Tensor]
_Parts = list[_Tensors | None]  # of one call; `None` for what is too large


class SimulatedAnswers:
    """The sending side of one rank, and what it is answered."""

    def __init__(self, folder: Path, rank: int, called: Callable[[], int]) -> None:
        """Begin; answers are those of `combine` on an earlier round. `called` counts the collectives of Python."""
        self._folder = folder
        self._rank = rank
        self._called = called
        self._last = -1
        self._sent: dict[str, tuple[tuple[int, ...], list[_Parts]]] = {}  # by group: its ranks, and what is sent

    def ask(self, group: Any, name: str, tensors: Any) -> list[_Tensors] | None:
        """What each rank of a group sends in the collective in which this one sends `tensors`, where that is known.

        One that Python calls may make several, as that of objects sends their sizes first: all of them, or none.
        """
        if not in_collective() or _is_made_by_torch(sys._getframe(1)):
            return None
        members, calls = self._sent.setdefault(name, (tuple(dist.get_process_group_ranks(group)), []))
        if self._called() != self._last:
            self._last = self._called()
            calls.append([])
        small = sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= _LARGEST
        calls[-1].append([tensor.detach().clone() for tensor in tensors] if small else None)
        with contextlib.suppress(OSError, IndexError):
            of_ranks: list[list[_Tensors]] = torch.load(self._folder / _file_of(name, len(calls) - 1))
            sent = [parts[len(calls[-1]) - 1] for parts in of_ranks]
            if list(map(_form, sent[members.index(self._rank)])) == list(map(_form, tensors)):
                return sent
        return None

    def write(self) -> None:
        """Leave what this rank has sent."""
        torch.save(self._sent, self._folder / f"given-{self._rank}")


def _is_made_by_torch(frame: FrameType | None) -> bool:
    """Whether a part of torch makes a collective, as `fully_shard` does, of which no branch of the program depends."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__", "")).startswith("torch.")


def reduced(sent: list[torch.Tensor], operation: Any) -> torch.Tensor | None:
    """What a reduction gives of the tensors of all ranks; `None` for an operation that is not known."""
    how = next((how for name, how in _REDUCED_BY.items() if operation == getattr(dist.ReduceOp, name)), "")
    if not how:
        return None
    stacked = torch.stack(sent)
    wide = stacked if stacked.is_floating_point() or stacked.is_complex() or how != "mean" else stacked.double()
    found: torch.Tensor = getattr(wide, how)(0)
    return found


def combine(world_size: int, folder: Path) -> str:
    """Make answers of what all ranks have sent where all ranks of a group have sent tensors alike.

    Returns:
        A digest of what was sent and is not the same on all ranks; empty where that is nothing.
    """
    sent: dict[tuple[str, tuple[int, ...], int], list[_Parts]] = {}
    for rank in range(world_size):
        for name, (members, calls) in torch.load(folder / f"given-{rank}").items():
            for number, parts in enumerate(calls):
                sent.setdefault((name, members, number), []).append(parts)
    seen = hashlib.blake2b(digest_size=16)
    differ = False
    for key, of_ranks in sent.items():
        said = [
            repr([None if part is None else [(_form(one), one.tolist()) for one in part] for part in parts])
            for parts in of_ranks
        ]
        if len(set(said)) > 1:
            differ = True
            seen.update(repr((key, said)).encode())
        name, members, number = key
        if len(of_ranks) == len(members) and (alike := _made_alike(of_ranks)) is not None:
            torch.save(alike, folder / _file_of(name, number))
    return seen.hexdigest() if differ else ""


def _made_alike(of_ranks: list[_Parts]) -> list[list[_Tensors]] | None:
    """What the ranks have sent in one call, if that is alike on all of them; the bytes of objects are padded to be."""
    found: list[list[_Tensors]] = [[] for _ in of_ranks]
    if len({len(parts) for parts in of_ranks}) > 1:
        return None
    for same in zip(*of_ranks, strict=True):
        known = [part for part in same if part is not None]
        longest = max((len(part[0]) for part in known if _is_object(part)), default=0)
        if longest and all(map(_is_object, known)):
            known = [[torch.nn.functional.pad(part[0], (0, longest - len(part[0])))] for part in known]
        if len(known) < len(same) or len({tuple(map(_form, part)) for part in known}) > 1:
            return None
        for parts, part in zip(found, known, strict=True):
            parts.append(part)
    return found


def _is_object(part: _Tensors) -> bool:
    return len(part) == 1 and part[0].dtype == torch.uint8 and part[0].dim() == 1


def _file_of(name: str, number: int) -> str:
    return f"answer-{name}-{number}".replace("/", "_")


def _form(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape
