"""Flight Recorder dumps as collective logs, aligned by rank and process group.

The recorder keeps the last entries of a rank (2,000 by default, see TORCH_FR_BUFFER_SIZE), so ranks are aligned by the
sequence numbers of their process groups. torchcomms has its own recorder with the same fields, whose numbers count all
calls of a rank. No code in a dump file is run: a pickle that needs a class or a function is refused.
"""

from __future__ import annotations

import functools
import io
import json
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
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
from ddpcheck.trace.wait_graph import GroupLogs

_UNRECORDED = "unrecorded"  # gloo's monitored_barrier takes numbers without a dump entry
_MOST_MISSING = 1000  # consecutive calls absent from a dump
_MOST_LOGS = 1 << 23  # one per rank and process group
_MOST_VALUES = 1 << 23  # in a dump; a shared value counts each time
_OPERATIONS = {  # recorder's name -> name in torch.distributed
    "all_reduce_barrier": "barrier",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
}
_MATCHED_BY_PAYLOAD = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "allreduce_coalesced")
DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "Char": "int8", "Byte": "uint8"}
DTYPES |= {"Short": "int16", "Int": "int32", "Long": "int64"}
"""torch's dtype name by name in the flight recorder."""

_OF_LIBRARIES = re.compile(  # standard library and torch, on the job's machine
    r"^<|/lib(64)?/python[\d.]+/(?!(site|dist)-packages/)|/torch/(_\w+|distributed|nn|autograd|optim|utils)[/.]"
)
CALL_KEY = "ddpcheck"
"""Key, in entries written by ddpcheck, of operation and payload without loss."""


def as_rank_dump(dump: Mapping[str, Any], where: str) -> RankDump:
    """Convert a raw dump to a `RankDump`; `where` names the dump in errors.

    Raises:
        UsageError: An entry lacks or garbles a field that alignment needs.
    """
    raw: Sequence[Mapping[str, Any]] = dump["entries"]
    configured = dump.get("pg_config")
    try:
        if raw and all(map(_is_from_torchcomms, raw)):
            raw, configured = _in_torch_format(raw, configured if isinstance(configured, dict) else {}, where)
        items = configured.items() if isinstance(configured, dict) else ()
        ranks_of = {str(name): str(group.get("ranks")) for name, group in items if isinstance(group, dict)}
        parsed = {name: tuple(map(int, re.findall(r"\d+", text))) for name, text in ranks_of.items()}
        groups = {name: ranks for name, ranks in parsed.items() if ranks}
        entries = [_recorded_call(entry, groups) for entry in raw]
        descriptions = {str(entry["process_group"][0]): str(entry["process_group"][1]) for entry in raw}
        enqueued = _last_enqueued(dump.get("pg_status"), list(groups), raw)
        gloo = all(str(entry["profiling_name"]).startswith("gloo:") for entry in raw)
        world_size = max((_num_gathered_ranks(entry) for entry in raw), default=0)
        has_overflowed = bool(raw) and int(raw[0].get("record_id", 0)) > 0
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        detail = f"{type(error).__name__}: {error}"[:80]
        raise UsageError(f"{where} is no Flight Recorder dump that ddpcheck can read ({detail})") from error
    _check_rank(max([world_size - 1, 0, *(rank for ranks in groups.values() for rank in ranks)]), where)
    active_only = has_overflowed and not gloo and not any(entry.ended for entry in entries)
    has_overflowed, gloo = has_overflowed and not active_only, gloo and bool(raw)
    descriptions = {name: text for name, text in descriptions.items() if text not in ("", "undefined", "default_pg")}
    return RankDump(entries, groups, has_overflowed, world_size, gloo, active_only, descriptions, enqueued)


