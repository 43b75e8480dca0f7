"""Capture and restore state that a training step may change.

State of modules, and state of the recipe outside of modules: counters, averages and generators in globals and closures.
A step is executed several times, and must start from the same state each time.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import shutil
import sys
import tempfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ddpcheck.gather.autograd.autograd_graph import MODULE_INTERNALS, named_parameters, unregistered_tensors
from ddpcheck.gather.state import reachable
from ddpcheck.gather.state.fingerprints import shape_of
from ddpcheck.gather.state.randomness import user_generator
from ddpcheck.gather.state.tensor_file import TensorFile, is_dense, kept_in_file, return_freed_memory, save


@dataclass(slots=True)
class ModuleState:
    """Module state that a step may change: parameters, buffers, unregistered tensors, plain attributes."""

    tensors: Mapping[str, torch.Tensor]  # copies of parameters and buffers
    # Copies of unregistered tensors, by path in `unregistered_tensors`.
    unregistered: dict[str, torch.Tensor] = field(default_factory=dict)
    # By submodule: plain values, small containers of plain values, generators, helper objects, and tensor attributes
    # (by reference).
    plain: list[dict[str, Any]] = field(default_factory=list)
    file: Path | None = None  # file of the parameters, if not in `tensors`

    def restore(self, module: nn.Module, mapped: Collection[str] = ()) -> None:
        """Restore the state into `module`, in place for tensors of the same shape.

        Parameters with a name in `mapped` are not copied, but mapped copy-on-write from the file of this state. If the
        dtype differs, they are mapped from a converted copy of the file.
        """
        for submodule, plain in zip(module.modules(), self.plain, strict=False):
            _restore_plain(submodule, plain)
        registered = dict(_registered_tensors(module))
        dtypes = {name: registered[name].dtype for name in mapped if name in registered}
        mapped_tensors = _mapped_parameters(self.file, dtypes) if self.file is not None and dtypes else {}
        unregistered = dict(_unregistered_state(module)) if self.unregistered else {}  # slow: searches the whole module
        with torch.no_grad():
            for targets, source in ((registered, self.tensors), (unregistered, self.unregistered)):
                for name, saved in source.items():
                    if name not in targets or shape_of(targets[name]) != shape_of(saved):
                        continue
                    if name in mapped_tensors:
                        targets[name].data = mapped_tensors[name]
                    else:
                        with contextlib.suppress(RuntimeError):  # expanded tensor: elements share memory
                            targets[name].detach().copy_(saved)


def _mapped_parameters(file: Path, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    plain = TensorFile(file, keep=True)
    tensors = {name: plain[name] for name in dtypes if name in plain}
    others = [name for name, tensor in tensors.items() if tensor.dtype != dtypes[name]]
    if others:
        source, copy = TensorFile(file), Path(tempfile.mkdtemp(dir=file.parent))
        tensors.update(kept_in_file(((name, source[name].to(dtypes[name])) for name in others), copy, keep=True))
    return tensors


def non_persistent_buffers(module: nn.Module) -> frozenset[str]:
    """Return the names of non-persistent buffers, which a state dict omits."""
    parts: list[tuple[str, Any]] = list(module.named_modules())
    return frozenset(f"{path}.{n}" if path else n for path, part in parts for n in part._non_persistent_buffers_set)


def move_to_device(module: nn.Module, device: torch.device | str) -> nn.Module:
    """Move `module` to `device`, except meta tensors, which have no values."""
    if not any(tensor.is_meta for _, tensor in _registered_tensors(module)):
        return module.to(device)
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    return module


def capture_state(
    module: nn.Module, into: ModuleState | None = None, *, parameters: bool = True, buffers: bool = True
) -> ModuleState:
    """Copy the state of `module`, reusing the tensors of `into` if they match."""
    old = into.tensors if into is not None else {}
    registered = chain(module.named_parameters() if parameters else (), module.named_buffers() if buffers else ())
    tensors = {name: _copy_into(tensor.detach(), old.get(name)) for name, tensor in registered}
    unregistered = {name: tensor.detach().clone() for name, tensor in _unregistered_state(module)}
    return ModuleState(tensors, unregistered, [_copied_values(vars(submodule), 0) for submodule in module.modules()])


def _copy_into(tensor: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    if into is not None and not tensor.is_nested and not into.is_nested:
        if (into.shape, into.dtype, into.stride()) == (tensor.shape, tensor.dtype, tensor.stride()):
            with contextlib.suppress(RuntimeError):
                return into.copy_(tensor)
    return tensor.clone()


def _registered_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _unregistered_state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in unregistered_tensors(module):
        if tensor.is_leaf or not tensor.requires_grad:
            yield name, tensor


def unshared_parameters(module: nn.Module) -> frozenset[str]:
    """Return the names of dense CPU parameters that share memory with no other tensor."""
    tensors = [tensor for named in (_registered_tensors(module), unregistered_tensors(module)) for _, tensor in named]
    users = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors if is_dense(tensor))
    return frozenset(
        name
        for name, p in module.named_parameters()
        if is_dense(p) and p.untyped_storage().nbytes() == p.nbytes and users[p.untyped_storage().data_ptr()] == 1
    )


def move_to_file(module: nn.Module, file: Path) -> frozenset[str]:
    """Move `unshared_parameters` to a memory-mapped, deleted file; return their names."""
    return_freed_memory()
    names = unshared_parameters(module)
    parameters = dict(module.named_parameters())
    save(((name, parameters[name]) for name in names), file)
    ModuleState(TensorFile(file), file=file).restore(module, names)
    shutil.rmtree(file)
    return names


def free_parameters(module: nn.Module, names: Collection[str], dtype: torch.dtype | None = None) -> None:
    """Free the memory of parameters, which are zero until `ModuleState.restore`.

    If `dtype` is set, floating-point parameters get this dtype.
    """
    for name, parameter in module.named_parameters():
        if name in names:
            new_dtype = dtype if parameter.is_floating_point() else None
            parameter.data = parameter.new_zeros((), dtype=new_dtype).expand(parameter.shape)


_MOST_PLAIN = 200  # per container; larger ones, e.g. a vocabulary, are not state
_DEEPEST_PLAIN = 3


def _copied_values(attributes: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """Return copies of attributes that a step may change, except parameters and buffers."""
    saved: dict[str, Any] = {}
    for key, value in attributes.items():
        if key in MODULE_INTERNALS and key != "training":
            continue
        if isinstance(value, reachable.PLAIN):
            saved[key] = value
        elif isinstance(value, torch.Tensor) and not value.is_nested:
            saved[key] = value  # rebinds a replaced tensor; values are copied with the other tensors
        elif isinstance(value, list | dict | set | deque) and len(value) <= _MOST_PLAIN and _is_flat(value):
            saved[key] = copy.copy(value)
        elif reachable.is_small_array(value):
            saved[key] = value.copy()
        elif (generator := user_generator(value)) is not None:
            saved[key] = _GeneratorState(generator.read())
        elif reachable.is_user_object(value) and depth < _DEEPEST_PLAIN:
            saved[key] = _HelperState(_copied_values(vars(value), depth + 1))
    return saved


@dataclass(slots=True)
class _HelperState:
    attributes: dict[str, Any]


@dataclass(slots=True)
class _GeneratorState:
    state: Any


def _is_flat(value: Any) -> bool:
    return all(isinstance(item, reachable.PLAIN) for item in (value.values() if isinstance(value, dict) else value))


def _restore_plain(holder: Any, plain: Mapping[str, Any]) -> None:
    attributes = vars(holder)
    for key in [key for key, value in attributes.items() if key not in plain and type(value) in reachable.NUMBERS]:
        del attributes[key]
    for key, saved in plain.items():
        if key not in attributes and type(saved) not in reachable.NUMBERS:
            continue
        value = attributes.get(key)
        if isinstance(saved, _HelperState):
            if reachable.is_user_object(value):
                _restore_plain(value, saved.attributes)
        elif isinstance(saved, _GeneratorState):
            if (generator := user_generator(value)) is not None:
                generator.write(saved.state)
        elif isinstance(saved, torch.Tensor):
            if not (isinstance(value, torch.Tensor) and shape_of(value) == shape_of(saved)):
                attributes[key] = saved.detach().clone()
        elif isinstance(saved, reachable.PLAIN):
            attributes[key] = saved
        elif type(value) is type(saved):
            reachable.refill(value, saved)


def copied_module(module: nn.Module) -> nn.Module:
    """Return a copy of `module` that shares no tensor with it.

    Non-leaf tensors (e.g. the `weight` of `torch.nn.utils.weight_norm`, a cached feature map) are copied without graph,
    since `copy.deepcopy` refuses non-leaf tensors.
    """
    tensors = {id(tensor): tensor for _, tensor in unregistered_tensors(module) if not tensor.is_leaf}
    return copy.deepcopy(module, {key: tensor.detach().clone() for key, tensor in tensors.items()})


def differs_in_structure(first: nn.Module, second: nn.Module, wholes: Mapping[str, torch.Size] | None = None) -> bool:
    """Return True if the modules' classes, or their parameters' names, order or shapes, differ.

    `wholes`: full shapes, by name, of parameters that `first` has only as shards. If not empty, order is ignored, since
    DDP reorders parameters.
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


