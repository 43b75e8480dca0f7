"""Tracebacks as text, with runs of frames that are not the user's as one line each."""

from __future__ import annotations

import re

from ddpcheck.findings.wording import counted, join_names

_FRAME = re.compile(r'^(?P<indent> *)File "(?P<file>[^"]*)", line (\d+|\?\?\?)')
_INSTALLED = re.compile(r"(?:^|/)(?:site|dist)-packages/([^/]+)")
_OF_PYTHON = re.compile(r"(^|/)lib/python3\.\d+t?/|^<frozen |^(importlib|multiprocessing|concurrent|asyncio|unittest)/")
_FOLDED = ("torch", "ddpcheck", "_pytest", "pluggy", "cloudpickle")
_LOOSE = ("runpy.py", "contextlib.py", "functools.py", "threading.py")  # of Python, as they are told without a folder


def fold_traceback(text: str) -> str:
    """A traceback, or a text with some in it, with each run of frames of torch, of Python and of ddpcheck as one line.

    A traceback that has no other frame stays as it is. Stacks of `faulthandler` are folded as well.

    Args:
        text: With paths as they are, or relative to the folder of installed packages.
    """
    lines = text.splitlines()
    owners: dict[int, str] = {}  # of the frame that each line belongs to; "" is the user
    for number, line in enumerate(lines):
        frame = _FRAME.match(line)
        if frame:
            owners[number] = _owner(frame["file"])
            indent = len(frame["indent"])
        elif number - 1 in owners and _goes_on(line, indent):
            owners[number] = owners[number - 1]
    told: list[str] = []
    number = 0
    while number < len(lines):
        if not owners.get(number) or not _has_users_frames(number, owners):
            told.append(lines[number])
            number += 1
            continue
        begin = number
        while owners.get(number):
            number += 1
        frames = [at for at in range(begin, number) if _FRAME.match(lines[at])]
        whose = join_names(list(dict.fromkeys(owners[at] for at in frames)))
        told.append(f"{_FRAME.match(lines[begin])['indent']}... {counted(len(frames), 'frame')} of {whose}")  # type: ignore[index]
    return "\n".join(told)


def _goes_on(line: str, indent: int) -> bool:
    """Whether a line is of the frame above it: its source, the marks below that, or how often it repeats."""
    return line.startswith(" " * (indent + 1)) or line.strip().startswith("[Previous line repeated")


def _has_users_frames(number: int, owners: dict[int, str]) -> bool:
    """Whether the traceback that the line `number` belongs to has frames of the user."""
    first = last = number
    while first - 1 in owners:
        first -= 1
    while last + 1 in owners:
        last += 1
    return any(not owners[at] for at in range(first, last + 1))


def _owner(file: str) -> str:
    """Whose a file is: the name of a package whose frames are folded, Python, or nobody's but the user's."""
    path = file.replace("\\", "/")
    installed = _INSTALLED.search(path)
    package = installed[1] if installed else path.partition("/")[0]
    if package in _FOLDED and "/" in path:
        return package
    return "Python" if not installed and (_OF_PYTHON.search(path) or path in _LOOSE) else ""
