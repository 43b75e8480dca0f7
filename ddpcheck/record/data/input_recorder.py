"""What the forward passes of a wrapper are given: in sampled steps, and in the first passes without gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddpcheck.findings.evidence.script import Evaluated, Inputs
from ddpcheck.findings.report import Location
from ddpcheck.gather.patching import Recorder
from ddpcheck.gather.state.fingerprints import fingerprint
from ddpcheck.gather.steps.training_step import batch_fingerprint, sample_fingerprints
from ddpcheck.recipe.pytree import tree_tensors
from ddpcheck.record.data.added_noise import added_to

_MOST_PARTS = 16  # tensors that forward is given
_MOST_EVALUATED = 64  # forward passes without gradients


class InputRecorder(Recorder, subjects=("data",)):
    """Writes down the fingerprints of what one wrapper is given."""

    def __init__(
        self, sink: Callable[[Inputs | Evaluated], object], number: int, samples: Callable[[], Sequence[torch.Tensor]]
    ) -> None:
        """Of the `number`-th wrapper; `samples` are those that a loader has given last."""
        self._sink = sink
        self._number = number
        self._samples = samples
        self._evaluated = 0

    def trained(self, step: int, given: Any, line: Location | None) -> None:
        """Write what the forward pass of a step was given."""
        if samples := _samples_of(given):
            tensors = itertools.islice(tree_tensors(given), _MOST_PARTS)
            parts = tuple((fingerprint(tensor), tensor.numel()) for tensor in tensors if tensor.numel())
            self._sink(Inputs(self._number, step, samples, line, parts, added_to(self._samples(), given)))

    def evaluates(self, step: int, given: Any) -> None:
        """Write what a forward pass without gradients is given, if it is one of the first."""
        if self._evaluated < _MOST_EVALUATED:
            self._evaluated += 1
            if samples := _samples_of(given):
                self._sink(Evaluated(self._number, step, samples))


def _samples_of(given: Any) -> tuple[int, ...]:
    """Fingerprints of the samples that forward was given; none of indices alone: the module itself may hold those."""
    are_indices = all(tensor.dim() <= 1 and not tensor.is_floating_point() for tensor in tree_tensors(given))
    return () if are_indices else sample_fingerprints(given) or batch_fingerprint(given)
