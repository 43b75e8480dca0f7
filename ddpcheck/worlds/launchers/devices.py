"""The GPU of each rank, and the backend of all: pure, from the devices of every rank, so that all decide alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.wording import agreeing, format_ranks


@dataclass(frozen=True, slots=True)
class RankDevices:
    """The machine and the GPUs of one rank.

    Attributes:
        machine: That it is on.
        local_rank: As its launcher says; `None` where it does not.
        gpus: That it sees, in order: a name for each, which no other GPU has on any machine.
        backend: That it has been asked for; empty where the choice is ours.
        master: The IPv4 address by which it reaches the machine of rank 0; empty where that is not known.
    """

    machine: str
    local_rank: int | None
    gpus: tuple[str, ...]
    backend: str = ""
    master: str = ""


def local_ranks(seats: Sequence[RankDevices]) -> list[int]:
    """The local rank of each, counted on its machine where its launcher has not said it."""
    counted: Counter[str] = Counter()
    found = []
    for seat in seats:
        found.append(counted[seat.machine] if seat.local_rank is None else seat.local_rank)
        counted[seat.machine] += 1
    return found


def choose_gpus(seats: Sequence[RankDevices]) -> list[int | None]:
    """The GPU of each rank, by its number among those that it sees; `None` where it sees none.

    Ranks that see the same ones take them in order of their local ranks, from the first one again where there are more
    ranks than GPUs. A rank that sees but one of its own, as SLURM may have it, takes that.
    """
    local = local_ranks(seats)
    order = sorted(range(len(seats)), key=lambda rank: (local[rank], rank))
    taken: Counter[tuple[str, ...]] = Counter()
    chosen: list[int | None] = [None] * len(seats)
    for rank in order:
        if gpus := seats[rank].gpus:
            chosen[rank] = taken[gpus] % len(gpus)
            taken[gpus] += 1
    return chosen


def choose_backend(seats: Sequence[RankDevices]) -> str:
    """The backend of all: the one that they have been asked for, else `nccl` with a GPU for each, else `gloo`.

    Raises:
        UsageError: They have been asked for different ones, or for `nccl` without a GPU for each.
    """
    asked = {seat.backend: rank for rank, seat in reversed(list(enumerate(seats)))}
    if len(asked) > 1:
        said = ", ".join(f"rank {rank} for {backend or 'none'}" for backend, rank in sorted(asked.items()))
        raise UsageError(f"The ranks were asked for different backends: {said}; pass the same on every rank.")
    (backend,) = asked
    without = [rank for rank, seat in enumerate(seats) if not seat.gpus]
    names = ["" if index is None else seat.gpus[index] for seat, index in zip(seats, choose_gpus(seats), strict=True)]
    shared = [rank for rank, name in enumerate(names) if name and names.count(name) > 1]
    if "nccl" in backend:
        if without:
            raise UsageError(
                f"Backend {backend!r} needs a GPU for every rank, and {format_ranks(without)} "
                f"{agreeing('has', without)} none; pass backend='gloo', or see torch.cuda.is_available()."
            )
        if shared:
            raise UsageError(
                f"Backend {backend!r} needs a GPU for every rank, and {format_ranks(shared)} would share; "
                "pass backend='gloo', or start no more ranks on a machine than it has GPUs."
            )
    return backend or ("gloo" if without or shared else "nccl")
