"""Communication hooks that lose on purpose, or average over fewer ranks: what of it is told, and what is not known."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook, fp16_compress_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from ddpcheck.findings.evidence.modules import ModuleDescription, WrapperFacts
from ddpcheck.findings.evidence.steps import DdpStepEvidence, LoopEvent
from ddpcheck.findings.replace import replace
from ddpcheck.findings.wording import Names, make_finding
from ddpcheck.gather.ddp.ddp_wrapper import has_user_hook, hook_error, uses_local_sgd
from ddpcheck.rules import registry
from ddpcheck.rules.gradients.reducer import judge_reducer
from ddpcheck.rules.registry import judge_all
from ddpcheck.rules.replicas.ddp306_state_diverged import judge_local_sgd
from ddpcheck.rules.replicas.steps import judge_state
from ddpcheck.rules.script_table import VIEWS
from ddpcheck.stream.entries import LocalSgdEnd, RankStarted, ReplicaCaptured, WrapperMade
from ddpcheck.stream.rank_log import RankTrace
from ddpcheck.stream.rank_report import ReplicaState, WatchContext
from ddpcheck.trace.check_context import JudgeContext
from ddpcheck.trace.loop import GradientChanges
from ddpcheck.trace.script_facts import ScriptFacts
from tests.reports import assert_says

BFLOAT16 = 0.0078125
CONTEXT = WatchContext(Names({}), WrapperFacts(), 2)


def with_hook(hook: Any, state: Any = None) -> Any:
    return SimpleNamespace(_comm_hooks=[(hook, state)])


def own_hook(state: object, bucket: object) -> None: ...


def captured(own: dict[str, list[list[float]]], left: Any, fingerprints: Any, **more: Any) -> list[RankTrace]:
    """Captures of two ranks in one step: their `own` gradients, and `.grad` after the wrapper (`left`)."""
    ranks = []
    for rank in range(2):
        made = WrapperMade("Net", (0, 1), CONTEXT, None, by_library=False, classes={})
        state = ReplicaState(ModuleDescription(), DdpStepEvidence(rank, 3, fingerprints(rank)))
        mine = {name: of_ranks[rank] for name, of_ranks in own.items()}
        step = ReplicaCaptured(0, 3, state, mine, left, dict.fromkeys(own, BFLOAT16), **more)
        ranks.append(RankTrace(RankStarted(rank, 2, "gloo"), [made, step], [(4, 4)]))
    return ranks


OWN = {"body.weight": [[1.0, -2.0, 0.0], [3.0, 0.0, 1.0]], "head.weight": [[0.5, 0.5, 0.0], [0.0, 0.5, 1.0]]}
AVERAGE = {"body.weight": [2.0, -1.0, 0.5], "head.weight": [0.25, 0.5, 0.5]}
LARGEST = {"body.weight": [2.0, 0.0, 0.0], "head.weight": [0.0, 0.5, 0.0]}
DOUBLE = {name: [2 * number for number in numbers] for name, numbers in AVERAGE.items()}


OWN_BIAS = {"body.weight": OWN["body.weight"], "body.bias": [[1e-9, -2e-9, 0.0], [2e-9, 1e-9, 0.0]]}
ROUNDED = {"body.weight": AVERAGE["body.weight"], "body.bias": [0.0, 0.0, 0.0]}
"""The gradient of a bias before a BatchNorm is rounding, which 16 bits do not have."""
HALF = {"hook": "fp16_compress_hook"}


@pytest.mark.parametrize(
    ("own", "left", "more", "words"),
    [
        (OWN, LARGEST, {"hook": "topk", "own_hook": True}, "DDP302 note"),  # what it keeps back is no alarm
        (OWN, LARGEST, HALF, "DDP302 error"),
        (OWN, DOUBLE, {"hook": "summing", "own_hook": True}, "DDP303 error"),
        (OWN, AVERAGE, {"hook": "right", "own_hook": True}, ""),
        (OWN_BIAS, ROUNDED, HALF, ""),
        (OWN_BIAS, ROUNDED, {}, "DDP302 error"),
        (OWN_BIAS, ROUNDED | {"body.bias": [1.0, 0.0, 0.0]}, HALF, "DDP302 error"),
    ],
)
def test_gradients_that_a_hook_leaves(own: Any, left: Any, more: dict[str, Any], words: str):
    ranks = captured(own, left, lambda _: dict.fromkeys(own, 1), **more)
    assert_says(judge_all(ScriptFacts(ranks, ended=True), VIEWS).findings, words)


def test_a_hook_that_returns_the_ranks_own_is_no_change_after_backward(monkeypatch: pytest.MonkeyPatch):
    """What is seen before the optimizer's step was there when backward ended."""
    later = make_finding("DDP301", ["body.weight"], "changed after backward")
    registry.import_rules()
    monkeypatch.setitem(registry._judges, GradientChanges, [lambda _: [later]])
    ranks = captured({}, {}, lambda rank: {"body.weight": 7 + rank}, hook="local", own_hook=True)
    words = ": The gradients of all 1 parameter differ ... gradients are reduced by the communication hook local"
    findings = judge_all(ScriptFacts(ranks, ended=True), VIEWS).findings
    assert_says(findings, f"DDP301 ... {words} ... Let the communication hook return the average")


