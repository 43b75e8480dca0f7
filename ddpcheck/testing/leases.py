"""Worlds of a pytest session: assignment to tests, live output, and collected artifacts."""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from ddpcheck.findings.errors import RankError
from ddpcheck.findings.report import Finding
from ddpcheck.gather.collectives.collective_log import read_log
from ddpcheck.harness import Watch, World
from ddpcheck.rules.collectives.diagnose import explain_by_mismatch
from ddpcheck.testing.launched_ranks import LaunchedWorld, once
from ddpcheck.testing.outcome import TestOutcome, judge, sections
from ddpcheck.testing.rank_context import RankArtifacts, TestConditions, add_coverage
from ddpcheck.testing.rank_fixtures import RankFixture
from ddpcheck.testing.rank_side import Ended
from ddpcheck.testing.remote_pdb import PdbTerminal
from ddpcheck.testing.world_pool import WorldPool
from ddpcheck.trace.failures import FailureFacts
from ddpcheck.worlds import validation, wire
from ddpcheck.worlds.launchers.rank_group import RankGroup

Lent = World | LaunchedWorld  # ranks of a test: a `World`, or ranks of a launcher


class Ranks:
    """All ranks of a session."""

    def __init__(self, config: pytest.Config) -> None:
        is_worker = hasattr(config, "workerinput")
        self._pool = WorldPool()
        self._controller = os.getppid() if is_worker else None
        self.following: pytest.Item | None = None  # test after the current test
        self.next_options: Mapping[str, Any] | None = None  # of its world; `None` if it needs no fresh ranks
        self.live = config.getoption("capture", "no") == "no" and not is_worker  # show output of running ranks (`-s`)
        self.terminal = None if is_worker else PdbTerminal(config)  # for pdb

    def acquire(self, item: pytest.Item, options: Mapping[str, Any], watch: Watch) -> Lent:
        """Return a fresh world, or the shared world of the test's module."""
        options = {**options, "watch": watch}
        owner = _module(item) if options.pop("reuse", "test") == "module" else None
        return self._pool.acquire(owner=owner, following=self.next_options, **options)

    def release(self, world: Lent, *, broken: bool) -> None:
        assert isinstance(world, World)
        self._pool.release(world, broken=broken)

    def drop(self, item: pytest.Item) -> None:
        """Discard the shared worlds of a test's module after a late failure."""
        self._pool.end(_module(item))

    def once(self, what: str, work: Callable[[], Any]) -> Any:
        """Run `work`, which starts its own ranks, once; `what` describes the work."""
        return work()

    def check_controller(self) -> None:
        """Exit a pytest-xdist worker whose controller has been killed."""
        if self._controller is not None and os.getppid() != self._controller:
            os._exit(pytest.ExitCode.INTERRUPTED)  # the fork server then exits and removes ranks and files

    def finish(self, item: pytest.Item) -> None:
        if self.terminal is not None:
            self.terminal.leave()
        if self.following is None or _module(self.following) != _module(item):
            self._pool.end(_module(item))

    def close(self) -> None:
        self._pool.close()


class JoinedRanks(Ranks):
    """All ranks of a session started by a launcher."""

    def __init__(self, config: pytest.Config, launched: RankGroup) -> None:
        super().__init__(config)
        self.terminal = None
        self.live &= launched.rank == 0
        self._launched = launched

    def acquire(self, item: pytest.Item, options: Mapping[str, Any], watch: Watch) -> Lent:
        """Return a world of the first ranks; skip the test if too few."""
        launch, size = self._launched.launch, options["world_size"]
        validation.check_count("world_size", size, validation.MAX_WORLD_SIZE)
        if size > self._launched.world_size:
            reason = f"needs {size} ranks, {launch.launcher} has started {self._launched.world_size}"
            raise pytest.skip.Exception(reason, _use_item_location=True)
        world_options = {name: value for name, value in options.items() if name not in ("reuse", "watch")}
        return LaunchedWorld(self._launched, world_options, watch)

    def release(self, world: Lent, *, broken: bool) -> None:
        assert isinstance(world, LaunchedWorld)
        world.close()

    def once(self, what: str, work: Callable[[], Any]) -> Any:
        return once(self._launched, what, work)


