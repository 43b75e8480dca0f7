"""DDP301 and 302: gradients of the wrapper's step under `torch.compile`, where a recipe asks for it.

Pure functions from `findings.evidence.steps` (gathered by `gather.phases.ddp_step`) to findings.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.evidence.steps import CompiledStep
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import make_finding
from ddpcheck.judge.judge_context import JudgeContext
from ddpcheck.judge.replicas import differing_names

_PREFIX = re.compile(r"\b_orig_mod\.|\._orig_mod\b| \(in module _orig_mod\)")


def judge_compiled(evidence: Sequence[CompiledStep], known: JudgeContext) -> list[Finding]:
    """DDP301 and 302 of gradients that are right without compilation, which has been judged before."""
    for step in dict.fromkeys(item.step for item in evidence):
        items = [item for item in evidence if item.step == step]
        if names := list(differing_names([item.gradients for item in items])):
            return [
                make_finding(
                    "DDP301",
                    known.names.subjects(names),
                    f"Under torch.compile the gradients of {len(names)} of {len(items[0].gradients)} parameters differ "
                    f"between ranks after backward, in step {step}; without it they are equal.",
                    steps=(step,),
                    location=known.names.location(names),
                )
            ]
        wrong = {} if _drew(items) else {bad.name: bad for item in items for bad in item.differences if bad.bad}
        if wrong:
            return [
                make_finding(
                    "DDP302",
                    known.names.subjects(list(wrong)),
                    f"Under torch.compile the wrapper leaves other gradients for {len(wrong)} of "
                    f"{len(items[0].gradients)} parameters, in step {step}, than the average of the ranks' own, which "
                    "it leaves without torch.compile.",
                    steps=(step,),
                    location=known.names.location(list(wrong)),
                    evidence=[*map(str, sorted(wrong.values(), key=_error)[:3])],
                )
            ]
    return []


def tell_compiled(evidence: Sequence[CompiledStep]) -> str:
    """A sentence on the steps that were run under `torch.compile`."""
    if not evidence:
        return "torch.compile was not run: everything is checked as the code is written"
    errors = [difference.error for item in evidence for difference in item.differences]
    apart = (
        "draws other random numbers there"
        if _drew(evidence)
        else f"leaves the same gradients there, within a relative error of {max(errors, default=0.0):.1g}"
    )
    return f"with torch.compile only the wrapper's steps are run again, which {apart}; the rest is run without it"


def without_prefix(finding: Finding) -> Finding:
    """A finding whose names are those of the code as it is written: `torch.compile(module)` holds it as `_orig_mod`."""
    return replace(
        finding,
        subjects=tuple(map(plain_name, finding.subjects)),
        message=plain_name(finding.message),
        evidence=tuple(map(plain_name, finding.evidence)),
    )


def plain_name(text: str) -> str:
    """A name of a parameter or module, or a text with some in it, without what `torch.compile` puts before them."""
    return _PREFIX.sub("", text)


def _drew(evidence: Sequence[CompiledStep]) -> bool:
    return any(item.drew for item in evidence)


def _error(difference: Difference) -> float:
    return -difference.error
