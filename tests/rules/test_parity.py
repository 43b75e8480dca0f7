"""DDP3xx from hand-made differences: each pattern is named, each has a twin on which there is nothing to say."""

from collections.abc import Sequence
from typing import Any

import pytest

from ddpcheck.findings.errors import RankFailure
from ddpcheck.findings.evidence.gradients import Coupling, Difference, Fit, LossTerm, ShardAnalysis, WeightedFit
from ddpcheck.findings.evidence.modules import GradientHook, WrapperFacts
from ddpcheck.findings.evidence.steps import Call, DdpStepEvidence
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.rules import Severity
from ddpcheck.findings.wording import Names
from ddpcheck.rules.gradients.reducer import judge_reducer, judge_wrapper_error
from ddpcheck.rules.loss.ddp307_nothing_compared import ALL_MISSING, judge_nothing_compared
from ddpcheck.rules.loss.ddp308_nondeterministic import judge_repeat
from ddpcheck.rules.loss.ddp309_collective_without_gradient import fix_without_gradient
from ddpcheck.rules.loss.single_process import judge_single_process
from ddpcheck.rules.replicas.steps import judge_state
from ddpcheck.trace.check_context import JudgeContext, LocalFacts
from tests.reports import assert_says, only

KNOWN = JudgeContext(names=Names(), wrapper=WrapperFacts(), world_size=2, local=LocalFacts(shard_sizes=(4, 4)))
NAMES = ("a", "b", "c")
TOLERANCE = 1e-6


def with_local(known: JudgeContext = KNOWN, **more: Any) -> JudgeContext:
    return replace(known, local=replace(known.local, **more))


def good(name: str) -> Difference:
    return Difference(name, 1e-7, TOLERANCE)


def scaled(name: str, ratio: float) -> Difference:
    return Difference(name, abs(ratio - 1), TOLERANCE, ratio=ratio, residual=1e-8, elements=4, elements_beyond=4)


def off(name: str, error: float = 0.5) -> Difference:
    """Away from its reference, by no constant factor."""
    beyond = {"elements": 4, "elements_beyond": 3, "worst_index": (1, 0), "worst_got": 2.0}
    return Difference(name, error, TOLERANCE, ratio=0.8, residual=error * 0.9, **beyond)


def ddp_step(rank: int, step: int = 0, **more: Any) -> DdpStepEvidence:
    prints = {name: index for index, name in enumerate(NAMES)}
    base = DdpStepEvidence(rank, step, dict(prints), dict(prints), dict(prints), dict(prints), dict(prints))
    return replace(base, against_local=more.pop("against_local", tuple(map(good, NAMES))), **more)


def two_ranks(steps: int = 2, **of_rank_1: Any) -> list[DdpStepEvidence]:
    return [ddp_step(rank, step, **(of_rank_1 if rank else {})) for step in range(steps) for rank in range(2)]


# --- The reducer ---------------------------------------------------------------------------------------------------


APART = {"gradients": {"a": 7, "b": 8, "c": 9}}
BYPASS = {"wrapper_calls": 0, "inner_calls": 1, **APART}
UNCALLED = {"wrapper_calls": 0, "inner_calls": 0, **APART}
UNEQUAL = ddp_step(1, 1, gradients={"a": 0, "b": 9, "c": 2}, against_local=(off("b"),))
IGNORES = replace(KNOWN, wrapper=WrapperFacts(ignored=frozenset({"b"})))
IN_LOSS = replace(KNOWN, loss_location=Location("loss.py", 3))
HOOKED_WRAPPER = replace(KNOWN, wrapper=WrapperFacts(comm_hook="sum_hook"))
BROADCASTS = with_local(replace(KNOWN, broadcasts_buffers=True), differing_buffers=("norm.running_mean",))


def equal(*against: Difference, **more: Any) -> list[DdpStepEvidence]:
    return [ddp_step(rank, against_local=against, **more) for rank in (0, 1)]


def all_scaled(ratio: float) -> list[DdpStepEvidence]:
    return equal(*(scaled(name, ratio) for name in NAMES))


