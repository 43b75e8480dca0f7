"""A detailed record of one step: gradients that arrive at parameters, other leaves that receive one, values of `.grad`.

It costs a hook on each parameter and a walk of the graph, so only steps 0, 1, 2, 4, 8, 16 ... are probed, and steps
whose gradients are to be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.evidence.parameters import PathEnd, UnregisteredTensor
from ddpcheck.findings.evidence.steps import DdpStepEvidence
from ddpcheck.gather.autograd.autograd_graph import gradient_node, named_parameters, unregistered_tensors, walk_graph
from ddpcheck.gather.autograd.gradient_paths import function_returning_none
from ddpcheck.gather.collectives.allreduce import average_over_ranks
from ddpcheck.gather.ddp.ddp_constructor import hook_loss
from ddpcheck.gather.ddp.ddp_wrapper import living_wrappers
from ddpcheck.gather.state.module_description import describe, fingerprint, fingerprints
from ddpcheck.gather.steps.gradient_distance import against_average, dense, norm
from ddpcheck.monitor.rank_report import ReplicaState

Gradients = dict[str, torch.Tensor]


class StepProbe:
    """A detailed record of one step.

    Attributes:
        arrivals: How often a gradient arrived at a parameter.
        lost: Parameters that backward reached without a gradient, with the Functions that may have returned None.
        unregistered: Leaves that receive gradient, that the module holds, and that are no parameters of it.
        created_in_forward: Parameters that the forward pass has made.
        reentrant: Whether a re-entrant checkpoint is in the graph.
        keeps: Whether this rank's own gradients are kept.
        local: This rank's own gradients: what `.grad` held before, and what arrived.
    """

    def __init__(self, module: nn.Module, parameters: Mapping[str, nn.Parameter], *, keeps: bool) -> None:
        self.arrivals: dict[str, int] = {}
        self.lost: dict[str, PathEnd] = {}
        self.unregistered: tuple[UnregisteredTensor, ...] = ()
        self.created_in_forward: dict[str, UnregisteredTensor] = {}
        self.reentrant = False
        self.local: Gradients = {}
        self._module = module
        self._parameters = parameters
        self.keeps = keeps
        self._arrived_none: set[str] = set()
        self._before = {name for name, _ in module.named_parameters()}
        self._roots: list[Any] = []
        self._handles: list[Any] = []
        self.attach()

    def attach(self) -> None:
        """Hang hooks on the parameters that require grad now."""
        self.detach()
        self._handles = [  # on the node, which torch.autograd.grad does not run; it would run one on the tensor
            gradient_node(parameter).register_prehook(self._arrival(name))
            for name, parameter in self._parameters.items()
            if parameter.requires_grad
        ]

    def detach(self) -> None:
        """Take the hooks off: gradients that arrive from now on are not the loop's own."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _arrival(self, name: str) -> Any:
        def arrived(gradients: tuple[torch.Tensor | None, ...]) -> None:
            (gradient,) = gradients
            if gradient is None:
                self._arrived_none.add(name)
                return
            self.arrivals[name] = self.arrivals.get(name, 0) + 1
            if self.keeps:
                came = dense(gradient)
                self._keep_held(name)
                self.local[name] = self.local[name] + came if name in self.local else came.clone()

        return arrived

    def _keep_held(self, name: str) -> None:
        """Keep what `.grad` holds from backward passes that were not averaged: it goes into this average."""
        held = self._parameters[name].grad
        if name not in self.local and held is not None:
            self.local[name] = dense(held).clone()

    def backward_begins(self) -> None:
        """Keep what `.grad` holds; a parameter that is in the loss by another way may have had its gradient."""
        for name in self._parameters if self.keeps else ():
            self._keep_held(name)

    def forward_returned(self, tensors: Sequence[torch.Tensor]) -> None:
        """Walk the graph of the tensors that a forward pass has returned, while it exists."""
        walk = walk_graph(tensors)
        self.reentrant |= any("CheckpointFunctionBackward" in name for name in walk.node_names)
        self._roots = [tensor.grad_fn for tensor in tensors] if walk.functions else []
        self.created_in_forward |= {
            name: UnregisteredTensor(name, tuple(parameter.shape), created_in_forward=True)
            for name, parameter in self._module.named_parameters()
            if name not in self._before
        }
        known = {id(parameter) for parameter in self._module.parameters()}
        strange = [leaf for leaf in walk.leaves if id(leaf) not in known and leaf.requires_grad]
        if strange:
            held = {id(tensor): name for name, tensor in unregistered_tensors(self._module)}
            others = _parameters_of_other_wrappers(self._module)
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
        for name in sorted(self._arrived_none - self.arrivals.keys()):
            end = function_returning_none(roots, self._parameters[name])
            if _SINK not in end.reason:
                self.lost[name] = end

    @property
    def unused(self) -> frozenset[str]:
        """The parameters that had no part in the step."""
        return frozenset(self._parameters.keys() - self.arrivals.keys() - self.lost.keys())


