"""Capture and restore module state that a training step may change."""

from __future__ import annotations

import contextlib
import copy
import shutil
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddpcheck.gather.autograd.autograd_graph import MODULE_INTERNALS, named_parameters, unregistered_tensors
from ddpcheck.gather.state.fingerprints import shape_of
from ddpcheck.gather.state.randomness import own_generator
from ddpcheck.gather.state.reachable import NUMBERS, PLAIN, is_small_array, is_user_object, refill
from ddpcheck.gather.state.tensor_file import TensorFile, is_dense, kept_in_file, save, settle_allocator


@dataclass(slots=True)
class ModuleState:
    """Module state changed by a step: parameters, buffers, unregistered tensors, plain attributes."""

    tensors: Mapping[str, torch.Tensor]  # copies of parameters and buffers
    # Copies of unregistered tensors, by path in `unregistered_tensors`.
    held: dict[str, torch.Tensor] = field(default_factory=dict)
    # By submodule: plain values, small containers of plain values, generators, helper objects, and tensor attributes
    # (by reference).
    plain: list[dict[str, Any]] = field(default_factory=list)
    file: Path | None = None  # file of the parameters, if not in `tensors`

    def restore(self, module: nn.Module, mapped: Collection[str] = ()) -> None:
        """Restore the state into `module`, in place for tensors of the same shape.

        Parameters in `mapped` are mapped copy-on-write from the state's file, or from a converted file if the dtype
        differs.
        """
        for submodule, plain in zip(module.modules(), self.plain, strict=False):
            _restore_plain(submodule, plain)
        registered = dict(_registered(module))
        dtypes = {name: registered[name].dtype for name in mapped if name in registered}
        fresh = _mapped(self.file, dtypes) if self.file is not None and dtypes else {}
        held_tensors = dict(_held(module)) if self.held else {}  # expensive: searches the whole module
        with torch.no_grad():
            for targets, source in ((registered, self.tensors), (held_tensors, self.held)):
                for name, saved in source.items():
                    if name not in targets or shape_of(targets[name]) != shape_of(saved):
                        continue
                    if name in fresh:
                        targets[name].data = fresh[name]
                    else:
                        with contextlib.suppress(RuntimeError):  # expanded tensor: elements share memory
                            targets[name].detach().copy_(saved)