def _module(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


@dataclass(eq=False)
class Record:
    """State and results of a test that needs ranks."""

    item: pytest.Item
    seeds: Mapping[str, Any] = field(default_factory=dict)  # states of the random number generators at the start
    setups: list[RankFixture] = field(default_factory=list)  # fixtures set up on the ranks
    leases: list[WorldLease] = field(default_factory=list)
    shown: Any = None  # report content that replaces the parent's traceback
    # error of `ddp_world.run`, and report sections shown beside the parent's traceback
    explained: tuple[BaseException | None, list[tuple[str, str]]] = (None, [])
    report_numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))  # of kept HTML reports
    failed: bool = False  # the ranks of a failed test are not reused
    quitting: bool = False  # user quit the debugger to end the session
    _warned: set[object] = field(default_factory=set)

    def unpack(self, world: Lent) -> dict[int, RankArtifacts]:
        """Return the artifacts of the ranks; merge their coverage and re-issue their warnings."""
        ranks = range(world.world_size)
        artifacts: dict[int, RankArtifacts] = {rank: wire.loads(d) for rank in ranks if (d := world.attachment(rank))}
        for rank, attachment in artifacts.items():
            if attachment.coverage:
                add_coverage(attachment.coverage)
            self.add_section("log", rank, world, attachment.log)
            properties = self.item.user_properties
            properties += [item for item in attachment.properties if item not in properties]
            self.quitting |= attachment.quitting
        for attachment in artifacts.values():
            for message, category, file, line in attachment.warnings:
                key = (str(message), category, file, line)
                if key not in self._warned:  # usually the same on every rank
                    self._warned.add(key)
                    warnings.warn_explicit(message, category, file, line)
        return artifacts

    def add_section(self, what: str, rank: int, world: Lent, text: str) -> None:
        """Add non-empty text of a rank to the report."""
        if text.strip():
            self.item.add_report_section("call", f"{what} of rank {rank} of {world.world_size}", text)


def _mismatch(world: Lent, error: RankError | None) -> Finding | None:
    """Return the DDP403 finding if mismatched collectives caused the failure, else `None`."""
    if error is None or not isinstance(world, World):
        return None
    logs = [read_log(world.directory, rank) for rank in range(world.world_size)]
    return next(iter(explain_by_mismatch(FailureFacts(error.failures, logs, [*error.results]))), None)


class WorldLease:
    """Lease of a world, acquired on first use and after a failure."""

    def __init__(self, ranks: Ranks, record: Record, options: Mapping[str, Any]) -> None:
        self._session_ranks = ranks
        self._record = record
        self.options = dict(options)
        self.attachment: dict[int, RankArtifacts] = {}  # of the last run, by rank
        self._world: Lent | None = None
        self._output_offsets: list[int] = []  # characters of output already shown or kept, by rank
        record.leases.append(self)

    @property
    def world(self) -> Lent:
        if self._world is not None and self._world.failed:
            self.close()
        if self._world is None:
            self._world = self._session_ranks.acquire(self._record.item, self.options, self._watch)
            self._output_offsets = [0] * self._world.world_size
        return self._world

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float | None = None
    ) -> tuple[dict[int, Any], TestOutcome, RankError | None]:
        """Call a function of `ddpcheck.testing.rank_side` on every rank, adding the test conditions.

        Returns:
            Return values by rank, outcome of the test, and the error if ranks failed.
        """
        world = self.world
        debugger = self._session_ranks.terminal is not None
        conditions = TestConditions.of(self._record.item, since=self._record.seeds, debugger=debugger)
        error: RankError | None = None
        try:
            returned = dict(enumerate(world.run(function, *args, conditions, timeout=timeout)))
        except RankError as raised:
            error, returned = raised, raised.results
        finally:
            self._show(world, last=True)
            self.attachment = self._record.unpack(world)
        ended = {rank: value if isinstance(value, Ended) else Ended("passed") for rank, value in returned.items()}
        return returned, judge(ended, error, _mismatch(world, error)), error

    def explained(self, error: RankError, verdict: TestOutcome) -> RankError:
        """Record report sections for an error of the last run; return `error`."""
        self._record.explained = error, sections(verdict, self.attachment)
        return error

    def _watch(self, world: World, finished: frozenset[int], running: frozenset[int]) -> str | None:
        self._session_ranks.check_controller()
        self._show(world, last=False)
        if self._session_ranks.terminal is not None:
            self._session_ranks.terminal.attend(world.directory)
        users: Watch | None = self.options.get("watch")
        return users(world, finished, running) if users is not None else None

    def _show(self, world: Lent, *, last: bool) -> None:
        """Print new output of the ranks under `-s`, prefixed with the rank."""
        if self._session_ranks.live:
            for rank, text in self._new_output(world, up_to="" if last else "\n"):
                for line in text.splitlines():
                    sys.stdout.write(f"[rank {rank}] {line}\n")
            sys.stdout.flush()

    def _new_output(self, world: Lent, up_to: str = "") -> Iterator[tuple[int, str]]:
        """Yield the new output of each rank, up to the last `up_to`."""
        for rank, start in enumerate(self._output_offsets):
            text = world.output(rank)[start:]
            text = text[: text.rfind(up_to) + len(up_to)]
            self._output_offsets[rank] += len(text)
            yield rank, text

    def collect_output(self) -> None:
        if self._world is not None and not self._session_ranks.live:
            for rank, text in self._new_output(self._world):
                self._record.add_section("stdout", rank, self._world, text)

    def close(self) -> None:
        if self._world is None:
            return
        self.collect_output()
        world, self._world = self._world, None
        self._session_ranks.release(world, broken=self._record.failed)
