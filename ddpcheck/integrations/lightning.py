"""Lightning: a callback that watches the `DistributedDataParallel` of a `Trainer` during `fit`."""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddpcheck.consistency import check_consistency as compare_modules
from ddpcheck.findings.deprecation import renamed
from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.replace import replace
from ddpcheck.gather.ddp.ddp_wrapper import find_wrapper
from ddpcheck.integrations.callback import WatchCallback
from ddpcheck.monitor.reporting import FindingReporter
from ddpcheck.monitor.watch import Watch

if TYPE_CHECKING:
    import lightning.pytorch as pl
else:  # if both packages are installed, use the one imported by the script
    _NAMES = ("lightning.pytorch", "pytorch_lightning")
    try:
        pl = importlib.import_module(next((name for name in _NAMES if name in sys.modules), _NAMES[0]))
    except ModuleNotFoundError:
        pl = importlib.import_module(_NAMES[1])

__getattr__ = renamed(__name__, DdpCheckCallback="DDPCheckCallback")


class DDPCheckCallback(WatchCallback, pl.Callback):
    """Callback that detects faults under `DistributedDataParallel` during `Trainer.fit` of Lightning.

    Supports automatic and manual optimization, gradient accumulation and any precision. If the strategy does not wrap
    the model in DDP, nothing is watched, with a warning if there are several processes.

    Args:
        detect_anomalous_params: Detect parameters that do not contribute to the loss as DDP expects (DDP101 to DDP108)
            in the same step, with cause, ranks and steps. Under manual optimization the cause is unknown: a
            `training_step` that steps optimizers cannot be run again to find the cause.
        check_consistency: Compare the ranks: modules before DDP's first collective, which hangs or aborts on some
            mismatches (DDP2xx), parameters and buffers when training begins, at the end of each epoch and when a
            checkpoint is saved (DDP306, DDP214).
        check_consistency_every: Also compare every N synchronized backward passes; 0 for never.
        check_parity_every: Compare DDP's averaged gradients with an average by ddpcheck, every N synchronized backward
            passes (DDP302, DDP303); 0 for never.
        check_normalisation: Detect means of means over micro-batches or ranks with unequal numbers of targets, such as
            tokens (DDP514, DDP305).
        on_finding: "raise" raises `FindingsError` for errors, on all ranks in the same step, and warns about other
            findings; "warn" only warns; a function is called with each `Finding`. Each cause is reported once per fit.
        ignore: Rules not to report, such as `["DDP215"]` if BatchNorm deliberately uses the statistics of rank 0.
        timeout: Seconds to wait for the other ranks in a comparison.

    Raises:
        UsageError: An argument is invalid.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Compare modules before the model is wrapped."""
        if stage == "fit":
            reporter = FindingReporter(self._options, shows_warnings=trainer.is_global_zero)
            self._findings = reporter.findings
            if self._compares and isinstance(trainer.strategy, pl.strategies.DDPStrategy) and dist.is_initialized():
                reporter.report(compare_modules(pl_module, timeout=self._options.timeout))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach to the model, which the strategy has just wrapped."""
        model: Any = trainer.strategy.model
        try:
            wrapper = find_wrapper(model)
        except UsageError:
            if trainer.world_size > 1:
                kind = type(trainer.strategy).__name__
                text = f"{kind} uses neither DistributedDataParallel nor fully_shard; nothing is checked"
                warnings.warn(f"DDPCheckCallback: {text}", stacklevel=2)
            return
        options = self._options
        if getattr(wrapper, "static_graph", False) and not pl_module.automatic_optimization:
            # the strategy triggers the reduction after the first backward pass has ended
            options = replace(options, check_consistency_every=0, check_parity_every=0)
        self._watch = Watch(wrapper, options, reported=self._findings)
        self._watch.replay_inside(lambda: _without_logging(trainer, pl_module))
        self._compare()

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        """Pass `loss` to `Watch.expect`: under manual optimization, backward runs inside DDP's forward."""
        if self._watch is not None and not pl_module.automatic_optimization:
            self._watch.expect(loss)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Call `Watch.settle`: in Lightning, forward and backward run inside the optimizer step."""
        if self._watch is not None:
            self._watch.settle()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Compare the replicas if an optimizer has stepped before any synchronized backward pass."""
        if self._watch is not None and not self._watch.step and trainer.global_step:
            self._compare()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._compare()

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        """Compare the replicas, since only the replica of rank 0 is saved."""
        self._compare()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._detach()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Detach without reporting, since only this rank may have raised."""
        self._detach(failing=True)


@contextlib.contextmanager
def _without_logging(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[None]:
    parts = [vars(part) for part in module.modules() if isinstance(part, pl.LightningModule)]
    originals, loggers = [dict(attributes) for attributes in parts], trainer.loggers
    trainer.loggers = [pl.loggers.logger.DummyLogger() for _ in loggers]
    for attributes in parts:
        attributes.update(dict.fromkeys(("log", "log_dict", "print"), lambda *_args, **_named: None))
    try:
        yield
    finally:
        trainer.loggers = loggers
        for attributes, original in zip(parts, originals, strict=True):
            for name in ("log", "log_dict", "print"):
                attributes.pop(name)
                attributes.update({name: original[name]} if name in original else {})
