"""The ordered explanations of judges, each by itself on facts made by hand, and why they stand in that order."""

from typing import Any

import pytest

from ddpcheck.findings.errors import RankFailure
from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.evidence.modules import GradientHook, WrapperFacts
from ddpcheck.findings.evidence.steps import Call, CompiledStep, DdpStepEvidence, StepEvidence
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.findings.wording import Names, plain_name
from ddpcheck.rules.collectives.ddp402_hang import explain_by_hang
from ddpcheck.rules.collectives.ddp404_rank_died import explain_by_death
from ddpcheck.rules.collectives.ddp406_marked_ready_twice import judge_hidden_parameters, judge_repeated_arrival
from ddpcheck.rules.collectives.diagnose import diagnose, explain_by_mismatch
from ddpcheck.rules.gradients.ddp310_gradient_changed_before_reduction import explain_by_wrap_hooks
from ddpcheck.rules.gradients.ddp311_saved_tensor_overwritten import (
    explain_by_overwritten_buffers,
    explain_error_of_overwritten_tensor,
)
from ddpcheck.rules.gradients.reducer import ERROR_EXPLANATIONS, FROM_AVERAGE, describe_compiled, judge_compiled
from ddpcheck.rules.parameters.contribution import judge_conditional_use
from ddpcheck.rules.parameters.ddp109_needless_find_unused import judge_needless_search
from ddpcheck.rules.parameters.ddp112_opaque_output import judge_opaque_output
from ddpcheck.rules.replicas.ddp214_buffer_value import judge_drifted_buffers
from ddpcheck.trace.check_context import JudgeContext, LocalFacts, first_explanation
from ddpcheck.trace.failures import FailureFacts, WrapperErrorFacts
from ddpcheck.trace.gradients import ReducerFacts
from ddpcheck.trace.parameters import ParameterFacts
from ddpcheck.trace.replicas import ReplicaFacts
from tests.reports import assert_says, codes

KNOWN = JudgeContext(Names(), WrapperFacts(), world_size=2)
HALVED = Difference("a", 0.5, 1e-6, ratio=0.5, residual=1e-9)
WRONG = Difference("a", 0.5, 1e-6, ratio=0.8, residual=0.4)


def step(rank: int, gradient: int = 1, **more: Any) -> DdpStepEvidence:
    return DdpStepEvidence(rank, 0, gradients={"a": gradient, "b": 2}, **more)


def under_wrapper(*evidence: DdpStepEvidence, **known: Any) -> ReducerFacts:
    return ReducerFacts.from_evidence(evidence, replace(KNOWN, **known))


MISMATCH = tuple(step(rank, against_local=(WRONG,)) for rank in (0, 1))
HOOK = GradientHook("a tensor hook (clip)", Location("model.py", 7))


def test_one_factor_on_every_gradient_is_told_before_hooks_and_buffers_that_are_there_too() -> None:
    facts = under_wrapper(step(0, against_local=(HALVED,)), step(1), wrap_hooks=(HOOK,))
    assert codes(explain_by_wrap_hooks(facts)) == ["DDP310"]
    assert codes(first_explanation(FROM_AVERAGE, facts)) == ["DDP303"]
    both = replace(KNOWN, broadcasts_buffers=True, local=LocalFacts(differing_buffers=("n",)), wrap_hooks=(HOOK,))
    twice = ReducerFacts.from_evidence([replace(item, wrapper_calls=2) for item in MISMATCH], both)
    assert codes(explain_by_overwritten_buffers(twice)) == ["DDP311"]
    assert codes(first_explanation(FROM_AVERAGE, twice)) == ["DDP310"]


def test_a_buffer_that_a_checkpoint_leaves_out_is_told_without_the_checkpoint() -> None:
    by_step = {0: [step(rank, buffers={"n": rank}) for rank in (0, 1)]}
    assert_says(judge_drifted_buffers(ReplicaFacts(by_step, (), KNOWN)), "DDP214 ... checkpoint")
    known = replace(KNOWN, wrapper=replace(KNOWN.wrapper, not_saved=frozenset({"n", "m"})))
    assert_says(judge_drifted_buffers(ReplicaFacts(by_step, (), known)), "DDP214 ... not a checkpoint ... leaves out n")


IN_PLACE = "one of the variables needed for gradient computation has been modified by an inplace operation"


def failure(message: str, rank: int = 1, **more: Any) -> RankFailure:
    return RankFailure(rank, more.pop("kind", "raised"), message, 0.0, **more)


def wrapper_facts(*failures: RankFailure, results: dict[int, object] | None = None) -> WrapperErrorFacts:
    return WrapperErrorFacts(failures, results or {}, KNOWN)


def test_a_rank_that_never_called_the_wrapper_is_the_cause_of_the_failure_of_the_others() -> None:
    facts = wrapper_facts(failure(IN_PLACE), results={0: step(0, wrapper_calls=0, inner_calls=1)})
    assert_says(explain_error_of_overwritten_tensor(facts), "DDP311 ... ('backward',)")  # it is not always named
    assert codes(first_explanation(ERROR_EXPLANATIONS, facts)) == ["DDP501"]


