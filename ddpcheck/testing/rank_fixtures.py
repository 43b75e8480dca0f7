"""The arguments of a test on the ranks: values that are sent, and fixtures that every rank makes for itself.

A fixture of the user's is set up once, in the process that pytest runs in, and its value is sent to the ranks. What
depends on the rank cannot be: `rank`, `process_group` and their like, every fixture that uses one of them, and pytest's
own fixtures that change or watch the process that they are in (`monkeypatch`, `capsys`, `caplog` ...). Each rank makes
those for itself.

This module is light: it never imports torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from ddpcheck.findings.errors import UsageError
from ddpcheck.worlds import wire


@dataclass(frozen=True, eq=False)
class OnRank:
    """Stands, in the process that pytest runs in, for a value that each rank makes for itself.

    Attributes:
        name: Of the fixture.
    """

    name: str

    def _refuse(self, *_: object) -> Any:
        raise UsageError(
            f"The fixture {self.name!r} has its value on the ranks only; a fixture that uses it must name it as an "
            "argument, so that it is set up there, too."
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


@dataclass(frozen=True, eq=False)
class RankValue(OnRank):
    """`rank`, `world_size`, `device` or `process_group`."""


@dataclass(frozen=True, eq=False)
class Builtin(OnRank):
    """A fixture of pytest's that belongs to the process that it is used in.

    Attributes:
        detail: The class that captures, for `capsys` and its like; the parameter, for `request`.
    """

    detail: Any = None


@dataclass(frozen=True, eq=False)
class RankFixture(OnRank):
    """A fixture of the user's that needs something which each rank makes for itself.

    Attributes:
        function: What sets it up, or where to find that.
        arguments: For it, by name.
    """

    function: Any
    arguments: dict[str, Any]


@dataclass(frozen=True)
class InModule:
    """A fixture's function by the names under which another process finds it."""

    module: str
    name: str

    def find(self) -> Callable[..., Any]:
        """Import the module and take the function out of what `pytest.fixture` has made of it."""
        holder = getattr(importlib.import_module(self.module), self.name)
        function: Callable[..., Any] = _function_of(holder)
        return function


def _function_of(holder: Any) -> Any:
    if (function := getattr(holder, "_fixture_function", None)) is not None:  # pytest 8.4 and later
        return function
    wrapped = getattr(holder, "__pytest_wrapped__", None)
    return getattr(wrapped, "obj", None)


def reference(function: Any) -> Any:
    """A fixture's function as it travels: by name where a rank can import it, so that it finds its module's globals."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    name = getattr(function, "__name__", "")
    if module is not None and _function_of(getattr(module, name, None)) is function and wire.importable(module):
        return InModule(module.__name__, name)
    return function


_CAPTURES = {
    "SysCapture": "capsys",
    "SysCaptureBinary": "capsysbinary",
    "FDCapture": "capfd",
    "FDCaptureBinary": "capfdbinary",
}


def converted(name: str, value: Any) -> Any:
    """A fixture's value as it travels, or what stands for it."""
    if isinstance(value, pytest.MonkeyPatch):
        return Builtin("monkeypatch")
    if isinstance(value, pytest.WarningsRecorder):
        return Builtin("recwarn")
    if isinstance(value, pytest.LogCaptureFixture):
        return Builtin("caplog")
    if isinstance(value, pytest.CaptureFixture):
        return Builtin(_CAPTURES.get(value.captureclass.__name__, "capsys"), value.captureclass)
    if isinstance(value, pytest.FixtureRequest):
        node = value.node
        return Builtin("request", (getattr(value, "param", None), getattr(node, "name", ""), node.nodeid))
    if name == "record_property":
        return Builtin(name)
    return value


def _advice(value: object) -> str:
    if type(value).__module__.startswith("_pytest."):
        return "it belongs to pytest's process: let a fixture of your own take from it what the test needs."
    return (
        "let the fixture take the fixture 'rank' as an argument, and it is set up on every rank, or make the value in "
        "the test."
    )


def pack(test: str, arguments: Mapping[str, Any], rest: Sequence[Any]) -> bytes:
    """Pickle what a test is called with; values that share something go on sharing it.

    Args:
        test: Name of the test.
        arguments: Values of its fixtures by name.
        rest: What else travels with them.

    Raises:
        UsageError: A value cannot be sent, with the name of the fixture that it comes from.
    """
    try:
        return wire.dumps((arguments, *rest))
    except Exception as error:
        for name, value in arguments.items():
            fixtures = value.arguments if isinstance(value, RankFixture) else {name: value}
            for fixture, inner in fixtures.items():
                try:
                    wire.dumps(inner)
                except Exception as reason:
                    raise UsageError(
                        f"The fixture {fixture!r} of {test} has a value of type {type(inner).__qualname__} that cannot "
                        f"be sent to the ranks ({type(reason).__name__}: {reason}); {_advice(inner)}"
                    ) from error
        instance = next((one for one in rest if hasattr(one, "__self__")), None)
        for name, value in vars(getattr(instance, "__self__", object)).items() if instance is not None else ():
            try:
                wire.dumps(value)
            except Exception as reason:
                raise UsageError(
                    f"The attribute {name!r} of the test class of {test}, a {type(value).__qualname__}, cannot be sent "
                    f"to the ranks ({type(reason).__name__}: {reason}); make it in the test."
                ) from error
        raise UsageError(
            f"{test} cannot be sent to the ranks ({type(error).__name__}: {error}); what it refers to must be "
            "importable or picklable."
        ) from error