@pytest.mark.parametrize(
    ("evidence", "known", "words"),
    [
        ([], KNOWN, ""),
        (two_ranks(), KNOWN, ""),
        (two_ranks(wrapper_calls=2, inner_calls=2), KNOWN, ""),
        (two_ranks(wrapper_calls=0, inner_calls=0), KNOWN, ""),  # gradients are equal
        ([*two_ranks(1), ddp_step(0, 1), UNEQUAL], KNOWN, "DDP301 error ('b',) ... in steps (1,) ... worst at (1, 0)"),
        (two_ranks(**APART), KNOWN, "DDP301 error ('a', 'b', 'c') ... in steps () ... all 3"),
        (two_ranks(gradients={"a": 0, "b": 9, "c": 2}), IGNORES, "DDP111"),
        (two_ranks(**BYPASS), KNOWN, "DDP501 ... of ranks (1,) ... in steps ()"),
        (two_ranks(**UNCALLED), IN_LOSS, "DDP501 ... at loss.py:3 ... never calls the wrapper"),
        (all_scaled(0.5), KNOWN, "DDP303 ... 1/2 (one over the world size)"),
        (all_scaled(2.0), KNOWN, "DDP303 ... 2 (the world size) ... Average once"),
        (all_scaled(2.0), HOOKED_WRAPPER, "DDP303 ... communication hook"),
        (all_scaled(3.25), KNOWN, "DDP303 ... 3.25 times"),
        (equal(scaled("a", 0.5), scaled("b", 2.0)), KNOWN, "DDP302 error ('a', 'b')"),
        (equal(scaled("a", 0.5), off("b")), KNOWN, "DDP302 error ('a', 'b')"),
        (equal(off("a"), wrapper_calls=2, inner_calls=2), BROADCASTS, "DDP311 error ('norm.running_mean',)"),
        (equal(off("a"), wrapper_calls=2, inner_calls=2), replace(KNOWN, broadcasts_buffers=True), "DDP302"),
    ],
)
def test_gradients_under_a_wrapper(evidence: Sequence[DdpStepEvidence], known: JudgeContext, words: str) -> None:
    assert_says(judge_reducer(evidence, known), words)


def test_gradients_that_differ_beside_ignored_ones_are_a_finding_of_their_own() -> None:
    findings = judge_reducer(two_ranks(gradients={"a": 7, "b": 9, "c": 2}), IGNORES)
    assert [finding.code for finding in findings] == ["DDP111", "DDP301"]


# --- The single process --------------------------------------------------------------------------------------------


COUPLED = LossTerm(error=0.5, weights=(0.5, 0.5), residual=0.4, coupled=True)
UNKNOWN, WEIGHED = replace(COUPLED, coupled=None), replace(COUPLED, coupled=False)
SUM = LossTerm(error=0.5, weights=(1.0, 1.0), residual=1e-9, coupled=False)
COUNTED = LossTerm(error=0.2, weights=(0.625, 0.375), residual=1e-9, coupled=False)
ROOTED = replace(COUNTED, coupled=True)
RIGHT = LossTerm(error=1e-9, weights=(0.5, 0.5), residual=1e-9, coupled=False)
HALVED = (RIGHT, replace(RIGHT, ratio=0.5))
LOSS, LINE = Location("loss.py", 7), Location("model.py", 9)
PARTS = [replace(COUNTED, location=LOSS, error=error) for error in (0.2, 0.1)]
PENALTY = replace(SUM, name="loss['penalty']", location=LOSS)
OF_BATCH_NORM = "warning ('norm',) ... at model.py:3 ... norm (BatchNorm1d) ... 1 of 2 gradients differ from the"
CALL = Call("all_reduce", "0", (0, 1), "float32 of (3,)", location="model.py:5", elements=3, carries_gradient=True)
HOOK = GradientHook("a tensor hook (clip)", Location("model.py", 7))


def analysis(*terms: LossTerm, **more: Any) -> ShardAnalysis:
    return replace(ShardAnalysis(terms=terms or (COUPLED,), against_shards=Fit(1.0, 1e-9)), **more)


OFF_A = (off("a"),)


def case(codes: str, *terms: LossTerm, of: Any = OFF_A, known: Any = KNOWN, words: str = "", **more: Any) -> Any:
    """A row: the codes of what is found, and words of the first finding."""
    return codes.split(), of, known, analysis(*terms, **more), words


