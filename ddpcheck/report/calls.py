"""Stand-ins for the phases of a check: `calls.ddp_step.ddp_step` for `gather.phases.ddp_step.ddp_step`.

Mypy and editors see the functions themselves. At run time this module is light: the checking process gets, and sends to
the ranks, callables that import the function's module only when called.
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
)
"""Modules preloaded before the fork, which saves a third of a small check's time."""


class PhaseModule:
    """Stand-in for a module of `gather.phases`; a call of a function imports the module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, function: str) -> Callable[..., Any]:
        return functools.partial(_call, self._name, function)


if TYPE_CHECKING:  # re-exported under their own names for other modules
    from ddpcheck.gather.phases import ddp_step as ddp_step
    from ddpcheck.gather.phases import local_step as local_step
    from ddpcheck.gather.phases import model_build as model_build
    from ddpcheck.gather.phases import program_data as program_data
    from ddpcheck.gather.phases import rank_state as rank_state
    from ddpcheck.gather.phases import repeated_step as repeated_step
    from ddpcheck.gather.phases import shard_analysis as shard_analysis
    from ddpcheck.gather.phases import single_process as single_process
else:
    globals().update({name.rpartition(".")[2]: PhaseModule(name) for name in MODULES})


def _call(module: str, function: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(importlib.import_module(module), function)(*args, **kwargs)


def try_call(
    function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result | NoExplanation:
    """Call a phase that only explains a fault; if it raises, return `NoExplanation`."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        reply = this_rank.exception_data(error)
        with contextlib.suppress(Exception):  # the single process has no such state
            rank_state.recover()
        text = str(reply["text"]).strip().partition("\n")[0]
        return NoExplanation(f"{reply['type']}: {text}" if text else reply["type"], reply["bug"], reply["traceback"])
