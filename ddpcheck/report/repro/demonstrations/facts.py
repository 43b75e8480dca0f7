"""Facts that may differ between ranks, by name: one function for each kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def parameter_names(module: nn.Module) -> dict[str, Any]:
    return {name: "is a parameter" for name, _ in module.named_parameters()}


def parameter_positions(module: nn.Module) -> dict[str, Any]:
    return {
        name: f"number {i}" for i, (name, _) in enumerate(module.named_parameters())
    }


def parameter_shapes(module: nn.Module) -> dict[str, Any]:
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


def parameter_dtypes(module: nn.Module) -> dict[str, Any]:
    return {name: p.dtype for name, p in module.named_parameters()}


def parameter_strides(module: nn.Module) -> dict[str, Any]:
    return {name: f"strides {p.stride()}" for name, p in module.named_parameters()}


def parameter_modes(module: nn.Module) -> dict[str, Any]:
    return {
        name: f"requires_grad={p.requires_grad}"
        for name, p in module.named_parameters()
    }


def parameter_devices(module: nn.Module) -> dict[str, Any]:
    return {name: p.device.type for name, p in module.named_parameters()}


def parameter_ties(module: nn.Module) -> dict[str, Any]:
    """Every name of every parameter, and the first name of the same parameter."""
    first: dict[Any, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first.setdefault(parameter, name)
    named = module.named_parameters(remove_duplicate=False)
    return {name: f"is {first[parameter]}" for name, parameter in named}


def parameter_values(module: nn.Module, optim: Any) -> dict[str, Any]:
    return {name: p.detach().cpu() for name, p in module.named_parameters()}


def buffer_names(module: nn.Module) -> dict[str, Any]:
    return {name: "is a buffer" for name, _ in module.named_buffers()}


def buffer_positions(module: nn.Module) -> dict[str, Any]:
    return {name: f"number {i}" for i, (name, _) in enumerate(module.named_buffers())}


def buffer_shapes(module: nn.Module) -> dict[str, Any]:
    return {name: f"{tuple(b.shape)} {b.dtype}" for name, b in module.named_buffers()}


def buffer_values(module: nn.Module, optim: Any) -> dict[str, Any]:
    return {name: b.detach().cpu() for name, b in module.named_buffers()}


def unregistered_values(module: nn.Module, optim: Any) -> dict[str, Any]:
    """Tensors that are attributes of a module, and neither parameter nor buffer."""
    found = {}
    for place, part in getattr(module, "module", module).named_modules():
        for name, value in vars(part).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            values = [*value.values()] if isinstance(value, dict) else value
            values = values if isinstance(values, (list, tuple)) else [values]
            for index, tensor in enumerate(values):
                if isinstance(tensor, torch.Tensor):
                    label = f"{place}.{name}[{index}]".removeprefix(".")
                    found[label] = tensor.detach().cpu()
    return found


def module_classes(module: nn.Module) -> dict[str, Any]:
    """The class of every module, its settings, and whether it is in training mode."""
    found = {}
    for name, part in module.named_modules():
        settings = f"{type(part).__name__}({part.extra_repr()})"
        found[name or "the model"] = f"{settings} training={part.training}"
    return found


def wrapper_options(module: nn.Module, optim: Any) -> dict[str, Any]:
    names = ["find_unused_parameters", "static_graph", "broadcast_buffers"]
    names += ["gradient_as_bucket_view", "bucket_bytes_cap"]
    found = {name: getattr(module, name) for name in names if hasattr(module, name)}
    hooks = [hook.__qualname__ for hook, _ in getattr(module, "_comm_hooks", ())]
    return {**found, "communication hook": ", ".join(hooks) or "none"}


def optimizer_options(module: nn.Module, optim: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"class": type(optim).__name__}
    names = {parameter: name for name, parameter in module.named_parameters()}
    for index, group in enumerate(optim.param_groups):
        held = [names.get(p, "one that is not the model's") for p in group["params"]]
        found[f"parameters of group {index}"] = ", ".join(held)
        found.update(
            {f"{key} of group {index}": group[key] for key in group if key != "params"}
        )
    return found


def training_state(module: nn.Module, optim: Any) -> dict[str, Any]:
    """Parameters, buffers, and what the optimizer keeps."""
    found = {name: value.cpu() for name, value in module.state_dict().items()}
    for index, kept in enumerate(optim.state.values()):
        found.update({f"{key} of the optimizer, {index}": kept[key] for key in kept})
    return found