NORM = {"coupling": Coupling("norm", "BatchNorm1d")}
FROZEN = NORM | {"frozen": ("norm",)}
CRITERION = {"coupling": Coupling("criterion", "WeightedLoss")}
MEET, SCALES = {"coupling": Coupling(line=LINE)}, {"coupling": Coupling(line=LINE, scaled=True)}
ELSEWHERE = {"against_shards": Fit(0.7, 0.4)}
TERMS_ALONE = {"against_shards": Fit(0.8, 0.3), "terms_residual": 1e-9}
OF_RANKS = {"against_shards": Fit(1.1, 0.3), "rank_weights": WeightedFit((0.6, 0.4), 1e-9)}
BY_RANK = {"against_shards": Fit(1.0, 0.4), "rank_weights": WeightedFit((0.25, 0.75), 1e-9)}
ROUGH = {"against_shards": Fit(0.9492, 0.045), "against_global": Fit(0.9492, 0.045)}
GLOBAL = {"against_global": Fit(0.5, 1e-9)}
OWN_PART = GLOBAL | {"of": [scaled("a", 0.5)], "against_shards": Fit(1.0, 0.4), "shard_losses": (1.0, 2.0)}
IN_ALL = {"against_shards": Fit(0.5, 1e-9), "against_global": Fit(0.5, 1e-9)}
QUARTER = [scaled("a", 0.25)]
IN_HALF, DREW, CALLED = [scaled("a", 0.5)], with_local(drew_from=("numpy",)), with_local(calls=(CALL,))
EXCHANGED = with_local(calls=(replace(CALL, carries_gradient=False),))
DIFFERENTIATED = with_local(calls=(replace(CALL, differentiable=True),))
GATHERED = with_local(calls=(replace(CALL, operation="all_gather", differentiable=True),))
NONLINEAR = replace(KNOWN, nonlinear=("a", "b"), hooks=(HOOK,))
HOOKED = with_local(replace(KNOWN, hooks=(HOOK,)), losses=(1.0, 2.0))
HERE = replace(RIGHT, weights=(0.6, 0.4), rank_weights=(0.6, 0.4))
OF_NORM = replace(KNOWN, module_locations={"norm": Location("model.py", 3)})
NAMED = replace(COUNTED, weights=(0.75, 0.25), count="batch['mask']", counts=(9.0, 3.0))


@pytest.mark.parametrize(
    ("expected", "differences", "known", "facts", "words"),
    [
        case("", of=[*map(good, NAMES)]),
        case("DDP304", **NORM, of=[off("a", 0.25), good("b")], known=OF_NORM, words=OF_BATCH_NORM),
        case("DDP305", SUM, of=IN_HALF, **GLOBAL, words="error ('loss',) ... sums over samples ... 1/2"),
        case("DDP305", RIGHT, PENALTY, words="at loss.py:7 ... : Term 2 of 2 of the loss (loss['penalty'] at"),
        case("DDP305", COUNTED, RIGHT, SUM, words=": Term 3 of 3 ... | term 1 of 3 of the loss is normalised by a"),
        case("DDP305", *PARTS, words="at loss.py:7 ... : The loss is normalised by a count ... not | term"),
        case("DDP305", RIGHT, *PARTS, words=": Term 2 of 2 of the loss (loss.py:7)"),
        case("DDP305 DDP304", SUM, COUPLED),
        case("DDP312", UNKNOWN, words="error ('loss',) ... no cause was found"),
        case("DDP305 DDP312", SUM, UNKNOWN),
        case("DDP305", RIGHT, WEIGHED, words="error ... class frequencies"),
        case("DDP312", WEIGHED, UNKNOWN, words="not class frequencies"),
        case("DDP312", WEIGHED, **ELSEWHERE),
        case("DDP304", WEIGHED, SUM, other_parameters=("a",), words="('a',) ... Which parts of the model"),
        case("DDP312", UNKNOWN, other_parameters=("a",), **ELSEWHERE),
        case("DDP304", ROOTED),  # the root of a mean, which one weight a shard fits
        case("DDP305", COUNTED, **CRITERION),
        case("DDP305 DDP304", COUNTED, COUPLED, **CRITERION),
        case("DDP304", RIGHT, **CRITERION),  # too little to show in a term
        case("DDP304", RIGHT, **MEET, words="at model.py:9"),
        case("DDP305", UNKNOWN, **SCALES, words="at model.py:9"),
        case("DDP304", UNKNOWN, **MEET),
        case("DDP304", **MEET, words="at model.py:9 ... samples first meet at model.py:9"),
        case("DDP312", WEIGHED, known=DREW, **SCALES),
        case("DDP312", COUPLED, known=DREW, **NORM),
        case("DDP305", SUM, known=DREW, **MEET),
        case("DDP312", known=with_local(CALLED, choices=("torch.randperm at model.py:3",)), **ELSEWHERE),
        case("DDP304", known=EXCHANGED, by_statistics=Fit(1.0, 1e-8), **ELSEWHERE, **NORM),
        case("DDP309", known=EXCHANGED, by_statistics=Fit(1.0, 0.1), **ELSEWHERE, **NORM),
        case("DDP309", of=IN_HALF, known=CALLED, **ELSEWHERE, **GLOBAL, words="warning ... whose result all ranks use"),
        case("DDP309", of=QUARTER, known=CALLED, **ELSEWHERE, against_global=Fit(0.25, 1e-9), words="error"),
        case("DDP303", *HALVED, **TERMS_ALONE, known=GATHERED, words="at model.py:5 ... returns the rank's own part"),
        case("DDP303", *HALVED, **TERMS_ALONE, words="The gradient of term 2 of 2 of the loss is 1/2"),
        case("DDP305 DDP304", COUNTED, **FROZEN),
        case("DDP304", RIGHT, **FROZEN),
        case("DDP304 DDP312", UNKNOWN, **FROZEN),
        case("DDP304", HERE, **FROZEN, **OF_RANKS),
        case("DDP303", replace(HERE, error=0.2, rank_weights=(0.9, 0.1)), **FROZEN, **OF_RANKS),
        case("DDP304", of=[replace(off("a"), tolerance=0.05)], **ROUGH),
        case("DDP305", COUNTED, known=with_local(shard_sizes=(5, 3)), words="0.625, 0.375 ... | samples a rank: 5, 3"),
        case("DDP303", of=IN_HALF, **IN_ALL, words="('loss',) ... 1/2 (one over the world size)"),
        case("DDP303", replace(COUPLED, location=LOSS), of=IN_HALF, **IN_ALL, words="at loss.py:7"),
        case("DDP309", known=CALLED, **ELSEWHERE, words="('all_reduce',) ... at model.py:5"),
        case("DDP312", known=DIFFERENTIATED, **ELSEWHERE),
        case("DDP310", of=[off("a"), off("b"), good("c")], known=NONLINEAR, words="('a', 'b') ... at model.py:7"),
        case("DDP304", of=[off("c")], known=NONLINEAR),
        case("DDP304", known=replace(KNOWN, hooks=(HOOK,))),
        case("DDP310", known=HOOKED, shard_losses=(1.0, 2.0), **BY_RANK),  # losses are what they should be
        case("DDP303", known=HOOKED, shard_losses=(2.0, 1.0), **BY_RANK),
        case("DDP303", known=with_local(losses=(1.5, 1.5)), global_loss=1.5, **OWN_PART, words="own samples only"),
        case("DDP305", known=with_local(losses=(1.0, 2.0)), global_loss=3.0, **OWN_PART),
        case("DDP514", SUM, of=IN_HALF, known=with_local(backwards=(4, 2)), **GLOBAL),
        case("DDP305", SUM, of=IN_HALF, known=with_local(backwards=(4, 4)), **GLOBAL),
        case("DDP305 DDP304", replace(COUPLED, doubles_with_batch=True), words="The loss sums"),
        case("DDP305", NAMED, words="| batch['mask']: 9 and 3 on the ranks"),
    ],
)
def test_the_cause_of_a_difference(expected: Any, differences: Any, known: Any, facts: Any, words: str) -> None:
    findings = judge_single_process({0: tuple(differences)}, facts, known)
    assert [finding.code for finding in findings] == expected
    assert_says(findings[:1], " ... ".join([*expected[:1], *filter(None, [words])]))


