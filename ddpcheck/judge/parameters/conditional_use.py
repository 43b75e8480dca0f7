"""DDP104, 105 and 513: parameters missing from the loss on some ranks or in some steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ddpcheck.findings.evidence.modules import WrapperFacts
from ddpcheck.findings.evidence.steps import StepEvidence
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import Names, format_ranks, format_steps, group_by, join_names, plural_verb, unless_all

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


def judge_conditional_use(facts: ParameterFacts) -> list[Finding]:
    """Report each family of parameters missing on some ranks or in some steps.

    `find_unused_parameters` tolerates missing gradients except sparse gradients; `fully_shard` tolerates parameters
    missing on all ranks, or reduces zeros instead if configured.
    """
    names = facts.sometimes_missing
    if facts.wrapper.tolerates_absence:
        names = [name for name in names if name in facts.wrapper.sparse]
    places = {frozenset((item.rank, item.step) for item in facts.missing[name]) for name in names}
    all_at_once = len(places) == 1 and len(names) == len(facts.trainable) > 1
    missing = frozenset(names)
    families = group_by(names, lambda name: "" if all_at_once else facts.family_of(name, missing))
    findings = []
    for family in families.values():
        use = ConditionalUse(family, _absences(family, facts), all_at_once, facts)
        findings += judge_rank_dependence(use) or ([] if facts.wrapper.sharded else judge_step_dependence(use))
    return findings


def judge_rank_dependence(use: ConditionalUse) -> list[Finding]:
    """DDP104: parameters missing on some ranks only in the same step.

    Judged before DDP105, since ranks that wait for each other stop DDP.
    """
    partial = [absence for absence in use.absences if len(absence.ranks) < use.facts.world_size]
    if not partial:
        return []
    step = min(min(absence.steps) for absence in partial)
    evidence = _evidence(use)
    verb = "reduce" if use.facts.wrapper.sharded else "wait for"
    message = _describe_first([absence for absence in partial if step in absence.steps], step, use.facts.names, verb)
    if use.all_at_once:
        evidence = ["the loss depends on no parameter there, such as a constant for an empty batch"]
        message = (
            f"No parameter has a part in the loss of {format_ranks(partial[0].ranks)} in step {step}, while the "
            f"other ranks {verb} the gradients."
        )
    return use.one_finding("DDP104", message, evidence, sorted({rank for item in partial for rank in item.ranks}))


def judge_step_dependence(use: ConditionalUse) -> list[Finding]:
    """DDP105, or 513 under `static_graph`: parameters missing on every rank in some steps."""
    facts, steps = use.facts, use.steps
    evidence = _evidence(use)
    subjects = join_names(facts.names.subjects(use.parameters))
    message = f"{subjects} contributed in some steps only: not in {format_steps(steps)}."
    if len({absence.steps for absence in use.absences}) > 1:
        message = f"{subjects} contributed in some steps only, each in different ones."
    if facts.wrapper.is_ddp and not facts.wrapper.tolerates_unused:
        silent = f"plain DDP says nothing here, because no forward follows {format_steps(steps)}"
        raises = f"{AT_NEXT_FORWARD} after {format_steps(steps[:1])}"
        evidence.append(silent if facts.ends_here and steps[0] == facts.steps[-1] else raises)
    return use.one_finding("DDP513" if facts.wrapper.static_graph else "DDP105", message, evidence)


def _absences(names: Sequence[str], facts: ParameterFacts) -> list[MissingOn]:
    """Group the absences of `names` by ranks and steps."""
    places: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for name in names:
        for step, items in group_by(facts.missing[name], lambda item: item.step).items():
            places.setdefault((step, tuple(sorted(item.rank for item in items))), []).append(name)
    groups = group_by(sorted(places), lambda place: (tuple(places[place]), place[1]))
    return [MissingOn(members, ranks, tuple(step for step, _ in keys)) for (members, ranks), keys in groups.items()]


_MOST_ABSENCES = 6


def _evidence(use: ConditionalUse) -> list[str]:
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


def _describe_first(absences: Sequence[MissingOn], step: int, names: Names, verb: str) -> str:
    """Describe the first step in which ranks disagree (`verb`: other ranks' action)."""
    parts = [
        f"{join_names(names.subjects(item.names))} did not contribute on {format_ranks(item.ranks)}"
        for item in absences
    ]
    if len(parts) == 1:
        return f"{parts[0]} in step {step}, while the other ranks {verb} the gradient."
    suffix = f" (and {len(parts) - 2} more)" if len(parts) > 2 else ""
    return f"In step {step} {parts[0]}, and {parts[1]}{suffix}: the ranks wait for each other's gradients."


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
