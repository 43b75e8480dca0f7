"""Flight Recorder's dumps as the logs of collectives that judges compare: of each rank and process group, lined up.

The recorder keeps the last entries of a rank (2,000 unless TORCH_FR_BUFFER_SIZE says otherwise), so ranks are lined up
by the numbers that their process groups give to collectives. torchcomms has a recorder of its own, which writes the
same fields, and counts all calls of a rank together. Nothing in the files of a folder of dumps is run: a pickle that
asks for a class or a function is refused.
"""

from __future__ import annotations

import functools
import io
import json
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.evidence.endings import DEFAULT_GROUP, RankDump, RecordedCall
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.files import MOST_RANKS, limited_memory, read_file
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import is_user_file, relative_path
from ddpcheck.findings.wording import join_names

_UNRECORDED = "unrecorded"  # gloo's monitored_barrier takes numbers, and is not in the dump
_MOST_MISSING = 1000  # calls in a row that are not in a dump
_MOST_LOGS = 1 << 23  # one of each rank and process group
_MOST_VALUES = 1 << 23  # in a dump, where what is there twice counts twice
_OPERATIONS = {  # in the words of torch.distributed
    "all_reduce_barrier": "barrier",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
}
_MATCHED_BY_PAYLOAD = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "allreduce_coalesced")
DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "Char": "int8", "Byte": "uint8"}
DTYPES |= {"Short": "int16", "Int": "int32", "Long": "int64"}
"""The recorder's names, and torch's."""

_OF_LIBRARIES = re.compile(  # Python's own library and torch on the machine of the job, which need not be this one
    r"^<|/lib(64)?/python[\d.]+/(?!(site|dist)-packages/)|/torch/(_\w+|distributed|nn|autograd|optim|utils)[/.]"
)
CALL_KEY = "ddpcheck"
"""In an entry that ddpcheck has written: the operation and the payload, where the recorder has no words for them."""


@dataclass(frozen=True, slots=True)
class GroupLogs:
    """The collectives of one process group, lined up."""

    name: str  # of the group
    members: tuple[int, ...]  # as far as they are known
    first: int  # the number of the first call in the logs, from 0
    logs: Sequence[Sequence[Call]]  # by rank, empty for those without a dump
    waiting: frozenset[int]  # ranks whose last call has not ended


def as_rank_dump(dump: Mapping[str, Any], where: str) -> RankDump:
    """A dump as it was read, in our words; `where` names it in errors.

    Raises:
        UsageError: An entry has not what it takes to line it up.
    """
    raw: Sequence[Mapping[str, Any]] = dump["entries"]
    configured = dump.get("pg_config")
    try:
        if raw and all(map(_is_of_torchcomms, raw)):
            raw, configured = _as_of_torch(raw, configured if isinstance(configured, dict) else {}, where)
        named = configured.items() if isinstance(configured, dict) else ()
        ranks_of = {str(name): str(group.get("ranks")) for name, group in named if isinstance(group, dict)}
        found = {name: tuple(map(int, re.findall(r"\d+", text))) for name, text in ranks_of.items()}
        groups = {name: ranks for name, ranks in found.items() if ranks}
        entries = [_entry(one, groups) for one in raw]
        descriptions = {str(one["process_group"][0]): str(one["process_group"][1]) for one in raw}
        enqueued = _enqueued(dump.get("pg_status"), list(groups), raw)
        gloo = all(str(one["profiling_name"]).startswith("gloo:") for one in raw)
        world_size = max((_gathered_from(one) for one in raw), default=0)
        wrapped = bool(raw) and int(raw[0].get("record_id", 0)) > 0
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"[:80]
        raise UsageError(f"{where} is no Flight Recorder dump that ddpcheck can read ({what})") from error
    _check_rank(max([world_size - 1, 0, *(rank for ranks in groups.values() for rank in ranks)]), where)
    active_only = wrapped and not gloo and not any(entry.ended for entry in entries)
    wrapped, gloo = wrapped and not active_only, gloo and bool(raw)
    descriptions = {name: text for name, text in descriptions.items() if text not in ("", "undefined", "default_pg")}
    return RankDump(entries, groups, wrapped, world_size, gloo, active_only, descriptions, enqueued)


