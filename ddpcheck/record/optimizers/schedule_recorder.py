"""Recorders of learning rate schedules, metrics that callbacks use, and resumed training."""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DistributedSampler

from ddpcheck.findings.evidence.loop import ScheduleState
from ddpcheck.findings.evidence.script import MetricUsed, Restored
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import is_called_by_a_package, user_location
from ddpcheck.gather.patching import Recorder, guarded, patched
from ddpcheck.gather.state.reachable import function_variables
from ddpcheck.record.loss.loss_source import is_world_size
from ddpcheck.record.rank.environment import when_imported
from ddpcheck.record.source.program_numbers import items_with_paths, program_contents, program_frames
from ddpcheck.record.source.source_scope import (
    MOST_CALLERS,
    Scope,
    is_program_code,
    own_nodes,
    resolve_node,
    scope_of_frame,
    statement_at,
    user_caller,
)

_MOST_NUMBERS = 64  # attributes of a schedule, and items of a container among them
_RATE_TOLERANCE = 1e-6  # relative to the highest rate


@dataclass(slots=True)
class _Schedule:
    """State of a learning rate schedule, and the counters at its last step."""

    optimizer: ref[Any]
    state: ScheduleState
    uses_world_size: bool = False  # True if the constructor's line uses the world size
    passes: int = -1  # backward passes plus optimizer steps at the last step
    rates: list[float] = field(default_factory=lambda: [math.nan, 0.0, math.inf])  # [last, highest, lowest]
    is_stepping: bool = False


