"""The lines of a report are true: no tick over a comparison that was not made, did not hold or is ignored."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.findings.evidence.gradients import Difference, ShardAnalysis
from ddpcheck.findings.report import CheckResult, Finding, ParityEntry, Report
from ddpcheck.findings.wording import make_finding
from ddpcheck.recipe.recipe import Recipe
from ddpcheck.report.checking.check import check
from ddpcheck.report.checking.check_report import HEADINGS, Tally, is_asked, report_of
from ddpcheck.report.checking.check_state import CheckOptions, CheckState
from ddpcheck.report.checking.judging import judge
from ddpcheck.rules.verdict import FindingAndCause, Verdict, status_of
from tests.reports import contradictions, shown
from tests.tiers import first_of_each, share

numpy = pytest.importorskip("numpy")


def the_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Two(nn.Module):
    """Two layers, of which the second takes part as `use` says: always, never, times zero, or not in step 1."""

    def __init__(self, use: str = "always") -> None:
        super().__init__()
        self.a, self.b, self.use, self.calls = nn.Linear(8, 4), nn.Linear(8, 4), use, 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        if self.use == "never" or (self.use == "late" and self.calls == 2):
            return self.a(x)
        return self.a(x) + (0.0 if self.use == "zero" else 1.0) * self.b(x)


class Noisy(nn.Module):
    def __init__(self, generator: Any, draw: Callable[[Any, int], Any]) -> None:
        super().__init__()
        self.layer, self.generator, self.draw = nn.Linear(8, 4), generator, draw

    def forward(self, x: Any) -> Any:
        return self.layer(x * torch.as_tensor(self.draw(self.generator, len(x)), dtype=x.dtype)[:, None])


class Small(nn.Module):
    """A model that takes half of the batch at most, or the whole of it in its first step only."""

    def __init__(self, whole_batches: int = 0) -> None:
        super().__init__()
        self.layer, self.left = nn.Linear(8, 4), whole_batches

    def forward(self, x: Any) -> Any:
        if len(x) > 4:
            self.left -= 1
            if self.left < 0:
                raise MemoryError("the batch does not fit")
        return self.layer(x)


class Choosy(nn.Module):
    """Every rank uses the expert of its own number, and all of them the first."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))

    def forward(self, x: Any) -> Any:
        rows = [self.experts[int(i >= 4) if not dist.is_initialized() else the_rank()](row) for i, row in enumerate(x)]
        return torch.stack(rows)


def mean(model: Any, x: Any) -> Any:
    return model(x).square().mean()


def seeded_by_rank() -> Any:
    torch.manual_seed(the_rank())
    return nn.Linear(8, 4)


class Case(NamedTuple):
    """Expected summary, check lines as "check status: words", options of the check, and recipe."""

    summary: str
    lines: tuple[str, ...]
    asked: dict[str, Any]
    recipe: dict[str, Any]


def case(summary: str, *lines: str, asked: dict[str, Any] | None = None, **recipe: Any) -> Case:
    return Case(summary, lines, asked or {}, recipe)


def by_torch(generator: Any, n: int) -> Any:
    return torch.rand(n, generator=generator)


ONE_RANK = "passed: one rank, so that nothing can differ"
NO_PARITY = "no findings, but 1 of 6 checks was not made: parity"
EQUAL = "6 gradients in 3 steps equal"
PARITY, REDUCER = f"parity passed: {EQUAL}", f"reducer passed: {EQUAL}"
NOT_RUN = "reducer skipped: not run from step 0 on: the finding on parameters"

