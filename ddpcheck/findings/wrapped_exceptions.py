"""Exceptions that torch has carried from a worker of a loader, or from a thread, to the line that waited for it.

`torch._utils.ExceptionWrapper` raises another one of the same class there, whose text holds the traceback of the first:
"Caught KeyError in DataLoader worker process 0.", "Original Traceback (most recent call last):" and so on.
"""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass

from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import is_user_file, relative_path

_RAISES_AGAIN = "ExceptionWrapper.reraise"
_HEAD = re.compile(  # not one that a message of the user's holds
    r"(?:^Original |(?:direct cause of the following exception|another exception occurred):\n\n)"
    r"Traceback \(most recent call last\):\n",
    re.MULTILINE,
)
_FRAME = re.compile(r'^ +File "(?P<file>[^"\n]+)", line (?P<line>\d+), in ', re.MULTILINE)
_SAID = re.compile(r"^(?P<type>[^\W\d][\w.<>]*)(?:: (?P<text>.*))?\Z", re.MULTILINE | re.DOTALL)
_OF_MAIN = ("__mp_main__.", "__main__.")  # how a worker that was spawned calls the script, and one that was forked


@dataclass(frozen=True, slots=True)
class OriginalException:
    """What was raised first.

    Attributes:
        type: The name of its class.
        text: Its message.
        location: The innermost line of the user's code in its traceback; `None` where there is none.
        where: In which worker or thread, in torch's words: "in DataLoader worker process 0".
    """

    type: str
    text: str
    location: Location | None
    where: str


def original_of(error: BaseException) -> OriginalException | None:
    """The exception that `error` was made of in another process or thread; `None` for any other."""
    codes = [frame.f_code.co_qualname for frame, _ in traceback.walk_tb(error.__traceback__)]
    if codes[-1:] != [_RAISES_AGAIN] or not isinstance(error, Exception):
        return None
    try:
        text = str(error)
    except Exception:
        return None
    heads = [head.end() for head in _HEAD.finditer(text)]
    last = text[heads[-1] :] if heads else ""  # of a cause and its consequence, the consequence
    said = re.search(r"^\S", last, re.MULTILINE)
    match = _SAID.match(last[said.start() :].rstrip()) if said is not None else None
    if match is None or said is None:
        return None
    frames = [(one["file"], int(one["line"])) for one in _FRAME.finditer(last[: said.start()])]
    lines = [Location(relative_path(file), line) for file, line in frames if is_user_file(file)]
    where = text.partition("\n")[0].removeprefix("Caught ").partition(" ")[2].rstrip(".")
    name = match["type"]
    for prefix in _OF_MAIN:
        name = name.removeprefix(prefix)
    return OriginalException(name, match["text"] or "", lines[-1] if lines else None, where)
