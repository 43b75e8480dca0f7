"""A detailed record of one step: gradients that arrive at parameters, other leaves that receive one, values of `.grad`.

It costs a hook on each parameter and a walk of the graph, so only steps 0, 1, 2, 4, 8, 16 ... are probed, and steps
whose gradients are to be compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ddpcheck.findings.evidence.parameters import PathEnd, UnregisteredTensor
from ddpcheck.gather.autograd.autograd_graph import gradient_nodes, unregistered_tensors, walk_graph
from ddpcheck.gather.autograd.gradient_paths import function_returning_none
from ddpcheck.gather.ddp.ddp_wrapper import parameters_in_wrappers
from ddpcheck.gather.ddp.sharding import gathered_twice, shards_in_use
from ddpcheck.gather.state.tensor_values import is_shard, own_part
from ddpcheck.gather.steps.gradient_distance import dense
from ddpcheck.record.module_hooks import remove_hooks


class StepProbe:
    """A detailed record of one step.

    Attributes:
        arrivals: How often a gradient arrived at a parameter.
        lost: Parameters that backward reached without a gradient, with the Functions that may have returned None.
        unregistered: Leaves that receive gradient, that the module holds, and that are no parameters of it.
        created_in_forward: Parameters that the forward pass has made.
        reentrant: Whether a re-entrant checkpoint is in the graph.
        keep: What is kept of this rank's own gradients by name, a linear function of each; `None` where nothing is.
        local: That of this rank's own gradients: what `.grad` held before, and what arrived; of shards, what arrived.
        held: The gradients that shards had before.
        beside: Shards to which a gradient came by another way than the reduction: an operation on the DTensor itself;
            or terms of it, say, which torch adds up over the ranks of tensor parallelism before the reduction.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        leaves: Sequence[torch.Tensor],
        *,
        keep: Callable[[str, torch.Tensor], Any] | None,
    ) -> None:
        """Look at the step of `module` that begins, at these of its parameters.

        `leaves` is what backward accumulates into, in their order. It may come to be known in the forward pass only;
        then `attach` is called again.
        """
        self.arrivals: dict[str, int] = {}
        self.lost: dict[str, PathEnd] = {}
        self.unregistered: tuple[UnregisteredTensor, ...] = ()
        self.created_in_forward: dict[str, UnregisteredTensor] = {}
        self.reentrant = False
        self.local: dict[str, Any] = {}
        self.held: dict[str, torch.Tensor] = {}
        self.beside: set[str] = set()
        self._module = module
        self._parameters = parameters
        self._leaves = leaves
        self.keep = keep
        self._arrived_none: set[str] = set()
        self._before = {name for name, _ in module.named_parameters()}
        self._roots: list[Any] = []
        self._handles: list[Any] = []
        self.attach()

    def attach(self) -> None:
        """Hang hooks on the parameters that require grad now."""
        self.detach()
        nodes = gradient_nodes(self._leaves)
        self._handles = [  # on the node, which torch.autograd.grad does not run; it would run one on the tensor
            node.register_prehook(self._arrival(name, leaf))
            for name, leaf, node in zip(self._parameters, self._leaves, nodes, strict=True)
            if node is not None
        ]
        shards = {name: p for name, p in self._parameters.items() if self.keep and p.requires_grad and is_shard(p)}
        nodes = gradient_nodes([*shards.values()])  # where the engine accumulates, and torch's reduction does not
        self._handles += [
            node.register_prehook(functools.partial(self._beside, name))
            for name, node in zip(shards, nodes, strict=True)
            if node is not None
        ]

    def _beside(self, name: str, _gradients: Any) -> None:
        self.beside.add(name)

    def detach(self) -> None:
        """Take the hooks off: gradients that arrive from now on are not the loop's own."""
        remove_hooks(self._handles)

    def _arrival(self, name: str, leaf: Any) -> Any:
        def arrived(gradients: tuple[Any, ...]) -> None:
            (gradient,) = gradients
            if gradient is None:
                self._arrived_none.add(name)
                return
            self.arrivals[name] = self.arrivals.get(name, 0) + 1
            if is_shard(gradient) and gradient.placements != leaf.placements:
                self.beside.add(name)  # under tensor parallelism
            if self.keep is not None:
                self._keep_held(name)
                came = self.keep(name, dense(gradient))
                self.local[name] = self.local[name] + came if name in self.local else came

        return arrived

    def _keep_held(self, name: str) -> None:
        """Keep what `.grad` holds from backward passes that were not averaged: it goes into this average."""
        held = self._parameters[name].grad
        if name in self.local or name in self.held or held is None or self.keep is None:
            return
        if is_shard(held):
            self.held[name] = dense(held).clone()
        else:
            self.local[name] = self.keep(name, dense(held))

    def backward_begins(self) -> None:
        """Keep what `.grad` holds; a parameter that is in the loss by another way may have had its gradient."""
        for name in self._parameters if self.keep is not None else ():
            self._keep_held(name)

    def forward_returned(self, tensors: Sequence[torch.Tensor]) -> None:
        """Walk the graph of the tensors that a forward pass has returned, while it exists."""
        walk = walk_graph(tensors)
        self.reentrant |= any("CheckpointFunctionBackward" in name for name in walk.node_names)
        self._roots = [tensor.grad_fn for tensor in tensors] if walk.functions else []
        now = dict(self._module.named_parameters())
        if new := {name: p for name, p in now.items() if name not in self._before}:
            gathered = shards_in_use(self._module)  # of two names of one shard, each has a whole of its own
            self.created_in_forward |= {
                name: UnregisteredTensor(name, tuple(parameter.shape), created_in_forward=True)
                for name, parameter in new.items()
                if id(parameter) not in gathered
            }
            twice = gathered_twice(self._module)
            self.beside |= {name for name, p in self._parameters.items() if id(p) in twice}
        known = {*map(id, now.values()), *map(id, self._leaves)}
        strange = [leaf for leaf in walk.leaves if id(leaf) not in known and leaf.requires_grad]
        if strange:
            held = {id(tensor): name for name, tensor in unregistered_tensors(self._module)}
            others = parameters_in_wrappers()
            self.unregistered = tuple(
                UnregisteredTensor(held[id(leaf)], tuple(leaf.shape))
                for leaf in strange
                if id(leaf) in held and id(leaf) not in others
            )

    def close(self) -> None:
        """Take the hooks off, and see which gradients were lost: None arrived, and nothing else.

        Under `find_unused_parameters`, and in the first step under `static_graph`, DDP puts a Function of its own
        around what forward returns; outputs that are not in the loss come back through it as None: nothing is lost.
        """
        self.detach()
        roots, self._roots = self._roots, []
        leaves = dict(zip(self._parameters, self._leaves, strict=True))
        for name in sorted(self._arrived_none - self.arrivals.keys()):
            end = function_returning_none(roots, leaves[name])
            if _SINK not in end.reason:
                self.lost[name] = end

    @property
    def unused(self) -> frozenset[str]:
        """The parameters that had no part in the step."""
        return frozenset(self._parameters.keys() - self.arrivals.keys() - self.lost.keys())


_SINK = "_DDPSink"  # of torch/nn/parallel/distributed.py; private to torch


def zero_gradients(parameters: Mapping[str, nn.Parameter]) -> set[str]:
    """The parameters whose gradient exists and is exactly zero."""
    gradients = {name: own_part(p.grad) for name, p in parameters.items() if p.grad is not None and p.numel()}
    values = [g.coalesce().values() if g.layout == torch.sparse_coo else g for g in gradients.values()]
    some = torch.stack([value.ne(0).any() for value in values]).tolist() if values else []
    return {name for name, yes in zip(gradients, some, strict=True) if not yes}
