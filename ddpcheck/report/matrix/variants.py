"""Other ways to make a step than forward and backward of the batch as it is: compiled, or in micro-batches.

Pure functions from what the ranks say of such a step to a row; `variant_phases` has the ranks make it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from msgspec import Struct

from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.report.matrix.matrix import MatrixRow
from ddpcheck.report.matrix.option_sets import DdpOptions

BACKEND = "aot_eager"
"""Of `torch.compile`: all of it but the code that inductor writes, which takes a C++ compiler and much longer."""

COMPILED = f'torch.compile(backend="{BACKEND}")'
MICRO_BATCHES = 2
UNSYNCED = f"{MICRO_BATCHES} micro-batches, no_sync in the first"
SYNCED = f"{MICRO_BATCHES} micro-batches, each synchronised"


class VariantFacts(Struct, frozen=True):
    """What a rank says before such steps.

    Attributes:
        not_compiled: Why the module cannot be compiled, or need not be; empty where it can.
        not_split: Why the batch cannot be made in micro-batches; empty where it can.
        apart: The gradients of the micro-batches, of this rank by itself, against those of its whole batch.
    """

    not_compiled: str = ""
    not_split: str = ""
    apart: tuple[Difference, ...] = ()


class VariantStep(Struct, frozen=True):
    """One rank's step, compared with the same step through the wrapper as it is.

    Attributes:
        gradients: Fingerprints of what is left in `.grad`, by name.
        differences: From what the step leaves as it is.
        drew: Whether random numbers were drawn.
        graphs: How many were compiled for it; -1 where none should be, or this torch does not say it.
    """

    gradients: Mapping[str, int]
    differences: tuple[Difference, ...] = ()
    drew: bool = False
    graphs: int = -1


def skipped(facts: Sequence[VariantFacts], title: str) -> str:
    """Why a way is not tried, by what any of the ranks says; empty where it is."""
    said = (one.not_compiled if title == COMPILED else one.not_split for one in facts)
    return next(filter(None, said), "")


def judged_parts(facts: Sequence[VariantFacts], options: DdpOptions, label: str) -> MatrixRow | None:
    """The row of micro-batches whose gradients are not those of the batch even without DDP; `None` where they are."""
    if (worst := _worst([one.apart for one in facts])) is None:
        return None
    reason = (
        f"each rank by itself has other gradients for {MICRO_BATCHES} micro-batches, whose losses are divided by "
        f"{MICRO_BATCHES}, than for its batch ({worst}): the loss is no mean over samples"
    )
    return MatrixRow(options.arguments, "wrong", hook=options.hook, label=label, code="DDP514", reason=reason)


def judged_step(steps: Sequence[VariantStep], options: DdpOptions, label: str) -> MatrixRow:
    """The row of a way that all ranks have gone."""
    row = partial(MatrixRow, options.arguments, hook=options.hook, label=label)
    if any(one.graphs == 0 for one in steps):
        return row("incomplete", reason="torch.compile has compiled nothing of it")
    if any(one.gradients != steps[0].gradients for one in steps):
        return row("wrong", code="DDP301", reason="the gradients differ between ranks")
    error = max((one.error for step in steps for one in step.differences), default=None)
    worst = _worst([step.differences for step in steps])
    if worst is None:
        return row("right", error=error)
    if any(step.drew for step in steps):
        return row("incomplete", reason="it draws other random numbers like this, so its gradients are not compared")
    reason = f"the wrapper leaves other gradients like this than for the batch as it is ({worst})"
    return row("wrong", code="DDP302", reason=reason, error=error)


def _worst(differences: Sequence[Sequence[Difference]]) -> Difference | None:
    bad = [one for of_rank in differences for one in of_rank if one.bad]
    return max(bad, key=lambda one: one.error, default=None)
