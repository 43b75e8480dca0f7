"""DDP301 and DDP302 of steps that are right without `torch.compile`, and names without its prefix."""

from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.evidence.modules import WrapperFacts
from ddpcheck.findings.evidence.steps import CompiledStep
from ddpcheck.findings.replace import replace
from ddpcheck.findings.wording import Names, plain_name
from ddpcheck.rules.gradients.reducer import describe_compiled, judge_compiled
from ddpcheck.trace.check_context import JudgeContext

EQUAL = CompiledStep(0, 0, {"a": 1, "b": 2}, (Difference("a", 1e-6, 0.1), Difference("b", 1e-7, 0.1)))
KNOWN = JudgeContext(Names(), WrapperFacts(), world_size=2)


def test_gradients_that_are_equal_on_all_ranks_and_near_are_no_finding() -> None:
    assert judge_compiled([EQUAL, replace(EQUAL, rank=1)], KNOWN) == []
    assert "the same gradients, within a relative error of 1e-06" in describe_compiled([EQUAL])
    assert judge_compiled([], KNOWN) == [] and "was not run" in describe_compiled([])


def test_gradients_that_differ_between_ranks_under_compilation_alone() -> None:
    (finding,) = judge_compiled([EQUAL, replace(EQUAL, rank=1, gradients={"a": 1, "b": 3})], KNOWN)
    assert (finding.code, finding.subjects, finding.steps) == ("DDP301", ("b",), (0,))
    assert "torch.compile" in finding.message


def test_gradients_that_are_others_under_compilation_unless_random_numbers_are() -> None:
    off = replace(EQUAL, differences=(Difference("a", 0.5, 0.1),))
    (finding,) = judge_compiled([off, replace(off, rank=1)], KNOWN)
    assert (finding.code, finding.subjects) == ("DDP302", ("a",))
    random = replace(off, drew=True)
    assert judge_compiled([random, replace(random, rank=1)], KNOWN) == []
    assert "different random numbers" in describe_compiled([random])


def test_a_model_that_draws_the_same_numbers_when_it_is_compiled_is_said_to_leave_the_same_gradients() -> None:
    assert "the same gradients, within a relative error of 1e-06" in describe_compiled([replace(EQUAL, drew=True)])


def test_names_are_those_of_the_code() -> None:
    assert plain_name("_orig_mod.encoder._orig_mod.weight and x_orig_mod.b") == "encoder.weight and x_orig_mod.b"
    assert plain_name("cut at a.py:1 (in module _orig_mod)") == "cut at a.py:1"
    assert plain_name("encoder._orig_mod (Linear)") == "encoder (Linear)"