def test_a_difference_without_an_analysis_and_the_steps_that_differ() -> None:
    finding = only(judge_single_process({0: (off("a"),)}, None, KNOWN))
    assert finding.code == "DDP312" and "they were not run" in finding.evidence[0] and finding.steps == ()
    steps = {0: (good("a"),), 1: (off("a"),), 2: (off("a"),)}
    assert only(judge_single_process(steps, analysis(), KNOWN)).steps == (1, 2)


def test_an_error_that_is_not_finite_is_beyond_every_tolerance() -> None:
    assert Difference("a", float("nan"), TOLERANCE).bad and Difference("a", float("inf"), TOLERANCE).bad
    assert not Difference("a", TOLERANCE, TOLERANCE).bad


# --- State ---------------------------------------------------------------------------------------------------------


def judge_after(evidence: list[DdpStepEvidence], *, gradients_differ: bool = False, **more: Any) -> list[Finding]:
    return judge_state(evidence, replace(KNOWN, **more), gradients_differ=gradients_differ)


def test_parameters_that_diverge_although_gradients_were_equal() -> None:
    evidence = two_ranks(parameters={"a": 0, "b": 9, "c": 2}, optimizer={"optimizer b momentum": 3})
    assert_says(judge_after(evidence), "DDP306 error ('b',)")
    assert judge_after(evidence, gradients_differ=True) == judge_after(two_ranks()) == []


START = [dict.fromkeys(NAMES, -1)] * 2


def moved(rank: int, before: int, after: int) -> DdpStepEvidence:
    return ddp_step(rank, parameters_after_backward={**START[0], "a": before}, parameters={"a": after, "b": 1, "c": 2})


