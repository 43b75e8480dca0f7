"""Writes the table of sharded faults into docs/comparison.md: `ddpcheck run` beside torch's `check_sharded_parity`.

    python -m tests.faultsuite.shards_page [NAME ...]

Each loop of tests/sharded_faults.py runs under both, or those that are named. Without names, those without their faults
run too, one after the other in one script.
torch needs expecttest for its part (`pip install expecttest`). What is not as expected is named on standard error.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.faultsuite.scripts_page import ROOT, TIMEOUT, run, said_by_torchrun
from tests.sharded_faults import FAULTS, Expected

SCRIPT = "tests/sharded_faults.py"
PAGE = ROOT / "docs" / "comparison.md"
BEGIN, END = "<!-- shards -->", "<!-- end -->"
_PATIENCE = 150  # seconds
_HEAD = ["| fault | result of `check_sharded_parity` | result of `ddpcheck run` |", "|---|---|---|"]


def found_by_ddpcheck(names: Sequence[str], ranks: int, *options: str) -> tuple[int | None, dict[str, object]]:
    """The exit code and the report of `ddpcheck run` on some loops."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.json")
        ours = (f"--check-timeout={TIMEOUT}", f"--check-output={file}")
        launch = ("--standalone", f"--nproc-per-node={ranks}")
        ran = run("ddpcheck", "run", *launch, *ours, SCRIPT, *names, *options, patience=_PATIENCE)
        return ran.code, json.loads(file.read_text())


def line_of(expected: Expected, report: dict[str, object]) -> tuple[str, int, str]:
    """The severity, the line and its text of the one finding, which is the expected one."""
    found = report["findings"]
    assert isinstance(found, list) and len(found) == 1, found
    (finding,) = found
    where = finding["location"]
    text = (ROOT / SCRIPT).read_text().splitlines()[where["line"] - 1].strip()
    told = (finding["code"], where, finding["message"])
    assert (finding["code"], where["path"]) == (expected.code, SCRIPT) and expected.line in text, told
    return finding["severity"], where["line"], text


def said_by_parity(name: str, expected: Expected) -> str:
    """What torch's comparison with a replica says of a loop, in a few words."""
    launch = ("--standalone", f"--nproc-per-node={expected.ranks}")
    ran = run("torch.distributed.run", *launch, SCRIPT, name, "--parity", patience=_PATIENCE)
    if ran.code is None:
        return "nothing: it waits"
    return "nothing: all steps are equal" if ran.code == 0 else re.sub(r"after \d+ s: ", "", said_by_torchrun(ran))


def row(name: str) -> str:
    """One row of the table."""
    expected = FAULTS[name]
    _, report = found_by_ddpcheck([name], expected.ranks)
    severity, line, text = line_of(expected, report)
    title = (expected.loop.__doc__ or "").strip().splitlines()[0]
    shown = text.replace("|", "\\|")
    parity = said_by_parity(name, expected).replace("|", "\\|")
    return f"| {title} | {parity} | **{expected.code}** {severity}, line {line}: `{shown}` |"


def main(names: Sequence[str]) -> None:
    wrong = []
    for ranks in (2, 4) if not names else ():
        theirs = [name for name, one in FAULTS.items() if one.ranks == ranks]
        launch = ("--standalone", f"--nproc-per-node={ranks}")
        code, report = found_by_ddpcheck(theirs, ranks, "--fixed")
        whole = [name for name in theirs if FAULTS[name].alike]
        alike = run("torch.distributed.run", *launch, SCRIPT, *whole, "--fixed", "--parity", patience=_PATIENCE)
        if code or report["findings"] or alike.code:
            wrong.append(f"without faults, {ranks} ranks: {report['findings']} {alike.stderr[-2000:]}")
    for name in names or FAULTS:
        try:
            made = row(name)
        except (AssertionError, OSError) as error:  # an OSError: there is no report
            wrong.append(f"{name}: {error}")
            continue
        print(made, flush=True)
        before, _, rest = PAGE.read_text().partition(f"{BEGIN}\n")
        table, _, after = rest.partition(END)
        titles = [(one.loop.__doc__ or "").strip().splitlines()[0] for one in FAULTS.values()]
        known = {line.split(" | ")[0].removeprefix("| "): line for line in [*table.splitlines()[2:], made]}
        rows = [known[title] for title in titles if title in known]
        PAGE.write_text("\n".join([f"{before}{BEGIN}", *_HEAD, *rows, f"{END}{after}"]))
    if wrong:
        sys.exit("\n".join(["not as expected:", *wrong]))


if __name__ == "__main__":
    main(sys.argv[1:])
