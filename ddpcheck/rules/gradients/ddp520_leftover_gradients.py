"""DDP520 leftover-gradients: error, keeps_gradients, keeps_results

A step uses gradients that existed before its own backward passes, and were never zeroed.

Why: backward adds to .grad. Without zero_grad, each step uses the gradients of all steps before. In a GAN, two
    networks are trained in turn. The loss of one network leaves gradients in the other. The optimizer of the other
    network then uses these gradients together with its own. DDP averages all of them, so the ranks agree. (PyTorch
    docs, torch.optim.Optimizer.zero_grad.)
Fix: Call zero_grad of an optimizer right before the backward pass of its loss, or right after its step.
Detected: `ddpcheck run` inspects one gradient of each optimizer between a step and the next backward pass. DDP520 is
    reported if this gradient is still not zero, in three steps in a row, and backward adds to it.
Ignore: If gradients of several losses should be added up over several steps.
Line: The optimizer's step, if its own gradients are not zeroed. If another loss left them: the backward pass that
    adds to them.
Checks: run loop
Explains: DDP508
Example:
    loss_of_generator.backward()             # reaches the discriminator too
    generator_optimizer.step()
    loss_of_discriminator.backward()         # right: discriminator_optimizer.zero_grad() first
    discriminator_optimizer.step()
"""

from __future__ import annotations

import itertools

from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import join_names, new_finding
from ddpcheck.rules.registry import rule
from ddpcheck.trace.loop import Loop
from ddpcheck.trace.unwrapped_params import param_name

MIN_STALE_STEPS = 3
"""Fewest steps in a row on stale gradients: training may begin with fewer, or keep gradients for a step on purpose."""


@rule
def judge_stale_gradients(loop: Loop) -> list[Finding]:
    """DDP520: first rank whose optimizer uses stale gradients of earlier steps or another loss."""
    for entry in itertools.chain(*loop.stale):
        if 0 < entry.in_a_row < MIN_STALE_STEPS:
            continue
        names = [*map(param_name, entry.names)]
        suffix = f" of {join_names(names)}" if names else ""
        if entry.own:
            message = (
                f"The gradients{suffix} are not zeroed after a step: each backward pass adds to those of all steps "
                "before, and the optimizer uses them again."
            )
            fix = (
                "Call optimizer.zero_grad() after each step, or before the first backward pass of the next one: it "
                "zeroes the gradients of all parameters that the optimizer holds."
            )
        else:
            message = (
                f"An optimizer steps on gradients{suffix} that another loss has left in .grad (the backward at "
                f"{entry.backward_at}): they are not zeroed before its own backward pass at {entry.accumulated_at}."
            )
            fix = (
                "Call zero_grad of this optimizer before the backward pass of the loss that it minimises, or freeze "
                "its parameters (requires_grad_(False)) while the other loss is differentiated."
            )
        return new_finding(
            "DDP520",
            names or ("zero_grad",),
            message,
            location=entry.location if entry.own else entry.accumulated_at,
            evidence=["in several steps, one after the other"],
            fix=fix,
        )
    return []
