"""Exceptions and messages about failed ranks. Pure, except for `tail`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddpcheck.findings.errors import HangError, RankError, RankFailure, UsageError
from ddpcheck.findings.replace import replace
from ddpcheck.findings.source_lines import exception_location, format_traceback
from ddpcheck.findings.stacks import (
    collective_of,
    format_stack,
    innermost_frame,
    innermost_line,
    lock_waited_for,
    main_stack,
    program_threads,
    region_of,
    work_waited_for,
)
from ddpcheck.findings.tracebacks import as_bug, is_own_bug, original_exception
from ddpcheck.findings.wording import (
    LONGEST_TRACEBACK,
    failure_text,
    format_by_text,
    format_ranks,
    group_by,
    pluralize_verb,
    shorten,
)
from ddpcheck.worlds import wire

_LOST_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|remote (process|peer).*(exit|clos)|"
    r"ncclRemoteError|peer (closed|disconnected)|socket (closed|timeout)|recvValue failed|store.*(closed|failed)",
    re.IGNORECASE,
)
_FATAL = "Fatal Python error: "  # first words of a `faulthandler` dump on a fatal signal
_LONGEST = 300  # characters of a message
_WIDEST = 1000  # characters of an output line


def exception_data(error: BaseException, status: str, collective: str) -> dict[str, Any]:
    """Return picklable data on an exception, from which `failure_of_exception` makes a `RankFailure`."""
    when = time.monotonic()
    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    name = f"{module}{kind.__qualname__}"
    try:
        text = repr(error.code) if isinstance(error, SystemExit) else str(error)
    except Exception:
        text = "(its message cannot be shown: __str__ raised)"
    where, noticed = exception_location(error), ""
    if (original := original_exception(error)) is not None:
        noticed = f"raised {original.where}{f', for which {where} waited' if where else ''}"
        name, text, where = original.type, original.text, original.location or where
    root, cause = _root_of(error), ""
    if root is not error:
        with contextlib.suppress(Exception):  # __str__ may raise
            cause = shorten(f"{type(root).__qualname__}: {root}", LONGEST_TRACEBACK)
        if cause and not noticed and (cause_location := exception_location(root)) not in (None, where):
            noticed = f"raised in the handling of {_first_line(cause)}, at {cause_location}"
    bug = as_bug(error, status) if is_own_bug(error) and not _LOST_CONNECTION.search(f"{name} {text}") else None
    exception = None
    with contextlib.suppress(Exception):
        wire.loads(data := wire.dumps(error))  # a custom __init__ often breaks unpickling only
        exception = data
    return {
        "when": when,
        "kind": "exited" if isinstance(error, SystemExit) else "raised",
        "type": name,
        "text": shorten(text, LONGEST_TRACEBACK),
        "exit_code": error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else None,
        "usage": isinstance(error, UsageError),
        "place": status,
        "collective": collective,
        "bug": "" if bug is None else str(bug),
        "traceback": _format(error) if bug is None else f"{bug.detail}\n",
        "location": str(where or ""),
        "noticed": noticed,
        "cause": cause,
        "exception": exception,
    }


def _root_of(error: BaseException) -> BaseException:
    chain = [error]
    while True:
        current = chain[-1]
        cause = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
        if cause is None or any(cause is link for link in chain):
            return current
        chain.append(cause)


def _format(error: BaseException) -> str:
    try:
        return format_traceback(error) + "\n"
    except Exception as problem:
        return f"(the traceback of a {type(error).__qualname__} cannot be shown: {problem!r})\n"


def failure_of_exception(rank: int, reply: dict[str, Any]) -> RankFailure:
    """Return the failure of a rank; `reply`: result of `exception_data` on the rank."""
    exception = None
    with contextlib.suppress(Exception):  # missing, or class not importable here: use the text
        exception = wire.loads(reply["exception"])
    text = _first_line(reply["text"])
    if reply["kind"] == "exited":
        message = f"rank {rank} called exit({text}) in the middle of a run"
    else:
        message = f"rank {rank} raised {reply['type']}" + (f": {text}" if text else "")
    if reply["bug"]:
        message = f"rank {rank} met a bug: {_first_line(reply['bug'])}"
    fields = ("kind", "when", "type", "traceback", "place", "collective", "location", "exit_code", "bug", "noticed")
    return RankFailure(
        rank,
        message=message,
        exception=exception if isinstance(exception, BaseException) else None,
        cause=reply.get("cause", ""),
        **{name: reply[name] for name in fields},
    )


def failure_of_dead_rank(rank: int, code: int | None, when: float, output: str = "", dump: str = "") -> RankFailure:
    """Return the failure of a rank whose process died.

    `code`: exit code, negative for a signal, `None` if unknown. `dump`: all `faulthandler` output of the rank.
    """
    _, *errors = dump.split(_FATAL)
    frames = main_stack(errors[0]) if len(errors) == 1 else ()
    if code == -signal.SIGSEGV and len(errors) > 1 and errors[0].startswith("Aborted"):
        code = -signal.SIGABRT  # `faulthandler` reads stacks of threads that continue to run, and crashed
    if code is None:
        message = f"rank {rank} was lost: the process that the launcher had started for it has ended"
    elif code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        message = f"rank {rank} was killed by {name}"
        if -code == signal.SIGKILL:
            message += " (not by ddpcheck; the system does that when memory runs out)"
        elif match := re.search(r"^ *what\(\): *(.+)$", output, re.MULTILINE):
            message += f": {_first_line(match[1])}"
    else:
        message = f"rank {rank} ended with exit code {code} before its work was done, without a Python exception"
    return RankFailure(
        rank, "died", message, when, exit_code=code, stack=format_stack(frames), location=innermost_line(frames)
    )


def failure_without_trace(rank: int) -> RankFailure:
    """Return the failure of a dead rank without exit code, exception or stack dump."""
    message = f"rank {rank} ended without an exception, an exit or a stack, as by SIGKILL"
    return RankFailure(rank, "died", f"{message} (the system sends that when memory runs out)", 0.0)


def failure_of_running_rank(rank: int, when: float, dump: str, status: str, collective: str) -> RankFailure:
    """Return the failure of a rank that was still running when the run ended."""
    frames = main_stack(dump)
    collective = collective or collective_of(frames) or work_waited_for(dump)
    if collective:
        state = f"waits in {collective}" + (f" ({status})" if status else "")
    elif status:
        inner = innermost_frame(frames)
        state = f"is in {status}" + (f" ({inner})" if inner else "")
    else:
        called = ", called from " if (region := region_of(frames)) else ""
        state = f"is in {region}{called}{innermost_frame(frames) or 'an unknown place'}"
    return RankFailure(
        rank,
        "stuck",
        f"rank {rank} {state}",
        when,
        place=status,
        collective=collective,
        stack=format_stack(frames),
        location=innermost_line(frames),
    )


def thread_failure(rank: int, dump: str, error: str) -> RankFailure | None:
    """Return the failure of a rank that waits for a failed thread, or `None`.

    `None` if any other thread runs user code. `error`: JSON of [thread name, data from `exception_data`], or ''.
    """
    waits_in = "" if program_threads(dump) else lock_waited_for(main_stack(dump))
    if not error or not waits_in:
        return None
    name, reply = json.loads(error)
    failure = failure_of_exception(rank, reply)
    message = failure.message.removeprefix(f"rank {rank} ")
    return replace(failure, message=f"rank {rank} waits in {waits_in} for a thread ({name}) that {message}")


def sort_failures(failures: Sequence[RankFailure]) -> list[RankFailure]:
    """Sort failures by time, with consequences of other failures last.

    A rank that lost its connection to a failed rank gets kind 'fell'. A death is a cause even if recorded later.
    """
    causes = [failure for failure in failures if failure.kind != "stuck" and not lost_connection(failure)]
    marked = []
    for failure in failures:
        if lost_connection(failure) and any(
            cause.kind == "died" or cause.when <= failure.when + 0.5 for cause in causes
        ):
            message = failure.message.replace(f"rank {failure.rank} raised", f"rank {failure.rank} fell with it:", 1)
            failure = replace(failure, kind="fell", message=message)
        marked.append(failure)
    effects = ("stuck", "fell")
    return sorted(marked, key=lambda failure: (failure.kind in effects and bool(causes), failure.when, failure.rank))


def lost_connection(failure: RankFailure) -> bool:
    """Return True if the rank raised because it lost its connection to another rank."""
    return failure.kind == "raised" and is_lost_connection(f"{failure.type} {failure.message} {failure.cause}")


def is_lost_connection(text: str) -> bool:
    """Return True if an exception text reports a lost connection to a rank."""
    return bool(_LOST_CONNECTION.search(text))


def rank_error(failures: Sequence[RankFailure]) -> RankError:
    """Return the exception for a world with failed ranks."""
    ordered = sort_failures(failures)
    headline = failure_text(ordered[0])
    same = [failure for failure in ordered if failure.kind == ordered[0].kind and failure_text(failure) == headline]
    if len(same) > 1:  # by rank, for a deterministic message
        ordered = sorted(same, key=lambda item: item.rank) + [item for item in ordered if item not in same]
    summary = _summary(ordered[len(same) :])
    ranks = [failure.rank for failure in same]
    message = f"{format_ranks(ranks)} {pluralize_verb(headline, ranks)}" + (f" ({summary})" if summary else "")
    return RankError(message, ordered, detail=_detail(ordered))


def hang_error(failures: Sequence[RankFailure], headline: str) -> HangError:
    """Return the exception for ranks that did not finish."""
    ordered = sorted(failures, key=lambda failure: (failure.when, failure.rank))
    waiting = "; ".join(format_by_text((failure.rank, failure_text(failure)) for failure in ordered))
    message = f"{headline}: {waiting}" if waiting else headline
    return HangError(message, ordered, detail=_detail(ordered))


def _summary(rest: Sequence[RankFailure]) -> str:
    phrases = []
    for failure in rest:
        text = failure_text(failure)
        if failure.kind == "fell":
            text = "fell with it"
        elif failure.kind == "stuck":
            where = failure.collective and f"waiting in {failure.collective}"
            text = "was still " + (where or f"in {failure.place or text.removeprefix('is in ')}")
        phrases.append((failure.rank, text))
    return "; ".join(format_by_text(phrases))


def _detail(failures: Sequence[RankFailure]) -> str:
    """Return a text with traceback, stack and output of each rank, equal failures grouped."""
    groups = group_by(failures, lambda failure: (failure_text(failure), failure.traceback, failure.stack))
    lines = []
    for (text, traceback, stack), group in groups.items():
        ranks = [failure.rank for failure in group]
        is_shown = bool(traceback) and group[0].kind == "raised"  # the last line of the traceback repeats it
        lines.append(
            f"[{format_ranks(ranks)}]" if is_shown else f"[{format_ranks(ranks)}] {pluralize_verb(text, ranks)}"
        )
        lines += [traceback.rstrip("\n")] if traceback else []
        lines += ["stack, most recent call first:", stack.rstrip("\n")] if stack else []
        outputs = {failure.output.rstrip("\n") for failure in group}
        for failure in group[:1] if len(outputs) == 1 else group:
            title = "output:" if len(outputs) == 1 else f"output of rank {failure.rank}:"
            lines += [title, failure.output.rstrip("\n")] if failure.output else []
    return "\n".join(lines)


def _first_line(text: str) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if len(line) <= _LONGEST:
        return line
    sentences = line.rfind(". ", _LONGEST // 3, _LONGEST) + 1  # cut at a sentence end if that leaves enough
    return line[:sentences] if sentences else line[: _LONGEST - 3] + "..."


def tail(path: Path) -> str:
    """Return the last 20 lines of a file, each truncated; `""` if unreadable."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - (1 << 16)))
            data = file.read()
    except OSError:
        return ""
    last_lines = data.decode("utf-8", "replace").splitlines()[-20:]
    return "\n".join(line if len(line) <= _WIDEST else line[:_WIDEST] + "..." for line in last_lines)
