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
class ParityOptions:
    """How a run is compared with another one, on ranks or in a single process, which replays the samples of ranks."""

    samples: str = ""  # the folder in which ranks have left their samples; empty for the run that records them
    world_size: int = 0  # the number of these ranks
    order: tuple[int, ...] = ()  # in which their rows are put together
    backwards: int = 0  # how many backward passes have their samples there; 0 for all
    steps: int = 0  # optimizer steps to compare; 0 for all
    batch: int = 0  # samples that a batch of a loader has on each rank at most; 0 for as many as the script has
    in_turn: bool = False  # whether the single process takes batches of ranks in turn, and not put together
    draws: bool = True  # whether random draws of the script are replayed
    since: float = 0.0  # when the run on ranks began, in seconds since the epoch: what has changed since is of that run
    is_noise: bool = False  # whether random numbers and clocks are to be others
    as_rank: int = 0  # the rank that the single process takes itself for

    @property
    def replays(self) -> bool:
        """Return if these are of the single process."""
        return bool(self.samples)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How the ranks of a script are watched."""

    folder: str  # where each rank leaves its log
    every: int = 10  # synchronised backward passes from one comparison of the ranks to the next; 0 for never
    parity: ParityOptions | None = None  # if the run is compared with another one


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
    if text is None:
        return None
    values = json.loads(text)
    parity = values.pop("parity", None)
    return RunOptions(**values, parity=parity and ParityOptions(**parity))
