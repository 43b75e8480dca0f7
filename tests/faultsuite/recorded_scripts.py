"""What ranks of scripts have left under `ddpcheck run`: kept as JSON, and reported on again without ranks and torch."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Report
from ddpcheck.render import renderer_for
from ddpcheck.run.ending import Ending
from ddpcheck.run.parity_run import SingleRun
from ddpcheck.run.script_report import report_on_script
from ddpcheck.stream.rank_log import RankTrace
from tests.faultsuite.cases import ROOT
from tests.faultsuite.evidence import SHARED, Encoder, EvidenceError, decode, here
from tests.faultsuite.scripts_page import assert_expected, options_of

FOLDER = ROOT / "tests" / "streams"
COMMAND = "python -m tests.faultsuite.record_scripts"
_SHARED = 160  # characters
_DIGITS = 8  # of a number: what is compared as a number is rounded more than that


@dataclass(frozen=True, slots=True)
class Run:
    """A script, by its path from the root of the project, with its arguments."""

    script: str
    arguments: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        return Path(self.script).stem

    @property
    def options(self) -> list[str]:
        """Those of `ddpcheck run` that it needs."""
        return options_of(ROOT / self.script)

    @property
    def has_fault(self) -> bool:
        """Whether it is one of examples/scripts, and not its twin."""
        return self.script.startswith("examples/") and not self.arguments

    @property
    def path(self) -> Path:
        return FOLDER / f"{'-'.join((self.stem, *(one.lstrip('-') for one in self.arguments)))}.json"

    def __str__(self) -> str:
        return self.path.stem


def runs() -> list[Run]:
    """Each script of examples/scripts and its twin, and loops that are healthy."""
    scripts = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "examples" / "scripts").glob("*.py"))]
    faults = [Run(script, arguments) for script in scripts for arguments in ((), ("--fixed",))]
    return [*faults, *(Run(f"tests/healthy_{name}.py") for name in ("loops", "evaluations", "shards"))]


def written(run: Run, ending: Ending, ranks: Sequence[RankTrace], singles: Sequence[SingleRun] = ()) -> str:
    """What is kept of a run, and of those in a single process, as JSON."""
    kept: dict[str, Any] = {"ending": ending, "ranks": [_rounded(rank) for rank in ranks]}
    if singles:
        kept["singles"] = [[_rounded(rank) for rank in single.ranks] for single in singles]
    left = Encoder(with_folders=True).encode(kept)
    data = _shared(left)
    first = f'{{"source": "{_digest(run)}", "left": {_line(data["left"])}, "shared": ['
    return "\n".join((first, ",\n".join(map(_line, data["shared"])), "]}", ""))


def _line(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def _shared(data: Any) -> dict[str, Any]:
    """`data` with what is long and in it several times written once: a number stands where it was."""
    times: Counter[str] = Counter()
    numbers: dict[str, int] = {}
    shared: list[Any] = []

    def count(value: Any) -> None:
        if isinstance(value, dict | list) and len(text := json.dumps(value)) >= _SHARED:
            times[text] += 1
            if times[text] == 1:
                for item in value.values() if isinstance(value, dict) else value:
                    count(item)

    def short(value: Any) -> Any:
        if not isinstance(value, dict | list) or len(text := json.dumps(value)) < _SHARED:
            return value
        if text in numbers:
            return {SHARED: numbers[text]}
        made = {k: short(v) for k, v in value.items()} if isinstance(value, dict) else [short(item) for item in value]
        if times[text] == 1:
            return made
        numbers[text] = len(shared)
        shared.append(made)
        return {SHARED: numbers[text]}

    count(data)
    return {"left": short(data), "shared": shared}


def _rounded(value: Any) -> Any:
    """The same with numbers rounded, and arrays as tuples."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else value
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, array):
        return tuple(map(_rounded, value))
    if isinstance(value, list | tuple):
        return type(value)(map(_rounded, value))
    if isinstance(value, Struct):
        return replace(value, **{name: _rounded(item) for name, item in structs.asdict(value).items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _rounded(getattr(value, f.name)) for f in dataclasses.fields(value)})
    return value


def _digest(run: Run) -> str:
    return hashlib.blake2b((ROOT / run.script).read_bytes(), digest_size=8).hexdigest()


def left_by(run: Run) -> tuple[Ending, list[RankTrace]]:
    """How a run has ended, and what its ranks have left."""
    left = read(run)
    return left["ending"], left["ranks"]


@functools.lru_cache(maxsize=4)
def read(run: Run) -> dict[str, Any]:
    """Return what `record_scripts` has kept of a run."""
    try:
        data = json.loads(here(run.path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise EvidenceError(f"nothing is recorded of {run}; run {COMMAND} {run}") from None
    if data["source"] != _digest(run):
        raise EvidenceError(f"{run.script} has changed since {run} was recorded; run {COMMAND} {run}")
    shared: list[Any] = []
    for value in data["shared"]:  # a value holds only earlier ones
        shared.append(decode(value, shared))
    return dict(decode(data["left"], shared))


def report_on(run: Run) -> Report:
    """The report on a run, from what was recorded of it."""
    left = read(run)
    singles = [SingleRun(ranks) for ranks in left.get("singles", ())]
    return report_on_script(run.script, left["ending"], left["ranks"], singles=singles)


NOT_COMPARED = {
    "tests/healthy_loops.py": {"replicas", "reducer", "optimizers"},
    "tests/healthy_evaluations.py": {"evaluation"},
    "examples/scripts/gathered_by_rank.py": {"evaluation"},
    "examples/scripts/prototypes_of_rank_0.py": {"evaluation"},
}
"""Check lines that are not of all steps, under Join, post-local SGD and PowerSGD, or of gradients that differ by right;
or not of all numbers shown.
"""


def assert_as_expected(run: Run, report: Report) -> None:
    """Assert that the fault of a script is the one finding of its report, and that another is clean."""
    if not run.has_fault:
        assert not report.findings, [(one.code, one.message) for one in report.findings]
        lacking = {check.name for check in report.checks if check.status != "passed"}
        assert lacking == NOT_COMPARED.get(run.script, set()) and report.error is None, report.checks
        return
    ending, _ = left_by(run)
    exit_code = ending.exit_code or report.exit_code()
    assert_expected(ROOT / run.script, exit_code, json.loads(renderer_for("json").render(report)))
