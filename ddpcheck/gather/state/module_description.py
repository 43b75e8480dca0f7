"""Description of a module on one rank, comparable across ranks without moving tensors."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ddpcheck.findings.evidence.modules import ModuleDescription, TensorRecord
from ddpcheck.findings.figures import MOST_MODULES, ModuleEntry
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import user_location
from ddpcheck.findings.wording import plain_module
from ddpcheck.gather.autograd.autograd_graph import state_tensors
from ddpcheck.gather.patching import CALLER, patched
from ddpcheck.gather.state.fingerprints import fingerprint, shape_of
from ddpcheck.gather.state.module_state import original_class


@dataclass(slots=True)
class Origins:
    """Registration lines of parameters, buffers and modules, by `id`.

    Keeps the objects alive so that no `id` is reused.
    """

    _lines: dict[int, Location] = field(default_factory=dict)
    _attributes: dict[tuple[int, str], Location] = field(default_factory=dict)
    _kept_objects: list[object] = field(default_factory=list)

    def note(self, module: object, name: str, location: Location | None, value: object = None) -> None:
        """Record that line `location` set attribute `name` of `module`, or deleted the attribute."""
        if location is not None:
            self._attributes[id(module), name] = location
            self._kept_objects += [module, value]
            if value is not None:
                self._lines[id(value)] = location

    def attribute_line(self, module: object, name: str) -> Location | None:
        """Return the last recorded line that set or deleted `name` of `module`."""
        return self._attributes.get((id(module), name))

    def value_line(self, value: object) -> Location | None:
        """Return the line that registered `value`, if recorded."""
        return self._lines.get(id(value))

    def line_by_name(self, module: nn.Module, name: str) -> Location | None:
        """Return the line that created `name`, a parameter, buffer or submodule of `module`.

        If this line is not recorded, return the line of the nearest containing module with a recorded line. Copies made
        by `copy.deepcopy`, such as the layers of `nn.TransformerEncoder`, are not registered one by one.
        """
        location: Location | None = None
        current: object = module
        for part in name.split("."):
            current = getattr(current, part, None)
            if current is None:
                break
            location = self._lines.get(id(current), location)
        return location


@contextlib.contextmanager
def record_origins() -> Iterator[Origins]:
    """Record registrations and deletions of parameters, buffers and modules in the block.

    Uses torch's public registration hooks (`torch.nn.modules.module.register_module_parameter_registration_hook` and
    its counterparts for buffers and modules). There is no hook for deletion: `nn.Module.__delattr__` is patched.
    """
    origins = Origins()

    def on_registration(module: object, name: str, value: object) -> None:
        origins.note(module, name, user_location(sys._getframe(1)), value)

    def on_deletion(module: nn.Module, name: str) -> None:
        origins.note(module, name, user_location(sys._getframe(CALLER)))

    with contextlib.ExitStack() as stack:
        for register in (
            hooks.register_module_parameter_registration_hook,
            hooks.register_module_buffer_registration_hook,
            hooks.register_module_module_registration_hook,
        ):
            stack.callback(register(on_registration).remove)
        stack.enter_context(patched(nn.Module, "__delattr__", on_deletion))
        yield origins


_LAZY = (UninitializedParameter, UninitializedBuffer)


class Parts(NamedTuple):
    """Submodules, parameters and buffers of a module, without duplicates, and all parameter names."""

    modules: dict[str, nn.Module]
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    names: list[list[str]]


def parts_of(module: nn.Module) -> Parts:
    """Return the submodules, parameters and buffers of a module, found in one walk."""
    modules, seen = {}, set()
    names: dict[int, list[str]] = {}
    buffers: dict[int, tuple[str, torch.Tensor]] = {}
    parameters: dict[str, nn.Parameter] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        if id(part) not in seen:
            seen.add(id(part))
            modules[path] = part
        for name, parameter in part._parameters.items():
            if parameter is not None:
                aliases = names.setdefault(id(parameter), [])
                if not aliases:
                    parameters[prefix + name] = parameter
                aliases.append(prefix + name)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                buffers.setdefault(id(buffer), (prefix + name, buffer))
    if type(module).named_parameters is not nn.Module.named_parameters:  # an override, which DDP calls as well
        parameters = dict(module.named_parameters())
    return Parts(modules, parameters, dict(buffers.values()), [*names.values()])


class KnownParts:
    """Cache of the parts and the structure of one module, recomputed after a change.

    Looking for changes takes a third of the time of `parts_of`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._parts: Parts | None = None
        self._marks: tuple[list[str], list[int]] = ([], [])  # names and ids of all parts, to detect changes
        self._structure: tuple[Parts, Any, ModuleDescription] | None = None  # with the inputs that it was computed from

    def now(self) -> Parts:
        """Return the current parts of the module; walk the module only after a change."""
        if self._parts is None or _change_marks(self._parts) != self._marks:
            self._parts = parts = parts_of(self.module)
            self._marks = _change_marks(parts)
            custom = any(type(part).named_modules is not nn.Module.named_modules for part in parts.modules.values())
            if custom or type(self.module).named_parameters is not nn.Module.named_parameters:  # cannot detect changes
                self._parts = None
            return parts
        return self._parts

    def structure(self, parts: Parts) -> ModuleDescription:
        """Return the result of `structure_of`, cached; `parts`: result of `now`."""
        inputs = _description_inputs(parts)
        known = self._structure
        if known is None or known[0] is not parts or known[1] != inputs or inputs is None:
            known = self._structure = parts, inputs, structure_of(self.module, parts)
        return known[2]


