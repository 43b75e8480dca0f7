"""pytest plugin under a launcher: all ranks run the same tests in lockstep."""

from __future__ import annotations

import contextlib
import hashlib
import io
import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from ddpcheck.findings.errors import DDPCheckError, RankError, RankFailure, UsageError
from ddpcheck.findings.replace import replace
from ddpcheck.findings.wording import format_ranks
from ddpcheck.report.settings import Settings
from ddpcheck.testing import marks
from ddpcheck.testing.leases import LAUNCHED, PATIENCE
from ddpcheck.testing.outcome import as_pytest_shows, merge_outcomes, to_raise
from ddpcheck.testing.rank_side import Ended, RankArtifacts, add_coverage
from ddpcheck.worlds import failures, wire
from ddpcheck.worlds.launchers.detection import LauncherEnv, detect
from ddpcheck.worlds.launchers.rank_group import RankGroup

STARTUP = 120.0  # seconds to wait for ranks that should arrive at the same time
Phase = Literal["setup", "call", "teardown"]
_SHOWN = pytest.StashKey[tuple[str, Any]]()


def register(config: pytest.Config, needs_ranks: Callable[[pytest.Item], bool], options: Sequence[str]) -> None:
    """Register `InStep` if a launcher started pytest, and pytest-xdist is not used."""
    xdist = hasattr(config, "workerinput") or config.getoption("dist", "no") != "no"  # these do not synchronize
    launch = detect()
    if launch is not None and not xdist:
        config.pluginmanager.register(InStep(config, launch, needs_ranks, options), "ddpcheck-instep")


