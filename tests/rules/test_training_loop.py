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
from ddpcheck.findings.rules import Severity
from ddpcheck.findings.wording import Names
from ddpcheck.rules.data.ddp510_shared_augmentation_seed import judge_draws
from ddpcheck.rules.data.loaders import judge_samples
from ddpcheck.rules.gradients.ddp517_gradients_discarded import MIN_DISCARDED_STEPS
from ddpcheck.rules.gradients.reducer import judge_loop
from ddpcheck.rules.optimizers.ddp504_stale_optimizer import judge_optimizer
from ddpcheck.rules.replicas.ddp515_values_changed_after_wrapping import judge_values_changed
from tests.reports import only


def event(kind: str, line: int = 0, **more: Any) -> LoopEvent:
    return LoopEvent(kind, location=f"train.py:{line}" if line else "", **more)


def steps(*events: LoopEvent, ranks: int = 2) -> list[DdpStepEvidence]:
    return [DdpStepEvidence(rank, 0, events=events) for rank in range(ranks)]


FORWARD, LOCAL, BACKWARD = event("forward", synchronises=True), event("forward"), event("backward", 5)
CALLED, ENTER, LEAVE = event("no_sync", 3), event("enter no_sync", 3), event("leave no_sync")
SYNCED = (FORWARD, event("backward"))


def test_a_loop_in_order_is_clean() -> None:
    for events in (SYNCED, (CALLED, ENTER, LOCAL, BACKWARD, LEAVE, *SYNCED), (FORWARD, BACKWARD, *SYNCED)):
        assert judge_loop(steps(*events), unequal=False) == []


def test_no_sync_around_every_forward() -> None:
    finding = only(judge_loop(steps(CALLED, ENTER, LOCAL, LEAVE, event("backward"), event("step")), unequal=True))
    assert (finding.code, finding.severity, finding.location) == ("DDP502", Severity.ERROR, Location("train.py", 3))


def test_what_older_versions_told_without_the_passes() -> None:
    for under, code in ((event("enter no_sync"), "DDP502"), (event("forward inside", 3), "DDP501")):
        finding = only(judge_loop(steps(under, event("step", 9)), unequal=True))
        assert (finding.code, finding.location) == (code, Location("train.py", 9 if code == "DDP502" else 3))
    assert only(judge_loop(steps(event("zero_grad", 7, discarded=("a",))), unequal=True)).code == "DDP517"


@pytest.mark.parametrize(
    ("before", "names"),
    [((CALLED, event("enter no_sync")), True), ((), False), ((CALLED,), False), ((CALLED, ENTER, LEAVE), False)],
    ids=["no_sync", "by the flag", "never entered", "left before"],
)
def test_a_micro_batch_after_the_reduction(before: tuple[LoopEvent, ...], names: bool) -> None:
    """The line to edit is that which enters no_sync, if that has put the average off; else the optimizer step."""
    finding = only(judge_loop(steps(*SYNCED, *before, LOCAL, BACKWARD, LEAVE, event("step", 9)), unequal=True))
    assert (finding.code, finding.location) == ("DDP502", Location("train.py", 3 if names else 9))
    told = f"{' '.join(finding.evidence)} {finding.what_to_do}"
    assert ("train.py:3" in finding.evidence[0] and "train.py:3" in finding.what_to_do) is names
    assert ("require_backward_grad_sync" in told) is not names


def test_the_line_that_sets_the_flag_is_the_one_to_edit() -> None:
    events = (*SYNCED, LOCAL, BACKWARD, event("step", 9), event(SYNC_SETTING, 2))
    finding = only(judge_loop(steps(*events), unequal=True))
    assert (finding.code, finding.location) == ("DDP502", Location("train.py", 2))
    assert "the optimizer steps at train.py:9" in finding.evidence


@pytest.mark.parametrize(
    "events",
    [(CALLED, FORWARD, BACKWARD, *SYNCED), (FORWARD, CALLED, ENTER, BACKWARD, LEAVE, *SYNCED)],
    ids=["not entered", "around backward alone"],
)
def test_no_sync_without_effect_is_only_wasteful(events: tuple[LoopEvent, ...]) -> None:
    finding = only(judge_loop(steps(*events), unequal=False))
    assert (finding.code, finding.severity, finding.location) == ("DDP502", Severity.WARNING, Location("train.py", 3))


def test_a_second_backward_without_a_forward_of_its_own() -> None:
    for events in ((FORWARD, FORWARD, BACKWARD, event("backward")), (FORWARD, BACKWARD, event("backward"))):
        finding = only(judge_loop(steps(*events), unequal=True))
        assert (finding.code, finding.location) == ("DDP509", Location("train.py", 5))
        assert judge_loop(steps(*events), unequal=False) == []


STEP = event("step", 9)


@pytest.mark.parametrize(
    "events",
    [(*SYNCED, LOCAL, BACKWARD, STEP), (FORWARD, BACKWARD, STEP, LOCAL, BACKWARD, STEP)],
    ids=["the last one", "a whole step"],
)
def test_a_step_on_gradients_that_were_not_averaged(events: tuple[LoopEvent, ...]) -> None:
    finding = only(judge_loop(steps(*events), unequal=True))
    assert (finding.code, finding.severity, finding.location) == ("DDP502", Severity.ERROR, Location("train.py", 9))


