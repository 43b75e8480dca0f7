"""DDP517 gradients-discarded: error

Gradients are zeroed or replaced before an optimizer step has used them.

Why: A zero_grad between backward and step, or in every micro-step of an accumulation, discards gradients that were
    computed and reduced. The model trains on a part of the batch, or not at all.
Fix: Call zero_grad right after step, or right before the first micro-step, and nowhere else.
Detected: ddpcheck records zero_grad, backward passes and optimizer steps in order. It reports gradients that are
    repeatedly zeroed before a step has used them.
Ignore: If a step is skipped on purpose, and its gradients with it.
Line: The call of zero_grad that discards the gradients. If no gradient reaches an optimizer step: that step.
Checks: report reducer; run loop; repro discarded
Example:
    for part in parts:
        optimizer.zero_grad()                # right: once, before the loop
        loss(ddp, part).backward()
"""

from __future__ import annotations

import itertools

from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import join_names, new_finding
from ddpcheck.rules.registry import rule
from ddpcheck.trace.gradients import Ledgers, ranks_and_steps
from ddpcheck.trace.loop import Loop

MIN_REPEATS = 2
"""Fewest earlier steps in a row with the same zeroing: with only one, two steps may be an exception."""

MIN_DISCARDED_STEPS = 2
"""Fewest steps in a row that lose gradients: a single step may be skipped on purpose."""


@rule
def judge_zeroed(loop: Loop) -> list[Finding]:
    """DDP517: first rank that zeroes gradients several times between two optimizer steps."""
    entries = itertools.chain(*loop.zeroed)
    zeroed = next((entry for entry in entries if entry.in_a_row == 0 or entry.in_a_row >= MIN_REPEATS), None)
    if zeroed is None:
        return []
    return new_finding(
        "DDP517",
        ("zero_grad",),
        f"zero_grad discards gradients that no step has used: it is called {zeroed.times} times before each "
        "optimizer step.",
        location=zeroed.location,
        evidence=["each time the gradients were not zero"],
    )


def judge_discarded_gradients(ledgers: Ledgers) -> list[Finding]:
    """DDP517: gradients zeroed before any optimizer step used them."""
    lost = [(item, contribution) for item, ledger in ledgers for contribution in ledger.lost]
    lost = [(item, c) for item, c in lost if not 0 < c.ended_by.in_a_row < MIN_DISCARDED_STEPS]
    if not lost:
        return []
    first = lost[0][1]
    origin = [c for item, c in lost if item is lost[0][0] and c.ended == first.ended][-1].backward.location
    return new_finding(
        "DDP517",
        ("zero_grad",),
        f"zero_grad discards the gradients of {join_names(first.ended_by.discarded)} before any step has used them.",
        **ranks_and_steps(lost, ledgers),
        location=Location.parse(first.ended_by.location),
        evidence=[f"they come from the backward at {origin}"] if origin else [],
    )
