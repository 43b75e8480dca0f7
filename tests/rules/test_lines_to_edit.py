"""The line of a finding that was recorded beside the line at which it is noticed, and the advice on a cause."""

from __future__ import annotations

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
from tests.reports import assert_says

STEP, REDUCES, SENDS, MAKES, SEEDS, LOADS = (Location("train.py", line) for line in (30, 20, 10, 12, 5, 15))


def step(count: int, rank: int, **more: Any) -> OptimizerStep:
    places = {"constructed_at": MAKES, "reduced_at": REDUCES, "collectives": 2 * count}
    return OptimizerStep(0, count, {"class": "SGD"}, STEP, **places | more)


def steps(values: Any, gradients: Any, **more: Any) -> list[list[OptimizerStep]]:
    """Three steps of two ranks: of the parameter "w", whose value and gradient are functions of step and rank."""
    return [
        [step(n, r, unwrapped_params={"w": values(n, r)}, gradients={"w": gradients(n, r)}, **more) for r in (0, 1)]
        for n in range(3)
    ]


def test_gradients_that_are_reduced_by_hand_are_told_at_the_reduction() -> None:
    for more, where in (({}, REDUCES), ({"collectives": 0}, MAKES)):
        apart = steps(lambda n, rank: n * (rank + 1), lambda n, rank: (1.0, rank + n), **more)
        findings = judge_unsynchronized(apart, [], wrapped=False)
        assert_says(findings, f"DDP501 ... at {where} ... optimizer steps at {STEP}")


def test_values_that_differ_from_the_start_are_told_at_the_broadcast() -> None:
    for more, where in (({"broadcast_at": SENDS}, SENDS), ({}, MAKES)):
        unequal = steps(lambda n, rank: 10 * n + rank + 1, lambda n, _: (1.0, n + 1.0), **more)
        assert_says(judge_unsynchronized(unequal, [], wrapped=False), f"DDP208 ... at {where}")


def test_values_that_differ_from_the_start_are_told_at_the_seed_if_that_differs() -> None:
    finding = make_finding("DDP208", ("w",), "", location=STEP)
    apart = [step(0, rank, seed=rank, seeded_at=SEEDS) for rank in (0, 1)]
    assert_says([locate_seed(finding, apart)], "at train.py:5 ... rank 0: 0; rank 1: 1 ... seed")
    changes: list[dict[str, Any]] = [{"seed": 1}, {"seed": None}, {"seeded_at": None}]
    for change in changes:
        assert locate_seed(finding, [replace(apart[0], **change), apart[1]]) is finding
    assert locate_seed(replace(finding, code="DDP306"), apart).location == STEP


def test_gradients_that_differ_by_the_scale_of_a_scaler_are_told_at_the_line_that_loads_it() -> None:
    of_ranks = [
        step(0, rank, wrapped_params=("0/w",), averaged=True, norms={"0/w": 1.0 / (1 + 15 * rank)}) for rank in (0, 1)
    ]
    scaled = [replace(of_ranks[0], scale=64.0, scale_at=LOADS), replace(of_ranks[1], scale=1024.0)]
    words = "DDP301 ... at train.py:15 ... rank 0: 64; rank 1: 1024 ... GradScaler"
    assert_says(judge_step_gradients([scaled]), words)
    same = [replace(one, scale=64.0) for one in of_ranks]
    assert_says(judge_step_gradients([same]), "at train.py:20 ... not GradScaler")


def test_gradients_that_are_scaled_after_a_reduction_by_hand_are_told_there() -> None:
    alone = {"v": 1, "w": 2}
    of_ranks = [
        step(0, r, unwrapped_params=alone, gradients=dict.fromkeys(alone, (1.0 + r, 2.0 + 2 * r))) for r in (0, 1)
    ]
    assert_says(judge_scaled_by_hand([of_ranks]), f"DDP301 ... at {REDUCES}")


