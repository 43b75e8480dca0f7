"""How the main module of a rank has ended: Python calls no hook for `raise SystemExit`, and its end looks like another.

The frame of the module outlives it where it is held, and says which instruction was its last one.
"""

from __future__ import annotations

import dis
import sys
from types import FrameType

from ddpcheck.findings.source_lines import frames_from, location_of
from ddpcheck.stream.entries import ProgramEnded


def main_frame() -> FrameType | None:
    """The frame of the main module, if it is on this stack; it keeps nothing alive but the names of the module."""
    modules = (frame for frame in frames_from(sys._getframe()) if frame.f_code.co_name == "<module>")
    return next((frame for frame in modules if frame.f_globals.get("__name__") == "__main__"), None)


def last_error() -> BaseException | None:
    """The exception that Python has printed last, by whichever hook: what has ended the main module, if that has."""
    error: BaseException | None = getattr(sys, "last_value", None)
    return error


def end_of_main(frame: FrameType | None) -> ProgramEnded:
    """Whether the main module has come to its end; else which line has raised SystemExit, or has called what has."""
    if frame is None:
        return ProgramEnded()
    operation = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    if operation.startswith("RETURN"):
        return ProgramEnded("end")
    if last_error() is not None:
        return ProgramEnded()
    return ProgramEnded("raise" if operation == "RAISE_VARARGS" else "call", str(location_of(frame)))
