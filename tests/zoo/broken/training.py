"""Losses that couple samples or are summed, gathers without a gradient, and ranks that train apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from ddpcheck import Recipe

COUPLED = {"code": "DDP304", "severity": "warning", "also": ["DDP215"]}
SUMMED = {"code": "DDP305", "subjects": ["loss"], "severity": "error"}
EXPECT = {
    "bn_barrier": COUPLED,
    "sum_and_bn": SUMMED,
    "dtype_dependent_sum": SUMMED,
    "rank_raises_batchsize_assert_sum": SUMMED,
    "layer_chosen_by_batch": {
        "code": "DDP304",
        "subjects": ["layers.1.bias", "layers.1.weight"],
        "severity": "warning",
    },
    "load_balancing": {"code": "DDP304", "subjects": ["loss"], "severity": "warning"},
    "weakly_coupled": {"code": "DDP304", "subjects": ["scaled"], "severity": "warning"},
    "functional_gather_without_gradient": {"code": "DDP309", "subjects": ["all_gather_tensor"], "severity": "error"},
    "delay_all_reduce_too_early": {
        "code": ["DDP302", "DDP301", "DDP303"],
        "subjects": ["0.weight"],
        "severity": "error",
    },
    "sharded_by_hand_without_broadcast": {"code": "DDP223", "subjects": ["group 0 parameters"]},
    "post_local_sgd_never_averages": {"code": "DDP306", "subjects": ["0.weight", "2.bias"]},
    "post_local_sgd_periods": {"code": "DDP223", "subjects": ["averager period"]},
    "post_local_sgd_warm_up": {"code": "DDP221", "subjects": ["communication hook start_localSGD_iter"]},
    "compiled_by_rank": {"code": "DDP522", "subjects": ["ByRank.forward"], "ranks": [1], "severity": "warning"},
}


def rows(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square()


def mean(model: nn.Module, batch: Tensor) -> Tensor:
    return squares(model, batch).mean()


def recipe(model: Callable[[], Any] = layers, **options: Any) -> Recipe:
    return Recipe(**{"model": model, "batch": rows, "loss": mean, **options})


# Coupled samples and summed losses


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


def loss_with_barrier(model: nn.Module, batch: Tensor) -> Tensor:
    if dist.is_initialized():
        dist.barrier()
    return mean(model, batch)


# A BatchNorm couples the samples; the barrier has no part in it.
bn_barrier = recipe(normalised, loss=loss_with_barrier)
# A summed loss behind a BatchNorm that couples the samples.
sum_and_bn = recipe(normalised, loss=lambda model, batch: squares(model, batch).sum())


class ByType(nn.Module):
    """Takes another branch in float64, which spoils the yardstick for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return self.head(hidden.relu() if hidden.dtype == torch.float32 else hidden)


dtype_dependent_sum = recipe(ByType, loss=lambda model, batch: squares(model, batch).sum())


def sum_of_a_whole_batch(model: nn.Module, batch: Tensor) -> Tensor:
    if not dist.is_initialized():
        assert len(batch) == 12, "global batch expected without a process group"
    return squares(model, batch).sum()


# A summed loss that insists on its batch size, so that shards cannot be run alone.
rank_raises_batchsize_assert_sum = recipe(lambda: nn.Linear(8, 1), loss=sum_of_a_whole_batch)


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers[int(x.sum() > 0)](x))


