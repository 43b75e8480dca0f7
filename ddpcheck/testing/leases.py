"""Worlds of a pytest session: assignment to tests, live output, and collected artifacts."""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from ddpcheck.findings.errors import RankError
from ddpcheck.findings.report import Finding
from ddpcheck.gather.collectives.collective_log import read_log
from ddpcheck.harness import Watch, World, start_world
from ddpcheck.rules.collectives.diagnose import explain_by_mismatch
from ddpcheck.testing.outcome import TestOutcome, merge_outcomes, sections
from ddpcheck.testing.rank_fixtures import OnRank
from ddpcheck.testing.rank_side import Ended, RankArtifacts, TestConditions, add_coverage
from ddpcheck.testing.remote_pdb import PdbTerminal
from ddpcheck.testing.world_pool import WorldPool
from ddpcheck.trace.failures import FailureFacts
from ddpcheck.worlds import starting, validation, wire
from ddpcheck.worlds.launchers.rank_group import RankGroup
from ddpcheck.worlds.validation import WorldOptions

LAUNCHED = pytest.StashKey[RankGroup]()
PATIENCE = 3600.0  # seconds to wait for ranks that run code without a timeout


class LaunchedWorld:
    """World in which rank n is a child process of the launcher's rank n.

    All of the launcher's ranks create, run and close the world at the same points, even if the world has fewer ranks.
    A rank of the world uses function, arguments and test conditions of rank 0, but environment, working directory and
    import path of its parent process.
    """

    def __init__(self, session: RankGroup, options: Mapping[str, Any], watch: Watch) -> None:
        """Take options of `WorldOptions`; the ranks start with the first `run`."""
        self._world_options = WorldOptions(**options)
        self.world_size = self._world_options.world_size
        self.failed = False
        self._session = session
        self._options = options
        self._watch = watch
        self._world: World | None = None  # on rank 0
        self._files: list[tuple[bytes, str]] = [(b"", "")] * self.world_size  # (attachment, output) by rank

    def run(self, fn: Callable[..., Any], /, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call rank 0's function on every rank, with rank 0's arguments; raise as `World.run`.

        A failure raises the same error on every rank; also raises `UsageError` if there are too few ranks.
        """
        options, seconds = self._world_options, self._world_options.timeout if timeout is None else timeout
        validation.check_seconds("timeout", seconds)
        self.failed = True
        call = f"run({options.world_size}, {options.backend}, {options.device}, {seconds:g})"
        entries = self._session.gather("a run", (call, starting.process_context()), timeout=options.startup_timeout)
        self._session.require_same_point([point for point, _ in entries])
        contexts = [context for _, context in entries[: self.world_size]]
        work = partial(self._run, contexts, fn, *args, timeout=seconds)
        with self._session.without_interrupt():  # report before the launcher kills all ranks after a crash
            results, error, self._files = once(self._session, "the results of a run", work)
            if error is not None:
                self._session.reason_of_absence(range(self._session.world_size))
                raise error
        self.failed = False
        return list(results)

    def _run(
        self, contexts: Sequence[wire.ProcessContext], fn: Callable[..., Any], *args: Any, timeout: float
    ) -> tuple[list[Any], RankError | None, list[tuple[bytes, str]]]:
        """Run rank 0's `fn` on all ranks; return results, error, (attachment, output) by rank."""
        assert self._session.leader is not None
        if self._world is None:
            self._world = start_world(
                **self._options, watch=self._poll_ranks, hosts=self._session.leader.for_first_ranks(contexts)
            )
        world, results, error = self._world, [], None
        try:
            results = world.run(fn, *args, timeout=timeout)
        except RankError as raised:
            error = raised
        return results, error, [(world.attachment(rank), world.output(rank)) for rank in range(self.world_size)]

    def _poll_ranks(self, world: World, finished: frozenset[int], running: frozenset[int]) -> str | None:
        return self._watch(world, finished, running) or self._session.reason_of_absence(range(self._session.world_size))

    def attachment(self, rank: int) -> bytes:
        return self._files[rank][0]

    def output(self, rank: int) -> str:
        return self._files[rank][1]

    def close(self) -> None:
        if self._world is not None:
            self._world.close()


def once(session: RankGroup, what: str, work: Callable[[], Any]) -> Any:
    """Run `work` on rank 0; return the result or raise the exception everywhere."""
    data = b""
    if session.rank == 0:
        with session.without_interrupt():
            try:
                reply = (True, work())
            except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
                reply = (False, error)
            data = _packed_reply(*reply)
    succeeded, value = wire.loads(session.gather(what, data, timeout=PATIENCE)[0])
    if not succeeded:
        raise value
    return value


def _packed_reply(succeeded: bool, value: Any) -> bytes:
    try:
        wire.loads(data := wire.dumps((succeeded, value)))
    except Exception as error:  # mostly exceptions with a custom `__init__`
        reason = f"rank 0 raised {type(value).__qualname__}: {value}" if not succeeded else f"not picklable: {error}"
        return wire.dumps((False, RankError(reason)))
    return data


TestWorld = World | LaunchedWorld  # ranks of a test: a `World`, or ranks of a launcher


class Ranks:
    """All ranks of a session: worlds of a pool, or ranks of a launcher."""

    def __init__(self, config: pytest.Config, launched: RankGroup | None) -> None:
        is_worker = hasattr(config, "workerinput")
        self._pool = WorldPool()
        self._launched = launched
        self._controller = os.getppid() if is_worker else None
        self.following: pytest.Item | None = None  # test after the current test
        self.next_options: Mapping[str, Any] | None = None  # of its world; `None` if it needs no fresh ranks
        is_reporting = not is_worker and (launched is None or launched.rank == 0)
        self.live = is_reporting and config.getoption("capture", "no") == "no"  # show output of running ranks (`-s`)
        self.terminal = None if is_worker or launched is not None else PdbTerminal(config)  # for pdb

    def acquire(self, item: pytest.Item, options: Mapping[str, Any], watch: Watch) -> TestWorld:
        """Return a fresh or module-shared world; skip the test if ranks are too few."""
        options = dict(options)
        owner = _module_id(item) if options.pop("reuse", "test") == "module" else None
        if self._launched is None:
            return self._pool.acquire(owner=owner, following=self.next_options, **{**options, "watch": watch})
        options.pop("watch", None)
        size, started = options["world_size"], self._launched.world_size
        validation.check_count("world_size", size, validation.MAX_WORLD_SIZE)
        if size > started:
            reason = f"needs {size} ranks, {self._launched.launch.launcher} has started {started}"
            raise pytest.skip.Exception(reason, _use_item_location=True)
        return LaunchedWorld(self._launched, options, watch)

    def release(self, world: TestWorld, *, broken: bool) -> None:
        if isinstance(world, World):
            self._pool.release(world, broken=broken)
        else:
            world.close()

    def drop(self, item: pytest.Item) -> None:
        """Discard the worlds shared by the test's module, after a failure in teardown."""
        self._pool.end(_module_id(item))

    def once(self, what: str, work: Callable[[], Any]) -> Any:
        """Run `work`, which starts its own ranks; under a launcher, on rank 0 only."""
        return work() if self._launched is None else once(self._launched, what, work)

    def check_controller(self) -> None:
        """Exit a pytest-xdist worker whose controller has been killed."""
        if self._controller is not None and os.getppid() != self._controller:
            os._exit(pytest.ExitCode.INTERRUPTED)  # the fork server then exits and removes ranks and files

    def finish(self, item: pytest.Item) -> None:
        if self.terminal is not None:
            self.terminal.leave()
        if self.following is None or _module_id(self.following) != _module_id(item):
            self._pool.end(_module_id(item))

    def close(self) -> None:
        self._pool.close()


def _module_id(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


@dataclass(eq=False)
class Record:
    """State and results of a test that needs ranks."""

    item: pytest.Item
    seeds: Mapping[str, Any] = field(default_factory=dict)  # states of the random number generators at the start
    setups: list[OnRank] = field(default_factory=list)  # fixtures that the ranks set up
    leases: list[WorldLease] = field(default_factory=list)
    shown: Any = None  # content of the report, instead of the traceback in pytest's process
    # error of `ddp_world.run`, and report sections to add to the traceback in pytest's process
    explained: tuple[BaseException | None, list[tuple[str, str]]] = (None, [])
    report_numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))  # of kept HTML reports
    failed: bool = False  # the ranks of a failed test are not reused
    quitting: bool = False  # True if the user quit the debugger, which ends the session
    _warned: set[object] = field(default_factory=set)

    def unpack(self, world: TestWorld) -> dict[int, RankArtifacts]:
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

    def add_section(self, what: str, rank: int, world: TestWorld, text: str) -> None:
        """Add the text of a rank as a report section, unless it is empty."""
        if text.strip():
            self.item.add_report_section("call", f"{what} of rank {rank} of {world.world_size}", text)


