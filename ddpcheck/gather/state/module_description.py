"""The description of a module on one rank: plain data that can be compared across ranks without moving a tensor."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ddpcheck.findings.compiled_names import plain_module
from ddpcheck.findings.evidence.modules import ModuleDescription, TensorRecord
from ddpcheck.findings.figures import MOST_MODULES, ModuleEntry
from ddpcheck.findings.replace import replace
from ddpcheck.findings.source_lines import is_user_file
from ddpcheck.gather.autograd.autograd_graph import all_names, held_state
from ddpcheck.gather.state.fingerprints import fingerprint
from ddpcheck.gather.state.module_state import original_class
from ddpcheck.gather.state.tensor_values import shape_of

_LAZY = (UninitializedParameter, UninitializedBuffer)


def describe(module: nn.Module) -> ModuleDescription:
    """Describe everything about `module` that DDP takes to be the same on every rank."""
    return replace(
        structure_of(module),
        state=tuple(
            (name, shape_of(tensor), fingerprint(tensor))
            for name, tensor in held_state(module)
            if not isinstance(tensor, _LAZY)
        ),
    )


def structure_of(module: nn.Module) -> ModuleDescription:
    """As `describe`, without any values: that of tensors that are held without being registered is not there."""
    tensors = dict(module.named_parameters()), dict(module.named_buffers())
    return replace(
        _layout(*tensors),
        ties=tuple(sorted(names for names in all_names(module).values() if len(names) > 1)),
        modules=tuple(
            (name, type(submodule).__qualname__, _options(submodule), submodule.training)
            for name, submodule in module.named_modules()
        ),
        uninitialised=tuple(
            name for of_kind in tensors for name, tensor in of_kind.items() if isinstance(tensor, _LAZY)
        ),
    )


def layout_of(module: nn.Module) -> ModuleDescription:
    """The parameters and buffers of `module`, without their values and all else."""
    return _layout(dict(module.named_parameters()), dict(module.named_buffers()))


def _layout(parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> ModuleDescription:
    return ModuleDescription(
        parameters=tuple(_record(n, p) for n, p in parameters.items() if not isinstance(p, _LAZY)),
        buffers=tuple(_record(n, b) for n, b in buffers.items() if not isinstance(b, _LAZY)),
    )


def _record(name: str, tensor: torch.Tensor) -> TensorRecord:
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
    """The modules of `module`, the first MOST_MODULES of them, each with its own parameters."""
    entries = {}
    for name, submodule in itertools.islice(module.named_modules(), MOST_MODULES):
        own = dict(submodule.named_parameters(recurse=False))
        elements = sum(parameter.numel() for parameter in own.values() if not isinstance(parameter, _LAZY))
        path = plain_module(name)  # a compiled module gives way to the one in it
        entries[path] = ModuleEntry(path, class_name(submodule), tuple(own), elements)
    return tuple(entries.values())


def class_name(module: nn.Module) -> str:
    """The name of its class; of a module that is compiled, scripted or sharded, of the class as it is written."""
    while (inner := dict(module.named_children()).get("_orig_mod")) is not None:
        module = inner
    if isinstance(module, torch.jit.ScriptModule):
        return module.original_name
    return original_class(module).__qualname__


def _options(module: nn.Module) -> str:
    """The options of torch's own layers; what a user's class says of itself may well name the rank."""
    return module.extra_repr() if type(module).__module__.startswith("torch.nn.") else ""


def classes_of_program(module: nn.Module) -> dict[str, tuple[tuple[str, str], ...]]:
    """By path of each part that is of a class of the user's, or of one that stems from it: file and name of these."""
    found = {}
    for path, part in module.named_modules():
        kinds = [(_file_of(kind), kind.__qualname__) for kind in type(part).__mro__]
        if theirs := tuple((file, name) for file, name in kinds if file):
            found[path] = theirs
    return found


def _file_of(kind: type) -> str:
    try:
        file = inspect.getfile(kind)
    except (OSError, TypeError):
        return ""
    return file if is_user_file(file) else ""
