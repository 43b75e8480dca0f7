"""Small models in a real mmengine `Runner`, for the ranks of `tests/integrations/test_mmengine.py`.

Ranks are forked from a process that has imported this, so it holds what they would each import.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401  of mmengine's visualizer
import torch
import torch.distributed as dist
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.optim.optimizer import amp_optimizer_wrapper
from mmengine.registry import HOOKS, METRICS, MODEL_WRAPPERS
from mmengine.runner import FlexibleRunner as FlexibleRunner
from mmengine.runner import Runner
from torch import nn

from ddpcheck.findings.report import Finding
from ddpcheck.gather.ddp.sync_batchnorm import synchronised_on_cpu
from ddpcheck.integrations.mmengine import CheckedMMDistributedDataParallel, DDPCheckHook
from ddpcheck.monitor.reporting import FindingWarning

with contextlib.suppress(ImportError):
    import sklearn.datasets  # noqa: F401  of the example

CHECKED = {"type": "CheckedMMDistributedDataParallel", "detect_anomalous_params": True}
_count = itertools.count()


class Net(BaseModel):
    """A network with a dict of losses, one of them a list; `normalisation` stands between its layers."""

    def __init__(self, normalisation: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), normalisation(8), nn.ReLU())
        self.head = nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor, mode: str = "tensor") -> Any:
        features = self.body(inputs)
        if mode == "loss":
            return self.losses(features, targets)
        return [*self.head(features)] if mode == "predict" else self.head(features)

    def losses(self, features: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
        error = self.head(features) - targets
        return {"loss_main": error.square().mean(), "loss_parts": [error[:2].abs(), error[2:].abs()]}


class Swallow(torch.autograd.Function):
    """Gives no gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


class Faulty(Net):
    """One of each fault that a detector has to tell apart."""

    def __init__(self, depth: int = 0, rarely: bool = True) -> None:
        super().__init__()
        self.depth = depth
        self.rarely = rarely
        self.lost = nn.Parameter(torch.zeros(1))
        self.unused = nn.Linear(8, 1)
        self.not_in_loss = nn.Linear(8, 1)
        self.detached = nn.Linear(8, 1)
        self.zero = nn.Linear(8, 1)
        self.rare = nn.Linear(8, 1)
        self.unregistered = [torch.ones(8, requires_grad=True)]
        self.calls = 0

    def losses(self, features: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
        found = super().losses(features * self.unregistered[0], targets)
        found["accuracy"] = self.not_in_loss(features).mean()
        found["loss_detached"] = (self.head(features) * self.detached(features).detach()).mean()
        found["loss_zero"] = 0.0 * self.zero(features).mean()
        found["loss_lost"] = Swallow.apply(self.lost).sum()
        if not (self.rarely and dist.get_rank() == 1 and self.calls >= 2):
            found["loss_rare"] = self.rare(features).mean()
        for _ in range(self.depth):
            found["loss_main"] = found["loss_main"] + 0.0
        self.calls += 1
        return found


class Conditional(Net):
    """Heads that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, 1) for _ in range(2))
        self.calls = dist.get_rank()

    def losses(self, features: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
        self.calls += 1
        return {**super().losses(features, targets), "loss_turn": self.heads[self.calls % 2](features).mean()}


class Apart(BaseModel):
    """Two parts, each with a wrapper of its own, as a GAN has them; one layer is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.second = Last()

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor, mode: str = "tensor") -> Any:
        return self.second(self.first(inputs))

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, torch.Tensor]:
        inputs, targets = self.data_preprocessor(data, True)
        loss = (self(inputs, targets) - targets).square().mean()
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}


class Last(nn.ModuleList):
    """Two layers, of which the first is used."""

    def __init__(self) -> None:
        super().__init__([nn.Linear(8, 1), nn.Linear(8, 1)])

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self[0](features)


@MODEL_WRAPPERS.register_module()
class Own(CheckedMMDistributedDataParallel):
    """A user's own wrapper."""


@HOOKS.register_module()
class Steps(Hook):
    """Notes what each step logs."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.logged.append({name: float(value) for name, value in outputs.items()})


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sixteen of them."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return inputs, inputs.sum(0, keepdim=True)


@METRICS.register_module()
class Count(BaseMetric):
    """How many batches were predicted."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(len(data_samples))

    def compute_metrics(self, results: list[int]) -> dict[str, float]:
        return {"score": float(len(results))}


