"""DDP302, 311, 406, 501, 503, 509, 513: errors under the wrapper only."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpcheck.findings.errors import RankFailure
from ddpcheck.findings.evidence.steps import DdpStepEvidence
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import (
    format_ranks,
    join_names,
    one_finding,
    unless_all,
)
from ddpcheck.judge.judge_context import JudgeContext, first_explanation
from ddpcheck.judge.replicas.script_changes import replaced_after_sharding


@dataclass(frozen=True, slots=True)
class WrapperErrorFacts:
    """Failures of ranks under the wrapper."""

    failures: Sequence[RankFailure]  # in order of time
    finished: Mapping[int, object]  # by rank, return values of the other ranks
    known: JudgeContext

    @property
    def text(self) -> str:
        """Message and traceback of the first failure, or '' if not an exception."""
        first = next(iter(self.failures), None)
        return f"{first.message}\n{first.traceback}" if first is not None and first.kind == "raised" else ""

    @property
    def raised_on(self) -> tuple[int, ...]:
        """Ranks that raised; () for all ranks."""
        raised = sorted(failure.rank for failure in self.failures if failure.kind == "raised")
        return unless_all(raised, self.known.world_size)

    def one_finding(self, code: str, subjects: Sequence[str], message: str, **more: Any) -> list[Finding]:
        """Create a finding on the ranks that raised, with the first message as evidence."""
        return one_finding(code, subjects, message, ranks=self.raised_on, evidence=[self.failures[0].message], **more)


def judge_wrapper_error(
    failures: Sequence[RankFailure], finished: Mapping[int, object], known: JudgeContext
) -> list[Finding]:
    """Return findings for a wrapper error in a step that the bare module completed."""
    return first_explanation(EXPLANATIONS, WrapperErrorFacts(failures, finished, known))


def explain_by_bypassed_forward(facts: WrapperErrorFacts) -> list[Finding]:
    """DDP501: ranks that bypass the wrapper and finish, while the others wait and fail.

    Runs first, because the failure of the waiting ranks only shows that a peer did not come.
    """
    finished = [item for item in facts.finished.values() if isinstance(item, DdpStepEvidence)]
    bypassed = [item.rank for item in finished if item.wrapper_calls == 0 and item.inner_calls > 0]
    if not bypassed:
        return []
    return one_finding(
        "DDP501",
        ("forward",),
        f"On {format_ranks(bypassed)} the loss calls the wrapped module and not the wrapper; the other ranks wait "
        "for its gradients.",
        ranks=bypassed,
        steps=(finished[0].step,),
        evidence=[failure.message for failure in facts.failures],
    )


def explain_by_overwritten_parameters(facts: WrapperErrorFacts) -> list[Finding]:
    """DDP311: parameters overwritten in place; ddpcheck added the names to the error."""
    overwritten = re.search(r"ddpcheck: overwritten in place: (.+)", facts.text)
    if overwritten is None or _IN_PLACE not in facts.text:
        return []
    first = facts.failures[0]
    names = overwritten[1].split(", ")
    return facts.known.names.one_finding(
        "DDP311",
        names,
        f"{'One of ' if len(names) > 1 else ''}{join_names(names, most=4)} was overwritten after the forward pass had "
        f"read it, and backward needs the previous value, in {first.place or 'the step'}.",
        ranks=facts.raised_on,
        evidence=[first.message],
        fix="Write it after the backward passes that need it (weight decay, say, in the optimizer), or read a clone.",
    )


def explain_by_shards_in_the_loss(facts: WrapperErrorFacts) -> list[Finding]:
    """DDP501: parameter used outside of the module's forward, where only a shard exists."""
    if "mixed torch.Tensor and DTensor" not in facts.text or "forward" not in facts.failures[0].place:
        return []
    return facts.one_finding(
        "DDP501",
        ("forward",),
        "The loss uses parameters outside of the forward of a module that fully_shard was called on, where each rank "
        "has only its shard.",
        location=Location.parse(facts.failures[0].location),
        fix="Call the module, not its forward or another of its methods; or register that method with "
        "torch.distributed.fsdp.register_fsdp_forward_method(module, name).",
    )


def explain_by_replaced_shards(facts: WrapperErrorFacts) -> list[Finding]:
    """DDP503: plain parameters that `wrap` put in place of shards; forward fails."""
    plain = [name for name in facts.known.wrapper.ignored if facts.known.wrapper.sharded]
    if "object has no attribute '_local_tensor'" not in facts.text or not plain:
        return []
    findings = replaced_after_sharding(sorted(plain), facts.known.names.location(plain), later=False)
    return [replace(finding, ranks=facts.raised_on, evidence=(facts.failures[0].message,)) for finding in findings]


def explain_by_second_backward(facts: WrapperErrorFacts) -> list[Finding]:
    """DDP509: second backward pass of a step, which torch reports as a duplicate gradient."""
    if _TWICE not in facts.text or "utils/checkpoint.py" in facts.text or facts.known.local.backwards[1] < 2:
        return []
    return facts.one_finding(
        "DDP509",
        ("backward",),
        "A second backward pass follows without its own forward: it delivers gradients again that DDP has averaged "
        "in the first one.",
        location=Location.parse(facts.failures[0].location),
    )


_TWICE = "mark a variable ready only once"
_IN_PLACE = "modified by an inplace operation"
SENTENCES = {  # torch's message -> (code, message of the finding)
    _TWICE: ("DDP406", "DDP took a gradient to be complete, and it came again"),
    "gradient which is undefined, but still allreduced": (
        "DDP509",
        "A second backward pass of an earlier step delivered gradients after the reduction of that step: DDP takes "
        "them for the start of the next reduction, and waits for the rest",
    ),
    _IN_PLACE: ("DDP311", "A tensor that backward needs was overwritten after the forward pass"),
    "Expected to have finished reduction": (
        "DDP302",
        "A parameter that contributes to the loss without the wrapper did not contribute under it",
    ),
    "not used in producing the loss returned by training_step": (  # Lightning's version of the message
        "DDP302",
        "A parameter that contributes to the loss without the wrapper did not contribute under it",
    ),
    "training graph has changed in this iteration": (
        "DDP513",
        "The graph is not the one that DDP recorded in the first step",
    ),
}


def explain_by_sentence_of_torch(facts: WrapperErrorFacts) -> list[Finding]:
    """DDP302, 311, 406, 509 or 513: known DDP or autograd message, and its parameters."""
    for sentence, (code, message) in SENTENCES.items():
        if sentence in facts.text:
            names = tuple(dict.fromkeys(re.findall(r"parameter (?:name|at index \d+ with name) (\S+)", facts.text)))
            subjects = facts.known.names.subjects(names) or ("backward",)
            return facts.one_finding(code, subjects, f"{message}, in {facts.failures[0].place or 'the step'}.")
    return []


EXPLANATIONS = (
    explain_by_bypassed_forward,
    explain_by_overwritten_parameters,
    explain_by_shards_in_the_loss,
    explain_by_replaced_shards,
    explain_by_second_backward,
    explain_by_sentence_of_torch,
)
"""Explanations in order; the first with findings is reported."""