def test_a_gradient_that_the_second_of_two_backward_passes_brings_again_is_told_as_that() -> None:
    twice = failure("rank 1 raised RuntimeError: Expected to mark a variable ready only once.")
    known = replace(KNOWN, local=LocalFacts(backwards=(2, 2)))
    facts = replace(wrapper_facts(twice), known=known)
    assert_says(first_explanation(ERROR_EXPLANATIONS, facts), "DDP509 ... ('backward',)")
    of_checkpoint = replace(twice, traceback="torch/utils/checkpoint.py")
    for facts in (wrapper_facts(twice), replace(wrapper_facts(of_checkpoint), known=known)):
        assert codes(first_explanation(ERROR_EXPLANATIONS, facts)) == ["DDP406"]


LOGS = [[Call("all_reduce", "0", (0, 1), "float32 of shape (3,)")], []]
CLOSED, OWN = (failure(f"rank 1 raised {error}") for error in ("RuntimeError: Connection closed", "ValueError: no"))
STUCK = failure("", kind="stuck", place="step 0: forward")
DIED, KILLED = (failure("rank 1 ended", kind="died", exit_code=code, location="train.py:3") for code in (3, -9))


@pytest.mark.parametrize(
    ("explain", "cause", "words"),
    [
        (explain_by_mismatch, CLOSED, "DDP403"),
        (explain_by_mismatch, OWN, ""),  # no error of communication
        (diagnose, OWN, "DDP401"),
        (explain_by_hang, STUCK, "DDP402"),
        (explain_by_hang, DIED, ""),
        (explain_by_death, DIED, "DDP404 ... os._exit"),
        (explain_by_death, KILLED, "DDP404 ... Use less memory"),
    ],
)
def test_the_cause_of_a_failure(explain: Any, cause: RankFailure, words: str) -> None:
    assert_says(explain(FailureFacts([cause], LOGS)), words)


def facts_of(*evidence: StepEvidence, **options: Any) -> ParameterFacts:
    return ParameterFacts.from_evidence(evidence, WrapperFacts(**options), Names())


def seen(rank: int, at: int = 0, *missing: str, **more: Any) -> StepEvidence:
    states = {name: "missing" if name in missing else "contributes" for name in ("a", "b")}
    return StepEvidence(rank, at, states, **more)


def test_ranks_that_disagree_are_told_before_steps_that_do() -> None:
    facts = facts_of(seen(0, 0, "a"), seen(1), seen(0, 1, "a"), seen(1, 1, "a"))
    assert codes(judge_conditional_use(facts)) == ["DDP104"]
    together = seen(0, 0, "a"), seen(1, 0, "a"), seen(0, 1), seen(1, 1)
    assert codes(judge_conditional_use(facts_of(*together))) == ["DDP105"]
    assert codes(judge_conditional_use(facts_of(*together, static_graph=True))) == ["DDP513"]
    assert judge_conditional_use(facts_of(*together, find_unused_parameters=True)) == []


@pytest.mark.parametrize(
    ("judge", "evidence", "twin", "code"),
    [
        (judge_opaque_output, seen(0, output_type="Output"), seen(0), "DDP112"),
        (judge_hidden_parameters, seen(0, hidden_from_ddp=("a",)), seen(0), "DDP406"),
        (judge_needless_search, seen(0), seen(0, 0, "a"), "DDP109"),
    ],
)
def test_what_is_judged_under_the_search_for_unused_parameters(judge: Any, evidence: Any, twin: Any, code: str) -> None:
    assert codes(judge(facts_of(evidence, find_unused_parameters=True))) == [code]
    assert judge(facts_of(twin, find_unused_parameters=True)) == []
    assert judge(facts_of(evidence)) == []


def test_a_gradient_that_arrives_twice() -> None:
    assert codes(judge_repeated_arrival(facts_of(seen(0, arrivals={"a": 2})))) == ["DDP406"]


EQUAL = CompiledStep(0, 0, {"a": 1, "b": 2}, (Difference("a", 1e-6, 0.1), Difference("b", 1e-7, 0.1)))
UNEQUAL = replace(EQUAL, rank=1, gradients={"a": 1, "b": 3})
OFF = replace(EQUAL, differences=(Difference("a", 0.5, 0.1),))


@pytest.mark.parametrize(
    ("of_ranks", "words", "line"),
    [
        ([EQUAL, replace(EQUAL, rank=1)], "", "within a relative error of 1e-06"),
        ([], "", "was not run"),
        ([EQUAL, UNEQUAL], "DDP301 ... ('b',) ... in steps (0,): ... torch.compile", ""),
        ([OFF, replace(OFF, rank=1)], "DDP302 ... ('a',)", ""),
        ([replace(OFF, drew=True, rank=rank) for rank in (0, 1)], "", "different random numbers"),
        ([replace(EQUAL, drew=True)], "", "the same gradients, within a relative error of 1e-06"),
    ],
)
def test_gradients_under_compilation(of_ranks: list[CompiledStep], words: str, line: str) -> None:
    assert_says(judge_compiled(of_ranks, KNOWN), words)
    assert line in describe_compiled(of_ranks)


def test_names_are_those_of_the_code() -> None:
    assert plain_name("_orig_mod.encoder._orig_mod.weight and x_orig_mod.b") == "encoder.weight and x_orig_mod.b"
    assert plain_name("cut at a.py:1 (in module _orig_mod)") == "cut at a.py:1"