def test_an_optimizer_that_a_hook_steps_in_backward_is_told_at_the_line_that_registers_the_hook() -> None:
    finding = make_finding("DDP515", ("w",), "w was changed.", location=STEP, steps=(0,))
    hooked = ModuleChanged(0, "stepped", "Adam.step", ("w",), LOADS)
    found = locate_change(finding, [[hooked], [hooked]], MAKES)
    assert_says([found], "DDP310 ... at train.py:15 in steps (0,) ... Adam.step")
    assert locate_change(finding, [[], []], MAKES).code == "DDP515"


def missing(end: PathEnd, *ranks: int) -> list[Finding]:
    states = [{"head.weight": "missing" if n in ranks else "contributes", "body.weight": "contributes"} for n in (0, 1)]
    evidence = [StepEvidence(n, 0, states[n], {"head.weight": end}) for n in (0, 1)]  # type: ignore[arg-type]
    return judge_parameters(evidence, WrapperFacts(), Names(locations={"head.weight": MAKES}))


LINE, REGION = Location("net.py", 40), Location("net.py", 38)


@pytest.mark.parametrize(
    ("code", "end", "ranks", "where"),
    [
        ("DDP103", PathEnd("cut", "detach()", LINE, steps=(PathStep("linear()"),)), (0, 1), LINE),
        ("DDP103", PathEnd("cut", "torch.no_grad()", LINE, no_grad_location=REGION), (0, 1), REGION),
        ("DDP102", PathEnd("unreachable", "linear()", LINE), (0, 1), LINE),
        ("DDP101", PathEnd("unused"), (0, 1), MAKES),
        ("DDP101", PathEnd("unused", location=LINE), (0, 1), LINE),
        ("DDP104", PathEnd("unused", location=LINE), (1,), LINE),
    ],
)
def test_a_missing_parameter_is_told_where_its_path_ends(code: str, end: PathEnd, ranks: Any, where: Location) -> None:
    made = f"{'not ' if where == MAKES else ''}parameter made at {MAKES}"
    assert_says(missing(end, *ranks), f"{code} ... at {where} ... {made}")


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("detach()", "Remove detach()."),
        ("torch.no_grad()", "Run it outside of torch.no_grad()"),
        ("argmax(), which is not differentiable", "instead of argmax()"),
        ("a re-entrant checkpoint of which no input requires grad", "Pass use_reentrant=False"),
    ],
)
def test_a_cut_is_mended_by_what_it_is(reason: str, advice: str) -> None:
    assert_says(missing(PathEnd("cut", reason, LINE), 0, 1), f"DDP103 ... {advice} ... requires_grad_(False)")


def test_only_a_load_after_wrapping_is_told_to_leave_assign_out() -> None:
    finding = make_finding("DDP503", ("head.weight",), "", location=STEP)
    for what, how, words in (("values", "load_state_dict", "assign"), ("parameters", "head.weight", "not assign")):
        change = ModuleChanged(0, what, how, ("head.weight",), LOADS)
        assert_says([locate_change(finding, [[change], [change]], MAKES)], f"at train.py:15 ... {words}=True")


@pytest.mark.parametrize(
    ("on", "limit", "words"),
    [
        ((1,), 0.5, f"of ranks (1,) ... at {SEEDS} ... Call clip_grad_norm_ on every rank"),
        ((1,), 9.0, f"at {REDUCES} ... not Call clip_grad_norm_"),  # nothing is clipped
        ((), 0.5, f"at {REDUCES} ... not Call clip_grad_norm_"),
        ((0, 1), 0.5, f"at {REDUCES} ... not Call clip_grad_norm_"),
    ],
)
def test_a_clip_on_some_ranks_only_is_the_line(on: tuple[int, ...], limit: float, words: str) -> None:
    of_ranks = [step(2, rank, wrapped_params=("0/w",), averaged=True, norms={"0/w": 2.0 - rank}) for rank in (0, 1)]
    clips = [[GradientsClipped(n, 2.0, SEEDS, n, limit=limit) for n in range(3 * (rank in on))] for rank in (0, 1)]
    assert_says(judge_step_gradients([of_ranks], clips), f"DDP301 ... {words}")
