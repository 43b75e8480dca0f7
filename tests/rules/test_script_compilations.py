"""Functions that ranks compile, judged on evidence made by hand: a fault and its healthy twin each."""

from __future__ import annotations

from typing import Any

import pytest

from ddpcheck.findings.evidence.loop import FunctionCompiled
from ddpcheck.findings.report import Location
from ddpcheck.rules.compilation.ddp522_rank_dependent_compilation import judge_compilations, judge_recompilations
from ddpcheck.trace.compilation import trained_functions
from tests.reports import assert_says

DEFINED = Location("train.py", 12)
SIZE = "tensor 'x' size mismatch at index 1. expected"
TAG = "self.tag =="


def compiled(guard: str = "", **more: Any) -> FunctionCompiled:
    return FunctionCompiled("Net.forward", DEFINED, Location("train.py", 40), guard=guard, reason=guard, **more)


def first(**more: Any) -> FunctionCompiled:
    return compiled(operations={"linear": 2, "relu": 1}, **more)


ONCE = [first()]
AGAIN = [first(), *(compiled(SIZE, step=step) for step in (1, 2, 3))]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([AGAIN, ONCE, AGAIN], [(0, 2)]),
        ([ONCE, [first(), compiled(TAG), compiled(TAG)]], [(1,)]),
        ([ONCE, AGAIN[:2]], []),  # torch has learned that a size changes
        ([ONCE, [first(), compiled(SIZE), compiled("2 <= x.size()[0]"), compiled("self.training")]], []),
        ([AGAIN, AGAIN[:2]], []),  # which meets its shapes later
        ([AGAIN, AGAIN], []),
        ([ONCE, [first(), *(compiled(SIZE, trains=False) for _ in range(4))]], []),  # evaluates by itself
        ([ONCE, [first(), compiled(), compiled()]], []),  # of a torch that does not say why
        ([[], AGAIN], []),  # trains nothing with it
    ],
)
def test_a_guard_that_fails_repeatedly_on_some_ranks_only(ranks: Any, expected: Any) -> None:
    assert [finding.ranks for finding in judge_recompilations(trained_functions(ranks))] == expected


def test_ranks_that_reach_the_limit_of_recompilations_alone() -> None:
    limit = [*AGAIN, compiled(SIZE, step=4, hit_limit=True)]
    words = "compiled 4 times on rank 1, and 4 times on rank 0. Torch then stops compiling it"
    findings = judge_recompilations(trained_functions([AGAIN, limit]))
    assert_says(findings, f"DDP522 ... of ranks (1,) at train.py:40 ... {words} ... in step 1: {SIZE} ... mark_dynamic")
    assert judge_recompilations(trained_functions([limit, limit])) == []


OTHER = compiled(operations={"linear": 2, "sigmoid": 1})
OF_A_BREAK = FunctionCompiled("Net.torch_dynamo_resume_in_forward_at_14", Location("train.py", 14))


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([ONCE, ONCE, [OTHER]], "of ranks (2,) ... a different number of relu and sigmoid"),
        ([ONCE, ONCE], ""),
        ([ONCE, [compiled(operations={"linear": 1}, inputs=7)]], ""),  # for inputs of other shapes
        ([[first(), OTHER], [OTHER, first()]], ""),  # a branch that each rank takes now and then
        ([ONCE, [OTHER, OF_A_BREAK]], ""),  # rank 1 prints, say
        ([ONCE, [compiled(operations={"relu": 1}, trains=False)]], ""),
        ([[compiled()], [compiled()]], ""),  # nothing with gradients
    ],
)
def test_other_operations_for_the_same_inputs(ranks: Any, words: str) -> None:
    assert_says(judge_compilations(ranks), words)