def _mismatch_finding(world: TestWorld, error: RankError | None) -> Finding | None:
    """Return a DDP403 finding if mismatched collectives caused the failure, else `None`."""
    if error is None or not isinstance(world, World):
        return None
    logs = [read_log(world.directory, rank) for rank in range(world.world_size)]
    return next(iter(explain_by_mismatch(FailureFacts(error.failures, logs, [*error.results]))), None)


class WorldLease:
    """Lease of ranks to a test: acquires a world when needed, and after failures."""

    def __init__(self, ranks: Ranks, record: Record, options: Mapping[str, Any]) -> None:
        self._session_ranks = ranks
        self._record = record
        self.options = dict(options)
        self.attachment: dict[int, RankArtifacts] = {}  # of the last run, by rank
        self._world: TestWorld | None = None
        self._output_offsets: list[int] = []  # characters of output already shown or kept, by rank
        record.leases.append(self)

    @property
    def world(self) -> TestWorld:
        if self._world is not None and self._world.failed:
            self.close()
        if self._world is None:
            self._world = self._session_ranks.acquire(self._record.item, self.options, self._watch)
            self._output_offsets = [0] * self._world.world_size
        return self._world

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float | None = None
    ) -> tuple[dict[int, Any], TestOutcome, RankError | None]:
        """Call a function of `ddpcheck.testing.rank_side` with the test conditions on every rank.

        Returns:
            Return values by rank, outcome of the test, and the error if ranks failed.
        """
        world = self.world
        debugger = self._session_ranks.terminal is not None
        conditions = TestConditions.from_item(self._record.item, since=self._record.seeds, debugger=debugger)
        error: RankError | None = None
        try:
            returned = dict(enumerate(world.run(function, *args, conditions, timeout=timeout)))
        except RankError as raised:
            error, returned = raised, raised.results
        finally:
            self._print_output(world, last=True)
            self.attachment = self._record.unpack(world)
        ended = {rank: value if isinstance(value, Ended) else Ended("passed") for rank, value in returned.items()}
        return returned, merge_outcomes(ended, error, _mismatch_finding(world, error)), error

    def record_sections(self, error: RankError, verdict: TestOutcome) -> RankError:
        """Store report sections that explain the last run's `error`; return `error`."""
        self._record.explained = error, sections(verdict, self.attachment)
        return error

    def _watch(self, world: World, finished: frozenset[int], running: frozenset[int]) -> str | None:
        self._session_ranks.check_controller()
        self._print_output(world, last=False)
        if self._session_ranks.terminal is not None:
            self._session_ranks.terminal.serve_debuggers(world.directory)
        user_watch: Watch | None = self.options.get("watch")
        return user_watch(world, finished, running) if user_watch is not None else None

    def _print_output(self, world: TestWorld, *, last: bool) -> None:
        """Print new output of the ranks under `-s`, prefixed with the rank."""
        if self._session_ranks.live:
            for rank, text in self._new_output(world, up_to="" if last else "\n"):
                for line in text.splitlines():
                    sys.stdout.write(f"[rank {rank}] {line}\n")
            sys.stdout.flush()

    def _new_output(self, world: TestWorld, up_to: str = "") -> Iterator[tuple[int, str]]:
        """Yield (rank, output since the last call), up to the last occurrence of `up_to`."""
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
