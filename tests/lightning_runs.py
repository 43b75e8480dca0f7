"""Modules and runs of Lightning for `test_lightning`, which only its ranks import: lightning is seconds to import."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch import callbacks
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, TensorDataset

from ddpcheck import Finding, FindingWarning
from ddpcheck.integrations.lightning import DDPCheckCallback

for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


class Net(pl.LightningModule):
    """Two layers on two classes, which logs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def loss(self, batch: Any) -> torch.Tensor:
        return cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# Automatic optimization


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.leftover = nn.Linear(4, 2)


class Detached(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.body[:2](x).detach()
        return self.body[2](features)


class NotInLoss(Net):
    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = nn.Linear(4, 2)

    def training_step(self, batch: Any, index: int) -> Any:
        return {"loss": self.loss(batch), "auxiliary": self.auxiliary(batch[0])}


class RankOneSkips(Net):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) if self.global_rank == 1 else self.body(x) + self.gate(x)


class Sometimes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2)

    def training_step(self, batch: Any, index: int) -> Any:
        return cross_entropy(self(batch[0]) + (self.gate(batch[0]) if index % 2 else 0), batch[1])


class Normalised(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body.insert(1, nn.BatchNorm1d(8))


class SkipsAStep(Net):
    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any) -> None:
        if self.global_rank == 1 and index == 2:
            closure()  # and no step, as behind a guard against a loss that is not finite on this rank
        else:
            super().optimizer_step(epoch, index, optimizer, closure)


class MoreOnRankOne(Net):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(1 + int(os.environ["RANK"])))


