"""Evidence as JSON: dataclasses, errors and plain values that ranks send, in a form that a person can read.

A class is known by its name in `ddpcheck.findings`, in any module there; a field that has its default is left out.
Paths, addresses, ports, times, and fingerprints of tensors, which differ between runs or machines although no judge
asks for more than whether they are equal, are written in one form.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import pkgutil
import re
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from msgspec import NODEFAULT, Struct, structs

from ddpcheck import findings
from ddpcheck.findings.errors import DDPCheckError, RankFailure
from tests.faultsuite.cases import ROOT

_CLASS, SHARED = "is", "as"
_OF_SCRIPTS = tuple(
    f"ddpcheck.{name}" for name in ("stream.rank_report", "stream.entries", "stream.rank_log", "run.ending")
)
_FORMS = (_CLASS, "list", "set", "frozenset", "dict", "path")
_FINGERPRINT = 10**6  # no other number in evidence is as large; the first fingerprint in a file is written as this
_WIDTH = 160
_NUMBERS = re.compile(r"\[[-+.e0-9, ]*\]")


class EvidenceError(DDPCheckError):
    """Recorded evidence is missing, or is not that of today's classes and phases."""


@functools.cache
def _classes() -> dict[str, type]:
    """The dataclasses, enums and errors of `ddpcheck.findings` and of what ranks of a script leave, by name."""
    found: dict[str, type] = {}
    modules = [module.name for module in pkgutil.walk_packages(findings.__path__, f"{findings.__name__}.")]
    for name in (*modules, *_OF_SCRIPTS):
        module = importlib.import_module(name)
        for name, item in vars(module).items():
            if isinstance(item, type) and (_has_fields(item) or issubclass(item, Enum | DDPCheckError)):
                assert found.setdefault(name, item) is item, f"two classes are called {name}"
    return found


def fields_of(name: str) -> list[str]:
    """The names of the fields of a dataclass."""
    if name not in _classes():
        raise EvidenceError(f"ddpcheck.findings has no class {name}")
    kind = _classes()[name]
    return [field.name for field in _recorded(kind)] if _has_fields(kind) else []


