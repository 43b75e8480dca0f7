"""Judges of modules that `fully_shard` has sharded, on evidence made by hand."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from ddpcheck.findings.errors import RankFailure
from ddpcheck.findings.evidence import Entry
from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.evidence.modules import ModuleDescription, ShardedFacts
from ddpcheck.findings.evidence.script import OptimizerStep
from ddpcheck.findings.evidence.steps import DdpStepEvidence, LoopEvent, ShardedStep, StepEvidence
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import Names
from ddpcheck.rules.gradients.ddp301_not_synchronised import judge_meshes
from ddpcheck.rules.gradients.ddp502_no_sync_misuse import judge_switched_off
from ddpcheck.rules.gradients.ddp521_shard_as_whole import judge_equal_shards, judge_loaded_state
from ddpcheck.rules.gradients.reducer import judge_sharded, judge_wrapper_error, reason_updates_not_compared
from ddpcheck.rules.parameters.contribution import judge_parameters
from ddpcheck.rules.replicas.ddp208_parameter_value import judge_values_before_sharding
from ddpcheck.rules.replicas.ddp306_state_diverged import judge_shard_scales
from ddpcheck.rules.replicas.steps import judge_captured
from ddpcheck.stream.entries import PeerReceived, RankStarted, ReplicaCaptured, Sketch, WrapperMade
from ddpcheck.stream.rank_log import RankTrace
from ddpcheck.stream.rank_report import ReplicaState, WatchContext
from ddpcheck.trace.check_context import JudgeContext
from ddpcheck.trace.script_facts import WrapperTrace
from tests.reports import assert_says, only

SHARDED = ShardedFacts(is_ddp=False)
KNOWN = JudgeContext(Names(), SHARDED, world_size=2)
EQUAL = Difference("w", error=0.0, tolerance=1e-6)
MISSING = Difference("w", error=1.0, tolerance=1e-6, residual=1.0)
OFF = LoopEvent("set_requires_gradient_sync", "train.py:7", synchronises=False)
ON = LoopEvent("set_requires_gradient_sync", "train.py:9", synchronises=True)


def steps(*gradients: int, found: Difference = EQUAL, events: tuple[LoopEvent, ...] = ()) -> list[DdpStepEvidence]:
    """One step, by the fingerprint of each rank's gradient of `w`, which is `found` so far from the average."""
    return [
        DdpStepEvidence(rank, 0, gradients={"w": gradient}, against_local=(found,), events=events)
        for rank, gradient in enumerate(gradients)
    ]


ALL_REDUCE_OFF = LoopEvent("set_requires_all_reduce", "train.py:8", synchronises=False)
IGNORES = ShardedFacts(is_ddp=False, ignored=frozenset({"w"}))


@pytest.mark.parametrize(
    ("evidence", "wrapper", "words"),
    [
        (steps(1, 1), IGNORES, ""),
        (steps(1, 1, events=(OFF,)), SHARDED, ""),  # whatever was switched, these are the average
        (steps(0, 0, found=MISSING, events=(ON, OFF)), SHARDED, "DDP502 ... at train.py:7"),
        (steps(0, 0, found=MISSING, events=(OFF, ON)), SHARDED, "DDP302 ... : Under fully_shard, the gradients of"),
        (steps(1, 2, events=(ALL_REDUCE_OFF,)), SHARDED, "DDP502 ... at train.py:8"),
        (steps(1, 2), SHARDED, "DDP301 ... not communication hook ... not no DistributedDataParallel"),
        (steps(1, 2, found=MISSING), IGNORES, "DDP111"),
    ],
)
def test_gradients_of_shards(evidence: list[DdpStepEvidence], wrapper: ShardedFacts, words: str) -> None:
    assert_says(judge_sharded(evidence, replace(KNOWN, wrapper=wrapper)), words)


def test_an_update_of_shards_that_is_not_that_of_the_whole_is_told_where_gradients_are_right() -> None:
    bad = Difference("w", error=0.4, tolerance=0.1)

    def of_ranks(step: int, whole: Difference, *shards: Difference, **more: Any) -> list[ShardedStep]:
        values: dict[str, Any] = {"gradients": {"w": 1}, "against_local": (EQUAL,), "against_whole": (whole,)} | more
        return [ShardedStep(rank, step, **values, against_shard=(shards[rank],)) for rank in (0, 1)]

    updated = of_ranks(1, bad, EQUAL, EQUAL, updated_at=Location("train.py", 7))
    first = of_ranks(0, EQUAL, EQUAL, EQUAL)
    assert_says(judge_sharded(updated, KNOWN), "DDP306 ... ('w',) ... at train.py:7")
    assert_says(judge_sharded([*first, *updated], KNOWN), "DDP306 ... in steps (1,)")
    assert judge_sharded(first, KNOWN) == []
    rounded = of_ranks(1, bad, EQUAL, bad)
    assert judge_sharded(rounded, KNOWN) == []
    assert reason_updates_not_compared(rounded[1]).startswith("in w, ") and not reason_updates_not_compared(first[0])
    wrong = [replace(item, gradients={"w": 0}, against_local=(MISSING,), events=(OFF,)) for item in updated]
    assert_says(judge_sharded(wrong, KNOWN), "DDP502")


