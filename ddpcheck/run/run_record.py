"""A run in one file: how its script has ended and what its ranks have left, to be judged again anywhere.

The names of the program are replaced, and nothing of its source is in it: the file is for a report of a bug.
"""

from __future__ import annotations

import gzip
import json
import shlex
import zlib
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from ddpcheck import __version__
from ddpcheck.findings.program_source import ProgramSource
from ddpcheck.findings.report import Report
from ddpcheck.run.ending import Ending
from ddpcheck.run.pseudonyms import Pseudonyms, here
from ddpcheck.run.script_report import report_on_script
from ddpcheck.stream.codec import entry_from_fields, fields_of_entry
from ddpcheck.stream.watched_rank import WatchedRank

_BEGINNING = '{"kind": "run"'
_PACKED = b"\x1f\x8b"  # how a file of gzip begins


def write_record(
    path: Path, script: str, ending: Ending, ranks: Sequence[WatchedRank], source: ProgramSource
) -> Report:
    """Write a run into a file, packed where that is named so (".gz"), and return the report on what was written.

    `source` is that of the script, of which judges have asked what they need.

    Raises:
        OSError: The file cannot be written.
    """
    left = {
        "kind": "run",
        "ddpcheck": __version__,
        "script": next(iter(shlex.split(script)), ""),  # its arguments may hold anything
        "ending": msgspec.to_builtins(ending),
        "source": source.answers,
        "ranks": [_fields_of(rank) for rank in ranks],
    }
    text = json.dumps(Pseudonyms().replaced(left), default=lambda data: b64encode(data).decode())
    path.write_bytes(gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode())
    return judge_record(text)


def unpacked(data: bytes) -> bytes:
    """What a file of gzip holds; another file as it is.

    Raises:
        OSError: It is cut off, or damaged.
    """
    try:
        return gzip.decompress(data) if data.startswith(_PACKED) else data
    except (EOFError, zlib.error) as error:
        raise OSError(str(error)) from error


def is_record(text: str) -> bool:
    """Whether a run was written as this text."""
    return text.startswith(_BEGINNING)


def judge_record(text: str) -> Report:
    """The report on a run that was written.

    Raises:
        ValueError: It is no whole run, or one that another version has written.
    """
    data = here(json.loads(text))
    try:
        ending = msgspec.convert(data["ending"], Ending, str_keys=True)
        ranks = [_rank_of(fields) for fields in data["ranks"]]
        source = ProgramSource(data["source"])
        return report_on_script(str(data["script"]), ending, ranks, select=(), ignore=(), source=source)
    except (KeyError, TypeError, ValueError, AttributeError, msgspec.ValidationError) as error:
        raise ValueError(f"it is no whole run, or that of another version: {error}") from error


def _fields_of(rank: WatchedRank) -> dict[str, Any]:
    """A rank in lists, strings, numbers and bytes; each entry with the name of its kind."""
    others = {name: getattr(rank, name) for name in rank.__struct_fields__ if name != "entries"}
    fields: dict[str, Any] = msgspec.to_builtins(others)
    return {**fields, "entries": [fields_of_entry(entry) for entry in rank.entries]}


def _rank_of(fields: dict[str, Any]) -> WatchedRank:
    """The inverse; entries that this version cannot read are counted."""
    hints = get_type_hints(WatchedRank)
    known = {name: value for name, value in fields.items() if name in hints and name != "entries"}
    rank = {name: msgspec.convert(value, hints[name], str_keys=True) for name, value in known.items()}
    entries = [entry_from_fields(kind, of_kind) for kind, of_kind in fields["entries"]]
    read = [entry for entry in entries if entry is not None]
    rank["unknown"] = rank.get("unknown", 0) + len(entries) - len(read)
    return WatchedRank(entries=read, **rank)