@dataclass(eq=False)
class InStep:
    """pytest hooks on a rank of a launcher.

    The ranks synchronize after collection if a test needs ranks, and then after every phase of every test: a test that
    fails on one rank fails on all, so that all ranks stop after the same test. Rank 0 reports; the other ranks are
    silent unless rank 0 has died.
    """

    _config: pytest.Config
    _launch: LauncherEnv
    _needs_ranks: Callable[[pytest.Item], bool]  # True if a test needs ranks
    _options: Sequence[str]
    _settings: Settings = field(default_factory=Settings)
    _launched: RankGroup | None = None
    _terminal: Terminal | None = None
    _session: pytest.Session | None = None
    _uncollected: list[str] = field(default_factory=list)
    _is_stopping: bool = False  # True once this rank ends the session

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Buffer the terminal output of ranks other than 0."""
        self._session = session
        if self._launch.rank and self._config.pluginmanager.has_plugin("terminalreporter"):
            self._terminal = Terminal(self._config)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            lines = [line for line in str(report.longrepr).splitlines() if line.strip()]
            self._uncollected.append(f"{report.nodeid}: {lines[-1].removeprefix('E').strip() if lines else ''}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Connect to the other ranks if a test needs ranks, before `-k` deselects tests."""
        if self._config.option.collectonly:
            return
        try:
            self._settings = marks.settings(self._config, self._options)
        except DDPCheckError:
            return  # reported by the tests that need the settings
        needs_ranks = any(map(self._needs_ranks, items)) or any(map(self._may_need_ranks, self._uncollected))
        if self._settings.launcher == "off" or not (needs_ranks or self._settings.launcher == "on"):
            return
        if self._config.getoption("usepdb", False) or self._config.getoption("trace", False):
            raise pytest.UsageError(
                f"{self._launch.launcher} has started {self._launch.world_size} ranks, and --pdb and --trace need one "
                "process at a terminal; run pytest without a launcher, and the ranks of a test talk to that."
            )
        try:
            self._launched = self._config.stash[LAUNCHED] = RankGroup(self._launch, timeout=STARTUP)
        except DDPCheckError as error:
            raise pytest.UsageError(str(error)) from None
        if self._launch.rank:
            disable_report_files(self._config, self._launch.rank)

    def _may_need_ranks(self, uncollected: str) -> bool:
        """Return True if a file that failed collection mentions tests that need ranks."""
        try:
            text = (self._config.rootpath / uncollected.partition(":")[0]).read_text(errors="replace")
        except OSError:
            return False
        return "mark.ddp" in text or "ddp_world" in text

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Stop unless all ranks have the same tests in the same order."""
        if self._launched is None:
            if self._terminal is not None:
                self._terminal.show()
            return
        try:
            if sentence := self._difference_of_tests(self._launched, [item.nodeid for item in session.items]):
                self._stop_session(sentence)
        except RankError as error:
            self._stop_session(str(error))

    def _difference_of_tests(self, launched: RankGroup, tests: list[str]) -> str:
        digest = hashlib.sha256("\n".join([*tests, "", *self._uncollected]).encode()).hexdigest()
        one_machine = launched.leader is not None and launched.leader.one_machine
        factory = getattr(self._config, "_tmp_path_factory", None) if one_machine else None
        base = "" if factory is None else str(factory.getbasetemp())
        entries = launched.gather("the first test", (digest, base), timeout=STARTUP)
        share_temporary_folders(self._config, entries[0][1])
        if len({digest for digest, _ in entries}) == 1:
            return ""
        lists = launched.gather("comparing tests", (tests, self._uncollected), timeout=STARTUP)
        return _report_difference(self._launch.launcher, lists)

    def _stop_session(self, sentence: str) -> None:
        self._is_stopping = True
        if self._launch.rank == 0:
            raise pytest.UsageError(sentence)
        pytest.exit(sentence, returncode=0)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """Synchronize after setup: a failure on one rank skips the body everywhere."""
        return (yield from self._synchronized_phase(item, "setup"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self._synchronized_phase(item, "call"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self._synchronized_phase(item, "teardown"))

    def _synchronized_phase(self, item: pytest.Item, when: Phase) -> Generator[None, object, object]:
        __tracebackhide__ = True
        launched = self._launched
        if launched is None or self._is_stopping:
            return (yield)
        if launched.broken is not None:
            item.session.shouldfail = launched.broken
            if when == "setup":
                pytest.fail(launched.broken, pytrace=False)
            return (yield)
        launched.begin(f"{item.nodeid} ({when})")
        result: object = None
        local_error: BaseException | None = None
        try:
            result = yield
        except (KeyboardInterrupt, pytest.exit.Exception) as error:
            self._is_stopping = True
            launched.announce(str(error) or type(error).__name__)
            raise
        except BaseException as error:
            local_error = error
        shared_error = self._shared_error(launched, item, when, local_error)
        if shared_error is not None:
            raise shared_error
        return result

    def _shared_error(
        self, launched: RankGroup, item: pytest.Item, when: Phase, local_error: BaseException | None
    ) -> BaseException | None:
        """Gather the outcomes of a phase; return the exception that this rank raises."""
        local_end = _phase_end(item, local_error, fell=launched.epoch.out_of_step is not None)
        try:
            ends: list[_PhaseEnd] = launched.end(local_end, timeout=self._phase_timeout(item))
        except RankError as lost:
            item.session.shouldfail = str(lost)  # cannot synchronize: stop after this test
            return local_error if local_error is not None else pytest.fail.Exception(str(lost), pytrace=False)
        if len({end.comparison_key for end in ends}) == 1:
            return local_error
        is_caused = any(end.reply is not None and not end.fell for end in ends)
        rank_failures = [_failure(rank, end, is_caused) for rank, end in enumerate(ends) if end.reply is not None]
        error = failures.rank_error(rank_failures) if rank_failures else None
        verdict = merge_outcomes({rank: end.ended for rank, end in enumerate(ends) if end.ended is not None}, error)
        if verdict.how == "xfailed":
            return pytest.xfail.Exception(verdict.headline)
        reprs = {rank: RankArtifacts(failure=wire.loads(end.shown)) for rank, end in enumerate(ends) if end.shown}
        item.stash[_SHOWN] = (when, as_pytest_shows(verdict, reprs, item.location))
        for rank, end in enumerate(ends):
            for key, text in end.output if rank != launched.rank else ():
                item.add_report_section(when, f"{key} of rank {rank} of {launched.world_size}", text)
        return to_raise(verdict, error, marks.expected_failure(item))

    def _phase_timeout(self, item: pytest.Item) -> float:
        if not self._needs_ranks(item):
            return PATIENCE
        try:
            timeout = marks.merged_options(item).get("timeout", self._settings.timeout)
        except UsageError:
            timeout = self._settings.timeout
        return float(timeout) + STARTUP

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Show another rank's failure in the report, as formatted on that rank."""
        report = yield
        when, longrepr = item.stash.get(_SHOWN, ("", None))
        if when == call.when and report.failed and call.excinfo is not None:
            report.longrepr = longrepr
        return report

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """Gather the coverage data on rank 0 before pytest-cov reports."""
        try:
            return (yield)
        finally:
            self._gather_coverage()

    def _gather_coverage(self) -> None:
        plugin = self._config.pluginmanager.getplugin("_cov")
        if self._launched is None or plugin is None or getattr(plugin.cov_controller, "cov", None) is None:
            return
        local_data = take_coverage_data(plugin) if self._launch.rank else b""
        if self._is_stopping or self._launched.broken is not None:
            return
        self._launched.begin("the end of the session")
        try:
            for data in self._launched.end(local_data, timeout=STARTUP)[1:]:
                if self._launch.rank == 0:
                    add_coverage(data)
        except RankError as error:
            self._config.issue_config_time_warning(pytest.PytestWarning(f"coverage of other ranks: {error}"), 2)

    @pytest.hookimpl(tryfirst=True)
    def pytest_unconfigure(self) -> None:
        """Leave the group; the lowest remaining rank reports if rank 0 has died."""
        launched, session = self._launched, self._session
        is_reporting = launched is None or session is None
        if launched is not None and session is not None:
            if session.exitstatus == pytest.ExitCode.INTERNAL_ERROR:
                launched.announce("an internal error of pytest")
            launched.leave(timeout=PATIENCE)
            gone = set(launched.gone)
            if launched.rank and 0 in gone:
                is_reporting = min(set(range(launched.world_size)) - gone) == launched.rank
            elif session.exitstatus == pytest.ExitCode.INTERNAL_ERROR:
                is_reporting = True  # known only on this rank
            elif launched.rank:
                session.exitstatus = 0  # otherwise the launcher kills rank 0
        if self._terminal is not None and is_reporting:
            self._terminal.show()


