"""Models that torch.compile or TorchScript has compiled: only the wrapped steps are repeated as compiled code."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch._inductor.decomposition
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ddpcheck import Recipe


def rows(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def to_sum(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def recipe(**options: Any) -> Recipe:
    return Recipe(**{"batch": rows, "loss": to_sum, **options})


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))
        self.head = nn.Linear(512, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        torch._dynamo.graph_break()
        return self.head(x)[:, 0]


# wrap compiles the DDP module: layers as large as a bucket, where the graph is split, and a graph break in forward.
compiled_after_wrapping = recipe(
    model=Deep,
    batch=lambda step: torch.randn(12, 512, generator=torch.Generator().manual_seed(step)),
    loss=lambda model, batch: (model(batch) - batch.mean(1)).square().mean(),
    wrap=lambda module, device: torch.compile(DistributedDataParallel(module, bucket_cap_mb=1), backend="aot_eager"),
)


class Centred(nn.Module):
    """Averages a statistic by collectives of either spelling."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("spread", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = x.mean(0), x.square().mean(0)
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
            spread = functional.all_reduce(spread, "avg", dist.group.WORLD)
        self.mean.lerp_(mean, 0.1)
        self.spread.lerp_(spread, 0.1)
        return self.head(self.layer((x - self.mean) / self.spread.sqrt()).tanh())


# wrap compiles the module and hands it to DDP.
compiled_before_wrapping = recipe(
    model=Centred, wrap=lambda module, device: DistributedDataParallel(torch.compile(module, backend="aot_eager"))
)


def compiled_layers() -> Any:
    layers = (nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 1))
    return torch.compile(nn.Sequential(*layers))


# model() compiles with inductor: dropout, whose compiled code draws other numbers, and a LayerNorm.
compiled_inductor = recipe(model=compiled_layers)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), backend="aot_eager")
        self.middle = nn.Linear(8, 8)
        self.middle.compile(backend="eager")
        self.head = nn.Linear(8, 1)
        self.scaled: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scaled is None:
            self.scaled = torch.compile(lambda h: h.relu() * 2, backend="eager")
        return self.head(self.scaled(self.middle(self.encoder(x))))[:, 0]


@torch.compile(backend="eager")
def distance(found: Tensor, wanted: Tensor) -> Tensor:
    return (found - wanted).square().mean()


# A compiled submodule, one compiled in its first forward, a compiled loss, and inductor's tables imported.
compiled_parts = recipe(model=Parts, loss=lambda model, batch: distance(model(batch), batch.sum(1)))


@torch.jit.script
def gate(x: Tensor, weight: Tensor) -> Tensor:
    opened = torch.sigmoid(x * weight)
    return (opened * x).tanh() + opened * 0.3 * x.relu()


class Gated(nn.Module):
    """A gate in TorchScript, behind a norm that leaves no gradient for the bias before it but rounding.

    TorchScript profiles a function in its first two calls and optimises it then, so that steps round differently.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.GroupNorm(8, 8), nn.Linear(8, 3)
        self.weight = nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(gate(self.norm(self.conv(x)), self.weight).mean((2, 3)))


def images_and_labels(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, 8, 8, generator=generator), torch.randint(0, 3, (8,), generator=generator)


scripted_gate = recipe(
    model=Gated, batch=images_and_labels, loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1])
)


def scripted_layers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still in many models
        return torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))


# A model that TorchScript has compiled as a whole: it refuses hooks by the methods that register them.
scripted_model = recipe(model=scripted_layers)
