"""The origin of an exception: the target, or a bug of ddpcheck.

What counts is the innermost frame of the traceback that belongs to neither torch nor Python. In a hook or a mode of
ddpcheck it is ours, although the target's code called; in the target's code, or in ours while it calls the target or
torch as a training loop would (`for_target`), it is the target's; and so is what a public function of ddpcheck says to
a target that calls it.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any, TypeVar

import ddpcheck
from ddpcheck.findings.errors import BugError, DdpcheckError
from ddpcheck.findings.source_lines import is_user_file, whole_traceback

_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
BUG = "this is a bug in ddpcheck"
_LONGEST = 150  # characters of a message of somebody else's
_Function = TypeVar("_Function", bound=Callable[..., Any])

_passing_on: set[CodeType] = {ddpcheck.__getattr__.__code__}  # a name that the package has not: whoever asked for it
_for_target: set[CodeType] = set()


def passes_on(function: _Function) -> _Function:
    """Mark a function of ddpcheck that stands in torch's place and hands calls on: its frames count as torch's."""
    _passing_on.add(function.__code__)
    return function


def for_target(function: _Function) -> _Function:
    """Mark a function that calls the target, or torch as a training loop would: its frames count as the target's."""
    _for_target.add(function.__code__)
    return function


def is_ours(error: BaseException) -> bool:
    """Whether `error`, or one that it was raised in the handling of, is a bug of ddpcheck."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if isinstance(current, DdpcheckError) or not isinstance(current, Exception):
            return isinstance(current, BugError)
        run = _innermost_run(current)
        if run and not _is_asked_for(run[0][0]):
            files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(current.__traceback__)]
            return not (isinstance(current, RecursionError) and any(map(is_user_file, files)))
        seen.add(id(current))
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return False


def is_misuse(error: DdpcheckError) -> bool:
    """Whether the target has called a public function of ddpcheck that refused; a wrong recipe is not that."""
    run = _innermost_run(error)
    return bool(run) and _is_asked_for(run[0][0]) and not run[0][0].f_code.co_qualname.startswith("Recipe.")


def as_bug(error: BaseException, place: str = "") -> BugError:
    """A bug of ddpcheck as an error that asks to report it, with the whole traceback.

    Args:
        error: Whatever was raised.
        place: What was being done, in the words of `ddpcheck.rank.set_status`.
    """
    if isinstance(error, BugError):
        return error
    lines = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {lines[0][:_LONGEST]}" if lines else type(error).__name__
    where = ""
    if run := _innermost_run(error):
        frame, line = run[-1]
        where = f"ddpcheck/{os.path.relpath(frame.f_code.co_filename, _FOLDER)}:{line}".replace(os.sep, "/")
    at = ", ".join(filter(None, (where, place)))
    return BugError(
        f"ddpcheck itself raised {said}{f' ({at})' if at else ''}; {BUG}, not in the target: please report it with "
        "the traceback",
        detail=whole_traceback(error),
    )


def _innermost_run(error: BaseException) -> Sequence[tuple[FrameType, int]]:
    """Our frames at the end of the traceback, outermost first, with lines; empty where its end is the target's."""
    run: list[tuple[FrameType, int]] = []
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        code = frame.f_code
        if code in _for_target or is_user_file(code.co_filename):
            break
        if code.co_filename.startswith(_FOLDER) and code not in _passing_on:
            run.append((frame, line))
    return run[::-1]


def _is_asked_for(entry: FrameType) -> bool:
    """Whether the frame at which a traceback enters ddpcheck is that of something public."""
    module = str(entry.f_globals.get("__name__", ""))
    return entry.f_code.co_qualname.partition(".")[0] in ddpcheck.__all__ or module.startswith("ddpcheck.integrations")
