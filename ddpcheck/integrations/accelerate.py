"""accelerate: watch the `DistributedDataParallel` of a training loop with an `Accelerator`."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from torch import nn

from ddpcheck.findings.errors import UsageError, WrongTypeError
from ddpcheck.findings.report import Finding
from ddpcheck.gather.ddp.ddp_wrapper import find_wrapper
from ddpcheck.monitor.reporting import WatchOptions
from ddpcheck.monitor.watch import Watch


def watch(accelerator: Accelerator, model: nn.Module, **options: Any) -> AcceleratorWatch:
    """Watch a loop until `close` or within a `with` block, on all ranks.

    Micro-batches under `accelerator.accumulate` count for the optimizer step that uses their gradients. The watch lives
    as long as the model, even if `accelerator.unwrap_model` removes the wrapper. With one process nothing is watched.

    Args:
        accelerator: The `Accelerator` of the loop.
        model: The model, before or after `accelerator.prepare`.
        **options: Options of `ddpcheck.watch`: `on_finding`, `check_consistency_every`, ...

    Returns:
        The watch, which is a context manager.

    Raises:
        UsageError: There are several processes and `prepare` has not wrapped the model in `DistributedDataParallel`,
            or an option is invalid.
    """
    if not isinstance(accelerator, Accelerator):
        raise WrongTypeError(f"watch takes the Accelerator first, and then the model; got {type(accelerator).__name__}")
    if accelerator.num_processes == 1:
        return AcceleratorWatch(None)
    try:
        wrapper = find_wrapper(model)
    except UsageError as error:
        kind = getattr(accelerator.distributed_type, "value", accelerator.distributed_type)
        advice = f"accelerator.prepare makes it where the distributed type, here {kind}, is DDP"
        if kind == "FSDP":
            advice = "accelerator.prepare does where its plugin has fsdp_version=2"
        raise UsageError(f"{error}; {advice}") from None
    return AcceleratorWatch(Watch(wrapper, WatchOptions(**options)))


class AcceleratorWatch:
    """Watch of a model under accelerate; inactive if there is only one process."""

    def __init__(self, watch: Watch | None) -> None:
        self._watch = watch

    def __enter__(self) -> AcceleratorWatch:
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        self.close(failing=error is not None)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return all findings so far, identical on every rank."""
        return () if self._watch is None else self._watch.findings

    @property
    def step(self) -> int:
        """Return the number of completed backward passes with gradient synchronization."""
        return 0 if self._watch is None else self._watch.step

    def compare(self) -> list[Finding]:
        """Compare modules, parameters and buffers between ranks, as `ddpcheck.Watch.compare` does."""
        return [] if self._watch is None else self._watch.compare()

    def close(self, *, failing: bool = False) -> None:
        """Detach from the model, as `ddpcheck.Watch.close` does; may be called again."""
        if self._watch is not None:
            self._watch.close(failing=failing)
