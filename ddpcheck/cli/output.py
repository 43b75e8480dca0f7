"""Output of the commands: standard output, files, standard error, and a progress line."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import textwrap
import traceback
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Self, TextIO

from ddpcheck.findings.difference import ReportDifference
from ddpcheck.findings.errors import EXIT_USAGE, DDPCheckError, UsageError
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Report
from ddpcheck.findings.tracebacks import BUG, fold_traceback
from ddpcheck.findings.wording import printable
from ddpcheck.render import FORMATS, Medium, format_for, renderer_for

if TYPE_CHECKING:
    from ddpcheck.report.matrix.matrix import Matrix


class OutputFile:
    """Context manager for an output file; raises `UsageError` on entry if not writable."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._is_new = False

    def __enter__(self) -> Self:
        if self._path is not None:
            self._is_new = not os.path.lexists(self._path)
            try:
                with open(self._path, "ab"):
                    pass
            except (OSError, ValueError) as error:
                raise UsageError(f"cannot write {self._path}: {reason_of(error)}") from error
        return self

    def __exit__(self, *exception: object) -> None:
        if self._path is not None and self._is_new:
            with contextlib.suppress(OSError):  # several nodes may share the file, and one writes
                if not os.path.getsize(self._path):
                    os.unlink(self._path)

    def write(self, content: bytes) -> None:
        assert self._path is not None
        try:
            with open(self._path, "wb") as file:
                file.write(content)
        except OSError as error:
            raise UsageError(f"cannot write {self._path}: {reason_of(error)}") from error


class ReportOutput(OutputFile):
    """Destination of a report: a file, standard output or standard error.

    The command line in `arguments`, if not empty, is stored in the report.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        default: str | None,
        formats: Mapping[str, str] = FORMATS,
        *,
        to_stderr: bool = False,
    ) -> None:
        super().__init__(None if arguments.output in (None, "-") else arguments.output)
        self._command = getattr(arguments, "command_line", "")
        self._to_stderr = to_stderr
        medium = Medium() if self._path else Medium.detect(sys.stderr if to_stderr else sys.stdout)
        whole = getattr(arguments, "debug", False) or getattr(arguments, "verbose", False)
        colour = {"always": True, "never": False}.get(getattr(arguments, "color", ""), medium.colour)
        medium = replace(medium, whole=whole, quiet=getattr(arguments, "quiet", False), colour=colour)
        format_name = format_for(arguments.format, path=self._path, formats=formats, default=default)
        self._renderer = partial(renderer_for, format_name, medium=medium, formats=formats)  # unused if clean

    def show(self, report: Report | Matrix | ReportDifference) -> None:
        if self._command and not isinstance(report, ReportDifference):
            report = replace(report, command=self._command)
        text = self._renderer().render(report)
        if self._path is not None:
            try:
                self.write(text.encode("utf-8", "backslashreplace"))
            except UsageError:
                if self._to_stderr and isinstance(report, Report):  # do not lose the report of a long run
                    print_error(renderer_for("text", medium=Medium.detect(sys.stderr)).render(report), end="")
                raise
            say(f"{report.summary}{_worst_of(report)}, written to {self._path}")
        elif self._to_stderr:
            print_error(text, end="")
        else:
            print_out(text.removesuffix("\n"))


def _worst_of(report: Report | Matrix | ReportDifference) -> str:
    """Return "(CODE severity at line)" of the worst finding; "" without findings."""
    if not isinstance(report, Report) or not report.findings:
        return ""
    worst = min(report.findings, key=Finding.sort_key)
    location = f" at {worst.location}" if worst.location is not None else ""
    return f" ({'first: ' * (len(report.findings) > 1)}{worst.code} {worst.severity.value}{location})"


class Progress:
    """Transient progress line; no output if the stream is not a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._medium = Medium.detect(stream)
        self._stream = stream
        self._is_drawn = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.clear()

    def __call__(self, text: str) -> None:
        if self._medium.interactive:
            self.clear()
            line = "".join(c for c in text if c.isprintable())[: (self._medium.width or 80) - 1]
            self._stream.write(line.encode(self._medium.encoding, "replace").decode(self._medium.encoding))
            self._stream.flush()
            self._is_drawn = True

    def clear(self) -> None:
        if self._is_drawn:
            self._stream.write("\r" + " " * ((self._medium.width or 80) - 1) + "\r")
            self._stream.flush()
            self._is_drawn = False


def print_out(text: str) -> None:
    """Print to standard output, in its encoding; raise `UsageError` if closed or not writable."""
    if sys.stdout is None:
        raise UsageError("cannot write to standard output: it is closed; name a file with -o")
    try:
        print(Medium.detect(sys.stdout).fitted(text), flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # a flush of the buffer would fail again
        if not isinstance(error, BrokenPipeError):  # the reader closed the pipe, as in `| head`: keep the exit code
            raise UsageError(f"cannot write to standard output: {reason_of(error)}") from error


def print_error(text: str, end: str = "\n") -> None:
    """Print to standard error, ignoring I/O errors to keep the exit code."""
    if sys.stderr is None:
        return
    try:
        print(text, end=end, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # else the flush at exit would fail again


def say(text: str) -> None:
    """Print a message to standard error."""
    _print_message(f"ddpcheck: {text}")


def complain(message: str, detail: str = "", *, kind: str = "error") -> None:
    """Print a message that begins with its kind, such as "error", to standard error."""
    _print_message(f"ddpcheck: {kind}: {message}", textwrap.indent(fold_traceback(detail.rstrip()), "  "))


def complain_of(error: Exception) -> int:
    """Print the error that ended a command and return the exit code for it."""
    if isinstance(error, DDPCheckError):
        complain(str(error), error.detail)
        return error.exit_code
    if isinstance(error, MemoryError):
        complain("there is not enough memory for this; give ddpcheck less at a time, or more memory")
        return EXIT_USAGE
    complain(f"{format_error(error)}; {BUG}: please report it with the traceback that --debug shows")
    return EXIT_USAGE


def format_error(error: Exception) -> str:
    """Return class and message of an exception in one line."""
    return "".join(traceback.format_exception_only(error)).strip().replace("\n", " ")


def _print_message(sentence: str, more: str = "") -> None:
    medium = Medium.detect(sys.stderr)
    text = wrapped(printable(sentence, "\n"), medium.width if medium.interactive else None)
    text += f"\n{printable(more, chr(10))}" if more else ""
    print_error(medium.fitted(text))


def wrapped(text: str, width: int | None, indent: str = "  ") -> str:
    """Wrap lines at words, with continuation lines indented; `width=None` disables wrapping."""
    if width is None:
        return text
    lines = [
        textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    ]
    return "\n".join(lines)


def reason_of(error: Exception) -> str:
    """Return the message of the operating system for an OSError, else `str(error)`."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
