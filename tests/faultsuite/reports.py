"""Write the reports on all recorded faults, scripts and twins, to compare those before a change with those after it.

python -m tests.faultsuite.reports FOLDER
diff -r BEFORE AFTER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from ddpcheck.findings.report import Report
from ddpcheck.render import renderer_for
from tests.faultsuite.cases import all_cases
from tests.faultsuite.recorded import TWINS, read_evidence, replay
from tests.faultsuite.recorded_scripts import report_on, runs


def reports() -> Iterator[tuple[str, Report]]:
    """Each with its name."""
    for case in all_cases():
        for twin in TWINS:
            yield f"{str(case).replace('/', '-')}-{twin}", replay(case, twin, read_evidence(case))
    for run in runs():
        yield f"script-{run}", report_on(run)


def main() -> None:
    (given,) = sys.argv[1:]
    folder = Path(given)
    folder.mkdir(parents=True, exist_ok=True)
    for name, report in reports():
        data = json.loads(renderer_for("json").render(report))
        data = {key: value for key, value in data.items() if key not in ("timing", "environment", "tool")}
        for check in data["checks"]:
            del check["seconds"]
        (folder / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
