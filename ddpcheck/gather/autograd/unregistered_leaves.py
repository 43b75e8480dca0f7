"""Leaves of the graph that receive gradient without being parameters of the module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from ddpcheck.findings.evidence.parameters import UnregisteredTensor
from ddpcheck.gather.autograd.autograd_graph import unregistered_tensors
from ddpcheck.gather.state.tensor_holders import Held, held_by_functions
from ddpcheck.recipe.recipe import Recipe


def unregistered_leaves(
    leaves: Iterable[torch.Tensor],
    module: nn.Module,
    *,
    ignore: Sequence[torch.Tensor] = (),
    before: Mapping[int, torch.Tensor] | None = None,
    recipe: Recipe | None = None,
) -> tuple[UnregisteredTensor, ...]:
    """The leaves that receive gradient without being parameters of `module`, by name where they have one.

    A tensor that a forward pass makes for itself (the input of a gradient penalty, say) is none of them, wherever it is
    kept: it must be among those that were there `before` the forward pass. Where they are not known, what the module
    holds is taken to last, and so is an `nn.Parameter`.
    """
    known = {id(p) for p in module.parameters()} | {id(tensor) for tensor in ignore}
    strange = [leaf for leaf in leaves if id(leaf) not in known and leaf.requires_grad]
    if not strange:
        return ()
    names = {id(tensor): (name, kind) for name, kind, tensor in _held(module, recipe)}
    if before is None:
        before = {id(leaf): leaf for leaf in strange if isinstance(leaf, nn.Parameter)}
        before |= {id(tensor): tensor for _, tensor in unregistered_tensors(module)}
    found = []
    for leaf in strange:
        if id(leaf) in before:
            name, kind = names.get(id(leaf), (f"a tensor of shape {tuple(leaf.shape)}", ""))
            found.append(UnregisteredTensor(name, tuple(leaf.shape), kind=kind))
    return tuple(sorted(found, key=lambda item: item.name))


def lasting_tensors(module: nn.Module, recipe: Recipe) -> dict[int, torch.Tensor]:
    """Tensors that require grad, are no parameters of `module`, and that it or the recipe holds, by identity."""
    return {id(tensor): tensor for _, _, tensor in _held(module, recipe) if tensor.requires_grad}


def _held(module: nn.Module, recipe: Recipe | None) -> list[Held]:
    """The tensors that are no parameters of `module`, where somebody holds them; the module's own names come last."""
    own = [*module.named_buffers(), *unregistered_tensors(module)]
    return [*held_by_functions(getattr(recipe, "loss", None), module), *((name, "", tensor) for name, tensor in own)]
