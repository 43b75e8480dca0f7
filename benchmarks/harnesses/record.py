"""A run of the benchmark as data: what was measured, where and how, and as JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harnesses.figures import Cost, Measured, aims
from benchmarks.harnesses.sessions import Memory


@dataclass(frozen=True, slots=True)
class Record:
    """What a run has found.

    Attributes:
        surroundings: Versions and the number of cores.
        repetitions: How often each session was timed.
        measurements: By row and world size, in the order of the catalogue.
        complete: Whether it was not interrupted.
    """

    surroundings: Mapping[str, str]
    repetitions: int
    measurements: Mapping[tuple[str, int], Measured]
    complete: bool = True

    def save(self, path: Path) -> None:
        """Write JSON: all sessions, and what follows from them for other readers."""
        rows = []
        for each in self.measurements.values():
            cold, further = each.cold, each.further
            figures = {"cold": cold and asdict(cold), "further": further and asdict(further)}
            rows.append({**asdict(each), "figures": figures})
        content = {
            "schema_version": 1,
            "surroundings": dict(self.surroundings),
            "repetitions": self.repetitions,
            "complete": self.complete,
            "measurements": rows,
            "aims": [{**asdict(aim), "verdict": aim.verdict} for aim in aims(self.measurements)],
        }
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Record:
        """Read what `save` has written."""
        content = json.loads(path.read_text(encoding="utf-8"))
        found = [_measured(dict(row)) for row in content["measurements"]]
        by_key = {(each.row, each.world_size): each for each in found}
        return Record(content["surroundings"], content["repetitions"], by_key, content["complete"])


def surroundings() -> dict[str, str]:
    """Of this process, without a name of the machine."""
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "pytest": importlib.metadata.version("pytest"),
    }


def _measured(row: dict[str, Any]) -> Measured:
    del row["figures"]
    for name in ("first", "longer"):
        row[name] = [Cost(**each) for each in row[name]]
    row["memory"] = row["memory"] and Memory(**row["memory"])
    return Measured(**row)
