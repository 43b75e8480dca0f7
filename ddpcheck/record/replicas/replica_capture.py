"""The replica on one rank as data: a description of the module, and fingerprints of its tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ddpcheck.findings.evidence.steps import DdpStepEvidence
from ddpcheck.gather.autograd.exchanges import has_parts, is_part
from ddpcheck.gather.state.fingerprints import PLAIN, InRows, fingerprints, in_rows, is_shard
from ddpcheck.gather.state.module_description import KnownParts, Parts, describe
from ddpcheck.stream.rank_report import ReplicaState

_PLAIN: frozenset[type] = frozenset(PLAIN)


class ReplicaCapture:
    """The values of one replica.

    Attributes:
        count: How often they have been captured.
        awaits_forward: Whether the values before the first forward pass are still to be kept.
    """

    def __init__(
        self,
        known: KnownParts,
        rank: int,
        *,
        keeps_start: bool,
        with_parameters: bool,
        shards: Mapping[str, nn.Parameter] | None = None,
        with_shards: bool = False,
    ) -> None:
        """Begin where the wrapper has just been made.

        Args:
            known: The parts of the module in the wrapper.
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
        self._known = known
        self._rank = rank
        self._constructed = self.parameters() if keeps_start else {}
        self._at_first_forward: dict[str, int] = {}
        self.awaits_forward = bool(self._constructed)
        self._in_step: dict[str, int] | None = None

    def forward_begins(self) -> None:
        """Keep the fingerprints before the first forward pass, where those of the construction are kept."""
        if self.awaits_forward:
            self._at_first_forward = self.parameters()
            self.awaits_forward = not self._at_first_forward

    def forward_returned(self) -> None:
        """Keep those after the first pass of a step that is compared: some move parameters in it, and put them back."""
        if self._with_parameters and self._in_step is None:
            self._in_step = self.parameters()

    def parameters(self, parameters: Mapping[str, nn.Parameter] | None = None) -> dict[str, int]:
        """The fingerprints now of the parameters that the module has, or of those that it had."""
        return fingerprints(self._tensors(parameters).items())

    def _tensors(self, parameters: Mapping[str, nn.Parameter] | None = None) -> dict[str, nn.Parameter]:
        found = self._known.now().parameters if parameters is None else parameters
        if not self._shards and not has_parts() and _PLAIN.issuperset(map(type, found.values())):  # as a rule
            return {**found}
        whole = {n: p for n, p in found.items() if not (n in self._shards or is_shard(p) or is_part(p))}
        return {**whole, **self._shards} if self._with_shards else whole

    def capture(
        self,
        step: int,
        *,
        after_backward: bool,
        parts: Parts | None = None,
        reduced: tuple[Mapping[str, torch.Tensor], InRows] | None = None,
    ) -> ReplicaState:
        """The replica after so many steps, and `after_backward` another one, before the optimizer's step.

        `parts` of the module, and `reduced` parameters with their gradients in rows, are given where they are known.
        """
        parts = parts or self._known.now()
        parameters, self._in_step = self._in_step, None
        if self._with_parameters and (parameters is None or not after_backward):
            parameters = self.parameters()
        trained = {n: p for n, p in self._tensors(parts.parameters).items() if p.requires_grad and after_backward}
        values = DdpStepEvidence(
            rank=self._rank,
            step=step,
            gradients=_gradients(trained, *(reduced or ({}, in_rows({})))),
            parameters=parameters or {},
            buffers=fingerprints(parts.buffers.items()),
        )
        # Once it has run, tensors that are not registered (metrics, its last outputs) may differ by right.
        changing = step or after_backward or self.count
        description = self._known.structure(parts) if changing else describe(self._known.module)
        self.count += 1
        if step:
            return ReplicaState(description, values)
        alone = {name for name, p in parts.parameters.items() if is_part(p)}
        before = (
            {name: value for name, value in then.items() if name not in alone}
            for then in (self._constructed, self._at_first_forward)
        )
        return ReplicaState(description, values, *before)


def _gradients(
    trained: Mapping[str, torch.Tensor], reduced: Mapping[str, torch.Tensor], rows: InRows
) -> dict[str, int]:
    """The fingerprints of their gradients; 0 for one that has none."""
    there = {name: p.grad for name, p in trained.items() if p.grad is not None}
    others = {name: gradient for name, gradient in there.items() if reduced.get(name) is not trained[name]}
    known = {**fingerprints(rows), **fingerprints(others.items())}
    return {name: known[name] if name in there else 0 for name in trained}
