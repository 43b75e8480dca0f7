"""DDP104, 105 and 513: parameters that contribute to the loss on some ranks, or in some steps, and not in others.

This module is light: it never imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import Names, format_ranks, format_steps, join_names, make_finding, unless_all
from ddpcheck.judge.parameter_facts import AT_NEXT_FORWARD, SPARSE_ADVICE, SPARSE_REFUSED, ParameterFacts, family_of


@dataclass(frozen=True, slots=True)
class MissingOn:
    """Parameters that did not contribute on the same ranks, in the same steps."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ConditionalUse:
    """Parameters that are used together, under some condition.

    Attributes:
        parameters: Their names.
        absences: Where they were missing, in order.
        all_at_once: Whether they are all parameters of the module, missing in the same places.
        facts: On all parameters.
    """

    parameters: Sequence[str]
    absences: Sequence[MissingOn]
    all_at_once: bool
    facts: ParameterFacts

    @property
    def partial(self) -> list[MissingOn]:
        """The absences on some ranks only: the others wait there."""
        return [absence for absence in self.absences if len(absence.ranks) < self.facts.world_size]

    @property
    def steps(self) -> list[int]:
        """The steps in which they were missing on any rank."""
        return sorted({step for absence in self.absences for step in absence.steps})

    def finding(self, code: str, message: str, evidence: Sequence[str], ranks: Sequence[int] = ()) -> Finding:
        """A finding on these parameters, with what it means under the options of the wrapper."""
        facts, wrapper = self.facts, self.facts.wrapper
        sparse = any(name in wrapper.sparse for name in self.parameters)
        more = [SPARSE_REFUSED] if sparse and wrapper.find_unused_parameters else []
        if wrapper.static_graph:
            more.append("static_graph=True promises that the set of used parameters never changes")
        return make_finding(
            code,
            facts.names.subjects(self.parameters),
            message,
            ranks=unless_all(ranks, facts.world_size),
            steps=unless_all(self.steps, len(facts.steps)),
            location=facts.names.location(self.parameters),
            evidence=[*evidence, *more],
            fix=SPARSE_ADVICE if sparse else "",
        )


def judge_conditional_use(facts: ParameterFacts) -> list[Finding]:
    """One finding for each family of parameters that are missing on some ranks, or in some steps.

    Under `find_unused_parameters` DDP goes on without them, except for sparse gradients.
    """
    names = facts.sometimes_missing
    if facts.wrapper.find_unused_parameters:
        names = [name for name in names if name in facts.wrapper.sparse]
    places = {frozenset((item.rank, item.step) for item in facts.missing[name]) for name in names}
    all_at_once = len(places) == 1 and len(names) == len(facts.trainable) > 1
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault("" if all_at_once else family_of(name, set(names), facts.trainable), []).append(name)
    found = []
    for family in families.values():
        use = ConditionalUse(family, _absences(family, facts), all_at_once, facts)
        found += judge_rank_dependence(use) or judge_step_dependence(use)
    return found


def judge_rank_dependence(use: ConditionalUse) -> list[Finding]:
    """DDP104: in some step the parameters are missing on some ranks only.

    Before the question in which steps, for it is what stops DDP: ranks wait for each other.
    """
    partial = use.partial
    if not partial:
        return []
    step = min(min(absence.steps) for absence in partial)
    evidence = _evidence(use)
    message = _describe_first([absence for absence in partial if step in absence.steps], step, use.facts.names)
    if use.all_at_once:
        evidence = ["what the loss is made of there depends on no parameter, as a constant for an empty batch does"]
        message = (
            f"No parameter has a part in the loss of {format_ranks(partial[0].ranks)} in step {step}, while the "
            "other ranks wait for the gradients."
        )
    return [use.finding("DDP104", message, evidence, sorted({rank for absence in partial for rank in absence.ranks}))]


def judge_step_dependence(use: ConditionalUse) -> list[Finding]:
    """DDP105, or 513 under `static_graph`: the parameters are missing on every rank, in some steps."""
    facts, steps = use.facts, use.steps
    evidence = _evidence(use)
    subjects = join_names(facts.names.subjects(use.parameters))
    message = f"{subjects} contributed in some steps only: not in {format_steps(steps)}."
    if len({absence.steps for absence in use.absences}) > 1:
        message = f"{subjects} contributed in some steps only, each in steps of its own."
    if facts.wrapper.is_ddp and not facts.wrapper.tolerates_unused:
        evidence.append(
            f"plain DDP says nothing here, because no forward follows {format_steps(steps)}"
            if facts.ends_here and steps[0] == facts.steps[-1]
            else f"{AT_NEXT_FORWARD} after {format_steps(steps[:1])}"
        )
    return [use.finding("DDP513" if facts.wrapper.static_graph else "DDP105", message, evidence)]


def _absences(names: Sequence[str], facts: ParameterFacts) -> list[MissingOn]:
    """Where `names` were missing, those together that were missing on the same ranks in the same steps."""
    places: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for name in names:
        by_step: dict[int, list[int]] = {}
        for item in facts.missing[name]:
            by_step.setdefault(item.step, []).append(item.rank)
        for step, ranks in by_step.items():
            places.setdefault((step, tuple(sorted(ranks))), []).append(name)
    together: dict[tuple[tuple[str, ...], tuple[int, ...]], list[int]] = {}
    for (step, on_ranks), of_place in sorted(places.items()):
        together.setdefault((tuple(of_place), on_ranks), []).append(step)
    return [MissingOn(of_names, on_ranks, tuple(steps)) for (of_names, on_ranks), steps in together.items()]


_MOST_ABSENCES = 6


def _evidence(use: ConditionalUse) -> list[str]:
    """Where the parameters did not contribute, and why."""
    facts = use.facts
    lines = [
        f"{format_steps(absence.steps)}: {join_names(facts.names.subjects(absence.names))} did not contribute on "
        f"{format_ranks(absence.ranks) if len(absence.ranks) < facts.world_size else 'any rank'}"
        for absence in use.absences[:_MOST_ABSENCES]
    ]
    if len(use.absences) > _MOST_ABSENCES:
        lines.append(f"and so on ({len(use.absences) - _MOST_ABSENCES} more)")
    return lines + _reasons(use)


def _describe_first(absences: Sequence[MissingOn], step: int, names: Names) -> str:
    """The first step in which ranks disagree, in a sentence."""
    parts = [
        f"{join_names(names.subjects(item.names))} did not contribute on {format_ranks(item.ranks)}"
        for item in absences
    ]
    if len(parts) == 1:
        return f"{parts[0]} in step {step}, while the other ranks wait for the gradient."
    more = f" (and {len(parts) - 2} more)" if len(parts) > 2 else ""
    return f"In step {step} {parts[0]}, and {parts[1]}{more}: the ranks wait for each other's gradients."


def _reasons(use: ConditionalUse) -> list[str]:
    """Why the gradients were missing where they were, each reason once."""
    missing = [(name, item) for name in use.parameters for item in use.facts.missing[name]]
    facts: dict[str, None] = {}
    for end in dict.fromkeys(item.path_ends[name] for name, item in missing if name in item.path_ends):
        at = f" at {end.location}" if end.location else ""
        if end.cause == "cut":
            facts[f"there the path is cut by {end.reason}{at}"] = None
        elif end.cause == "unreachable":
            facts[f"there the last use is {end.reason}{at}, which does not reach the loss"] = None
        elif end.cause == "unused":
            facts["there no operation of the forward pass reads " + ("it" if len(use.parameters) == 1 else "them")] = (
                None
            )
    return list(facts)[:3]
