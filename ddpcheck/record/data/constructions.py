"""Lines of a script that construct samplers, datasets and loaders, or seed.

Recorded from the import of torch on: programs may create data and seed before they join a process group.

This module is light: it never imports torch.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import random
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any
from weakref import ref

from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import is_user_file, location_of, user_frame, variables_of
from ddpcheck.gather.patching import Patch
from ddpcheck.record.data import generator_history

_CLASSES = {
    "torch.utils.data.dataset": ("Subset", "TensorDataset"),
    "torch.utils.data.sampler": (
        *("SequentialSampler", "RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler", "BatchSampler"),
    ),
    "torch.utils.data.distributed": ("DistributedSampler",),
    "torch.utils.data.dataloader": ("DataLoader",),
}
_SEEDS = {"random": ("seed", "setstate"), "torch.random": ("manual_seed", "set_rng_state")}
_SEEDS |= {"numpy.random": ("seed", "set_state")}
_MOST = 4096  # max objects; a search may create many samplers
_MOST_HISTORIES = 64
_MOST_GENERATORS = 8

_made: dict[int, tuple[ref[Any], Location, int]] = {}
_seeded: dict[str, tuple[Location, str]] = {}
generators: list[tuple[Any, Location]] = []
"""First NumPy generators created by the program, with lines."""


def made_at(thing: object) -> Location | None:
    """Return the line that constructed a loader, sampler or `Subset`, or None."""
    living, line, _ = _made.get(id(thing), (lambda: None, None, 0))
    return line if living() is thing else None


def drawn_before(thing: object) -> int:
    """Return a digest of earlier draws at an object's construction; 0 if unknown."""
    living, _, drawn = _made.get(id(thing), (lambda: None, None, 0))
    return drawn if living() is thing else 0


def seeded_at(generator: str) -> Location | None:
    """Return the line that last seeded or restored "torch", "python" or "numpy"."""
    return _seeded.get(generator, (None, ""))[0]


def restored_by(generator: str) -> str:
    """Return the function that restored a generator's state; '' if seeded."""
    name = _seeded.get(generator, (None, ""))[1]
    return name if "state" in name else ""


def follow(module: ModuleType) -> None:
    """Patch the constructors and seed functions of a newly imported module."""
    if module.__name__ == "torch.random":
        with contextlib.suppress(Exception):
            generator_history.begin("python")
    for owner in (random, module) if module.__name__ == "torch.random" else (module,):
        generator = "python" if owner is random else module.__name__.partition(".")[0]
        for name in _SEEDS.get(owner.__name__, ()):
            Patch(owner, name, functools.partial(_noting_seed, generator=generator))
    if module.__name__ == "numpy.random":  # torch's generator is not available during its import
        Patch(module, "default_rng", _noting_generator)
        with contextlib.suppress(Exception):
            generator_history.begin("numpy")
    for name in _CLASSES.get(module.__name__, ()):
        if (kind := getattr(module, name, None)) is not None and "__init__" in vars(kind):
            Patch(kind, "__init__", _noting)


def _noting(construct: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(construct)
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        with contextlib.suppress(Exception):  # an error in ddpcheck; there is no log yet
            if len(_made) < _MOST and (line := _line_of_construction(self, sys._getframe(1))) is not None:
                drawn = generator_history.history() if len(_made) < _MOST_HISTORIES else 0
                _made[id(self)] = ref(self), line, drawn
        construct(self, *arguments, **named)

    return __init__


def _noting_seed(original: Any, generator: str) -> Any:
    @functools.wraps(original)
    def seed(*arguments: Any, **named: Any) -> Any:
        if "state" in original.__name__ and not is_user_file(sys._getframe(1).f_code.co_filename):
            return original(*arguments, **named)  # torch restores a state that it saved itself
        with contextlib.suppress(Exception):  # an error in ddpcheck; there is no log yet
            if (frame := _frame_of_program(sys._getframe(1))) is not None:
                _seeded[generator] = location_of(_that_decides(frame)), original.__name__
            generator_history.end(generator)
        result = original(*arguments, **named)
        with contextlib.suppress(Exception):
            generator_history.begin(generator)
        return result

    return seed


def _noting_generator(original: Any) -> Any:
    @functools.wraps(original)
    def default_rng(*arguments: Any, **named: Any) -> Any:
        generator = original(*arguments, **named)
        with contextlib.suppress(Exception):  # an error in ddpcheck; there is no log yet
            if len(generators) < _MOST_GENERATORS and (frame := _frame_of_program(sys._getframe(1))) is not None:
                generators.append((generator, location_of(_that_decides(frame))))
                generator_history.made(generator)
        return generator

    return default_rng


def _line_of_construction(thing: object, frame: FrameType | None) -> Location | None:
    """Return the program line that constructs an object, ignoring `super().__init__` calls."""
    frame = _frame_of_program(frame)
    while frame is not None and frame.f_code.co_name == "__init__" and _first_argument(frame) is thing:
        frame = _frame_of_program(frame.f_back)
    return None if frame is None else location_of(frame)


def _that_decides(frame: FrameType) -> FrameType:
    """Return the frame that chooses a seed, instead of passing an argument on."""
    caller = _frame_of_program(frame.f_back)
    while caller is not None and _hands_on(frame):
        frame, caller = caller, _frame_of_program(caller.f_back)
    return frame


def _hands_on(frame: FrameType) -> bool:
    """Return True if a function's current line passes a parameter to a call."""
    code = frame.f_code
    params = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    try:
        tree = ast.parse(linecache.getline(code.co_filename, frame.f_lineno).strip())
    except SyntaxError:  # part of a multi-line statement
        return False
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    values = [value for call in calls for value in (*call.args, *(keyword.value for keyword in call.keywords))]
    return any(isinstance(value, ast.Name) and value.id in params for value in values)


def _first_argument(frame: FrameType) -> object:
    return variables_of(frame).get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None


_frame_of_program = functools.partial(user_frame, over_packages=True)  # works before `pass_over_packages`