def test_passes_that_are_averaged_in_the_end_are_clean() -> None:
    for events in ((LOCAL, BACKWARD, LOCAL, BACKWARD, *SYNCED, STEP), (*SYNCED, STEP, LOCAL, BACKWARD)):
        assert judge_loop(steps(*events), unequal=True) == []


def test_gradients_that_are_zeroed_before_anybody_used_them() -> None:
    lost = event("zero_grad", 7, discarded=("a",))
    finding = only(judge_loop(steps(LOCAL, BACKWARD, lost, *SYNCED), unequal=False))
    assert (finding.code, finding.location) == ("DDP517", Location("train.py", 7)) and "train.py:5" in finding.evidence[
        0
    ]


def test_gradients_that_are_zeroed_in_steps_one_after_the_other() -> None:
    for in_a_row, codes in ((1, []), (MIN_DISCARDED_STEPS, ["DDP517"])):
        lost = event("zero_grad", 7, discarded=("a",), in_a_row=in_a_row)
        assert [one.code for one in judge_loop(steps(*SYNCED, lost), unequal=False)] == codes


def local(rank: int, rows: tuple[int, ...], *, norm: float | None = None) -> LocalStep:
    step = StepEvidence(rank, 0, {})
    norm = float(rank + 1) if norm is None else norm
    return LocalStep(
        step,
        1.0,
        RandomDraws(),
        (),
        len(rows),
        0,
        norm,
        (),
        sample_fingerprints=rows,
        global_sample_fingerprints=tuple(range(6)),
    )


def test_shards_that_cover_the_batch_are_clean_also_where_samples_are_equal() -> None:
    assert judge_samples([local(0, (0, 1, 2)), local(1, (3, 4, 5))], gradients_differ=True) == []
    twins = [replace(local(rank, (7, 7)), global_sample_fingerprints=(7, 7, 7, 7)) for rank in (0, 1)]
    assert judge_samples(twins, gradients_differ=True) == []
    assert judge_samples([local(0, ()), local(1, ())], gradients_differ=True) == []


def test_samples_on_several_ranks() -> None:
    finding = only(judge_samples([local(0, (0, 1, 2)), local(1, (2, 3, 4))], gradients_differ=True))
    assert finding.code == "DDP505" and "1 sample on rank 1 is on rank 0 too" in finding.evidence
    assert "1 of 6 samples of the global batch are on no rank" in finding.evidence
    everything = tuple(range(6))
    assert (
        judge_samples([local(0, everything), local(1, everything)], gradients_differ=False) == []
    )  # each may use its own part
    same = [local(rank, everything, norm=1.0) for rank in (0, 1)]
    assert only(judge_samples(same, gradients_differ=False)).code == "DDP505"


def test_samples_on_no_rank() -> None:
    shards = [local(0, (0, 1)), local(1, (2, 3))]
    finding = only(judge_samples(shards, gradients_differ=True))
    assert (finding.code, finding.severity) == ("DDP519", Severity.WARNING) and "2 of 6" in finding.message
    assert judge_samples(shards, gradients_differ=False) == []
    assert judge_samples([local(0, (10, 11)), local(1, (12, 13))], gradients_differ=True) == []  # augmented on the way


def test_ranks_that_draw_the_same_numbers() -> None:
    draw = SharedDraw("bernoulli_", "drop", Location("model.py", 4), 17)
    finding = only(judge_draws([[draw], [draw]]))
    assert (finding.code, finding.subjects, finding.location) == ("DDP510", ("drop",), Location("model.py", 4))
    assert judge_draws([[draw], [replace(draw, fingerprint=18)]]) == [] and judge_draws([[draw]]) == []


def wrapped(**more: Any) -> WrappedModule:
    return WrappedModule(WrapperFacts(), {}, {}, {"a": 1, "b": 2}, {}, None, "DistributedDataParallel", False, **more)


def test_values_that_were_changed_after_wrapping_on_a_rank() -> None:
    here, loaded = {"a": 1, "b": 2}, {"a": 9, "b": 2}
    finding = only(judge_values_changed([here, here], [loaded, here]))
    assert (finding.code, finding.subjects, finding.ranks) == ("DDP515", ("a",), (0,))
    assert (
        judge_values_changed([here, here], [loaded, loaded]) == []
        and judge_values_changed([here, here], [here, here]) == []
    )
    assert judge_values_changed([{}, here], [loaded, here]) == []


def test_parameters_that_no_optimizer_moves() -> None:
    stays = DdpStepEvidence(0, 0, {"a": 5, "b": 6}, {"a": 1, "b": 2}, parameters_after_backward={"a": 1, "b": 3})
    finding = only(judge_optimizer([wrapped(not_in_optimizer=("a", "b"))], [stays], Names()))
    assert (finding.code, finding.subjects, finding.severity) == ("DDP504", ("a",), Severity.WARNING)
    stale = only(judge_optimizer([wrapped(not_in_optimizer=("a",), foreign_tensors=2)], [stays], Names()))
    assert stale.severity is Severity.ERROR and "2 tensors" in stale.evidence[0]
    assert (
        judge_optimizer([wrapped(not_in_optimizer=("b",))], [stays], Names()) == []
    )  # moves, by copies of its own perhaps
    assert judge_optimizer([wrapped()], [stays], Names()) == []
