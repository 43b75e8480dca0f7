"""DDP5xx from hand-made evidence: the loop, the data and the optimizer, each with a twin of which nothing is said."""

from typing import Any

import pytest

from ddpcheck.findings.evidence.modules import WrappedModule, WrapperFacts
from ddpcheck.findings.evidence.steps import (
    SYNC_SETTING,
    DdpStepEvidence,
    LocalStep,
    LoopEvent,
    RandomDraws,
    SharedDraw,
    StepEvidence,
)
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.findings.wording import Names
from ddpcheck.rules.data.ddp510_shared_augmentation_seed import judge_forward_draws
from ddpcheck.rules.data.loaders import judge_samples
from ddpcheck.rules.gradients.ddp517_gradients_discarded import MIN_DISCARDED_STEPS
from ddpcheck.rules.gradients.reducer import judge_loop
from ddpcheck.rules.optimizers.ddp504_stale_optimizer import judge_optimizer
from ddpcheck.rules.replicas.ddp515_values_changed_after_wrapping import judge_values_changed
from tests.reports import assert_says


def event(kind: str, line: int = 0, **more: Any) -> LoopEvent:
    return LoopEvent(kind, location=f"train.py:{line}" if line else "", **more)


def steps(*events: LoopEvent) -> list[DdpStepEvidence]:
    return [DdpStepEvidence(rank, 0, events=events) for rank in (0, 1)]


STEP, LOST = event("step", 9), event("zero_grad", 7, discarded=("a",))
FORWARD, LOCAL, BACKWARD = event("forward", synchronises=True), event("forward"), event("backward", 5)
CALLED, ENTER, LEAVE = event("no_sync", 3), event("enter no_sync", 3), event("leave no_sync")
SYNCED = (FORWARD, event("backward"))
LATE = (LOCAL, BACKWARD, LEAVE, STEP)
TWICE = (FORWARD, FORWARD, BACKWARD, event("backward"))


@pytest.mark.parametrize(
    ("events", "words", "unequal"),
    [
        ((CALLED, ENTER, LOCAL, BACKWARD, LEAVE, *SYNCED), "", False),
        ((FORWARD, BACKWARD, *SYNCED), "", False),
        (TWICE, "", False),
        ((LOCAL, BACKWARD, LOCAL, BACKWARD, *SYNCED, STEP), "", True),
        ((*SYNCED, STEP, LOCAL, BACKWARD), "", True),
        ((*SYNCED, replace(LOST, in_a_row=1)), "", False),
        ((CALLED, ENTER, LOCAL, LEAVE, event("backward"), event("step")), "DDP502 error at 3", True),
        ((event("enter no_sync"), STEP), "DDP502 error at 9", True),  # of older versions, as the next two
        ((event("forward inside", 3), STEP), "DDP501 error at 3", True),
        ((LOST,), "DDP517 error at 7", True),
        ((*SYNCED, LOCAL, BACKWARD, STEP), "DDP502 error at 9", True),  # the last pass is not averaged
        ((FORWARD, BACKWARD, STEP, LOCAL, BACKWARD, STEP), "DDP502 error at 9", True),  # a step is not averaged
        (TWICE, "DDP509 error at 5", True),  # a second backward pass
        ((CALLED, FORWARD, BACKWARD, *SYNCED), "DDP502 warning at 3", False),  # not entered
        ((FORWARD, CALLED, ENTER, BACKWARD, LEAVE, *SYNCED), "DDP502 warning at 3", False),  # backward alone
        ((*SYNCED, CALLED, event("enter no_sync"), *LATE), "DDP502 error at 3", True),  # after the reduction
        ((*SYNCED, CALLED, *LATE), "DDP502 error at 9", True),  # never entered
        ((*SYNCED, CALLED, ENTER, LEAVE, *LATE), "DDP502 error at 9", True),  # left before
        ((*SYNCED, *LATE, event(SYNC_SETTING, 2)), "DDP502 error at 2", True),
        ((LOCAL, BACKWARD, LOST, *SYNCED), "DDP517 error at 7", False),  # before anybody used them
        ((*SYNCED, replace(LOST, in_a_row=MIN_DISCARDED_STEPS)), "DDP517 error at 7", False),
    ],
)
def test_the_line_that_breaks_the_loop(events: tuple[LoopEvent, ...], words: str, unequal: bool) -> None:
    assert_says(judge_loop(steps(*events), unequal=unequal), words.replace(" at ", " ... at train.py:"))


def local(rank: int, rows: tuple[int, ...], *, norm: float = 0.0) -> LocalStep:
    step = LocalStep(StepEvidence(rank, 0, {}), 1.0, RandomDraws(), (), len(rows), 0, norm or rank + 1.0, ())
    return replace(step, sample_fingerprints=rows, global_sample_fingerprints=tuple(range(6)))


ALL = tuple(range(6))


@pytest.mark.parametrize(
    ("shards", "gradients_differ", "words"),
    [
        ([local(0, (0, 1, 2)), local(1, (3, 4, 5))], True, ""),
        ([local(0, (0, 1, 2)), local(1, (2, 3, 4))], True, "DDP505 ... 1 sample on rank 1 is on rank 0 too ... 1 of 6"),
        ([local(0, ()), local(1, ())], True, ""),
        ([local(0, ALL), local(1, ALL)], False, ""),  # each may use its own part
        ([local(0, ALL, norm=1.0), local(1, ALL, norm=1.0)], False, "DDP505"),
        ([local(0, (0, 1)), local(1, (2, 3))], True, "DDP519 warning ... 2 of 6"),
        ([local(0, (10, 11)), local(1, (12, 13))], True, ""),  # augmented on the way
    ],
)
def test_samples_of_the_global_batch(shards: list[LocalStep], gradients_differ: bool, words: str) -> None:
    assert_says(judge_samples(shards, gradients_differ=gradients_differ), words)


def test_ranks_that_draw_the_same_numbers() -> None:
    draw = SharedDraw("bernoulli_", "drop", Location("model.py", 4), 17)
    assert_says(judge_forward_draws([[draw], [draw]]), "DDP510 ... ('drop',) ... at model.py:4")
    assert judge_forward_draws([[draw], [replace(draw, fingerprint=18)]]) == [] and judge_forward_draws([[draw]]) == []


def wrapped(**more: Any) -> WrappedModule:
    return WrappedModule(WrapperFacts(), {}, {}, {"a": 1, "b": 2}, {}, None, "DistributedDataParallel", False, **more)


def test_values_that_were_changed_after_wrapping_on_a_rank() -> None:
    here, loaded = {"a": 1, "b": 2}, {"a": 9, "b": 2}
    assert_says(judge_values_changed([here, here], [loaded, here]), "DDP515 ... ('a',) of ranks (0,)")
    for made, now in (([here, here], [loaded, loaded]), ([here, here], [here, here]), ([{}, here], [loaded, here])):
        assert judge_values_changed(made, now) == []


def test_parameters_that_no_optimizer_moves() -> None:
    stays = DdpStepEvidence(0, 0, {"a": 5, "b": 6}, {"a": 1, "b": 2}, parameters_after_backward={"a": 1, "b": 3})
    for more, words in (
        ({"not_in_optimizer": ("a", "b")}, "DDP504 warning ('a',)"),
        ({"not_in_optimizer": ("a",), "foreign_tensors": 2}, "DDP504 error ... 2 tensors"),
        ({"not_in_optimizer": ("b",)}, ""),  # moves, by copies of its own perhaps
        ({}, ""),
    ):
        assert_says(judge_optimizer([wrapped(**more)], [stays], Names()), words)