def _mapped(file: Path, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    plain = TensorFile(file, keep=True)
    tensors = {name: plain[name] for name in dtypes if name in plain}
    others = [name for name, tensor in tensors.items() if tensor.dtype != dtypes[name]]
    if others:
        source, copy = TensorFile(file), Path(tempfile.mkdtemp(dir=file.parent))
        tensors.update(kept_in_file(((name, source[name].to(dtypes[name])) for name in others), copy, keep=True))
    return tensors


def buffers_left_out(module: nn.Module) -> frozenset[str]:
    """Return the names of non-persistent buffers, which a state dict omits."""
    parts: list[tuple[str, Any]] = list(module.named_modules())
    return frozenset(
        f"{path}.{name}" if path else name for path, part in parts for name in part._non_persistent_buffers_set
    )


def moved(module: nn.Module, device: torch.device | str) -> nn.Module:
    """Move `module` to `device`, except meta tensors, which have no values."""
    if not any(tensor.is_meta for _, tensor in _registered(module)):
        return module.to(device)
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    return module


def capture_state(module: nn.Module, into: ModuleState | None = None) -> ModuleState:
    """Copy the state of `module`, reusing the tensors of `into` if they match."""
    old = into.tensors if into is not None else {}
    return _captured(module, {name: _copied(tensor.detach(), old.get(name)) for name, tensor in _registered(module)})


def capture_attributes(module: nn.Module, *, buffers: bool) -> ModuleState:
    """Copy the state that forward may change: attributes, unregistered tensors, optionally buffers."""
    return _captured(module, {name: b.detach().clone() for name, b in module.named_buffers()} if buffers else {})


def _captured(module: nn.Module, tensors: dict[str, torch.Tensor]) -> ModuleState:
    held_tensors = {name: tensor.detach().clone() for name, tensor in _held(module)}
    return ModuleState(tensors, held_tensors, [_plain(vars(submodule), 0) for submodule in module.modules()])


def _copied(tensor: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    if into is not None and not tensor.is_nested and not into.is_nested:
        if (into.shape, into.dtype, into.stride()) == (tensor.shape, tensor.dtype, tensor.stride()):
            with contextlib.suppress(RuntimeError):
                return into.copy_(tensor)
    return tensor.clone()


def _registered(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _held(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in unregistered_tensors(module):
        if tensor.is_leaf or not tensor.requires_grad:
            yield name, tensor


def own_parameters(module: nn.Module) -> frozenset[str]:
    """Return the names of parameters that share memory with no other tensor."""
    tensors = [tensor for named in (_registered(module), unregistered_tensors(module)) for _, tensor in named]
    users = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors if is_dense(tensor))
    return frozenset(
        name
        for name, p in module.named_parameters()
        if is_dense(p) and p.untyped_storage().nbytes() == p.nbytes and users[p.untyped_storage().data_ptr()] == 1
    )


def move_to_file(module: nn.Module, file: Path) -> frozenset[str]:
    """Move the `own_parameters` to an unlinked mapped file; return their names."""
    settle_allocator()
    names = own_parameters(module)
    parameters = dict(module.named_parameters())
    save(((name, parameters[name]) for name in names), file)
    ModuleState(TensorFile(file), file=file).restore(module, names)
    shutil.rmtree(file)
    return names


def release(module: nn.Module, names: Collection[str], dtype: torch.dtype | None = None) -> None:
    """Free the memory of parameters until `ModuleState.restore`; they read as zeros.

    If `dtype` is set, floating-point parameters are converted to it.
    """
    for name, parameter in module.named_parameters():
        if name in names:
            new_dtype = dtype if parameter.is_floating_point() else None
            parameter.data = parameter.new_zeros((), dtype=new_dtype).expand(parameter.shape)


_MOST_PLAIN = 200  # per container; larger ones, e.g. a vocabulary, are not state
_DEEPEST_PLAIN = 3


def _plain(attributes: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """Return the `attributes` that a step may change without writing a registered tensor."""
    saved: dict[str, Any] = {}
    for key, value in attributes.items():
        if key in MODULE_INTERNALS and key != "training":
            continue
        if isinstance(value, PLAIN):
            saved[key] = value
        elif isinstance(value, torch.Tensor) and not value.is_nested:
            saved[key] = value  # rebinds a replaced tensor; values are copied with the other tensors
        elif isinstance(value, list | dict | set | deque) and len(value) <= _MOST_PLAIN and _is_flat(value):
            saved[key] = copy.copy(value)
        elif is_small_array(value):
            saved[key] = value.copy()
        elif (generator := own_generator(value)) is not None:
            saved[key] = _Drawn(generator.read())
        elif is_user_object(value) and depth < _DEEPEST_PLAIN:
            saved[key] = _Helper(_plain(vars(value), depth + 1))
    return saved


@dataclass(slots=True)
class _Helper:
    attributes: dict[str, Any]


@dataclass(slots=True)
class _Drawn:
    """State of a random generator in a module."""

    state: Any


def _is_flat(value: Any) -> bool:
    return all(isinstance(item, PLAIN) for item in (value.values() if isinstance(value, dict) else value))


def _restore_plain(holder: Any, plain: Mapping[str, Any]) -> None:
    attributes = vars(holder)
    for key in [key for key, value in attributes.items() if key not in plain and type(value) in NUMBERS]:
        del attributes[key]
    for key, saved in plain.items():
        if key not in attributes and type(saved) not in NUMBERS:
            continue
        value = attributes.get(key)
        if isinstance(saved, _Helper):
            if is_user_object(value):
                _restore_plain(value, saved.attributes)
        elif isinstance(saved, _Drawn):
            if (generator := own_generator(value)) is not None:
                generator.write(saved.state)
        elif isinstance(saved, torch.Tensor):
            if not (isinstance(value, torch.Tensor) and shape_of(value) == shape_of(saved)):
                attributes[key] = saved.detach().clone()
        elif isinstance(saved, PLAIN):
            attributes[key] = saved
        elif type(value) is type(saved):
            refill(value, saved)


def copied_module(module: nn.Module) -> nn.Module:
    """Return a copy of `module` that shares no tensor with it.

    Non-leaf tensors (e.g. the `weight` of `torch.nn.utils.weight_norm`, a cached feature map) are copied without graph,
    since `copy.deepcopy` refuses non-leaf tensors.
    """
    tensors = {id(tensor): tensor for _, tensor in unregistered_tensors(module) if not tensor.is_leaf}
    return copy.deepcopy(module, {key: tensor.detach().clone() for key, tensor in tensors.items()})


def differs_in_structure(first: nn.Module, second: nn.Module, wholes: Mapping[str, torch.Size] | None = None) -> bool:
    """Return True if classes or parameter names or shapes differ.

    If `wholes` has the full shapes of parameters of which `first` has a part, order is ignored: DDP reorders.
    """
    shapes = [(name, (wholes or {}).get(name, p.shape)) for name, p in named_parameters(first).items()]
    others = [(name, p.shape) for name, p in named_parameters(second).items()]
    return _classes(first) != _classes(second) or (sorted(shapes) != sorted(others) if wholes else shapes != others)


def _classes(module: nn.Module) -> list[tuple[str, type]]:
    return [(name, original_class(part)) for name, part in module.named_modules()]


def original_class(module: nn.Module) -> type:
    """Return the class of `module` before `fully_shard` or `replicate` replaced it."""
    added = sharding_classes()
    return next(cls for cls in type(module).__mro__ if not (added and issubclass(cls, added)))


def sharding_classes() -> tuple[type, ...]:
    """Return the base classes added by `fully_shard` and `replicate`, if imported."""
    places = (("torch.distributed.fsdp", "FSDPModule"), ("torch.distributed._composable.replicate", "DDP"))
    classes = (getattr(sys.modules.get(module), name, None) for module, name in places)
    return tuple(cls for cls in classes if isinstance(cls, type))
