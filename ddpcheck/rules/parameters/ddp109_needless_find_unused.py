"""DDP109 needless-find-unused: note, needless_option, stops_run, keeps_results

find_unused_parameters=True is set, and every parameter contributed in every step.

Why: DDP then walks the autograd graph after every forward pass and all-reduces a bitmap of used parameters. Both
    waste time in every step. (PyTorch docs, DistributedDataParallel, find_unused_parameters; DDP itself warns about
    it once.)
Fix: Remove find_unused_parameters=True; ddpcheck reports when it is needed again.
Detected: find_unused_parameters=True is set, and backward reached every parameter in every step on every rank.
Ignore: If a later phase of training leaves parameters out. ddpcheck has not checked the steps of that phase.
Line: In `ddpcheck run`, the line that constructs the wrapper. `ddpcheck report` names no line.
Checks: report parameters; run parameters; repro search
Reports: speechbrain/speechbrain#701
Example:
    DistributedDataParallel(model, find_unused_parameters=True)   # right here: DistributedDataParallel(model)
"""

from __future__ import annotations

from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import new_finding, plural
from ddpcheck.trace.parameters import ParameterFacts


def judge_needless_search(facts: ParameterFacts) -> list[Finding]:
    """DDP109: `find_unused_parameters=True` although every parameter always contributes."""
    if not facts.wrapper.find_unused_parameters or facts.missing or not facts.evidence:
        return []
    return new_finding(
        "DDP109",
        ("find_unused_parameters",),
        f"Every parameter contributed in {plural(len(facts.steps), 'step')} on every rank, "
        "so find_unused_parameters=True searches the graph for nothing.",
        evidence=("cost: one traversal of the autograd graph and one more all-reduce in every step",),
    )
