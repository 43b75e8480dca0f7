"""Judges that are made to find nothing, to see which faults are not found any more."""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

from ddpcheck import rules
from ddpcheck.findings.report import Finding
from ddpcheck.findings.rules import Severity
from ddpcheck.rules.causes import Causes

_ANOTHER = Finding("DDP602", ("nothing",), "Nothing.", Severity.NOTE)  # a rule that no fault expects
_NOTHING: dict[str, Callable[..., Any]] = {
    "list[Finding]": lambda *_given, **_named: [],
    "list[Finding] | None": lambda *_given, **_named: None,
    "Finding | None": lambda *_given, **_named: None,
    "Finding": lambda *_given, **_named: _ANOTHER,
    "tuple[str, tuple[int, ...], str]": lambda *_given, **_named: ("DDP306", (), ""),  # the code where nothing is known
    "Iterator[tuple[_Judge | None, Finding]]": lambda *_given, **_named: iter(()),
    "Causes": lambda findings: Causes(list(findings), list(findings)),  # none has a cause
}
"""Stands for a judge, by the annotation of what that returns."""


@functools.cache
def judges() -> dict[str, FunctionType]:
    """The functions of `ddpcheck.rules` that come to findings, by module and name; not those that reword findings."""
    found = {}
    for module in pkgutil.walk_packages(rules.__path__, f"{rules.__name__}."):
        for name, item in vars(importlib.import_module(module.name)).items():
            if isinstance(item, FunctionType) and item.__module__ == module.name:
                taken = {key: str(annotation) for key, annotation in item.__annotations__.items()}
                returned = taken.pop("return", "")
                rewords = "Finding" in str(taken) and not returned.startswith(("tuple", "Causes"))
                if not rewords and (returned in _NOTHING or "Finding" in returned):
                    found[f"{module.name.rpartition('.')[2]}.{name}"] = item
    return found


@contextlib.contextmanager
def _behaving(function: FunctionType, behaviour: Callable[..., Any]) -> Iterator[None]:
    """In the block a call of `function` is one of `behaviour`, whatever name it is called by."""

    def call(*args: Any, **named: Any) -> Any:
        behaviour = "behaviour"
        return behaviour(*args, **named)  # type: ignore[operator]

    code = call.__code__
    constants = tuple(behaviour if constant == "behaviour" else constant for constant in code.co_consts)
    kept, function.__code__ = function.__code__, code.replace(co_consts=constants)
    try:
        yield
    finally:
        function.__code__ = kept


def finding_nothing(judge: FunctionType) -> contextlib.AbstractContextManager[None]:
    """In the block the judge finds nothing, or another finding where it has to return one."""
    return _behaving(judge, _NOTHING[judge.__annotations__["return"]])


def _has_found(value: Any) -> bool:
    if isinstance(value, Causes):
        return len(value.findings) < len(value.root_causes)
    return bool(value[-1] if isinstance(value, tuple) else value)


@contextlib.contextmanager
def seeing(functions: Mapping[str, FunctionType]) -> Iterator[set[str]]:
    """The names of the judges that have found something in the block."""
    seen: set[str] = set()

    def noting(name: str, function: FunctionType) -> Callable[..., Any]:
        own = FunctionType(function.__code__, function.__globals__, name, function.__defaults__)
        own.__kwdefaults__ = function.__kwdefaults__

        def note(*args: Any, **named: Any) -> Any:
            value = own(*args, **named)
            if _has_found(value):
                seen.add(name)
            return value

        return note

    with contextlib.ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(_behaving(function, noting(name, function)))
        yield seen
