"""Describe modules before DDP's constructor, which may raise or hang on a mismatch."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any
from weakref import ref

import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as registration

from ddpcheck.findings.evidence.modules import ModuleDescription
from ddpcheck.findings.evidence.replicas import SizedVariable, WrapperBegun
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import frames_from, is_of_program, location_of, user_location, variables_of
from ddpcheck.gather.ddp.ddp_wrapper import constructor_options
from ddpcheck.gather.patching import Recorder, guarded
from ddpcheck.gather.state.module_description import class_name, structure_of
from ddpcheck.record.replicas.program_state import program_variables
from ddpcheck.record.replicas.set_order import is_order_of_a_set

_CONTAINERS = (dict, list, tuple, set, frozenset)
_MOST_SIZES = 512
_MOST_FRAMES = 4  # innermost user functions at the registration of a parameter
_LARGEST_OFFSET = 4  # padding, unknown, begin and end tokens of a vocabulary


class ConstructionRecorder(Recorder):
    """Recorder of registration lines and nearby sizes; describes wrapped modules."""

    def __init__(self) -> None:
        """Install torch's public registration hooks."""
        # by id(): `torch.compile` would trace into a WeakKeyDictionary, and a module may define __eq__
        self._lines: dict[int, tuple[ref[nn.Module], dict[str, Location]]] = {}
        self._sizes: dict[SizedVariable, None] = {}
        hook: Any = guarded(self._registered)
        registration.register_module_parameter_registration_hook(hook)
        registration.register_module_buffer_registration_hook(hook)
        registration.register_module_module_registration_hook(hook)

    def begun(self, arguments: tuple[Any, ...], named: Mapping[str, Any], construct: Any) -> WrapperBegun | None:
        """Describe the module about to be wrapped; `arguments` start with the wrapper."""
        module = named.get("module", arguments[1] if len(arguments) > 1 else None)
        options = constructor_options(construct, *arguments, **named)
        if not isinstance(module, nn.Module) or not options:
            return None  # the constructor raises its own error
        group = named.get("process_group") or dist.group.WORLD
        mesh = named.get("device_mesh")
        if mesh is not None:
            group = mesh.get_group(mesh_dim=0)
        ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        description = _without(structure_of(module), ignored)
        shapes = {size for param in description.parameters for size in param.shape}
        shapes |= {len(part._modules) for part in module.modules()}
        now = (v for path, item, where in program_variables(depth=1) for v in _sized([(path, item)], where))
        sizes = dict.fromkeys((*self._sizes, *now))
        return WrapperBegun(
            class_name(module),
            tuple(dist.get_process_group_ranks(group)),
            description,
            options,
            user_location(),
            self._lines_of(module),
            tuple(_in_order_of_sets(module)),
            tuple(v for v in sizes if _may_be(v.size, shapes))[:_MOST_SIZES],
        )

    def _registered(self, module: nn.Module, name: str, thing: Any) -> None:
        frame = sys._getframe(1)
        location = user_location(frame)
        if location is None:
            return
        entry = self._lines.get(id(module))
        if entry is None or entry[0]() is not module:
            entry = self._lines[id(module)] = (ref(module), {})
        entry[1][name] = location
        if isinstance(thing, nn.Parameter) and not nn.parameter.is_lazy(thing) and len(self._sizes) < _MOST_SIZES:
            sizes = set(thing.shape)
            for user_frame in _user_functions(frame):
                variables = _sized(variables_of(user_frame).items(), location_of(user_frame))
                self._sizes.update((variable, None) for variable in variables if _may_be(variable.size, sizes))

    def _lines_of(self, module: nn.Module) -> dict[str, Location]:
        """Return the registration line by child name; omitted if equal to the parent's."""
        locations: dict[str, Location] = {}
        nearest: dict[str, Location | None] = {}  # registration line by module path, inherited from the parent
        for path, part in module.named_modules():
            parent, _, child = path.rpartition(".")
            nearest[path] = locations.get(path, nearest.get(parent) if child else None)
            entry = self._lines.get(id(part))
            if entry is not None and entry[0]() is part:
                for name, location in entry[1].items():
                    if location != nearest[path]:
                        locations[f"{path}.{name}".lstrip(".")] = location
        return locations


def _without(description: ModuleDescription, ignored: frozenset[str]) -> ModuleDescription:
    if not ignored:
        return description
    parameters, buffers = (
        tuple(t for t in entries if t.name not in ignored) for entries in (description.parameters, description.buffers)
    )
    return replace(description, parameters=parameters, buffers=buffers)


def _may_be(size: int, wanted: set[int]) -> bool:
    return any(size + offset in wanted for offset in range(_LARGEST_OFFSET + 1))


def _sized(variables: Iterable[tuple[str, Any]], where: Location) -> Iterator[SizedVariable]:
    """Yield integers and container sizes larger than 1."""
    for name, value in variables:
        kind = type(value)  # exact type: a subclass may define its own `__len__`
        if kind is int or kind in _CONTAINERS:
            size = value if kind is int else len(value)
            if size > 1:
                yield SizedVariable(name, kind.__name__, size, where)


def _user_functions(frame: FrameType | None) -> Iterator[FrameType]:
    """Return the innermost user functions on the stack, without module top levels."""
    frames = (f for f in frames_from(frame) if is_of_program(f.f_code.co_filename))
    return itertools.islice((f for f in frames if f.f_code.co_name != "<module>"), _MOST_FRAMES)


def _in_order_of_sets(module: nn.Module) -> Iterator[str]:
    """Yield modules whose children (3 or more) are in this process's set order."""
    for path, part in module.named_modules():
        names = [name for name, _ in part.named_children()]
        if len(names) > 2 and not all(name.isdigit() for name in names) and is_order_of_a_set(names):
            yield path
