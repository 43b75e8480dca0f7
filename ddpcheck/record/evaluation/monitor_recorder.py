"""Recorder of the metrics by which Lightning callbacks save checkpoints and stop training."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary, ref

from ddpcheck.findings.evidence.script import MetricUsed
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import user_location
from ddpcheck.gather.patching import Recorder, guarded, patched
from ddpcheck.record.rank.module_finder import when_imported

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_CALLBACKS = ("ModelCheckpoint", "EarlyStopping")
_ENDS = ("on_validation_end", "on_train_epoch_end")
_MOST_USES = 64  # per callback


class MonitorRecorder(Recorder, subjects=("optimizers",)):
    """Recorder of metrics logged by Lightning modules and monitored by callbacks."""

    def __init__(self, sink: Callable[[MetricUsed], object]) -> None:
        """Initialize; patches Lightning when the script imports it."""
        self._sink = sink
        self._lines: dict[str, Location | None] = {}  # line that logs a metric, by name
        self._trainer: Callable[[], Any] = lambda: None
        self._numbers = itertools.count()
        self._uses: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()  # [number, uses so far]
        follow_modules = guarded(lambda module: patched(module.LightningModule, "log", self._logs), self)
        when_imported([f"{package}.core" for package in _PACKAGES], follow_modules)
        when_imported([f"{package}.callbacks" for package in _PACKAGES], guarded(self._follow_callbacks))

    def line_of(self, value: float) -> Location | None:
        """Return the line that logged a metric with this latest value, or None."""
        metrics = getattr(self._trainer(), "callback_metrics", {})
        return next((line for name, line in self._lines.items() if name in metrics and metrics[name] == value), None)

    def _follow_callbacks(self, module: ModuleType) -> None:
        for name, end in itertools.product(_CALLBACKS, _ENDS):
            patched(getattr(module, name), end, self._decides)

    def _logs(self, module: Any, name: str, *_arguments: Any, **_named: Any) -> None:
        if name not in self._lines:
            self._lines[name], self._trainer = user_location(), ref(module.trainer)

    def _decides(self, callback: Any, trainer: Any, *_arguments: Any, **_named: Any) -> None:
        metric, metrics = callback.monitor, trainer.callback_metrics
        if metric not in metrics or trainer.sanity_checking or getattr(callback, "save_top_k", None) == 0:
            return
        count = self._uses.setdefault(callback, [])
        if not count:
            count += [next(self._numbers), 0]
        if count[1] < _MOST_USES:
            kind = next(cls.__name__ for cls in type(callback).__mro__ if cls.__name__ in _CALLBACKS)
            location = self._lines.get(metric)
            self._sink(MetricUsed(count[0], count[1], float(metrics[metric]), location, user=kind, metric=metric))
        count[1] += 1