# State outside of modules

_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
_DEEPEST = 4  # nesting depth of visited objects
_MOST_ITEMS = 200  # per container; larger ones, e.g. a vocabulary, are not state
_MOST_ELEMENTS = 1 << 20  # per tensor; larger ones, e.g. a data set, are not state

Restore = Callable[[], None]


class ExternalState:
    """State that recipe functions and module methods reach through globals and closures.

    Objects whose `id` is in `ignore` are not captured: the caller restores them.
    """

    def __init__(self, functions: Collection[Any], module: nn.Module, ignore: Collection[int]) -> None:
        classes = {type(submodule) for submodule in module.modules()}
        methods = [f for cls in classes for f in vars(cls).values() if isinstance(f, FunctionType)]
        self._roots = [*(f for f in functions if f is not None), *methods]
        self._ignore = frozenset(ignore)

    def capture(self) -> Restore:
        """Return a function that restores the current state any number of times."""
        visited = set(self._ignore)
        steps = [step for root in self._roots for step in _restorers_of(root, reachable.do_not_bind, 0, visited)]

        def restore() -> None:
            with torch.no_grad():
                for step in steps:
                    step()

        return restore

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the current state after the block."""
        restore = self.capture()
        try:
            yield
        finally:
            restore()


def _restorers_of(value: Any, put: Callable[[Any], None], depth: int, visited: set[int]) -> Iterator[Restore]:
    """Yield functions that restore `value` and its contents; `put` sets the variable of `value`."""
    if isinstance(value, reachable.PLAIN):
        yield lambda: put(value)
        return
    if id(value) in visited or depth > _DEEPEST:
        return
    visited.add(id(value))
    if isinstance(value, torch.Tensor):
        if not isinstance(value, nn.Parameter) and not value.requires_grad and value.numel() <= _MOST_ELEMENTS:
            saved = value.clone()

            def undo() -> None:
                put(value)
                value.copy_(saved)

            yield undo
    elif isinstance(value, nn.Module):
        if next(value.parameters(), None) is None:  # modules with parameters are restored with the step
            state = capture_state(value)
            yield lambda: state.restore(value)
    elif (generator := user_generator(value)) is not None:
        random_state = generator.read()
        yield lambda: generator.write(random_state)
    elif isinstance(value, FunctionType):
        if not reachable.is_user_function(value):
            return
        for namespace in (value.__globals__, vars(value)):
            if id(namespace) not in visited:
                visited.add(id(namespace))
                yield _remover_of_new_numbers(namespace, namespace.pop)
        for variable in reachable.function_variables(value):
            yield from _restorers_of(variable.value, variable.bind, depth + 1, visited)
    elif isinstance(value, MethodType):
        yield from _restorers_of(value.__func__, reachable.do_not_bind, depth, visited)
        yield from _restorers_of(value.__self__, reachable.do_not_bind, depth + 1, visited)
    elif isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            yield from _restorers_of(part, reachable.do_not_bind, depth + 1, visited)
    elif type(value) in _CONTAINERS or reachable.is_small_array(value):
        # Skip the items of subclasses: item access may be overridden.
        content = list(value.values() if isinstance(value, dict) else value) if type(value) in _CONTAINERS else []
        if len(content) > _MOST_ITEMS:
            return
        items = copy.copy(value)

        def restore_items() -> None:
            put(value)
            reachable.refill(value, items)

        yield restore_items
        for item in content:
            if not isinstance(item, reachable.PLAIN):
                yield from _restorers_of(item, reachable.do_not_bind, depth + 1, visited)
    elif isinstance(value, type | ModuleType) or reachable.is_user_object(value):
        yield from _restorers_of_holder(value, depth, visited)


def _restorers_of_holder(holder: Any, depth: int, visited: set[int]) -> Iterator[Restore]:
    bind: Callable[[str, Any], None] = functools.partial(setattr, holder)
    if isinstance(holder, type | ModuleType):
        if not reachable.is_user_namespace(holder):
            return
    else:
        bind = vars(holder).__setitem__  # bypass a user-defined `__setattr__`
        yield from _restorers_of(type(holder), reachable.do_not_bind, depth + 1, visited)
    yield _remover_of_new_numbers(vars(holder), functools.partial(delattr, holder))
    for name, value in list(vars(holder).items()):
        if isinstance(value, property | classmethod | staticmethod) or (
            name.startswith("__") and not isinstance(value, FunctionType)
        ):
            continue
        yield from _restorers_of(value, functools.partial(bind, name), depth + 1, visited)


def _remover_of_new_numbers(namespace: Mapping[str, Any], remove: Callable[[str], object]) -> Restore:
    before = frozenset(namespace)

    def undo() -> None:
        for name in [key for key, item in namespace.items() if key not in before and type(item) in reachable.NUMBERS]:
            remove(name)

    return undo
