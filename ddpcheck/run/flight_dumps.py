"""Write a run's last collectives as Flight Recorder dumps for `torchfrtrace` and `ddpcheck hang`.

gloo writes no dump, and its in-memory entries have neither the ranks of a group nor the completion state.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.evidence.endings import DEFAULT_GROUP
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.report import Location
from ddpcheck.report.hang.flight_recorder import CALL_KEY, DTYPES
from ddpcheck.run.ending import Ending, still_in_a_call
from ddpcheck.stream.rank_log import RankTrace, comparable_logs

_VERSION = "2.10"  # version of Flight Recorder in torch 2.13
_OPERATIONS = (  # names in Flight Recorder, which are prefixes of names in torch.distributed
    *("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast", "reduce", "gather", "scatter"),
    "barrier",
)
_PAYLOAD = re.compile(r"(\w+) of shape \(([\d, ]*)\)")
_RECORDED_DTYPES = {name: recorded for recorded, name in DTYPES.items()} | {"bfloat16": "BFloat16"}


def create_dump_folder(folder: Path) -> None:
    """Create the folder for the Flight Recorder dumps.

    Raises:
        UsageError: The folder cannot be created, or is not empty.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty; the dumps of the ranks need an empty folder")
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}") from error


def write_flight_records(folder: Path, ranks: Sequence[RankTrace], ending: Ending) -> None:
    """Write each rank's last collectives as a Flight Recorder dump, into files `rank_N`."""
    open_ranks = still_in_a_call(ranks, ending)
    for rank, log in zip(ranks, comparable_logs(ranks), strict=True):
        number = rank.started.rank
        dump = _make_dump(log, rank.started.world_size, rank.started.backend, is_open=number in open_ranks)
        with (folder / f"rank_{number}").open("xb") as file:  # "x": do not follow a symlink planted there
            pickle.dump(dump, file, protocol=2)


def _make_dump(log: Sequence[Call], world_size: int, backend: str, *, is_open: bool) -> dict[str, Any]:
    groups = {call.group or DEFAULT_GROUP: call.members or tuple(range(world_size)) for call in log}
    counts = dict.fromkeys(groups, 0)
    entries = []
    for index, call in enumerate(log):
        group = call.group or DEFAULT_GROUP
        counts[group] += 1
        ended = not is_open or index < len(log) - 1
        entries.append(
            {
                **_sizes_and_dtypes(call, len(groups[group]), backend),
                **dict.fromkeys(("time_created_ns", "p2p_seq_id", "timeout_ms"), 0),
                **dict.fromkeys(("time_discovered_started_ns", "time_discovered_completed_ns")),
                "record_id": index,
                "pg_id": list(groups).index(group),
                "process_group": (group, _group_description(group)),
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
        name: {"name": name, "desc": _group_description(name), "ranks": str(list(members))}
        for name, members in groups.items()
    }
    return {"version": _VERSION, "pg_config": configured, "entries": entries}


def _group_description(group: str) -> str:
    return "default_pg" if group == DEFAULT_GROUP else "undefined"


def _sizes_and_dtypes(call: Call, members: int, backend: str) -> Mapping[str, Any]:
    """Return profiling name, sizes and dtypes of a call, as torch's dump analysis requires."""
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
