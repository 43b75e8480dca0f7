"""Detect how the main module of a rank ended: `raise SystemExit` calls no hook.

A referenced frame outlives its module, and `f_lasti` gives the last executed instruction.
"""

from __future__ import annotations

import dis
import sys
from types import FrameType

from ddpcheck.findings.source_lines import frames_from, location_of
from ddpcheck.stream.entries import ProgramEnded


def main_frame() -> FrameType | None:
    """Return the main module's frame, if on this stack; references only the module's globals."""
    modules = (frame for frame in frames_from(sys._getframe()) if frame.f_code.co_name == "<module>")
    return next((frame for frame in modules if frame.f_globals.get("__name__") == "__main__"), None)


def last_error() -> BaseException | None:
    """Return the last exception that an excepthook printed (`sys.last_value`), or None."""
    error: BaseException | None = getattr(sys, "last_value", None)
    return error


def end_of_main(frame: FrameType | None) -> ProgramEnded:
    """Return how the main module ended, with the last line for a SystemExit."""
    if frame is None:
        return ProgramEnded()
    operation = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    if operation.startswith("RETURN"):
        return ProgramEnded("end")
    if last_error() is not None:
        return ProgramEnded()
    return ProgramEnded("raise" if operation == "RAISE_VARARGS" else "call", str(location_of(frame)))