def _last_enqueued(statuses: object, names: Sequence[str], raw: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of the last enqueued NCCL call by group, {} if unknown."""
    if not isinstance(statuses, dict) or len(statuses) != len(names) or not all(map(str.isdigit, names)):
        return {}
    by_id = dict(zip(sorted(map(int, statuses)), sorted(names, key=int), strict=True))  # ids and names: same order
    if any(by_id.get(int(entry.get("pg_id", -1))) != str(entry["process_group"][0]) for entry in raw):
        return {}
    return {by_id[int(key)]: int(status["last_enqueued_collective"]) for key, status in statuses.items()}


def _is_from_torchcomms(raw: Mapping[str, Any]) -> bool:
    return [str(raw["profiling_name"]).partition(":")[0]] == list(raw["process_group"])[1:]


def _in_torch_format(
    raw: Sequence[Mapping[str, Any]], configured: Mapping[str, Any], where: str
) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
    """Convert torchcomms entries and groups to torch's format, numbered per group from 1.

    The numbers of torchcomms (`comms/torchcomms/hooks/fr/FlightRecorder.cpp`, version 2.10) count the calls of all
    groups, sends and receives included, from 0; `is_p2p` is never true. A group has one communicator for each backend.

    Raises:
        UsageError: Entries are missing, and the number of missing entries per group is unknown.
    """
    is_whole = [int(entry["record_id"]) for entry in raw] == list(range(len(raw)))
    counts: dict[tuple[str, bool], int] = {}
    entries: list[Mapping[str, Any]] = []
    groups = {}
    for entry in raw:
        name, backend = map(str, entry["process_group"])
        group = f"{name} ({backend})"
        is_p2p = str(entry["profiling_name"]).partition(":")[2] in _P2P_OPERATIONS
        counts[group, is_p2p] = counts.get((group, is_p2p), 0) + 1
        number = counts[group, is_p2p] if is_whole else int(entry["collective_seq_id"]) + 1
        key = "p2p_seq_id" if is_p2p else "collective_seq_id"
        entries.append({**entry, "process_group": (group, ""), "is_p2p": is_p2p, key: number})
        if name in configured:
            groups[group] = configured[name]
    if not is_whole and (len(counts) > 1 or len(configured) > 1 or any(is_p2p for _, is_p2p in counts)):
        raise UsageError(
            f"{where} lacks earlier calls, and torchcomms numbers the calls of all process groups together: the rest "
            "cannot be aligned; TORCHCOMM_FR_BUFFER_SIZE sets how many calls are kept"
        )
    return entries, groups


_P2P_OPERATIONS = ("send", "recv", "batch_op_issue")


def _recorded_call(raw: Mapping[str, Any], groups: Mapping[str, tuple[int, ...]]) -> RecordedCall:
    name = str(raw["profiling_name"]).partition(":")[2] or str(raw["profiling_name"])
    group = str(raw["process_group"][0])
    between_two = bool(raw.get("is_p2p", name.startswith(("send", "recv"))))
    number = int(raw["p2p_seq_id" if between_two else "collective_seq_id"])
    between_two |= name == "coalesced"  # end of several calls with an entry each
    operation = _OPERATIONS.get(name, name)
    payload = _payload(operation, raw)
    recorded = raw.get(CALL_KEY)
    if isinstance(recorded, dict):
        operation, payload = str(recorded.get("operation", operation)), str(recorded.get("payload", payload))
    call = _shared_call(operation, group, payload, tuple(map(str, user_lines(raw.get("frames") or ()))))
    peer = int(match[1]) if between_two and (match := re.search(r"(?:->|<-)(\d+)$", name)) else -1
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
def _shared_call(operation: str, group: str, payload: str, lines: tuple[str, ...]) -> Call:
    """Return one object for all equal calls; a dump has thousands of equal calls."""
    return Call(operation, group, (), payload, location=next(iter(lines), ""), callers=lines)


def _payload(operation: str, raw: Mapping[str, Any]) -> str:
    """Return the inputs' dtype and shape if these must match across ranks, else ''."""
    sizes = raw.get("input_sizes") or ()
    if not operation.startswith(_MATCHED_BY_PAYLOAD) or operation.endswith("_v"):
        return ""
    dtypes = [DTYPES.get(str(dtype), str(dtype).lower()) for dtype in raw.get("input_dtypes") or [""] * len(sizes)]
    pairs = zip(dtypes, sizes, strict=False)
    return "; ".join(f"{dtype} of shape {tuple(map(int, shape))}".lstrip() for dtype, shape in pairs)


def _num_gathered_ranks(raw: Mapping[str, Any]) -> int:
    """Return the world size shown by an all_gather of the default group, else 0."""
    inputs: Sequence[Any] = raw.get("input_sizes") or ()
    outputs: Sequence[Any] = raw.get("output_sizes") or ()
    gathers = str(raw["profiling_name"]) == "gloo:all_gather" and str(raw["process_group"][0]) == DEFAULT_GROUP
    if gathers and len(inputs) == len(outputs) == 1 and list(outputs[0][1:]) == list(inputs[0]):
        return int(outputs[0][0])
    return 0


def user_lines(frames: Sequence[Mapping[str, Any]]) -> Iterator[Location]:
    """Yield lines of frames outside of torch and the standard library, innermost first."""
    for frame in frames:
        file = str(frame["filename"]).replace("\\", "/")
        if not _OF_LIBRARIES.search(file) and is_user_file(file):
            yield Location(relative_path(file), int(frame["line"]))


def world_size_of(dumps: Mapping[int, RankDump]) -> int:
    """Return the smallest world size that agrees with all dumps."""
    members = [rank for dump in dumps.values() for ranks in dump.groups.values() for rank in ranks]
    return max([max(dumps) + 1, *(rank + 1 for rank in members), *(dump.world_size for dump in dumps.values())])


def aligned_groups(dumps: Mapping[int, RankDump]) -> Iterator[GroupLogs]:
    """Align each process group's collectives, beginning with the first call in all dumps."""
    world_size = world_size_of(dumps)
    for name, members in _process_groups(dumps, world_size):
        group_dumps = {rank: dumps[rank] for rank in members if rank in dumps}
        ops = {rank: dump.collectives(name) for rank, dump in group_dumps.items()}
        ops = {rank: entries for rank, entries in ops.items() if entries or not group_dumps[rank].wrapped}
        firsts = [(group_dumps[rank], entries[0].number) for rank, entries in ops.items() if entries]
        starts = [seq + (dump.wrapped and not dump.gloo) for dump, seq in firsts if dump.wrapped or dump.active_only]
        start = max(starts, default=0)  # drops coalesced calls that share a number with lost calls
        for rank, entries in ops.items():
            kept = [entry for entry in entries if entry.number >= start]
            ops[rank] = [*_fill_gaps(kept, start or 1)] if group_dumps[rank].gloo else kept
        _append_gaps([*ops.values()])
        as_member = functools.cache(functools.partial(replace, members=tuple(sorted(ops))))
        logs = [[as_member(entry.call) for entry in ops[rank]] if rank in ops else () for rank in range(world_size)]
        waiting = frozenset(rank for rank, entries in ops.items() if entries and not entries[-1].ended)
        yield GroupLogs(name, members, max(start - 1, 0), logs, waiting)


def _process_groups(dumps: Mapping[int, RankDump], world_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and ranks of each process group; disjoint groups may share a name."""
    names = dict.fromkeys(entry.group for dump in dumps.values() for entry in dump.entries if not entry.between_two)
    for name in names:
        groups = {dump.groups[name] for dump in dumps.values() if name in dump.groups}
        using = (rank for rank, dump in dumps.items() if any(entry.group == name for entry in dump.entries))
        for members in sorted(groups) or [tuple(range(world_size) if name == DEFAULT_GROUP else sorted(using))]:
            yield name, members


def _fill_gaps(entries: Sequence[RecordedCall], expected: int) -> Iterator[RecordedCall]:
    """Yield entries, with a placeholder for each call that gloo did not record."""
    for entry in entries:
        for number in range(expected, min(entry.number, expected + _MOST_MISSING)):
            yield RecordedCall(entry.group, number, Call(_UNRECORDED, entry.group, ()), True)
        yield entry
        expected = entry.number + 1


def _append_gaps(ranks: Sequence[list[RecordedCall]]) -> None:
    """Append placeholders to shorter logs where longer logs have only placeholders for unrecorded calls."""
    lengths = [*map(len, ranks)]
    for index in range(min(lengths, default=0), max(lengths, default=0)):
        present = [entries[index] for entries in ranks if len(entries) > index]
        if all(entry.call.operation == _UNRECORDED for entry in present):
            for entries in ranks:
                entries += present[:1] if len(entries) == index else ()


_NAMED_FOR_A_RANK = re.compile(r"(\d+)(\.(json|pickle|pkl|bin|dump))?$")


def read_dumps(folder: Path) -> dict[int, RankDump]:
    """Read one dump per rank in `folder`; a dump with stacks is preferred.

    Raises:
        UsageError: There are no dumps, a file named as a dump is invalid, or a rank has several equally good dumps.
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
    candidates: dict[int, list[tuple[str, RankDump]]] = {}  # by rank, with the file name
    for path in files:
        if (match := _NAMED_FOR_A_RANK.search(path.name)) is None:
            continue
        raw = read_dump(path)
        rank = raw.get("rank", int(match[1]))
        _check_rank(rank, str(path))
        candidates.setdefault(rank, []).append((path.name, as_rank_dump(raw, str(path))))
    dumps: dict[int, RankDump] = {}
    for rank, named in sorted(candidates.items()):
        preferred = [item for item in named if item[1].has_stacks] or named
        if len(preferred) > 1:
            raise UsageError(f"several dumps in {folder} are of rank {rank}: {join_names([*dict(named)], most=9)}")
        dumps[rank] = preferred[0][1]
    if not dumps:
        raise UsageError(
            f"no Flight Recorder dumps in {folder}: file names must end in the rank, such as nccl_trace_rank_0"
        )
    groups, size = {entry.group for dump in dumps.values() for entry in dump.entries}, world_size_of(dumps)
    if len(groups) * size > _MOST_LOGS:
        raise UsageError(
            f"the dumps in {folder} name {len(groups)} process groups of {size} ranks: too many to compare"
        )
    return dumps


def _check_rank(rank: object, where: str) -> None:
    if not isinstance(rank, int) or not 0 <= rank < MOST_RANKS:
        message = f"its rank is {str(rank)[:40]!r}, and no number from 0 to {MOST_RANKS - 1}"
        raise UsageError(f"{where} is no Flight Recorder dump: {message}")


def read_dump(path: Path) -> dict[str, Any]:
    """Read a dump file: a dictionary with `entries`, a list of dictionaries.

    Raises:
        UsageError: The file cannot be read, or is not a dump.
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
        reason = str(error)
    except Exception:  # random bytes can raise any exception
        reason = "is neither JSON nor a whole pickle"
    raise UsageError(f"{path} is no Flight Recorder dump: it {reason}")


def plain_dump(dump: Any) -> dict[str, Any]:
    """Validate a dump: a dictionary of plain data with `entries`, a list of dictionaries.

    Raises:
        ValueError: The dump has another structure, or values that no recorder writes.
    """
    values, limit = [dump], _MOST_VALUES
    while values:
        value, limit = values.pop(), limit - 1
        if isinstance(value, dict):
            values += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            values += value
        elif isinstance(value, int | float) and not abs(value) < 1 << 64:
            raise _NotPlainError("holds a number that is infinite, NaN, or of more than 64 bits")
        if len(values) > limit or not isinstance(value, dict | list | tuple | int | float | str | bytes | None):
            raise _NotPlainError(f"holds more than {_MOST_VALUES:,} values, or one that is not plain data")
    if isinstance(dump, dict) and "pg_config" in dump:
        dump.setdefault("entries", [])  # JSON leaves out an empty list
    entries = dump.get("entries") if isinstance(dump, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise _NotPlainError("has no list of entries")
    return {str(key): value for key, value in dump.items()}


class _NotPlainError(ValueError):
    """Error for a dump with invalid data; the message is a predicate without subject."""


class _PlainData(pickle.Unpickler):
    """Unpickler of dictionaries, lists, tuples, strings and numbers, without class lookup."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise _NotPlainError(f"holds {f'{module}.{name}'[:80]}, and not plain data alone; it was not loaded")

    def persistent_load(self, _identity: object, /) -> NoReturn:
        raise _NotPlainError("holds a reference to another file, not only plain data; it was not loaded")
