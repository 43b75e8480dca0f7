"""Names of a program replaced by others, the same one each time: what is left says nothing of what was trained.

A word stays if it is one of Python's, torch's or ddpcheck's own: judges read those, and they are no secret. Folders of
this machine are marked, so that `here` can put those of another in.
"""

from __future__ import annotations

import builtins
import functools
import importlib.util
import itertools
import keyword
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_OWN = Path(__file__).parents[1]
_OF_TORCH = ("nn/modules", "nn/parallel", "nn/utils", "optim", "distributed", "utils/data")
_WORD = re.compile(r"\w*[^\W\d]\w*")
_FRACTION = re.compile(r"(?<![\w.])\d+(?:\.\d*(?:e[+-]?\d+)?|e[+-]?\d+)(?![\w.])")
_MARK = re.compile(r"\{(?:ddpcheck|packages|python|here|home)\}")
_PART = re.compile(rf"(?P<mark>{_MARK.pattern})|(?P<fraction>{_FRACTION.pattern})|{_WORD.pattern}")


class Pseudonyms:
    """Other names, each of which stands for one of the program."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._numbers = itertools.count(1)

    def replaced(self, value: Any) -> Any:
        """Lists, dicts and strings with the names replaced, and in strings what is a fraction."""
        if isinstance(value, str):
            return _PART.sub(self._of_part, _marked(value))
        if isinstance(value, dict):
            return {self.replaced(key): self.replaced(item) for key, item in value.items()}
        return [self.replaced(item) for item in value] if isinstance(value, list | tuple) else value

    def _of_part(self, part: re.Match[str]) -> str:
        word, fraction = part[0], part["fraction"] is not None
        if part["mark"] is not None or word in _known_words() or (fraction and not float(word)):
            return word
        if word not in self._names:
            bare = word.lstrip("_")
            name = f"{'_' * (len(word) - len(bare))}{'Name' if bare[:1].isupper() else 'name'}{{}}"
            self._names[word] = ("{}.5" if fraction else name).format(next(self._numbers))
        return self._names[word]


def here(value: Any) -> Any:
    """Lists, dicts and strings with the folders of this machine, where those of another were marked."""
    if isinstance(value, str):
        return _MARK.sub(lambda mark: _folders(os.getcwd())[mark[0][1:-1]][0], value)
    if isinstance(value, dict):
        return {here(key): here(item) for key, item in value.items()}
    return [here(item) for item in value] if isinstance(value, list) else value


def _marked(text: str) -> str:
    folders = ((folder, name) for name, known in _folders(os.getcwd()).items() for folder in known)
    for folder, name in sorted(folders, key=lambda item: -len(item[0])):  # the innermost ones first
        text = text.replace(folder, f"{{{name}}}")
    return text


@functools.cache
def _folders(working: str) -> dict[str, list[str]]:
    """Folders of this machine, by what they are for; the first of each is to stand for those of another machine."""
    torch = importlib.util.find_spec("torch")
    of_torch = [os.path.dirname(folder) for folder in (torch and torch.submodule_search_locations) or ()]
    found = {
        "ddpcheck": [str(_OWN)],
        "packages": [*of_torch, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")],
        "python": [sysconfig.get_path("stdlib")],
        "here": [working],
        "home": [str(Path.home())],
    }
    for name, known in found.items():
        both = [form(folder) for folder in known for form in (str, os.path.realpath)]
        found[name] = [folder for folder in both if folder != os.sep] or [f"/{name}"]
    return found


@functools.cache
def _known_words() -> frozenset[str]:
    """The words of Python, of ddpcheck's source, and of the parts of torch that programs name."""
    known = {*dir(builtins), *keyword.kwlist, *keyword.softkwlist, *sys.stdlib_module_names}
    for module in [name for name in sys.modules if name.partition(".")[0] in {"torch", "ddpcheck"}]:
        known.update(module.split("."))
    for path in _sources():
        known.update(_WORD.findall(path.read_text(encoding="utf-8", errors="replace")))
    return frozenset(known)


def _sources() -> Iterator[Path]:
    yield from _OWN.rglob("*.py")
    torch = importlib.util.find_spec("torch")
    for folder in (torch and torch.submodule_search_locations) or ():
        for part in _OF_TORCH:
            yield from Path(folder, part).glob("*.py")
