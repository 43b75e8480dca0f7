"""Recorder of resumed training: restored optimizers, and their progress before."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler

from ddpcheck.findings.evidence.script import Restored
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import user_location
from ddpcheck.gather.patching import Recorder, patched

_MOST_STATES = 64  # max optimizer states taken or read by the script
_MOST_FILES = 1024
_DEEPEST = 3  # max nesting depth of a state in dictionaries


class ResumeRecorder(Recorder, subjects=("data",)):
    """Recorder of optimizer states from `state_dict` or `torch.load` to `load_state_dict`.

    Attributes:
        restored: The last restored optimizer state since `goes_on`, or None.
    """

    def __init__(self, steps_of: Callable[[Any], int]) -> None:
        """Initialize; `steps_of` returns the step count of an optimizer."""
        self.restored: Restored | None = None
        self._steps_of = steps_of
        self._before: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # step offset of a restored optimizer
        self._states: dict[int, tuple[Any, int, int]] = {}  # (param_groups, steps, epochs) by id of param_groups
        self._files: dict[str, int] = {}  # steps of the saved states, by path
        self._told: WeakKeyDictionary[Any, Location | None] = WeakKeyDictionary()  # last set_epoch line by sampler
        patched(Optimizer, "state_dict", self._takes)
        patched(Optimizer, "load_state_dict", self._restores)
        patched(torch, "save", self._writes)
        patched(torch, "load", self._reads)
        patched(DistributedSampler, "set_epoch", self._tells)

    def goes_on(self, restored: Restored | None) -> None:
        """Clear `restored`: training has continued from that state."""
        if self.restored is restored:
            self.restored = None

    def told(self, sampler: Any) -> Location | None:
        """Return the line of the last `set_epoch` of a DistributedSampler, or None."""
        return self._told.get(sampler) if isinstance(sampler, DistributedSampler) else None

    def _tells(self, sampler: Any, *_arguments: Any, **_named: Any) -> None:
        self._told[sampler] = user_location()

    def _takes(self, optimizer: Any, *_arguments: Any, **_named: Any) -> Generator[None, Any, None]:
        state = yield
        self._note(state, self._before.get(optimizer, 0) + self._steps_of(optimizer), 0)

    def _writes(self, obj: Any, f: Any, *_arguments: Any, **_named: Any) -> None:
        steps = [self._known(state)[0] for state, _ in _optimizers_in(obj, {}, 0)]
        if steps and isinstance(f, str | os.PathLike) and len(self._files) < _MOST_FILES:
            self._files[os.path.realpath(f)] = max(steps)

    def _reads(self, f: Any, *_arguments: Any, **_named: Any) -> Generator[None, Any, None]:
        loaded = yield
        written = self._files.get(os.path.realpath(f), 0) if isinstance(f, str | os.PathLike) else 0
        for state, numbers in _optimizers_in(loaded, {}, 0):
            epochs = [number for key, number in numbers.items() if "epoch" in key.lower()]
            steps = [number for key, number in numbers.items() if key.lower().rpartition("_")[2] == "step"]
            self._note(state, max([written, *steps]), max(epochs, default=0))

    def _restores(self, optimizer: Any, state_dict: Any, *_arguments: Any, **_named: Any) -> None:
        if not isinstance(state_dict, Mapping):
            return
        steps, epochs = self._known(state_dict)
        states = state_dict.get("state")
        for state in states.values() if isinstance(states, Mapping) else ():
            steps = max(steps, _whole(state.get("step") if isinstance(state, Mapping) else None))
        self._before[optimizer] = steps - self._steps_of(optimizer)
        self.restored = Restored(steps, epochs, user_location())

    def _known(self, state: Any) -> tuple[int, int]:
        """Return the steps and epochs of a known state, else (0, 0)."""
        groups, steps, epochs = self._states.get(id(state.get("param_groups")), (None, 0, 0))
        return (steps, epochs) if groups is state.get("param_groups") else (0, 0)

    def _note(self, state: Any, steps: int, epochs: int) -> None:
        groups = state.get("param_groups") if isinstance(state, Mapping) else None
        if groups is not None:
            self._states.pop(id(groups), None)
            self._states[id(groups)] = groups, steps, epochs
            if len(self._states) > _MOST_STATES:
                del self._states[next(iter(self._states))]


def _optimizers_in(held: Any, numbers: Mapping[str, int], depth: int) -> Iterator[tuple[Any, Mapping[str, int]]]:
    """Yield optimizer states in a loaded object, with the integers beside each."""
    if not isinstance(held, dict) or depth > _DEEPEST:
        return
    if "param_groups" in held and "state" in held:
        yield held, numbers
        return
    numbers = {**numbers, **{key: value for key, value in held.items() if type(key) is str and type(value) is int}}
    for value in held.values():
        yield from _optimizers_in(value, numbers, depth + 1)


def _whole(step: Any) -> int:
    """Return the step count in a parameter's state on the CPU, or 0."""
    if isinstance(step, torch.Tensor) and step.numel() == 1 and step.device.type == "cpu":
        return int(step)
    return step if type(step) is int else 0
