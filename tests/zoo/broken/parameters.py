"""Parameters that contribute nothing, or not on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpcheck import Recipe

UNUSED = {"code": "DDP101", "subjects": ["unused.weight", "unused.bias"], "severity": "error"}
EXPECT = {
    "compiled_unused": UNUSED,
    "torch_compile_ddp_unused": UNUSED,
    "scripted_unused": UNUSED,
    "detached_parameter": {"code": "DDP103", "subjects": ["body.weight"], "severity": "error"},
    "compiled_static_detached": {"code": "DDP103", "subjects": ["body.weight", "body.bias"]},
    "trained_buffer": {"code": "DDP106", "subjects": ["temperature"], "severity": "error"},
    "rezero_gate_is_a_buffer": {"code": "DDP107", "subjects": ["body.weight", "body.bias"], "severity": "warning"},
    "all_zero": {"code": "DDP307", "severity": "error", "also": ["DDP107"]},
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


def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still in many models
        return torch.jit.script(Unused())


# In a model that model() compiles: the names are those of the code, without `_orig_mod`.
compiled_unused = recipe(lambda: torch.compile(Unused(), backend="aot_eager"))
# Under a compiled DDP wrapper.
torch_compile_ddp_unused = recipe(
    Unused, wrap=lambda module, device: torch.compile(DistributedDataParallel(module), backend="eager")
)
# In a model that TorchScript has compiled.
scripted_unused = recipe(scripted)


class DetachedWeight(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(x, self.body.weight.detach(), self.body.bias).tanh())


# forward reads a detached parameter, which itself is never an input of the graph.
detached_parameter = recipe(DetachedWeight)


class Detached(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.body(x).tanh().detach())


# The first layer is cut off, which static_graph allows for; compiled code gives it zeros.
compiled_static_detached = recipe(
    lambda: torch.compile(Detached(), backend="aot_eager"), ddp_kwargs={"static_graph": True}
)


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
