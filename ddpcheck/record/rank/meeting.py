"""Report a process inside `init_process_group`, or its error, before a log exists.

This module is light: it never imports torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpcheck.record.rank.environment import options_of_run
from ddpcheck.record.rank.started_processes import is_first_process

SUFFIX, RAISED = ".joining", ".unmet"
_GIVEN = ("backend", "init_method", "timeout", "world_size", "rank", "store")  # in the order of torch's signature


@contextlib.contextmanager
def noted(arguments: Sequence[Any], named: Mapping[str, Any]) -> Iterator[None]:
    """Write a file while the process is joining, with its arguments or error."""
    options, file = options_of_run(os.environ), None
    if options is not None:
        with contextlib.suppress(Exception):  # invalid arguments: torch raises its own error
            from msgspec import json

            note = json.encode(_joining({**dict(zip(_GIVEN, arguments, strict=False)), **named}))
            file = Path(options.folder) / f"{os.getpid()}{SUFFIX}"
            file.with_suffix(".new").write_bytes(note)
            file.with_suffix(".new").replace(file)
    try:
        yield
    except Exception as error:
        if file is not None:
            with contextlib.suppress(Exception):
                _note_raised(file, error)
        raise
    finally:
        if file is not None:
            with contextlib.suppress(OSError):
                file.unlink()


def _note_raised(file: Path, error: Exception) -> None:
    from msgspec import json

    from ddpcheck.findings.evidence.endings import Joining
    from ddpcheck.findings.replace import replace

    lines = str(error).strip().splitlines()
    message = f"{type(error).__qualname__}{f': {lines[0]}' if lines else ''}"
    joining = json.decode(file.read_bytes(), type=Joining)
    file.with_suffix(RAISED).write_bytes(json.encode(replace(joining, error=message)))


def _joining(given: Mapping[str, Any]) -> Any:
    from ddpcheck.findings.evidence.endings import Joining
    from ddpcheck.findings.source_lines import user_location

    environ, method = os.environ, given.get("init_method")
    at_agent = f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}"
    by_environment = given.get("store") is None and (method is None or method.startswith("env:"))
    return Joining(
        os.getpid(),
        _number(given, "rank", "RANK"),
        _number(given, "world_size", "WORLD_SIZE"),
        at_agent if by_environment else method or "a store that it is given",
        str(user_location(sys._getframe(3)) or ""),
        at_agent if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "",
        int(environ["LOCAL_WORLD_SIZE"]) if is_first_process() and environ.get("GROUP_WORLD_SIZE") == "1" else 0,
    )


def _number(given: Mapping[str, Any], argument: str, variable: str) -> int:
    number = given.get(argument, -1)
    return int(number if isinstance(number, int) and number >= 0 else os.environ.get(variable, -1))
