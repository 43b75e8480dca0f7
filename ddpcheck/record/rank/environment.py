"""The environment that the processes of a watched script inherit.

This module is light: it never imports torch.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

_VARIABLE = "_DDPCHECK_RUN"
STACK_SIGNAL = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Has a rank write its stack: no signal that a script or a scheduler would use."""

_LONGEST = 240  # of what a name may have
_ON_PATH = str(Path(__file__).parent / "on_path")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How the ranks of a script are watched."""

    folder: str  # where each rank leaves its log
    every: int = 10  # synchronised backward passes from one comparison of the ranks to the next; 0 for never


def environment_for(options: RunOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with what makes Python processes that inherit it look for a process group to watch."""
    path = os.pathsep.join([_ON_PATH, *filter(None, [environ.get("PYTHONPATH")])])
    return {**environ, _VARIABLE: json.dumps(asdict(options)), "PYTHONPATH": path}


UNWATCHED = "unwatched-"  # how the name of an empty file begins that says why a rank is not watched: no block is needed


def note_unwatched(error: Exception) -> None:
    """Leave such a file."""
    from urllib.parse import quote  # not in each Python process

    if (options := options_of_run(os.environ)) is not None:
        said = f"rank {os.environ.get('RANK', '?')} is not watched: {type(error).__name__}: {error}"
        Path(options.folder, UNWATCHED + quote(said.partition("\n")[0], safe=" ':")[:_LONGEST]).touch()


def unwatched_in(folder: Path) -> tuple[str, ...]:
    """What such files in the folder of a run say, in order."""
    from urllib.parse import unquote

    return (*sorted(unquote(path.name.removeprefix(UNWATCHED)) for path in folder.glob(f"{UNWATCHED}*")),)


def options_of_run(environ: Mapping[str, str]) -> RunOptions | None:
    """The options of the run that a process belongs to; `None` for a process that belongs to none."""
    text = environ.get(_VARIABLE)
    return None if text is None else RunOptions(**json.loads(text))
