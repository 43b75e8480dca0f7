"""The worlds of a pytest session: who gets which, who watches over them while they work, and what they leave."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from ddpcheck.findings.errors import RankError
from ddpcheck.findings.report import Finding
from ddpcheck.gather.collectives.collective_log import read_log
from ddpcheck.harness import Watch, World
from ddpcheck.judge.endings.rank_failure import judge_failure
from ddpcheck.testing.launched_ranks import LaunchedWorld, once
from ddpcheck.testing.outcome import TestOutcome, judge, sections
from ddpcheck.testing.rank_context import RankArtifacts, TestConditions, add_coverage
from ddpcheck.testing.rank_fixtures import RankFixture
from ddpcheck.testing.rank_side import Ended
from ddpcheck.testing.remote_pdb import PdbTerminal
from ddpcheck.testing.world_pool import WorldPool
from ddpcheck.worlds import validation, wire
from ddpcheck.worlds.launchers.rank_group import RankGroup

Lent = World | LaunchedWorld  # the ranks of a test: a `World` of its own, or the ranks of a launcher


class Ranks:
    """All ranks of a session.

    Attributes:
        live: Whether what ranks print is shown while they work.
        terminal: The terminal, where there is one.
        following: The test after the one that runs.
        next_options: Those of the fresh ranks that it will ask for; `None` where it asks for none.
    """

    def __init__(self, config: pytest.Config) -> None:
        worker = hasattr(config, "workerinput")
        self._pool = WorldPool()
        self._controller = os.getppid() if worker else None
        self.following: pytest.Item | None = None
        self.next_options: Mapping[str, Any] | None = None
        self.live = config.getoption("capture", "no") == "no" and not worker
        self.terminal = None if worker else PdbTerminal(config)

    def acquire(self, item: pytest.Item, options: Mapping[str, Any], watch: Watch) -> Lent:
        """A world with these options; fresh, or the one of the test's module."""
        options = {**options, "watch": watch}
        if options.pop("reuse", "test") == "module":
            return self._pool.lease_shared(_module(item), **options)
        return self._pool.acquire(following=self.next_options, **options)

    def release(self, world: Lent, *, broken: bool) -> None:
        """A test is done with its world; a broken one is not used again."""
        assert isinstance(world, World)
        self._pool.release(world, broken=broken)

    def drop(self, item: pytest.Item) -> None:
        """A test has failed after it was done with its ranks: none that its module shares is used again."""
        self._pool.end(_module(item))

    def once(self, what: str, work: Callable[[], Any]) -> Any:
        """Do in one process what starts ranks of its own, and return what comes of it; `what` says so in words."""
        return work()

    def check_controller(self) -> None:
        """In a worker of pytest-xdist: end the process when whoever would have heard of it has been killed."""
        if self._controller is not None and os.getppid() != self._controller:
            os._exit(pytest.ExitCode.INTERRUPTED)  # the ranks and their files go with the fork server, that with us

    def finish(self, item: pytest.Item) -> None:
        if self.terminal is not None:
            self.terminal.leave()
        if self.following is None or _module(self.following) != _module(item):
            self._pool.end(_module(item))

    def close(self) -> None:
        self._pool.close()


class JoinedRanks(Ranks):
    """All ranks of a session that a launcher has started."""

    def __init__(self, config: pytest.Config, launched: RankGroup) -> None:
        super().__init__(config)
        self.terminal = None
        self.live &= launched.rank == 0
        self._launched = launched

    def acquire(self, item: pytest.Item, options: Mapping[str, Any], watch: Watch) -> Lent:
        """The first ranks; the test is skipped where there are not so many."""
        launch, size = self._launched.launch, options["world_size"]
        validation.check_count("world_size", size, validation.MAX_WORLD_SIZE)
        if size > self._launched.world_size:
            reason = f"needs {size} ranks, {launch.launcher} has started {self._launched.world_size}"
            raise pytest.skip.Exception(reason, _use_item_location=True)
        asked = {name: value for name, value in options.items() if name not in ("reuse", "watch")}
        return LaunchedWorld(self._launched, asked, watch)

    def release(self, world: Lent, *, broken: bool) -> None:
        assert isinstance(world, LaunchedWorld)
        world.close()

    def once(self, what: str, work: Callable[[], Any]) -> Any:
        """Have rank 0 do it, and return, or raise, on every rank what comes of it."""
        return once(self._launched, what, work)


