"""A finding on a script is at the line that its repaired twin changes, and the advice says what that line lacks.

That the twin, to which the advice has been applied, has no finding any more is in `test_scripts_on_records`.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.findings.evidence.loop import ModuleChanged
from ddpcheck.findings.evidence.modules import WrapperFacts
from ddpcheck.findings.evidence.script import GradientsClipped, OptimizerStep
from ddpcheck.findings.evidence.steps import PathEnd, StepEvidence
from ddpcheck.findings.figures import PathStep
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import Names, make_finding
from ddpcheck.rules.gradients.ddp301_not_synchronised import judge_scaled_by_hand, judge_step_gradients
from ddpcheck.rules.optimizers.script_optimizers import judge_unsynchronized
from ddpcheck.rules.parameters.contribution import judge_parameters
from ddpcheck.rules.replicas.ddp208_parameter_value import locate_seed
from ddpcheck.rules.replicas.steps import locate_change
from tests.faultsuite.recorded_scripts import Run, report_on, runs
from tests.faultsuite.scripts_page import SCRIPTS, expected_of

EXACT, NEAR = 45, 3  # findings at a changed line itself, at least; lines
ELSEWHERE = {
    "barrier_in_save": "the barrier, which is called in a branch of the caller's",
    "best_by_rank": "the variable; what decides to copy is compared with a local loss",
    "clamped_on_one_rank": "the write; its condition is computed three lines above",
    "doubled_gradient": "the module: what hooks of its parameters do is not seen one by one",
    "evaluates_on_rank_0": "the call that waits; the advice names the branch around the call of the function",
    "inner_module": "the call; the twin assigns what is called",
    "own_normaliser": "the update of the statistics; the twin reduces before",
    "recompiles_on_one_rank": "the call; the twin compiles for any size",
    "same_augmentation": "the seed; the twin seeds once more",
    "same_augmentation_in_workers": "the seed; the twin seeds once more",
    "same_noise": "the seed; the twin seeds once more",
    "sharded_other_method": "the method; the twin registers it",
    "sharded_stale_optimizer": "the optimizer; the twin makes it anew later",
    "sharded_statistics": "the layer; the twin averages its buffers before it saves",
    "sharded_unused_on_a_rank": "the layer: the forward pass of shards is not run again to find the branch",
    "short_timeout": "what takes so long; the twin has a longer timeout",
    "uneven_loader": "the loop; the twin cuts the samples",
}
"""Scripts whose finding is at another line than their twins change, each with the line that it is at."""

OTHER_WORDS = {
    "average_of_other_start": "the twin makes the copy after the wrapper, which is constructed on another line",
    "branch_by_step": "the twin takes the branch in each step; the advice keeps it",
    "doubled_gradient": "the twin goes through no parameter to register the hook, which the advice removes",
    "late_parameter": "the twin adds the parameter before it wraps the module, on another line",
    "raises_on_one_rank": "the exception is the program's own",
    "sharded_unused_layer": "the twin has no such layer any more: the advice says to remove it",
    "split_twice": "the twin sets the variable from which the sampler has its num_replicas",
    "weights_in_own_batch": "the twin averages over the ranks what the loss divides by, at which the advice looks",
    "unused_head": "the twin uses the head, as the advice says",
}
"""Scripts whose advice shares no word with what their twins change, each with the reason."""

OF_ANY_LINE = frozenset(("self", "x", "out", "model", "step", "data", "number", "get"))


def changed_by(script: Path) -> set[int]:
    """The lines of the statements that ask whether the script is to be its twin."""
    lines: set[int] = set()
    for statement in ast.walk(ast.parse(script.read_text())):
        if not isinstance(statement, ast.stmt):
            continue
        own = [part for part in ast.iter_child_nodes(statement) if not isinstance(part, ast.stmt | ast.excepthandler)]
        parts = [node for part in own for node in ast.walk(part)]
        if any(isinstance(node, ast.Name) and node.id == "FIXED" and isinstance(node.ctx, ast.Load) for node in parts):
            ends = [statement.lineno, *(getattr(node, "end_lineno", None) or 0 for node in parts)]
            last = (statement.end_lineno or 0) if isinstance(statement, ast.If) else max(ends)
            lines.update(range(statement.lineno, last + 1))
    return lines


report_of = functools.cache(report_on)


def distance(run: Run) -> int:
    """Lines between the location of the expected finding and the nearest one that the twin changes."""
    script = SCRIPTS / f"{run.stem}.py"
    located = [one.location for one in report_of(run).findings if one.code == expected_of(script)["code"]]
    lines = changed_by(script)
    return min((abs(one.line - line) for one in located if one is not None for line in lines), default=1 << 20)


FAULTS = [run for run in runs() if run.has_fault]


def test_findings_of_scripts_are_at_lines_that_their_twins_change() -> None:
    far = {run.stem: distance(run) for run in FAULTS}
    assert {stem for stem, lines in far.items() if lines > NEAR} == ELSEWHERE.keys()
    assert sum(lines == 0 for lines in far.values()) >= EXACT


def identifiers_of_twin(script: Path) -> set[str]:
    """Names on the lines that the twin of a script changes, and the words of which they are made."""
    lines = changed_by(script)
    nodes = [node for node in ast.walk(ast.parse(script.read_text())) if getattr(node, "lineno", None) in lines]
    names = [getattr(node, kind, None) for node in nodes for kind in ("id", "attr", "arg")]
    return {word for name in names if name is not None for word in (name, *name.split("_"))} - OF_ANY_LINE


def words_of(advice: str) -> set[str]:
    return {word for name in re.findall(r"[A-Za-z_]\w+", advice) for word in (name, *name.split("_")) if word}


@pytest.mark.parametrize("run", FAULTS, ids=str)
def test_the_advice_on_a_script_names_what_its_twin_changes(run: Run) -> None:
    script = SCRIPTS / f"{run.stem}.py"
    told = [words_of(one.what_to_do) for one in report_of(run).findings if one.code == expected_of(script)["code"]]
    shared = identifiers_of_twin(script).intersection(*told)
    assert bool(shared) != (run.stem in OTHER_WORDS), shared


@pytest.mark.parametrize("run", FAULTS, ids=str)
def test_each_fault_has_a_twin_to_which_the_advice_was_applied(run: Run) -> None:
    assert changed_by(SCRIPTS / f"{run.stem}.py") and Run(run.script, ("--fixed",)) in runs()


# What was recorded beside the line at which it is noticed

STEP, REDUCES, SENDS, MAKES, SEEDS, LOADS = (Location("train.py", line) for line in (30, 20, 10, 12, 5, 15))


def step(count: int, rank: int, **more: Any) -> OptimizerStep:
    plain = OptimizerStep(0, count, {"class": "SGD"}, STEP, made=MAKES, reduced_at=REDUCES, collectives=2 * count)
    return replace(plain, **more)


def steps(values: Any, gradients: Any, **more: Any) -> list[list[OptimizerStep]]:
    """Three steps of two ranks: of the parameter "w", whose value and gradient are functions of step and rank."""
    return [
        [step(n, rank, alone={"w": values(n, rank)}, gradients={"w": gradients(n, rank)}, **more) for rank in (0, 1)]
        for n in range(3)
    ]


def test_gradients_that_are_reduced_by_hand_are_told_at_the_reduction() -> None:
    (found,) = judge_unsynchronized(
        steps(lambda n, rank: n * (rank + 1), lambda n, rank: (1.0, rank + n)), [], wrapped=False
    )
    assert (found.code, found.location) == ("DDP501", REDUCES)
    assert [*map(str, found.related)] == [f"optimizer steps at {STEP}"]
    none = steps(lambda n, rank: n * (rank + 1), lambda n, rank: (1.0, rank + n), collectives=0)
    (found,) = judge_unsynchronized(none, [], wrapped=False)
    assert (found.code, found.location) == ("DDP501", MAKES)


@pytest.mark.parametrize(("more", "where"), [({"broadcast_at": SENDS}, SENDS), ({}, MAKES)])
def test_values_that_differ_from_the_start_are_told_at_the_broadcast(more: dict[str, Any], where: Location) -> None:
    unequal = steps(lambda n, rank: 10 * n + rank + 1, lambda n, _: (1.0, n + 1.0), **more)
    (found,) = judge_unsynchronized(unequal, [], wrapped=False)
    assert (found.code, found.location) == ("DDP208", where)


def test_values_that_differ_from_the_start_are_told_at_the_seed_if_that_differs() -> None:
    finding = make_finding("DDP208", ("w",), "", location=STEP)
    apart = [step(0, rank, seed=rank, seeded=SEEDS) for rank in (0, 1)]
    found = locate_seed(finding, apart)
    assert found.location == SEEDS and "rank 0: 0; rank 1: 1" in found.evidence[-1] and "seed" in found.what_to_do
    assert locate_seed(finding, [replace(one, seed=0) for one in apart]) is finding
    assert locate_seed(finding, [apart[0], replace(apart[1], seed=None)]) is finding
    assert locate_seed(finding, [replace(one, seeded=None) for one in apart]) is finding
    assert locate_seed(replace(finding, code="DDP306"), apart).location == STEP


def test_gradients_that_differ_by_the_scale_of_a_scaler_are_told_at_the_line_that_loads_it() -> None:
    of_ranks = [step(0, rank, held=("0/w",), averaged=True, norms={"0/w": 1.0 / (1 + 15 * rank)}) for rank in (0, 1)]
    scaled = [replace(of_ranks[0], scale=64.0, scale_at=LOADS), replace(of_ranks[1], scale=1024.0)]
    (found,) = judge_step_gradients([scaled])
    assert (found.code, found.location) == ("DDP301", LOADS) and "rank 0: 64; rank 1: 1024" in found.evidence[-1]
    assert "GradScaler" in found.what_to_do
    (found,) = judge_step_gradients([[replace(one, scale=64.0) for one in of_ranks]])
    assert found.location == REDUCES and "GradScaler" not in found.what_to_do


def test_gradients_that_are_scaled_after_a_reduction_by_hand_are_told_there() -> None:
    alone = {"v": 1, "w": 2}
    of_ranks = [step(0, r, alone=alone, gradients=dict.fromkeys(alone, (1.0 + r, 2.0 + 2 * r))) for r in (0, 1)]
    (found,) = judge_scaled_by_hand([of_ranks])
    assert (found.code, found.location) == ("DDP301", REDUCES)


def test_an_optimizer_that_a_hook_steps_in_backward_is_told_at_the_line_that_registers_the_hook() -> None:
    finding = make_finding("DDP515", ("w",), "w was changed.", location=STEP, steps=(0,))
    hooked = ModuleChanged(0, "stepped", "Adam.step", ("w",), LOADS)
    found = locate_change(finding, [[hooked], [hooked]], MAKES)
    assert (found.code, found.location, found.steps) == ("DDP310", LOADS, (0,)) and "Adam.step" in found.message
    assert locate_change(finding, [[], []], MAKES).code == "DDP515"


def missing(end: PathEnd, *ranks: int) -> list[Finding]:
    names = Names(locations={"head.weight": MAKES})
    states: list[dict[str, Any]] = [
        {"head.weight": "missing" if rank in ranks else "contributes", "body.weight": "contributes"} for rank in (0, 1)
    ]
    return judge_parameters(
        [StepEvidence(r, 0, states[r], {"head.weight": end}) for r in (0, 1)], WrapperFacts(), names
    )


def ends() -> Iterator[tuple[str, PathEnd, tuple[int, ...], Location]]:
    line, region = Location("net.py", 40), Location("net.py", 38)
    yield "DDP103", PathEnd("cut", "detach()", line, steps=(PathStep("linear()"),)), (0, 1), line
    yield "DDP103", PathEnd("cut", "torch.no_grad()", line, no_grad_location=region), (0, 1), region
    yield "DDP102", PathEnd("unreachable", "linear()", line), (0, 1), line
    yield "DDP101", PathEnd("unused"), (0, 1), MAKES
    yield "DDP101", PathEnd("unused", location=line), (0, 1), line
    yield "DDP104", PathEnd("unused", location=line), (1,), line
    yield "DDP104", PathEnd("unused"), (1,), MAKES


@pytest.mark.parametrize(("code", "end", "ranks", "where"), list(ends()))
def test_a_parameter_that_is_missing_is_told_where_its_path_ends(
    code: str, end: PathEnd, ranks: tuple[int, ...], where: Location
) -> None:
    (found,) = missing(end, *ranks)
    assert (found.code, found.location) == (code, where)
    assert [*map(str, found.related)] == ([f"parameter made at {MAKES}"] if where != MAKES else [])


# What a cause is advised


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("detach()", "Remove detach()."),
        (".data", "Remove .data."),
        ("torch.no_grad()", "Run it outside of torch.no_grad()"),
        ("argmax(), which is not differentiable", "instead of argmax()"),
        ("nn.Parameter(), a new leaf", "instead of nn.Parameter()"),
        ("a re-entrant checkpoint of which no input requires grad", "Pass use_reentrant=False"),
    ],
)
def test_a_cut_is_mended_by_what_it_is(reason: str, advice: str) -> None:
    (found,) = missing(PathEnd("cut", reason, Location("net.py", 40)), 0, 1)
    assert found.code == "DDP103" and advice in found.what_to_do and "requires_grad_(False)" in found.what_to_do


@pytest.mark.parametrize("assigned", [True, False])
def test_only_a_load_after_wrapping_is_told_to_leave_assign_out(*, assigned: bool) -> None:
    finding = make_finding("DDP503", ("head.weight",), "", location=STEP)
    what, how = ("values", "load_state_dict") if assigned else ("parameters", "head.weight")
    change = ModuleChanged(0, what, how, ("head.weight",), LOADS)
    found = locate_change(finding, [[change], [change]], MAKES)
    assert found.location == LOADS and ("assign=True" in found.what_to_do) == assigned


@pytest.mark.parametrize(("on", "where"), [((1,), SEEDS), ((), REDUCES), ((0, 1), REDUCES)])
@pytest.mark.parametrize("limit", [0.5, 9.0])  # of the larger one nothing is clipped
def test_a_clip_on_some_ranks_only_is_the_line(on: tuple[int, ...], where: Location, limit: float) -> None:
    of_ranks = [step(2, rank, held=("0/w",), averaged=True, norms={"0/w": 2.0 - rank}) for rank in (0, 1)]
    clips = [[GradientsClipped(n, 2.0, SEEDS, n, limit=limit) for n in range(3 * (rank in on))] for rank in (0, 1)]
    (found,) = judge_step_gradients([of_ranks], clips)
    at_clip = where == SEEDS and limit < 2
    assert (found.code, found.location) == ("DDP301", SEEDS if at_clip else REDUCES)
    assert (found.ranks, found.what_to_do.startswith("Call clip_grad_norm_ on every rank")) == (on * at_clip, at_clip)
