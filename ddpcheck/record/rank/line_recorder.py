"""Record the lines where a script creates optimizers and changes wrapped modules."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules import module as registration

from ddpcheck.findings.evidence.loop import ModuleChanged
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import code_of, frames_from, user_location
from ddpcheck.gather.ddp.ddp_wrapper import parameters_of
from ddpcheck.gather.patching import CALLER, Recorder, patched
from ddpcheck.gather.state.fingerprints import digest_of
from ddpcheck.record.data.constructions import seeded_at
from ddpcheck.record.module_hooks import UnpickledHook
from ddpcheck.record.rank.script_watch import ScriptWatch
from ddpcheck.record.recording import Recording
from ddpcheck.record.source.source_scope import assignment_in_program

_MOST_CHANGES = 256
_MOST_TIMES = 8  # checks per line with `eval`, which may run in each step on an unwrapped model
_APPLY: Any = nn.Module.apply.__code__


class LineRecorder(Recorder):
    """Recorder of optimizer lines and of changes to wrapped modules."""

    def __init__(self, run: Recording) -> None:
        self._run = run
        self._seen: set[tuple[int, str, Location | None]] = set()
        self._evaluated: dict[Location | None, int] = {}  # number of calls, by line
        self._optimizers: WeakKeyDictionary[Any, Location] = WeakKeyDictionary()
        self._rates: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._restored: WeakKeyDictionary[Any, Location] = WeakKeyDictionary()
        self.scaler: Any = None  # enabled GradScaler whose step() is running
        self.made = 0
        # torch seed at the first parameter registration, and the line that set the seed
        self.seeded: tuple[int | None, Location | None] = (None, None)
        self._hooks: dict[Any, Location] = {}  # registration line of a tensor hook, by code object
        patched(torch.optim.Optimizer, "__init__", self._optimizer_made)
        patched(torch.optim.Optimizer, "load_state_dict", self._optimizer_restored)
        patched(torch.amp.GradScaler, "load_state_dict", self._optimizer_restored)
        patched(torch.amp.GradScaler, "step", self._scaler_steps)
        patched(nn.Module, "load_state_dict", functools.partial(self._values_changed, "load_state_dict"))
        patched(nn.Module, "apply", functools.partial(self._values_changed, "apply"))
        for name in ("register_hook", "register_post_accumulate_grad_hook"):
            patched(torch.Tensor, name, self._tensor_hooked)
        patched(nn.Module, "eval", self._evaluates)  # not `train`, which recurses into children
        patched(nn.Module, "requires_grad_", self._thawed)
        patched(nn.Parameter, "requires_grad_", self._thawed)
        patched(nn.parallel.DistributedDataParallel, "register_comm_hook", self._hooked)
        hook = UnpickledHook(self._registered)
        registration.register_module_parameter_registration_hook(hook)
        registration.register_module_module_registration_hook(hook)

    def optimizers(self) -> list[Any]:
        """Return the optimizers that the script constructed and still references."""
        return [optimizer for optimizer in list(self._optimizers) if hasattr(optimizer, "param_groups")]

    def of_optimizer(self, optimizer: Any) -> Location | None:
        """Return the line that constructed the optimizer."""
        return self._optimizers.get(optimizer)

    def rates_of(self, optimizer: Any) -> str:
        """Return a digest of the initial learning rates by group, or '' if unknown."""
        return self._rates.get(optimizer, "")

    def of_restored(self, optimizer: Any) -> Location | None:
        """Return the line of the last `load_state_dict` call on the optimizer or scaler."""
        return self._restored.get(optimizer)

    def note_changes(self, watch: ScriptWatch, kinds: Sequence[str]) -> None:
        """Record the line of a `requires_grad` change detected by a watch."""
        if {"frozen", "unfrozen"}.isdisjoint(kinds) or any(
            key[:2] == (watch.number, "requires_grad") for key in self._seen
        ):
            return
        location = assignment_in_program("requires_grad", "unfrozen" in kinds)
        self._note(watch, "requires_grad", "requires_grad", (), location)

    def _optimizer_made(self, optimizer: Any, *_arguments: Any, **_named: Any) -> Iterator[None]:
        if (location := user_location()) is not None:
            self._optimizers[optimizer] = location
            self.made += 1
        yield
        self._rates[optimizer] = digest_of([float(group["lr"]) for group in optimizer.param_groups if "lr" in group])

    def _optimizer_restored(self, optimizer: Any, *_arguments: Any, **_named: Any) -> None:
        if (location := user_location()) is not None:
            self._restored[optimizer] = location

    def _scaler_steps(self, scaler: Any, *_arguments: Any, **_named: Any) -> Iterator[None]:
        self.scaler = scaler if scaler.is_enabled() else None
        yield
        self.scaler = None

    def _values_changed(self, how: str, module: nn.Module, *_arguments: Any, **_named: Any) -> None:
        if sys._getframe(CALLER).f_code is not _APPLY:  # `apply` recurses into children
            self._note_parameters("values", how, module)

    def _evaluates(self, module: nn.Module) -> None:
        watches = list(self._run.watches)
        if not watches or len(self._seen) >= _MOST_CHANGES:
            return
        location = user_location()
        count = self._evaluated[location] = self._evaluated.get(location, 0) + 1
        for watch in watches if count <= _MOST_TIMES else ():
            if (watch.number, "mode", location) not in self._seen and (path := _path_in(watch, module)) is not None:
                self._note(watch, "mode", "eval", (path,), location)

    def _thawed(self, thing: Any, *_arguments: Any, **_named: Any) -> None:
        self._note_parameters("requires_grad", "requires_grad_", thing)

    def _hooked(self, wrapper: Any, *_arguments: Any, **_named: Any) -> None:
        for watch in list(self._run.watches):
            if watch.module is wrapper.module:
                self._note(watch, "hook", "register_comm_hook", tuple(watch.parameters), user_location())

    def _tensor_hooked(self, _tensor: torch.Tensor, hook: Any) -> None:
        code = None if isinstance(hook, UnpickledHook) else code_of(hook)
        if code is not None and code not in self._hooks and (location := user_location()) is not None:
            self._hooks[code] = location

    def note_step_in_backward(self, optimizer: Any) -> None:
        """Record an optimizer step during backward, before DDP has averaged the gradients."""
        param_ids = {id(p) for p in parameters_of(optimizer)}
        hooks = (self._hooks.get(frame.f_code) for frame in frames_from(sys._getframe(1)))
        location = next(filter(None, hooks), None) or user_location()
        for watch in list(self._run.watches):
            if not watch.is_sharded and (names := tuple(n for n, p in watch.module_parameters() if id(p) in param_ids)):
                self._note(watch, "stepped", f"{type(optimizer).__name__}.step", names, location)

    def _note_parameters(self, what: str, how: str, thing: Any) -> None:
        watches = list(self._run.watches)
        if not watches or len(self._seen) >= _MOST_CHANGES:
            return
        where = user_location()
        if all((watch.number, what, where) in self._seen for watch in watches):
            return
        changed = {id(p) for p in thing.parameters()} if isinstance(thing, nn.Module) else {id(thing)}
        for watch in watches:
            if names := tuple(name for name, p in watch.module_parameters() if id(p) in changed):
                self._note(watch, what, how, names, where)

    def _registered(self, module: nn.Module, name: str, _thing: Any) -> None:
        if self.seeded[0] is None:
            self.seeded = torch.initial_seed(), seeded_at("torch")
        if len(self._seen) < _MOST_CHANGES:
            for watch in list(self._run.watches):
                if (path := watch.path_of(module)) is not None:
                    self._note(watch, "parameters", f"{path}.{name}".lstrip("."), (), user_location())

    def _note(self, watch: ScriptWatch, what: str, how: str, names: tuple[str, ...], where: Location | None) -> None:
        key = watch.number, what, where
        if where is not None and key not in self._seen:
            self._seen.add(key)
            self._run.add(ModuleChanged(watch.number, what, how, names, where, watch.forwards, watch.step))


def _path_in(watch: ScriptWatch, module: nn.Module) -> str | None:
    """Return the path in the wrapped module; '' for the root and its parents."""
    path = watch.path_of(module)
    return "" if path is None and any(part is watch.module for part in module.modules()) else path
