"""Scaling of batch-size variables of a script to the global batch size."""

from __future__ import annotations

import ctypes
import re
from argparse import Namespace
from collections.abc import Iterator, MutableMapping
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

from ddpcheck.findings.source_lines import file_of_class, file_of_module, is_of_program
from ddpcheck.record.source.program_numbers import program_frames

_NAME = re.compile(r"batch(?!es|_?idx|_?index|_?num)|(^|_)m?bsz?$|(samples|images|imgs)_per_", re.IGNORECASE)
_MOST = 4096  # max entries scanned per mapping or object
_DEEPEST = 3


def scale_batch_size(size: int, scaled: int) -> Iterator[str]:
    """Assign `scaled` to batch-size variables on the stack; yield their names."""
    seen = set[int]()
    for frame in program_frames():
        yield from _scale(frame.f_globals, size, scaled, "", seen)
        if frame.f_code.co_name == "<module>":
            continue
        for name, value in [*frame.f_locals.items()]:
            if _has_size(name, value, size):
                _assign(frame, name, scaled)
                yield name
            else:
                yield from _scale_inside(value, size, scaled, name, seen)


def _scale(held: MutableMapping[Any, Any], size: int, scaled: int, path: str, seen: set[int]) -> Iterator[str]:
    if id(held) in seen or len(held) > _MOST:
        return
    seen.add(id(held))
    for name, value in [*held.items()]:
        full_path = f"{path}.{name}" if path else f"{name}"
        if _has_size(name, value, size):
            held[name] = scaled
            yield full_path
        elif full_path.count(".") < _DEEPEST:
            yield from _scale_inside(value, size, scaled, full_path, seen)


def _scale_inside(value: Any, size: int, scaled: int, path: str, seen: set[int]) -> Iterator[str]:
    """Recurse into mappings, option namespaces, and modules and objects of the program."""
    kind = type(value)
    if issubclass(kind, MutableMapping):
        yield from _scale(value, size, scaled, path, seen)
    elif issubclass(kind, Namespace | SimpleNamespace) or is_of_program(
        file_of_module(value) if kind is ModuleType else file_of_class(kind)
    ):
        yield from _scale(getattr(value, "__dict__", {}), size, scaled, path, seen)


def _has_size(name: object, value: Any, size: int) -> bool:
    return type(value) is int and value == size and isinstance(name, str) and _NAME.search(name) is not None


def _assign(frame: FrameType, name: str, value: int) -> None:
    """Assign to a local variable (writes `f_locals` back before Python 3.13, PEP 667)."""
    frame.f_locals[name] = value
    ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
