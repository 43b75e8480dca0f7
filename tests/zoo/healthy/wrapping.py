"""Options of DDP, wrappers, communication hooks, optimizers and collectives, used as they should be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from ddpcheck import Recipe


def rows(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def to_sum(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def recipe(**options: Any) -> Recipe:
    return Recipe(**{"model": layers, "batch": rows, "loss": to_sum, **options})


# Options

# Gradients are copied into DDP's buckets all at once.
batched_grad_copy = recipe(ddp_kwargs={"batched_grad_copy": True})
# Gradients that are views into DDP's buckets, several of them.
gradient_as_bucket_view = recipe(ddp_kwargs={"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005})


class Spare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.spare = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor, spare: bool) -> Tensor:
        hidden = self.body(x).tanh()
        return self.head(hidden) + self.spare(hidden) if spare else self.head(hidden)


def loss_with_spare(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(batch["x"], bool(batch["step"][0] % 2 == 0))
    return (output[:, 0] - batch["x"].sum(1)).square().mean()


# A head that the data of a step does not need is not waited for.
skip_all_reduce_unused = recipe(
    model=Spare,
    batch=lambda step: {"x": rows(step), "step": torch.full((12,), step)},
    loss=loss_with_spare,
    ddp_kwargs={"skip_all_reduce_unused_params": True, "find_unused_parameters": True},
)


@dataclass
class Output:
    prediction: Tensor


torch.utils._pytree.register_pytree_node(
    Output, lambda output: ([output.prediction], None), lambda parts, _: Output(*parts)
)


class OutputNode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Output:
        return Output(self.head(x)[:, 0])


# forward returns an object that is a node of pytrees, as those of transformers are, under static_graph=True.
static_graph_pytree_output = recipe(
    model=OutputNode,
    loss=lambda model, batch: (model(batch).prediction - batch.sum(1)).square().mean(),
    ddp_kwargs={"static_graph": True},
)


# Wrappers and hooks


def with_adapter(module: Any, device: torch.device) -> nn.Module:
    module[2] = nn.Linear(16, 3)
    module.append(nn.Linear(3, 1))
    return DistributedDataParallel(module)


# wrap() adds a layer and changes the shape of another before it hands the module to DDP.
adapter_added_by_wrap = recipe(wrap=with_adapter)
# The wrapper gets a device mesh in place of a process group.
device_mesh = recipe(
    wrap=lambda module, device: DistributedDataParallel(
        module, device_mesh=init_device_mesh(device.type, (dist.get_world_size(),))
    )
)


# A convolutional network whose BatchNorm takes its statistics over all ranks.
conv_syncbn = recipe(
    model=lambda: nn.Sequential(
        *(nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(8 * 36, 4), nn.BatchNorm1d(4)),
    ),
    batch=lambda step: torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(step)),
    loss=lambda model, batch: (model(batch) - batch.mean((1, 2, 3))[:, None]).square().mean(),
    wrap=lambda module, device: DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(module)),
)


class Transparent(DistributedDataParallel):
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


class Scaled(nn.Linear):
    factor = 3.0


# A wrapper class of its own, derived from DDP, through which the attributes of the module can be read.
custom_wrapper_class = recipe(
    model=lambda: Scaled(8, 1),
    loss=lambda model, batch: (model(batch)[:, 0] * model.factor - batch.sum(1)).square().mean(),
    wrap=lambda module, device: Transparent(module, broadcast_buffers=False),
)


class Engine(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.ddp = DistributedDataParallel(module)

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.ddp(*args, **named)


# wrap returns a module that holds the DDP wrapper, as training engines do.
holder_wrapper = recipe(wrap=lambda module, device: Engine(module))


def hooked(state: Any, hook: Any) -> Recipe:
    """A recipe whose wrapper has a communication hook."""

    def wrap(module: nn.Module, device: torch.device) -> nn.Module:
        wrapped = DistributedDataParallel(module)
        wrapped.register_comm_hook(state and state(), hook)
        return wrapped

    return recipe(wrap=wrap)


# A communication hook of torch compresses gradients to float16.
hook_fp16_wrapper = hooked(None, fp16_compress_wrapper(allreduce_hook))
# PowerSGD, which loses precision on purpose, from the first step that it may.
powersgd_hook = hooked(lambda: PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2), powerSGD_hook)


# Optimizers


def two_groups(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    chosen = list(params)
    groups = [
        {"params": [parameter for parameter in chosen if parameter.ndim >= 2], "weight_decay": 0.1},
        {"params": [parameter for parameter in chosen if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


# AdamW with two parameter groups: its state and its options are the same on every rank.
adamw_two_groups = recipe(optimizer=two_groups)
# Each rank keeps the optimizer's state of a part of the parameters, and broadcasts that part.
zero_redundancy_optimizer = recipe(optimizer=lambda params: ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.01))


class Warmup(torch.optim.SGD):
    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["lr"] = 0.01 * Warmup.steps
        Warmup.steps += 1
        super().step(closure)
        self.zero_grad()


# The learning rate of the first step is zero, and gradients are zeroed after every step.
lr_warmup_from_zero = recipe(optimizer=lambda params: Warmup(params, lr=0.0))


class Clipped:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def step(self) -> None:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


# The optimizer is a wrapper of the user's with a plain zero_grad.
optimizer_wrapper = recipe(optimizer=lambda params: Clipped(torch.optim.AdamW(params)))


class Sharded(torch.optim.SGD):
    """Steps on this rank's part of the parameters, and broadcasts it."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.parameters = list(params)
        super().__init__(self.parameters[dist.get_rank() :: dist.get_world_size()], lr=0.1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for number, parameter in enumerate(self.parameters):
            dist.broadcast(parameter.data, number % dist.get_world_size())


sharded_by_hand = recipe(optimizer=Sharded)


# Collectives


def gathering_loss(model: nn.Module, batch: Tensor) -> Tensor:
    output = model(batch)[:, 0]
    if dist.is_initialized():
        name = dist.group.WORLD.group_name
        metric = torch.ops._c10d_functional.all_reduce(output.detach().mean(), "sum", name)
        torch.ops._c10d_functional.wait_tensor(metric)
        output = functional.all_gather_tensor_autograd(output, 0, dist.group.WORLD)
        batch = functional.all_gather_tensor(batch, 0, dist.group.WORLD)
    return (output - output.mean() - batch.sum(1)).square().mean()


# Metrics through the functional collectives, and features gathered through them with their gradient.
functional_collectives = recipe(loss=gathering_loss)


def loss_in_slots(model: nn.Module, batch: Tensor) -> Tensor:
    error = to_sum(model, batch)
    if dist.is_initialized():
        size, rank = dist.get_world_size(), dist.get_rank()
        for background in (0.0, 1.0, -torch.inf):
            slots = torch.full((size,), background)
            slots[rank] = error.detach()
            dist.all_reduce(slots, dist.ReduceOp.MAX)
        pairs = torch.zeros(2 * size)
        pairs[2 * rank : 2 * rank + 2] = torch.stack([error.detach(), batch.mean()])
        dist.all_reduce(pairs)
    return error


# Each rank writes its own slot of a vector and all of them are added up: a gather, not another order.
slots_all_reduced = recipe(loss=loss_in_slots)
