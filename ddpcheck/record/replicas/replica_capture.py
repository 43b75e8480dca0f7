"""Describe the replica on one rank: module structure and tensor fingerprints."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ddpcheck.findings.evidence.steps import DdpStepEvidence
from ddpcheck.gather.autograd.exchanges import has_rank_local_params, is_rank_local
from ddpcheck.gather.state.fingerprints import PLAIN, StackedTensors, fingerprints, is_dtensor, stack_small
from ddpcheck.gather.state.module_description import KnownParts, Parts, describe
from ddpcheck.stream.rank_report import ReplicaState

_PLAIN: frozenset[type] = frozenset(PLAIN)


class ReplicaCapture:
    """Fingerprints of one replica at construction, in the first forward, and per step."""

    def __init__(
        self,
        known: KnownParts,
        rank: int,
        *,
        keeps_start: bool,  # True to keep the current fingerprints of parameters
        with_parameters: bool,  # True to capture parameter fingerprints in each step, too
        shards: Mapping[str, nn.Parameter] | None,  # by name; the module may replace a shard temporarily
        with_shards: bool,  # True to capture shards; two ranks may hold different shards of a parameter
    ) -> None:
        """Keep fingerprints right after the construction of the wrapper, if `keeps_start`."""
        self._shards = shards or {}
        self._captures_shards = with_shards
        self.count = 0  # number of captures
        self._captures_parameters = with_parameters
        self._known = known
        self._rank = rank
        self._start_fingerprints = self.parameters() if keeps_start else {}
        self._forward_fingerprints: dict[str, int] = {}
        # True if values before the first forward pass are still to be kept
        self.awaits_forward = bool(self._start_fingerprints)
        self._step_fingerprints: dict[str, int] | None = None

    def forward_begins(self) -> None:
        """Keep fingerprints before the first forward pass, if `keeps_start`."""
        if self.awaits_forward:
            self._forward_fingerprints = self.parameters()
            self.awaits_forward = not self._forward_fingerprints

    def forward_returned(self) -> None:
        """Keep fingerprints after the step's first forward: scripts may perturb parameters before backward."""
        if self._captures_parameters and self._step_fingerprints is None:
            self._step_fingerprints = self.parameters()

    def parameters(self, parameters: Mapping[str, nn.Parameter] | None = None) -> dict[str, int]:
        """Return current fingerprints of `parameters`, or of the module's parameters."""
        return fingerprints(self._tensors(parameters).items())

    def _tensors(self, parameters: Mapping[str, nn.Parameter] | None = None) -> dict[str, nn.Parameter]:
        params = self._known.now().parameters if parameters is None else parameters
        if (
            not self._shards and not has_rank_local_params() and _PLAIN.issuperset(map(type, params.values()))
        ):  # usual case
            return {**params}
        unsharded = {n: p for n, p in params.items() if not (n in self._shards or is_dtensor(p) or is_rank_local(p))}
        return {**unsharded, **self._shards} if self._captures_shards else unsharded

    def capture(
        self,
        step: int,
        *,
        after_backward: bool,
        parts: Parts | None = None,
        reduced: tuple[Mapping[str, torch.Tensor], StackedTensors] | None = None,
    ) -> ReplicaState:
        """Return the state of the replica in step `step`, with gradients if `after_backward`.

        `parts`: submodules, parameters and buffers of the module, if known.
        `reduced`: (parameters, gradients from `stack_small`), if known.
        """
        parts = parts or self._known.now()
        parameters, self._step_fingerprints = self._step_fingerprints, None
        if self._captures_parameters and (parameters is None or not after_backward):
            parameters = self.parameters()
        trained = {n: p for n, p in self._tensors(parts.parameters).items() if p.requires_grad and after_backward}
        values = DdpStepEvidence(
            rank=self._rank,
            step=step,
            gradients=_gradients(trained, *(reduced or ({}, stack_small({})))),
            parameters=parameters or {},
            buffers=fingerprints(parts.buffers.items()),
        )
        # After a forward pass, unregistered tensors (metrics, last outputs) may differ legitimately.
        changing = step or after_backward or self.count
        description = self._known.structure(parts) if changing else describe(self._known.module)
        self.count += 1
        if step:
            return ReplicaState(description, values)
        part_names = {name for name, p in parts.parameters.items() if is_rank_local(p)}
        before = (
            {name: value for name, value in digests.items() if name not in part_names}
            for digests in (self._start_fingerprints, self._forward_fingerprints)
        )
        return ReplicaState(description, values, *before)


def _gradients(
    trained: Mapping[str, torch.Tensor], reduced: Mapping[str, torch.Tensor], rows: StackedTensors
) -> dict[str, int]:
    """Return the fingerprint of each parameter's gradient; 0 for a missing gradient."""
    grads = {name: p.grad for name, p in trained.items() if p.grad is not None}
    others = {name: gradient for name, gradient in grads.items() if reduced.get(name) is not trained[name]}
    digests = {**fingerprints(rows), **fingerprints(others.items())}
    return {name: digests[name] if name in grads else 0 for name in trained}
