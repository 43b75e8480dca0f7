"""Lightning: a callback that watches the `DistributedDataParallel` of a `Trainer(strategy="ddp")` while it fits."""

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
else:  # the one that the script has imported, where both are installed
    _NAMES = ("lightning.pytorch", "pytorch_lightning")
    try:
        pl = importlib.import_module(next((name for name in _NAMES if name in sys.modules), _NAMES[0]))
    except ModuleNotFoundError:
        pl = importlib.import_module(_NAMES[1])

__getattr__ = renamed(__name__, DdpCheckCallback="DDPCheckCallback")


class DDPCheckCallback(WatchCallback, pl.Callback):
    """Finds what is wrong under `DistributedDataParallel` in a run of Lightning's `Trainer`, while it fits.

    It works with automatic and manual optimization, with gradient accumulation and with any precision. Where the
    strategy does not wrap the model in DDP there is nothing to watch: it warns where there is more than one process.

    Args:
        detect_anomalous_params: Find parameters that do not take part in the loss as DDP expects (DDP101 to DDP108),
            with cause, ranks and steps, in the step in which they are missing. Under manual optimization the cause is
            not known: a `training_step` that steps optimizers cannot be run again to look for it.
        check_consistency: Compare the ranks: their modules before DDP's first collective, which hangs or aborts on some
            differences (DDP2xx), parameters and buffers where training begins, at the end of each epoch and where a
            checkpoint is saved (DDP306, DDP214).
        check_consistency_every: Compare them every so many synchronised backward passes too; 0 for never.
        check_parity_every: Every so many, hold the reducer against an average of ddpcheck's own (DDP302, 303).
        check_normalisation: Find means of means over micro-batches or ranks with unequal numbers of targets (tokens,
            say): DDP514, 305.
        on_finding: "raise" raises `FindingsError` for errors, on all ranks in the same step, and warns of the rest;
            "warn" warns of both; a function is called with each `Finding`. Each cause is reported once in a fit.
        ignore: Rules that are not reported, such as `["DDP215"]` for BatchNorm with statistics of rank 0 on purpose.
        timeout: Seconds to wait for the other ranks in a comparison.

    Raises:
        UsageError: An argument is none of its choices.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Before the model is wrapped: compare modules."""
        if stage == "fit":
            reporter = FindingReporter(self._options, shows_warnings=trainer.is_global_zero)
            self._found = reporter.findings
            if self._compares and isinstance(trainer.strategy, pl.strategies.DDPStrategy) and dist.is_initialized():
                reporter.report(compare_modules(pl_module, timeout=self._options.timeout))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The model has just been wrapped: attach."""
        model: Any = trainer.strategy.model
        try:
            wrapper = find_wrapper(model)
        except UsageError:
            if trainer.world_size > 1:
                kind = type(trainer.strategy).__name__
                text = (
                    f"DDPCheckCallback: {kind} uses neither DistributedDataParallel nor fully_shard; nothing is checked"
                )
                warnings.warn(text, stacklevel=2)
            return
        options = self._options
        if getattr(wrapper, "static_graph", False) and not pl_module.automatic_optimization:
            # here the reduction of the first backward pass comes after it, when the strategy asks for it
            options = replace(options, check_consistency_every=0, check_parity_every=0)
        self._watch = Watch(wrapper, options, reported=self._found)
        self._watch.replay_inside(lambda: _without_logging(trainer, pl_module))
        self._compare()

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        """Under manual optimization this is inside of DDP's forward, and each backward pass is reduced by itself."""
        if self._watch is not None and not pl_module.automatic_optimization:
            self._watch.expect(loss)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Lightning runs forward and backward inside of the step; here they are over."""
        if self._watch is not None:
            self._watch.settle()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Compare the replicas if an optimizer has stepped before a backward pass was averaged."""
        if self._watch is not None and not self._watch.step and trainer.global_step:
            self._compare()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._compare()

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
        """Compare the replicas: that of rank 0 is saved."""
        self._compare()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._detach()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Detach: who handles the exception may save a checkpoint, on this rank alone."""
        self._detach(failing=True)


@contextlib.contextmanager
def _without_logging(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[None]:
    """A `training_step` in this context logs and prints nothing."""
    parts = [vars(part) for part in module.modules() if isinstance(part, pl.LightningModule)]
    before, loggers = [dict(attributes) for attributes in parts], trainer.loggers
    trainer.loggers = [pl.loggers.logger.DummyLogger() for _ in loggers]
    for attributes in parts:
        attributes.update(dict.fromkeys(("log", "log_dict", "print"), lambda *_args, **_named: None))
    try:
        yield
    finally:
        trainer.loggers = loggers
        for attributes, known in zip(parts, before, strict=True):
            for name in ("log", "log_dict", "print"):
                attributes.pop(name)
                attributes.update({name: known[name]} if name in known else {})
