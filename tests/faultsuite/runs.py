"""Running the cases: under plain DDP, under other tools, and through ddpcheck, each in worlds of its own."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Literal, TypeVar

from ddpcheck.findings.errors import HangError, RankError
from ddpcheck.findings.report import Report
from ddpcheck.harness import World, start_world
from ddpcheck.report.checking.check import check
from tests.faultsuite.cases import Case, all_cases
from tests.faultsuite.recorded import evidence_text, record
from tests.reports import contradictions

T = TypeVar("T")
Ending = Literal["trains on", "raises", "hangs", "aborts", "exits"]
PRELOAD = {"mmengine": ("mmengine.model.utils",)}
HANG = 6.0  # seconds after which a plain run counts as one that hangs; a run takes a tenth of one


@dataclass(frozen=True)
class Heard:
    """The end of a plain run as a person sees it: `words` is the first error, and `text` all that was said."""

    ending: Ending
    ranks: tuple[int, ...] = ()
    words: str = ""
    text: str = field(default="", repr=False)
    seconds: float = 0.0

    def names(self, subjects: tuple[str, ...]) -> bool:
        """Whether one of the subjects was named."""
        named = (rf"(?:^|[^\w.]|\bmodule\.){re.escape(subject)}(?![\w.])" for subject in subjects)
        return any(re.search(pattern, self.text, re.MULTILINE) for pattern in named)


@dataclass(frozen=True)
class Row:
    """One case and all that was heard of it; `evidence` is what the ranks answered ddpcheck, as JSON."""

    case: Case
    tools: dict[str, Heard]
    twins: dict[str, Heard]
    report: Report
    twin: Report
    seconds: float
    evidence: str = field(repr=False)


def run_plain(case: Case, twin: str, tool: str) -> Heard:
    """Train on one of the two recipes of a case with a tool."""
    from tests.faultsuite.training import train  # imports torch, which nothing else here needs

    target, expected = f"{case.path}:{twin}", case.expected
    begun = time.perf_counter()
    with start_world(expected.world_size, timeout=HANG, hash_seeds=True, preload=PRELOAD.get(tool, ())) as world:
        try:
            world.run(train, target, expected.steps, tool)
        except RankError as error:
            return _heard(error, _output(world), time.perf_counter() - begun)
        return Heard("trains on", text=_output(world), seconds=time.perf_counter() - begun)


def _output(world: World) -> str:
    return "\n".join(world.output(rank) for rank in range(world.world_size))


def _heard(error: RankError, output: str, seconds: float) -> Heard:
    spoken = [one for one in error.failures if one.kind in ("raised", "exited", "died")]
    if not spoken:
        stuck = tuple(one.rank for one in error.failures if one.kind == "stuck")
        return Heard("hangs", stuck, text=output, seconds=seconds)
    first = error.first or spoken[0]
    ranks = tuple(one.rank for one in spoken if one.kind == first.kind)
    text = "\n".join([output, *(str(one.exception or one.message) + one.traceback for one in spoken)])
    ending: Ending = "aborts" if first.kind == "died" else "exits" if first.kind == "exited" else "raises"
    words = str(first.exception or first.message).strip().partition("\n")[0]
    if isinstance(error, HangError):
        ending = "hangs"
    return Heard(ending, ranks, words, text, seconds)


def run_case(case: Case, tools: tuple[str, ...] = ("plain", "debug", "mmengine")) -> Row:
    """All that is known about a case."""
    heard = {tool: run_plain(case, "broken", tool) for tool in tools}
    twins = {tool: run_plain(case, "fixed", tool) for tool in tools}
    begun = time.perf_counter()
    report, broken = record(case, "broken")
    seconds = time.perf_counter() - begun
    twin, fixed = record(case, "fixed")
    return Row(case, heard, twins, report, twin, seconds, evidence_text(case, {"broken": broken, "fixed": fixed}))


def chosen_cases(parser: argparse.ArgumentParser) -> tuple[list[Case], argparse.Namespace]:
    """The cases that the command line names, all of them without names, and its other options."""
    parser.add_argument("names", nargs="*", help="beginnings of names of cases")
    chosen = parser.parse_args()
    return [case for case in all_cases() if not chosen.names or str(case).startswith(tuple(chosen.names))], chosen


def for_each(cases: Sequence[Case], function: Callable[[Case], T]) -> Iterator[tuple[str, T]]:
    """Call a function for two cases at a time, each with two ranks, which wait for each other most of the time."""
    with ProcessPoolExecutor(min(2, len(cases)), mp_context=get_context("spawn")) as pool:
        for number, (case, value) in enumerate(zip(cases, pool.map(function, cases), strict=True), 1):
            yield f"[{number}/{len(cases)}] {case}", value


def report_on(case: Case, twin: str) -> Report:
    """What ddpcheck says of one of the two recipes of a case."""
    return check(case.target(twin), **case.options)


def faults_in(case: Case, report: Report) -> list[str]:
    """Return the differences between a report on a broken recipe and the expectation."""
    expected = case.expected
    if not report.findings:
        return ["nothing is found"]
    first, *rest = report.findings
    said = "\n".join([first.message, *first.evidence, str(first.location)])
    wanted: list[tuple[str, object, object]] = [
        ("code", first.code, expected.code),
        ("severity", first.severity.value, expected.severity),
        ("subjects", sorted(first.subjects), sorted(expected.subjects)),
        ("others of its severity", [f.code for f in rest if f.severity is first.severity], []),
        ("ranks", first.ranks, expected.ranks),
    ]
    faults = [f"{what}: {is_}, should be {should}" for what, is_, should in wanted if is_ != should]
    faults += contradictions(report)
    return faults + ([] if expected.cause in said else [f"the cause {expected.cause!r} is not told"])


def faults_in_twin(report: Report) -> list[str]:
    """Why a report on a fixed recipe is not clean."""
    faults = [f"{f.code} {f.severity.value} {f.subjects}: {f.message}" for f in report.findings]
    faults += [f"{c.name}: {c.status} {c.detail}" for c in report.checks if c.status != "passed"]
    return faults + ([report.error.message] if report.error else [])