@dataclass(frozen=True)
class _PhaseEnd:
    """Outcome of a test phase on one rank, sent to the other ranks."""

    ended: Ended | None = None  # outcome if the phase did not fail
    reply: dict[str, Any] | None = None  # data from `failures.exception_data` if it failed
    fell: bool = False  # True if it failed only because other ranks did not synchronize
    shown: bytes = b""  # pickled pytest representation of the failure
    output: list[tuple[str, str]] = field(default_factory=list)  # captured output as (section name, text)

    @property
    def comparison_key(self) -> tuple[str, str]:
        """Key to compare outcomes; if keys differ, all ranks raise the same exception."""
        if self.reply is not None:
            return self.reply["type"], self.reply["text"]
        return ("", self.ended.how) if self.ended is not None else ("", "")


def _phase_end(item: pytest.Item, error: BaseException | None, *, fell: bool) -> _PhaseEnd:
    if error is None:
        return _PhaseEnd(Ended("passed"))
    if isinstance(error, (pytest.skip.Exception, pytest.xfail.Exception)):
        how: Literal["skipped", "xfailed"] = "skipped" if isinstance(error, pytest.skip.Exception) else "xfailed"
        return _PhaseEnd(Ended(how, error.msg or ""))
    output = [(key, text) for _, key, text in item._report_sections if " of rank " not in key]
    return _PhaseEnd(None, failures.exception_data(error, "", ""), fell, _pack_longrepr(item, error), output)


def _pack_longrepr(item: pytest.Item, error: BaseException) -> bytes:
    try:
        longrepr = item.repr_failure(pytest.ExceptionInfo.from_exception(error))
        wire.loads(data := wire.dumps(longrepr))
    except Exception:  # user objects may raise in __repr__
        return b""
    return data if hasattr(longrepr, "reprcrash") else b""


def _failure(rank: int, end: _PhaseEnd, is_caused: bool) -> RankFailure:
    """Return the failure of a rank; `is_caused`: another rank's failure came first."""
    assert end.reply is not None
    failure = failures.failure_of_exception(rank, {**end.reply, "when": 0.0})  # clocks differ between machines
    if end.fell and is_caused:
        return replace(failure, kind="fell", message=f"rank {rank} fell with it: {end.reply['text']}")
    return failure


def _report_difference(launcher: str, lists: Sequence[tuple[list[str], list[str]]]) -> str:
    tests, uncollected = lists[0]
    ranks = [rank for rank, pair in enumerate(lists) if pair != lists[0]]
    other_tests, other_uncollected = lists[ranks[0]]
    start = "The ranks have not collected the same tests, so they cannot run them in step: "
    if uncollected != other_uncollected:
        failed_rank, errors = (ranks[0], other_uncollected) if other_uncollected else (0, uncollected)
        return f"{start}rank {failed_rank} could not collect {errors[0]}"
    index = next((n for n, (test, peer) in enumerate(zip(tests, other_tests, strict=False)) if test != peer), None)
    if index is None:
        index = min(len(tests), len(other_tests))
    first, second = (names[index] if index < len(names) else "nothing" for names in (tests, other_tests))
    reason = (
        "the order differs; give every rank the same seed"
        if sorted(tests) == sorted(other_tests)
        else (f"rank 0 has {len(tests)}, rank {ranks[0]} has {len(other_tests)}")
    )
    return (
        f"{start}test {index + 1} is {first} on rank 0, and {second} on {format_ranks(ranks)} ({reason}). "
        f"Every rank that {launcher} starts must be given the same options and see the same files."
    )


# --- One process of several that run the same tests ------------------------------------------------------------------


class Terminal:
    """Terminal output of a rank, buffered until `show`."""

    def __init__(self, config: pytest.Config) -> None:
        self._writer: Any = config.get_terminal_writer()
        self._file = self._writer._file
        self._buffer = io.StringIO()
        self._writer._file = self._buffer

    def show(self) -> None:
        """Write the buffered output and stop buffering."""
        if self._writer._file is self._buffer:
            self._writer._file = self._file
            self._file.write(self._buffer.getvalue())
            self._file.flush()


def disable_report_files(config: pytest.Config, rank: int) -> None:
    """Disable JUnit report and cache; add the rank to the log file name."""
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


def take_coverage_data(plugin: Any) -> bytes:
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
    """Have `tmp_path` return the same folder, in `base`, on all ranks."""
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