def test_parts_of_different_models_are_told_and_values_that_one_rank_hands_out_are_not() -> None:
    built = [{"a": 1, "b": 5}, {"a": 2, "b": 5}]
    assert_says(judge_values_before_sharding(built, {"a": 3, "b": 5}), "DDP208 error ('a',)")
    assert judge_values_before_sharding(built, {"a": 1, "b": 5}) == []
    assert judge_values_before_sharding([{}, {"a": 2}], {"a": 3}) == []


def used(*states: Sequence[str]) -> list[StepEvidence]:
    """Steps of two ranks by what `v` does in each, on each rank."""
    uses = [(n, step, of_ranks[n]) for n in (0, 1) for step, of_ranks in enumerate(states)]
    return [StepEvidence(n, step, {"w": "contributes", "v": state}) for n, step, state in uses]


def test_a_parameter_that_some_ranks_or_none_use() -> None:
    some, none = used(("contributes", "missing")), ("missing", "missing")
    reducing = ShardedFacts(is_ddp=False, reduces_unused=True)
    assert_says(judge_parameters(some, SHARDED, Names()), "DDP104 ... set_reduce_scatter_unused_params(True)")
    assert_says(judge_parameters(some, reducing, Names()), "")
    assert_says(judge_parameters(used(none, none), SHARDED, Names()), "warning ... not find_unused_parameters")
    assert_says(judge_parameters(used(("contributes",) * 2, none), SHARDED, Names()), "")


def failing(message: str, place: str, location: str = "") -> list[RankFailure]:
    return [RankFailure(rank, "raised", message, 0.0, place=place, location=location) for rank in (0, 1)]


def test_what_shards_raise_in_a_forward_pass() -> None:
    mixed = "RuntimeError: aten.addmm.default got mixed torch.Tensor and DTensor"
    in_forward = failing(mixed, "step 0: fully_shard forward", "loss.py:3")
    assert_says(judge_wrapper_error(in_forward, {}, KNOWN), "DDP501 ... at loss.py:3")
    assert judge_wrapper_error(failing(mixed, "step 0: optimizer"), {}, KNOWN) == []
    plain = "rank 0 raised AttributeError: 'Parameter' object has no attribute '_local_tensor'"
    in_forward = failing(plain, "step 0: fully_shard forward")
    known = replace(KNOWN, wrapper=ShardedFacts(is_ddp=False, ignored=frozenset({"head.weight"})))
    assert_says(judge_wrapper_error(in_forward, {}, known), f"DDP503 ... ('head.weight',) ... | {plain} |")
    assert judge_wrapper_error(in_forward, {}, KNOWN) == []  # every parameter is a shard


def of_optimizer(*scales: dict[str, float]) -> list[OptimizerStep]:
    where = Location("train.py", 9)
    return [OptimizerStep(0, 3, {}, where, shards=2, shard_scales=of_rank) for of_rank in scales]


def test_a_factor_of_each_rank_for_all_its_shards_is_that_of_their_norm() -> None:
    for scales in (
        ({"0/w": 0.5, "0/b": 0.5}, {"0/w": 0.5, "0/b": 0.50001}),  # clipped by the norm of the whole
        ({"0/w": 0.5, "0/b": 0.7}, {"0/w": 0.2, "0/b": 0.9}),  # each element by itself
        ({"0/w": 0.5}, {"0/w": 0.2}),  # of one shard nothing is known
        ({"0/w": math.inf, "0/b": math.inf}, {"0/w": 1.0, "0/b": 1.0}),
    ):
        assert judge_shard_scales([of_optimizer(*scales)]) == []
    alike, apart = (of_optimizer(*({"0/w": n, "0/b": n} for n in scales)) for scales in ((1.0, 1.0), (0.5, 0.2)))
    assert_says(judge_shard_scales([alike, apart]), "DDP306 ... at train.py:9 in steps (3,)")


@pytest.mark.parametrize(
    ("states", "code"),
    [
        ([(0.5, 0.2), (0.5, 0.2)], "DDP521"),
        ([(0.5, 0.2), (0.4, 0.3)], ""),  # of each rank
        ([(0.5, 0.5), (0.5, 0.5)], ""),  # what parts of two parameters have alike may be a constant
    ],
)
def test_a_state_that_is_that_of_one_rank_before_the_first_step(states: Sequence[Any], code: str) -> None:
    loaded = [
        {f"{n}.weight: exp_avg": size for n, size in enumerate(sizes)} | {"0.weight: step": 3.0} for sizes in states
    ]
    assert_says(judge_loaded_state([ShardedStep(rank, 0, loaded=state) for rank, state in enumerate(loaded)]), code)


