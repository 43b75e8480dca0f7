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
from ddpcheck.rules.verdict import Verdict, Verdicts
from ddpcheck.stream.entries import NotCompared, ReplicaCaptured, StepsReported
from ddpcheck.trace.gradients import UNEQUAL
from ddpcheck.trace.losses import sums_rightly
from ddpcheck.trace.script_facts import ScriptFacts

LOSSY_HOOK = 0.1
"""Relative loss of a communication hook from which its gradients are not compared with the average."""

NOT_REDUCED = (
    "not compared with the average: gradients that are split among more than 8 ranks or along several dimensions, and "
    "those of shards that the program also uses directly"
)

CHECKS = ("parameters", "replicas", "reducer", "loop")
"""Check lines of a wrapper; a finding stands in the first of its rule's."""


def judge_all_of_wrappers(facts: ScriptFacts) -> Verdicts:
    """Judge the wrappers of a script, and describe what matches by check line."""
    findings = locate_restored_file(judge_wrappers(facts), facts.of(FileUsed))
    by_check = {check: [finding for finding in findings if _check_of(finding, CHECKS) == check] for check in CHECKS}
    if not facts.steps:
        return {check: Verdict(selected) for check, selected in by_check.items()}
    missing = sorted({rank for wrapper in facts.wrappers for rank in wrapper.missing})
    reports = [entry.report for wrapper in facts.wrappers for entry in itertools.chain(*wrapper.of(StepsReported))]
    may_miss = any(report.missing or report.sometimes_missing or report.never_used for report in reports)
    steps, switch = counted(facts.steps, "step"), "reduction switches" if _are_sharded(facts) else "no_sync"
    unused = ", except those that may be unused" if may_miss else ""
    compared = {
        "parameters": (f"every trainable parameter contributed to the loss in {steps}{unused}", ""),
        "replicas": _compare_replicas(facts, by_check["replicas"]),
        "reducer": _compare_gradients(facts, findings, is_wrong=bool(by_check["reducer"])),
        "loop": (f"forward, backward, {switch} and optimizer steps had a valid order in {steps}", ""),
    }
    return {
        check: Verdict(by_check[check], "" if missing else passed, describe_missing_ranks(missing) or not_compared)
        for check, (passed, not_compared) in compared.items()
    }


def _check_of(finding: Finding, checks: Sequence[str]) -> str:
    return next((check for check in RULES[finding.code].checks.get("run", ()) if check in checks), checks[-1])


def describe_missing_ranks(missing: Sequence[int]) -> str:
    """Return why not all ranks were compared, or ''."""
    return f"not compared with {format_ranks(missing)}, which left no log here" if missing else ""


def _are_sharded(facts: ScriptFacts) -> bool:
    return bool(facts.wrappers) and all(wrapper.made.context.sharded for wrapper in facts.wrappers)


def _compare_replicas(facts: ScriptFacts, findings: Sequence[Finding]) -> tuple[str, str]:
    """Return what matches between ranks, and why not all was compared."""
    count = max((sum(map(len, w.of(ReplicaCaptured))) // len(w.ranks) for w in facts.wrappers), default=0)
    not_compared = _gaps(facts, count)
    if not count or any(not RULES[finding.code].buffers_only for finding in findings):
        return "", not_compared
    subjects = "modules, parameters, buffers and gradients"
    if _are_sharded(facts):
        built = [(values, wrapper) for wrapper in facts.wrappers for values in wrapper.values_built]
        is_known = all(values.keys() >= {*wrapper.made.context.trainable} for values, wrapper in built)
        subjects = f"modules and buffers{', and values before fully_shard,' if is_known else ''}"
    elif any(facts.hook_that_leaves_own(wrapper.number) for wrapper in facts.wrappers):
        subjects = "modules and buffers"
    return f"{subjects} match between ranks, compared {counted(count, 'time')}", not_compared


def _compare_gradients(facts: ScriptFacts, findings: Sequence[Finding], *, is_wrong: bool) -> tuple[str, str]:
    """Return how gradients compare with the average, and why not all were compared."""
    reasons, count = _why_not_averaged(facts, findings)
    average = "average or sum" if any(map(sums_rightly, facts.wrappers)) else "average"
    result = "and the average" if is_wrong else f"equal the {average}"
    passed = f"gradients {result} of the ranks' own, compared {counted(count, 'time')}" if count else ""
    not_compared = _gaps(facts, count, reasons)
    has_own = [all(any(r.own for r in replicas) for replicas in w.of(ReplicaCaptured)) for w in facts.wrappers]
    if any(wrapper.made.context.sharded for wrapper in facts.wrappers) and not all(has_own):
        return passed if any(has_own) else "", not_compared or NOT_REDUCED
    return passed, not_compared


def _gaps(facts: ScriptFacts, count: int, reasons: Sequence[str] = ()) -> str:
    """Return why steps were not compared, or ''; `count`: steps compared."""
    entries = (entry for wrapper in facts.wrappers for entry in itertools.chain(*wrapper.of(NotCompared)))
    parts = "; ".join((*sorted({entry.why for entry in entries}), *reasons))
    return ": ".join(filter(None, ("" if count else "no step was compared", parts)))


def _why_not_averaged(facts: ScriptFacts, findings: Sequence[Finding]) -> tuple[list[str], int]:
    """Return why gradients were not compared with the average, and the step count."""
    for wrapper in facts.wrappers:
        hook = facts.hook_that_leaves_own(wrapper.number)
        if hook and facts.averages_by_hand(wrapper.number):
            return [f"{hook} leaves each rank its own gradients, and the script averages them"], 0
    if any(UNEQUAL in finding.tags for finding in findings):
        return ["the gradients differ between ranks"], 0
    captured = [replicas for wrapper in facts.wrappers for replicas in wrapper.of(ReplicaCaptured)]
    lossy = [[r.hook for r in replicas if max(r.eps.values(), default=0.0) >= LOSSY_HOOK] for replicas in captured]
    hooks = dict.fromkeys(itertools.chain(*lossy))
    counts = [len(replicas) - len(rank_lossy) for replicas, rank_lossy in zip(captured, lossy, strict=True)]
    return [f"gradients that {hook} compresses are not compared" for hook in hooks], max(counts, default=0)


def judge_constructions(facts: ScriptFacts) -> Verdicts:
    """Judge wrapper constructions, including unfinished ones."""
    checks = ("collectives", "replicas")
    findings = judge_begun(facts)
    return {check: Verdict([f for f in findings if _check_of(f, checks) == check]) for check in reversed(checks)}
