"""Exceptions of a target: whose fault they are, exceptions of workers, traceback text.

An exception is the fault of the owner of its innermost frame that belongs to neither torch nor Python. ddpcheck owns
frames of its hooks and modes, even if called by the target. The target owns frames of functions marked `runs_target`,
of signal handlers, and errors that a public function of ddpcheck raises to the target.

`torch._utils.ExceptionWrapper` re-raises an exception of a data loader worker or thread at the line that waited: an
exception of the same class, whose text has the original traceback: "Caught KeyError in DataLoader worker process 0.",
"Original Traceback (most recent call last):" and so on.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar

import ddpcheck
from ddpcheck.findings.errors import BugError, DDPCheckError
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import OWN_FOLDER, format_traceback, is_user_file
from ddpcheck.findings.stacks import frames_of, innermost_line
from ddpcheck.findings.wording import join_names, plural

BUG = "this is a bug in ddpcheck"
_LONGEST = 150  # characters of a foreign message
_Function = TypeVar("_Function", bound=Callable[..., Any])

_forwarding_code: set[CodeType] = {ddpcheck.__getattr__.__code__}  # unknown attributes are the caller's error
_target_code: set[CodeType] = set()


def forwards_calls(function: _Function) -> _Function:
    """Decorate a ddpcheck function that only forwards calls: tracebacks treat its frames as torch's."""
    _forwarding_code.add(function.__code__)
    return function


def runs_target(function: _Function) -> _Function:
    """Decorate a function that runs the target: tracebacks treat its frames as user code."""
    _target_code.add(function.__code__)
    return function


def is_own_bug(error: BaseException) -> bool:
    """Check if `error`, or an exception in its chain, is a bug of ddpcheck."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if isinstance(current, DDPCheckError) or not isinstance(current, Exception):
            return isinstance(current, BugError)
        run = _innermost_frames(current)
        if run and not _is_public_api(run[0][0]):
            files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(current.__traceback__)]
            return not (isinstance(current, RecursionError) and any(map(is_user_file, files)))
        seen.add(id(current))
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return False


def is_of_signal(error: BaseException) -> bool:
    """Check if a signal handler raised `error`, e.g. because a DataLoader worker was killed."""
    handlers = _code_of_handlers()
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def _code_of_handlers() -> set[CodeType]:
    """Return the code objects of this process's signal handlers, except handlers of ddpcheck."""
    functions = (getattr(handler, "__func__", handler) for handler in map(signal.getsignal, signal.valid_signals()))
    code = (function.__code__ for function in functions if isinstance(function, FunctionType))
    return {handler_code for handler_code in code if not handler_code.co_filename.startswith(OWN_FOLDER)}


def is_misuse(error: DDPCheckError) -> bool:
    """Check if the target misused a public function (except `Recipe`), which then raised `error`."""
    run = _innermost_frames(error)
    return bool(run) and _is_public_api(run[0][0]) and not run[0][0].f_code.co_qualname.startswith("Recipe.")


def as_bug(error: BaseException, phase: str = "") -> BugError:
    """Convert an exception to a `BugError` with traceback; `phase`: what the rank was doing."""
    if isinstance(error, BugError):
        return error
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0][:_LONGEST]}" if lines else type(error).__name__
    location = ""
    if run := _innermost_frames(error):
        frame, line = run[-1]
        location = f"ddpcheck/{os.path.relpath(frame.f_code.co_filename, OWN_FOLDER)}:{line}".replace(os.sep, "/")
    note = ", ".join(filter(None, (location, phase)))
    return BugError(
        f"ddpcheck itself raised {text}{f' ({note})' if note else ''}; {BUG}, not in the target: please report it with "
        "the traceback",
        detail=format_traceback(error, whole=True),
    )


def _innermost_frames(error: BaseException) -> Sequence[tuple[FrameType, int]]:
    """Return (frame, line) of ddpcheck frames after the last user frame, outermost first."""
    run: list[tuple[FrameType, int]] = []
    handlers = _code_of_handlers()
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        code = frame.f_code
        if code in _target_code or is_user_file(code.co_filename) or code in handlers:
            break
        if code.co_filename.startswith(OWN_FOLDER) and code not in _forwarding_code:
            run.append((frame, line))
    return run[::-1]


def _is_public_api(entry: FrameType) -> bool:
    """Check if `entry`, the first ddpcheck frame in a traceback, is public API."""
    module = str(entry.f_globals.get("__name__", ""))
    return entry.f_code.co_qualname.partition(".")[0] in ddpcheck.__all__ or module.startswith("ddpcheck.integrations")