CASES = {
    "one rank": case(
        "clean",
        "model passed: built on one rank",
        *(f"consistency {ONE_RANK}", f"wrapping {ONE_RANK}", "reducer passed: equal those without the wrapper"),
        asked={"world_size": 1},
    ),
    "all gradients zero": case(
        "1 finding",
        "reducer skipped: every gradient was zero",
        "parity failed: DDP307",
        loss=lambda model, x: 0.0 * model(x).sum(),
    ),
    "some gradients zero": case(
        *("1 finding", "parameters warned: DDP107", f"{PARITY} those of", "reducer passed: 6 more"),
        model=lambda: Two("zero"),
    ),
    "a generator of torch in the module": case("clean", PARITY, model=lambda: Noisy(torch.Generator(), by_torch)),
    "a generator of numpy in the module": case(
        *(NO_PARITY, "parity skipped: numpy, and no two runs can share", REDUCER),
        model=lambda: Noisy(numpy.random.default_rng(0), lambda generator, n: generator.random(n)),
    ),
    "numbers that nothing can bring back": case(
        "1 finding, but 2 of 6 checks were not made: reducer, parity",
        *("reducer skipped: DDP308", "parity skipped: DDP308"),
        loss=lambda model, x: mean(model, x * torch.tensor(list(os.urandom(len(x))), dtype=x.dtype)[:, None]),
    ),
    "coupled": case(
        "1 finding",
        "wrapping passed: the same on every rank",
        "reducer warned: DDP215, which comes with DDP304; 18 gradients in 3 steps equal",
        "parity warned: DDP304: 9 of 18 gradients in 3 steps differ",
        model=lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)),
    ),
    "unused, ignored": case(
        "no findings, but 1 of 6 checks was not made: reducer; 1 finding ignored (DDP101)",
        *("parameters ignored: ignored: DDP101", NOT_RUN),
        asked={"ignore": ["unused-parameter"]},
        model=lambda: Two("never"),
    ),
    "unused, gradients selected": case(
        *("no findings, but 1 of 3 checks was not made: reducer; 1 finding ignored (DDP101)", NOT_RUN),
        asked={"select": ["DDP3"]},
        model=lambda: Two("never"),
    ),
    "experts that not every rank uses": case(
        "clean",
        "parameters passed: 0 of 4 parameters contributed to the loss in each of 3 steps on every rank; find_unused",
        model=Choosy,
        ddp_kwargs={"find_unused_parameters": True},
    ),
    "unused in a step": case(
        *("1 finding", "parameters failed: DDP105", "reducer skipped: 4 gradients in step 0 equal"),
        model=lambda: Two("late"),
    ),
    "no single process": case(
        NO_PARITY, "parity skipped: the single process raised MemoryError", model=lambda: Small(0)
    ),
    "no single process in later steps": case(NO_PARITY, "parity skipped: gradients in step", model=lambda: Small(1)),
    "values that differ": case(
        "1 finding",
        *("consistency passed: are the same on every rank", "wrapping failed: DDP208"),
        *("reducer failed: DDP306, which comes with DDP208", "parity skipped: the ranks' parameters differ"),
        model=seeded_by_rank,
        wrap=lambda module, device: nn.parallel.DistributedDataParallel(module, init_sync=False),
    ),
    "shapes that differ, ignored": case(
        "no findings, but 4 of 6 checks were not made: wrapping, parameters, reducer, parity; 1 finding ignored "
        "(DDP203)",
        *("consistency ignored: ignored: DDP203", "wrapping skipped: DDP203: DDP would stop"),
        asked={"ignore": ["DDP2"]},
        model=lambda: nn.Linear(8, 4 + the_rank()),
    ),
}


# `make test` has a third of the first ones with each line in each state.
QUICK = first_of_each(CASES, lambda name: [line.partition(":")[0] for line in CASES[name].lines])


@pytest.mark.parametrize("name", share(CASES, QUICK[::3]))
def test_every_line_says_what_was_compared_and_held(name: str) -> None:
    case = CASES[name]
    recipe = {"model": lambda: nn.Linear(8, 4), "batch": lambda _: torch.randn(8, 8), "loss": mean, **case.recipe}
    report = check(Recipe(**recipe), timeout=60, **case.asked)
    assert contradictions(report) == [] and report.summary == case.summary, shown(report)
    by_name = {line.name: line for line in report.checks}
    for line in case.lines:
        status, _, words = line.partition(": ")
        check_name, status = status.split()
        assert by_name[check_name].status == status, shown(report)
        assert words in by_name[check_name].detail, shown(report)


# Hand-made evidence

