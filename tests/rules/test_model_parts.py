"""What ranks have alike that compute one model together, on evidence made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.evidence.modules import ModuleDescription, ShardedFacts, WrapperFacts
from ddpcheck.findings.evidence.replicas import ModelSplit, PartStep
from ddpcheck.findings.evidence.script import Inputs, LoaderPass
from ddpcheck.findings.evidence.steps import DdpStepEvidence, LocalStep, RandomDraws, ShardedStep, StepEvidence
from ddpcheck.findings.report import Location
from ddpcheck.findings.wording import Names
from ddpcheck.rules.data.ddp516_rank_dependent_program_data import judge_model_batches, judge_shards
from ddpcheck.rules.gradients.reducer import judge_reducer, judge_sharded
from ddpcheck.rules.parameters.ddp104_rank_dependent_parameter import judge_skipped_reductions
from ddpcheck.rules.registry import judge_view
from ddpcheck.rules.replicas.ddp306_state_diverged import judge_counted_norms
from ddpcheck.rules.replicas.model_parts import judge_model_parts, judge_norms_of_steps
from ddpcheck.stream.entries import GroupUsed, RankStarted, ReplicaCaptured, Sketch, WrapperMade
from ddpcheck.stream.rank_log import RankTrace
from ddpcheck.stream.rank_report import ReplicaState, WatchContext
from ddpcheck.trace.check_context import JudgeContext
from ddpcheck.trace.model_parts import HandSplit, ModelParts
from ddpcheck.trace.script_facts import ScriptFacts, by_group
from tests.reports import assert_says

SPLIT = ModelSplit((0, 1), None)
GRADIENTS = {"norm.weight": (1.0, 2.0), "norm.bias": (0.5, -1.0)}


def step(count: int, **given: Any) -> PartStep:
    alike = {"split": ("up.weight",), "values": {"norm.weight": 1}, "gradients": GRADIENTS, "random": count}
    return PartStep(0, count, None, **(alike | given))


def times(factor: float) -> dict[str, tuple[float, ...]]:
    return {name: tuple(factor * number for number in numbers) for name, numbers in GRADIENTS.items()}


OTHER = {"norm.weight": (2.0, 1.0), "norm.bias": (0.5, -1.0)}


@pytest.mark.parametrize(
    ("one", "other", "code"),
    [
        ({}, {}, ""),
        ({}, {"values": {"norm.weight": 2}}, "DDP208"),
        ({}, {"gradients": OTHER}, "DDP301"),
        ({}, {"gradients": times(1.0 + 1e-6)}, ""),
        ({}, {"gradients": times(1.5)}, "DDP306"),
        ({"gradients": {}}, {"gradients": {}}, ""),
        ({"split": (), "unoptimized": ("up.weight",)}, {"split": (), "unoptimized": ("up.weight",)}, "DDP504"),
        ({"unoptimized": ("down.weight",)}, {"unoptimized": ("down.weight",)}, ""),  # one optimizer of two
    ],
)
def test_ranks_of_one_model_have_alike_what_is_not_split(one: Any, other: Any, code: str) -> None:
    steps = [[step(count, **one), step(count, **other)] for count in range(4)]
    assert [finding.code for finding in judge_model_parts(steps, (0, 1), SPLIT)] == [code] * bool(code)


def test_the_ranks_of_a_script_that_compute_one_model_are_compared() -> None:
    for values, codes in [((1, 2), ["DDP208"]), ((1, 1), [])]:
        logs = [[SPLIT, *(step(count, values={"norm.weight": value}) for count in range(4))] for value in values]
        ranks = [RankTrace(RankStarted(rank, 2, "gloo"), log, []) for rank, log in enumerate(logs)]
        assert [finding.code for finding in judge_view(ModelParts(ScriptFacts(ranks, ended=True)))] == codes


def test_ranks_that_skip_the_reductions_of_different_parameters_wait_for_each_other() -> None:
    skipped = {(0, 0): frozenset("a"), (0, 1): frozenset("a"), (0, 2): frozenset("b")}
    assert_says(judge_skipped_reductions(skipped), "DDP104 ... ('a', 'b') ... rank 2 and rank 0")
    assert judge_skipped_reductions({(0, 0): frozenset("a"), (1, 1): frozenset("b")}) == []


def test_a_wrapper_knows_what_an_optimizer_holds() -> None:
    stale = {"split": (), "unoptimized": ("up.weight",)}
    assert judge_model_parts([[step(0, **stale), step(0, **stale)]], (0, 1), SPLIT, wrapped=True) == []


def test_random_numbers_that_are_drawn_apart_are_the_cause_of_other_gradients() -> None:
    apart = [[step(count), step(count, gradients=OTHER, random=10 + count)] for count in range(4)]
    at_rest = [[step(count, random=1), step(count, gradients=OTHER, random=2)] for count in range(4)]
    (drawn,), (other,) = (judge_model_parts(steps, (0, 1), SPLIT) for steps in (apart, at_rest))
    assert "random" in drawn.message and "random" not in other.message


def clipped(counted: int) -> list[list[PartStep]]:
    """Four steps in which two ranks clip to a norm of 1 that counts what is not split so often."""
    found = []
    for count in range(4):
        part, whole = 1.0 + count, 2.0
        scale = (2 * part**2 + counted * whole**2) ** -0.5
        norms = {"up.weight": scale * part, "norm.weight": scale * whole}
        found.append([step(count, norms=norms), step(count, norms=norms)])
    return found


def test_a_norm_that_counts_replicas_is_constant_and_that_of_the_model_is_not() -> None:
    assert_says(judge_counted_norms([clipped(2)], [(0, 1)]), "DDP306")
    assert judge_counted_norms([clipped(1)], [(0, 1)]) == []


def taken(*indices: int) -> list[LoaderPass]:
    return [LoaderPass(0, 0, None, dataset="Texts", trains=True, indices=indices)]


def given(*samples: int) -> list[Inputs]:
    return [Inputs(0, count, tuple(count + one for one in samples), None) for count in range(4)]


@pytest.mark.parametrize(
    ("passes", "inputs", "subjects"),
    [
        ([taken(1, 2), taken(1, 2)], [given(1), given(1)], []),
        ([taken(1, 2), taken(2, 1)], [[], []], [("Texts",)]),
        ([[], []], [given(1), given(2)], [("forward",)]),
        ([[], []], [[], []], []),
    ],
)
def test_ranks_of_one_model_take_the_same_samples(passes: Any, inputs: Any, subjects: list[Any]) -> None:
    assert [finding.subjects for finding in judge_model_batches(passes, inputs, (0, 1), SPLIT)] == subjects


def test_a_group_is_one_of_which_each_rank_says_so() -> None:
    assert list(by_group({0: [SPLIT], 1: [SPLIT]})) == [(0, 1)]
    assert by_group({0: [SPLIT], 1: []}) == {}


# Of recipes

MODELS = [(0, 1), (2, 3)]


@pytest.mark.parametrize(
    ("samples", "ranks"), [((1, 1, 2, 2), ()), ((1, 2, 3, 4), (0, 1, 2, 3)), ((1, 1, 2, 3), (2, 3))]
)
def test_ranks_of_one_model_are_given_the_same_samples(samples: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    local = [
        LocalStep(StepEvidence(rank, 0, {}), 0.0, RandomDraws(), (), 1, 0, 1.0, (), sample_fingerprints=(one,))
        for rank, one in enumerate(samples)
    ]
    found = judge_shards(local, MODELS)
    assert [(one.code, one.ranks) for one in found] == [("DDP516", ranks)] * bool(ranks)


def test_the_norms_that_the_optimizer_of_a_recipe_leaves_are_those_of_its_steps() -> None:
    left = [clipped(2), clipped(1)]
    wrong, right = (
        [
            ShardedStep(2 * model + place, step, split=one.split, norms=one.norms)
            for step, of_ranks in enumerate(steps)
            for model in range(2)
            for place, one in enumerate(of_ranks)
        ]
        for steps in left
    )
    assert [one.code for one in judge_norms_of_steps(wrong, MODELS)] == ["DDP306"]
    assert judge_norms_of_steps(right, MODELS) == [] == judge_norms_of_steps(wrong, [])


@pytest.mark.parametrize(
    ("gradients", "told"),
    [
        ((1, 1, 1, 1), []),
        ((1, 2, 1, 2), ["which compute one model together"]),
        ((1, 1, 2, 2), ["after backward"]),
        ((1, 2, 3, 4), ["after backward"]),
    ],
)
def test_gradients_that_differ_within_models_or_between_them(gradients: tuple[int, ...], told: list[str]) -> None:
    evidence = [
        DdpStepEvidence(rank, 0, gradients={"norm.weight": one}, wrapper_calls=1) for rank, one in enumerate(gradients)
    ]
    for judge, facts in ((judge_reducer, WrapperFacts()), (judge_sharded, ShardedFacts(is_ddp=False))):
        found = judge(evidence, JudgeContext(Names(), facts, world_size=2, models=MODELS))
        assert [one.code for one in found] == ["DDP301" for _ in told]
        assert all(words in one.message for one, words in zip(found, told, strict=True))


@pytest.mark.parametrize(("losses", "told"), [((0.4, 0.3, 0.5, 0.6), "DDP302"), ((0.4, 0.4, 0.5, 0.5), "DDP303")])
def test_losses_that_differ_within_a_model_are_told_before_their_factor(losses: tuple[float, ...], told: str) -> None:
    twice = (Difference("head.weight", 1.0, 1e-6, ratio=2.0),)
    evidence = [
        ShardedStep(rank, 0, gradients={"head.weight": 1}, against_local=twice, wrapper_calls=1, loss=loss)
        for rank, loss in enumerate(losses)
    ]
    for judge, facts in ((judge_reducer, WrapperFacts()), (judge_sharded, ShardedFacts(is_ddp=False))):
        (found,) = judge(evidence, JudgeContext(Names(), facts, world_size=2, models=MODELS))
        assert found.code == told
        assert ("each a different loss, 0.4 and 0.3 in step 0" if told == "DDP302" else "2 (the number of models)") in (
            found.message
        )


AT = Location("layers.py", 9)


def captured(rank: int, step: int, words: int, gradient: float, part: int) -> ReplicaCaptured:
    values = DdpStepEvidence(rank, step, parameters={"words": words, "up": part, "bias": 0 if step == 0 else rank})
    averaged = {
        "words": Sketch("f", [gradient, 1.0]),
        "up": Sketch("f", [1.0 * rank, 1.0]),
        "bias": Sketch("f", [rank, 1.0]),
    }
    parts = () if step else ("words", "up")
    return ReplicaCaptured(0, step, ReplicaState(ModuleDescription(), values), averaged=averaged, parts=parts)


def by_hand(
    *,
    parts: tuple[int, int] = (1, 2),
    words: int = 1,
    gradient: float = 1.0,
    other: int = 0,
    line: Location | None = AT,
) -> list[str]:
    """Two groups of DDP, of which ranks 0 and 1 compute one model; what is said of rank 1 is other than on rank 0."""
    logs = []
    for place in range(2):
        ranks = (place, place + 2)
        context = WatchContext(Names(), WrapperFacts(), 2, trainable=("words", "up", "bias"))
        made = WrapperMade("Net", ranks, context, Location("train.py", 3), by_library=False, classes={})
        for rank in ranks:
            model = (0, 1) if rank < 2 else (2, 3)
            steps = [captured(rank, 0, 7, gradient * place, parts[place])]
            steps += [captured(rank, n, 10 * n + words * place, gradient * place, 9 + place) for n in (1, 2, 4)]
            given = [Inputs(0, n, (n, n + other * place), None) for n in range(3)]
            entries = [made, GroupUsed("tp", model), GroupUsed("tp", model, line), *steps, *given]
            logs.append(RankTrace(RankStarted(rank, 4, "gloo"), entries, []))
    facts = ScriptFacts(sorted(logs, key=lambda log: log.started.rank), ended=True)
    return [f"{one.code} {one.subjects} {one.ranks} {one.location}" for one in judge_view(HandSplit(facts))]


@pytest.mark.parametrize(
    ("healthy", "why"),
    [
        ({"words": 0}, "they go on alike: the gradients are added up after backward"),
        ({"gradient": 0.0}, "what differs is rounding"),
        ({"parts": (1, 1)}, "nothing is split, or all parts begin alike"),
        ({"other": 1}, "experts, which are given samples of their own"),
        ({"line": None}, "two models: no collective goes across"),
    ],
)
def test_what_is_equal_beside_layers_split_by_hand_stays_equal(healthy: dict[str, Any], why: str) -> None:
    assert by_hand() == ["DDP301 ('words',) (0, 1, 2, 3) layers.py:9"]
    assert by_hand(**healthy) == [], why
