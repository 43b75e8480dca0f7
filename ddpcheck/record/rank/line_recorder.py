"""The lines at which a script makes optimizers, and changes modules that are wrapped."""

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
from ddpcheck.gather.ddp.optimizer_options import parameters_of
from ddpcheck.gather.patching import CALLER, Recorder, patched
from ddpcheck.gather.state.fingerprints import digest_of
from ddpcheck.record.data.constructions import seeded_at
from ddpcheck.record.module_hooks import UnpickledHook
from ddpcheck.record.rank.script_watch import ScriptWatch
from ddpcheck.record.recording import Recording
from ddpcheck.record.source.source_scope import assignment_in_program

_MOST_CHANGES = 256
_MOST_TIMES = 8  # that a line with `eval` is looked at: of a model that is in no wrapper, say, in each step
_APPLY: Any = nn.Module.apply.__code__


class LineRecorder(Recorder):
    """Records where things are made, and changes of wrapped modules."""

    def __init__(self, run: Recording) -> None:
        self._run = run
        self._seen: set[tuple[int, str, Location | None]] = set()
        self._evaluated: dict[Location | None, int] = {}  # how often, by line
        self._optimizers: WeakKeyDictionary[Any, Location] = WeakKeyDictionary()
        self._rates: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._restored: WeakKeyDictionary[Any, Location] = WeakKeyDictionary()
        self.scaler: Any = None  # the enabled GradScaler that steps an optimizer now
        self.made = 0
        # the seed of torch's generator when the first parameter was registered, and the line that has set it
        self.seeded: tuple[int | None, Location | None] = (None, None)
        self._hooks: dict[Any, Location] = {}  # the line that registers a hook of a tensor, by its code
        patched(torch.optim.Optimizer, "__init__", self._optimizer_made)
        patched(torch.optim.Optimizer, "load_state_dict", self._optimizer_restored)
        patched(torch.amp.GradScaler, "load_state_dict", self._optimizer_restored)
        patched(torch.amp.GradScaler, "step", self._scaler_steps)
        patched(nn.Module, "load_state_dict", functools.partial(self._values_changed, "load_state_dict"))
        patched(nn.Module, "apply", functools.partial(self._values_changed, "apply"))
        for name in ("register_hook", "register_post_accumulate_grad_hook"):
            patched(torch.Tensor, name, self._tensor_hooked)
        patched(nn.Module, "eval", self._evaluates)  # not `train`, which calls itself for each child
        patched(nn.Module, "requires_grad_", self._thawed)
        patched(nn.Parameter, "requires_grad_", self._thawed)
        patched(nn.parallel.DistributedDataParallel, "register_comm_hook", self._hooked)
        hook = UnpickledHook(self._registered)
        registration.register_module_parameter_registration_hook(hook)
        registration.register_module_module_registration_hook(hook)

    def optimizers(self) -> list[Any]:
        """All that the script has constructed and still holds."""
        return [one for one in list(self._optimizers) if hasattr(one, "param_groups")]

    def of_optimizer(self, optimizer: Any) -> Location | None:
        """The line that has constructed it."""
        return self._optimizers.get(optimizer)

    def rates_of(self, optimizer: Any) -> str:
        """A digest of the learning rates of its groups when it was constructed; empty where that was not seen."""
        return self._rates.get(optimizer, "")

    def of_restored(self, optimizer: Any) -> Location | None:
        """The line that has last given it a state."""
        return self._restored.get(optimizer)

    def note_changes(self, watch: ScriptWatch, kinds: Sequence[str]) -> None:
        """A watch has noticed changes of parameters of these kinds, the line of which may not have been seen."""
        if {"frozen", "unfrozen"}.isdisjoint(kinds) or any(
            key[:2] == (watch.number, "requires_grad") for key in self._seen
        ):
            return
        where = assignment_in_program("requires_grad", "unfrozen" in kinds)
        self._note(watch, "requires_grad", "requires_grad", (), where)

    def _optimizer_made(self, optimizer: Any, *_arguments: Any, **_named: Any) -> Iterator[None]:
        if (where := user_location()) is not None:
            self._optimizers[optimizer] = where
            self.made += 1
        yield
        self._rates[optimizer] = digest_of([float(group["lr"]) for group in optimizer.param_groups if "lr" in group])

    def _optimizer_restored(self, optimizer: Any, *_arguments: Any, **_named: Any) -> None:
        if (where := user_location()) is not None:
            self._restored[optimizer] = where

    def _scaler_steps(self, scaler: Any, *_arguments: Any, **_named: Any) -> Iterator[None]:
        self.scaler = scaler if scaler.is_enabled() else None
        yield
        self.scaler = None

    def _values_changed(self, how: str, module: nn.Module, *_arguments: Any, **_named: Any) -> None:
        if sys._getframe(CALLER).f_code is not _APPLY:  # which calls itself for each child
            self._note_parameters("values", how, module)

    def _evaluates(self, module: nn.Module) -> None:
        watches = list(self._run.watches)
        if not watches or len(self._seen) >= _MOST_CHANGES:
            return
        where = user_location()
        times = self._evaluated[where] = self._evaluated.get(where, 0) + 1
        for watch in watches if times <= _MOST_TIMES else ():
            if (watch.number, "mode", where) not in self._seen and (path := _path_in(watch, module)) is not None:
                self._note(watch, "mode", "eval", (path,), where)

    def _thawed(self, thing: Any, *_arguments: Any, **_named: Any) -> None:
        self._note_parameters("requires_grad", "requires_grad_", thing)

    def _hooked(self, wrapper: Any, *_arguments: Any, **_named: Any) -> None:
        for watch in list(self._run.watches):
            if watch.module is wrapper.module:
                self._note(watch, "hook", "register_comm_hook", tuple(watch.parameters), user_location())

    def _tensor_hooked(self, _tensor: torch.Tensor, hook: Any) -> None:
        code = None if isinstance(hook, UnpickledHook) else code_of(hook)
        if code is not None and code not in self._hooks and (where := user_location()) is not None:
            self._hooks[code] = where

    def note_step_in_backward(self, optimizer: Any) -> None:
        """An optimizer steps while a backward pass runs: DDP averages the gradients when that has ended."""
        held = {id(p) for p in parameters_of(optimizer)}
        hooks = (self._hooks.get(frame.f_code) for frame in frames_from(sys._getframe(1)))
        where = next(filter(None, hooks), None) or user_location()
        for watch in list(self._run.watches):
            if not watch.is_sharded and (names := tuple(n for n, p in watch.module_parameters() if id(p) in held)):
                self._note(watch, "stepped", f"{type(optimizer).__name__}.step", names, where)

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
    """Where a module is in a wrapped one; "" for that one, and for what holds it."""
    path = watch.path_of(module)
    return "" if path is None and any(part is watch.module for part in module.modules()) else path
