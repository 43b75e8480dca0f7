"""The worlds of a pytest session: who gets which, and who watches over them while they work.

This module is light: it never imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from ddpcheck.harness import World
from ddpcheck.testing.conditions import Conditions, Luggage, Seeds
from ddpcheck.testing.debugging import Desk
from ddpcheck.testing.record import Record


class Ranks:
    """All ranks of a session."""

    def __init__(self, config: pytest.Config) -> None:
        worker = hasattr(config, "workerinput")
        self.live = config.getoption("capture") == "no" and not worker
        self.desk = None if worker else Desk(config)

    def tenancy(self, item: pytest.Item, record: Record, options: Mapping[str, Any], since: Seeds | None) -> Tenancy:
        """A world for a test, which it gets when it first uses it."""
        tenancy = Tenancy(self, item, record, options, since)
        record.tenancies.append(tenancy)
        return tenancy

    def lease(self, item: pytest.Item, options: Mapping[str, Any]) -> World:
        """A world with these options."""
        options = {key: value for key, value in options.items() if key != "reuse"}
        return World(**options)

    def give_back(self, world: World) -> None:
        """Nobody needs it any more."""
        world.close()

    def finish(self, item: pytest.Item, following: pytest.Item | None) -> None:
        """A test is over."""
        if self.desk is not None:
            self.desk.leave()

    def close(self) -> None:
        """The session is over."""


class Tenancy:
    """A test's hold on a world: a fresh one when it is first needed, and after one that failed.

    Attributes:
        options: Of the world.
        luggage: What the ranks have brought back from the last run.
    """

    def __init__(
        self, ranks: Ranks, item: pytest.Item, record: Record, options: Mapping[str, Any], since: Seeds | None
    ) -> None:
        self._ranks = ranks
        self._item = item
        self._record = record
        self.options = dict(options)
        self.luggage: dict[int, Luggage] = {}
        self._since = since
        self._world: World | None = None
        self._printed: list[int] = []  # of each rank's output, how many characters have been shown or kept

    @property
    def world(self) -> World:
        """The world."""
        if self._world is not None and self._world.failed:
            self.close()
        if self._world is None:
            self._world = self._ranks.lease(self._item, self.options)
            self._printed = [len(self._world.output(rank)) for rank in range(self._world.world_size)]
            self._world.watch = self._watch
        return self._world

    def run(self, function: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Call a function of `ddpcheck.testing.onrank` on every rank; its last argument is added here."""
        world = self.world
        try:
            return world.run(function, *args, self._conditions(), timeout=timeout)
        finally:
            self._show(world, last=True)
            self.luggage = self._record.unpack(world)

    def _conditions(self) -> Conditions:
        by_test = self._item.config.getoption("cov_context", None) == "test"
        context = f"{self._item.nodeid}|run" if by_test else ""
        return Conditions.of(
            self._item.config, since=self._since, context=context, debugger=self._ranks.desk is not None
        )

    def _watch(self, world: World, finished: frozenset[int], running: frozenset[int]) -> None:
        self._show(world, last=False)
        if self._ranks.desk is not None:
            self._record.debugged |= self._ranks.desk.attend(world.directory)

    def _show(self, world: World, *, last: bool) -> None:
        """Under `-s`: print what the ranks have printed since, line by line, each with its rank."""
        if not self._ranks.live:
            return
        for rank, start in enumerate(self._printed):
            text = world.output(rank)[start:]
            if not last:
                text = text[: text.rfind("\n") + 1]
            self._printed[rank] += len(text)
            for line in text.splitlines():
                sys.stdout.write(f"[rank {rank}] {line}\n")
        sys.stdout.flush()

    def harvest(self) -> None:
        """Keep what the ranks have printed, for the report of the test."""
        if self._world is None or self._ranks.live:
            return
        texts = {}
        for rank, start in enumerate(self._printed):
            texts[rank] = self._world.output(rank)[start:]
            self._printed[rank] += len(texts[rank])
        self._record.keep_output(self._world, texts)

    def close(self) -> None:
        """Give the world back."""
        if self._world is None:
            return
        self.harvest()
        world, self._world = self._world, None
        self._ranks.give_back(world)
