"""Save a run as one anonymized file for bug reports, and judge a saved run anywhere.

Names of the program are replaced by pseudonyms, and the file has no source code. Words of Python, torch and ddpcheck
are kept, since the judges read them. Folders of this machine are replaced by markers.

Also writes the last collectives as Flight Recorder dumps, for `torchfrtrace` and `ddpcheck hang`: gloo writes no dump,
and its in-memory entries have neither the ranks of a group nor the completion state.
"""

from __future__ import annotations

import builtins
import functools
import importlib.util
import itertools
import json
import keyword
import os
import pickle
import re
import shlex
import sys
import sysconfig
import zlib
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from gzip import GzipFile, compress
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec

from ddpcheck import __version__
from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.evidence.endings import DEFAULT_GROUP
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.files import MOST_BYTES, MOST_RANKS, within
from ddpcheck.findings.program_blocks import ProgramSource
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location, Report
from ddpcheck.report.hang.flight_recorder import CALL_KEY, DTYPES
from ddpcheck.run.ending import Ending, still_in_a_call
from ddpcheck.run.script_report import report_on_script
from ddpcheck.stream.codec import entry_from_fields, fields_of_entry
from ddpcheck.stream.rank_log import WatchedRank, comparable_logs

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
        """Replace the names and fractional numbers in strings of nested lists and dicts."""
        return _with_texts(value, lambda text: _PART.sub(self._of_part, _marked(text)))

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
    """Replace the folder markers in nested lists and dicts by local folders."""
    folders = _folders(os.getcwd())
    return _with_texts(value, lambda text: _MARK.sub(lambda mark: folders[mark[0][1:-1]][0], text))


def _with_texts(value: Any, changed: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return changed(value)
    if isinstance(value, dict):
        return {_with_texts(key, changed): _with_texts(item, changed) for key, item in value.items()}
    return [_with_texts(item, changed) for item in value] if isinstance(value, list | tuple) else value


def _marked(text: str) -> str:
    folders = ((folder, name) for name, paths in _folders(os.getcwd()).items() for folder in paths)
    for folder, name in sorted(folders, key=lambda item: -len(item[0])):  # longest paths first
        text = text.replace(folder, f"{{{name}}}")
    return text


@functools.cache
def _folders(working: str) -> dict[str, list[str]]:
    """Return local folders by marker; `here` inserts the first of each list."""
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


_BEGINNING = '{"kind": "run"'
_PACKED = b"\x1f\x8b"  # magic number of gzip


def write_record(
    path: Path, script: str, ending: Ending, ranks: Sequence[WatchedRank], source: ProgramSource
) -> Report:
    """Write a run to a file (".gz": compressed) and return its report; may raise `OSError`.

    `source` has the answers on the source of the script that the judges have requested.
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


def unpacked(data: bytes) -> bytes:
    """Decompress gzip data, if it is; raise `OSError` if truncated, damaged or too large."""
    try:
        return within(GzipFile(fileobj=BytesIO(data)).read(MOST_BYTES + 1)) if data.startswith(_PACKED) else data
    except (EOFError, zlib.error) as error:
        raise OSError(str(error)) from error


def is_record(text: str) -> bool:
    """Return True if a text is a recorded run."""
    return text.startswith(_BEGINNING)


def judge_record(text: str) -> Report:
    """Build the report on a recorded run; raise `ValueError` if incomplete or incompatible."""
    try:
        data = here(json.loads(text))
        ending = msgspec.convert(data["ending"], Ending, str_keys=True)
        ranks = [_rank_of(fields) for fields in data["ranks"]]
        source = ProgramSource(data["source"])
        return report_on_script(str(data["script"]), ending, ranks, source=source)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is incomplete, or from another version of ddpcheck: {error}") from error


def _fields_of(rank: WatchedRank) -> dict[str, Any]:
    """Convert a rank to builtin types, with the type name of each entry."""
    values = {name: getattr(rank, name) for name in rank.__struct_fields__ if name != "entries"}
    fields: dict[str, Any] = msgspec.to_builtins(values)
    return {**fields, "entries": [fields_of_entry(entry) for entry in rank.entries]}


def _rank_of(fields: dict[str, Any]) -> WatchedRank:
    """Inverse of `_fields_of`; counts the entries that this version cannot read."""
    if not 0 <= fields["started"]["rank"] < fields["started"]["world_size"] <= MOST_RANKS:
        raise ValueError("the rank of a log is none")
    rank = msgspec.convert({**fields, "entries": []}, WatchedRank, str_keys=True)
    entries = [entry_from_fields(kind, entry_fields) for kind, entry_fields in fields["entries"]]
    readable = [entry for entry in entries if entry is not None]
    return replace(rank, entries=readable, unknown=rank.unknown + len(entries) - len(readable))


_VERSION = "2.10"  # version of Flight Recorder in torch 2.13
_OPERATIONS = (  # names in Flight Recorder; prefixes of names in torch.distributed
    *("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast", "reduce", "gather", "scatter"),
    "barrier",
)
_PAYLOAD = re.compile(r"(\w+) of shape \(([\d, ]*)\)")
_RECORDED_DTYPES = {name: recorded for recorded, name in DTYPES.items()} | {"bfloat16": "BFloat16"}


def prepare(folder: Path) -> None:
    """Create an empty folder for the dumps; raise `UsageError` if that is impossible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty; the dumps of the ranks need an empty folder")
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}") from error


