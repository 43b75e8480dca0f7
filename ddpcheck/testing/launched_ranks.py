"""Ranks of a test under a launcher: rank 0 leads, all receive results."""

from __future__ import annotations

import contextlib
import io
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.findings.errors import RankError
from ddpcheck.harness import Watch, World, start_world
from ddpcheck.worlds import starting, validation, wire
from ddpcheck.worlds.launchers.rank_group import RankGroup
from ddpcheck.worlds.validation import WorldOptions

LAUNCHED = pytest.StashKey[RankGroup]()
STARTUP = 120.0  # seconds to wait for ranks that should arrive at the same time
PATIENCE = 3600.0  # seconds to wait for ranks that run code without a timeout


class Terminal:
    """Terminal output of a rank, buffered until `show`."""

    def __init__(self, config: pytest.Config) -> None:
        self._writer: Any = config.get_terminal_writer()
        self._file = self._writer._file
        self._kept = io.StringIO()
        self._writer._file = self._kept

    def show(self) -> None:
        """Write the buffered output and stop buffering."""
        if self._writer._file is self._kept:
            self._writer._file = self._file
            self._file.write(self._kept.getvalue())
            self._file.flush()


def silence_files(config: pytest.Config, rank: int) -> None:
    """Disable JUnit report and cache, and add the rank to the log file."""
    with contextlib.suppress(ImportError):
        from _pytest.junitxml import xml_key

        if (xml := config.stash.get(xml_key, None)) is not None:
            del config.stash[xml_key]
            config.pluginmanager.unregister(xml)
    if (cache := getattr(config, "cache", None)) is not None:
        cache.set = lambda *_: None
    logs: Any = config.pluginmanager.getplugin("logging-plugin")
    if logs is not None and (path := config.getoption("log_file", None) or config.getini("log_file")):
        logs.set_log_path(f"{path}.rank{rank}")


def give_up_coverage(plugin: Any) -> bytes:
    """Stop pytest-cov in this process and return the coverage data for rank 0."""
    coverage = plugin.cov_controller.cov
    coverage.stop()
    cov_data = coverage.get_data()
    data: bytes = cov_data.dumps()
    cov_data.close()
    Path(cov_data.data_filename()).unlink(missing_ok=True)  # the data is sent to rank 0 instead
    plugin.cov_controller = None
    plugin.options.cov_report, plugin.options.cov_fail_under = {}, None
    return data


def share_temporary_folders(config: pytest.Config, base: str) -> None:
    """Share numbered temporary folders in `base` between all ranks."""
    factory: Any = getattr(config, "_tmp_path_factory", None)
    if factory is None or not base:
        return
    numbers: Counter[tuple[str, bool]] = Counter()
    lock = threading.Lock()

    def mktemp(basename: str, numbered: bool = True) -> Path:
        basename = factory._ensure_relative_to_basetemp(basename)
        with lock:
            numbers[basename.lower(), numbered] += 1
            number = numbers[basename.lower(), numbered] - 1
        path = Path(base, f"{basename}{number}" if numbered else basename)
        if number and not numbered:
            raise FileExistsError(f"{path} exists already")
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    factory._basetemp = Path(base)
    factory.mktemp = mktemp


class LaunchedWorld:
    """World of the first ranks of a session, each a process started by the launched process of the same rank.

    Every launched process creates, runs and closes the world at the same points, even without a rank in the world. All
    ranks run rank 0's function, arguments and test conditions; environment, working directory and import path come
    from each launched process.
    """

    def __init__(self, session: RankGroup, options: Mapping[str, Any], watch: Watch) -> None:
        """Reserve the first ranks, which start with the first run; options as in `WorldOptions`."""
        self._asked = WorldOptions(**options)
        self.world_size = self._asked.world_size
        self.failed = False
        self._session = session
        self._options = options
        self._watch = watch
        self._world: World | None = None  # on rank 0
        self._files: list[tuple[bytes, str]] = [(b"", "")] * self.world_size  # (attachment, output) by rank

    def run(self, fn: Callable[..., Any], /, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call rank 0's function and arguments on every rank; raises as `World.run`.

        A failure raises the same error on every rank; also raises `UsageError` if there are too few ranks.
        """
        options, seconds = self._asked, self._asked.timeout if timeout is None else timeout
        validation.check_seconds("timeout", seconds)
        self.failed = True
        call = f"run({options.world_size}, {options.backend}, {options.device}, {seconds:g})"
        entries = self._session.gather("a run", (call, starting.process_context()), timeout=options.startup_timeout)
        self._session.check_in_step([point for point, _ in entries])
        contexts = [context for _, context in entries[: self.world_size]]
        work = partial(self._run, contexts, fn, *args, timeout=seconds)
        with self._session.working():  # report before the launcher kills all ranks after a crash
            results, error, self._files = once(self._session, "the results of a run", work)
            if error is not None:
                self._session.why_not(range(self._session.world_size))
                raise error
        self.failed = False
        return list(results)

    def _run(
        self, contexts: Sequence[wire.ProcessContext], fn: Callable[..., Any], *args: Any, timeout: float
    ) -> tuple[list[Any], RankError | None, list[tuple[bytes, str]]]:
        """Run `fn` on all ranks, called on rank 0; return results, error and files.

        The files are (attachment, output) of each rank.
        """
        assert self._session.leader is not None
        if self._world is None:
            self._world = start_world(
                **self._options, watch=self._poll_ranks, hosts=self._session.leader.first(contexts)
            )
        world, results, error = self._world, [], None
        try:
            results = world.run(fn, *args, timeout=timeout)
        except RankError as raised:
            error = raised
        return results, error, [(world.attachment(rank), world.output(rank)) for rank in range(self.world_size)]

    def _poll_ranks(self, world: World, finished: frozenset[int], running: frozenset[int]) -> str | None:
        return self._watch(world, finished, running) or self._session.why_not(range(self._session.world_size))

    def attachment(self, rank: int) -> bytes:
        return self._files[rank][0]

    def output(self, rank: int) -> str:
        return self._files[rank][1]

    def close(self) -> None:
        if self._world is not None:
            self._world.close()


def once(session: RankGroup, what: str, work: Callable[[], Any]) -> Any:
    """Run `work` on rank 0; return its result or raise on every rank."""
    data = b""
    if session.rank == 0:
        with session.working():
            try:
                reply = (True, work())
            except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
                reply = (False, error)
            data = _travelling(*reply)
    succeeded, value = wire.loads(session.gather(what, data, timeout=PATIENCE)[0])
    if not succeeded:
        raise value
    return value


def _travelling(succeeded: bool, value: Any) -> bytes:
    try:
        wire.loads(data := wire.dumps((succeeded, value)))
    except Exception as error:  # mostly exceptions with a custom `__init__`
        reason = f"rank 0 raised {type(value).__qualname__}: {value}" if not succeeded else f"not picklable: {error}"
        return wire.dumps((False, RankError(reason)))
    return data
