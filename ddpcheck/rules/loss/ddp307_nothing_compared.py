"""DDP307 nothing-compared: error, undecided, keeps_results

Nothing was compared: every gradient was zero or missing.

Why: A comparison of zeros always passes. Such a check says nothing about the model, so it does not count as a pass.
Fix: Give the recipe a batch and a loss with a gradient: no empty mask, no factor of zero, no frozen model.
Detected: In every step, the norms of all gradients are zero, in the single process and on the ranks.
Ignore: Never. Such a check says nothing about the model.
Line: None: no single statement of the recipe is the fault.
Checks: report parity; repro zero
Example:
    def loss(model, batch):
        return (model(batch["x"]) * batch["mask"]).sum()   # the mask is all zeros; right: a batch with something in it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ddpcheck.findings.evidence.steps import GradientState
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import new_finding

ALL_MISSING = "none is there"  # tag of DDP307: every gradient is missing, none is zero


def judge_nothing_compared(norms: Mapping[int, float], states: Iterable[GradientState] = ()) -> list[Finding]:
    """Report that every gradient was zero or missing (DDP307)."""
    kinds = set(states)
    empty = sorted(step for step, norm in norms.items() if norm == 0.0)
    if not norms or len(empty) < len(norms):
        return []
    return new_finding(
        "DDP307",
        ("loss",),
        "Every gradient was zero or missing in every step, so nothing was compared.",
        evidence=["a comparison of zeros with zeros would pass whatever DDP did"],
        tags=(ALL_MISSING,) if kinds and kinds <= {"missing", "lost"} else (),
    )
