"""DDP206 requires-grad: error, stops_run

A parameter requires grad on one rank and is frozen on another.

Why: Only parameters that require grad are put into buckets, by position. If the numbers of these parameters differ,
    construction raises. If the numbers and the shapes are equal, nothing is raised, and the gradients of different
    layers are averaged. (PyTorch docs, DistributedDataParallel: requires_grad must be the same on all ranks.)
Fix: Freeze the same parameters on every rank, before wrapping.
Detected: Before DDP's first collective, the ranks compare requires_grad of each parameter. After a forward pass that
    may change requires_grad, the ranks compare it again.
Ignore: Never. Freeze the same parameters on every rank.
Checks: report consistency; run replicas
Explains: quietly DDP522 if of graphs
Example:
    model.layers[dist.get_rank()].requires_grad_(False)   # right: the same layer on every rank
"""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.evidence.modules import ModuleDescription
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding
from ddpcheck.trace.replicas import judge_attribute, judge_buffers


def judge_layouts(descriptions: Sequence[ModuleDescription], step: int, *, broadcasts: bool) -> list[Finding]:
    """DDP206, 211, 212 and 213: layouts that diverge between ranks during `step`.

    Buffers are compared only if the wrapper `broadcasts` buffers.
    """
    parameters = [description.parameters for description in descriptions]
    diffs = judge_attribute("DDP206", "requires_grad", "value of requires_grad", parameters, set())
    diffs += judge_buffers(descriptions) if broadcasts else []
    why = f"equal on all ranks before; the forward or backward pass of step {step} changed it"
    return [
        replace(f, message=f"After step {step}: {f.message}", steps=(step,), evidence=(*f.evidence, why)) for f in diffs
    ]
