"""Base class for the events in the steps of one wrapper; methods do nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ddpcheck.record.loop.forward_snapshot import Snapshot


class StepListener:
    """Receiver of the step events of a wrapper; `step` counts from 0."""

    def called(self, wrapper: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Handle the start of a forward pass, with or without gradients."""

    def forward_begins(self) -> None:
        """Handle the start of a forward pass with gradients, perhaps under `no_sync`."""

    def step_begins(self, step: int) -> None:
        """Handle the start of a forward pass before any backward pass of the step."""

    def forward_returned(self, step: int, output: Any, tensors: Sequence[torch.Tensor], *, synced: bool) -> None:
        """Handle the result of a forward pass with gradients; `synced`: not under `no_sync`."""

    def backward_begins(self) -> None:
        """Handle the first gradient of a backward pass at an output of forward."""

    def parameters_missing(self, step: int, names: Sequence[str]) -> None:
        """Handle parameters not used in the step, which DDP waits for (or gets zeros)."""

    def parameters_left_out(self, step: int, names: Sequence[str], snapshot: Snapshot | None) -> None:
        """Handle parameters missing in an ended step whose second backward pass never came."""

    def parameters_absent(self, step: int, names: Sequence[str]) -> None:
        """Handle parameters that the starting backward pass will not reach; nothing waits."""

    def backward_hidden(self) -> None:
        """Handle a backward pass under compiled autograd, once: steps cannot be followed."""

    def static_graph_broken(self, step: int, names: Sequence[str]) -> None:
        """Handle parameters first used after step 0 under `static_graph`: DDP will raise."""

    def backward_unpaired(self, *, raises: bool) -> None:
        """Handle a backward pass after the end of the step; `raises`: DDP will raise."""

    def step_ended(self, step: int, unused: frozenset[str], awaited: frozenset[str], snapshot: Snapshot | None) -> None:
        """Handle averaged gradients; `awaited`: DDP waits; `snapshot`: of the last forward."""