def shifted_rows(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
    shift = torch.tensor([1.0] * 4 + [-2.0] * 4)  # the first shard has a sum above zero, the whole batch has not
    return x + shift[:, None], torch.arange(8) % 4


# The sum of the batch chooses a layer: that of the global batch is another one than that of a shard.
layer_chosen_by_batch = recipe(
    Chooses,
    batch=shifted_rows,
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    ddp_kwargs={"find_unused_parameters": True},
)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.activation = nn.Linear(8, 2), nn.SiLU()
        self.experts = nn.Parameter(torch.randn(2, 8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(1)
        chosen = shares.argmax(1)
        order = chosen.argsort(stable=True)  # one expert's samples after the other's
        weights = self.experts[chosen[order]]
        hidden = self.activation(torch.einsum("sij,sj->si", weights, x[order]))
        return hidden[order.argsort()] * shares.amax(1, keepdim=True), chosen, shares


def balancing_loss(model: nn.Module, batch: Tensor) -> Tensor:
    out, chosen, shares = model(batch)
    balance = (F.one_hot(chosen, 2).float().mean(0) * shares.mean(0)).sum()
    return (out - batch).square().mean() + balance


# The loss that balances experts multiplies means over the batch; the experts couple nothing.
load_balancing = recipe(
    Experts, batch=lambda step: torch.randn(24, 8, generator=torch.Generator().manual_seed(step)), loss=balancing_loss
)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return 1e-5 * self.inner(x) / x.abs().max()


class WeaklyCoupled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.main = Scaled(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x) + self.scaled(x)


# A scale from the largest value of the batch; so weak that it shows in the gradients of one module only.
weakly_coupled = recipe(WeaklyCoupled, loss=lambda model, batch: (model(batch) - batch).square().mean())


# Gathers without a gradient


def loss_of_gathered(model: nn.Module, batch: Tensor) -> Tensor:
    output = model(batch)[:, 0]
    everyone = output
    if dist.is_initialized():
        everyone = functional.all_gather_tensor(output.detach(), 0, dist.group.WORLD)
        everyone = everyone.wait() if hasattr(everyone, "wait") else everyone
    return (output - everyone.mean() - batch.sum(1)).square().mean()


# Features are gathered through a functional collective, detached: no gradient comes back.
functional_gather_without_gradient = recipe(loss=loss_of_gathered)


# Wrappers and optimizers


def reducing_too_early(module: nn.Module, device: torch.device) -> nn.Module:
    return DistributedDataParallel(
        module,
        delay_all_reduce_named_params=[("0.weight", module.get_parameter("0.weight"))],
        param_to_hook_all_reduce=module.get_parameter("2.weight"),
    )


# A delayed gradient is reduced before it is there: the hooked parameter's comes first in backward.
# DDP does not wait for that all-reduce on a CPU either, so what is in `.grad` differs from run to run.
delay_all_reduce_too_early = recipe(wrap=reducing_too_early)


class Sharded(torch.optim.SGD):
    """Steps on this rank's part of the parameters, and broadcasts nothing."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(list(params)[dist.get_rank() :: dist.get_world_size()], lr=0.1)


sharded_by_hand_without_broadcast = recipe(optimizer=Sharded)


def local_steps(later: int = 0) -> Callable[[nn.Module, torch.device], nn.Module]:
    """A wrapper whose ranks train apart from the second step on, and each rank as many steps `later`."""

    def wrap(module: nn.Module, device: torch.device) -> nn.Module:
        wrapped = DistributedDataParallel(module)
        own, _ = dist.new_subgroups(group_size=1)
        wrapped.register_comm_hook(PostLocalSGDState(None, own, 1 + later * dist.get_rank()), post_localSGD_hook)
        return wrapped

    return wrap


def averaging(later: int = 0) -> Callable[[Iterable[nn.Parameter]], Any]:
    """An optimizer that averages the parameters every two steps, and on each rank as many `later`."""

    def optimizer(params: Iterable[nn.Parameter]) -> Any:
        averager = PeriodicModelAverager(period=2 + later * dist.get_rank(), warmup_steps=1)
        return PostLocalSGDOptimizer(torch.optim.SGD(params, lr=0.1, momentum=0.9), averager)

    return optimizer


# Nothing averages the parameters.
post_local_sgd_never_averages = recipe(wrap=local_steps())
# Each rank averages the parameters after another number of steps.
post_local_sgd_periods = recipe(wrap=local_steps(), optimizer=averaging(1))
# Each rank begins to train apart in another step.
post_local_sgd_warm_up = recipe(wrap=local_steps(1), optimizer=averaging())


class ByRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        alone = not dist.is_initialized() or dist.get_rank() == 0
        return self.second(hidden.relu() if alone else hidden.clamp(min=0.0))


# A compiled forward with another operation on rank 1, which gives the same values: the ranks run other code.
compiled_by_rank = recipe(lambda: torch.compile(ByRank(), backend="aot_eager"))
