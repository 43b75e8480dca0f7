"""Ranks before their process group exists: started by a script, or inside `init_process_group`.

Ranks that a script starts with `mp.spawn` or `multiprocessing.Process` under torchrun inherit its variables, which
promise the agent's store even if the ranks meet elsewhere; and `multiprocessing` turns exceptions into exit codes, so
that no excepthook runs.

This module is light: it never imports torch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpcheck.record.rank.environment import options_of_run

_MARK = "_DDPCHECK_STARTED"  # first process below the agent: "pid:port of the agent's store:torchrun run id"
_RESTART = "TORCHELASTIC_RESTART_COUNT"
_RUN, _PORT, _USES_AGENT = "TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"

on_end: list[Callable[[BaseException | None], object]] = []
"""Callbacks at the end of a `multiprocessing` process, with its exception or None. A nonzero `SystemExit` is replaced
by the exception being handled, if any."""


def mark_first_process() -> None:
    """Record in the environment that torchrun started this process, unless a parent is recorded."""
    run = os.environ.get(_RUN)
    if run and os.environ.get(_USES_AGENT) and os.environ.get(_MARK, "::").split(":", 2)[2] != run:
        os.environ[_MARK] = f"{os.getpid()}:{os.environ.get(_PORT, '')}:{run}"
        restart, options = os.environ.get(_RESTART, "0"), options_of_run(os.environ)
        if restart != "0" and options is not None:  # recorded in a file: a process may end before its log exists
            from ddpcheck.stream.rank_log import RESTARTED

            with contextlib.suppress(OSError):
                Path(options.folder, f"{RESTARTED}{restart}").touch()


def is_first_process() -> bool:
    """Return True if torchrun, not the script, has started this process."""
    pid, _, run = os.environ.get(_MARK, "::").split(":", 2)
    return bool(run) and run == os.environ.get(_RUN) and pid == str(os.getpid())


def local_world_size_of_launcher() -> int:
    """Return torchrun's local world size in a process that the script started; else 0."""
    run = os.environ.get(_MARK, "::").split(":", 2)[2]
    if not run or run != os.environ.get(_RUN) or is_first_process():
        return 0
    return int(os.environ.get("LOCAL_WORLD_SIZE", "0"))


def leave_agent_store(arguments: Sequence[Any], named: dict[str, Any]) -> None:
    """Unset TORCHELASTIC_USE_AGENT_STORE if ranks that the script starts use another port.

    With the variable, torch would not create the store of the process group. Processes that torchrun starts keep the
    variable, since with another port these processes fail without ddpcheck, too.
    """
    pid, port, run = os.environ.get(_MARK, "::").split(":", 2)
    if not run or run != os.environ.get(_RUN) or pid == str(os.getpid()):
        return
    from urllib.parse import urlsplit

    method = named.get("init_method", arguments[1] if len(arguments) > 1 else None)
    elsewhere = urlsplit(method).port if isinstance(method, str) and method.startswith("tcp:") else None
    if str(elsewhere or os.environ.get(_PORT)) != port:
        os.environ.pop(_USES_AGENT, None)


def follow_ends() -> None:
    """Call the `on_end` callbacks before `multiprocessing` turns an exception into an exit code."""
    import multiprocessing.process  # torch has imported it already

    process: Any = multiprocessing.process.BaseProcess
    original = process.run

    @functools.wraps(original)
    def run(self: Any) -> None:
        try:
            original(self)
        except BaseException as error:
            _call_on_end(error)
            raise
        _call_on_end(None)

    process.run = run


def _call_on_end(error: BaseException | None) -> None:
    if isinstance(error, SystemExit) and error.code:  # torch.multiprocessing exits with 1 after an exception
        error = error.__context__ or error
    for callback in on_end:
        callback(error)


SUFFIX, RAISED = ".joining", ".unmet"
_PARAMETERS = ("backend", "init_method", "timeout", "world_size", "rank", "store")  # in the order of torch's signature


@contextlib.contextmanager
def joining_file(arguments: Sequence[Any], named: Mapping[str, Any]) -> Iterator[None]:
    """Note in a file that `init_process_group` is running, and later its error."""
    options, file = options_of_run(os.environ), None
    if options is not None:
        with contextlib.suppress(Exception):  # invalid arguments: torch raises its own error
            from msgspec import json

            note = json.encode(_joining_entry({**dict(zip(_PARAMETERS, arguments, strict=False)), **named}))
            file = Path(options.folder) / f"{os.getpid()}{SUFFIX}"
            file.with_suffix(".new").write_bytes(note)
            file.with_suffix(".new").replace(file)
    try:
        yield
    except Exception as error:
        if file is not None:
            with contextlib.suppress(Exception):
                _write_error(file, error)
        raise
    finally:
        if file is not None:
            with contextlib.suppress(OSError):
                file.unlink()


def _write_error(file: Path, error: Exception) -> None:
    from msgspec import json

    from ddpcheck.findings.evidence.endings import Joining
    from ddpcheck.findings.replace import replace

    lines = str(error).strip().splitlines()
    message = f"{type(error).__qualname__}{f': {lines[0]}' if lines else ''}"
    joining = json.decode(file.read_bytes(), type=Joining)
    file.with_suffix(RAISED).write_bytes(json.encode(replace(joining, error=message)))


def _joining_entry(arguments: Mapping[str, Any]) -> Any:
    from ddpcheck.findings.evidence.endings import Joining
    from ddpcheck.findings.source_lines import user_location

    environ, method = os.environ, arguments.get("init_method")
    at_agent = f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}"
    by_environment = arguments.get("store") is None and (method is None or method.startswith("env:"))
    return Joining(
        os.getpid(),
        _argument_or_variable(arguments, "rank", "RANK"),
        _argument_or_variable(arguments, "world_size", "WORLD_SIZE"),
        at_agent if by_environment else method or "a store that it is given",
        str(user_location(sys._getframe(3)) or ""),
        at_agent if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "",
        int(environ["LOCAL_WORLD_SIZE"]) if is_first_process() and environ.get("GROUP_WORLD_SIZE") == "1" else 0,
    )


def _argument_or_variable(arguments: Mapping[str, Any], argument: str, variable: str) -> int:
    number = arguments.get(argument, -1)
    return int(number if isinstance(number, int) and number >= 0 else os.environ.get(variable, -1))
