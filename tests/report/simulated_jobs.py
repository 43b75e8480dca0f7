"""Flight Recorder dumps of jobs that hang, in the form of nccl, as devices and hosts of many ranks would leave them.

A rank enqueues calls without waiting for them, and its device takes them in order: a collective ends when it is the
first one of all its ranks, a send when its recv is, too.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_QUEUE = 12  # calls that a rank enqueues before it waits for the first of them
_SECOND = 1_000_000_000


@dataclass(frozen=True)
class Kind:
    """A call: a collective of the group of this description, or a send or receive."""

    group: str
    operation: str = "all_reduce"
    sizes: tuple[int, ...] = (8, 8)
    stage: int = 0  # how far in the group the other rank of a send or receive is


@dataclass
class Job:
    """Ranks in a mesh of pipeline, data and tensor parallelism, and what goes wrong on them."""

    tensor: int = 1
    data: int = 1
    pipeline: int = 1
    steps: int = 3
    hosts: Mapping[int, int] = field(default_factory=dict)  # rank: after how many calls it makes no more
    devices: Mapping[int, int] = field(default_factory=dict)  # rank: after how many calls none is seen to end
    mismatches: Mapping[int, tuple[int, Kind]] = field(default_factory=dict)  # rank: which call is another one

    def __post_init__(self) -> None:
        self.size = self.tensor * self.data * self.pipeline
        self.groups: dict[str, list[tuple[int, ...]]] = {"default_pg": [tuple(range(self.size))]}
        ranks = range(self.size)
        by_stage = self.tensor * self.data
        self.groups["TENSOR"] = _split(ranks, lambda rank: rank // self.tensor)
        self.groups["DATA"] = _split(ranks, lambda rank: (rank // by_stage, rank % self.tensor))
        self.groups["PIPELINE"] = _split(ranks, lambda rank: rank % by_stage)
        all_groups = [(name, members) for name, same in self.groups.items() for members in same]
        self.names = {group: str(number) for number, group in enumerate(all_groups)}
        self.members = {(name, rank): members for name, members in all_groups for rank in members}

    def program(self, rank: int) -> Iterator[Kind]:
        stage = rank // (self.tensor * self.data)
        for step in range(self.steps):
            if stage > 0:
                yield Kind("PIPELINE", "recv", stage=stage - 1)
            for layer in range(2 if self.tensor > 1 else 0):
                yield Kind("TENSOR", "_all_gather_base", (4, 8 + layer))
                yield Kind("TENSOR", "_reduce_scatter_base", (8, 8 + layer))
            if stage < self.pipeline - 1:
                yield Kind("PIPELINE", "send", stage=stage + 1)
            if self.data > 1:
                yield Kind("DATA", "all_reduce", (100 + step,))
        if self.data > 1:
            yield Kind("default_pg", "all_reduce", (1,))

    def run(self) -> list[dict[str, Any]]:
        """The dumps of all ranks, once nothing moves any more."""
        programs = [list(self.program(rank)) for rank in range(self.size)]
        for rank, (at, kind) in self.mismatches.items():
            programs[rank][at] = kind
        for rank, most in self.hosts.items():
            del programs[rank][most:]
        done = [0] * self.size
        while moved := self._ended(programs, done):
            for rank in moved:
                done[rank] += 1
        return [self._dump(rank, programs[rank], done[rank]) for rank in range(self.size)]

    def _ended(self, programs: Sequence[Sequence[Kind]], done: Sequence[int]) -> set[int]:
        """Ranks whose first call ends now."""
        first = {rank: programs[rank][at] for rank, at in enumerate(done) if at < len(programs[rank])}
        moved = set()
        for rank, kind in first.items():
            members = self.members[kind.group, rank]
            if kind.operation in ("send", "recv"):
                peer = members[kind.stage]
                back = Kind("PIPELINE", "recv" if kind.operation == "send" else "send", stage=members.index(rank))
                ends = first.get(peer) == back and self._has_device({peer, rank}, done)
            else:
                ends = all(first.get(member) == kind for member in members) and self._has_device(members, done)
            if ends:
                moved.add(rank)
        return moved

    def _has_device(self, ranks: Any, done: Sequence[int]) -> bool:
        return all(done[rank] < self.devices[rank] + 3 for rank in ranks if rank in self.devices)

    def _dump(self, rank: int, program: Sequence[Kind], done: int) -> dict[str, Any]:
        done = min(done, self.devices.get(rank, done))
        entries: list[dict[str, Any]] = []
        counts: dict[tuple[str, bool], int] = {}
        status: dict[str, dict[str, int]] = {}
        mine = sorted(int(name) for (_, members), name in self.names.items() if rank in members)
        config = {
            name: {"name": name, "desc": description, "ranks": str(list(members))}
            for (description, members), name in self.names.items()
            if rank in members
        }
        for record, kind in enumerate(program[: done + _QUEUE]):
            members = self.members[kind.group, rank]
            name = self.names[kind.group, members]
            is_p2p = kind.operation in ("send", "recv")
            number = counts[name, is_p2p] = counts.get((name, is_p2p), 0) + 1
            arrow = f" {members.index(rank)}{'->' if kind.operation == 'send' else '<-'}{kind.stage}" if is_p2p else ""
            status[str(mine.index(int(name)))] = {"last_enqueued_collective": number}
            call = {"record_id": record, "profiling_name": f"nccl:{kind.operation}{arrow}", "is_p2p": is_p2p}
            call |= {"pg_id": mine.index(int(name)), "process_group": (name, kind.group), "timeout_ms": 600_000}
            call |= {"collective_seq_id": 0 if is_p2p else number, "p2p_seq_id": number if is_p2p else 0}
            call |= {"input_sizes": [list(kind.sizes)], "output_sizes": [list(kind.sizes)]}
            call |= {"input_dtypes": ["Float"], "output_dtypes": ["Float"]}
            call |= {"state": "completed" if record < done else "scheduled", "retired": record < done}
            entries.append(call | {"time_created_ns": int((1e9 + record * 0.01) * _SECOND)})
        return {"version": "2.9", "pg_config": config, "pg_status": status, "entries": entries}

    def write(self, folder: Path, *, active_only: bool = True, without: Sequence[int] = ()) -> str:
        """A file for each rank, with its unfinished calls alone or with all."""
        for rank, dump in enumerate(self.run()):
            if active_only:
                groups = sorted(dump["pg_config"].items(), key=lambda item: int(item[0]))
                dump["pg_config"] = {
                    name: group for at, (name, group) in enumerate(groups) if str(at) in dump["pg_status"]
                }
                dump["entries"] = [entry for entry in dump["entries"] if not entry["retired"]]
            if rank not in without:
                (folder / f"job_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
        return str(folder)


def _split(ranks: Sequence[int], key: Any) -> list[tuple[int, ...]]:
    groups: dict[Any, list[int]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return [tuple(members) for members in groups.values()]