class Measured(Net):
    """Keeps what a rank keeps for itself: metrics, outputs of an epoch, the last loss."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=2)
        self.every_loss = torchmetrics.CatMetric()
        self.outputs: list[torch.Tensor] = []
        self.last: torch.Tensor | None = None
        self.steps = 0

    def training_step(self, batch: Any, index: int) -> Any:
        logits = self(batch[0])
        loss = cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.every_loss.update(loss.detach())
        self.log_dict({"accuracy": self.accuracy}, on_epoch=True)
        self.log("loss", loss + torch.rand(()), on_epoch=True)
        self.logger.log_metrics({"step": float(self.steps)}, self.steps)
        self.outputs.append(loss.detach())
        self.last = loss.detach()
        self.steps += 1
        return loss

    def kept(self) -> list[Any]:
        return [self.steps, self.outputs, self.last, self.every_loss.compute(), self.accuracy.compute()]


class MeasuredDetached(Measured):
    forward = Detached.forward


class TakesTheIterator(Unused):
    def training_step(self, dataloader_iter: Any) -> Any:
        self.taken = getattr(self, "taken", 0) + 1
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


# Manual optimization


class Manual(Net):
    """One loss, two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.body[index].parameters(), lr=0.1) for index in (0, 2)]

    def training_step(self, batch: Any, index: int) -> None:
        loss = self.loss(batch)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.backward_of(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        self.log("loss", loss)

    def backward_of(self, loss: torch.Tensor) -> None:
        self.manual_backward(loss)


class ManualTwice(Manual):
    """A backward pass for each optimizer."""

    def training_step(self, batch: Any, index: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


class ManualAccumulation(Manual):
    def training_step(self, batch: Any, index: int) -> None:
        if index % 2 == 0:
            with self.trainer.strategy.block_backward_sync():
                self.manual_backward(self.loss(batch))
        else:
            self.manual_backward(self.loss(batch))
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()


class ManualUnused(Manual):
    def __init__(self) -> None:
        super().__init__()
        self.leftover = nn.Linear(4, 2)


class ManualPastTheStrategy(Manual):
    def backward_of(self, loss: torch.Tensor) -> None:
        loss.backward()


class Gan(Net):
    """Two halves, of which one is frozen while the other learns."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(half.parameters(), lr=0.1) for half in self.body]

    def training_step(self, batch: Any, index: int) -> None:
        make, tell = self.body
        real, one = batch[0], torch.ones(len(batch[0]), 1)
        for optimizer, loss in zip(
            self.optimizers(),
            (
                lambda: binary_cross_entropy_with_logits(tell(make(torch.randn_like(real))), one),
                lambda: (
                    binary_cross_entropy_with_logits(tell(real), one)
                    + binary_cross_entropy_with_logits(tell(make(torch.randn_like(real)).detach()), 1 - one)
                ),
            ),
            strict=True,
        ):
            self.toggle_optimizer(optimizer)
            self.manual_backward(loss())
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


# Under fully_shard


class Body(nn.Sequential):
    """With a layer that its forward pass may leave out."""

    leaves_out = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self[:-1] if self.leaves_out else self:
            x = part(x)
        return x


class Sharded(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body = Body(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 2))

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard  # since torch 2.6

        mesh = self.device_mesh["data_parallel"]
        for part in (self.body[0], self.body[2], self.body):
            fully_shard(part, mesh=mesh)


class ShardedUnused(Sharded):
    def __init__(self) -> None:
        super().__init__()
        self.body.leaves_out = True


def shards() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False)


# Strategies and callbacks


class NeverEnters(DDPStrategy):
    """With the fault that Lightning's own strategy had: the context is made, handed out, and not entered."""

    @contextmanager
    def block_backward_sync(self) -> Iterator[Any]:
        yield self.model.no_sync()


class ChangesRankOne(pl.Callback):
    """Changes a parameter on one rank, between two steps."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            with torch.no_grad():
                module.body[0].weight.mul_(1.01)


class Unfreezes(callbacks.BaseFinetuning):
    """Lightning's way to finetune: the first layer is frozen before DDP sees it, and learns from epoch 1 on."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.body[0])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.body[0], optimizer)


# Runs


class Counts(pl.Callback):
    def __init__(self, callback: DDPCheckCallback) -> None:
        self.callback = callback
        self.averaged = 0

    def on_train_end(self, trainer: Any, module: Any) -> None:
        if self.callback._watch is not None:
            self.averaged = self.callback._watch.step


@dataclass
class Run:
    """What came of a fit on this rank."""

    trainer: pl.Trainer
    callback: DDPCheckCallback
    error: BaseException | None
    warned: list[Finding]
    averaged: int  # backward passes

    @property
    def codes(self) -> list[str]:
        return [finding.code for finding in self.callback.findings]

    @property
    def finding(self) -> Finding:
        (finding,) = self.callback.findings
        return finding


def batches(count: int = 32) -> DataLoader[Any]:
    made = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(count, 4, generator=made), torch.randint(0, 2, (count,), generator=made))
    return DataLoader(data, batch_size=4)


def fit(
    model: Any,
    *,
    check: Any = None,
    watched: bool = True,
    val: bool = False,
    saves: str = "",
    ckpt_path: str | None = None,
    **options: Any,
) -> Run:
    """Fit `model` on what a Trainer(strategy="ddp", devices=2) makes of 32 samples: 4 steps an epoch."""
    torch.manual_seed(0)
    callback = DDPCheckCallback(**(check or {}))
    counts = Counts(callback)
    given = [*options.pop("callbacks", []), *([callback, counts] if watched else [])]
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    rest = {"strategy": "ddp", "devices": 2, "max_epochs": 1, "enable_checkpointing": False, **quiet, **options}
    error = None
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ),  # which Lightning's environment takes variables out of when it ends
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        try:
            trainer = pl.Trainer(accelerator="cpu", default_root_dir=folder, callbacks=given, **rest)
            module = model() if isinstance(model, type) else model
            trainer.fit(module, batches(), batches(8) if val else None, ckpt_path=ckpt_path)
            if saves:
                trainer.save_checkpoint(saves)
        except Exception as raised:
            error = raised
    warned = [w.message.finding for w in caught if isinstance(w.message, FindingWarning)]
    return Run(trainer, callback, error, warned, counts.averaged)


class Keeps(Logger):
    """A logger that keeps what it is told."""

    name, version = "keeps", 0

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.told.append((sorted(metrics.items()), step))


def left_behind(model: nn.Module) -> Any:
    """How many hooks there are on modules, parameters and optimizers, and what stands for DDP's `no_sync`."""
    on_modules = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())
    on_parameters = sum(len(parameter._backward_hooks or ()) for parameter in model.parameters())
    on_optimizers = len(_global_optimizer_pre_hooks)
    return on_modules, on_parameters, on_optimizers, nn.parallel.DistributedDataParallel.no_sync
