"""Judges of parameters that do not contribute to the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpcheck.findings.evidence.modules import WrapperFacts
from ddpcheck.findings.evidence.steps import PathEnd, StepEvidence
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import Names, format_steps, group_by, join_names
from ddpcheck.rules.collectives.ddp406_marked_ready_twice import judge_hidden_parameters, judge_repeated_arrival
from ddpcheck.rules.parameters.ddp103_detached_parameter import explain_always_missing
from ddpcheck.rules.parameters.ddp104_rank_dependent_parameter import judge_rank_dependence
from ddpcheck.rules.parameters.ddp106_unregistered_parameter import judge_unregistered
from ddpcheck.rules.parameters.ddp107_zero_gradient_parameter import judge_zero_gradients
from ddpcheck.rules.parameters.ddp108_missing_gradient import judge_lost_gradients
from ddpcheck.rules.parameters.ddp109_needless_find_unused import judge_needless_search
from ddpcheck.rules.parameters.ddp112_opaque_output import judge_opaque_output
from ddpcheck.rules.replicas.ddp503_changed_after_wrapping import judge_changed_in_forward
from ddpcheck.trace.parameters import AT_NEXT_FORWARD, ConditionalUse, MissingOn, ParameterFacts, absence_evidence


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


def judge_step_dependence(use: ConditionalUse) -> list[Finding]:
    """DDP105, or 513 under `static_graph`: parameters missing on every rank in some steps."""
    facts, steps = use.facts, use.steps
    evidence = absence_evidence(use)
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


def judge_parameters(
    evidence: Sequence[StepEvidence],
    wrapper: WrapperFacts,
    names: Names,
    *,
    nonzero_when_perturbed: frozenset[str] = frozenset(),
    zero_ends: Mapping[str, PathEnd] | None = None,
    ends_here: bool = True,
) -> list[Finding]:
    """Judge all parameters of a module."""
    changed = judge_changed_in_forward(evidence, wrapper, names)
    explained = {name for finding in changed for name in finding.subjects}
    facts = ParameterFacts.of(evidence, wrapper, names, ends_here=ends_here, explained=explained)
    findings = [
        *changed,
        *judge_always_missing(facts),
        *judge_conditional_use(facts),
        *judge_lost_gradients(facts),
        *judge_zero_gradients(facts, nonzero_when_perturbed, zero_ends or {}),
        *judge_unregistered(facts),
        *(judge_opaque_output(facts) or judge_hidden_parameters(facts)),
        *judge_repeated_arrival(facts),
    ]
    return findings or judge_needless_search(facts)


def judge_always_missing(facts: ParameterFacts) -> list[Finding]:
    """DDP101, 102 and 103: parameters that never contribute, one finding per cause and place."""
    names = [name for name in facts.trainable if len(facts.missing.get(name, ())) == len(facts.evidence)]
    missing = frozenset(names)

    def end_of(name: str) -> PathEnd:
        return next((item.path_ends[name] for item in facts.evidence if name in item.path_ends), PathEnd("unknown"))

    def cause_and_place(name: str) -> tuple[object, ...]:
        end = end_of(name)
        place = facts.family_of(name, missing) if end.cause == "unused" else end.edit_at
        return end.cause, end.reason, place, name in facts.wrapper.sparse

    groups = group_by(names, cause_and_place).values()
    return [finding for group in groups for finding in explain_always_missing(group, end_of(group[0]), facts)]
