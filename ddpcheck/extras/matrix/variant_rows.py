"""Matrix rows of variant steps, with a new world after a failure."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from ddpcheck.extras import calls
from ddpcheck.extras.matrix import variants
from ddpcheck.findings.errors import RankError, TargetError
from ddpcheck.harness import World
from ddpcheck.report.checking.check_state import CheckOptions
from ddpcheck.report.matrix.matrix import MatrixRow
from ddpcheck.report.matrix.option_sets import DEFAULTS, DDPOptions
from ddpcheck.worlds.launchers.leader import Leader

if TYPE_CHECKING:
    from ddpcheck.recipe.recipe import Recipe

_LONGEST_COMPILATION = 60.0  # seconds; the timeout of the world itself is much longer
_STEPS: dict[str, Callable[[], variants.VariantStep]] = {
    variants.UNSYNCED: partial(calls.matrix_phases.accumulated_step, False),
    variants.SYNCED: partial(calls.matrix_phases.accumulated_step, True),
    variants.COMPILED: partial(calls.matrix_phases.compiled_step),
}


def variant_rows(
    target: Recipe | str,
    asked: CheckOptions,
    options: DDPOptions | None,
    known: DDPOptions,
    progress: Callable[[str], None],
    hosts: Leader | None,
) -> Iterator[MatrixRow]:
    """Yield a row for each variant step.

    Args:
        target: See `check_matrix`.
        asked: Options of the check.
        options: Wrapper options; None for the recipe's own.
        known: Wrapper options, even if they are the recipe's own.
        progress: Called with a short text at the start of each variant.
        hosts: See `check_matrix`.
    """
    world: World | None = None
    facts: list[variants.VariantFacts] = []
    deadline = math.inf  # deadline of the current compilation

    def look(_world: World, _finished: frozenset[int], _running: frozenset[int]) -> str | None:
        return "{ranks} did not finish to compile in time" if time.monotonic() > deadline else None

    try:
        for title, step in _STEPS.items():
            label = title if known == DEFAULTS else f"{known}, {title}"
            progress(label)
            row = partial(MatrixRow, known.arguments, hook=known.hook, label=label)
            deadline = math.inf
            try:
                if world is None:  # first variant, or previous variant failed
                    world = asked.world(hosts, look)
                    facts = world.run(partial(calls.matrix_phases.prepare, target, asked.seed, options))
                if reason := variants.skipped(facts, title):
                    yield row("skipped", reason=reason)
                elif title != variants.COMPILED and (wrong := variants.judged_parts(facts, known, label)):
                    yield wrong
                else:
                    deadline = time.monotonic() + _LONGEST_COMPILATION if title == variants.COMPILED else math.inf
                    yield variants.judged_step(world.run(step), known, label)
            except (RankError, TargetError) as error:
                text = f"to compile it takes more than {_LONGEST_COMPILATION:g} s"
                yield row("skipped", reason=text) if time.monotonic() > deadline else row("stops", reason=str(error))
                if world is not None:
                    world.close()
                world = None
    finally:
        if world is not None:
            world.close()
