"""Parameters that a wrapper synchronizes, and how the autograd engine reaches them.

Indices follow the parameter list of `DistributedDataParallel`. Under `fully_shard`, the parameters are shards, and
backward accumulates into the unsharded parameters, which replace the shards during the module's forward and are the
same tensors in each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn

from ddpcheck.gather.autograd.autograd_graph import LossGraph, gradient_node, will_be_reached
from ddpcheck.gather.ddp.ddp_wrapper import inner_module, is_ddp
from ddpcheck.gather.ddp.model_parts import hidden_parameters
from ddpcheck.gather.ddp.sharding import is_gathered, parameter_groups, reduces_gradients
from ddpcheck.gather.state.fingerprints import is_dtensor
from ddpcheck.gather.state.module_state import sharding_classes
from ddpcheck.record.recording import UnpickledHook

NONE: Set[int] = frozenset()


class SyncedParameters:
    """Parameters that one wrapper synchronizes."""

    def __init__(self, wrapper: nn.Module) -> None:
        self.wrapper = ref(wrapper)  # weak: hooks of the wrapper reference this object
        self._finds_unused = bool(getattr(wrapper, "find_unused_parameters", False))
        # indices unused in the first step, which `static_graph` expects in each step; None if no step has ended
        self.unused_first: Set[int] | None = None
        self.is_sharded = not is_ddp(wrapper)  # True if the parameters are shards
        module = inner_module(wrapper)
        ignored = set(getattr(wrapper, "parameters_to_ignore", ()))
        all_params = dict(module.named_parameters())
        if getattr(wrapper, "device_mesh", None) is not None:
            all_params |= hidden_parameters(module)
        synced = {n: p for n, p in all_params.items() if p.requires_grad and n not in ignored}
        if self.is_sharded:
            synced = {name: p for name, p in synced.items() if is_dtensor(p)}
        self.names = list(synced)  # parameter names in DDP's order
        self.tensors = list(synced.values())  # parameters in the same order
        # tensors that backward accumulates into: the parameters, or the unsharded parameters once found
        self.leaves: list[torch.Tensor] = [*self.tensors]
        self.all: Set[int] = frozenset(range(len(synced)))  # indices of all parameters
        self._nodes = [gradient_node(parameter) for parameter in self.tensors]
        self._groups = parameter_groups(module) if self.is_sharded else []
        self._not_found = dict(zip(self.names, range(len(synced)), strict=True)) if self.is_sharded else {}
        self._sparse_ids = {  # found as in DDP
            id(part.weight)
            for part in module.modules()
            if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
        }

    @property
    def are_averaged(self) -> bool:
        """Return True if backward averages gradients (DDP decides in forward, `fully_shard` in backward)."""
        if self.is_sharded:
            return reduces_gradients(self._groups)
        return bool(getattr(self.wrapper(), "require_backward_grad_sync", False))

    def hooks_for_unsharded(self) -> list[Any]:
        """Hook the forward of sharded modules, where gathered parameters exist; return the hook handles."""
        if not self.is_sharded or (wrapper := self.wrapper()) is None:
            return []
        classes = sharding_classes()
        parts: list[tuple[str, Any]] = [(path, p) for path, p in wrapper.named_modules() if isinstance(p, classes)]
        return [
            part.register_forward_pre_hook(UnpickledHook(partial(self.find_unsharded, f"{path}." if path else "")))
            for path, part in parts
        ]

    def find_unsharded(self, prefix: str, part: nn.Module, _arguments: Any = ()) -> None:
        """Find gathered parameters of submodule `part` in its forward; parameter names begin with `prefix`."""
        for name, parameter in nn.Module.named_parameters(part) if self._not_found else ():  # even if overridden
            index = self._not_found.get(prefix + name)
            if index is not None and parameter.requires_grad and is_gathered(parameter, self.tensors[index]):
                self.leaves[index], self._nodes[index] = parameter, gradient_node(parameter)
                del self._not_found[prefix + name]

    def names_of(self, indices: Iterable[int]) -> frozenset[str]:
        return frozenset(map(self.names.__getitem__, indices))

    def reached(self) -> Set[int]:
        """Return indices of parameters that backward will reach; `self.all` itself if none is missing."""
        reached = will_be_reached(self._nodes)
        return self.all if all(reached) else {index for index, is_reached in enumerate(reached) if is_reached}

    def reached_by_another_node(self, indices: Iterable[int]) -> set[int]:
        """Return indices of parameters reached through a new AccumulateGrad node that lacks DDP's hook."""
        reached = set()
        for index in () if self.is_sharded else indices:
            parameter = self.tensors[index]
            if parameter.requires_grad and (node := gradient_node(parameter)) is not self._nodes[index]:
                reached |= {index} if all(will_be_reached([node])) else set()
        return reached

    def reached_from(self, root: Any) -> set[int]:
        index_of = {id(leaf): index for index, leaf in enumerate(self.leaves)}
        return {index_of[id(leaf)] for leaf in LossGraph([root]).leaves if id(leaf) in index_of}

    def add_zero_gradients(self, indices: Iterable[int]) -> None:
        """Give unused parameters zero gradients by a backward pass, so that DDP's reduction ends.

        Parameters frozen after wrapping require grad during this pass, and have no gradient afterwards.
        """
        parameters = [self.tensors[index] for index in indices]
        frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            with torch.enable_grad():
                torch.autograd.backward(parameters, [self._zeros(parameter) for parameter in parameters])
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
                parameter.grad = None

    def _zeros(self, parameter: torch.Tensor) -> torch.Tensor:
        if id(parameter) not in self._sparse_ids:
            return torch.zeros_like(parameter)
        indices = torch.empty((1, 0), dtype=torch.long, device=parameter.device)
        return torch.sparse_coo_tensor(indices, parameter.detach()[:0], parameter.shape)

    # Gradients that DDP's reducer waits for

    @property
    def is_static_graph(self) -> bool:
        """Return True if `static_graph` is on, which may change after wrapping."""
        return bool(getattr(self.wrapper(), "static_graph", False))

    def awaited_by_ddp(self, unused: Set[int]) -> Set[int]:
        """Return indices in `unused` whose gradients DDP awaits, given `find_unused_parameters` and `static_graph`."""
        if not unused or self._finds_unused or self.is_sharded:
            return NONE
        if self.is_static_graph:
            return NONE if self.unused_first is None else unused - self.unused_first
        return unused

    def newly_used(self, used: Set[int]) -> list[int]:
        """Return indices of used parameters that step 0 did not use; `static_graph` forbids this."""
        return sorted(used & self.unused_first) if self.unused_first and self.is_static_graph else []
