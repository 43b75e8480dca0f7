"""Pytest plugin: options, the `ddp` marker and fixtures, implemented in `ddpcheck.testing`.

Pytest imports this module in every session where ddpcheck is installed, so imports are lazy and exclude torch.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from ddpcheck.findings.errors import DDPCheckError

if TYPE_CHECKING:
    from ddpcheck.testing.fixture import DDPWorld
    from ddpcheck.testing.session import Session

_OPTIONS = {
    "world_size": "ranks of a test (default 2)",
    "timeout": "seconds after which a test's ranks count as hanging (default 30)",
    "backend": "backend of the ranks' process group: gloo or nccl (default gloo)",
    "device": "device of the ranks: cpu or cuda (default cpu)",
    "reuse": "test: new ranks for every test; module: the same ranks for all tests of a module, with a new process "
    "group for each (default test)",
    "threads": "threads that torch may use in each rank (default: the cores are shared out)",
    "launcher": "auto: under torchrun, mpirun or srun, tests run on the ranks that the launcher started; off: on new "
    "ranks; on: as auto, even if no test needs ranks (default auto)",
}
_MARKER = (
    "ddp(world_size=2, *, backend, device, timeout, reuse, threads, env, preload): run the body of the test on every "
    "rank of a real process group; a list of world sizes runs it once for each"
)
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_ID")
_SESSION = pytest.StashKey["Session"]()
_NEXT_TEST = pytest.StashKey[pytest.Item | None]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add every option as a flag and as an ini setting."""
    group = parser.getgroup("ddpcheck", "DistributedDataParallel (ddpcheck)")
    for name, text in _OPTIONS.items():
        dashed = name.replace("_", "-")
        group.addoption(f"--ddp-{dashed}", metavar=name.upper(), default=None, help=text)
        parser.addini(f"ddp_{name}", text, default="")
    text = "write the report of each ddp_world.check that fails into this folder, as an HTML page named for its test"
    group.addoption("--ddp-report", metavar="DIR", default=None, help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and the hooks for a launcher if launcher variables are set."""
    config.addinivalue_line("markers", _MARKER)
    if any(name in os.environ for name in _LAUNCHER_VARIABLES):
        from ddpcheck.testing import launched_session

        launched_session.register(config, _needs_ranks, tuple(_OPTIONS))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Shut down all ranks."""
    if (session := config.stash.get(_SESSION, None)) is not None:
        session.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Warn about misspelled `DDPCHECK_` environment variables."""
    if any(name.startswith("DDPCHECK_") for name in os.environ):
        from ddpcheck.report.settings import misspelled_variables

        for sentence in misspelled_variables():
            terminalreporter.write_line(f"ddpcheck: warning: {sentence}", yellow=True)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a `ddp` test over its list of world sizes."""
    if metafunc.definition.get_closest_marker("ddp") is not None:
        from ddpcheck.testing import marks

        marks.parametrize(metafunc)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Store the next test, so that its ranks can start early."""
    item.stash[_NEXT_TEST] = nextitem


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Set up a test that needs ranks."""
    if _needs_ranks(item):
        _session(item.config).begin(item, item.stash.get(_NEXT_TEST, None))


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> object:
    """Have the ranks set up fixtures that depend on per-rank values."""
    if fixturedef.scope == "function" and isinstance(item := request.node, pytest.Item) and _needs_ranks(item):
        return _session(item.config).defer_to_ranks(item, fixturedef, request)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a marked test on the ranks."""
    if pyfuncitem.get_closest_marker("ddp") is None or "ddp_world" in pyfuncitem.fixturenames:
        return None
    _session(pyfuncitem.config).run_marked(pyfuncitem)
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add rank output and details of ddpcheck errors to the test report."""
    session = item.config.stash.get(_SESSION, None)
    return (yield) if session is None else (yield from session.reporting(item, call))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Shut down ranks shared by a module after the module's last test."""
    if (session := item.config.stash.get(_SESSION, None)) is not None and _needs_ranks(item):
        session.finish(item)


@pytest.fixture
def ddp_world(request: pytest.FixtureRequest) -> Iterator[DDPWorld]:
    """Real ranks for a test: `ddp_world.run(fn, *args)`, `ddp_world.check(recipe)`, `ddp_world(world_size=4)`."""
    yield from _session(request.config).open_world(request.node)


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Any:
    """Return the rank of this process, in a test marked `ddp`."""
    return _session(request.config).rank_value(request.node, "rank")


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> Any:
    """Return the world size, in a test marked `ddp`."""
    return _session(request.config).rank_value(request.node, "world_size")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Any:
    """Return the `torch.device` of this rank, in a test marked `ddp`."""
    return _session(request.config).rank_value(request.node, "device")


@pytest.fixture
def process_group(request: pytest.FixtureRequest) -> Any:
    """Return the default process group, in a test marked `ddp`."""
    return _session(request.config).rank_value(request.node, "process_group")


def _needs_ranks(item: pytest.Item) -> bool:
    return item.get_closest_marker("ddp") is not None or "ddp_world" in getattr(item, "fixturenames", ())


def _session(config: pytest.Config) -> Session:
    session = config.stash.get(_SESSION, None)
    if session is None:
        from ddpcheck.testing.session import Session

        try:
            session = config.stash[_SESSION] = Session(config, tuple(_OPTIONS), _needs_ranks)
        except DDPCheckError as error:
            sentence = str(error).replace("--", "--ddp-", 1)
            raise pytest.fail.Exception(f"ddpcheck: {sentence}", pytrace=False) from None
    return session
