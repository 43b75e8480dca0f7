"""What the global generators of random numbers have given so far: equal on two ranks that have drawn the same.

One that the program makes for itself may give anything that its first state implies.

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
_DEEPEST = 5  # attributes and items, one in the other
_MOST_ITEMS = 64  # of a list, as of transforms
_MOST_HELD = 512  # objects
_PLAIN = (str, bytes, int, float, complex, type, ModuleType, FunctionType, type(None))
_NEXT = struct.Struct("<Q")
_NEXT_AT = 16  # bytes into torch's state

_seeds = 0
_began: dict[str, tuple[int, int]] = {}  # states when last seeded, or first there; torch's is made later
_drawn: dict[str, bytes] = {}  # and what was drawn before that


def begin(generator: str) -> None:
    """A generator is there, "torch", "python" or "numpy", or was seeded."""
    global _seeds
    _seeds += 1
    if _seeds <= _MOST_SEEDS:
        _began[generator] = state_of(generator)


def end(generator: str) -> None:
    """It is about to be seeded: what it has given until now would be forgotten."""
    if _seeds <= _MOST_SEEDS:
        _drawn[generator] = _given_by(generator)


def made(generator: Any) -> None:
    """The program has a generator of numpy's for itself."""
    _drawn["own"] = _digest(_drawn.get("own", b"") + state_of_own(generator))


def state_of_own(generator: Any) -> bytes:
    """A digest of the state of such a generator."""
    return _digest(repr(generator.bit_generator.state).encode())


def held_generators(thing: Any) -> list[tuple[str, Any]]:
    """The generators in the attributes of an object, and of what these hold, with the name of each attribute."""
    found: list[tuple[str, Any]] = []
    pending: list[tuple[str, Any, int]] = [("", thing, 0)]
    seen = {id(thing)}
    for name, one, depth in pending:  # which grows
        if _held_state(one):
            found.append((name, one))
        elif depth < _DEEPEST:
            for key, value in _parts(one, name):
                if id(value) not in seen and not isinstance(value, _PLAIN) and len(pending) < _MOST_HELD:
                    seen.add(id(value))
                    pending.append((key, value, depth + 1))
    return found


def state_of_held(generators: Iterable[Any]) -> int:
    """A digest of the states of such generators; 0 without any."""
    states = [_held_state(one) for one in generators]
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
    """A digest of all that the generators have given; 0 where that is not known any more."""
    if _seeds > _MOST_SEEDS:
        return 0
    given = {name: _given_by(name) for name in (*_began, "torch")} | {"own": _drawn.get("own", b"")}
    given = {name: given[name] for name in sorted(given) if given[name]}  # numpy's is imported when it is first used
    return _number(repr(given).encode()) + 1


def state_of(generator: str) -> tuple[int, int]:
    """A digest of the state of a global generator, and which of the numbers in that is the next one."""
    if generator == "python":
        of_python: Any = random.getstate()
        return _number(repr(of_python).encode()), of_python[1][-1]
    if generator == "numpy":
        _, keys, place, *_ = sys.modules["numpy.random"].get_state()
        return _number(keys.tobytes() + place.to_bytes(2, "big")), int(place)
    return _of_torch(sys.modules["torch"].default_generator)


def generators_there() -> list[str]:
    """The global generators that the program may have drawn from: numpy's is imported when it is first used."""
    return ["torch", "python", *(["numpy"] if "numpy.random" in sys.modules else [])]


def _given_by(generator: str) -> bytes:
    if generator not in _began:  # torch's, which cannot be asked while torch is imported
        torch = sys.modules["torch"]
        _began[generator] = _of_torch(torch.Generator().manual_seed(torch.default_generator.initial_seed()))
    before, now = _drawn.get(generator, b""), state_of(generator)
    return before if now == _began[generator] else _digest(before + repr(now).encode())


def _of_torch(generator: Any) -> tuple[int, int]:
    state = generator_bytes(generator)
    return _number(state), int(_NEXT.unpack_from(state, _NEXT_AT)[0])


def generator_bytes(generator: Any) -> bytes:
    """The state of a generator of torch's; without numpy, which torch does not require."""
    state = generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())


def _digest(state: bytes) -> bytes:
    return hashlib.blake2b(state, digest_size=8).digest()


def _number(state: bytes) -> int:
    """A digest as a number of 56 bits."""
    return int.from_bytes(_digest(state)[1:], "big")
