"""The facts with which findings on parameters are made: which of them were missing from the loss, where and when.

This module is light: it never imports torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ddpcheck.findings.evidence.modules import WrapperFacts
from ddpcheck.findings.evidence.parameters import StepEvidence
from ddpcheck.findings.wording import Names

AT_NEXT_FORWARD = "plain DDP raises 'Expected to have finished reduction in the prior iteration' at the next forward"
SPARSE_REFUSED = (
    "with find_unused_parameters=True DDP raises 'Expected sparse gradient to be defined' in backward: for a table "
    "with sparse=True it has no gradient to put in the place of the missing one"
)
SPARSE_ADVICE = (
    "Use the table in every step, remove it, or freeze it with requires_grad_(False) before wrapping; or make it with "
    "sparse=False: for a sparse table that is unused, find_unused_parameters=True makes DDP raise."
)


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """The facts on the parameters of a module.

    Attributes:
        evidence: Of every rank in every step.
        wrapper: The arguments of the wrapper.
        names: Of the parameters, with their aliases and lines.
        ends_here: Whether the run ends with the last of these steps.
        trainable: All parameters that require grad, in the order in which they are registered.
        missing: Where each of them did not contribute; without those that another finding accounts for.
    """

    evidence: Sequence[StepEvidence]
    wrapper: WrapperFacts
    names: Names
    ends_here: bool
    trainable: Sequence[str]
    missing: Mapping[str, Sequence[StepEvidence]]

    @classmethod
    def of(
        cls,
        evidence: Sequence[StepEvidence],
        wrapper: WrapperFacts,
        names: Names,
        *,
        ends_here: bool = True,
        explained: Collection[str] = (),
    ) -> ParameterFacts:
        """Collect where parameters were missing, leaving out those whose absence is `explained`."""
        missing: dict[str, list[StepEvidence]] = {}
        for item in evidence:
            for name, state in item.states.items():
                if state == "missing" and name not in explained:
                    missing.setdefault(name, []).append(item)
        return cls(evidence, wrapper, names, ends_here, list(evidence[0].states) if evidence else [], missing)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len({item.rank for item in self.evidence})

    @property
    def steps(self) -> list[int]:
        """All steps that were run."""
        return sorted({item.step for item in self.evidence})

    @property
    def always_missing(self) -> list[str]:
        """The parameters that contributed on no rank in no step."""
        return [name for name in self.trainable if len(self.missing.get(name, ())) == len(self.evidence)]

    @property
    def sometimes_missing(self) -> list[str]:
        """The parameters that contributed on some ranks or in some steps, and not in all."""
        return [name for name in self.trainable if 0 < len(self.missing.get(name, ())) < len(self.evidence)]

    @property
    def tolerating_option(self) -> str:
        """The option for which DDP goes on without a gradient."""
        return "find_unused_parameters" if self.wrapper.find_unused_parameters else "static_graph"


def family_of(name: str, missing: Collection[str], trainable: Sequence[str]) -> str:
    """The outermost module around `name` of which all parameters are missing, the same for every block of a list."""
    return ".".join("*" if part.isdigit() else part for part in _top_module(name, missing, trainable).split("."))


def _top_module(name: str, missing: Collection[str], trainable: Sequence[str]) -> str:
    """The outermost module around `name` of which every trainable parameter is missing; `name` if there is none."""
    top = name
    parts = name.split(".")
    for size in range(len(parts) - 1, 0, -1):
        prefix = ".".join(parts[:size]) + "."
        if all(other in missing for other in trainable if other.startswith(prefix)):
            top = prefix
    return top