def _module(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


class Record:
    """A test that needs ranks, and the results of these so far.

    Attributes:
        seeds: The states of generators of random numbers when it began.
        setups: Fixtures that its ranks set up.
        leases: All that it has had.
        shown: What the report is to show instead of the traceback in this process, if anything.
        explained: An error of `ddp_world.run`, and what the report says of it beside the traceback in this process.
        failed: Whether the test has failed: nobody should get its ranks.
        quitting: Whether whoever debugged it wants the session to end.
    """

    def __init__(self, item: pytest.Item) -> None:
        self.item = item
        self.seeds: Mapping[str, Any] = {}
        self.setups: list[RankFixture] = []
        self.leases: list[WorldLease] = []
        self.shown: Any = None
        self.explained: tuple[BaseException | None, list[tuple[str, str]]] = (None, [])
        self.failed = False
        self.quitting = False
        self._warned: set[object] = set()

    def unpack(self, world: Lent) -> dict[int, RankArtifacts]:
        """Take what the ranks have left: add their coverage, warn of what they were warned of; returns all of it."""
        attachments = {rank: world.attachment(rank) for rank in range(world.world_size)}
        found: dict[int, RankArtifacts] = {rank: wire.loads(data) for rank, data in attachments.items() if data}
        for rank, attachment in found.items():
            if attachment.coverage:
                add_coverage(attachment.coverage)
            self.add_section("log", rank, world, attachment.log)
            known = self.item.user_properties
            known += [each for each in attachment.properties if each not in known]
            self.quitting |= attachment.quitting
        for attachment in found.values():
            for message, category, file, line in attachment.warnings:
                key = (str(message), category, file, line)
                if key not in self._warned:  # every rank says the same as a rule
                    self._warned.add(key)
                    warnings.warn_explicit(message, category, file, line)
        return found

    def add_section(self, what: str, rank: int, world: Lent, text: str) -> None:
        """Add to the report what a rank has written, if anything."""
        if text.strip():
            self.item.add_report_section("call", f"{what} of rank {rank} of {world.world_size}", text)


def _mismatch(world: Lent, error: RankError | None) -> Finding | None:
    """DDP403 where the collectives of the ranks do not match, and they have failed because of that."""
    if error is None or not isinstance(world, World):
        return None
    logs = [read_log(world.directory, rank) for rank in range(world.world_size)]
    found = judge_failure(error.failures, logs, world.world_size, error.results)
    return next((one for one in found if one.code == "DDP403"), None)


class WorldLease:
    """A test's hold on a world: a fresh one when it is first needed, and after one that failed.

    Attributes:
        attachment: What the ranks have brought back from the last run.
    """

    def __init__(self, ranks: Ranks, record: Record, options: Mapping[str, Any]) -> None:
        self.ranks = ranks
        self._record = record
        self.options = dict(options)
        self.attachment: dict[int, RankArtifacts] = {}
        self._world: Lent | None = None
        self._printed: list[int] = []  # of each rank's output, how many characters have been shown or kept
        record.leases.append(self)

    @property
    def world(self) -> Lent:
        if self._world is not None and self._world.failed:
            self.close()
        if self._world is None:
            self._world = self.ranks.acquire(self._record.item, self.options, self._watch)
            self._printed = [0] * self._world.world_size
        return self._world

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float | None = None
    ) -> tuple[dict[int, Any], TestOutcome, RankError | None]:
        """Call a function of `ddpcheck.testing.rank_side` on every rank; its last argument is added here.

        Returns:
            By rank, what it returned; what the test has come to; and the error where ranks have failed.
        """
        world = self.world
        debugger = self.ranks.terminal is not None
        conditions = TestConditions.of(self._record.item, since=self._record.seeds, debugger=debugger)
        error: RankError | None = None
        try:
            returned = dict(enumerate(world.run(function, *args, conditions, timeout=timeout)))
        except RankError as raised:
            error, returned = raised, raised.results
        finally:
            self._show(world, last=True)
            self.attachment = self._record.unpack(world)
        ended = {rank: one if isinstance(one, Ended) else Ended("passed") for rank, one in returned.items()}
        return returned, judge(ended, error, _mismatch(world, error)), error

    def explained(self, error: RankError, verdict: TestOutcome) -> RankError:
        """Return an error of the last run, having told the record what its ranks have to say about it."""
        self._record.explained = error, sections(verdict, self.attachment)
        return error

    def _watch(self, world: World, finished: frozenset[int], running: frozenset[int]) -> str | None:
        self.ranks.check_controller()
        self._show(world, last=False)
        if self.ranks.terminal is not None:
            self.ranks.terminal.attend(world.directory)
        users: Watch | None = self.options.get("watch")
        return users(world, finished, running) if users is not None else None

    def _show(self, world: Lent, *, last: bool) -> None:
        """Under `-s`: print what the ranks have printed since, line by line, each with its rank."""
        if self.ranks.live:
            for rank, text in self._new_output(world, up_to="" if last else "\n"):
                for line in text.splitlines():
                    sys.stdout.write(f"[rank {rank}] {line}\n")
            sys.stdout.flush()

    def _new_output(self, world: Lent, up_to: str = "") -> Iterator[tuple[int, str]]:
        """What each rank has printed since it was asked last, to the last `up_to`."""
        for rank, start in enumerate(self._printed):
            text = world.output(rank)[start:]
            text = text[: text.rfind(up_to) + len(up_to)]
            self._printed[rank] += len(text)
            yield rank, text

    def collect_output(self) -> None:
        """Keep what the ranks have printed, for the report of the test."""
        if self._world is not None and not self.ranks.live:
            for rank, text in self._new_output(self._world):
                self._record.add_section("stdout", rank, self._world, text)

    def close(self) -> None:
        if self._world is None:
            return
        self.collect_output()
        world, self._world = self._world, None
        self.ranks.release(world, broken=self._record.failed)
