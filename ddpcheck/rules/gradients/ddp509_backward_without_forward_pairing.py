"""DDP509 backward-without-forward-pairing: error, stops_run

The wrapper's forward and backward passes do not come in pairs.

Why: A forward prepares the reducer, and one backward finishes it. A second backward of the same forward is not
    reduced. A forward without a backward leaves the reducer waiting. Several forwards and backwards must have the
    same order on all ranks. (PyTorch docs, DistributedDataParallel.)
Fix: Call forward once and backward once a step; add losses up before backward; use no_grad for forwards that do not
    train.
Detected: ddpcheck records the wrapper's forward and backward passes in order. It reports a second backward pass
    without its own forward, if an optimizer uses its gradients. It also reports a second pass that makes DDP raise.
Ignore: If the gradients of the second pass are only inspected, and no optimizer uses them.
Line: The line of the second backward pass.
Checks: report reducer; run loop; repro reduction
Explains: DDP101 DDP102 DDP103 DDP301 DDP302 DDP306 DDP406
Example:
    one, other = ddp(a).mean(), ddp(b).mean()
    one.backward()
    other.backward()                         # right: (one + other).backward()
"""

from __future__ import annotations

from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import new_finding
from ddpcheck.trace.failures import MARKED_TWICE, UNDEFINED_GRADIENT, FailureFacts, WrapperErrorFacts
from ddpcheck.trace.gradients import Ledgers

_GRADIENT_TOO_LATE = (
    "A second backward pass of an earlier step delivered gradients after the reduction of that step: DDP takes them "
    "for the start of the next reduction, and waits for the rest"
)


def explain_undefined_gradient(facts: FailureFacts) -> list[Finding]:
    """DDP509: gradient that arrives after the reduction, so DDP starts the next reduction."""
    return facts.new_finding("DDP509", ("backward",), f"{_GRADIENT_TOO_LATE}.")


def explain_error_of_undefined_gradient(facts: WrapperErrorFacts) -> list[Finding]:
    """DDP509: torch's error about an undefined gradient, which arrives after the reduction."""
    return facts.finding_of_error("DDP509", _GRADIENT_TOO_LATE, UNDEFINED_GRADIENT)


def explain_by_second_backward(facts: WrapperErrorFacts) -> list[Finding]:
    """DDP509: second backward pass of a step, which torch reports as a duplicate gradient."""
    if MARKED_TWICE not in facts.text or "utils/checkpoint.py" in facts.text or facts.known.local.backwards[1] < 2:
        return []
    return facts.new_finding(
        "DDP509",
        ("backward",),
        "A second backward pass follows without its own forward: it delivers gradients again that DDP has averaged "
        "in the first one.",
        location=Location.parse(facts.failures[0].location),
    )


def judge_backward_pairing(ledgers: Ledgers) -> list[Finding]:
    """DDP509: second backward pass after one forward: DDP averages only the first."""
    unpaired = [(item, c) for item, ledger in ledgers for c in ledger.unpaired]
    if not unpaired:
        return []
    item, contribution = unpaired[0]
    done = "" if contribution.after is None else contribution.after.location
    kinds = [event.kind for event in item.events[: contribution.number + 1] if event.kind in ("forward", "backward")]
    return new_finding(
        "DDP509",
        ("backward",),
        "A second backward pass follows without its own forward: DDP averages in the first one after a forward, and "
        "the gradients that the second adds stay on their rank.",
        location=Location.parse(contribution.backward.location or done),
        evidence=[f"the step runs {', '.join(kinds)}", f"reduced: the backward at {done}" if done else ""],
    )
