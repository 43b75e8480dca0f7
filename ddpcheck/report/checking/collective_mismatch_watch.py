"""Sees during a run that the ranks' collectives do not match, and ends it as a hang before its deadline.

This module is light: it never imports torch.
"""

from __future__ import annotations

import time

from ddpcheck.gather.collectives.collective_log import log_path, read_log
from ddpcheck.harness import World
from ddpcheck.judge.collective_order import judge_collectives
from ddpcheck.worlds import rank as this_rank


class CollectiveMismatchWatch:
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
