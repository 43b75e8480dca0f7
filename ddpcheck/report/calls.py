"""The phases that a check calls on its ranks: `calls.local_step.local_step` is that of `ddpcheck.gather.phases`.

For mypy and for an editor they are those functions themselves. When it runs, this module is light: what the process of
the check gets, and sends to the ranks, imports the function's module where it is called.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ddpcheck.findings.evidence.steps import NoExplanation
from ddpcheck.worlds import rank as this_rank

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

MODULES = (
    "ddpcheck.gather.phases.ddp_step",
    "ddpcheck.gather.phases.local_step",
    "ddpcheck.gather.phases.model_build",
    "ddpcheck.gather.phases.program_data",
    "ddpcheck.gather.phases.rank_state",
    "ddpcheck.gather.phases.repeated_step",
    "ddpcheck.gather.phases.shard_analysis",
    "ddpcheck.gather.phases.single_process",
    "ddpcheck.report.graph.graph_phases",
    "ddpcheck.report.matrix.matrix_phases",
    "ddpcheck.report.repro.probe",
    "ddpcheck.report.schedule.schedule_phases",
)
"""Imported once, before ranks are forked: in each of them that would be a third of the cost of a small check."""

if TYPE_CHECKING:  # under their own names, since other modules import them from here
    from ddpcheck.gather.phases import ddp_step as ddp_step
    from ddpcheck.gather.phases import local_step as local_step
    from ddpcheck.gather.phases import model_build as model_build
    from ddpcheck.gather.phases import program_data as program_data
    from ddpcheck.gather.phases import rank_state as rank_state
    from ddpcheck.gather.phases import repeated_step as repeated_step
    from ddpcheck.gather.phases import shard_analysis as shard_analysis
    from ddpcheck.gather.phases import single_process as single_process
    from ddpcheck.report.graph import graph_phases as graph_phases
    from ddpcheck.report.matrix import matrix_phases as matrix_phases
    from ddpcheck.report.repro import probe as probe
    from ddpcheck.report.schedule import schedule_phases as schedule_phases
else:

    class _Module:
        """Stands for a module of MODULES; its attributes are functions that import it, and call those of that name."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, function: str) -> Callable[..., Any]:
            return functools.partial(_call, self._name, function)

    globals().update({name.rpartition(".")[2]: _Module(name) for name in MODULES})


def _call(module: str, function: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(importlib.import_module(module), function)(*args, **kwargs)


def try_call(
    function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result | NoExplanation:
    """Call what only explains; where it raises, the rank says so, and lives."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        reply = this_rank.describe(error)
        with contextlib.suppress(Exception):  # the single process has no such state
            rank_state.recover()
        text = str(reply["text"]).strip().partition("\n")[0]
        return NoExplanation(f"{reply['type']}: {text}" if text else reply["type"], reply["bug"], reply["traceback"])
