"""What the recorders of a rank share: where entries go, the watches on wrappers, and what one counts for all others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddpcheck.findings.evidence import Entry
from ddpcheck.record.module_hooks import Living
from ddpcheck.stream.rank_log import RankLog
from ddpcheck.stream.rank_report import is_probed, is_sampled

Position = tuple[int, int, int]
"""A loader, the number of the pass over it, and how many batches of it have been taken."""


class Recording:
    """Of one rank.

    Attributes:
        add: Writes an entry.
        log: To which it is written.
        every: Steps from one comparison to the next.
        watches: Each `ScriptWatch` on a wrapper.
        wrappers: How many there have been.
        steps: How often optimizers have stepped.
        rounds: How often the one has that has done so most.
        position: Of the script in its loaders.
        batches: How many batches the script has taken of each loader.
        taken: How many of them in the passes over loaders that are under way.
        samples: Copies of the tensors of the batch that was taken last, before a step that is sampled.
    """

    def __init__(self, add: Callable[[Entry], object], every: int = 0, log: RankLog | None = None) -> None:
        self.add = add
        self.log: Any = log
        self.every = every
        self.watches: Living[Any] = Living()
        self.wrappers = self.steps = self.rounds = self.taken = 0
        self.position: Position = (-1, -1, 0)
        self.batches: Counter[int] = Counter()
        self.samples: Sequence[torch.Tensor] = ()

    def count_step(self, *_arguments: object) -> None:
        """An optimizer is about to step."""
        self.steps += 1

    def is_written(self, number: int) -> bool:
        """Whether what comes with a step of this number is written down."""
        return is_sampled(number, self.every)

    def are_probed(self) -> bool:
        """Whether losses are looked at in this step; of two that take turns, one would only come to uneven steps."""
        return is_probed(self.steps) or is_probed(self.rounds)
