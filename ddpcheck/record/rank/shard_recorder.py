"""Modules sharded by `fully_shard`: watch the outermost module like a wrapper.

The first forward pass shows the outermost module, which torch also takes as the root.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.nn.modules import module as registration

from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import user_location
from ddpcheck.gather.ddp.sharding import SCALING, shards_in_use_as
from ddpcheck.gather.patching import OF_A_WRAPPER, Patch, Recorder, accompany, guarded, patched
from ddpcheck.gather.state.fingerprints import fingerprint, is_dtensor
from ddpcheck.gather.state.tensor_file import tensor_ref
from ddpcheck.record.loop.loop_record import follow_switches
from ddpcheck.record.rank.environment import when_imported
from ddpcheck.record.rank.wrapper_recorder import WrapperRecorder
from ddpcheck.record.recording import UnpickledHook

_FSDP = "torch.distributed.fsdp._fully_shard._fully_shard"  # private to torch; if missing, shards are not watched
_FSDP_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param"  # private; if missing, initial values are unknown


_MOST_ASSIGNED = 256  # parameters since the last forward pass
_Assigned = tuple[Callable[[], nn.Module | None], str, Callable[[], Any], Location | None]
"""(module, attribute name, assigned parameter, line)"""


class ShardRecorder(Recorder, subjects=OF_A_WRAPPER):
    """Recorder of forward passes of sharded modules; watches each outermost module.

    Forward passes include methods registered with `register_fsdp_forward_method`. `watch` is called with the module,
    fingerprints of initial parameter values (if this rank's shard is unchanged), and the line of `fully_shard`.
    `sharded` is called with each new shard.
    """

    def __init__(
        self,
        watch: Callable[[nn.Module, Mapping[str, int], Location | None], WrapperRecorder | None],
        sharded: Callable[[torch.Tensor], object],
    ) -> None:
        self._watch = watch
        self._on_shard = sharded
        self._lines: WeakKeyDictionary[nn.Module, Location | None] = WeakKeyDictionary()  # line that shards the module
        self._scales: WeakKeyDictionary[nn.Module, list[tuple[str, Location | None]]] = WeakKeyDictionary()
        self._watches: WeakKeyDictionary[nn.Module, tuple[Callable[[], WrapperRecorder | None], str]] = (
            WeakKeyDictionary()
        )
        self._initial: dict[int, tuple[Callable[[], Any], int, int]] = {}  # (shard, fingerprints of whole and shard)
        self._assigned: list[_Assigned] = []
        self._assigned_modules: WeakKeyDictionary[nn.Module, Location | None] = WeakKeyDictionary()
        registration.register_module_parameter_registration_hook(UnpickledHook(self._record_parameter))
        registration.register_module_module_registration_hook(UnpickledHook(self._record_module))
        when_imported((_FSDP,), guarded(self._patch_fsdp))
        when_imported((_FSDP_PARAM,), guarded(self._patch_parameter_class))

    def _patch_fsdp(self, home: ModuleType) -> None:
        sharded, state = vars(home).get("FSDPModule"), vars(home).get("FSDPState")
        follow_switches(sharded, to_the_end=True)
        for name in SCALING:
            if hasattr(sharded, name):
                patched(sharded, name, functools.partial(self._record_scaling, name))
        if hasattr(state, "init"):
            patched(state, "init", self._record_fully_shard)
        disable: Any = torch.compiler.disable
        for name, hook in (("_pre_forward", self._before_forward), ("_post_forward", self._after_forward)):
            if hasattr(state, name):
                # as `patched` does, excluded from torch.compile like the original
                Patch(state, name, lambda original, hook=hook: disable(accompany(original, hook)))  # type: ignore[misc]

    def _record_fully_shard(self, _state: Any, modules: Any, *_arguments: Any, **_named: Any) -> None:
        location = user_location()
        for module in (modules,) if isinstance(modules, nn.Module) else modules:  # torch 2.4 passes one module
            self._lines[module] = location

    def _record_scaling(self, name: str, module: nn.Module, *_arguments: Any, **_named: Any) -> None:
        location = user_location()
        watch = self._watches[module][0]() if module in self._watches else None
        if watch is not None:
            watch.note_scale(name, module, location)
        else:
            self._scales.setdefault(module, []).append((name, location))

    def _patch_parameter_class(self, home: ModuleType) -> None:
        parameter = vars(home).get("FSDPParam")
        if hasattr(parameter, "_init_sharded_param"):
            patched(parameter, "_init_sharded_param", self._record_initial)

    def _record_initial(self, fsdp_param: Any, whole: torch.Tensor, *_arguments: Any, **_named: Any) -> Iterator[None]:
        value = None if whole.is_meta else fingerprint(whole)
        yield
        shard = getattr(fsdp_param, "sharded_param", None)
        if isinstance(shard, torch.Tensor):
            self._on_shard(shard)
        if value is not None and isinstance(shard, torch.Tensor):
            self._initial[id(shard)] = tensor_ref(shard), value, fingerprint(shard)

    def _record_parameter(self, module: nn.Module, name: str, parameter: Any) -> None:
        """Record a parameter that replaces a shard or a gathered parameter."""
        before = module._parameters.get(name)
        if before is None or not isinstance(parameter, nn.Parameter) or parameter is before:
            return
        if (is_dtensor(before) or module in self._watches) and len(self._assigned) < _MOST_ASSIGNED:
            self._assigned.append((ref(module), name, tensor_ref(parameter), user_location()))

    def _record_module(self, module: nn.Module, name: str, submodule: Any) -> None:
        """Record an unsharded module that replaces a sharded module."""
        before = module._modules.get(name)
        if before is not None and before is not submodule and isinstance(submodule, nn.Module):
            if any(map(is_dtensor, before.parameters())) and not any(map(is_dtensor, submodule.parameters())):
                self._assigned_modules[submodule] = user_location()

    def _report_replaced(self, watch: WrapperRecorder, *, first: bool) -> None:
        """Report parameters assigned since the last forward pass, unless `fully_shard` gathers them.

        In the `first` forward pass, torch gathers new shards, too.
        """
        assigned, self._assigned = self._assigned, []
        for entry in assigned:
            module_ref, name, param_ref, location = entry
            part, parameter = module_ref(), param_ref()
            path = None if part is None else watch.path_of(part)
            if part is None or parameter is None:
                continue
            if path is None:
                self._assigned.append(entry)
                continue
            used = set() if first else shards_in_use_as(watch.module, part, name)
            if id(parameter) not in used if used else not is_dtensor(parameter):
                watch.note_replaced(f"{path}.{name}".lstrip("."), location, later=not first)

    def _before_forward(self, _state: Any, module: nn.Module, arguments: Any, named: Any) -> Iterator[None]:
        first = module not in self._watches
        watch_ref, prefix = self._watch_outermost(module) if first else self._watches[module]
        watch = watch_ref()
        if watch is not None and watch.module is module and watch.has_other_shards():
            watch.close()
            watch_ref, prefix = self._watch_outermost(module)
            watch = watch_ref()
        if watch is not None and watch.module is module:
            self._report_replaced(watch, first=first)
            watch.shards_forward(module, arguments, named)
        yield
        if watch is not None:
            watch.find_unsharded(prefix, module)

    def _after_forward(self, _state: Any, module: nn.Module, *_arguments: Any) -> Iterator[None]:
        output = yield
        watch = self._watches[module][0]() if module in self._watches else None
        if watch is not None and watch.module is module:
            watch.shards_returned(module, output)

    def _watch_outermost(self, module: nn.Module) -> tuple[Callable[[], WrapperRecorder | None], str]:
        """Create the recorder of an outermost module; return (reference to the recorder, path prefix)."""
        watch = self._watch(module, self._initial_values(module), self._lines.get(module))
        watch_ref: Callable[[], WrapperRecorder | None] = (lambda: None) if watch is None else ref(watch)
        for path, part in module.named_modules():
            self._watches[part] = watch_ref, f"{path}." if path else ""
            for name, location in self._scales.pop(part, ()):
                if watch is not None:
                    watch.note_scale(name, part, location)
            if part in self._assigned_modules and watch is not None:
                watch.note_module(path, part, self._assigned_modules.pop(part))
        return self._watches[module]

    def _initial_values(self, module: nn.Module) -> dict[str, int]:
        values = {}
        for name, shard in module.named_parameters():
            shard_ref, whole, before = self._initial.pop(id(shard), (lambda: None, 0, 0))
            if shard_ref() is shard and fingerprint(shard) == before:
                values[name] = whole
        return values
