"""DDP302, 311, 406, 501 and 513: the error of a step under the wrapper that the unwrapped module has just done.

Pure functions from `findings.errors.RankError` to findings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ddpcheck.findings.errors import RankError, RankFailure
from ddpcheck.findings.evidence.steps import DdpStepEvidence
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import format_ranks, join_names, make_finding, unless_all
from ddpcheck.judge.judge_context import JudgeContext, first_explanation


@dataclass(frozen=True, slots=True)
class WrapperErrorFacts:
    """The facts on ranks that failed under the wrapper."""

    error: RankError
    known: JudgeContext

    @property
    def first(self) -> RankFailure | None:
        """The first failure, where it is an exception."""
        first = self.error.first
        return first if first is not None and first.kind == "raised" else None

    @property
    def raised_on(self) -> tuple[int, ...]:
        """The ranks that raised; empty for all."""
        raised = sorted(failure.rank for failure in self.error.failures if failure.kind == "raised")
        return unless_all(raised, self.known.world_size)


def judge_wrapper_error(error: RankError, known: JudgeContext) -> list[Finding]:
    """DDP302, 311, 406, 501 and 513 from how the wrapper fails in a step that the unwrapped module has just done."""
    return first_explanation(EXPLANATIONS, WrapperErrorFacts(error, known))


def explain_by_bypassed_forward(facts: WrapperErrorFacts) -> list[Finding]:
    """DDP501: some ranks do not call the wrapper, and finish; the others wait for them until they fail.

    First, for the failure of the ranks that waited only shows that somebody did not come.
    """
    finished = [item for item in facts.error.results.values() if isinstance(item, DdpStepEvidence)]
    bypassed = [item.rank for item in finished if item.wrapper_calls == 0 and item.inner_calls > 0]
    if not bypassed:
        return []
    return [
        make_finding(
            "DDP501",
            ("forward",),
            f"On {format_ranks(bypassed)} the loss calls the wrapped module and not the wrapper; the other ranks wait "
            "for its gradients.",
            ranks=bypassed,
            steps=(finished[0].step,),
            evidence=[failure.message for failure in facts.error.failures],
        )
    ]


def explain_by_overwritten_parameters(facts: WrapperErrorFacts) -> list[Finding]:
    """DDP311: backward needs parameters that were overwritten in place, whose names ddpcheck has added to the error.

    Before the sentences of torch, which name none.
    """
    first = facts.first
    overwritten = re.search(r"ddpcheck: overwritten in place: (.+)", first.traceback) if first is not None else None
    if first is None or overwritten is None or _IN_PLACE not in f"{first.message}\n{first.traceback}":
        return []
    names = tuple(overwritten[1].split(", "))
    return [
        make_finding(
            "DDP311",
            facts.known.names.subjects(names),
            f"{'One of ' if len(names) > 1 else ''}{join_names(names, most=4)} was overwritten after the forward "
            f"pass had read it, and backward needs what was there, in {first.place or 'the step'}.",
            ranks=facts.raised_on,
            location=facts.known.names.location(names),
            evidence=[first.message],
        )
    ]


_IN_PLACE = "modified by an inplace operation"
_SENTENCES = {  # of torch, with the code and the message for each
    "mark a variable ready only once": ("DDP406", "DDP took a gradient to be complete, and it came again"),
    _IN_PLACE: ("DDP311", "What backward needs was overwritten after the forward pass"),
    "Expected to have finished reduction": (
        "DDP302",
        "A parameter that takes part without the wrapper did not under it",
    ),
    "training graph has changed in this iteration": (
        "DDP513",
        "The graph is not the one that DDP recorded in the first step",
    ),
}


def explain_by_sentence_of_torch(facts: WrapperErrorFacts) -> list[Finding]:
    """DDP302, 311, 406 or 513: a sentence of DDP's reducer or of autograd, with the parameters that it names."""
    if (first := facts.first) is None:
        return []
    text = f"{first.message}\n{first.traceback}"
    for sentence, (code, message) in _SENTENCES.items():
        if sentence in text:
            named = tuple(dict.fromkeys(re.findall(r"parameter (?:name|at index \d+ with name) (\S+)", text)))
            return [
                make_finding(
                    code,
                    facts.known.names.subjects(named) or ("backward",),
                    f"{message}, in {first.place or 'the step'}.",
                    ranks=facts.raised_on,
                    evidence=[first.message],
                )
            ]
    return []


EXPLANATIONS = (explain_by_bypassed_forward, explain_by_overwritten_parameters, explain_by_sentence_of_torch)
"""In the order in which they are asked; each says in its docstring why it stands where it does."""
