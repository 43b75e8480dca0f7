"""The rows of a matrix on other ways to make a step: one world, and another one after a failure."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from ddpcheck.findings.errors import RankError, TargetError
from ddpcheck.harness import RankHosts, World
from ddpcheck.report import calls
from ddpcheck.report.checking.check_state import CheckOptions
from ddpcheck.report.matrix import matrix
from ddpcheck.report.matrix.option_sets import DEFAULTS, DdpOptions

if TYPE_CHECKING:
    from ddpcheck.recipe.recipe import Recipe

_LONGEST_COMPILATION = 60.0  # seconds; a world itself waits much longer for it
_STEPS: dict[str, Callable[[], matrix.VariantStep]] = {
    matrix.UNSYNCED: partial(calls.matrix_phases.accumulated_step, False),
    matrix.SYNCED: partial(calls.matrix_phases.accumulated_step, True),
    matrix.COMPILED: partial(calls.matrix_phases.compiled_step),
}


class _Ranks:
    """The ranks that make such steps; they are started again after a failure."""

    def __init__(
        self, target: Recipe | str, asked: CheckOptions, options: DdpOptions | None, hosts: RankHosts | None
    ) -> None:
        self._asked = asked
        self._hosts = hosts
        self._prepare = partial(calls.matrix_phases.prepare, target, asked.seed, options)
        self._world: World | None = None
        self._until = 0.0
        self.facts: list[matrix.VariantFacts] = []

    def prepare(self) -> None:
        """Start the ranks, where none are there."""
        if self._world is None:
            self._world = self._asked.world(self._hosts, self._look)
            self.facts = self._world.run(self._prepare)

    def run(self, step: Callable[[], matrix.VariantStep], *, patience: float = 0.0) -> list[matrix.VariantStep]:
        """Have all ranks make a step; `patience` seconds at most, where it is given."""
        assert self._world is not None
        self._until = time.monotonic() + patience if patience else 0.0
        return self._world.run(step)

    @property
    def are_late(self) -> bool:
        """Whether they have taken longer than they may."""
        return bool(self._until) and time.monotonic() > self._until

    def _look(self, _world: World, _finished: frozenset[int], _running: frozenset[int]) -> str | None:
        return "{ranks} did not finish to compile in time" if self.are_late else None

    def close(self) -> None:
        world, self._world, self._until = self._world, None, 0.0
        if world is not None:
            world.close()


def variant_rows(
    target: Recipe | str,
    asked: CheckOptions,
    options: DdpOptions | None,
    known: DdpOptions,
    progress: Callable[[str], None],
    hosts: RankHosts | None,
) -> Iterator[matrix.MatrixRow]:
    """A row for each of the ways.

    Args:
        target: As for `check_matrix`.
        asked: What its user has asked for.
        options: Of the wrapper; None for the recipe's own.
        known: The same, also where they are the recipe's own.
        progress: Called with a few words at the beginning of each.
        hosts: As for `check_matrix`.
    """
    with contextlib.closing(_Ranks(target, asked, options, hosts)) as ranks:
        for title, step in _STEPS.items():
            label = title if known == DEFAULTS else f"{known}, {title}"
            progress(label)
            row = partial(matrix.MatrixRow, known.arguments, hook=known.hook, label=label)
            try:
                ranks.prepare()
                why = matrix.skipped(ranks.facts, title)
                wrong = None if why or title == matrix.COMPILED else matrix.judged_parts(ranks.facts, known, label)
                if why or wrong is not None:
                    yield wrong or row("skipped", reason=why)
                    continue
                done = ranks.run(step, patience=_LONGEST_COMPILATION if title == matrix.COMPILED else 0.0)
                yield matrix.judged_step(done, known, label)
            except (RankError, TargetError) as error:
                late = f"to compile it takes more than {_LONGEST_COMPILATION:g} s"
                yield row("skipped", reason=late) if ranks.are_late else row("stops", reason=str(error))
                ranks.close()
