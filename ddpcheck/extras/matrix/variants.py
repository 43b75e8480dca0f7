"""Matrix rows of variant steps: compiled, or in micro-batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ddpcheck.extras import calls
from ddpcheck.extras.matrix.option_sets import BACKEND, MICRO_BATCHES, VariantFacts, VariantStep
from ddpcheck.findings.errors import RankError, TargetError
from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.harness import World
from ddpcheck.report.checking.check_state import CheckOptions
from ddpcheck.report.matrix.matrix import MatrixRow
from ddpcheck.report.matrix.option_sets import DEFAULTS
from ddpcheck.rules.gradients.ddp301_not_synchronised import judge_variant
from ddpcheck.rules.gradients.ddp302_reducer_mismatch import not_of_whole_batch
from ddpcheck.rules.loss.ddp514_accumulation_scale import not_mean_of_samples
from ddpcheck.worlds.launchers.leader import Leader

if TYPE_CHECKING:
    from ddpcheck.recipe.recipe import Recipe

COMPILED = f'torch.compile(backend="{BACKEND}")'
UNSYNCED = f"{MICRO_BATCHES} micro-batches, no_sync in the first"
SYNCED = f"{MICRO_BATCHES} micro-batches, each synchronised"
_LONGEST_COMPILATION = 60.0  # seconds; the timeout of the world itself is much longer


def variant_rows(
    target: Recipe | str, asked: CheckOptions, base: MatrixRow, progress: Callable[[str], None], hosts: Leader | None
) -> Iterator[MatrixRow]:
    """Yield a row for each variant of the steps of row `base`, with a new world after a failure."""
    options = None if base.own else base.options
    steps: dict[str, Callable[[], VariantStep]] = {
        UNSYNCED: partial(calls.matrix_phases.accumulated_step, False),
        SYNCED: partial(calls.matrix_phases.accumulated_step, True),
        COMPILED: calls.matrix_phases.compiled_step,
    }
    world: World | None = None
    facts: list[VariantFacts] = []
    deadline = math.inf  # deadline of the current compilation

    def look(_world: World, _finished: frozenset[int], _running: frozenset[int]) -> str | None:
        return "{ranks} did not finish to compile in time" if time.monotonic() > deadline else None

    try:
        for title, step in steps.items():
            label = title if base.options == DEFAULTS else f"{base.options}, {title}"
            progress(label)
            row = partial(MatrixRow, base.arguments, hook=base.hook, label=label)
            deadline = math.inf
            try:
                if world is None:  # first variant, or previous variant failed
                    world = asked.world(hosts, look)
                    facts = world.run(partial(calls.matrix_phases.prepare, target, asked.seed, options))
                reasons = (entry.not_compiled if title == COMPILED else entry.not_split for entry in facts)
                if reason := next(filter(None, reasons), ""):
                    yield row("skipped", reason=reason)
                elif title != COMPILED and (worst := _worst([entry.differences for entry in facts])):
                    finding = not_mean_of_samples(worst, MICRO_BATCHES)
                    yield row("wrong", code=finding.code, reason=finding.message)
                else:
                    deadline = time.monotonic() + _LONGEST_COMPILATION if title == COMPILED else math.inf
                    yield _judge_step(world.run(step), row)
            except (RankError, TargetError) as error:
                text = f"to compile it takes more than {_LONGEST_COMPILATION:g} s"
                yield row("skipped", reason=text) if time.monotonic() > deadline else row("stops", reason=str(error))
                if world is not None:
                    world.close()
                world = None
    finally:
        if world is not None:
            world.close()


def _judge_step(steps: Sequence[VariantStep], row: Callable[..., MatrixRow]) -> MatrixRow:
    if any(step.graphs == 0 for step in steps):
        return row("incomplete", reason="torch.compile has compiled nothing of it")
    for finding in judge_variant([step.gradients for step in steps]):
        return row("wrong", code=finding.code, reason=finding.message)
    error = max((difference.error for step in steps for difference in step.differences), default=None)
    worst = _worst([step.differences for step in steps])
    if worst is None:
        return row("right", error=error)
    if any(step.drew for step in steps):
        return row("incomplete", reason="its random numbers differ in micro-batches, so its gradients are not compared")
    finding = not_of_whole_batch(worst)
    return row("wrong", code=finding.code, reason=finding.message, error=error)


def _worst(differences: Sequence[Sequence[Difference]]) -> Difference | None:
    bad = [difference for items in differences for difference in items if difference.bad]
    return max(bad, key=lambda difference: difference.error, default=None)
