"""Check lines of wrappers in `ddpcheck run`: comparisons made, and gaps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ddpcheck.findings.evidence.script import FileUsed
from ddpcheck.findings.report import Finding
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.wording import counted, format_ranks
from ddpcheck.rules.gradients.wrappers import judge_begun, judge_wrappers
from ddpcheck.rules.program.restored_state import locate_restored_file
from ddpcheck.rules.verdict import OF_BUFFERS, Verdict, Verdicts
from ddpcheck.stream.entries import NotCompared, ReplicaCaptured, StepsReported
from ddpcheck.trace.losses import sums_rightly
from ddpcheck.trace.script_facts import ScriptFacts

_COMPRESSED = 0.1  # relative loss of a communication hook that makes comparison useless


_NOT_REDUCED = (
    "not compared with the average: gradients that are split among more than 8 ranks or along several dimensions, and "
    "those of shards that the program also uses directly"
)


PARTS = {  # what was compared, by heading
    "parameters": "every trainable parameter contributed to the loss in {steps}",
    "replicas": "modules, parameters, buffers and gradients match between ranks, {times}",
    "reducer": "gradients equal the average of the ranks' own, {times}",
    "loop": "forward, backward, no_sync and optimizer steps had a valid order in {steps}",
}
_OF_SHARDS = {
    "replicas": "modules and buffers{built} match between ranks, {times}",
    "loop": "forward, backward, reduction switches and optimizer steps had a valid order in {steps}",
}


def judge_all_of_wrappers(facts: ScriptFacts) -> Verdicts:
    """Judge the wrappers of a script, under the check lines of `PARTS`."""
    findings = locate_restored_file(judge_wrappers(facts), facts.of(FileUsed))
    captured = [wrapper.of(ReplicaCaptured) for wrapper in facts.wrappers]
    times = max(
        (len({id(replica) for replica in itertools.chain(*by_rank)}) // len(by_rank) for by_rank in captured), default=0
    )
    reasons = sorted({entry.why for wrapper in facts.wrappers for entry in itertools.chain(*wrapper.of(NotCompared))})
    hook_reasons, averaged_times = _why_not_averaged(facts, captured, findings)
    missing = sorted({rank for wrapper in facts.wrappers for rank in wrapper.missing})
    verdicts = {}
    sharded = [wrapper.made.context.sharded for wrapper in facts.wrappers]
    reports = [entry.report for wrapper in facts.wrappers for entry in itertools.chain(*wrapper.of(StepsReported))]
    for heading, text in PARTS.items():
        if sharded and all(sharded):
            is_known = all(
                values.keys() >= {*wrapper.made.context.trainable}
                for wrapper in facts.wrappers
                for values in wrapper.values_built
            )
            built = ", and values before fully_shard," if is_known else ""
            text = _OF_SHARDS.get(heading, text).replace("{built}", built)
        count = averaged_times if heading == "reducer" else times
        selected = [finding for finding in findings if _heading_of(finding) == heading]
        if heading == "parameters" and any(r.missing or r.sometimes_missing or r.never_used for r in reports):
            text += ", except those that may be unused"
        if heading == "reducer" and selected:
            text = "gradients and the average of the ranks' own, {times}"
        elif heading == "reducer" and any(map(sums_rightly, facts.wrappers)):
            text = text.replace("average", "average or sum")
        passed = text.format(steps=counted(facts.steps, "step"), times=f"compared {counted(count, 'time')}")
        lacking = not_here(missing)
        if "{times}" in text:
            parts = [*reasons, *(hook_reasons if heading == "reducer" else ())]
            partly = "" if count else "no step was compared"
            lacking = lacking or ": ".join(filter(None, (partly, "; ".join(parts) if parts else "")))
            passed = passed if count else ""
            if heading == "replicas" and any(facts.hook_that_leaves_own(wrapper.number) for wrapper in facts.wrappers):
                passed = passed.replace(", parameters, buffers and gradients", " and buffers")
            if heading == "replicas" and any(finding.code not in OF_BUFFERS for finding in selected):
                passed = ""
        if heading == "reducer" and any(sharded) and not all(map(_has_own, captured)):
            passed, lacking = passed if any(map(_has_own, captured)) else "", lacking or _NOT_REDUCED
        verdicts[heading] = Verdict(selected, "" if missing else passed, lacking) if facts.steps else Verdict(selected)
    return verdicts


def _heading_of(finding: Finding) -> str:
    return next((name for name in RULES[finding.code].checks.get("run", ()) if name in PARTS), "loop")


def not_here(missing: Sequence[int]) -> str:
    """Return why not all ranks were compared, or ''."""
    return f"not compared with {format_ranks(missing)}, which left no log here" if missing else ""


def _why_not_averaged(
    facts: ScriptFacts, captured: Sequence[Sequence[Sequence[ReplicaCaptured]]], findings: Sequence[Finding]
) -> tuple[list[str], int]:
    """Return why gradients were not compared with the average, and the step count."""
    exact = [[[replica for replica in replicas if _is_exact(replica)] for replicas in by_rank] for by_rank in captured]
    entries = [replica for by_rank in captured for replicas in by_rank for replica in replicas]
    reasons = [f"gradients that {entry.hook} compresses are not compared" for entry in entries if not _is_exact(entry)]
    for wrapper in facts.wrappers:
        hook = facts.hook_that_leaves_own(wrapper.number)
        if hook and facts.averages_by_hand(wrapper.number):
            return [f"{hook} leaves each rank its own gradients, and the script averages them"], 0
    if any(finding.code == "DDP301" for finding in findings):
        return ["the gradients differ between ranks"], 0
    times = max((max(map(len, by_rank)) for by_rank in exact), default=0)
    return list(dict.fromkeys(reasons)), times


def _has_own(captured: Sequence[Sequence[ReplicaCaptured]]) -> bool:
    """Check if each rank recorded local gradients."""
    return all(any(replica.own for replica in replicas) for replicas in captured)


def _is_exact(replica: ReplicaCaptured) -> bool:
    """Check if gradients are exact enough to compare with the average."""
    return max(replica.eps.values(), default=0.0) < _COMPRESSED


def judge_constructions(facts: ScriptFacts) -> Verdicts:
    """Judge wrapper constructions, including unfinished ones."""
    findings = judge_begun(facts)
    order = [finding for finding in findings if finding.code == "DDP403"]
    return {"replicas": Verdict([f for f in findings if f not in order]), "collectives": Verdict(order)}
