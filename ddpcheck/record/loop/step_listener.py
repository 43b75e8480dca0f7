"""What a tracker of steps tells: a method for each event in the steps of one wrapper, which does nothing by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ddpcheck.record.loop.forward_snapshot import Snapshot


class StepListener:
    """Is told what happens in the steps of a wrapper. `step` is the number of the step, counted from 0."""

    def called(self, wrapper: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """A forward pass is about to run, with gradients or without."""

    def forward_begins(self) -> None:
        """A forward pass with gradients is about to run, perhaps under `no_sync`."""

    def step_begins(self, step: int) -> None:
        """A forward pass of the step is about to run, and no backward pass of it has run."""

    def forward_returned(self, step: int, output: Any, tensors: Sequence[torch.Tensor], *, synced: bool) -> None:
        """A forward pass with gradients has returned `output`, with these tensors in it; `synced`: not in `no_sync`."""

    def backward_begins(self) -> None:
        """The first gradient of a backward pass of the step has arrived at what the forward pass returned."""

    def parameters_missing(self, step: int, names: Sequence[str]) -> None:
        """These parameters have no part in the step: DDP gets zeros in their place, or will wait for them."""

    def parameters_left_out(self, step: int, names: Sequence[str], snapshot: Snapshot | None) -> None:
        """Likewise, of the step that has ended: its graph was kept, and no second backward pass has come for these."""

    def parameters_absent(self, step: int, names: Sequence[str]) -> None:
        """The backward pass that begins does not reach these, as far as the engine knows; nothing waits for them."""

    def backward_hidden(self) -> None:
        """A backward pass runs under compiled autograd, once: its steps cannot be followed."""

    def static_graph_broken(self, step: int, names: Sequence[str]) -> None:
        """Under `static_graph`, these take part although they had no part in the first step: DDP is about to raise."""

    def backward_unpaired(self, *, raises: bool) -> None:
        """A backward pass begins after the one that has ended the step; `raises`: DDP is about to, for it waits."""

    def step_ended(self, step: int, unused: frozenset[str], awaited: frozenset[str], snapshot: Snapshot | None) -> None:
        """The gradients are averaged; some were `unused`, DDP has `awaited` those; `snapshot`: of the last forward."""
