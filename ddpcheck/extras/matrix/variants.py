"""Matrix rows of variant steps, compiled or in micro-batches: pure functions of the results of the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from msgspec import Struct

from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.report.matrix.matrix import MatrixRow
from ddpcheck.report.matrix.option_sets import DDPOptions

BACKEND = "aot_eager"
"""`torch.compile` backend without inductor, which needs a C++ compiler and is much slower."""

COMPILED = f'torch.compile(backend="{BACKEND}")'
MICRO_BATCHES = 2
UNSYNCED = f"{MICRO_BATCHES} micro-batches, no_sync in the first"
SYNCED = f"{MICRO_BATCHES} micro-batches, each synchronised"


class VariantFacts(Struct, frozen=True):
    """Facts of a rank before its compiled or micro-batched steps."""

    not_compiled: str = ""  # why the module cannot or need not be compiled; empty if it can
    not_split: str = ""  # why the batch cannot be split; empty if it can
    apart: tuple[Difference, ...] = ()  # gradients of the micro-batches compared with the whole batch


class VariantStep(Struct, frozen=True):
    """Compiled or micro-batched step of one rank, compared with the plain step."""

    gradients: Mapping[str, int]  # fingerprints of `.grad` by parameter name
    differences: tuple[Difference, ...] = ()  # gradient differences from the plain step
    drew: bool = False  # True if random numbers were drawn
    graphs: int = -1  # graphs compiled for the step; -1 if none expected, or unknown in this torch


def skipped(facts: Sequence[VariantFacts], title: str) -> str:
    """Return why any rank skips a variant; empty if none does."""
    reasons = (entry.not_compiled if title == COMPILED else entry.not_split for entry in facts)
    return next(filter(None, reasons), "")


def judged_parts(facts: Sequence[VariantFacts], options: DDPOptions, label: str) -> MatrixRow | None:
    """Return the row of micro-batches whose gradients differ even without DDP, else `None`."""
    if (worst := _worst([entry.apart for entry in facts])) is None:
        return None
    reason = (
        f"even without DDP, the gradients of {MICRO_BATCHES} micro-batches, whose losses are divided by "
        f"{MICRO_BATCHES}, differ from those of the whole batch ({worst}): the loss is not a mean over samples"
    )
    return MatrixRow(options.arguments, "wrong", hook=options.hook, label=label, code="DDP514", reason=reason)


def judged_step(steps: Sequence[VariantStep], options: DDPOptions, label: str) -> MatrixRow:
    """Return the row of a variant step that all ranks ran."""
    row = partial(MatrixRow, options.arguments, hook=options.hook, label=label)
    if any(step.graphs == 0 for step in steps):
        return row("incomplete", reason="torch.compile has compiled nothing of it")
    if any(step.gradients != steps[0].gradients for step in steps):
        return row("wrong", code="DDP301", reason="the gradients differ between ranks")
    error = max((difference.error for step in steps for difference in step.differences), default=None)
    worst = _worst([step.differences for step in steps])
    if worst is None:
        return row("right", error=error)
    if any(step.drew for step in steps):
        return row("incomplete", reason="its random numbers differ in micro-batches, so its gradients are not compared")
    reason = f"through the wrapper, these gradients differ from those of the whole batch ({worst})"
    return row("wrong", code="DDP302", reason=reason, error=error)


def _worst(differences: Sequence[Sequence[Difference]]) -> Difference | None:
    bad = [difference for items in differences for difference in items if difference.bad]
    return max(bad, key=lambda difference: difference.error, default=None)
