"""Recorder of forward inputs of a wrapper in sampled steps and evaluations."""

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

_MOST_PARTS = 16  # max tensors per forward input
_MOST_EVALUATED = 64  # max forward passes without gradients


class InputRecorder(Recorder, subjects=("data",)):
    """Recorder of fingerprints of a wrapper's forward inputs."""

    def __init__(
        self, sink: Callable[[Inputs | Evaluated], object], number: int, samples: Callable[[], Sequence[torch.Tensor]]
    ) -> None:
        """Initialize; `number`: of the wrapper, `samples`: the last samples from a loader."""
        self._sink = sink
        self._number = number
        self._samples = samples
        self._evaluated = 0

    def trained(self, step: int, given: Any, line: Location | None) -> None:
        """Record the forward inputs of a training step."""
        if samples := _samples_of(given):
            tensors = itertools.islice(tree_tensors(given), _MOST_PARTS)
            parts = tuple((fingerprint(tensor), tensor.numel()) for tensor in tensors if tensor.numel())
            self._sink(Inputs(self._number, step, samples, line, parts, added_to(self._samples(), given)))

    def evaluates(self, step: int, given: Any) -> None:
        """Record the inputs of a forward pass without gradients, up to a limit."""
        if self._evaluated < _MOST_EVALUATED:
            self._evaluated += 1
            if samples := _samples_of(given):
                self._sink(Evaluated(self._number, step, samples))


def _samples_of(given: Any) -> tuple[int, ...]:
    """Return fingerprints of the input samples; () for index tensors only."""
    are_indices = all(tensor.dim() <= 1 and not tensor.is_floating_point() for tensor in tree_tensors(given))
    return () if are_indices else sample_fingerprints(given) or batch_fingerprint(given)
