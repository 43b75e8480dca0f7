"""The files of a folder in which Flight Recorder has written its dumps, one a rank.

Nothing in them is run: a pickle that asks for a class or a function is refused.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from pathlib import Path
from typing import Any, NoReturn

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.wording import join_names
from ddpcheck.report.hang.flight_recorder import RankDump, as_rank_dump

_NAMED_FOR_A_RANK = re.compile(r"(\d+)(\.(json|pickle|pkl|bin|dump))?$")


def read_dumps(folder: Path) -> dict[int, RankDump]:
    """The dump of each rank in `folder`; of a rank that has left one with and one without stacks, the first.

    Raises:
        UsageError: There is none, or a file that is named as a dump is not one.
    """
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    except FileNotFoundError:
        raise UsageError(f"there is no folder {folder}") from None
    except NotADirectoryError:
        raise UsageError(f"{folder} is a file, and not the folder with the dumps") from None
    except OSError as error:
        raise UsageError(f"cannot read {folder}: {error.strerror}") from error
    if not files:
        raise UsageError(f"there are no dumps in {folder}: it is empty")
    dumps: dict[int, RankDump] = {}
    names: dict[int, list[str]] = {}
    for path in files:
        if (named := _NAMED_FOR_A_RANK.search(path.name)) is None:
            continue
        raw = read_dump(path)
        rank = raw.get("rank", int(named[1]))
        if not isinstance(rank, int) or rank < 0:
            raise UsageError(f"{path} is no Flight Recorder dump: its rank is {str(rank)[:40]!r}")
        dump = as_rank_dump(raw, str(path))
        names.setdefault(rank, []).append(path.name)
        if rank in dumps and dump.has_stacks == dumps[rank].has_stacks:
            raise UsageError(f"several dumps in {folder} are of rank {rank}: {join_names(names[rank], most=9)}")
        if rank not in dumps or dump.has_stacks:
            dumps[rank] = dump
    if not dumps:
        raise UsageError(f"no file in {folder} is named as a dump is, with the rank at its end (rank_0)")
    return dict(sorted(dumps.items()))


def read_dump(path: Path) -> dict[str, Any]:
    """The dump in a file: a dictionary with `entries`, which are dictionaries.

    Raises:
        UsageError: There is none.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    wrong = f"{path} is no Flight Recorder dump"
    try:
        dump = json.loads(data) if data.lstrip()[:1] == b"{" else _PlainData(io.BytesIO(data)).load()
    except _ForeignObjectError as error:
        raise UsageError(f"{wrong}: it holds {error}, and not plain data alone; it was not loaded") from None
    except (Exception, MemoryError):  # bytes at random make the reader fail in any way
        raise UsageError(f"{wrong}: it is neither JSON nor a whole pickle") from None
    if isinstance(dump, dict) and "pg_config" in dump:
        dump.setdefault("entries", [])  # JSON leaves out an empty list
    entries = dump.get("entries") if isinstance(dump, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"{wrong}: it has no list of entries")
    return {str(key): value for key, value in dump.items()}


class _ForeignObjectError(pickle.UnpicklingError):
    """A pickle asks for something that is not plain data."""


class _PlainData(pickle.Unpickler):
    """Reads dictionaries, lists, tuples, strings, numbers and the like, which need no class to be looked up."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise _ForeignObjectError(f"{module}.{name}"[:80])

    def persistent_load(self, _identity: object, /) -> NoReturn:
        raise _ForeignObjectError("a reference to another file")