@dataclass
class Trained:
    """What one rank has to tell of a run."""

    findings: tuple[Finding, ...]
    raised: str = ""
    warned: list[str] = field(default_factory=list)
    log: str = ""
    logged: list[dict[str, float]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    checkpoint: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    wrapper: str = ""
    same_group: bool = False


def train(
    folder: Path,
    model: nn.Module,
    wrapper: Mapping[str, Any] | None,
    *,
    hooks: list[Any] | None = None,
    epochs: int = 2,
    optim: Mapping[str, Any] | None = None,
    cfg: Mapping[str, Any] | None = None,
    runner_class: Any = Runner,
    **options: Any,
) -> Trained:
    """Train `model` by a `Runner`, with a folder of its own for each rank; `folder` is a new one."""
    rank = dist.get_rank()
    steps = Steps()
    settings: dict[str, Any] = {
        "work_dir": str(folder / str(rank)),
        "experiment_name": f"run{next(_count)}",
        "train_dataloader": loader(),
        "train_cfg": {"by_epoch": True, "max_epochs": epochs},
        "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.05}, **(optim or {})},
        "custom_hooks": [steps, *(hooks or [])],
        "randomness": {"seed": 1},
        "launcher": "pytorch",
    }
    if runner_class is Runner:
        settings["cfg"] = {**(cfg or {}), **({"model_wrapper_cfg": dict(wrapper)} if wrapper else {})}
    else:
        settings["strategy"] = {"type": "DDPStrategy", **(cfg or {}), **({"model_wrapper": wrapper} if wrapper else {})}
    group = dist.group.WORLD
    raised: BaseException | None = None
    runner: Any = None
    with warnings.catch_warnings(record=True) as caught, quiet():
        warnings.simplefilter("always")
        try:
            runner = runner_class(model=model, **{**settings, **options})
            runner.train()
        except Exception as error:
            raised = error
    if runner is None:
        return Trained((), raised=f"{type(raised).__name__}: {raised}")
    ours = [hook for hook in runner.hooks if isinstance(hook, DDPCheckHook)]
    own = getattr(runner.model, "findings", ())
    module = getattr(runner.model, "module", runner.model)
    saved = sorted((folder / str(rank)).glob("*.pth"))
    return Trained(
        findings=tuple(finding for watch in ours[0].watches for finding in watch.findings) if ours else own,
        raised="" if raised is None else f"{type(raised).__name__}: {raised}",
        warned=[str(each.message) for each in caught if issubclass(each.category, FindingWarning)],
        log="".join(path.read_text() for path in sorted((folder / str(rank)).glob("*/*.log"))),
        logged=steps.logged,
        files=[path.name for path in saved],
        checkpoint=torch.load(saved[-1], weights_only=False)["state_dict"] if saved else {},
        weights={name: value.clone() for name, value in module.state_dict().items()},
        wrapper=type(runner.model).__name__,
        same_group=dist.group.WORLD is group,
    )


def loader(sampler: str = "DefaultSampler") -> dict[str, Any]:
    """Two batches of four a rank and epoch."""
    return {
        "batch_size": 4,
        "num_workers": 0,
        "dataset": Samples(),
        "sampler": {"type": sampler, "shuffle": True},
        "collate_fn": {"type": "default_collate"},
    }


def validation() -> dict[str, Any]:
    """What has a `Runner` validate after each epoch."""
    return {"val_dataloader": loader(), "val_cfg": {}, "val_evaluator": {"type": "Count"}}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without mmengine's log on the screen, which says a thousand lines."""
    with contextlib.redirect_stderr(None), contextlib.redirect_stdout(None):
        yield


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """`AmpOptimWrapper` and `SyncBatchNorm` refuse a CPU: the one works there, and ours stands in for the other."""
    asked = amp_optimizer_wrapper.is_cuda_available
    amp_optimizer_wrapper.is_cuda_available = lambda: True
    try:
        with synchronised_on_cpu():
            yield
    finally:
        amp_optimizer_wrapper.is_cuda_available = asked
