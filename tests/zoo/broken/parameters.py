"""Parameters that contribute nothing, or not on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpcheck import Recipe

UNUSED = {"code": "DDP101", "subjects": ["unused.weight", "unused.bias"], "severity": "error"}
ON_RANK_1 = {"code": "DDP104", "subjects": ["unused.weight", "unused.bias"], "ranks": [1], "severity": "error"}
EXPECT = {
    "async_unused": UNUSED,
    "compiled_unused": UNUSED,
    "torch_compile_ddp_unused": UNUSED,
    "scripted_unused": UNUSED,
    "unused_and_annealed": UNUSED,
    "conv_groupnorm_unused": {"code": "DDP101", "subjects": ["norm_2.weight", "norm_2.bias"], "severity": "error"},
    "transformer_untied_head": {"code": "DDP101", "subjects": ["head.weight"], "severity": "error"},
    "compiled_static_detached": {"code": "DDP103", "subjects": ["body.weight", "body.bias"]},
    "gather_object_unused_on_rank1": ON_RANK_1,
    "data_dependent_branch": ON_RANK_1,
    "trained_buffer": {"code": "DDP106", "subjects": ["temperature"], "severity": "error"},
    "rezero_gate_is_a_buffer": {"code": "DDP107", "subjects": ["body.weight", "body.bias"], "severity": "warning"},
    "all_zero": {"code": "DDP307", "severity": "error", "also": ["DDP107"]},
    "static_graph_dataclass": {"code": "DDP112", "subjects": ["Output"], "severity": "error"},
}


def rows(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def to_sum(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()


def recipe(model: Callable[[], Any], **options: Any) -> Recipe:
    return Recipe(**{"model": model, "batch": rows, "loss": to_sum, **options})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(8, 1)


class AsyncReduce(Unused):
    def forward(self, x: Tensor) -> Tensor:
        if dist.is_initialized():
            dist.all_reduce(torch.tensor(float(len(x))), async_op=True).wait()
        return super().forward(x)


def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still in many models
        return torch.jit.script(Unused())


# A layer that nothing uses, in a forward with an asynchronous all-reduce.
async_unused = recipe(AsyncReduce)
# In a model that model() compiles: the names are those of the code, without `_orig_mod`.
compiled_unused = recipe(lambda: torch.compile(Unused(), backend="aot_eager"))
# Under a compiled DDP wrapper.
torch_compile_ddp_unused = recipe(
    Unused, wrap=lambda module, device: torch.compile(DistributedDataParallel(module), backend="eager")
)
# In a model that TorchScript has compiled.
scripted_unused = recipe(scripted)


class Annealer:
    def __init__(self) -> None:
        self.steps = 0

    def __call__(self) -> float:
        self.steps += 1
        return min(1.0, self.steps / 10)


class Variational(Unused):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.annealer = nn.Linear(4, 8), Annealer()

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.body(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (spread / 2).exp()
        divergence = -0.5 * (1 + spread - mean**2 - spread.exp()).sum(1).mean()
        return (self.head(z) - x).square().mean() + self.annealer() * divergence


# In a model that draws random numbers and counts its steps in an object of its own.
unused_and_annealed = recipe(Variational, loss=lambda model, batch: model(batch))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_1, self.conv_2 = nn.Conv1d(1, 4, 3), nn.Conv1d(4, 4, 3)
        self.norm_1, self.norm_2 = nn.GroupNorm(2, 4), nn.GroupNorm(2, 4)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_1(self.conv_1(x[:, None])).relu()
        x = self.norm_1(self.conv_2(x)).relu()
        return self.head(x.flatten(1))


# A second GroupNorm is built and the first one used twice.
conv_groupnorm_unused = recipe(Convolutions)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 20, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.encoder(self.embedding(tokens)), self.embedding.weight)


# The logits are computed from the embedding's weight, and a head that nothing calls is still there.
transformer_untied_head = recipe(
    Transformer,
    batch=lambda step: torch.randint(20, (12, 8), generator=torch.Generator().manual_seed(step)),
    loss=lambda model, batch: F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()),
)


class Detached(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.body(x).tanh().detach())


# The first layer is cut off, which static_graph allows for; compiled code gives it zeros.
compiled_static_detached = recipe(
    lambda: torch.compile(Detached(), backend="aot_eager"), ddp_kwargs={"static_graph": True}
)


class GathersObjects(Unused):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not dist.is_initialized():
            return y + self.unused(x)
        dist.all_gather_object([None] * dist.get_world_size(), {"n": len(x)})
        return y + self.unused(x) if dist.get_rank() == 0 else y


class Branches(Unused):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + self.unused(x) if x.mean() > 0 else y


# A layer that rank 1 does not use, in a forward that gathers objects.
gather_object_unused_on_rank1 = recipe(GathersObjects)
# A layer runs only where the batch is positive on average, which holds on rank 0 and not on rank 1.
data_dependent_branch = recipe(Branches, batch=lambda step: rows(step) + torch.linspace(3, -2, 12)[:, None])


class Heated(Net):
    """The temperature is a buffer that requires grad, and so is no parameter to DDP and to the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.ones((), requires_grad=True))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.temperature


class Gated(Net):
    """The gate of a branch is a buffer of zeros, so what is behind it never gets a gradient but zero."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gate", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.gate * self.body(x).tanh())


trained_buffer = recipe(Heated)
rezero_gate_is_a_buffer = recipe(Gated)
# The loss is multiplied by zero; nothing is left to compare.
all_zero = recipe(Net, loss=lambda model, batch: 0.0 * to_sum(model, batch))


@dataclass
class Output:
    prediction: Tensor


class Structured(Net):
    def forward(self, x: Tensor) -> Any:
        return Output(super().forward(x)[:, 0])


# forward returns a dataclass, into which DDP does not look under static_graph=True: nothing is averaged.
static_graph_dataclass = recipe(
    Structured,
    loss=lambda model, batch: (model(batch).prediction - batch.sum(1)).square().mean(),
    ddp_kwargs={"static_graph": True},
)
