"""Lines that construct samplers, datasets and loaders, or seed; history of random generators.

Recorded from the import of torch on: programs may create data and seed before they join a process group. The history is
equal on ranks with equal draws. A generator that the program creates is represented by its initial state.

This module is light: it never imports torch.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import functools
import hashlib
import linecache
import random
import struct
import sys
from collections.abc import Callable, Iterable
from types import FrameType, FunctionType, ModuleType
from typing import Any
from weakref import ref

from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import is_user_file, location_of, user_frame, variables_of
from ddpcheck.gather.patching import Patch

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
_MOST_OBJECTS = 4096  # max objects; a search may create many samplers
_MOST_HISTORIES = 64  # max objects with a digest of earlier draws
_MOST_GENERATORS = 8  # max NumPy generators, whose state is read in each recorded interval

_objects: dict[int, tuple[ref[Any], Location, int]] = {}
_seed_calls: dict[str, tuple[Location, str]] = {}
generators: list[tuple[Any, Location]] = []
"""First NumPy generators that the program created, each with its line."""


def construction_line(obj: object) -> Location | None:
    """Return the line that constructed a loader, sampler or `Subset`, or None."""
    obj_ref, line, _ = _objects.get(id(obj), (lambda: None, None, 0))
    return line if obj_ref() is obj else None


def digest_before(obj: object) -> int:
    """Return a digest of random numbers drawn before `obj` was constructed; 0 if unknown."""
    obj_ref, _, drawn = _objects.get(id(obj), (lambda: None, None, 0))
    return drawn if obj_ref() is obj else 0


def seed_line(generator: str) -> Location | None:
    """Return the line that last seeded or restored a generator ("torch", "python" or "numpy")."""
    return _seed_calls.get(generator, (None, ""))[0]


def restored_by(generator: str) -> str:
    """Return the name of the function that restored a generator's state; '' if seeded."""
    name = _seed_calls.get(generator, (None, ""))[1]
    return name if "state" in name else ""


def follow(module: ModuleType) -> None:
    """Patch constructors and seed functions of an imported module, to record the calling lines."""
    if module.__name__ == "torch.random":
        with contextlib.suppress(Exception):
            begin_history("python")
    for owner in (random, module) if module.__name__ == "torch.random" else (module,):
        generator = "python" if owner is random else module.__name__.partition(".")[0]
        for name in _SEEDS.get(owner.__name__, ()):
            Patch(owner, name, functools.partial(_recording_seed, generator=generator))
    if module.__name__ == "numpy.random":  # torch's generator is not available during its import
        Patch(module, "default_rng", _recording_generator)
        with contextlib.suppress(Exception):
            begin_history("numpy")
    for name in _CLASSES.get(module.__name__, ()):
        if (kind := getattr(module, name, None)) is not None and "__init__" in vars(kind):
            Patch(kind, "__init__", _recording_constructor)


