"""The replica on one rank as data: a description of the module, and fingerprints of its tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ddpcheck.findings.evidence.steps import DdpStepEvidence
from ddpcheck.gather.state.fingerprints import fingerprints
from ddpcheck.gather.state.module_description import describe, structure_of
from ddpcheck.gather.state.tensor_values import is_shard
from ddpcheck.stream.rank_report import ReplicaState


class ReplicaCapture:
    """The values of one replica.

    Attributes:
        count: How often they have been captured.
    """

    def __init__(
        self,
        module: nn.Module,
        rank: int,
        *,
        keeps_start: bool,
        with_parameters: bool,
        shards: Mapping[str, nn.Parameter] | None = None,
        with_shards: bool = False,
    ) -> None:
        """Begin where the wrapper has just been made.

        Args:
            module: In the wrapper.
            rank: This one.
            keeps_start: Whether the fingerprints that parameters have now are kept.
            with_parameters: Whether those that they have in a step are captured with the rest.
            shards: Its parameters of which this rank has a part; something else may be in the place of one for a while.
            with_shards: Whether those are captured: what two ranks have of one may be other parts of it.
        """
        self._shards = shards or {}
        self._with_shards = with_shards
        self.count = 0
        self._with_parameters = with_parameters
        self._module = module
        self._rank = rank
        self._constructed = self.parameters() if keeps_start else {}
        self._at_first_forward: dict[str, int] = {}
        self._in_step: dict[str, int] | None = None

    def forward_begins(self) -> None:
        """Keep the fingerprints before the first forward pass, where those of the construction are kept."""
        if self._constructed and not self._at_first_forward:
            self._at_first_forward = self.parameters()

    def forward_returned(self) -> None:
        """Keep those after the first pass of a step that is compared: some move parameters in it, and put them back."""
        if self._with_parameters and self._in_step is None:
            self._in_step = self.parameters()

    def parameters(self) -> dict[str, int]:
        """The fingerprints of the parameters now."""
        return fingerprints(self._tensors().items())

    def _tensors(self) -> dict[str, nn.Parameter]:
        whole = {n: p for n, p in self._module.named_parameters() if n not in self._shards and not is_shard(p)}
        return {**whole, **self._shards} if self._with_shards else whole

    def capture(self, step: int, *, after_backward: bool) -> ReplicaState:
        """The replica after so many steps, and `after_backward` another one, before the optimizer's step."""
        parameters, self._in_step = self._in_step, None
        if self._with_parameters and (parameters is None or not after_backward):
            parameters = self.parameters()
        trained = {name: p for name, p in self._tensors().items() if p.requires_grad and after_backward}
        values = DdpStepEvidence(
            rank=self._rank,
            step=step,
            gradients=_gradients(trained),
            parameters=parameters or {},
            buffers=fingerprints(self._module.named_buffers()),
        )
        # Once it has run, tensors that are not registered (metrics, its last outputs) may differ by right.
        description = (structure_of if step or after_backward or self.count else describe)(self._module)
        self.count += 1
        if step:
            return ReplicaState(description, values)
        return ReplicaState(description, values, self._constructed, self._at_first_forward)


def _gradients(trained: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The fingerprints of their gradients; 0 for one that has none."""
    known = fingerprints((name, p.grad) for name, p in trained.items() if p.grad is not None)
    return {name: known.get(name, 0) for name in trained}
