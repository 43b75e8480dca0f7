"""Makes fixtures on a rank: those of the user that need the rank, and those of pytest that change or watch a process.

This module is light: it never imports torch.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from ddpcheck.findings.errors import UsageError
from ddpcheck.testing.rank_context import RankArtifacts
from ddpcheck.testing.rank_fixtures import Builtin, InModule, OnRank, RankFixture, RankValue
from ddpcheck.worlds import rank as this_rank


class FixtureMaker:
    """Makes what each rank makes for itself, everything once."""

    def __init__(self, teardown: contextlib.ExitStack, attachment: RankArtifacts) -> None:
        self._teardown = teardown
        self._attachments = attachment
        self._made: dict[object, Any] = {}

    def make(self, value: Any) -> Any:
        """The value itself, or what it stands for."""
        if not isinstance(value, OnRank):
            return value
        key: object = value if isinstance(value, RankFixture) or value.name == "request" else value.name
        if key not in self._made:
            self._made[key] = self._fresh(value)
        return self._made[key]

    def _fresh(self, value: OnRank) -> Any:
        if isinstance(value, RankValue):
            return _rank_values()[value.name]
        if isinstance(value, RankFixture):
            function = value.function.find() if isinstance(value.function, InModule) else value.function
            arguments = {name: self.make(inner) for name, inner in value.arguments.items()}
            if inspect.isgeneratorfunction(function):
                return self._teardown.enter_context(_generated(value.name, function(**arguments)))
            return function(**arguments)
        assert isinstance(value, Builtin)
        return self._teardown.enter_context(_BUILTIN[value.name](value.detail, self))

    @property
    def properties(self) -> list[tuple[str, object]]:
        return self._attachments.properties

    @property
    def teardown(self) -> contextlib.ExitStack:
        return self._teardown


def _rank_values() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    here = this_rank.current()
    return {
        "rank": here.rank,
        "world_size": here.world_size,
        "device": torch.device(here.device),
        "process_group": dist.group.WORLD,
    }


@contextlib.contextmanager
def _generated(name: str, steps: Generator[Any, None, None]) -> Iterator[Any]:
    nothing = object()
    if (value := next(steps, nothing)) is nothing:
        raise UsageError(f"The fixture {name!r} did not yield a value.")
    try:
        yield value
    finally:
        for _ in steps:
            raise UsageError(
                f"The fixture {name!r} yields more than once; a fixture yields its value, and then cleans up."
            )


@contextlib.contextmanager
def _monkeypatch(_: object, __: FixtureMaker) -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@contextlib.contextmanager
def _recwarn(_: object, __: FixtureMaker) -> Iterator[pytest.WarningsRecorder]:
    with pytest.WarningsRecorder(_ispytest=True) as recorder:
        warnings.simplefilter("default")
        yield recorder


@contextlib.contextmanager
def _captured(capture: Any, __: FixtureMaker) -> Iterator[Any]:
    fixture: Any = pytest.CaptureFixture(capture, None, _ispytest=True)  # type: ignore[arg-type]
    fixture._start()
    try:
        yield fixture
    finally:
        fixture.close()


@contextlib.contextmanager
def _caplog(_: object, __: FixtureMaker) -> Iterator[pytest.LogCaptureFixture]:
    from _pytest import logging as pytest_logging

    class Item:
        stash = pytest.Stash()

    handler = pytest_logging.LogCaptureHandler()
    Item.stash[pytest_logging.caplog_handler_key] = handler
    Item.stash[pytest_logging.caplog_records_key] = {"call": handler.records}
    fixture = pytest.LogCaptureFixture(Item, _ispytest=True)  # type: ignore[arg-type]
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield fixture
    finally:
        root.removeHandler(handler)
        fixture._finalize()


@contextlib.contextmanager
def _request(param: Any, maker: FixtureMaker) -> Iterator[Any]:
    value, name, nodeid = param
    yield RankRequest(value, maker.teardown.callback, RankNode(name, nodeid))


@contextlib.contextmanager
def _record_property(_: object, maker: FixtureMaker) -> Iterator[Callable[[str, object], None]]:
    yield lambda name, value: maker.properties.append((name, value))


_BUILTIN: Mapping[str, Callable[[Any, FixtureMaker], contextlib.AbstractContextManager[Any]]] = {
    "monkeypatch": _monkeypatch,
    "recwarn": _recwarn,
    "capsys": _captured,
    "capsysbinary": _captured,
    "capfd": _captured,
    "capfdbinary": _captured,
    "caplog": _caplog,
    "request": _request,
    "record_property": _record_property,
}


@dataclass(frozen=True, slots=True)
class RankNode:
    """The part of a test's `request.node` that exists on a rank."""

    name: str
    nodeid: str


@dataclass(frozen=True, slots=True)
class RankRequest:
    """The part of pytest's `request` that exists on a rank.

    Attributes:
        param: As in `pytest.FixtureRequest`.
        addfinalizer: As there.
        node: The test.
    """

    param: Any
    addfinalizer: Callable[[Callable[[], object]], object]
    node: RankNode

    def __getattr__(self, name: str) -> Any:
        raise UsageError(
            f"request.{name} is not there on a rank, where only request.param, request.addfinalizer, request.node.name "
            "and request.node.nodeid are; let a fixture that does not use the rank read it and hand its value on."
        )
