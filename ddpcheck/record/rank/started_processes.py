"""Ranks that a script starts by itself, with `mp.spawn` or `multiprocessing.Process`, below a process of torchrun's.

They inherit torchrun's variables, of which one says that the store of its agent is there, wherever they meet; and
`multiprocessing` makes exit codes of what they raise, where no hook of Python's sees it.

This module is light: it never imports torch.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

_MARK = "_DDPCHECK_STARTED"  # the first process below the agent: its pid, the port of the agent's store, torchrun's run
_RESTART = "TORCHELASTIC_RESTART_COUNT"
_RUN, _PORT, _USES_AGENT = "TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"

on_end: list[Callable[[BaseException | None], object]] = []
"""What is called when the function of a process of `multiprocessing` has ended, with what it raised; of an exit in the
handler of an exception, that one."""


def mark_first_process() -> None:
    """Note in the environment where the agent's store is, if no process above this one has."""
    run = os.environ.get(_RUN)
    if run and os.environ.get(_USES_AGENT) and os.environ.get(_MARK, "::").split(":", 2)[2] != run:
        os.environ[_MARK] = f"{os.getpid()}:{os.environ.get(_PORT, '')}:{run}"
        if (restart := os.environ.get(_RESTART, "0")) != "0":
            _note_restart(restart)


def _note_restart(number: str) -> None:
    """Have a file say so: a process that ends before it joins a process group leaves no log."""
    from pathlib import Path

    from ddpcheck.record.rank.environment import options_of_run
    from ddpcheck.stream.rank_log import RESTARTED

    with contextlib.suppress(OSError):
        if (options := options_of_run(os.environ)) is not None:
            Path(options.folder, f"{RESTARTED}{number}").touch()


def is_first_process() -> bool:
    """Whether torchrun has started this process, and not a process of the script's."""
    pid, _, run = os.environ.get(_MARK, "::").split(":", 2)
    return bool(run) and run == os.environ.get(_RUN) and pid == str(os.getpid())


def launched_beside() -> int:
    """Return how many processes torchrun has started on this machine, if this one is a process of theirs; else 0."""
    run = os.environ.get(_MARK, "::").split(":", 2)[2]
    if not run or run != os.environ.get(_RUN) or is_first_process():
        return 0
    return int(os.environ.get("LOCAL_WORLD_SIZE", "0"))


def leave_agent_store(arguments: Sequence[Any], named: dict[str, Any]) -> None:
    """Before a process group is made: drop the variable where a process of the script's meets the others elsewhere.

    There is no store then but one of their own, which torch would not make. Only a process that torchrun has not
    started does so: what torchrun starts fails under torchrun too, if it has another port.
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
    """Have `on_end` called, before `multiprocessing` makes an exit code of an exception."""
    import multiprocessing.process  # as torch has done

    process: Any = multiprocessing.process.BaseProcess
    original = process.run

    @functools.wraps(original)
    def run(self: Any) -> None:
        try:
            original(self)
        except BaseException as error:
            _tell(error)
            raise
        _tell(None)

    process.run = run


def _tell(error: BaseException | None) -> None:
    if isinstance(error, SystemExit) and error.code:  # torch.multiprocessing exits with 1 for what its function raised
        error = error.__context__ or error
    for told in on_end:
        told(error)
