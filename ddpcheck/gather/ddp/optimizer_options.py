"""Optimizer options as text, for comparison across ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ddpcheck.gather.ddp.ddp_wrapper import plain_attributes, spelled_option


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """Return the parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_options(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, str]:
    """Return class, groups and options of an optimizer and averager; `names` by `id`."""
    kind = type(optimizer)
    options = {"class": kind.__name__, "module": kind.__module__, "groups": str(len(optimizer.param_groups))}
    for index, group in enumerate(optimizer.param_groups):
        param_names = [names.get(id(p), "?") for p in group["params"]]
        options[f"group {index} parameters"] = ", ".join(sorted(param_names))
        options[f"group {index} order"] = ", ".join(param_names)
        options.update({f"group {index} {key}": spelled_option(v) for key, v in group.items() if key != "params"})
    averager = plain_attributes(getattr(optimizer, "averager", None))  # of PostLocalSGDOptimizer
    return {**options, **{f"averager {name}": value for name, value in averager.items()}}