def write_flight_records(folder: Path, ranks: Sequence[WatchedRank], ending: Ending) -> None:
    """Write the last collectives of each rank as a Flight Recorder dump (`rank_0`)."""
    open_ranks = still_in_a_call(ranks, ending)
    for rank, log in zip(ranks, comparable_logs(ranks), strict=True):
        number = rank.started.rank
        dump = _dump(log, rank.started.world_size, rank.started.backend, is_open=number in open_ranks)
        with (folder / f"rank_{number}").open("xb") as file:  # "x": do not follow a symlink planted there
            pickle.dump(dump, file, protocol=2)


def _dump(log: Sequence[Call], world_size: int, backend: str, *, is_open: bool) -> dict[str, Any]:
    groups = {call.group or DEFAULT_GROUP: call.members or tuple(range(world_size)) for call in log}
    counts = dict.fromkeys(groups, 0)
    entries = []
    for index, call in enumerate(log):
        group = call.group or DEFAULT_GROUP
        counts[group] += 1
        ended = not is_open or index < len(log) - 1
        entries.append(
            {
                **_sizes(call, len(groups[group]), backend),
                **dict.fromkeys(("time_created_ns", "p2p_seq_id", "timeout_ms"), 0),
                **dict.fromkeys(("time_discovered_started_ns", "time_discovered_completed_ns")),
                "record_id": index,
                "pg_id": list(groups).index(group),
                "process_group": (group, _description(group)),
                "collective_seq_id": counts[group],
                "op_id": counts[group],
                "state": "completed" if ended else "scheduled",
                "retired": ended,
                "is_p2p": False,
                "frames": _frames(call),
                CALL_KEY: {"operation": call.operation, "payload": call.payload},
            }
        )
    configured = {
        name: {"name": name, "desc": _description(name), "ranks": str(list(members))}
        for name, members in groups.items()
    }
    return {"version": _VERSION, "pg_config": configured, "entries": entries}


def _description(group: str) -> str:
    return "default_pg" if group == DEFAULT_GROUP else "undefined"


def _sizes(call: Call, members: int, backend: str) -> Mapping[str, Any]:
    """Return name, sizes and dtypes that pass the checks of torch's dump analysis."""
    operation = next((name for name in _OPERATIONS if call.operation.startswith(name)), "barrier")
    if call.operation.startswith("DistributedDataParallel."):
        operation = "all_reduce"
    match = _PAYLOAD.search(call.payload)
    shape = [int(size) for size in re.findall(r"\d+", match[2])] if match else [1]
    dtype = _RECORDED_DTYPES.get(match[1], match[1].capitalize()) if match else "Float"
    full_shape = [members, *shape]
    return {
        "profiling_name": f"{backend}:{operation}",
        "input_sizes": [full_shape if operation == "reduce_scatter" else shape],
        "output_sizes": [full_shape if operation == "all_gather" else shape],
        "input_dtypes": [dtype],
        "output_dtypes": [dtype],
    }


def _frames(call: Call) -> list[dict[str, Any]]:
    locations = map(Location.parse, call.callers or (call.location,))
    return [{"name": "<unknown>", "filename": loc.path, "line": loc.line} for loc in locations if loc is not None]
