"""State shared by the recorders of one rank: log, watches, and step counts."""

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
"""(number of the loader, number of the pass over the loader, batches taken in the pass)"""


class Recording:
    """State of one rank, shared by its recorders."""

    def __init__(self, add: Callable[[Entry], object], every: int = 0, log: RankLog | None = None) -> None:
        self.add = add  # function that writes an entry to the log
        self.log: Any = log  # log of this rank
        self.every = every  # steps between two comparisons; 0 for never
        self.watches: Living[Any] = Living()  # `ScriptWatch` of each wrapper
        self.wrappers = 0  # number of wrappers constructed so far
        self.steps = 0  # number of optimizer steps, of all optimizers together
        self.rounds = 0  # largest step count of any optimizer
        self.taken = 0  # number of batches taken in the current passes over data loaders
        self.position: Position = (-1, -1, 0)  # current position in the data loaders
        self.batches: Counter[int] = Counter()  # number of batches taken, by data loader
        self.samples: Sequence[torch.Tensor] = ()  # copies of the tensors of the last batch, before a sampled step

    def count_step(self, *_arguments: object) -> None:
        self.steps += 1

    def is_written(self, number: int) -> bool:
        """Return True if entries of this step number are recorded."""
        return is_sampled(number, self.every)

    def are_probed(self) -> bool:
        """Return True if losses are recorded; `rounds` covers optimizers that take turns."""
        return is_probed(self.steps) or is_probed(self.rounds)
