"""State of the plugin in one pytest session, used by `ddpcheck.pytest_plugin`."""

from __future__ import annotations

import contextlib
import inspect
import unittest
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NoReturn

import pytest

from ddpcheck.findings.errors import DDPCheckError, UsageError
from ddpcheck.testing import marks, rank_fixtures, rank_side
from ddpcheck.testing.fixture import DDPWorld
from ddpcheck.testing.leases import LAUNCHED, Ranks, Record, WorldLease
from ddpcheck.testing.outcome import as_pytest_shows, to_raise
from ddpcheck.worlds.launchers.detection import detect, require

_RECORD = pytest.StashKey[Record]()
_OPTIONS = ("world_size", "device", "timeout", "threads", "preload", "reuse")  # world options that are also settings


class Session:
    """State of the pytest plugin in one process that runs tests."""

    def __init__(
        self, config: pytest.Config, options: Sequence[str], needs_ranks: Callable[[pytest.Item], bool]
    ) -> None:
        """Read the settings; `needs_ranks` returns True if a test needs ranks."""
        launched = config.stash.get(LAUNCHED, None)
        defaults = {} if launched is None else {"world_size": launched.world_size}
        self._settings = marks.settings(config, options, **defaults)
        _refuse_wrong_start(config, self._settings.launcher)
        self._needs_ranks = needs_ranks
        self._session_ranks = Ranks(config, launched)

    def begin(self, item: pytest.Item, following: pytest.Item | None) -> None:
        """Prepare for a test that needs ranks; `following` is the next test, if any."""
        self._session_ranks.following = following
        self._session_ranks.next_options = None if following is None else self._fresh_ranks_of(following)
        item.stash[_RECORD] = record = Record(item)
        record.seeds = rank_side.drawn_generators()
        if not isinstance(item, pytest.Function) or issubclass(item.cls or object, unittest.TestCase):
            _fail(f"@pytest.mark.ddp works on test functions and on methods of plain classes, not on {item.nodeid}.")

    def _fresh_ranks_of(self, item: pytest.Item) -> dict[str, Any] | None:
        """Return the world options if the test gets fresh ranks (`reuse="test"`), else `None`."""
        if not self._needs_ranks(item):
            return None
        try:
            options = self._options(item)
        except pytest.fail.Exception:
            return None
        return options if options.pop("reuse") == "test" else None

    def rank_value(self, item: pytest.Item, name: str) -> Any:
        """Return the placeholder for a per-rank fixture such as `rank`."""
        if "ddp_world" in getattr(item, "fixturenames", ()):
            _fail(
                f"The body of a test that uses ddp_world runs in the parent, which has no {name!r}; use "
                "ddp_world.world_size, or ddpcheck.rank.current() in the function that ddp_world.run calls."
            )
        if item.get_closest_marker(marks.MARKER) is None:
            _fail(
                f"The fixture {name!r} has a value on ranks only; mark {item.name} with @pytest.mark.ddp(...), and its "
                "body runs there."
            )
        return rank_fixtures.OnRank(name)

    def defer_to_ranks(
        self, item: pytest.Item, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> object:
        """Return a placeholder if a fixture depends on per-rank values, else `None`."""
        arguments = {name: request.getfixturevalue(name) for name in fixturedef.argnames}
        if not any(isinstance(value, rank_fixtures.OnRank) for value in arguments.values()):
            return None
        find = rank_fixtures.picklable_getter(_bound_function(fixturedef, request))
        converted = {name: rank_fixtures.to_rank_value(name, value) for name, value in arguments.items()}
        fixture = rank_fixtures.OnRank(fixturedef.argname, find=find, arguments=converted)
        item.stash[_RECORD].setups.append(fixture)
        fixturedef.cached_result = (fixture, fixturedef.cache_key(request), None)  # type: ignore[arg-type]
        return fixture

    def open_world(self, item: pytest.Item) -> Iterator[DDPWorld]:
        record = item.stash[_RECORD]
        try:
            yield DDPWorld(self._session_ranks, record, self._settings, self._options(item))
        finally:
            with contextlib.ExitStack() as stack:  # release every world even if one release raises
                for lease in record.leases:
                    stack.callback(lease.close)

    def run_marked(self, item: pytest.Function) -> None:
        """Run a test body on every rank; raise on failure, skip or xfail."""
        record = item.stash[_RECORD]
        with contextlib.closing(WorldLease(self._session_ranks, record, self._options(item))) as lease:
            try:
                ended, verdict, error = lease.run(rank_side.run_test_body, _pack_body(item, record))
            except UsageError as usage_error:
                _fail(str(usage_error))
            if verdict.how == "passed":
                _warn_of_results(item, ended)
            elif verdict.how == "skipped":
                raise pytest.skip.Exception(verdict.headline, _use_item_location=True)  # reported at the test's line
            elif verdict.how == "xfailed":
                pytest.xfail(verdict.headline)
            else:
                record.failed = True
                record.shown = as_pytest_shows(verdict, lease.attachment, item.location)
                raise to_raise(verdict, error, marks.expected_failure(item))

    def _options(self, item: pytest.Item) -> dict[str, Any]:
        """Return the world options of a test: marks first, then settings."""
        try:
            test_options = marks.merged_options(item)
            parameters = getattr(getattr(item, "callspec", None), "params", {})
            if "world_size" in parameters:
                test_options["world_size"] = parameters["world_size"]
                marks.check_options(test_options, "@pytest.mark.ddp")
        except UsageError as error:
            _fail(str(error))
        # gloo supports every device and any number of ranks
        defaults = {"backend": self._settings.backend or "gloo"}
        return {**defaults, **{name: getattr(self._settings, name) for name in _OPTIONS}, **test_options}

    def reporting(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add the artifacts of the ranks to the test report (hook wrapper)."""
        record = item.stash.setdefault(_RECORD, Record(item))
        for lease in record.leases:
            lease.collect_output()
        report = yield
        record.failed |= report.failed
        if call.when == "teardown":
            del item.stash[_RECORD]  # pytest keeps items until the end; generator states take 35 kB each
            if record.leases and report.failed:  # after their release
                self._session_ranks.drop(item)
        if call.when == "call" and record.shown is not None and report.failed:
            report.longrepr = record.shown
        error = call.excinfo.value if call.excinfo is not None else None
        sections = record.explained[1] if error is record.explained[0] else []
        add = getattr(report.longrepr, "addsection", lambda *section: report.sections.append(section))
        for title, text in sections:
            add(title, text)  # also included in a JUnit report
        if not sections and record.shown is None and isinstance(error, DDPCheckError) and error.detail:
            report.sections.append(("ddpcheck", error.detail))
        if (sections or record.shown is not None) and item.config.getoption("usepdb", False):
            call.excinfo = None  # already debugged on the rank
        return report

    def finish(self, item: pytest.Item) -> None:
        self._session_ranks.finish(item)
        if (record := item.stash.get(_RECORD, None)) is not None and record.quitting:
            pytest.exit("Quitting debugger")

    def close(self) -> None:
        self._session_ranks.close()


def _refuse_wrong_start(config: pytest.Config, launcher: str) -> None:
    """Raise if pytest-xdist runs under a launcher, or `launcher` is "on" without one."""
    if launcher == "off" or LAUNCHED in config.stash:
        return
    if launcher == "on":
        require()
    if hasattr(config, "workerinput") and (launch := detect()) is not None:
        raise UsageError(
            f"{launch.launcher} has started {launch.world_size} ranks, and pytest-xdist workers in each of them; run "
            "pytest without -n there, or with --launcher=off, which starts new ranks for each test."
        )


def _fail(sentence: str) -> NoReturn:
    raise pytest.fail.Exception(sentence, pytrace=False) from None


def _pack_body(item: pytest.Function, record: Record) -> bytes:
    function = item.obj
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        _fail(f"{item.name} is async, and @pytest.mark.ddp runs plain functions; call asyncio.run in its body.")
    if item.config.getoption("trace", False):
        _fail(f"--trace stops in pytest's own process, and {item.name} runs on ranks; put breakpoint() in it instead.")
    names = item._fixtureinfo.argnames
    arguments = {name: rank_fixtures.to_rank_value(name, item.funcargs[name]) for name in names}
    return rank_fixtures.pack_test(item.name, arguments, function, record.setups)


def _bound_function(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Any:
    """Return the function of a fixture; if a method, bound to the test instance."""
    try:
        from _pytest.fixtures import resolve_fixture_function

        return resolve_fixture_function(fixturedef, request)
    except ImportError:
        return fixturedef.func


def _warn_of_results(item: pytest.Item, ended: dict[int, Any]) -> None:
    if returned := next((outcome.returned for outcome in ended.values() if outcome.returned), ""):
        warning = pytest.PytestReturnNotNoneWarning(
            f"Test functions should return None, but {item.nodeid} returned {returned} on its ranks; did you mean "
            "to use `assert` instead of `return`?"
        )
        try:
            item.warn(warning)
        except pytest.PytestReturnNotNoneWarning:  # under `-W error`
            _fail(str(warning))
