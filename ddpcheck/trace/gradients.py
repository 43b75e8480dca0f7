"""Reduced and changed gradients of the ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.evidence.script import GradientsClipped
from ddpcheck.findings.evidence.steps import CompiledStep, DdpStepEvidence, ShardedStep
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import capitalized, format_ranks, new_finding, ranks_or_all
from ddpcheck.stream.ledger import Contribution, Ledger
from ddpcheck.trace.check_context import JudgeContext, group_by_step, worst_first
from ddpcheck.trace.replicas import differing_names

_Entry = TypeVar("_Entry")
Clips = Sequence[Sequence[GradientsClipped]]  # by rank, in order
Ledgers = Sequence[tuple[DdpStepEvidence, Ledger]]

MIN_HOOKED_STEPS = 2
"""Steps in which a hook has to change gradients in the same way, for a finding on it."""

LOSS_TOLERANCE = 1e-3
"""Relative difference of losses that may be rounding."""

BY_FACTOR = "scaled by a factor"
"""Tag of a finding on gradients that are the average times a factor, as sums over the ranks are."""

UNEQUAL = "unequal gradients"
"""Tag of a finding on gradients that differ between ranks after backward."""

RETURN_AVERAGE = "Let the communication hook return the average over the ranks, or take it off."
AVERAGE_ALL = "Have the wrapper all_reduce every gradient and divide the sum by the world size, or use DDP."


@dataclass(frozen=True, slots=True)
class ReducerFacts:
    """Comparisons of gradients after DDP averages them, between ranks and with the expected average."""

    evidence: Sequence[DdpStepEvidence]  # by rank and step
    # by parameter, the steps in which gradients differ between ranks
    unequal: Mapping[str, Sequence[int]]
    # by parameter and step, the largest difference from the average of the ranks' own gradients
    wrong: Mapping[str, Mapping[int, Difference]]
    known: JudgeContext  # further facts

    @classmethod
    def from_evidence(cls, evidence: Sequence[DdpStepEvidence], known: JudgeContext) -> ReducerFacts:
        """Compare gradients between ranks, and with the average of local gradients."""
        unequal: dict[str, list[int]] = {}
        wrong: dict[str, dict[int, Difference]] = {}
        for step, items in group_by_step([item for item in evidence if not item.is_local_sgd]).items():
            for name in differing_names([item.gradients for item in items]):
                unequal.setdefault(name, []).append(step)
            for difference in (difference for item in items for difference in item.against_local if difference.bad):
                by_step = wrong.setdefault(difference.name, {})
                by_step[step] = max(by_step.get(step, difference), difference, key=lambda item: item.error)
        return cls(evidence, unequal, wrong, known)

    @property
    def step_count(self) -> int:
        return len({item.step for item in self.evidence})

    @property
    def not_synchronised(self) -> list[str]:
        """Parameters whose gradients differ between ranks, although the wrapper has to average them."""
        return [name for name in self.unequal if name not in self.known.wrapper.ignored]

    @property
    def mismatched(self) -> Mapping[str, Mapping[int, Difference]]:
        """Wrong gradients, equal on all ranks: differences from the average, by parameter and step."""
        return {name: by_step for name, by_step in self.wrong.items() if name not in self.unequal}

    @property
    def mismatches(self) -> list[Difference]:
        """First step's difference from the average, for each parameter in `mismatched`."""
        return [by_step[min(by_step)] for by_step in self.mismatched.values()]

    def reduction(self, names: Sequence[str]) -> list[str]:
        """Describe options that replace or delay DDP's all-reduce of the parameters `names`."""
        wrapper, facts = self.known.wrapper, []
        if wrapper.comm_hook:
            facts.append(f"gradients are reduced by the communication hook {wrapper.comm_hook}")
        if names and wrapper.delayed.issuperset(names):
            facts.append(
                "delay_all_reduce_named_params reduces them when the gradient of param_to_hook_all_reduce arrives, "
                "which has to come after theirs"
            )
        return facts

    @property
    def evidence_between_ranks(self) -> list[str]:
        """Evidence of a finding on gradients that differ between ranks, as lines of text."""
        names = self.not_synchronised
        wrong = [self.wrong[name] for name in names if name in self.wrong]
        return [*self.reduction(names), *[str(by_step[min(by_step)]) for by_step in wrong][:3]]

    @property
    def differing_losses(self) -> str:
        """First step with different losses in a tensor parallel group, as text, or ''."""
        losses = {(item.step, item.rank): item.loss for item in self.evidence if isinstance(item, ShardedStep)}
        for step, model in itertools.product(sorted({step for step, _ in losses}), self.known.models):
            known = [loss for rank in model if (loss := losses.get((step, rank))) is not None]
            if len(known) == len(model) and max(known) - min(known) > LOSS_TOLERANCE * max(map(abs, known)):
                text = " and ".join(f"{loss:.6g}" for loss in known[:4])
                ranks = capitalized(format_ranks(model))
                return f"{ranks} compute one model together, and each a different loss, {text} in step {step}"
        return ""

    def mismatch(self, code: str, message: str, *evidence: str, **more: Any) -> list[Finding]:
        """Create a finding on the parameters in `mismatched`: ranks have equal, but wrong gradients."""
        names = list(self.mismatched)
        steps = sorted({step for by_step in self.mismatched.values() for step in by_step})
        facts = [*evidence, *self.reduction(names), *map(str, worst_first(self.mismatches)[:3])]
        more = {"subjects": self.known.names.subjects(names), "location": self.known.names.location(names), **more}
        return new_finding(code, message=message, steps=ranks_or_all(steps, self.step_count), evidence=facts, **more)


def paired(entries: Sequence[Sequence[_Entry]], key: Callable[[_Entry], Hashable]) -> list[Sequence[_Entry]]:
    """Group log entries that are n-th on every rank; omit groups whose keys differ."""
    return [by_rank for by_rank in zip(*entries, strict=False) if len({key(entry) for entry in by_rank}) == 1]


def draws_differ(evidence: Sequence[CompiledStep]) -> bool:
    """Check if random numbers may explain why gradients of the compiled model differ."""
    differ = any(difference.bad for item in evidence for difference in item.differences)
    return differ and any(item.drew for item in evidence)


def ranks_and_steps(contributions: Sequence[tuple[DdpStepEvidence, Contribution]], ledgers: Ledgers) -> dict[str, Any]:
    """Return the ranks and steps of gradient contributions, as fields of a finding."""
    ranks, steps = {item.rank for item, _ in contributions}, {item.step for item, _ in contributions}
    return {
        "ranks": ranks_or_all(sorted(ranks), len({item.rank for item, _ in ledgers})),
        "steps": ranks_or_all(sorted(steps), len({item.step for item, _ in ledgers})),
    }
