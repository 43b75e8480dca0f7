"""What ranks have alike that compute one model together, on evidence made by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.evidence.modules import ModuleDescription, ShardedFacts, WrapperFacts
from ddpcheck.findings.evidence.replicas import ModelSplit, PartStep
from ddpcheck.findings.evidence.script import Inputs, LoaderPass
from ddpcheck.findings.evidence.steps import DdpStepEvidence, LocalStep, RandomDraws, ShardedStep, StepEvidence
from ddpcheck.findings.report import Finding, Location
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
STALE = {"split": (), "unoptimized": ("up.weight",)}


@pytest.mark.parametrize(
    ("on_0", "on_1", "code"),
    [
        ({}, {}, ""),
        ({}, {"values": {"norm.weight": 2}}, "DDP208"),
        ({}, {"gradients": OTHER}, "DDP301"),
        ({}, {"gradients": times(1.0 + 1e-6)}, ""),
        ({}, {"gradients": times(1.5)}, "DDP306"),
        ({"gradients": {}}, {"gradients": {}}, ""),
        (STALE, STALE, "DDP504"),
        ({"unoptimized": ("down.weight",)}, {"unoptimized": ("down.weight",)}, ""),  # one optimizer of two
    ],
)
def test_ranks_of_one_model_have_alike_what_is_not_split(on_0: Any, on_1: Any, code: str) -> None:
    steps = [[step(count, **on_0), step(count, **on_1)] for count in range(4)]
    assert_says(judge_model_parts(steps, (0, 1), SPLIT), code)
    if code == "DDP504":
        assert judge_model_parts(steps, (0, 1), SPLIT, wrapped=True) == []  # a wrapper knows what an optimizer holds


def test_the_ranks_of_a_script_that_compute_one_model_are_compared() -> None:
    for values, code in [((1, 2), "DDP208"), ((1, 1), "")]:
        logs = [[SPLIT, *(step(count, values={"norm.weight": value}) for count in range(4))] for value in values]
        ranks = [RankTrace(RankStarted(rank, 2, "gloo"), log, []) for rank, log in enumerate(logs)]
        assert_says(judge_view(ModelParts(ScriptFacts(ranks, ended=True))), code)
    assert by_group({0: [SPLIT], 1: [SPLIT]}).keys() == {(0, 1)}
    assert by_group({0: [SPLIT], 1: []}) == {}  # a group is one of which each rank says so


def test_ranks_that_skip_the_reductions_of_different_parameters_wait_for_each_other() -> None:
    skipped = {(0, 0): frozenset("a"), (0, 1): frozenset("a"), (0, 2): frozenset("b")}
    assert_says(judge_skipped_reductions(skipped), "DDP104 ... ('a', 'b') ... rank 2 and rank 0")
    assert judge_skipped_reductions({(0, 0): frozenset("a"), (1, 1): frozenset("b")}) == []


def test_random_numbers_that_are_drawn_apart_are_the_cause_of_other_gradients() -> None:
    apart = [[step(count), step(count, gradients=OTHER, random=10 + count)] for count in range(4)]
    at_rest = [[step(count, random=1), step(count, gradients=OTHER, random=2)] for count in range(4)]
    (drawn,), (other,) = (judge_model_parts(steps, (0, 1), SPLIT) for steps in (apart, at_rest))
    assert "random" in drawn.message and "random" not in other.message


def clipped(counted: int) -> list[list[PartStep]]:
    """Four steps in which two ranks clip to a norm of 1 that counts what is not split so often."""
    parts = [(1.0 + count, (2 * (1.0 + count) ** 2 + counted * 2.0**2) ** -0.5) for count in range(4)]
    norms = [{"up.weight": scale * part, "norm.weight": scale * 2.0} for part, scale in parts]
    return [[step(count, norms=norm), step(count, norms=norm)] for count, norm in enumerate(norms)]


def test_a_norm_that_counts_replicas_is_constant_and_that_of_the_model_is_not() -> None:
    assert_says(judge_counted_norms([clipped(2)], [(0, 1)]), "DDP306")
    assert judge_counted_norms([clipped(1)], [(0, 1)]) == []


def taken(*indices: int) -> list[LoaderPass]:
    return [LoaderPass(0, 0, None, dataset="Texts", trains=True, indices=indices)]


def given(*samples: int) -> list[Inputs]:
    return [Inputs(0, count, tuple(count + one for one in samples), None) for count in range(4)]


@pytest.mark.parametrize(
    ("passes", "inputs", "words"),
    [
        ([taken(1, 2), taken(1, 2)], [given(1), given(1)], ""),
        ([taken(1, 2), taken(2, 1)], [[], []], "('Texts',)"),
        ([[], []], [given(1), given(2)], "('forward',)"),
    ],
)
def test_ranks_of_one_model_take_the_same_samples(passes: Any, inputs: Any, words: str) -> None:
    assert_says(judge_model_batches(passes, inputs, (0, 1), SPLIT), words)


# Of recipes

MODELS = [(0, 1), (2, 3)]


def test_ranks_of_one_model_are_given_the_same_samples() -> None:
    def judged(*samples: int) -> list[Finding]:
        parts = [(StepEvidence(rank, 0, {}), sample) for rank, sample in enumerate(samples)]
        empty = RandomDraws()
        return judge_shards(
            [LocalStep(part, 0.0, empty, (), 1, 0, 1.0, (), sample_fingerprints=(sample,)) for part, sample in parts],
            MODELS,
        )

    assert judged(1, 1, 2, 2) == []
    assert_says(judged(1, 2, 3, 4), "DDP516 ... of ranks (0, 1, 2, 3)")
    assert_says(judged(1, 1, 2, 3), "DDP516 ... of ranks (2, 3)")


def test_the_norms_that_the_optimizer_of_a_recipe_leaves_are_those_of_its_steps() -> None:
    def steps(counted: int) -> list[ShardedStep]:
        return [
            ShardedStep(rank, n, split=of_ranks[rank % 2].split, norms=of_ranks[rank % 2].norms)
            for n, of_ranks in enumerate(clipped(counted))
            for rank in range(4)
        ]

    assert_says(judge_norms_of_steps(steps(2), MODELS), "DDP306")
    assert judge_norms_of_steps(steps(1), MODELS) == [] == judge_norms_of_steps(steps(2), [])


def judged_by_both(steps: Any) -> Iterator[list[Finding]]:
    for judge, facts in ((judge_reducer, WrapperFacts()), (judge_sharded, ShardedFacts(is_ddp=False))):
        yield judge(steps, JudgeContext(Names(), facts, world_size=2, models=MODELS))


@pytest.mark.parametrize(
    ("gradients", "words"),
    [
        ((1, 1, 1, 1), ""),
        ((1, 2, 1, 2), "DDP301 ... which compute one model together"),
        ((1, 1, 2, 2), "DDP301 ... after backward"),
    ],
)
def test_gradients_that_differ_within_models_or_between_them(gradients: tuple[int, ...], words: str) -> None:
    values = [{"norm.weight": gradient} for gradient in gradients]
    steps = [DdpStepEvidence(rank, 0, gradients=of_rank, wrapper_calls=1) for rank, of_rank in enumerate(values)]
    for findings in judged_by_both(steps):
        assert_says(findings, words)


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ((0.4, 0.3, 0.5, 0.6), "DDP302 ... each a different loss, 0.4 and 0.3 in step 0"),
        ((0.4, 0.4, 0.5, 0.5), "DDP303 ... 2 (the number of models)"),
    ],
)
def test_losses_that_differ_within_a_model_are_told_before_their_factor(losses: tuple[float, ...], words: str) -> None:
    twice = (Difference("head.weight", 1.0, 1e-6, ratio=2.0),)
    values: dict[str, Any] = {"gradients": {"head.weight": 1}, "against_local": twice, "wrapper_calls": 1}
    for findings in judged_by_both([ShardedStep(rank, 0, **values, loss=loss) for rank, loss in enumerate(losses)]):
        assert_says(findings, words)


AT = Location("layers.py", 9)


def captured(rank: int, step: int, words: int, gradient: float, part: int) -> ReplicaCaptured:
    values = DdpStepEvidence(rank, step, parameters={"words": words, "up": part, "bias": 0 if step == 0 else rank})
    sketches = {"words": [gradient, 1.0], "up": [1.0 * rank, 1.0], "bias": [rank, 1.0]}
    averaged = {name: Sketch("f", numbers) for name, numbers in sketches.items()}
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
    "healthy",
    [
        {"words": 0},  # they go on alike: the gradients are added up after backward
        {"gradient": 0.0},  # what differs is rounding
        {"parts": (1, 1)},  # nothing is split, or all parts begin alike
        {"other": 1},  # experts, which are given samples of their own
        {"line": None},  # two models: no collective goes across
    ],
)
def test_what_is_equal_beside_layers_split_by_hand_stays_equal(healthy: dict[str, Any]) -> None:
    assert by_hand() == ["DDP301 ('words',) (0, 1, 2, 3) layers.py:9"]
    assert by_hand(**healthy) == []
