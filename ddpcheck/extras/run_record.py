"""Save a run as an anonymized file for bug reports, and judge it anywhere.

Names of the program are replaced by pseudonyms, and the file has no source code. Words of Python, torch and ddpcheck
are kept, since the judges read them. Folders of this machine are replaced by markers.
"""

from __future__ import annotations

import builtins
import functools
import importlib.util
import itertools
import json
import keyword
import os
import re
import shlex
import sys
import sysconfig
from base64 import b64encode
from collections.abc import Callable, Sequence
from gzip import compress
from pathlib import Path
from typing import Any

import msgspec

from ddpcheck import __version__
from ddpcheck.findings.files import MOST_RANKS
from ddpcheck.findings.program_blocks import ProgramSource
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Report
from ddpcheck.run.ending import Ending
from ddpcheck.run.script_report import report_on_script
from ddpcheck.stream.codec import entry_from_fields, fields_of_entry
from ddpcheck.stream.rank_log import RankTrace

_OWN = Path(__file__).parents[1]
_OF_TORCH = ("nn/modules", "nn/parallel", "nn/utils", "optim", "distributed", "utils/data")
_WORD = re.compile(r"\w*[^\W\d]\w*")
_FRACTION = re.compile(r"(?<![\w.])\d+(?:\.\d*(?:e[+-]?\d+)?|e[+-]?\d+)(?![\w.])")
_MARK = re.compile(r"\{(?:ddpcheck|packages|python|here|home)\}")
_PART = re.compile(rf"(?P<mark>{_MARK.pattern})|(?P<fraction>{_FRACTION.pattern})|{_WORD.pattern}")


class Pseudonyms:
    """Consistent pseudonyms for the names of a program."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._numbers = itertools.count(1)

    def replaced(self, value: Any) -> Any:
        """Return nested data with names and fractional numbers in strings replaced by pseudonyms."""
        return _map_texts(value, lambda text: _PART.sub(self._pseudonym, _mark_folders(text)))

    def _pseudonym(self, part: re.Match[str]) -> str:
        word, fraction = part[0], part["fraction"] is not None
        if part["mark"] is not None or word in _known_words() or (fraction and not float(word)):
            return word
        if word not in self._names:
            bare = word.lstrip("_")
            name = f"{'_' * (len(word) - len(bare))}{'Name' if bare[:1].isupper() else 'name'}{{}}"
            self._names[word] = ("{}.5" if fraction else name).format(next(self._numbers))
        return self._names[word]


def here(value: Any) -> Any:
    """Replace markers such as "{home}" in nested data by the folders of this machine."""
    folders = _folders(os.getcwd())
    return _map_texts(value, lambda text: _MARK.sub(lambda mark: folders[mark[0][1:-1]][0], text))


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_map_texts(key, change): _map_texts(item, change) for key, item in value.items()}
    return [_map_texts(item, change) for item in value] if isinstance(value, list | tuple) else value


def _mark_folders(text: str) -> str:
    folders = ((folder, name) for name, paths in _folders(os.getcwd()).items() for folder in paths)
    for folder, name in sorted(folders, key=lambda item: -len(item[0])):  # longest paths first
        text = text.replace(folder, f"{{{name}}}")
    return text


@functools.cache
def _folders(working: str) -> dict[str, list[str]]:
    """Map each marker name ("home") to local folders; `here` inserts the first folder."""
    packages = map(os.path.dirname, _torch_folders())
    folders = {
        "ddpcheck": [str(_OWN)],
        "packages": [*packages, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")],
        "python": [sysconfig.get_path("stdlib")],
        "here": [working],
        "home": [str(Path.home())],
    }
    for name, paths in folders.items():
        variants = [form(folder) for folder in paths for form in (str, os.path.realpath)]
        folders[name] = [folder for folder in variants if folder != os.sep] or [f"/{name}"]
    return folders


@functools.cache
def _known_words() -> frozenset[str]:
    words = {*dir(builtins), *keyword.kwlist, *keyword.softkwlist, *sys.stdlib_module_names}
    for module in [name for name in sys.modules if name.partition(".")[0] in {"torch", "ddpcheck"}]:
        words.update(module.split("."))
    of_torch = (Path(folder, part).glob("*.py") for folder in _torch_folders() for part in _OF_TORCH)
    for path in itertools.chain(_OWN.rglob("*.py"), *of_torch):
        words.update(_WORD.findall(path.read_text(encoding="utf-8", errors="replace")))
    return frozenset(words)


def _torch_folders() -> Sequence[str]:
    torch = importlib.util.find_spec("torch")
    return (torch and torch.submodule_search_locations) or ()


def write_record(path: Path, script: str, ending: Ending, ranks: Sequence[RankTrace], source: ProgramSource) -> Report:
    """Write a run to `path` (".gz": compressed); return its report; may raise `OSError`.

    Judges ask `source` about the script's source code; the record has the answers instead of the source files.
    """
    record = {
        "kind": "run",
        "ddpcheck": __version__,
        "script": next(iter(shlex.split(script)), ""),  # arguments may be secret
        "ending": msgspec.to_builtins(ending),
        "source": source.answers,
        "ranks": [_fields_of(rank) for rank in ranks],
    }
    text = json.dumps(Pseudonyms().replaced(record), default=lambda data: b64encode(data).decode())
    path.write_bytes(compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode())
    return judge_record(text)


def judge_record(text: str) -> Report:
    """Build the report on a recorded run; raise `ValueError` if incomplete or incompatible."""
    try:
        data = here(json.loads(text))
        ending = msgspec.convert(data["ending"], Ending, str_keys=True)
        ranks = [_rank_from_fields(fields) for fields in data["ranks"]]
        source = ProgramSource(data["source"])
        return report_on_script(str(data["script"]), ending, ranks, source=source)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is incomplete, or from another version of ddpcheck: {error}") from error


def _fields_of(rank: RankTrace) -> dict[str, Any]:
    values = {name: getattr(rank, name) for name in rank.__struct_fields__ if name != "entries"}
    fields: dict[str, Any] = msgspec.to_builtins(values)
    return {**fields, "entries": [fields_of_entry(entry) for entry in rank.entries]}


def _rank_from_fields(fields: dict[str, Any]) -> RankTrace:
    """Make a rank's log from the output of `_fields_of`; count entries of unknown types."""
    if not 0 <= fields["started"]["rank"] < fields["started"]["world_size"] <= MOST_RANKS:
        raise ValueError("the rank of a log is none")
    rank = msgspec.convert({**fields, "entries": []}, RankTrace, str_keys=True)
    entries = [entry_from_fields(kind, entry_fields) for kind, entry_fields in fields["entries"]]
    readable = [entry for entry in entries if entry is not None]
    return replace(rank, entries=readable, unknown=rank.unknown + len(entries) - len(readable))
