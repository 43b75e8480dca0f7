"""Judges that are made to find nothing, to see which faults are not found any more."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
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
    "Finding": lambda *_given, **_named: "another finding",
    "tuple[str, tuple[int, ...], str]": lambda *_given, **_named: ("DDP306", (), ""),  # the code where nothing is known
    "Causes": lambda findings: Causes(list(findings), list(findings)),  # none has a cause
}
"""Stands for a judge, by the annotation of what that returns."""


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
def finding_nothing(function: FunctionType) -> Iterator[None]:
    """In the block `function` finds nothing, or another finding where it has to return one, wherever it is called."""
    code = _NOTHING[function.__annotations__["return"]].__code__
    constants = tuple(_ANOTHER if one == "another finding" else one for one in code.co_consts)
    kept, function.__code__ = function.__code__, code.replace(co_consts=constants)
    try:
        yield
    finally:
        function.__code__ = kept


def _has_found(value: Any) -> bool:
    if isinstance(value, Causes):
        return len(value.findings) < len(value.told_by)
    return bool(value[-1] if isinstance(value, tuple) else value)


@contextlib.contextmanager
def seeing(functions: dict[str, FunctionType]) -> Iterator[set[str]]:
    """The names of the functions that have found something in the block."""
    names = {id(function.__code__): name for name, function in functions.items()}  # a hash of code takes its time
    found: set[str] = set()

    def see(frame: FrameType, event: str, value: Any) -> None:
        if event == "return" and id(frame.f_code) in names and _has_found(value):
            found.add(names[id(frame.f_code)])

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        yield found
    finally:
        sys.setprofile(before)
