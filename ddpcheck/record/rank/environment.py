"""Environment variables and import hooks of the processes of a watched script.

Modules are patched right after their import, before the program can take references.

This module is light: it never imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_VARIABLE = "_DDPCHECK_RUN"
STACK_SIGNAL = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Signal that makes a rank write its stack, unlikely to have another use."""

_LONGEST = 240  # maximum characters in a file name
_ON_PATH = str(Path(__file__).parent / "on_path")


@dataclass(frozen=True, slots=True)
class ParityOptions:
    """Options of a run whose values are compared with the values of another run."""

    samples: str = ""  # folder with the ranks' samples, or '' for the run that records samples
    world_size: int = 0  # number of ranks that recorded samples
    order: tuple[int, ...] = ()  # rank order in which rows are concatenated
    backwards: int = 0  # number of backward passes with samples; 0 for all
    steps: int = 0  # optimizer steps to compare; 0 for all
    batch: int = 0  # maximum batch size per loader and rank; 0 to keep the script's
    in_turn: bool = False  # True if the single process takes the ranks' batches in turn, not concatenated
    draws: bool = True  # True to replay random draws of the script
    since: float = 0.0  # start of the run on ranks, in seconds since the epoch; later file changes belong to that run
    is_noise: bool = False  # True to change random numbers and clocks
    as_rank: int = 0  # rank that the single process acts as

    @property
    def replays(self) -> bool:
        """Return True in the single process, which replays samples."""
        return bool(self.samples)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options for watching the ranks of a script."""

    folder: str  # folder of the logs, one per rank
    every: int = 10  # synchronized backward passes between two comparisons; 0 for never
    parity: ParityOptions | None = None  # set if the run is compared with another run


def environment_for(options: RunOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with variables that make Python processes watch for a process group."""
    path = os.pathsep.join([_ON_PATH, *filter(None, [environ.get("PYTHONPATH")])])
    return {**environ, _VARIABLE: json.dumps(asdict(options)), "PYTHONPATH": path}


UNWATCHED = "unwatched-"  # name prefix of an empty file (works on a full disk) that says why a rank is not watched


def note_unwatched(error: Exception) -> None:
    """Create a file whose name says why this rank is not watched."""
    from urllib.parse import quote  # import only if needed

    if (options := options_of_run(os.environ)) is not None:
        reason = f"rank {os.environ.get('RANK', '?')} is not watched: {type(error).__name__}: {error}"
        Path(options.folder, UNWATCHED + quote(reason.partition("\n")[0], safe=" ':")[:_LONGEST]).touch()


def unwatched_in(folder: Path) -> tuple[str, ...]:
    """Return the sorted reasons in the names of the `UNWATCHED` files of a run."""
    from urllib.parse import unquote

    return (*sorted(unquote(path.name.removeprefix(UNWATCHED)) for path in folder.glob(f"{UNWATCHED}*")),)


def options_of_run(environ: Mapping[str, str]) -> RunOptions | None:
    """Return the options in the environment, or `None` if the script is not watched."""
    text = environ.get(_VARIABLE)
    if text is None:
        return None
    values = json.loads(text)
    parity = values.pop("parity", None)
    return RunOptions(**values, parity=parity and ParityOptions(**parity))


_Callback = Callable[[ModuleType], object]


def when_imported(names: Iterable[str], follow: _Callback) -> None:
    """Call `follow` with each named module, now or right after its import."""
    for name in names:
        if name in sys.modules:
            errors_to_folder(follow)(sys.modules[name])
        else:
            _callbacks_by_name[name] = follow
    if _callbacks_by_name and _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def errors_to_folder(function: Callable[..., object]) -> Callable[..., None]:
    """Wrap a function so that errors are written to the run folder, not raised.

    Errors include ImportError, since a program may forbid imports of modules that it does not know.
    """

    def call(*arguments: object) -> None:
        try:
            function(*arguments)
        except Exception as error:
            with contextlib.suppress(Exception):
                note_unwatched(error)

    return call


_callbacks_by_name: dict[str, _Callback] = {}


class _Finder(MetaPathFinder):
    """Import hook that calls `follow` after the import of a registered module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        follow = _callbacks_by_name.pop(fullname, None)
        if follow is None:
            return None
        if not _callbacks_by_name:
            sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _CallbackLoader(spec.loader, follow)
        return spec


_finder = _Finder()


class _CallbackLoader(Loader):
    """Import loader that calls `follow` after the import, and restores the real loader."""

    def __init__(self, loader: Loader, follow: _Callback) -> None:
        self._loader = loader
        self._callback = follow

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        errors_to_folder(self._callback)(module)