_ORIGINAL_HEAD = re.compile(  # does not match tracebacks inside a user's message
    r"(?:^Original |(?:direct cause of the following exception|another exception occurred):\n\n)"
    r"Traceback \(most recent call last\):\n",
    re.MULTILINE,
)
_TYPE_AND_MESSAGE = re.compile(r"^(?P<type>[^\W\d][\w.<>]*)(?:: (?P<text>.*))?\Z", re.MULTILINE | re.DOTALL)
_MAIN_PREFIX = re.compile(r"^__(mp_)?main__\.")  # module of the script in a spawned worker, and in a forked worker


@dataclass(frozen=True, slots=True)
class OriginalException:
    """Exception that a DataLoader worker or thread raised before torch re-raised it elsewhere."""

    type: str  # name of the class
    text: str  # message
    location: Location | None  # innermost line of user code in the traceback, if any
    where: str  # worker or thread, in torch's words: "in DataLoader worker process 0"


def original_exception(error: BaseException) -> OriginalException | None:
    """Return the worker's exception that `ExceptionWrapper` has re-raised as `error`, or None."""
    codes = [frame.f_code.co_qualname for frame, _ in traceback.walk_tb(error.__traceback__)]
    if codes[-1:] != ["ExceptionWrapper.reraise"] or not isinstance(error, Exception):
        return None
    try:
        text = str(error)
    except Exception:
        return None
    heads = [head.end() for head in _ORIGINAL_HEAD.finditer(text)]
    last = text[heads[-1] :] if heads else ""  # the last exception of a chain
    start = re.search(r"^\S", last, re.MULTILINE)
    match = _TYPE_AND_MESSAGE.match(last[start.start() :].rstrip()) if start is not None else None
    if match is None or start is None:
        return None
    line = Location.parse(innermost_line(frames_of(last[: start.start()])[::-1]))
    origin = text.partition("\n")[0].removeprefix("Caught ").partition(" ")[2].rstrip(".")
    return OriginalException(_MAIN_PREFIX.sub("", match["type"]), match["text"] or "", line, origin)


_FRAME = re.compile(r'^(?P<indent> *)File "(?P<file>[^"]*)", line (\d+|\?\?\?)')
_INSTALLED = re.compile(r"(?:^|/)(?:site|dist)-packages/([^/]+)")
_PYTHON = re.compile(r"(^|/)lib/python3\.\d+t?/|^<frozen |^(importlib|multiprocessing|concurrent|asyncio|unittest)/")
_FOLDED_PACKAGES = ("torch", "ddpcheck", "_pytest", "pluggy", "cloudpickle")
_STDLIB_FILES = ("runpy.py", "contextlib.py", "functools.py", "threading.py")  # files without a folder in tracebacks


def fold_traceback(text: str) -> str:
    """Fold each run of torch, Python and ddpcheck frames into one line.

    A traceback without user frames is not changed. Stacks of `faulthandler` are folded too. Paths in `text` are
    absolute, or relative to the folder of installed packages.
    """
    lines = text.splitlines()
    owners: dict[int, str] = {}  # owner of the frame by line number; "" is the user
    indent = 0  # of the last frame
    for number, line in enumerate(lines):
        continues = line.startswith(" " * (indent + 1)) or line.strip().startswith("[Previous line repeated")
        if frame := _FRAME.match(line):
            owners[number] = _package_of(frame["file"])
            indent = len(frame["indent"])
        elif number - 1 in owners and continues:  # source, markers or repeat count of the frame above
            owners[number] = owners[number - 1]
    result: list[str] = []
    folded: set[int] = set()
    for is_stack, stack in itertools.groupby(range(len(lines)), owners.__contains__):
        indices = [*stack]
        if is_stack and not all(map(owners.get, indices)):
            folded.update(filter(owners.get, indices))
    for is_folded, run in itertools.groupby(range(len(lines)), folded.__contains__):
        if not is_folded:
            result += (lines[i] for i in run)
            continue
        frames = [(owners[i], frame["indent"]) for i in run if (frame := _FRAME.match(lines[i]))]
        names = join_names(list(dict.fromkeys(owner for owner, _ in frames)))
        result.append(f"{frames[0][1]}... {plural(len(frames), 'frame')} of {names}")
    return "\n".join(result)


def _package_of(file: str) -> str:
    """Return a file's owner: a package to fold, "Python", or "" for user code."""
    path = file.replace("\\", "/")
    installed = _INSTALLED.search(path)
    package = installed[1] if installed else path.partition("/")[0]
    if package in _FOLDED_PACKAGES and "/" in path:
        return package
    return "Python" if not installed and (_PYTHON.search(path) or path in _STDLIB_FILES) else ""
