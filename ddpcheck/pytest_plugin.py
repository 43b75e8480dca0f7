"""The pytest plugin: options and the fixture `ddp_world`; all logic is in the harness and in `check`.

This module is light: it never imports torch, for pytest imports it in every session of every project that has
ddpcheck installed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from ddpcheck.config import Settings, load_settings
from ddpcheck.errors import DdpcheckError, RankError

if TYPE_CHECKING:
    from ddpcheck.findings import Report
    from ddpcheck.harness import World
    from ddpcheck.recipe import Recipe

_OPTIONS = {
    "world_size": "ranks of a ddp_world (default 2)",
    "timeout": "seconds after which a run of a ddp_world counts as a hang (default 30)",
    "backend": "backend of a ddp_world: gloo or nccl (default gloo)",
    "device": "device of a ddp_world: cpu or cuda (default cpu)",
}
_IN_USE = pytest.StashKey["DdpWorld"]()


class DdpWorld:
    """Real ranks for a test whose body runs in the parent process.

    The ranks start with the first `run`, and end with the test. Calling it, as in `ddp_world(world_size=4)`, gives
    another world for the same test.
    """

    def __init__(self, settings: Settings, defer: Callable[[Callable[[], None]], None], **options: Any) -> None:
        self._settings = settings
        self._defer = defer
        self._options = options
        self._world: World | None = None
        self._others: list[DdpWorld] = []

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._settings.world_size

    def __call__(self, **options: Any) -> DdpWorld:
        """Another world; the options are those of `ddpcheck.World`."""
        fields = {field.name for field in dataclasses.fields(Settings)}
        settings = dataclasses.replace(self._settings, **{k: v for k, v in options.items() if k in fields})
        extra = {key: value for key, value in options.items() if key not in fields}
        other = DdpWorld(settings, self._defer, **{**self._options, **extra})
        self._others.append(other)
        return other

    @property
    def world(self) -> World:
        """The `ddpcheck.World` behind this fixture: a fresh one at first, and after one that failed."""
        if self._world is None or self._world.failed:
            from ddpcheck.harness import World

            self._world = World(
                self._settings.world_size,
                backend=self._settings.backend or "gloo",  # works on every device, with any number of ranks
                device=self._settings.device,
                timeout=self._settings.timeout,
                preload=self._settings.preload,
                **self._options,
            )
            self._defer(self._world.close)
        return self._world

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `fn` on every rank; one result a rank.

        Raises:
            RankError: A rank failed.
            HangError: A rank did not finish in time.
        """
        __tracebackhide__ = True
        try:
            return self.world.run(fn, *args, **kwargs)
        except RankError as error:
            raise error.with_traceback(None) from error.__cause__  # the harness's frames help nobody

    def check(self, recipe: Recipe | str, **options: Any) -> Report:
        """Check a recipe on a world of this size; the test fails with the report when that is not good enough.

        Args:
            recipe: A recipe or a TARGET.
            **options: Those of `ddpcheck.check`.
        """
        __tracebackhide__ = True
        from ddpcheck.check import check

        names = ("world_size", "backend", "device", "steps", "timeout", "seed", "preload", "select", "ignore")
        report = check(recipe, **{**{name: getattr(self._settings, name) for name in names}, **options})
        if report.exit_code(self._settings.fail_on):
            pytest.fail(_as_text(report), pytrace=False)
        return report

    def outputs(self) -> Iterator[tuple[str, str]]:
        """What the ranks printed, as (whose, text) pairs, without those that printed nothing."""
        if self._world is not None:
            for rank in range(self.world_size):
                text = self._world.output(rank)
                if text.strip():
                    yield f"rank {rank} of {self.world_size}", text
        for other in self._others:
            yield from other.outputs()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, each as a flag and as an ini option."""
    group = parser.getgroup("ddpcheck", "DistributedDataParallel (ddpcheck)")
    for name, text in _OPTIONS.items():
        dashed = name.replace("_", "-")
        group.addoption(f"--ddp-{dashed}", metavar=name.upper(), default=None, help=text)
        parser.addini(f"ddp_{name}", text, default="")


@pytest.fixture
def ddp_world(request: pytest.FixtureRequest) -> Iterator[DdpWorld]:
    """Real ranks for a test: `ddp_world.run(fn, *args)`, `ddp_world.check(recipe)`, `ddp_world(world_size=4)`."""
    closing: list[Callable[[], None]] = []
    world = DdpWorld(_settings(request.config), closing.append)
    request.node.stash[_IN_USE] = world
    try:
        yield world
    finally:
        del request.node.stash[_IN_USE]
        _close_all(closing)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put what the ranks printed, and what more an error of ours has to say, into sections of the test's report."""
    report = yield
    world = item.stash.get(_IN_USE, None)
    if world is not None and call.when == "call":
        for who, text in world.outputs():  # under this name pytest shows it, and JUnit XML has it
            report.sections.append((f"Captured stdout of {who}", text))
    if call.excinfo is not None and isinstance(call.excinfo.value, DdpcheckError) and call.excinfo.value.detail:
        report.sections.append(("ddpcheck", call.excinfo.value.detail))
    return report


def _settings(config: pytest.Config) -> Settings:
    """Flags over environment over ini over `[tool.ddpcheck]` over default."""
    try:
        return load_settings(
            {name: config.getoption(f"ddp_{name}") for name in _OPTIONS},
            ini={name: config.getini(f"ddp_{name}") for name in _OPTIONS},
            start=config.rootpath,
        )
    except DdpcheckError as error:
        raise pytest.UsageError(f"ddpcheck: {str(error).replace('--', '--ddp-', 1)}") from error


def _close_all(closing: list[Callable[[], None]]) -> None:
    """Close every world, also when closing one of them fails."""
    if closing:
        try:
            closing.pop()()
        finally:
            _close_all(closing)


def _as_text(report: Report) -> str:
    from ddpcheck.render import renderer_for

    try:
        return renderer_for("text").render(report)
    except ImportError:  # rich is not there
        return report.to_json()
