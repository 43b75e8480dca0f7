"""Arguments of a test on ranks: pickled values and per-rank fixtures.

User fixtures are set up once in the pytest process and their values sent to the ranks. Set up on each rank instead:
`rank`, `process_group` etc., every fixture that uses one of these, and pytest fixtures that modify or observe the
current process (`monkeypatch`, `capsys`, `caplog` ...).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from ddpcheck.findings.errors import UsageError
from ddpcheck.worlds import rank as this_rank
from ddpcheck.worlds import wire

# --- In the pytest process -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class OnRank:
    """Placeholder in the pytest process for a fixture value that each rank creates."""

    name: str
    detail: Any = None  # for `capsys` etc. its capture class; for `request` (param, name, nodeid)
    find: Callable[[], Any] | None = None  # returns the function of a user-defined fixture; `None` for other fixtures
    arguments: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of the fixture function

    def _refuse(self, *_: object) -> Any:
        raise UsageError(
            f"The fixture {self.name!r} has its value on the ranks only; a fixture that uses it must name it as an "
            "argument, so that it is set up there as well."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()

    __bool__ = __int__ = __index__ = __iter__ = __len__ = __getitem__ = _refuse
    __add__ = __radd__ = __sub__ = __mul__ = __mod__ = __lt__ = __gt__ = __le__ = __ge__ = _refuse
    __eq__ = __ne__ = _refuse
    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(self.__dict__.values())


def _imported_fixture_function(module: str, name: str) -> Any:
    return _fixture_function_of(getattr(importlib.import_module(module), name))


def _fixture_function_of(holder: Any) -> Any:
    if (function := getattr(holder, "_fixture_function", None)) is not None:  # pytest 8.4 and later
        return function
    return getattr(getattr(holder, "__pytest_wrapped__", None), "obj", None)


def picklable_getter(function: Any) -> Callable[[], Any]:
    """Return a picklable function that returns the fixture function `function`.

    If the module of `function` can be imported, ranks import `function` by name, so that it uses the module's globals.
    """
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    name = getattr(function, "__name__", "")
    if module is not None and _fixture_function_of(getattr(module, name, None)) is function and wire.importable(module):
        return functools.partial(_imported_fixture_function, module.__name__, name)
    return lambda: function


_CAPTURES = {
    "SysCapture": "capsys",
    "SysCaptureBinary": "capsysbinary",
    "FDCapture": "capfd",
    "FDCaptureBinary": "capfdbinary",
}


def to_rank_value(name: str, value: Any) -> Any:
    """Return the fixture value, or a placeholder for a value that ranks must create."""
    if isinstance(value, pytest.MonkeyPatch):
        return OnRank("monkeypatch")
    if isinstance(value, pytest.WarningsRecorder):
        return OnRank("recwarn")
    if isinstance(value, pytest.LogCaptureFixture):
        return OnRank("caplog")
    if isinstance(value, pytest.CaptureFixture):
        return OnRank(_CAPTURES.get(value.captureclass.__name__, "capsys"), value.captureclass)
    if isinstance(value, pytest.FixtureRequest):
        node = value.node
        return OnRank("request", (getattr(value, "param", None), getattr(node, "name", ""), node.nodeid))
    if name == "record_property":
        return OnRank(name)
    return value


def pack_test(test: str, arguments: Mapping[str, Any], function: Any, setups: list[OnRank]) -> bytes:
    """Pickle function, arguments and fixtures of a test together; shared objects stay shared.

    Raises:
        UsageError: A value cannot be pickled; names the fixture.
    """
    try:
        return wire.dumps((arguments, function, setups))
    except Exception as error:
        fixtures: dict[str, Any] = {}
        for name, value in arguments.items():
            fixtures |= value.arguments if isinstance(value, OnRank) and value.find is not None else {name: value}
        for name, value, reason in wire.unsendable(fixtures):
            advice = (
                "it belongs to pytest's process: write a fixture that takes the values that the test needs from it."
                if type(value).__module__.startswith("_pytest.")
                else "let the fixture take the fixture 'rank' as an argument, and it is set up on every rank, or make "
                "the value in the test."
            )
            raise UsageError(
                f"The fixture {name!r} of {test} has a value of type {type(value).__qualname__} that cannot be sent to "
                f"the ranks ({type(reason).__name__}: {reason}); {advice}"
            ) from error
        for name, value, reason in wire.unsendable(vars(function.__self__) if hasattr(function, "__self__") else {}):
            raise UsageError(
                f"The attribute {name!r} of the test class of {test}, a {type(value).__qualname__}, cannot be sent to "
                f"the ranks ({type(reason).__name__}: {reason}); make it in the test."
            ) from error
        raise UsageError(
            f"{test} cannot be sent to the ranks ({type(error).__name__}: {error}); what it refers to must be "
            "importable or picklable."
        ) from error


# --- On a rank -------------------------------------------------------------------------------------------------------


@dataclass
class FixtureMaker:
    """Maker of per-rank fixture values on a rank; sets up each fixture once."""

    teardown: contextlib.ExitStack  # tears down the fixtures
    properties: list[tuple[str, object]]  # name and value of each `record_property` call
    _values: dict[object, Any] = field(default_factory=dict)

    def make(self, value: Any) -> Any:
        """Return `value`, or for a placeholder the value of its fixture on this rank."""
        if not isinstance(value, OnRank):
            return value
        key: object = value if value.find is not None or value.name == "request" else value.name
        if key not in self._values:
            self._values[key] = self._set_up(value)
        return self._values[key]

    def _set_up(self, value: OnRank) -> Any:
        if value.find is None:
            return self.teardown.enter_context(_BUILTIN[value.name](value.detail, self))
        function = value.find()
        arguments = {name: self.make(inner) for name, inner in value.arguments.items()}
        if inspect.isgeneratorfunction(function):
            return self.teardown.enter_context(_generator_fixture(value.name, function(**arguments)))
        return function(**arguments)


@contextlib.contextmanager
def _generator_fixture(name: str, steps: Generator[Any, None, None]) -> Iterator[Any]:
    missing = object()
    if (value := next(steps, missing)) is missing:
        raise UsageError(f"The fixture {name!r} did not yield a value.")
    try:
        yield value
    finally:
        for _ in steps:
            raise UsageError(
                f"The fixture {name!r} yields more than once; a fixture yields its value, and then cleans up."
            )


@contextlib.contextmanager
def _recwarn(_: object, __: FixtureMaker) -> Iterator[pytest.WarningsRecorder]:
    with pytest.WarningsRecorder(_ispytest=True) as recorder:
        warnings.simplefilter("default")
        yield recorder


@contextlib.contextmanager
def _capture_fixture(capture: Any, __: FixtureMaker) -> Iterator[Any]:
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


class RankRequest:
    """Subset of pytest's `request` available on a rank."""

    def __init__(self, detail: tuple[Any, str, str], maker: FixtureMaker) -> None:
        self.param, name, nodeid = detail
        self.addfinalizer = maker.teardown.callback
        self.node = SimpleNamespace(name=name, nodeid=nodeid)

    def __getattr__(self, name: str) -> Any:
        raise UsageError(
            f"request.{name} is not available on a rank: only request.param, request.addfinalizer, request.node.name "
            "and request.node.nodeid are; read it in a fixture that does not use the rank, and return its value."
        )


_BUILTIN: Mapping[str, Callable[[Any, FixtureMaker], contextlib.AbstractContextManager[Any]]] = {
    "rank": lambda _, __: contextlib.nullcontext(this_rank.current().rank),
    "world_size": lambda _, __: contextlib.nullcontext(this_rank.current().world_size),
    "device": lambda _, __: contextlib.nullcontext(sys.modules["torch"].device(this_rank.current().device)),
    "process_group": lambda _, __: contextlib.nullcontext(sys.modules["torch.distributed"].group.WORLD),
    "monkeypatch": lambda _, __: pytest.MonkeyPatch.context(),
    "recwarn": _recwarn,
    **dict.fromkeys(_CAPTURES.values(), _capture_fixture),
    "caplog": _caplog,
    "request": lambda detail, maker: contextlib.nullcontext(RankRequest(detail, maker)),
    "record_property": lambda _, maker: contextlib.nullcontext(
        lambda name, value: maker.properties.append((name, value))
    ),
}
