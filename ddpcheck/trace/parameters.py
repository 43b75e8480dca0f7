"""Use of parameters in forward and loss, by rank and step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ddpcheck.findings.evidence.modules import WrapperFacts
from ddpcheck.findings.evidence.steps import PathEnd, StepEvidence
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import Names, format_ranks, format_steps, join_names, plural_verb, unless_all

AT_NEXT_FORWARD = "plain DDP raises 'Expected to have finished reduction in the prior iteration' at the next forward"


SPARSE_REFUSED = (
    "with find_unused_parameters=True DDP raises 'Expected sparse gradient to be defined' in backward: for a table "
    "with sparse=True it has no substitute for the missing gradient"
)


SPARSE_ADVICE = (
    "Use the table in every step, remove it, or freeze it with requires_grad_(False) before wrapping; or make it with "
    "sparse=False: for a sparse table that is unused, find_unused_parameters=True makes DDP raise."
)


UNDER_SHARDING = (
    "fully_shard reduces the gradients of a group that exist on a rank: if they differ between ranks, gloo aborts, and "
    "nccl waits or adds up the wrong numbers"
)


ADVICE_UNDER_SHARDING = (
    "all_reduce the condition of the branch, or call set_reduce_scatter_unused_params(True) on the module that "
    "fully_shard returned (if this torch has it)."
)


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """Use of a module's parameters on all ranks in all steps."""

    evidence: Sequence[StepEvidence]  # evidence of every rank and step
    wrapper: WrapperFacts  # the arguments of the wrapper
    names: Names  # parameter names with aliases and lines
    ends_here: bool  # True if the run ends with the last of these steps
    trainable: Sequence[str]  # parameters that require grad, in registration order
    # absences by parameter, except those explained by another finding
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
        """Collect the absences of parameters, except of `explained` names."""
        missing: dict[str, list[StepEvidence]] = {}
        for item in evidence:
            for name, state in item.states.items():
                if state == "missing" and name not in explained:
                    missing.setdefault(name, []).append(item)
        return cls(evidence, wrapper, names, ends_here, list(evidence[0].states) if evidence else [], missing)

    @property
    def world_size(self) -> int:
        return len({item.rank for item in self.evidence})

    @property
    def steps(self) -> list[int]:
        """Steps that were run, in order."""
        return sorted({item.step for item in self.evidence})

    @property
    def sometimes_missing(self) -> list[str]:
        """Parameters that contributed on some ranks or in some steps only."""
        return [name for name in self.trainable if 0 < len(self.missing.get(name, ())) < len(self.evidence)]

    def others_take_turns(self, names: Sequence[str]) -> bool:
        """Return True if other items of the same lists contribute in some places."""
        families = set(map(_without_indices, self.sometimes_missing))
        return all(_without_indices(name) in families for name in names)

    def family_of(self, name: str, missing: Collection[str]) -> str:
        """Return the outermost module around `name` with all parameters missing (list index: `*`)."""
        top, parts = name, name.split(".")
        for size in range(len(parts) - 1, 0, -1):
            prefix = ".".join(parts[:size]) + "."
            if all(other in missing for other in self.trainable if other.startswith(prefix)):
                top = prefix
        return _without_indices(top)


def _without_indices(name: str) -> str:
    """Replace the list indices in a name by `*`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


@dataclass(frozen=True, slots=True)
class MissingOn:
    """Parameters missing on the same ranks in the same steps."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ConditionalUse:
    """Parameters used together under a condition."""

    parameters: Sequence[str]  # parameter names
    absences: Sequence[MissingOn]  # ranks and steps without these parameters, in order
    all_at_once: bool  # True if all trainable parameters are missing in the same places
    facts: ParameterFacts  # facts on all parameters

    @property
    def steps(self) -> list[int]:
        """Steps in which the parameters were missing on any rank."""
        return sorted({step for absence in self.absences for step in absence.steps})

    def one_finding(self, code: str, message: str, evidence: Sequence[str], ranks: Sequence[int] = ()) -> list[Finding]:
        """Report these parameters, with the consequences under the wrapper's options."""
        facts, wrapper, name = self.facts, self.facts.wrapper, self.parameters[0]
        ends = [item.path_ends[name] for item in facts.missing[name] if name in item.path_ends]
        sparse = any(name in wrapper.sparse for name in self.parameters)
        notes = [SPARSE_REFUSED] if sparse and wrapper.find_unused_parameters else []
        notes += [UNDER_SHARDING] if wrapper.sharded else []
        if wrapper.static_graph:
            notes.append("static_graph=True promises that the set of used parameters never changes")
        return facts.names.one_finding(
            code,
            self.parameters,
            message,
            ranks=unless_all(ranks, facts.world_size),
            steps=unless_all(self.steps, len(facts.steps)),
            evidence=[*evidence, *notes],
            fix=SPARSE_ADVICE if sparse else ADVICE_UNDER_SHARDING if wrapper.sharded else "",
            location=next((end.edit_at for end in ends if end.edit_at), None),
            path=ends[0].path_of(name) if ends else None,
        )


_MOST_ABSENCES = 6


def absence_evidence(use: ConditionalUse) -> list[str]:
    """Describe where and why the parameters did not contribute."""
    facts = use.facts
    lines = [
        f"{format_steps(absence.steps)}: {join_names(facts.names.subjects(absence.names))} did not contribute on "
        f"{format_ranks(absence.ranks) if len(absence.ranks) < facts.world_size else 'any rank'}"
        for absence in use.absences[:_MOST_ABSENCES]
    ]
    if len(use.absences) > _MOST_ABSENCES:
        lines.append(f"and so on ({len(use.absences) - _MOST_ABSENCES} more)")
    return lines + _reasons(use)


def _reasons(use: ConditionalUse) -> list[str]:
    """Return the distinct reasons for missing gradients, at most three."""
    ends = [item.path_ends.get(name) for name in use.parameters for item in use.facts.missing[name]]
    them = plural_verb("it", "them", use.parameters)
    reasons = []
    for end in filter(None, ends):
        reason_by_cause = {
            "cut": f"there the path is cut by {end.reason}{end.at}",
            "unreachable": f"there the last use is {end.reason}{end.at}, which does not reach the loss",
            "unused": f"there no operation of the forward pass reads {them}",
        }
        reasons.append(reason_by_cause.get(end.cause, ""))
    return list(dict.fromkeys(filter(None, reasons)))[:3]


def describe_path_end(end: PathEnd, subjects: Sequence[str], them: str) -> tuple[str, str, list[str]]:
    """Return code, message and evidence for the missing gradient of `subjects`."""
    names = join_names(subjects)
    inside = f" (in module {end.module})" if end.module else ""
    if end.cause == "unused":
        return "DDP101", f"No operation of the forward pass reads {names}.", []
    if end.cause == "unknown":
        does = plural_verb("does", "do", subjects)
        return "DDP102", f"{names} {does} not contribute to the loss; the cause is unknown.", []
    if end.cause == "cut":
        begins = [f"{end.reason} begins at {end.no_grad_location}"]
        message = f"The path from {names} to the loss is cut by {end.reason}{end.at}{inside}."
        return "DDP103", message, begins if end.no_grad_location not in (None, end.location) else []
    last = f"the last operation that depends on {them} is {end.reason}{end.at}"
    return "DDP102", f"The result of {names}{end.at}{inside} does not reach the loss.", [last]
