"""Judges of parameters that do not contribute to the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpcheck.findings.evidence.modules import WrapperFacts
from ddpcheck.findings.evidence.steps import PathEnd, StepEvidence
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import Names, group_by
from ddpcheck.rules.collectives.ddp406_marked_ready_twice import judge_hidden_parameters, judge_repeated_arrival
from ddpcheck.rules.parameters.ddp101_unused_parameter import judge_unused
from ddpcheck.rules.parameters.ddp102_non_contributing_parameter import judge_unreachable
from ddpcheck.rules.parameters.ddp103_detached_parameter import judge_cut
from ddpcheck.rules.parameters.ddp104_rank_dependent_parameter import judge_rank_dependence
from ddpcheck.rules.parameters.ddp105_step_dependent_parameter import judge_step_dependence
from ddpcheck.rules.parameters.ddp106_unregistered_parameter import judge_unregistered
from ddpcheck.rules.parameters.ddp107_zero_gradient_parameter import judge_zero_gradients
from ddpcheck.rules.parameters.ddp108_missing_gradient import judge_lost_gradient
from ddpcheck.rules.parameters.ddp109_needless_find_unused import judge_needless_search
from ddpcheck.rules.parameters.ddp112_opaque_output import judge_opaque_output
from ddpcheck.rules.parameters.ddp513_static_graph_violated import judge_static_graph
from ddpcheck.rules.replicas.ddp503_changed_after_wrapping import judge_changed_in_forward
from ddpcheck.trace.parameters import ConditionalUse, MissingGroup, MissingOn, ParameterFacts


def judge_conditional_use(facts: ParameterFacts) -> list[Finding]:
    """Report parameters missing on some ranks or in some steps, one finding per module.

    `find_unused_parameters` tolerates missing gradients, except sparse gradients. `fully_shard` tolerates parameters
    missing on all ranks and, if configured to reduce missing gradients as zeros, on some ranks.
    """
    names = facts.sometimes_missing
    if facts.wrapper.tolerates_partial_use:
        names = [name for name in names if name in facts.wrapper.sparse]
    places = {frozenset((item.rank, item.step) for item in facts.missing[name]) for name in names}
    all_at_once = len(places) == 1 and len(names) == len(facts.trainable) > 1
    missing = frozenset(names)
    families = group_by(names, lambda name: "" if all_at_once else facts.family_of(name, missing))
    findings = []
    for family in families.values():
        use = ConditionalUse(family, _group_absences(family, facts), all_at_once, facts)
        by_step = judge_static_graph if facts.wrapper.static_graph else judge_step_dependence
        findings += judge_rank_dependence(use) or ([] if facts.wrapper.sharded else by_step(use))  # a hang first
    return findings


def _group_absences(names: Sequence[str], facts: ParameterFacts) -> list[MissingOn]:
    """Group parameters that are missing on the same ranks in the same steps."""
    places: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for name in names:
        for step, items in group_by(facts.missing[name], lambda item: item.step).items():
            places.setdefault((step, tuple(sorted(item.rank for item in items))), []).append(name)
    groups = group_by(sorted(places), lambda key: (tuple(places[key]), key[1]))
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
    """Judge all parameters of a module.

    `nonzero_when_perturbed`: parameters whose gradient is zero only at their current values. `zero_ends`: by parameter,
    where the gradient becomes zero. `ends_here`: True if the run ends with the last step of `evidence`.
    """
    changed = judge_changed_in_forward(evidence, wrapper, names)
    explained = {name for finding in changed for name in finding.subjects}
    facts = ParameterFacts.from_evidence(evidence, wrapper, names, ends_here=ends_here, explained=explained)
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
    """Report parameters that never contribute, one finding per cause and line."""
    names = [name for name in facts.trainable if len(facts.missing.get(name, ())) == len(facts.evidence)]
    missing = frozenset(names)

    def end_of(name: str) -> PathEnd:
        return next((item.path_ends[name] for item in facts.evidence if name in item.path_ends), PathEnd("unknown"))

    def cause_and_location(name: str) -> tuple[object, ...]:
        end = end_of(name)
        origin = facts.family_of(name, missing) if end.cause == "unused" else end.edit_at
        return end.cause, end.reason, origin, name in facts.wrapper.sparse

    groups = [MissingGroup(g, end_of(g[0]), facts) for g in group_by(names, cause_and_location).values()]
    return [finding for group in groups for finding in _JUDGES.get(group.end.cause, judge_unreachable)(group)]


def judge_lost_gradients(facts: ParameterFacts) -> list[Finding]:
    """Report parameters that backward reaches without computing a gradient.

    Compiled code returns None, too, for parameters that do not contribute in eager mode.
    """
    lost: dict[tuple[tuple[int, ...], PathEnd], list[str]] = {}
    for name in facts.trainable:
        if seen := [item for item in facts.evidence if item.states.get(name) == "lost"]:
            end = next((item.path_ends[name] for item in seen if name in item.path_ends), PathEnd("lost"))
            lost.setdefault((tuple(sorted({item.rank for item in seen})), end), []).append(name)
    groups = [MissingGroup(names, end, facts, ranks) for (ranks, end), names in lost.items()]
    return [finding for group in groups for finding in _JUDGES.get(group.end.cause, judge_lost_gradient)(group)]


_JUDGES = {
    "unused": judge_unused,
    "unreachable": judge_unreachable,
    "cut": judge_cut,
}  # by cause of the missing gradient