def test_steps_without_a_gradient_are_told_at_the_switch_that_is_off() -> None:
    passes = (LoopEvent("forward"), LoopEvent("backward", "train.py:7"), LoopEvent("step", "train.py:8"))
    reduced = (LoopEvent("forward", synchronises=True), *passes[1:])
    for events, words in (
        ((OFF, *passes), "DDP502 ... of ranks () at train.py:7 ... in every backward pass"),
        ((ON, OFF, *passes), "at train.py:7 ... in the last backward pass of a step"),
        (passes, "at train.py:8"),  # not known
        ((OFF, ON, *reduced), ""),
    ):
        assert_says(judge_switched_off([DdpStepEvidence(rank, 0, events=events) for rank in (0, 1)]), words)


def captured(rank: int, shard: int, value: int, *, own: Sequence[float], reduced: Sequence[float]) -> ReplicaCaptured:
    """One of four ranks, two of which hold each shard of `w`; `own`: a number of its gradient for each of them."""
    values = DdpStepEvidence(rank, 2, {"w": 10 + shard}, {"w": value}, buffers={"seen": 1})
    parts = {f"{number}/w": Sketch("f", [one]) for number, one in enumerate(own)}
    left, eps = {"w": Sketch("f", reduced)}, {"w": 1e-7}
    return ReplicaCaptured(0, 2, ReplicaState(ModuleDescription(), values), parts, left, eps, shard=shard)


def judged(*ranks: ReplicaCaptured) -> list[Finding]:
    context = WatchContext(Names(), SHARDED, 4, trainable=("w",))
    made = WrapperMade("Net", (0, 1, 2, 3), context, None, by_library=False, classes={})
    return judge_captured(made, 2, ranks, first=True)


OWN = ((1.0, 5.0), (2.0, 6.0), (3.0, 7.0), (4.0, 8.0))  # their average is 2.5 and 6.5


def test_what_is_reduced_onto_a_shard_is_the_average_of_that_part_on_all_ranks_and_replicas_are_equal() -> None:
    def of_ranks(*averages: float, value: int = 0) -> list[ReplicaCaptured]:
        values = [0, 1, value, 1]
        return [captured(n, n % 2, values[n], own=own, reduced=[averages[n % 2]]) for n, own in enumerate(OWN)]

    assert judged(*of_ranks(2.5, 6.5)) == []
    assert only(judged(*of_ranks(10.0, 26.0))).code == "DDP303"
    finding = only(judged(*of_ranks(2.5, 6.5, value=7)))
    assert (finding.code, finding.subjects) == ("DDP306", ("w",)) and set(finding.ranks) <= {0, 2}


def shard_of(
    rank: int, shard: int, step: int = 0, *, parts: tuple[str, ...] = ("w",), **values: int
) -> ReplicaCaptured:
    state = ReplicaState(ModuleDescription(), DdpStepEvidence(rank, step, parameters=values))
    return ReplicaCaptured(0, step, state, shard=shard, parts=parts)


def test_ranks_that_all_hold_the_same_shard_are_told() -> None:
    assert_says(judge_equal_shards([shard_of(0, 0, w=7, one=1), shard_of(1, 1, w=7, one=1)]), "DDP521 ... ('w',)")
    several = ("w", "v")
    healthy = [
        [shard_of(0, 0, w=7), shard_of(1, 1, w=8)],
        [shard_of(0, 0, w=7), shard_of(1, 0, w=7)],  # replicas
        [shard_of(0, 0, parts=(), w=7), shard_of(1, 1, parts=(), w=7)],  # zeros, say
        [shard_of(n, n, parts=several, w=7, v=n) for n in (0, 1)],  # one parameter is made of equal blocks
        [shard_of(0, 0, w=7), shard_of(1, 1, parts=(), w=8)],
    ]
    assert not any(map(judge_equal_shards, healthy))


def meshes(*last: int, first: tuple[int, ...] = (1, 2, 1, 2), others: tuple[Entry, ...] = ()) -> list[Finding]:
    """Four ranks with a mesh for each two of them, by their values of `w` before the first step and the last one."""
    wrappers = []
    for ranks in ((0, 1), (2, 3)):
        context = WatchContext(Names(), SHARDED, 2, trainable=("w",), sharded=SHARDED)
        made = WrapperMade("Net", ranks, context, Location("train.py", 3), by_library=False, classes={})
        logs = [[made, shard_of(n, n % 2, 0, w=first[n]), shard_of(n, n % 2, 8, w=last[n]), *others] for n in ranks]
        traces = [RankTrace(RankStarted(n, 4, "gloo"), log, []) for n, log in zip(ranks, logs, strict=True)]
        wrappers.append(WrapperTrace(0, made, traces))
    return judge_meshes(wrappers, 4)


def test_meshes_that_train_one_model_apart_are_a_warning() -> None:
    assert_says(meshes(3, 4, 5, 6), "DDP301 warning ... at train.py:3 in")
    assert meshes(3, 4, 3, 4) == []  # averaged in another way
    assert meshes(3, 4, 5, 6, first=(1, 2, 8, 9)) == []  # two models
    assert meshes(3, 4, 5, 6, others=(PeerReceived(),)) == []  # stages of one model, of the same seed
