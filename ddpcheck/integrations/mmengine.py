"""mmengine: `CheckedMMDistributedDataParallel` for `model_wrapper_cfg`, and `DDPCheckHook` for `custom_hooks`.

Register in a config by `custom_imports = dict(imports=["ddpcheck.integrations.mmengine"])`; see docs/mmengine.md.
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
from ddpcheck.findings.wording import plural
from ddpcheck.monitor.reporting import WatchOptions, format_finding
from ddpcheck.monitor.watch import Watch
from ddpcheck.monitor.wrapper import CheckedDistributedDataParallel

__getattr__ = renamed(__name__, DdpCheckHook="DDPCheckHook")
OnFinding = Literal["raise", "warn", "log"] | str | Callable[[Finding], object]
_LEVELS = {Severity.ERROR: logging.ERROR, Severity.WARNING: logging.WARNING, Severity.NOTE: logging.INFO}


def log_finding(finding: Finding) -> None:
    """Write a finding to mmengine's log on the main process, as `on_finding="log"` does."""
    if is_main_process():
        print_log(format_finding(finding), logger="current", level=_LEVELS[finding.severity])


def _resolve(on_finding: OnFinding) -> Any:
    """Replace "log" or "module:function" by the function, since configs cannot hold functions."""
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
    """mmengine's `MMDistributedDataParallel` with checks during training.

    `train_step` etc. are mmengine's own. On CPU, `device_ids`, which a `Runner` passes and DDP rejects, is dropped.

    Args:
        module: The model.
        detect_anomalous_params: As in `CheckedDistributedDataParallel`; replaces mmengine's own detector.
        on_finding: As in `CheckedDistributedDataParallel`, or "log" for mmengine's log, or "module:function".
        **kwargs: Keyword arguments of `CheckedDistributedDataParallel` and `DistributedDataParallel`.
    """

    def __init__(
        self, module: nn.Module, detect_anomalous_params: bool = True, *, on_finding: OnFinding = "raise", **kwargs: Any
    ) -> None:
        if all(parameter.device.type == "cpu" for parameter in module.parameters()):
            kwargs.pop("device_ids", None)
        kwargs |= {"detect_anomalous_params": detect_anomalous_params, "on_finding": _resolve(on_finding)}
        super().__init__(module, **kwargs)

    train_step = MMDistributedDataParallel.train_step
    val_step = MMDistributedDataParallel.val_step
    test_step = MMDistributedDataParallel.test_step


@HOOKS.register_module(["DDPCheckHook", "DdpCheckHook"])  # the second name is deprecated
class DDPCheckHook(Hook):  # type: ignore[misc]
    """Hook that watches the model of a `Runner` and compares the ranks.

    The ranks are compared before training, before each validation, at the end of each epoch, and before iteration-based
    checkpoints of a `CheckpointHook`. For a `CheckedDistributedDataParallel` in the model, the hook uses the
    watch and the settings of this wrapper, and only compares the ranks.

    Args:
        on_finding: As in `ddpcheck.watch`, or "log" to write to mmengine's log and continue, or "module:function" to
            name a function in a config.
        **settings: Options of `ddpcheck.watch`.

    Attributes:
        watches: One watch for each `DistributedDataParallel` in the model, from `before_train` on.
    """

    priority = "LOW"  # after hooks that sync buffers or swap in averaged weights, before CheckpointHook

    def __init__(self, on_finding: OnFinding = "raise", **settings: Any) -> None:
        self.watches: list[Watch] = []
        self._options = WatchOptions(**settings, on_finding=_resolve(on_finding))
        self._stack = contextlib.ExitStack()

    def before_train(self, runner: Any) -> None:
        self._stack.close()  # still open if an earlier run raised
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
        return self._stack.enter_context(Watch(wrapper, self._options))

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
            steps, findings = plural(watch.step, "step"), plural(len(watch.findings), "finding")
            runner.logger.info(f"ddpcheck: {steps} watched, {findings}")
        self._stack.close()

    def _compare(self) -> None:
        for watch in self.watches:
            watch.compare()