def _recording_constructor(construct: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(construct)
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        with contextlib.suppress(Exception):  # an error in ddpcheck; there is no log yet
            if len(_objects) < _MOST_OBJECTS and (line := _line_of_construction(self, sys._getframe(1))) is not None:
                drawn = draw_history() if len(_objects) < _MOST_HISTORIES else 0
                _objects[id(self)] = ref(self), line, drawn
        construct(self, *arguments, **named)

    return __init__


def _recording_seed(original: Any, generator: str) -> Any:
    @functools.wraps(original)
    def seed(*arguments: Any, **named: Any) -> Any:
        if "state" in original.__name__ and not is_user_file(sys._getframe(1).f_code.co_filename):
            return original(*arguments, **named)  # torch restores a state that it saved itself
        with contextlib.suppress(Exception):  # an error in ddpcheck; there is no log yet
            if (frame := _frame_of_program(sys._getframe(1))) is not None:
                _seed_calls[generator] = location_of(_seed_choosing_frame(frame)), original.__name__
            end_history(generator)
        result = original(*arguments, **named)
        with contextlib.suppress(Exception):
            begin_history(generator)
        return result

    return seed


def _recording_generator(original: Any) -> Any:
    @functools.wraps(original)
    def default_rng(*arguments: Any, **named: Any) -> Any:
        generator = original(*arguments, **named)
        with contextlib.suppress(Exception):  # an error in ddpcheck; there is no log yet
            if len(generators) < _MOST_GENERATORS and (frame := _frame_of_program(sys._getframe(1))) is not None:
                generators.append((generator, location_of(_seed_choosing_frame(frame))))
                _old_draws["own"] = _digest(_old_draws.get("own", b"") + numpy_digest(generator))
        return generator

    return default_rng


def _line_of_construction(obj: object, frame: FrameType | None) -> Location | None:
    """Return the program line that constructs an object, ignoring `super().__init__` calls."""
    frame = _frame_of_program(frame)
    while frame is not None and frame.f_code.co_name == "__init__" and _first_argument(frame) is obj:
        frame = _frame_of_program(frame.f_back)
    return None if frame is None else location_of(frame)


def _seed_choosing_frame(frame: FrameType) -> FrameType:
    """Return the frame that chooses the seed, skipping functions that pass on a parameter."""
    caller = _frame_of_program(frame.f_back)
    while caller is not None and _passes_parameter(frame):
        frame, caller = caller, _frame_of_program(caller.f_back)
    return frame


def _passes_parameter(frame: FrameType) -> bool:
    """Return True if the current line passes the function's own parameter to a call."""
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


_MOST_SEEDS = 256  # max calls that seed; a script may seed in each step
_DEEPEST = 5  # max nesting of attributes and items
_MOST_PARTS = 64  # max items of a list, such as transforms
_MOST_VISITED = 512  # max objects
_PLAIN = (str, bytes, int, float, complex, type, ModuleType, FunctionType, type(None))
_INDEX_FORMAT = struct.Struct("<Q")
_INDEX_OFFSET = 16  # byte offset in torch's state

_num_seeds = 0
_starts: dict[str, tuple[int, int]] = {}  # (digest, index) of the state after seeding or import
_old_draws: dict[str, bytes] = {}  # digest of earlier output


def begin_history(generator: str) -> None:
    """Keep a global generator's state when its draws begin (at import or after seeding)."""
    global _num_seeds
    _num_seeds += 1
    if _num_seeds <= _MOST_SEEDS:
        _starts[generator] = generator_state(generator)


def end_history(generator: str) -> None:
    """Keep a digest of a generator's draws, before the generator is seeded again."""
    if _num_seeds <= _MOST_SEEDS:
        _old_draws[generator] = _output_digest(generator)


def numpy_digest(generator: Any) -> bytes:
    """Return a digest of the state of a numpy generator."""
    return _digest(repr(generator.bit_generator.state).encode())


def generator_attributes(obj: Any) -> list[tuple[str, Any]]:
    """Return the generators in an object's attributes, recursively, with their attribute names."""
    generators: list[tuple[str, Any]] = []
    pending: list[tuple[str, Any, int]] = [("", obj, 0)]
    seen = {id(obj)}
    for name, obj, depth in pending:  # appended to in the loop
        if _state_bytes(obj):
            generators.append((name, obj))
        elif depth < _DEEPEST:
            for key, value in _contents_of(obj, name):
                if id(value) not in seen and not isinstance(value, _PLAIN) and len(pending) < _MOST_VISITED:
                    seen.add(id(value))
                    pending.append((key, value, depth + 1))
    return generators


def digest_of_generators(generators: Iterable[Any]) -> int:
    """Return a digest of the generators' states; 0 if there are none."""
    states = [_state_bytes(generator) for generator in generators]
    return _digest_number(b"".join(states)) if states else 0


def _state_bytes(obj: Any) -> bytes:
    numpy, torch = sys.modules.get("numpy.random"), sys.modules["torch"]
    if isinstance(obj, random.Random) and not isinstance(obj, random.SystemRandom):
        return repr(obj.getstate()).encode()
    if numpy is not None and isinstance(obj, numpy.Generator):
        return numpy_digest(obj)
    if numpy is not None and isinstance(obj, numpy.RandomState):
        name, keys, *others = obj.get_state()
        return repr((name, keys.tolist(), *others)).encode()
    return generator_bytes(obj) if isinstance(obj, torch.Generator) and obj.device.type == "cpu" else b""


def _contents_of(obj: Any, name: str) -> list[tuple[str, Any]]:
    if isinstance(obj, list | tuple):
        return [(name, item) for item in obj] if len(obj) <= _MOST_PARTS else []
    parts = obj if isinstance(obj, dict) else getattr(obj, "__dict__", None)
    if not isinstance(parts, dict) or len(parts) > _MOST_PARTS:
        return []
    return [(str(key), value) for key, value in parts.items()]


def draw_history() -> int:
    """Return a digest of all random numbers drawn so far; 0 if unknown."""
    if _num_seeds > _MOST_SEEDS:
        return 0
    digests = {name: _output_digest(name) for name in (*_starts, "torch")} | {"own": _old_draws.get("own", b"")}
    digests = {name: digests[name] for name in sorted(digests) if digests[name]}  # numpy is imported lazily
    return _digest_number(repr(digests).encode()) + 1


def generator_state(generator: str) -> tuple[int, int]:
    """Return (digest of a global generator's state, index of the next number)."""
    if generator == "python":
        state: Any = random.getstate()
        return _digest_number(repr(state).encode()), state[1][-1]
    if generator == "numpy":
        _, keys, index, *_ = sys.modules["numpy.random"].get_state()
        return _digest_number(keys.tobytes() + index.to_bytes(2, "big")), int(index)
    return _torch_state(sys.modules["torch"].default_generator)


def available_generators() -> list[str]:
    """Return the names of the global generators; numpy's only if numpy is imported."""
    return ["torch", "python", *(["numpy"] if "numpy.random" in sys.modules else [])]


def _output_digest(generator: str) -> bytes:
    if generator not in _starts:  # torch's, not available during its import
        torch = sys.modules["torch"]
        _starts[generator] = _torch_state(torch.Generator().manual_seed(torch.default_generator.initial_seed()))
    before, now = _old_draws.get(generator, b""), generator_state(generator)
    return before if now == _starts[generator] else _digest(before + repr(now).encode())


def _torch_state(generator: Any) -> tuple[int, int]:
    state = generator_bytes(generator)
    return _digest_number(state), int(_INDEX_FORMAT.unpack_from(state, _INDEX_OFFSET)[0])


def generator_bytes(generator: Any) -> bytes:
    """Return the state of a torch generator as bytes, without requiring numpy."""
    state = generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())


def _digest(state: bytes) -> bytes:
    return hashlib.blake2b(state, digest_size=8).digest()


def _digest_number(state: bytes) -> int:
    return int.from_bytes(_digest(state)[1:], "big")
