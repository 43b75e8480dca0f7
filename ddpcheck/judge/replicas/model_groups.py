"""Tensor parallelism: `judge.replicas.model_parts` on each group of ranks that compute one model, and on all groups."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.evidence.script import Inputs
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import counted
from ddpcheck.judge.replicas.model_parts import judge_batches, judge_counted_norms, judge_model_parts
from ddpcheck.judge.script_facts import ScriptFacts
from ddpcheck.judge.verdict import Verdict, Verdicts


def compare_groups(facts: ScriptFacts) -> Verdicts:
    """The findings on all groups, and what was compared, by check line."""
    groups = list(facts.model_groups)
    steps = [facts.part_steps(ranks) for ranks in groups]
    wrapped, inputs = bool(facts.wrappers), facts.of(Inputs)
    of_data, of_steps = [], []
    for (ranks, split), optimizers in zip(facts.model_groups.items(), steps, strict=True):
        theirs = [place for place, rank in enumerate(facts.ranks) if rank.started.rank in ranks]
        others = [of_rank for place, of_rank in enumerate(facts.passes) if place not in theirs]
        own = [facts.passes[place] for place in theirs]
        parts_given = any(one.parts_given for of_one in optimizers for of_ranks in of_one for one in of_ranks)
        given = [[] if parts_given else inputs[place] for place in theirs]
        of_data.append(judge_batches(own, given, ranks, split, others))
        found = (judge_model_parts(one, ranks, split, wrapped=wrapped) for one in optimizers)
        of_steps.append(next(filter(None, found), []))
    data = _of_groups(of_data)
    parts = [] if data else _of_groups(of_steps)
    for same in () if data or parts else zip(*steps, strict=False):
        parts = parts or judge_counted_norms(same, groups)
    compared = max((len(one) for of_group in steps for one in of_group), default=0)
    what = f"what tensor parallelism does not split, in {counted(compared, 'step')}" if compared else ""
    return {"replicas": Verdict(parts, what), "data": Verdict(data)}


def _of_groups(found: Sequence[Sequence[Finding]]) -> list[Finding]:
    """The findings of the first group of ranks that has some, with the ranks of the other groups of which they hold."""
    first = next(filter(None, found), ())
    codes = {finding.code for finding in first}
    alike = [of_group for of_group in found if {finding.code for finding in of_group} == codes]
    ranks = tuple(sorted({rank for of_group in alike for finding in of_group for rank in finding.ranks}))
    more = [f"so it is in {counted(len(alike), 'group')} of ranks"] if len(alike) > 1 else []
    return [replace(one, ranks=ranks, evidence=(*one.evidence, *more)) for one in first]