def test_what_a_hook_makes_up_for_later_is_not_known_and_power_sgd_averages_exactly_until_it_begins():
    """Its state has counted the backward pass that has ended; that of number `start_powerSGD_iter` compresses."""
    state = PowerSGDState(None, 1, start_powerSGD_iter=2)
    for state.iter, lost in ((2, 0.0), (3, 1e6)):
        assert hook_error(with_hook(powerSGD_hook, state)) == lost
        assert hook_error(with_hook(fp16_compress_wrapper(powerSGD_hook), state)) == max(lost, BFLOAT16)
    state.use_error_feedback = False
    assert hook_error(with_hook(powerSGD_hook, state)) == 0.1
    assert hook_error(with_hook(fp16_compress_hook)) == BFLOAT16


def test_a_hook_is_the_scripts_own_also_inside_of_one_of_torch():
    for hook, own in ((fp16_compress_hook, False), (own_hook, True)):
        assert has_user_hook(with_hook(hook)) is has_user_hook(with_hook(fp16_compress_wrapper(hook))) is own
    assert not has_user_hook(None)


def test_ranks_train_apart_from_the_step_on_in_which_post_local_sgd_begins():
    for step, apart in ((5, False), (6, True)):
        state = SimpleNamespace(iter=step, start_localSGD_iter=6)
        assert uses_local_sgd(with_hook(fp16_compress_hook, state)) is apart
    assert not uses_local_sgd(with_hook(powerSGD_hook, SimpleNamespace(iter=6)))


APART = LoopEvent("apart")
PLAIN = JudgeContext(Names({}), WrapperFacts(comm_hook="post_localSGD_hook"), world_size=2, plain_optimizer=True)


def steps_apart(*values: tuple[int, int]) -> list[DdpStepEvidence]:
    """Steps that end with these values of a parameter on the two ranks, all after step 0 under post-local SGD."""
    return [
        DdpStepEvidence(
            rank, step, {"a": own[rank]}, {"a": own[rank]}, {"a": before[rank]}, events=(APART,) * bool(step)
        )
        for step, (before, own) in enumerate(itertools.pairwise(((1, 1), *values)))
        for rank in range(2)
    ]


def test_parameters_that_nothing_averages_under_post_local_sgd_are_told() -> None:
    drifted = steps_apart((1, 1), (2, 3), (4, 5))
    assert judge_reducer(drifted, PLAIN) == []
    [finding] = judge_state(drifted, PLAIN, gradients_differ=False)
    assert (finding.code, finding.subjects, finding.steps) == ("DDP306", ("a",), (1, 2))
    assert judge_state(steps_apart((1, 1), (2, 3), (4, 4)), PLAIN, gradients_differ=False) == []
    assert judge_state(drifted, replace(PLAIN, plain_optimizer=False), gradients_differ=False) == []


def trained_apart(marks: tuple[int, ...], final: int) -> list[LocalSgdEnd]:
    return [LocalSgdEnd(0, 4, marks, {"a": final, "b": 1}, "post_localSGD_hook")]


def test_ranks_that_train_apart_to_the_end_of_a_script() -> None:
    [finding] = judge_local_sgd([trained_apart((1, 2, 4), 4), trained_apart((1, 3, 5), 5)])
    assert (finding.code, finding.subjects) == ("DDP306", ("a",))
    assert "after each of 2 steps from step 4 on, in which post_localSGD_hook averages" in finding.message
    averaged = judge_local_sgd([trained_apart((1, 2, 6, 4), 4), trained_apart((1, 3, 6, 5), 5)])
    same_at_last = judge_local_sgd([trained_apart((1, 2, 4), 4), trained_apart((1, 3, 4), 4)])
    on_one_rank = judge_local_sgd([trained_apart((1, 2, 4), 4), []])
    short = judge_local_sgd([trained_apart((1, 2), 2), trained_apart((1, 3), 3)])
    assert averaged == same_at_last == on_one_rank == short == []