class ScheduleRecorder(Recorder, subjects=("optimizers",)):
    """Recorder of torch's schedulers, and user objects that have an optimizer and `step`."""

    def __init__(
        self, sink: Callable[[MetricUsed], object], passes: Callable[[], int], number_of: Callable[[Any], int]
    ) -> None:
        self._sink = sink
        self._monitors = MonitorRecorder(sink)
        self._count_passes = passes  # counts backward passes and optimizer steps
        self._number_of = number_of
        self._numbers = itertools.count()
        self._metrics: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()  # [number, metrics so far]
        self._schedules: WeakKeyDictionary[Any, _Schedule] = WeakKeyDictionary()
        self.followed_types: set[type] = set()
        for base in (LRScheduler, ReduceLROnPlateau):
            patched(base, "__init__", self._note_construction)
        patched(ReduceLROnPlateau, "step", self._note_plateau_metric)

    def state_of(self, optimizer: Any) -> ScheduleState | None:
        """Return the state of the optimizer's schedule that has taken most steps, or None."""
        if not self.followed_types:
            return None
        groups = optimizer.param_groups  # shared with wrappers around the optimizer
        schedules = [
            s for s in list(self._schedules.values()) if getattr(s.optimizer(), "param_groups", None) is groups
        ]
        return max((s.state for s in reversed(schedules)), key=lambda state: state.steps, default=None)

    def follow_attributes(self, optimizer: Any) -> None:
        """Record steps of the program's own schedules: objects that hold `optimizer` and have `step`."""
        for _, value in program_contents():
            step = getattr(type(value), "step", None)
            if not is_program_code(getattr(step, "__code__", None)) or issubclass(type(value), Optimizer):
                continue
            with contextlib.suppress(Exception):  # unhashable, no weak references, or raises on access
                if value not in self._schedules and any(item is optimizer for _, item in items_with_paths("", value)):
                    self._follow_schedule(value, _Schedule(ref(optimizer), ScheduleState(None)))

    def _note_construction(self, schedule: Any, *arguments: Any, **named: Any) -> None:
        optimizer = arguments[0] if arguments else named.get("optimizer")
        if isinstance(optimizer, Optimizer) and schedule not in self._schedules:
            frame = next(program_frames(), None)
            uses_world_size = frame is not None and _takes_world_size(frame, optimizer)
            self._follow_schedule(schedule, _Schedule(ref(optimizer), ScheduleState(user_location()), uses_world_size))

    def _follow_schedule(self, schedule: Any, entry: _Schedule) -> None:
        self._schedules[schedule] = entry
        kind = next(cls for cls in type(schedule).__mro__ if "step" in vars(cls))
        if kind not in self.followed_types:
            self.followed_types.add(kind)
            patched(kind, "step", self._record_step)

    def _note_plateau_metric(self, schedule: Any, metrics: Any, *_arguments: Any, **_named: Any) -> None:
        count = self._metrics.setdefault(schedule, [])
        if not count:
            count += [next(self._numbers), 0]
        number = self._number_of(getattr(schedule, "optimizer", None))
        value, location = float(metrics), user_location()
        if is_called_by_a_package():
            location = self._monitors.line_of(value) or location
        self._sink(MetricUsed(count[0], count[1], value, location, number))
        count[1] += 1

    def _record_step(self, schedule: Any, *_arguments: Any, **_named: Any) -> Generator[None, Any, None]:
        entry = self._schedules.get(schedule)
        ready = not isinstance(schedule, LRScheduler) or hasattr(schedule, "_last_lr")
        if entry is None or entry.is_stepping or not ready:  # skip super().step() and the constructor's step
            yield
            return
        if not entry.state.steps:  # numbers before stepping
            numbers = tuple(itertools.islice(_numbers_of(schedule), _MOST_NUMBERS))
            entry.state = replace(entry.state, numbers=numbers)
        before, entry.is_stepping = getattr(schedule, "last_epoch", None), True
        try:
            yield
            self._update_schedule(schedule, entry, before)
        finally:
            entry.is_stepping = False

    def _update_schedule(self, schedule: Any, entry: _Schedule, before: Any) -> None:
        state, now, passes = entry.state, getattr(schedule, "last_epoch", None), self._count_passes()
        steps = state.steps + (now - before if type(now) is type(before) is int and now > before else 1)
        if state.location is None:
            state = replace(state, location=user_location(), by_package=is_called_by_a_package())
        if passes != entry.passes:
            state = replace(state, turns=state.turns + 1)
        elif state.turns == 2 and not entry.uses_world_size:
            state = replace(state, by_world=state.by_world or _repeats_by_world_size(next(program_frames(), None)))
        entry.state, entry.passes = replace(state, steps=steps), passes
        optimizer = entry.optimizer()
        rate = math.nan if optimizer is None else optimizer.param_groups[0]["lr"]
        if not isinstance(rate, float | int):  # a tensor, possibly on a GPU
            return
        last, highest, lowest = entry.rates
        settled, lowest_at = state.ends
        if rate != last:
            settled = steps
        highest = max(highest, abs(rate))
        if abs(rate) < lowest - _RATE_TOLERANCE * highest:
            lowest, lowest_at = abs(rate), steps
        entry.rates = [rate, highest, lowest]
        entry.state = replace(entry.state, ends=(settled, lowest_at))


def _numbers_of(schedule: Any) -> Iterator[float]:
    pending: list[Any] = [
        *getattr(schedule, "__dict__", {}).values(),
        *(item for _, item in items_with_paths("", schedule)),
    ]
    seen = 0
    while pending and seen < 8 * _MOST_NUMBERS:
        value = pending.pop()
        seen += 1
        if type(value) in (int, float):
            yield float(value)
        elif isinstance(value, Mapping):
            pending += [*value.keys(), *value.values()] if len(value) < _MOST_NUMBERS else []
        elif isinstance(value, list | tuple):
            pending += value[:_MOST_NUMBERS]
        elif isinstance(value, functools.partial):
            pending += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, FunctionType):
            pending += [variable.value for variable in function_variables(value)]
            pending += [dist.get_world_size()] * ("get_world_size" in value.__code__.co_names)
        elif isinstance(value, MethodType):
            pending.append(value.__func__)
        elif callable(value) and is_program_code(getattr(type(value).__call__, "__code__", None)):
            pending += (getattr(value, "__dict__", None) or {}).values()


def _takes_world_size(frame: FrameType, optimizer: Any) -> bool:
    """Return True if arguments of a schedule's constructor depend on the world size."""
    scope = scope_of_frame(frame)
    statement = None if scope is None else statement_at(scope.body, frame)
    if scope is None or statement is None:
        return False
    for call in (node for node in ast.walk(statement) if isinstance(node, ast.Call)):
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        others = [argument for argument in arguments if resolve_node(scope, argument) is not optimizer]
        if len(others) < len(arguments):
            return any(is_world_size(scope, argument, set()) for argument in others)
    return False