def test_a_rank_that_skips_the_step_a_change_by_hand_and_a_change_in_forward_are_told_apart() -> None:
    for rank_0, rank_1, words in (
        ((-1, 5), (-1, -1), "DDP508 ... of ranks (1,)"),
        ((7, 5), (-1, 6), "DDP515 ... of ranks (0,)"),
        ((7, 5), (8, 6), "DDP306 ... of ranks ()"),
        ((-1, 5), (-1, 6), "DDP306 ... of ranks ()"),
    ):
        steps = [moved(0, *rank_0), moved(1, *rank_1)]
        assert_says(judge_state(steps, KNOWN, gradients_differ=False, start=START), words)


def test_a_tensor_that_the_first_step_makes_and_keeps_differs_between_ranks() -> None:
    def steps(*values: int) -> list[DdpStepEvidence]:
        return [ddp_step(r, s, new_state={"cache": v + 10 * r}) for s, v in enumerate(values) for r in (0, 1)]

    known = replace(KNOWN, gradients_differ=True)
    finding = only(judge_state(steps(1, 1), known, gradients_differ=False))
    assert (finding.code, finding.subjects, finding.severity) == ("DDP216", ("cache",), Severity.ERROR)
    for evidence, circumstances in ((steps(1, 2), known), (steps(1), known), (steps(1, 1), KNOWN)):
        assert judge_state(evidence, circumstances, gradients_differ=False) == []


def test_buffers_and_unregistered_state_that_drift() -> None:
    evidence = two_ranks(buffers={"a": 5, "b": 1, "c": 2})
    assert_says(judge_after(evidence, broadcasts_buffers=True), "DDP215 warning ('a',)")
    assert_says(judge_after(evidence, broadcasts_buffers=False), "DDP214 warning ('a',)")
    assert_says(judge_after(two_ranks(state={"a": 5, "b": 1, "c": 2})), "DDP216")


# --- The rest ------------------------------------------------------------------------------------------------------


def test_what_the_wrapper_raises_is_known() -> None:
    overwritten = "modified by an inplace operation\nddpcheck: overwritten in place: head.weight\n"
    for words, code in (
        ("Expected to mark a variable ready only once.", "DDP406"),
        ("Expected to have finished reduction in the prior iteration", "DDP302"),
        ("Encountered gradient which is undefined, but still allreduced by DDP reducer.", "DDP509"),
        ("Your training graph has changed in this iteration", "DDP513"),
        (overwritten, "DDP311"),
    ):
        text = f"... parameter name head.weight {words}"
        failure = RankFailure(1, "raised", "rank 1 raised RuntimeError", 0.0, traceback=text)
        assert_says(judge_wrapper_error([failure], {}, KNOWN), f"{code} ... ('head.weight',) of ranks (1,)")
        for healthy in (replace(failure, kind="died"), replace(failure, traceback="KeyError")):
            assert judge_wrapper_error([healthy], {}, KNOWN) == []


def test_a_comparison_of_zeros_is_no_pass() -> None:
    for states, tags in ((["missing", "lost"], (ALL_MISSING,)), (["missing", "zero"], ()), ([], ())):
        found = only(judge_nothing_compared({0: 0.0, 1: 0.0}, states))
        assert (found.code, found.tags) == ("DDP307", tags)
    assert judge_nothing_compared({0: 0.0, 1: 0.1}) == [] and judge_nothing_compared({}) == []


def test_a_step_that_is_not_equal_to_itself() -> None:
    assert judge_repeat({0: (good("a"),), 1: (good("a"),)}, 2) == []
    finding = only(judge_repeat({0: (good("a"),), 1: (off("a"),)}, 2))
    assert (finding.code, finding.ranks, finding.steps) == ("DDP308", (1,), (2,))
    assert only(judge_repeat({0: (off("a"),), 1: (off("a"),)}, 2)).ranks == ()


# --- Advice --------------------------------------------------------------------------------------------------------


def test_advice_on_a_collective_without_gradient_is_for_that_collective() -> None:
    def advice(*operations: str) -> str:
        return fix_without_gradient([Call(operation, "0", (0, 1)) for operation in operations])

    assert "functional.all_reduce instead" in advice("all_reduce") and "put back" not in advice("all_reduce")
    assert "functional.all_gather instead" in advice("all_gather_into_tensor", "all_gather")
    assert "put back" in advice("all_gather") and "detached copy" not in advice("all_gather")
    assert "functional.reduce_scatter and torch.dis" in advice("reduce_scatter_tensor", "broadcast")
    assert advice("monitored_barrier") == ""  # which torch does not differentiate
