"""mmengine: `CheckedMMDistributedDataParallel` for `model_wrapper_cfg`, and `DDPCheckHook` for `custom_hooks`.

A config names them by `custom_imports = dict(imports=["ddpcheck.integrations.mmengine"])`; see docs/mmengine.md.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import operator
from collections.abc import Callable
from typing import Any, Literal

from mmengine.dist import is_main_process
from mmengine.hooks import CheckpointHook, Hook
from mmengine.logging import print_log
from mmengine.model import MMDistributedDataParallel
from mmengine.registry import HOOKS, MODEL_WRAPPERS
from torch import nn

from ddpcheck.findings.deprecation import renamed
from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.wording import counted
from ddpcheck.monitor.options import WatchOptions
from ddpcheck.monitor.reporting import as_text
from ddpcheck.monitor.watch import Watch
from ddpcheck.monitor.wrapper import CheckedDistributedDataParallel

__getattr__ = renamed(__name__, DdpCheckHook="DDPCheckHook")
OnFinding = Literal["raise", "warn", "log"] | str | Callable[[Finding], object]
_LEVELS = {Severity.ERROR: logging.ERROR, Severity.WARNING: logging.WARNING, Severity.NOTE: logging.INFO}


def log_finding(finding: Finding) -> None:
    """Write a finding into the log of the run, on the main process: what `on_finding="log"` stands for."""
    if is_main_process():
        print_log(as_text(finding), logger="current", level=_LEVELS[finding.severity])


def _resolved(on_finding: OnFinding) -> Any:
    """The function in place of "log", and of "package.module:function", since none can stand in a config."""
    if on_finding == "log":
        return log_finding
    if isinstance(on_finding, str) and ":" in on_finding:
        module, _, name = on_finding.partition(":")
        try:
            on_finding = operator.attrgetter(name)(importlib.import_module(module))
        except (ImportError, AttributeError, ValueError) as error:
            raise UsageError(f"on_finding names no function: {on_finding!r} ({error})") from None
    if on_finding in ("raise", "warn") or callable(on_finding):
        return on_finding
    raise UsageError(
        f"on_finding is 'raise', 'warn', 'log' or a function of a Finding (as text: 'module:function'), not "
        f"{on_finding!r}"
    )


@MODEL_WRAPPERS.register_module()
class CheckedMMDistributedDataParallel(CheckedDistributedDataParallel, MMDistributedDataParallel):  # type: ignore[misc]
    """mmengine's `MMDistributedDataParallel` that reports what is wrong while it trains.

    Its steps are mmengine's own. On CPU it does without the `device_ids` that a `Runner` always gives and DDP refuses.

    Args:
        module: The model.
        detect_anomalous_params: As of `CheckedDistributedDataParallel`, whose detector takes the place of mmengine's.
        on_finding: Likewise, or "log" to write into mmengine's log and go on; a function as "module:function", too.
        **kwargs: Of `CheckedDistributedDataParallel`, and of `DistributedDataParallel` by name.
    """

    def __init__(
        self, module: nn.Module, detect_anomalous_params: bool = True, *, on_finding: OnFinding = "raise", **kwargs: Any
    ) -> None:
        if all(parameter.device.type == "cpu" for parameter in module.parameters()):
            kwargs.pop("device_ids", None)
        kwargs |= {"detect_anomalous_params": detect_anomalous_params, "on_finding": _resolved(on_finding)}
        super().__init__(module, **kwargs)

    train_step = MMDistributedDataParallel.train_step
    val_step = MMDistributedDataParallel.val_step
    test_step = MMDistributedDataParallel.test_step


@HOOKS.register_module(["DDPCheckHook", "DdpCheckHook"])  # the second one is deprecated
class DDPCheckHook(Hook):  # type: ignore[misc]
    """Watches the model of any `Runner` while it trains, and compares the ranks before a checkpoint is saved.

    The ranks are compared before training, before each validation, at the end of each epoch, and before what a
    `CheckpointHook` saves in between. A `CheckedDistributedDataParallel` has a watch of its own, with its own settings,
    and is only compared.

    Args:
        on_finding: As of `ddpcheck.watch`, or "log" to write into mmengine's log and go on; a function as
            "module:function", too, which is how it travels through a config.
        **settings: Of `ddpcheck.watch`.

    Attributes:
        watches: One for each `DistributedDataParallel` in the model, from `before_train` on.
    """

    priority = "LOW"  # after hooks that bring buffers together or put averaged weights in place, before CheckpointHook

    def __init__(self, on_finding: OnFinding = "raise", **settings: Any) -> None:
        self.watches: list[Watch] = []
        self._options = WatchOptions(**settings, on_finding=_resolved(on_finding))
        self._own = contextlib.ExitStack()

    def before_train(self, runner: Any) -> None:
        self._own.close()  # where training before this ended in an exception
        ddp = nn.parallel.DistributedDataParallel
        wrappers = [part for part in runner.model.modules() if isinstance(part, ddp)]
        outer = [part for part in wrappers if any(isinstance(inner, ddp) for inner in part.module.modules())]
        self.watches = [self._watch_of(wrapper) for wrapper in wrappers if wrapper not in outer]
        if not wrappers:
            runner.logger.warning("ddpcheck: no DistributedDataParallel in the model, so there is nothing to watch")
        self._compare()

    def _watch_of(self, wrapper: nn.Module) -> Watch:
        if isinstance(wrapper, CheckedDistributedDataParallel):
            return wrapper.watch
        return self._own.enter_context(Watch(wrapper, self._options))

    def before_val_epoch(self, runner: Any) -> None:
        self._compare()

    def after_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        savers = [hook for hook in runner.hooks if isinstance(hook, CheckpointHook) and not hook.by_epoch]
        if any(self.every_n_train_iters(runner, saver.interval, saver.save_begin) for saver in savers):
            self._compare()

    def after_train_epoch(self, runner: Any) -> None:
        self._compare()

    def after_train(self, runner: Any) -> None:
        for watch in self.watches:
            steps, findings = counted(watch.step, "step"), counted(len(watch.findings), "finding")
            runner.logger.info(f"ddpcheck: {steps} watched, {findings}")
        self._own.close()

    def _compare(self) -> None:
        for watch in self.watches:
            watch.compare()
