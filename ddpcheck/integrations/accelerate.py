"""accelerate: watching the `DistributedDataParallel` of a loop around an `Accelerator`."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from torch import nn

from ddpcheck.findings.errors import UsageError, WrongTypeError
from ddpcheck.findings.report import Finding
from ddpcheck.gather.ddp.ddp_wrapper import find_wrapper
from ddpcheck.monitor.options import WatchOptions
from ddpcheck.monitor.watch import Watch


def watch(accelerator: Accelerator, model: nn.Module, **options: Any) -> AcceleratorWatch:
    """Watch a training loop around `accelerator`, from here to `close`, or for a `with` block; every rank has to.

    Micro-batches under `accelerator.accumulate` belong to the optimizer step that they are accumulated for. The watch
    lives as long as the model, also where `accelerator.unwrap_model` has taken the wrapper away. In a run of one
    process there is nothing to watch, and the loop runs as it is.

    Args:
        accelerator: That of the loop.
        model: As `accelerator.prepare` has returned it, or as it was given.
        **options: Of `ddpcheck.watch`: `on_finding`, `check_consistency_every`, ...

    Returns:
        The watch, which is a context manager.

    Raises:
        UsageError: There are several processes and the model is not in a `DistributedDataParallel`, which `prepare`
            wraps it in, or an option is none of its choices.
    """
    if not isinstance(accelerator, Accelerator):
        raise WrongTypeError(f"watch takes the Accelerator first, and then the model; got {type(accelerator).__name__}")
    if accelerator.num_processes == 1:
        return AcceleratorWatch(None)
    try:
        wrapper = find_wrapper(model)
    except UsageError as error:
        kind = getattr(accelerator.distributed_type, "value", accelerator.distributed_type)
        how = f"accelerator.prepare makes it where the distributed type, here {kind}, is DDP"
        if kind == "FSDP":
            how = "accelerator.prepare does where its plugin has fsdp_version=2"
        raise UsageError(f"{error}; {how}") from None
    return AcceleratorWatch(Watch(wrapper, WatchOptions(**options)))


class AcceleratorWatch:
    """The watch of a model under accelerate; without one in a run of one process."""

    def __init__(self, watch: Watch | None) -> None:
        self._watch = watch

    def __enter__(self) -> AcceleratorWatch:
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        self.close(failing=error is not None)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All that has been found so far, the same on every rank."""
        return () if self._watch is None else self._watch.findings

    @property
    def step(self) -> int:
        """The number of synchronised backward passes that have ended."""
        return 0 if self._watch is None else self._watch.step

    def compare(self) -> list[Finding]:
        """Compare modules, parameters and buffers of the ranks now, as `ddpcheck.Watch.compare` does."""
        return [] if self._watch is None else self._watch.compare()

    def close(self, *, failing: bool = False) -> None:
        """Leave the model as it was, as `ddpcheck.Watch.close` does; may be called again."""
        if self._watch is not None:
            self._watch.close(failing=failing)
