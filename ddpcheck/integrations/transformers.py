"""transformers: a callback that watches the `DistributedDataParallel` of a `Trainer` while it trains."""

from __future__ import annotations

import warnings
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ddpcheck.findings.deprecation import renamed
from ddpcheck.findings.errors import UsageError
from ddpcheck.gather.ddp.ddp_wrapper import find_wrapper
from ddpcheck.integrations.callback import WatchCallback
from ddpcheck.monitor.watch import Watch

__getattr__ = renamed(__name__, DdpCheckCallback="DDPCheckCallback")


class DDPCheckCallback(WatchCallback, TrainerCallback):
    """Finds what is wrong under `DistributedDataParallel` in a run of the `Trainer` of transformers.

    `Trainer(..., callbacks=[DDPCheckCallback()])` is all; in a run of one process it does nothing. Steps are the
    trainer's, counted from 0 where `train` begins.

    Args:
        detect_anomalous_params: Find parameters that do not take part in the loss as DDP expects (DDP101 to DDP108),
            with cause, ranks and steps, in the step in which they are missing.
        check_consistency: Compare parameters and buffers of the ranks where training begins, at the end of each epoch
            and where a checkpoint is saved (DDP306, DDP214), by fingerprints.
        check_consistency_every: Compare them, and gradients, every so many steps too; 0 for never.
        check_parity_every: Every so many, hold the reducer against an average of ddpcheck's own (DDP302, 303).
        check_normalisation: Find means of means over micro-batches or ranks with unequal numbers of tokens (DDP514,
            DDP305): a `compute_loss` that ignores `num_items_in_batch`, a model that does, or
            `average_tokens_across_devices=False`.
        on_finding: "raise" raises `FindingsError` for errors out of `Trainer.train`, on all ranks in the same step, and
            warns of the rest; "warn" warns of both; a function is called with each `Finding`. Each cause is
            reported once.
        ignore: Rules that are not reported, by code, prefix of a code or name: for what is so on purpose.
        timeout: Seconds to wait for the other ranks in a comparison.

    Raises:
        UsageError: An argument is none of its choices.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **known: Any
    ) -> None:
        """The model has just been wrapped, unless it was before: attach."""
        self._detach()
        self._found = ()
        try:
            wrapper = find_wrapper(known["model"])
        except UsageError as error:
            if args.world_size > 1:
                warnings.warn(f"DDPCheckCallback: {error}; nothing is checked", stacklevel=2)
            return
        self._watch = Watch(wrapper, self._options)
        self._compare()

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **known: Any) -> None:
        self._compare()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **known: Any) -> None:
        """Compare the replicas: that of rank 0 has been saved."""
        self._compare()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **known: Any) -> None:
        self._detach()