_SINK = "_DDPSink"  # of torch/nn/parallel/distributed.py; private to torch


def _parameters_of_other_wrappers(module: nn.Module) -> set[int]:
    """Parameters that another `DistributedDataParallel` of this process synchronises."""
    others = [wrapper for wrapper in living_wrappers() if wrapper.module is not module]
    return {id(parameter) for other in others for parameter in other.module.parameters()}


def zero_gradients(parameters: Mapping[str, nn.Parameter]) -> set[str]:
    """The parameters whose gradient exists and is exactly zero."""
    names = [name for name, parameter in parameters.items() if parameter.grad is not None and parameter.numel()]
    if not names:
        return set()
    some = torch.stack([_any(parameters[name].grad) for name in names]).tolist()
    return {name for name, yes in zip(names, some, strict=True) if not yes}


def _any(gradient: Any) -> torch.Tensor:
    values = gradient.coalesce().values() if gradient.layout == torch.sparse_coo else gradient
    some: torch.Tensor = values.detach().ne(0).any()
    return some


def differences_from_average(
    local: Mapping[str, torch.Tensor], wrapper: nn.parallel.DistributedDataParallel, names: Sequence[str]
) -> tuple[Difference, ...]:
    """Differences of `.grad` from the average of the ranks' own gradients, made by an all-reduce of ddpcheck's.

    Every rank of the wrapper's group has to call this. Nothing is compared where a gradient is not finite.
    """
    parameters = {name: p for name, p in named_parameters(wrapper.module).items() if name in set(names)}
    mine = [local.get(name) for name in parameters]
    group = wrapper.process_group
    averaged = average_over_ranks(mine, list(parameters.values()), group=group)
    sizes = torch.tensor([0.0 if g is None else norm(g) ** 2 for g in mine], dtype=torch.float64)
    sizes = sizes.to(next(iter(parameters.values())).device)
    dist.all_reduce(sizes, group=group)
    world_size = dist.get_world_size(group)
    if not bool(sizes.isfinite().all()):
        return ()
    scales = (sizes / world_size).sqrt().tolist()
    return tuple(
        against_average(
            name,
            None if parameter.grad is None else dense(parameter.grad),
            want,
            world_size=world_size,
            scale=scale,
            lossy=hook_loss(wrapper),
        )
        for (name, parameter), want, scale in zip(parameters.items(), averaged, scales, strict=True)
    )


def capture_replica_state(
    module: nn.Module,
    rank: int,
    step: int,
    gradients: Mapping[str, nn.Parameter],
    *,
    has_run: bool,
) -> ReplicaState:
    """The replica on this rank: a description of the module, and fingerprints of its tensors.

    Args:
        module: The wrapped module.
        rank: This rank.
        step: How many steps have ended.
        gradients: The parameters whose `.grad` counts.
        has_run: Whether the module has run; then tensors that it has not registered may differ by right: metrics, its
            last outputs.
    """
    values = DdpStepEvidence(
        rank=rank,
        step=step,
        gradients={n: 0 if p.grad is None else fingerprint(dense(p.grad)) for n, p in gradients.items()},
        parameters=fingerprints(module.named_parameters()),
        buffers=fingerprints(module.named_buffers()),
    )
    description = describe(module)
    return ReplicaState(replace(description, state=()) if has_run else description, values)