def _enqueued(statuses: object, names: Sequence[str], raw: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The number of the last call of each group, of nccl: it counts the groups of a rank, as their names do."""
    if not isinstance(statuses, dict) or len(statuses) != len(names) or not all(map(str.isdigit, names)):
        return {}
    by_id = dict(zip(sorted(map(int, statuses)), sorted(names, key=int), strict=True))
    if any(by_id.get(int(one.get("pg_id", -1))) != str(one["process_group"][0]) for one in raw):
        return {}
    return {by_id[int(key)]: int(status["last_enqueued_collective"]) for key, status in statuses.items()}


def _is_of_torchcomms(raw: Mapping[str, Any]) -> bool:
    """Whether its recorder has written an entry: it describes the group by the backend, which torch never does."""
    return [str(raw["profiling_name"]).partition(":")[0]] == list(raw["process_group"])[1:]


def _as_of_torch(
    raw: Sequence[Mapping[str, Any]], configured: Mapping[str, Any], where: str
) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
    """Entries of torchcomms, and the ranks of its groups, as torch has them: numbered in each group, from 1.

    Its numbers (`comms/torchcomms/hooks/fr/FlightRecorder.cpp`, version 2.10) count the calls of all groups, and the
    sends and receives, from 0; `is_p2p` is never true. A group has one communicator for each backend.

    Raises:
        UsageError: Entries are lost or left out, and it is not known how many of them were of which group.
    """
    is_whole = [int(one["record_id"]) for one in raw] == list(range(len(raw)))
    counts: dict[tuple[str, bool], int] = {}
    entries: list[Mapping[str, Any]] = []
    groups = {}
    for one in raw:
        name, backend = map(str, one["process_group"])
        group = f"{name} ({backend})"
        is_p2p = str(one["profiling_name"]).partition(":")[2] in _BETWEEN_TWO
        counts[group, is_p2p] = counts.get((group, is_p2p), 0) + 1
        number = counts[group, is_p2p] if is_whole else int(one["collective_seq_id"]) + 1
        key = "p2p_seq_id" if is_p2p else "collective_seq_id"
        entries.append({**one, "process_group": (group, ""), "is_p2p": is_p2p, key: number})
        if name in configured:
            groups[group] = configured[name]
    if not is_whole and (len(counts) > 1 or len(configured) > 1 or any(is_p2p for _, is_p2p in counts)):
        raise UsageError(
            f"{where} lacks earlier calls, and torchcomms numbers the calls of all process groups together: the rest "
            "cannot be aligned; TORCHCOMM_FR_BUFFER_SIZE sets how many calls are kept"
        )
    return entries, groups


_BETWEEN_TWO = ("send", "recv", "batch_op_issue")


def _entry(raw: Mapping[str, Any], groups: Mapping[str, tuple[int, ...]]) -> RecordedCall:
    name = str(raw["profiling_name"]).partition(":")[2] or str(raw["profiling_name"])
    group = str(raw["process_group"][0])
    between_two = bool(raw.get("is_p2p", name.startswith(("send", "recv"))))
    number = int(raw["p2p_seq_id" if between_two else "collective_seq_id"])
    between_two |= name == "coalesced"  # the end of several calls, each of which has an entry
    operation = _OPERATIONS.get(name, name)
    payload = _payload(operation, raw)
    own = raw.get(CALL_KEY)
    if isinstance(own, dict):
        operation, payload = str(own.get("operation", operation)), str(own.get("payload", payload))
    call = _call(operation, group, payload, tuple(map(str, user_lines(raw.get("frames") or ()))))
    peer = int(at[1]) if between_two and (at := re.search(r"(?:->|<-)(\d+)$", name)) else -1
    return RecordedCall(
        group,
        number,
        call,
        bool(raw.get("retired")) or raw.get("state") == "completed",
        between_two,
        groups[group][peer] if 0 <= peer < len(groups.get(group, ())) else peer,
        int(raw.get("time_created_ns") or 0) / 1e9,
        int(raw.get("timeout_ms") or 0) / 1e3,
    )


@functools.lru_cache(maxsize=10_000)
def _call(operation: str, group: str, payload: str, lines: tuple[str, ...]) -> Call:
    """One object for equal calls, of which there are thousands."""
    return Call(operation, group, (), payload, location=next(iter(lines), ""), callers=lines)


def _payload(operation: str, raw: Mapping[str, Any]) -> str:
    """Dtype and shape of what goes in, where those of all ranks have to be the same."""
    sizes = raw.get("input_sizes") or ()
    if not operation.startswith(_MATCHED_BY_PAYLOAD) or operation.endswith("_v"):
        return ""
    dtypes = [DTYPES.get(str(one), str(one).lower()) for one in raw.get("input_dtypes") or [""] * len(sizes)]
    pairs = zip(dtypes, sizes, strict=False)
    return "; ".join(f"{dtype} of shape {tuple(map(int, shape))}".lstrip() for dtype, shape in pairs)


def _gathered_from(raw: Mapping[str, Any]) -> int:
    """The number of ranks that an all_gather in the default group gathers from; 0 for other entries."""
    inputs: Sequence[Any] = raw.get("input_sizes") or ()
    outputs: Sequence[Any] = raw.get("output_sizes") or ()
    gathers = str(raw["profiling_name"]) == "gloo:all_gather" and str(raw["process_group"][0]) == DEFAULT_GROUP
    if gathers and len(inputs) == len(outputs) == 1 and list(outputs[0][1:]) == list(inputs[0]):
        return int(outputs[0][0])
    return 0


def user_lines(frames: Sequence[Mapping[str, Any]]) -> Iterator[Location]:
    """Those of these frames, innermost first, that belong neither to torch nor to Python itself."""
    for frame in frames:
        file = str(frame["filename"]).replace("\\", "/")
        if not _OF_LIBRARIES.search(file) and is_user_file(file):
            yield Location(relative_path(file), int(frame["line"]))


def world_size_of(dumps: Mapping[int, RankDump]) -> int:
    """The number of ranks of the job, as far as the dumps tell."""
    named = [rank for dump in dumps.values() for ranks in dump.groups.values() for rank in ranks]
    return max([max(dumps) + 1, *(rank + 1 for rank in named), *(dump.world_size for dump in dumps.values())])


def line_up(dumps: Mapping[int, RankDump]) -> Iterator[GroupLogs]:
    """The collectives of each process group, from the first that all of its ranks still have."""
    world_size = world_size_of(dumps)
    for name, members in _groups(dumps, world_size):
        here = {rank: dumps[rank] for rank in members if rank in dumps}
        own = {rank: dump.collectives(name) for rank, dump in here.items()}
        own = {rank: entries for rank, entries in own.items() if entries or not here[rank].wrapped}
        firsts = [(here[rank], entries[0].number) for rank, entries in own.items() if entries]
        starts = [at + (dump.wrapped and not dump.gloo) for dump, at in firsts if dump.wrapped or dump.active_only]
        start = max(starts, default=0)  # what has one number with lost ones, being coalesced, is left out
        for rank, entries in own.items():
            kept = [entry for entry in entries if entry.number >= start]
            own[rank] = [*_with_gaps(kept, start or 1)] if here[rank].gloo else kept
        _extend_by_gaps([*own.values()])
        as_member = functools.cache(functools.partial(replace, members=tuple(sorted(own))))
        logs = [[as_member(entry.call) for entry in own[rank]] if rank in own else () for rank in range(world_size)]
        waiting = frozenset(rank for rank, entries in own.items() if entries and not entries[-1].ended)
        yield GroupLogs(name, members, max(start - 1, 0), logs, waiting)


def _groups(dumps: Mapping[int, RankDump], world_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and ranks of each process group that has entries; two groups may have one name, if no rank is in both."""
    names = dict.fromkeys(entry.group for dump in dumps.values() for entry in dump.entries if not entry.between_two)
    for name in names:
        named = {dump.groups[name] for dump in dumps.values() if name in dump.groups}
        using = (rank for rank, dump in dumps.items() if any(entry.group == name for entry in dump.entries))
        for members in sorted(named) or [tuple(range(world_size) if name == DEFAULT_GROUP else sorted(using))]:
            yield name, members


def _with_gaps(entries: Sequence[RecordedCall], expected: int) -> Iterator[RecordedCall]:
    """The entries of a rank and group, with one for each number that gloo has given to what it does not record."""
    for entry in entries:
        for number in range(expected, min(entry.number, expected + _MOST_MISSING)):
            yield RecordedCall(entry.group, number, Call(_UNRECORDED, entry.group, ()), True)
        yield entry
        expected = entry.number + 1


def _extend_by_gaps(ranks: Sequence[list[RecordedCall]]) -> None:
    """If a log ends and all others have what is not recorded, it is not known that this rank has not called it."""
    lengths = [*map(len, ranks)]
    for place in range(min(lengths, default=0), max(lengths, default=0)):
        there = [entries[place] for entries in ranks if len(entries) > place]
        if all(entry.call.operation == _UNRECORDED for entry in there):
            for entries in ranks:
                entries += there[:1] if len(entries) == place else ()


_NAMED_FOR_A_RANK = re.compile(r"(\d+)(\.(json|pickle|pkl|bin|dump))?$")


def read_dumps(folder: Path) -> dict[int, RankDump]:
    """The dump of each rank in `folder`; of a rank that has left one with and one without stacks, that with stacks.

    Raises:
        UsageError: There is none, or a file that is named as a dump is not one.
    """
    try:
        files = sorted(path for path in folder.iterdir() if not path.is_dir() and not path.name.startswith("."))
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
        _check_rank(rank, str(path))
        dump = as_rank_dump(raw, str(path))
        names.setdefault(rank, []).append(path.name)
        if rank in dumps and dump.has_stacks == dumps[rank].has_stacks:
            raise UsageError(f"several dumps in {folder} are of rank {rank}: {join_names(names[rank], most=9)}")
        if rank not in dumps or dump.has_stacks:
            dumps[rank] = dump
    if not dumps:
        raise UsageError(
            f"no Flight Recorder dumps in {folder}: file names must end in the rank, such as nccl_trace_rank_0"
        )
    groups, size = {entry.group for dump in dumps.values() for entry in dump.entries}, world_size_of(dumps)
    if len(groups) * size > _MOST_LOGS:
        raise UsageError(
            f"the dumps in {folder} name {len(groups)} process groups of {size} ranks: too many to compare"
        )
    return dict(sorted(dumps.items()))


def _check_rank(rank: object, where: str) -> None:
    if not isinstance(rank, int) or not 0 <= rank < MOST_RANKS:
        wrong = f"its rank is {str(rank)[:40]!r}, and no number from 0 to {MOST_RANKS - 1}"
        raise UsageError(f"{where} is no Flight Recorder dump: {wrong}")


def read_dump(path: Path) -> dict[str, Any]:
    """The dump in a file: a dictionary with `entries`, which are dictionaries.

    Raises:
        UsageError: There is none.
    """
    try:
        data = read_file(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    try:
        with limited_memory():
            dump = json.loads(data) if data[:80].lstrip()[:1] == b"{" else _PlainData(io.BytesIO(data)).load()
        return plain_dump(dump)
    except _NotPlainError as error:
        why = str(error)
    except Exception:  # bytes at random make the reader fail in any way
        why = "is neither JSON nor a whole pickle"
    raise UsageError(f"{path} is no Flight Recorder dump: it {why}")


def plain_dump(dump: Any) -> dict[str, Any]:
    """A dump as it was read: a dictionary with `entries`, which are dictionaries.

    Raises:
        ValueError: It is something else, or holds what no recorder writes.
    """
    values, most = [dump], _MOST_VALUES
    while values:
        value, most = values.pop(), most - 1
        if isinstance(value, dict):
            values += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            values += value
        elif isinstance(value, int | float) and not abs(value) < 1 << 64:
            raise _NotPlainError("holds a number that is infinite, NaN, or of more than 64 bits")
        if len(values) > most or not isinstance(value, dict | list | tuple | int | float | str | bytes | None):
            raise _NotPlainError(f"holds more than {_MOST_VALUES:,} values, or one that is not plain data")
    if isinstance(dump, dict) and "pg_config" in dump:
        dump.setdefault("entries", [])  # JSON leaves out an empty list
    entries = dump.get("entries") if isinstance(dump, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise _NotPlainError("has no list of entries")
    return {str(key): value for key, value in dump.items()}


class _NotPlainError(ValueError):
    """A dump is not plain data, or has no entries: what is wrong, after "it"."""


class _PlainData(pickle.Unpickler):
    """Reads dictionaries, lists, tuples, strings, numbers and the like, which need no class to be looked up."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise _NotPlainError(f"holds {f'{module}.{name}'[:80]}, and not plain data alone; it was not loaded")

    def persistent_load(self, _identity: object, /) -> NoReturn:
        raise _NotPlainError("holds a reference to another file, not only plain data; it was not loaded")
