"""transformers: a callback that watches the `DistributedDataParallel` of a `Trainer`."""

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
    """Callback that detects faults under `DistributedDataParallel` in a `Trainer` of transformers.

    Use `Trainer(..., callbacks=[DDPCheckCallback()])`; with one process the callback does nothing. Steps are those of
    the trainer, counted from 0 at the start of `train`.

    Args:
        detect_anomalous_params: Detect parameters that do not contribute to the loss as DDP expects (DDP101 to DDP108)
            in the same step, with cause, ranks and steps.
        check_consistency: Compare fingerprints of parameters and buffers between ranks when training begins, at the end
            of each epoch and when a checkpoint is saved (DDP306, DDP214).
        check_consistency_every: Also compare parameters, buffers and gradients every N steps; 0 for never.
        check_parity_every: Compare DDP's averaged gradients with an average by ddpcheck every N steps (DDP302, DDP303).
        check_normalisation: Detect means of means over micro-batches or ranks with unequal numbers of tokens (DDP514,
            DDP305): a model or `compute_loss` that ignores `num_items_in_batch`, or
            `average_tokens_across_devices=False`.
        on_finding: "raise" raises `FindingsError` for errors from `Trainer.train`, on all ranks in the same step, and
            warns about other findings; "warn" only warns; a function is called with each `Finding`. Each cause is
            reported once.
        ignore: Codes, code prefixes or names of rules not to report, for intended behavior.
        timeout: Seconds to wait for the other ranks in a comparison.

    Raises:
        UsageError: An argument is invalid.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **known: Any
    ) -> None:
        """Attach to the model, which is wrapped by now."""
        self._detach()
        self._findings = ()
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
        """Compare the replicas, since only the replica of rank 0 was saved."""
        self._compare()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **known: Any) -> None:
        self._detach()
