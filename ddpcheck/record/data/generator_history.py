"""History of the global random generators, equal on ranks with equal draws.

A generator that the program creates is represented by its initial state.

This module is light: it never imports torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import struct
import sys
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any

_MOST_SEEDS = 256
_DEEPEST = 5  # max nesting of attributes and items
_MOST_ITEMS = 64  # max items of a list, such as transforms
_MOST_HELD = 512  # max objects
_PLAIN = (str, bytes, int, float, complex, type, ModuleType, FunctionType, type(None))
_NEXT = struct.Struct("<Q")
_NEXT_AT = 16  # byte offset in torch's state

_seeds = 0
_began: dict[str, tuple[int, int]] = {}  # state after seeding or import; torch's is set later
_drawn: dict[str, bytes] = {}  # digest of earlier output


def begin(generator: str) -> None:
    """Record the state of a new or reseeded generator: "torch", "python" or "numpy"."""
    global _seeds
    _seeds += 1
    if _seeds <= _MOST_SEEDS:
        _began[generator] = state_of(generator)


def end(generator: str) -> None:
    """Add a generator's output to the history before the generator is seeded."""
    if _seeds <= _MOST_SEEDS:
        _drawn[generator] = _given_by(generator)


def made(generator: Any) -> None:
    """Add a numpy generator that the program creates to the history."""
    _drawn["own"] = _digest(_drawn.get("own", b"") + state_of_own(generator))


def state_of_own(generator: Any) -> bytes:
    """Return a digest of the state of a numpy generator."""
    return _digest(repr(generator.bit_generator.state).encode())


def held_generators(thing: Any) -> list[tuple[str, Any]]:
    """Return the generators in an object's attributes, recursively, with their attribute names."""
    generators: list[tuple[str, Any]] = []
    pending: list[tuple[str, Any, int]] = [("", thing, 0)]
    seen = {id(thing)}
    for name, obj, depth in pending:  # appended to in the loop
        if _held_state(obj):
            generators.append((name, obj))
        elif depth < _DEEPEST:
            for key, value in _parts(obj, name):
                if id(value) not in seen and not isinstance(value, _PLAIN) and len(pending) < _MOST_HELD:
                    seen.add(id(value))
                    pending.append((key, value, depth + 1))
    return generators


def state_of_held(generators: Iterable[Any]) -> int:
    """Return a digest of the generators' states; 0 if there are none."""
    states = [_held_state(generator) for generator in generators]
    return _number(b"".join(states)) if states else 0


def _held_state(thing: Any) -> bytes:
    numpy, torch = sys.modules.get("numpy.random"), sys.modules["torch"]
    if isinstance(thing, random.Random) and not isinstance(thing, random.SystemRandom):
        return repr(thing.getstate()).encode()
    if numpy is not None and isinstance(thing, numpy.Generator):
        return state_of_own(thing)
    if numpy is not None and isinstance(thing, numpy.RandomState):
        name, keys, *others = thing.get_state()
        return repr((name, keys.tolist(), *others)).encode()
    return generator_bytes(thing) if isinstance(thing, torch.Generator) and thing.device.type == "cpu" else b""


def _parts(thing: Any, name: str) -> list[tuple[str, Any]]:
    if isinstance(thing, list | tuple):
        return [(name, one) for one in thing] if len(thing) <= _MOST_ITEMS else []
    held = thing if isinstance(thing, dict) else getattr(thing, "__dict__", None)
    return [(str(key), one) for key, one in held.items()] if isinstance(held, dict) and len(held) <= _MOST_ITEMS else []


def history() -> int:
    """Return a digest of the generators' output so far; 0 if unknown."""
    if _seeds > _MOST_SEEDS:
        return 0
    digests = {name: _given_by(name) for name in (*_began, "torch")} | {"own": _drawn.get("own", b"")}
    digests = {name: digests[name] for name in sorted(digests) if digests[name]}  # numpy is imported lazily
    return _number(repr(digests).encode()) + 1


def state_of(generator: str) -> tuple[int, int]:
    """Return a digest of a global generator's state, and its next index."""
    if generator == "python":
        state: Any = random.getstate()
        return _number(repr(state).encode()), state[1][-1]
    if generator == "numpy":
        _, keys, index, *_ = sys.modules["numpy.random"].get_state()
        return _number(keys.tobytes() + index.to_bytes(2, "big")), int(index)
    return _of_torch(sys.modules["torch"].default_generator)


def generators_there() -> list[str]:
    """Return the names of the available global generators (numpy is imported lazily)."""
    return ["torch", "python", *(["numpy"] if "numpy.random" in sys.modules else [])]


def _given_by(generator: str) -> bytes:
    if generator not in _began:  # torch's, not available during its import
        torch = sys.modules["torch"]
        _began[generator] = _of_torch(torch.Generator().manual_seed(torch.default_generator.initial_seed()))
    before, now = _drawn.get(generator, b""), state_of(generator)
    return before if now == _began[generator] else _digest(before + repr(now).encode())


def _of_torch(generator: Any) -> tuple[int, int]:
    state = generator_bytes(generator)
    return _number(state), int(_NEXT.unpack_from(state, _NEXT_AT)[0])


def generator_bytes(generator: Any) -> bytes:
    """Return the state of a torch generator, without requiring numpy."""
    state = generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())


def _digest(state: bytes) -> bytes:
    return hashlib.blake2b(state, digest_size=8).digest()


def _number(state: bytes) -> int:
    """Return a 56-bit digest."""
    return int.from_bytes(_digest(state)[1:], "big")