def _has_fields(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or (issubclass(kind, Struct) and kind is not Struct)


def _recorded(kind: type) -> list[dataclasses.Field[Any] | structs.FieldInfo]:
    """The fields of a dataclass or Struct, without those that only a report shows, and no judge reads."""
    if issubclass(kind, Struct):
        return [*structs.fields(kind)]
    return [field for field in dataclasses.fields(kind) if not field.metadata.get("added")]


class Encoder:
    """Turns answers into what JSON can hold; one for a file, since fingerprints are numbered as they come."""

    def __init__(self, *, with_folders: bool = False) -> None:
        """Begin; `with_folders`: the folders of this machine are marked, so that `here` can put those of another in."""
        self.used: set[str] = set()
        self._plain = functools.partial(plain, with_folders=with_folders)
        self._fingerprints: dict[int, int] = {}

    def encode(self, value: Any) -> Any:
        """Return the value as lists, strings, numbers and dicts."""
        if value is None or isinstance(value, bool | float):
            return value
        if isinstance(value, Enum):
            return {_CLASS: type(value).__name__, "name": value.name}
        if isinstance(value, int):
            return value if abs(value) < _FINGERPRINT else self._number(value)
        if isinstance(value, str):
            return self._plain(value)
        if isinstance(value, Path):
            return {"path": self._plain(str(value))}
        if isinstance(value, tuple):
            return [self.encode(item) for item in value]
        if isinstance(value, list):
            return {"list": [self.encode(item) for item in value]}
        if isinstance(value, set | frozenset):
            return {type(value).__name__: sorted((self.encode(item) for item in value), key=json.dumps)}
        if isinstance(value, Mapping):
            return self._mapping(value)
        if isinstance(value, BaseException):
            return self._error(value)
        if _has_fields(type(value)) and type(value) is _classes().get(type(value).__name__):
            self.used.add(type(value).__name__)
            return {_CLASS: type(value).__name__, **dict(self._told(value))}
        raise EvidenceError(f"a {type(value).__qualname__} is nothing that can be recorded; see {__file__}")

    def _number(self, fingerprint: int) -> int:
        return self._fingerprints.setdefault(fingerprint, _FINGERPRINT + len(self._fingerprints))

    def _mapping(self, value: Mapping[Any, Any]) -> Any:
        if all(isinstance(key, str) and key not in _FORMS for key in value):
            return {self._plain(key): self.encode(item) for key, item in value.items()}
        return {"dict": [[self.encode(key), self.encode(item)] for key, item in value.items()]}

    def _told(self, value: Any) -> Iterator[tuple[str, Any]]:
        """The fields that have no default, or another value than that."""
        for field in _recorded(type(value)):
            given = getattr(value, field.name)
            made = field.default_factory
            default = field.default if made in (dataclasses.MISSING, NODEFAULT) else made()
            if isinstance(value, RankFailure) and field.name == "when":
                yield "when", 0.0  # failures are in the order of time already
            elif type(given) is not type(default) or given != default:
                yield field.name, self.encode(given)

    def _error(self, error: BaseException) -> dict[str, Any]:
        kind = type(error)
        if kind.__name__ not in _classes() and getattr(builtins, kind.__name__, None) is not kind:
            # no judge knows it; its name is in `RankFailure`
            return {_CLASS: "Exception", "args": [self._plain(str(error))]}
        told = {name: value for name, value in vars(error).items() if name not in _FORMS and value not in ("", {}, ())}
        return {_CLASS: kind.__name__, "args": self.encode(error.args), **self._mapping(told)}


def decode(data: Any, shared: Sequence[Any] = ()) -> Any:
    """Return the value that was encoded; `{SHARED: 3}` stands for value 3 of `shared`, which is decoded."""
    if isinstance(data, list):
        return tuple([decode(item, shared) for item in data])
    if not isinstance(data, dict):
        return data
    if _CLASS in data:
        return _made(data[_CLASS], {name: decode(value, shared) for name, value in data.items() if name != _CLASS})
    if data.keys() == {SHARED}:
        return shared[data[SHARED]]
    for form, kind in {"list": list, "set": set, "frozenset": frozenset, "dict": dict, "path": Path}.items():
        if form in data:
            return kind(decode(data[form], shared))
    return {key: decode(value, shared) for key, value in data.items()}


def _made(name: str, told: dict[str, Any]) -> Any:
    kind = _classes().get(name) or getattr(builtins, name, None)
    if not isinstance(kind, type):
        raise EvidenceError(f"ddpcheck.findings has no class {name}")
    if issubclass(kind, BaseException):
        error = kind.__new__(kind, *told["args"])
        error.args = told.pop("args")
        defaults = {"failures": (), "results": {}, "detail": ""} if issubclass(kind, DDPCheckError) else {}
        vars(error).update({**defaults, **told})
        return error
    if issubclass(kind, Enum):
        return kind[told["name"]]
    try:
        return kind(**told)
    except TypeError as error:
        raise EvidenceError(f"{name} has other fields by now: {error}") from error


def fields_that_differ(first: Any, other: Any) -> Any:
    """What an encoded value has that another of its class has not; all of it where they are not so alike."""
    both = _is_object(first) and _is_object(other)
    if not (both and first[_CLASS] == other[_CLASS] and first.keys() <= other.keys()):
        return other
    return {k: fields_that_differ(first.get(k), value) for k, value in other.items() if first.get(k, ...) != value}


def with_fields(first: Any, differing: Any) -> Any:
    """The inverse of `fields_that_differ`: the other value."""
    if not _is_object(first) or not isinstance(differing, dict) or _CLASS in differing:
        return differing
    return first | {name: with_fields(first.get(name), value) for name, value in differing.items()}


def _is_object(data: Any) -> bool:
    return isinstance(data, dict) and _CLASS in data


@functools.cache
def _folders() -> list[tuple[str, str]]:
    """Folders of this machine, and what is written in their place; the longest come first."""
    torch = importlib.util.find_spec("torch")
    packages = [sysconfig.get_path("purelib")]
    packages += [os.path.dirname(folder) for folder in (torch.submodule_search_locations or ())] if torch else []
    folders = {ROOT: "", **dict.fromkeys(packages, "site-packages/"), sysconfig.get_path("stdlib"): "python/"}
    known = {form(folder): word for folder, word in folders.items() for form in (os.path.abspath, os.path.realpath)}
    return sorted(((f"{folder}{os.sep}", word) for folder, word in known.items()), key=lambda item: -len(item[0]))


_MARK = "<{}>"
_PASSING = (
    (re.compile(rf"{re.escape(tempfile.gettempdir())}/ddpcheck-[\w-]+"), "WORLD"),
    (re.compile(r"\b0x[0-9a-f]{6,}\b"), "0x0"),
    (re.compile(r"(\[?(?:127\.0\.0\.1|::1|localhost)\]?):\d+"), r"\1:0"),
    (re.compile(r"\[([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ "), r"[\g<1> "),
)


def plain(text: str, *, with_folders: bool = False) -> str:
    """Text without paths, addresses, ports and times of this machine."""
    for folder, word in _folders():
        text = text.replace(folder, _MARK.format(word or "root/") if with_folders else word)
    for pattern, word in _PASSING:
        text = pattern.sub(word, text)
    return text


def here(text: str) -> str:
    """Text with the folders of this machine, where they were marked."""
    for folder, word in _folders():
        text = text.replace(_MARK.format(word or "root/"), folder)
    return text


def dumped(data: Any, indent: int = 0) -> str:
    """JSON with what fits into a line in a line, and with a line for each item of the rest but lists of numbers."""
    line = json.dumps(data, ensure_ascii=False)
    if len(line) + indent <= _WIDTH or not isinstance(data, list | dict) or _NUMBERS.fullmatch(line):
        return line
    inner = " " * (indent + 1)
    if isinstance(data, list):
        items = [dumped(item, indent + 1) for item in data]
        opened, closed = "[]"
    else:
        items = [f"{json.dumps(key, ensure_ascii=False)}: {dumped(item, indent + 1)}" for key, item in data.items()]
        opened, closed = "{}"
    return f"{opened}\n{inner}" + f",\n{inner}".join(items) + f"\n{' ' * indent}{closed}"