DIFFERS = Verdict(matching="2 gradients equal", differing="1 of 3 gradients differs")


def line(comparison: Verdict, *told: FindingAndCause, kept: tuple[Finding, ...] = ()) -> tuple[str, str]:
    return status_of(comparison, told, kept)


def test_a_difference_that_no_finding_tells_is_no_tick() -> None:
    assert line(DIFFERS) == ("failed", "1 of 3 gradients differs, cause unknown")
    assert line(Verdict(matching="2 gradients equal")) == ("passed", "2 gradients equal")

    note = make_finding("DDP109", (), "Needless.")
    assert line(Verdict(matching="all is well"), (note, note), kept=(note,)) == ("passed", "all is well; DDP109")
    cause, unequal = make_finding("DDP515", (), "Changed."), make_finding("DDP305", (), "Unequal.")
    assert line(DIFFERS, (unequal, cause), kept=(cause,)) == (
        "failed",
        "DDP305, which comes with DDP515: 1 of 3 gradients differs",
    )
    assert line(DIFFERS, (unequal, cause))[0] == "ignored"


def test_what_is_lost_in_rounding_or_zero_does_not_count_as_equal() -> None:
    entry = ParityEntry(0, "a", "local", 0.1, 0.6, absolute_error=0.1, reference_norm=1.0)
    assert Tally.count([entry]).why_inconclusive().startswith("rounding may be as large")
    zero = ParityEntry(0, "b", "local", 0.0, 1e-6)
    assert Tally.count([zero]).why_inconclusive().startswith("every gradient was zero")
    held = ParityEntry(0, "c", "local", 1e-7, 1e-6, absolute_error=1e-7, reference_norm=1.0)
    assert Tally.count([entry, zero, held]).equal("them", 1) == (
        "1 gradient in 1 step equals them (1 more is zero, 1 more cannot be told from rounding)"
    )
    assert Tally.count([held, zero]).why_inconclusive() == "" and Tally.count([]).why_inconclusive() == ""


def test_a_check_is_asked_for_where_one_of_its_rules_is() -> None:
    assert {name for name in HEADINGS if is_asked(name, ["DDP101"], [])} == {"model", "parameters"}
    parity = ["DDP303", "DDP304", "DDP305", "DDP307", "DDP308", "DDP309", "DDP31", "DDP5", "DDP216"]
    assert not is_asked("parity", [], parity)


def judged(error: float, tolerance: float, **single: Any) -> tuple[Report, CheckResult, list[str]]:
    """The report on a gradient that differs from that of the single process, its line of that, and the notes."""
    state = CheckState(CheckOptions("t", 2, "gloo", "cpu", 1, 0, 30.0))
    with state.log.time_part("parity"):
        state.single.differences[0] = (Difference("a", error, tolerance, absolute_error=error, reference_norm=1.0),)
        for name, value in single.items():
            setattr(state.single, name, value)
    judge(state, {})
    report = report_of(state)
    return report, next(check for check in report.checks if check.name == "parity"), state.log.notes


@pytest.mark.parametrize(
    ("error", "why", "status"),
    [(2.4e-6, "that failed", "skipped"), (2.4e-6, "", "failed"), (1e-4, "that failed", "failed")],
)
def test_a_difference_near_to_rounding_is_not_judged_without_shards(error: float, why: str, status: str) -> None:
    report, parity, _ = judged(error, 2.2e-6, analysis=ShardAnalysis(error=why))
    assert parity.status == status, shown(report)
    if status == "skipped":
        assert "which may be rounding" in parity.detail and "(that failed)" in parity.detail
        assert not report.findings and report.status == "incomplete"


def test_a_difference_is_no_finding_where_there_was_no_time_to_find_out_why() -> None:
    analysis, hang = ShardAnalysis(error="that failed"), "the single process did not finish within 5 s"
    report, parity, notes = judged(0.5, 1e-6, analysis=analysis, hang=hang)
    assert not report.findings and parity.status == "skipped"
    assert "5.0e-01 (relative) away" in notes[-1] and "did not finish within 5 s" in notes[-1]
