"""The last collectives of a script's ranks as dumps of Flight Recorder, which `torchfrtrace` and `ddpcheck hang` read.

gloo writes no dump by itself, and what it has in memory names neither the ranks of a group nor what has ended.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.report import Location
from ddpcheck.report.hang.flight_recorder import CALL_KEY, DEFAULT_GROUP, DTYPES
from ddpcheck.run.ending import Ending, still_in_a_call
from ddpcheck.stream.watched_rank import WatchedRank, comparable_logs

_VERSION = "2.10"  # of the recorder in torch 2.13
_OPERATIONS = (  # of the recorder, as the names of those of torch.distributed begin
    *("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast", "reduce", "gather", "scatter"),
    "barrier",
)
_PAYLOAD = re.compile(r"(\w+) of shape \(([\d, ]*)\)")
_RECORDED_DTYPES = {name: recorded for recorded, name in DTYPES.items()} | {"bfloat16": "BFloat16"}


def prepare(folder: Path) -> None:
    """Make the folder.

    Raises:
        UsageError: It cannot be made, or is not empty.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty; the dumps of the ranks need a folder of their own")
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}") from error


def write_flight_records(folder: Path, ranks: Sequence[WatchedRank], ending: Ending) -> None:
    """Write a dump for each rank, `rank_0` and so on, with what is known of all of them."""
    open_ones = still_in_a_call(ranks, ending)
    for rank, log in zip(ranks, comparable_logs(ranks), strict=True):
        number = rank.started.rank
        dump = _dump(log, rank.started.world_size, rank.started.backend, is_open=number in open_ones)
        (folder / f"rank_{number}").write_bytes(pickle.dumps(dump, protocol=2))


def _dump(log: Sequence[Call], world_size: int, backend: str, *, is_open: bool) -> dict[str, Any]:
    groups = {call.group or DEFAULT_GROUP: call.members or tuple(range(world_size)) for call in log}
    counts = dict.fromkeys(groups, 0)
    entries = []
    for record, call in enumerate(log):
        group = call.group or DEFAULT_GROUP
        counts[group] += 1
        ended = not is_open or record < len(log) - 1
        entries.append(
            {
                **_sizes(call, len(groups[group]), backend),
                **dict.fromkeys(("time_created_ns", "p2p_seq_id", "timeout_ms"), 0),
                **dict.fromkeys(("time_discovered_started_ns", "time_discovered_completed_ns")),
                "record_id": record,
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
    """Name, sizes and dtypes, such that the recorder's own analysis finds no fault in a call by itself."""
    operation = next((name for name in _OPERATIONS if call.operation.startswith(name)), "barrier")
    if call.operation.startswith("DistributedDataParallel."):
        operation = "all_reduce"
    found = _PAYLOAD.search(call.payload)
    shape = [int(size) for size in re.findall(r"\d+", found[2])] if found else [1]
    dtype = _RECORDED_DTYPES.get(found[1], found[1].capitalize()) if found else "Float"
    whole = [members, *shape]
    return {
        "profiling_name": f"{backend}:{operation}",
        "input_sizes": [whole if operation == "reduce_scatter" else shape],
        "output_sizes": [whole if operation == "all_gather" else shape],
        "input_dtypes": [dtype],
        "output_dtypes": [dtype],
    }


def _frames(call: Call) -> list[dict[str, Any]]:
    lines = map(Location.parse, call.callers or (call.location,))
    return [{"name": "<unknown>", "filename": one.path, "line": one.line} for one in lines if one is not None]