_DICTS, _KEYS, _VALUES = attrgetter("_modules", "_parameters", "_buffers"), methodcaller("keys"), methodcaller("values")
_TENSOR_PROPERTIES = attrgetter("shape", "dtype", "requires_grad", "device", "layout")
_IN_TRAINING = attrgetter("training")


def _change_marks(parts: Parts) -> tuple[list[str], list[int]]:
    dicts = [*filter(None, chain.from_iterable(map(_DICTS, parts.modules.values())))]
    names, values = (chain.from_iterable(map(every, dicts)) for every in (_KEYS, _VALUES))
    return [*names], [*map(id, dicts), *map(len, dicts), *map(id, values)]


def _description_inputs(parts: Parts) -> Any:
    """Return the properties that determine the result of `structure_of`, or None if unreadable."""
    tensors, modules = [*parts.parameters.values(), *parts.buffers.values()], parts.modules.values()
    try:
        shown = [*map(_TENSOR_PROPERTIES, tensors)], [*map(torch.Tensor.stride, tensors)]
    except (RuntimeError, AttributeError, TypeError):
        return None
    return shown, [*map(type, modules)], [*map(_IN_TRAINING, modules)], [*map(_options, modules)]


def describe(module: nn.Module) -> ModuleDescription:
    """Describe everything about `module` that DDP assumes equal on all ranks."""
    return replace(
        structure_of(module),
        state=tuple(
            (name, shape_of(tensor), fingerprint(tensor))
            for name, tensor in state_tensors(module)
            if not isinstance(tensor, _LAZY)
        ),
    )


def structure_of(module: nn.Module, parts: Parts | None = None) -> ModuleDescription:
    """Describe `module` like `describe`, without values and unregistered tensors."""
    parts = parts or parts_of(module)
    tensors = *parts.parameters.items(), *parts.buffers.items()
    return replace(
        _layout(parts.parameters, parts.buffers),
        ties=tuple(sorted(tuple(names) for names in parts.names if len(names) > 1)),
        modules=tuple(
            (name, type(submodule).__qualname__, _options(submodule), submodule.training)
            for name, submodule in parts.modules.items()
        ),
        uninitialised=tuple(name for name, tensor in tensors if issubclass(type(tensor), _LAZY)),
    )


def layout_of(module: nn.Module) -> ModuleDescription:
    """Return the parameters and buffers of `module` without values."""
    return _layout(dict(module.named_parameters()), dict(module.named_buffers()))


def _layout(parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> ModuleDescription:
    return ModuleDescription(
        parameters=tuple(_tensor_record(n, p) for n, p in parameters.items() if not issubclass(type(p), _LAZY)),
        buffers=tuple(_tensor_record(n, b) for n, b in buffers.items() if not issubclass(type(b), _LAZY)),
    )


def _tensor_record(name: str, tensor: torch.Tensor) -> TensorRecord:
    dense = tensor.layout == torch.strided and not tensor.is_nested
    return TensorRecord(
        name=name,
        shape=shape_of(tensor),
        dtype=str(tensor.dtype).removeprefix("torch."),
        stride=tuple(tensor.stride()) if dense else (),
        requires_grad=tensor.requires_grad,
        device=tensor.device.type,
    )


def module_entries(module: nn.Module) -> tuple[ModuleEntry, ...]:
    """Return the first MOST_MODULES submodules, each with its own parameters."""
    entries = {}
    for name, submodule in itertools.islice(module.named_modules(), MOST_MODULES):
        params = dict(submodule.named_parameters(recurse=False))
        elements = sum(parameter.numel() for parameter in params.values() if not isinstance(parameter, _LAZY))
        path = plain_module(name)  # replaces a compiled module by its inner module
        entries[path] = ModuleEntry(path, class_name(submodule), tuple(params), elements)
    return tuple(entries.values())


def class_name(module: nn.Module) -> str:
    """Return the original class name of a (compiled, scripted or sharded) module."""
    while (inner := dict(module.named_children()).get("_orig_mod")) is not None:
        module = inner
    if isinstance(module, torch.jit.ScriptModule):
        return module.original_name
    return original_class(module).__qualname__


def _options(module: nn.Module) -> str:
    """Return `extra_repr` of torch layers; user classes, which may print ranks, give ''."""
    return module.extra_repr() if type(module).__module__.startswith("torch.nn.") else ""