def _repeats_by_world_size(frame: FrameType | None) -> bool:
    """Return True if the innermost running loop iterates once per rank."""
    for _ in range(MOST_CALLERS):
        if frame is None:
            break
        scope = scope_of_frame(frame)  # a comprehension has no scope
        if scope is not None and (passes := _innermost_iterable(scope, frame.f_lineno)) is not None:
            return any(_is_number_of_ranks(scope, node) for node in ast.walk(passes))
        frame = user_caller(frame)
    return False


def _is_number_of_ranks(scope: Scope, node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return getattr(resolve_node(scope, node.func), "__name__", "") == "get_world_size"
    if not isinstance(node, ast.Name | ast.Attribute):
        return False
    value = resolve_node(scope, node)
    count = len(value) if isinstance(value, range | list) else value
    return type(count) is int and count == dist.get_world_size() and is_world_size(scope, node, set())


def _innermost_iterable(scope: Scope, line: int) -> ast.expr | None:
    iterables: dict[int, ast.expr] = {}
    for node in own_nodes(scope.body):
        if isinstance(node, ast.For) and node.lineno <= line <= (node.end_lineno or 0):
            iterables[node.lineno] = node.iter
        elif isinstance(node, ast.ListComp) and node.lineno <= line <= (node.end_lineno or 0):
            return node.generators[-1].iter
    return iterables[max(iterables)] if iterables else None


_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_CALLBACKS = ("ModelCheckpoint", "EarlyStopping")
_END_METHODS = ("on_validation_end", "on_train_epoch_end")
_MOST_USES = 64  # max recorded uses by a callback


class MonitorRecorder(Recorder, subjects=("optimizers",)):
    """Recorder of metrics logged by Lightning modules and monitored by callbacks."""

    def __init__(self, sink: Callable[[MetricUsed], object]) -> None:
        self._sink = sink
        self._lines: dict[str, Location | None] = {}  # line that logs a metric, by name
        self._trainer: Callable[[], Any] = lambda: None
        self._numbers = itertools.count()
        self._uses: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()  # [number, uses so far]
        follow_modules = guarded(lambda module: patched(module.LightningModule, "log", self._note_log), self)
        when_imported([f"{package}.core" for package in _PACKAGES], follow_modules)
        when_imported([f"{package}.callbacks" for package in _PACKAGES], guarded(self._follow_callbacks))

    def line_of(self, value: float) -> Location | None:
        """Return the line that logged a metric whose latest value is `value`, or None."""
        metrics = getattr(self._trainer(), "callback_metrics", {})
        return next((line for name, line in self._lines.items() if name in metrics and metrics[name] == value), None)

    def _follow_callbacks(self, module: ModuleType) -> None:
        for name, end in itertools.product(_CALLBACKS, _END_METHODS):
            patched(getattr(module, name), end, self._note_use)

    def _note_log(self, module: Any, name: str, *_arguments: Any, **_named: Any) -> None:
        if name not in self._lines:
            self._lines[name], self._trainer = user_location(), ref(module.trainer)

    def _note_use(self, callback: Any, trainer: Any, *_arguments: Any, **_named: Any) -> None:
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


_MOST_STATES = 64  # max optimizer states taken or read by the script
_MOST_FILES = 1024  # saved files with an optimizer state
_DEEPEST = 3  # max nesting depth of a state in dictionaries


class ResumeRecorder(Recorder, subjects=("data",)):
    """Recorder of optimizer steps and epochs in the states that `load_state_dict` restores."""

    def __init__(self, steps_of: Callable[[Any], int]) -> None:
        self.restored: Restored | None = None  # the last restored optimizer state since `forget`, or None
        self._steps_of = steps_of  # returns the step count of an optimizer
        self._step_offsets: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # step offset of a restored optimizer
        self._states: dict[int, tuple[Any, int, int]] = {}  # (param_groups, steps, epochs) by id of param_groups
        self._files: dict[str, int] = {}  # steps of the saved states, by path
        self._epoch_lines: WeakKeyDictionary[Any, Location | None] = WeakKeyDictionary()  # last set_epoch by sampler
        patched(Optimizer, "state_dict", self._note_state_dict)
        patched(Optimizer, "load_state_dict", self._note_load_state)
        patched(torch, "save", self._note_save)
        patched(torch, "load", self._note_load)
        patched(DistributedSampler, "set_epoch", self._note_epoch)

    def forget(self, restored: Restored | None) -> None:
        """Forget state `restored`, since training has continued from that state."""
        if self.restored is restored:
            self.restored = None

    def epoch_line(self, sampler: Any) -> Location | None:
        """Return the line of the last `set_epoch` of a DistributedSampler, or None."""
        return self._epoch_lines.get(sampler) if isinstance(sampler, DistributedSampler) else None

    def _note_epoch(self, sampler: Any, *_arguments: Any, **_named: Any) -> None:
        self._epoch_lines[sampler] = user_location()

    def _note_state_dict(self, optimizer: Any, *_arguments: Any, **_named: Any) -> Generator[None, Any, None]:
        state = yield
        self._note_state(state, self._step_offsets.get(optimizer, 0) + self._steps_of(optimizer), 0)

    def _note_save(self, obj: Any, f: Any, *_arguments: Any, **_named: Any) -> None:
        steps = [self._progress_of(state)[0] for state, _ in _optimizer_states_in(obj, {}, 0)]
        if steps and isinstance(f, str | os.PathLike) and len(self._files) < _MOST_FILES:
            self._files[os.path.realpath(f)] = max(steps)

    def _note_load(self, f: Any, *_arguments: Any, **_named: Any) -> Generator[None, Any, None]:
        loaded = yield
        written = self._files.get(os.path.realpath(f), 0) if isinstance(f, str | os.PathLike) else 0
        for state, numbers in _optimizer_states_in(loaded, {}, 0):
            epochs = [number for key, number in numbers.items() if "epoch" in key.lower()]
            steps = [number for key, number in numbers.items() if key.lower().rpartition("_")[2] == "step"]
            self._note_state(state, max([written, *steps]), max(epochs, default=0))

    def _note_load_state(self, optimizer: Any, state_dict: Any, *_arguments: Any, **_named: Any) -> None:
        if not isinstance(state_dict, Mapping):
            return
        steps, epochs = self._progress_of(state_dict)
        states = state_dict.get("state")
        for state in states.values() if isinstance(states, Mapping) else ():
            steps = max(steps, _step_count(state.get("step") if isinstance(state, Mapping) else None))
        self._step_offsets[optimizer] = steps - self._steps_of(optimizer)
        self.restored = Restored(steps, epochs, user_location())

    def _progress_of(self, state: Any) -> tuple[int, int]:
        groups, steps, epochs = self._states.get(id(state.get("param_groups")), (None, 0, 0))
        return (steps, epochs) if groups is state.get("param_groups") else (0, 0)

    def _note_state(self, state: Any, steps: int, epochs: int) -> None:
        groups = state.get("param_groups") if isinstance(state, Mapping) else None
        if groups is not None:
            self._states.pop(id(groups), None)
            self._states[id(groups)] = groups, steps, epochs
            if len(self._states) > _MOST_STATES:
                del self._states[next(iter(self._states))]


def _optimizer_states_in(obj: Any, numbers: Mapping[str, int], depth: int) -> Iterator[tuple[Any, Mapping[str, int]]]:
    """Yield optimizer states in a checkpoint, with integers of parent dictionaries (the epoch)."""
    if not isinstance(obj, dict) or depth > _DEEPEST:
        return
    if "param_groups" in obj and "state" in obj:
        yield obj, numbers
        return
    numbers = {**numbers, **{key: value for key, value in obj.items() if type(key) is str and type(value) is int}}
    for value in obj.values():
        yield from _optimizer_states_in(value, numbers, depth + 1)


def _step_count(step: Any) -> int:
    if isinstance(step, torch.Tensor) and step.numel() == 1 and step.device.type == "cpu":
        return int(step)
    return step if type(step) is int else 0
