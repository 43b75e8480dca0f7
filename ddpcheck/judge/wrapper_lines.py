"""Check lines of wrappers in `ddpcheck run`: comparisons made, and gaps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ddpcheck.findings.evidence.script import FileUsed
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import counted, format_ranks
from ddpcheck.judge.data.script_files import told_by_files
from ddpcheck.judge.loop.script_wrappers import judge_begun, judge_wrappers, sums_rightly
from ddpcheck.judge.script_facts import ScriptFacts
from ddpcheck.judge.verdict import OF_BUFFERS, Verdict, Verdicts
from ddpcheck.stream.entries import NotCompared, ReplicaCaptured, StepsReported

_COMPRESSED = 0.1  # relative loss of a communication hook that makes comparison useless

_NOT_REDUCED = (
    "not compared with the average: gradients that are split among more than 8 ranks or along several dimensions, and "
    "those of shards that the program also uses directly"
)


PARTS = {  # by heading: prefixes of rule codes, and what was compared
    "parameters": (("DDP1",), "every trainable parameter contributed to the loss in {steps}"),
    "replicas": (
        ("DDP2", "DDP301", "DDP306"),
        "modules, parameters, buffers and gradients match between ranks, {times}",
    ),
    "reducer": (("DDP302", "DDP303", "DDP310"), "gradients equal the average of the ranks' own, {times}"),
    "loop": (("DDP305", "DDP5"), "forward, backward, no_sync and optimizer steps had a valid order in {steps}"),
}
_OF_SHARDS = {
    "replicas": "modules and buffers{built} match between ranks, {times}",
    "loop": "forward, backward, reduction switches and optimizer steps had a valid order in {steps}",
}


def judge_all_of_wrappers(facts: ScriptFacts) -> Verdicts:
    """Judge the wrappers of a script, under the check lines of `PARTS`."""
    found = told_by_files(judge_wrappers(facts), facts.of(FileUsed))
    captured = [wrapper.of(ReplicaCaptured) for wrapper in facts.wrappers]
    times = max(
        (len({id(one) for one in itertools.chain(*of_ranks)}) // len(of_ranks) for of_ranks in captured), default=0
    )
    why = sorted({one.why for wrapper in facts.wrappers for one in itertools.chain(*wrapper.of(NotCompared))})
    of_hooks, told = _of_hooks(facts, captured, found)
    missing = sorted({rank for wrapper in facts.wrappers for rank in wrapper.missing})
    verdicts = {}
    sharded = [one.made.context.sharded for one in facts.wrappers]
    reports = [one.report for wrapper in facts.wrappers for one in itertools.chain(*wrapper.of(StepsReported))]
    for heading, (families, what) in PARTS.items():
        if sharded and all(sharded):
            known = all(
                of_rank.keys() >= {*one.made.context.trainable}
                for one in facts.wrappers
                for of_rank in one.values_built
            )
            built = ", and values before fully_shard," if known else ""
            what = _OF_SHARDS.get(heading, what).replace("{built}", built)
        made = told if heading == "reducer" else times
        own = [finding for finding in found if finding.code.startswith(families)]
        if heading == "parameters" and any(one.missing or one.sometimes_missing or one.never_used for one in reports):
            what += ", except those that may be unused"
        if heading == "reducer" and own:
            what = "gradients and the average of the ranks' own, {times}"
        elif heading == "reducer" and any(map(sums_rightly, facts.wrappers)):
            what = what.replace("average", "average or sum")
        said = what.format(steps=counted(facts.steps, "step"), times=f"compared {counted(made, 'time')}")
        lacking = not_here(missing)
        if "{times}" in what:
            parts = [*why, *(of_hooks if heading == "reducer" else ())]
            partly = "" if made else "no step was compared"
            lacking = lacking or ": ".join(filter(None, (partly, "; ".join(parts) if parts else "")))
            said = said if made else ""
            if heading == "replicas" and any(facts.hook_that_leaves_own(one.number) for one in facts.wrappers):
                said = said.replace(", parameters, buffers and gradients", " and buffers")
            if heading == "replicas" and any(finding.code not in OF_BUFFERS for finding in own):
                said = ""
        if heading == "reducer" and any(sharded) and not all(map(_has_own, captured)):
            said, lacking = said if any(map(_has_own, captured)) else "", lacking or _NOT_REDUCED
        verdicts[heading] = Verdict(own, "" if missing else said, lacking) if facts.steps else Verdict(own)
    return verdicts


def not_here(missing: Sequence[int]) -> str:
    """Return why not all ranks were compared, or ''."""
    return f"not compared with {format_ranks(missing)}, which left no log here" if missing else ""


def _of_hooks(
    facts: ScriptFacts, captured: Sequence[Sequence[Sequence[ReplicaCaptured]]], found: Sequence[Finding]
) -> tuple[list[str], int]:
    """Return why gradients were not compared with the average, and the step count."""
    told = [[[one for one in of_rank if _tells(one)] for of_rank in of_ranks] for of_ranks in captured]
    every = [one for of_ranks in captured for of_rank in of_ranks for one in of_rank]
    why = [f"gradients that {one.hook} compresses are not compared" for one in every if not _tells(one)]
    for wrapper in facts.wrappers:
        hook = facts.hook_that_leaves_own(wrapper.number)
        if hook and facts.averages_by_hand(wrapper.number):
            return [f"{hook} leaves each rank its own gradients, and the script averages them"], 0
    if any(finding.code == "DDP301" for finding in found):
        return ["the gradients differ between ranks"], 0
    times = max((max(map(len, of_ranks)) for of_ranks in told), default=0)
    return list(dict.fromkeys(why)), times


def _has_own(captured: Sequence[Sequence[ReplicaCaptured]]) -> bool:
    """Check if each rank recorded local gradients."""
    return all(any(one.own for one in of_rank) for of_rank in captured)


def _tells(one: ReplicaCaptured) -> bool:
    """Check if gradients are exact enough to compare with the average."""
    return max(one.eps.values(), default=0.0) < _COMPRESSED


def judge_constructions(facts: ScriptFacts) -> Verdicts:
    """Judge wrapper constructions, including unfinished ones."""
    found = judge_begun(facts)
    order = [finding for finding in found if finding.code == "DDP403"]
    return {"replicas": Verdict([one for one in found if one not in order]), "collectives": Verdict(order)}
