"""The functions that a check calls on its ranks: `calls.local.local_step` is `ddpcheck.gather.local.local_step`.

For mypy and for an editor they are those functions themselves. When it runs, this module is light: what the process of
the check gets, and sends to the ranks, imports the function's module where it is called.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ddpcheck import rank as this_rank
from ddpcheck.evidence import Unexplained

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

MODULES = (
    "ddpcheck.analysis",
    "ddpcheck.reference",
    "ddpcheck.gather.compiled",
    "ddpcheck.gather.ddp",
    "ddpcheck.gather.draws",
    "ddpcheck.gather.exact",
    "ddpcheck.gather.local",
    "ddpcheck.gather.picture",
    "ddpcheck.gather.program",
    "ddpcheck.gather.repeat",
    "ddpcheck.gather.rows",
    "ddpcheck.gather.session",
    "ddpcheck.gather.shards",
)
"""Imported once, before ranks are forked: in each of them that would be a third of the cost of a small check."""

if TYPE_CHECKING:
    from ddpcheck import analysis, reference
    from ddpcheck.gather import (
        compiled,
        ddp,
        draws,
        exact,
        local,
        picture,
        program,
        repeat,
        rows,
        session,
        shards,
    )
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
) -> Result | Unexplained:
    """Call what only explains; where it raises, the rank says so, and lives."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        reply = this_rank.describe(error)
        with contextlib.suppress(Exception):  # the single process has no session
            session.recover()
        text = str(reply["text"]).strip().partition("\n")[0]
        return Unexplained(f"{reply['type']}: {text}" if text else reply["type"], reply["bug"], reply["traceback"])


__all__ = [
    "MODULES",
    "analysis",
    "compiled",
    "ddp",
    "draws",
    "exact",
    "local",
    "picture",
    "program",
    "reference",
    "repeat",
    "rows",
    "session",
    "shards",
    "try_call",
]
