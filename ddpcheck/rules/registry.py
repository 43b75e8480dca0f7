"""Registry of judges: a judge declares by the type of its argument which view it needs, as a test its fixtures.

@rule
def judge_learning_rates(optimizers: Optimizers) -> Iterable[Finding]: ...
"""

from __future__ import annotations

import functools
import importlib
import inspect
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from ddpcheck.findings.report import Finding
from ddpcheck.rules.verdict import Row, Verdict, Verdicts
from ddpcheck.trace.script_facts import ScriptFacts
from ddpcheck.trace.view import View

_Judge = TypeVar("_Judge", bound=Callable[..., Iterable[Finding]])
_judges: dict[type[View], list[Callable[..., Iterable[Finding]]]] = {}
judges_of_others: list[tuple[type[View], Callable[..., Any]]] = []  # with their views (`rules.others`)


def rule(judge: _Judge) -> _Judge:
    """Register a judge under the view that its argument names."""
    views = [typing.get_type_hints(judge).get(name) for name in inspect.signature(judge).parameters]
    if len(views) != 1 or not isinstance(views[0], type) or not issubclass(views[0], View):
        raise TypeError(f"{judge.__name__} must have one argument, whose type is a view")
    if judge.__module__.startswith(f"{__package__}."):
        _judges.setdefault(views[0], []).append(judge)
    else:
        judges_of_others.append((views[0], judge))
    return judge


@functools.cache
def import_rules() -> None:
    """Import the files of all rules, which registers their judges."""
    for file in sorted(Path(__file__).parent.glob("*/[!_]*.py")):
        importlib.import_module(f"{__package__}.{file.parent.name}.{file.stem}")


def row_of(view: type[View]) -> Row[ScriptFacts]:
    """Return the row that runs the judges of a view."""

    def judge(facts: ScriptFacts) -> Verdicts:
        first = view.of(facts)
        if first is None:
            return {}
        findings = judge_view(first)
        return {view.check: Verdict(findings, *first.compared(findings))}

    judge.__name__ = view.__name__
    return Row(judge, (view.check,), over_ranks=view.needs_all_ranks)


def judge_view(view: View) -> list[Finding]:
    """Return the findings of all judges of a view."""
    import_rules()
    return [finding for judge in _judges.get(type(view), ()) for finding in judge(view)]
