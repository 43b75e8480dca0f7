"""Tensor parallelism: ranks that share one model replica, and DDP's local tensors.

`parallelize_module` makes parameters `DTensor`s on the mesh of these ranks; `fully_shard` adds its own dimension to the
mesh, and `DistributedDataParallel(..., device_mesh=...)` replaces `DTensor`s by their local tensors
(https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html).
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.findings.errors import TargetError
from ddpcheck.gather.collectives.collective_log import without_logging
from ddpcheck.gather.ddp.sharding import is_sharded, mesh_of
from ddpcheck.gather.state.fingerprints import is_dtensor
from ddpcheck.gather.state.module_state import sharding_classes


@dataclass(frozen=True, slots=True)
class DTensorLayout:
    """Mesh, placements, shape and stride of a `DTensor` parameter."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def from_param(cls, parameter: Any) -> DTensorLayout:
        """Return the mesh, placements, shape and stride of a `DTensor`."""
        return cls(parameter.device_mesh, tuple(parameter.placements), parameter.shape, parameter.stride())

    def to_dtensor(self, local: torch.Tensor) -> torch.Tensor:
        """Return the `DTensor` with this layout whose local tensor is `local`."""
        tensor_module: Any = sys.modules["torch.distributed.tensor"]
        dtensor: torch.Tensor = tensor_module.DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )
        return dtensor


@dataclass(frozen=True, slots=True)
class ModelReplica:
    """Model replica that this rank computes, alone or together with ranks of tensor parallelism."""

    rank: int  # index of this replica
    size: int  # number of replicas
    ranks: tuple[int, ...]  # ranks that compute this replica together
    split: tuple[str, ...] = ()  # names of parameters split over `ranks`
    sharded: tuple[str, ...] = ()  # names of parameters sharded by `fully_shard`

    @property
    def splits_model(self) -> bool:
        """Return True if several ranks compute one model replica together."""
        return len(self.ranks) > 1


def dtensor_layouts(module: nn.Module) -> dict[str, DTensorLayout]:
    """Return by name the layout of each parameter that is a `DTensor`."""
    return {name: DTensorLayout.from_param(p) for name, p in module.named_parameters() if is_dtensor(p)}


def replica_of(module: nn.Module, parts: Mapping[str, DTensorLayout], group: Any) -> ModelReplica:
    """Return the model replica of this rank; a collective over all ranks.

    `module`: a DDP wrapper or a sharded module. `parts`: layouts of parameters that DDP keeps as local tensors. Raises
    `TargetError` if the ranks do not form groups of equal size.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return ModelReplica(0, 1, (0,))
    sharding = _sharding_meshes(module)
    placements = dtensor_layouts(module)
    split = split_over(module, {**placements, **parts})
    local_mask = torch.zeros(world_size, dtype=torch.int64, device=next(module.parameters()).device)
    local_mask[sorted({rank, *itertools.chain(*split.values())})] = 1
    masks = [torch.zeros_like(local_mask) for _ in range(world_size)]
    with without_logging():
        dist.all_gather(masks, local_mask, group=group)  # all_gather_object would need numpy
    ranks_by_rank = [tuple(mask.nonzero().flatten().tolist()) for mask in masks]
    replica_ranks, groups = ranks_by_rank[rank], sorted(set(ranks_by_rank))
    if sorted(r for ranks in groups for r in ranks) != [*range(world_size)] or len(set(map(len, groups))) > 1:
        raise TargetError(
            f"wrap(module, device) splits the model over the ranks {replica_ranks}, and ranks are not divided into "
            "groups of the same size that compute a model each: report cannot tell which ranks have the same part; "
            "check the script with `ddpcheck run`"
        )
    sharded = tuple(name for name, part in placements.items() if _is_sharded(part, sharding))
    return ModelReplica(groups.index(replica_ranks), len(groups), replica_ranks, (*split,), sharded)


def split_over(module: nn.Module, parts: Mapping[str, DTensorLayout]) -> dict[str, list[int]]:
    """Map tensor-parallel parameters to the ranks that hold their parts; ignore splits by `fully_shard`."""
    sharding = _sharding_meshes(module)
    return {name: others for name, part in parts.items() if len(others := _ranks_of_split(part, sharding)) > 1}


def _sharding_meshes(module: nn.Module) -> list[Any]:
    return [mesh_of(m) for m in module.modules() if isinstance(m, sharding_classes()) and is_sharded(m)]


def _ranks_of_split(part: DTensorLayout, sharding: Sequence[Any]) -> list[int]:
    data_dims = {name for mesh in sharding for name in mesh.mesh_dim_names or ()}
    coords = part.mesh.get_coordinate()
    if part.mesh in sharding or coords is None:
        return []
    names = part.mesh.mesh_dim_names or ("",) * part.mesh.ndim
    split = [not p.is_replicate() and name not in data_dims for p, name in zip(part.placements, names, strict=True)]
    index: Any = tuple(slice(None) if is_split else coord for is_split, coord in zip(split, coords, strict=True))
    ranks: list[int] = part.mesh.mesh[index].flatten().tolist()
    return ranks if any(split) else []


def _is_sharded(part: DTensorLayout, sharding: Sequence[Any]) -> bool:
    data_dims = {name for mesh in sharding for name in mesh.mesh_dim_names or ()}
    return part.mesh in sharding or not data_dims.isdisjoint(part.mesh.mesh_dim_names or ())


def dtensor_layouts_in_use(module: nn.Module) -> dict[nn.Module, dict[str, DTensorLayout]]:
    """Return `DTensor` layouts by submodule and name; under DDP, call after the first forward."""
    parts_by_module = {}
    for part in module.modules():
        attrs = {**vars(part), **dict(part.named_parameters(recurse=False))}
        if parts := {
            name: DTensorLayout.from_param(p)
            for name, p in attrs.items()
            if isinstance(p, torch.Tensor) and is_dtensor(p)
        }:
            parts_by_module[part] = parts
    return parts_by_module


def input_layouts(module: nn.Module) -> Iterator[Sequence[Any]]:
    """Yield input layouts that `parallelize_module` keeps in forward pre-hooks of `module`.

    Private to torch: the closure of a hook has a `ParallelStyle`, or a `partial` whose first argument has the layouts.
    """
    for hook in module._forward_pre_hooks.values():
        for cell in getattr(hook, "__closure__", None) or ():
            content = cell.cell_contents
            layouts = content.args[0] if isinstance(content, functools.partial) and content.args else content
            layouts = getattr(layouts, "input_layouts", layouts)
            if isinstance(layouts, tuple) and any(hasattr(layout, "is_replicate") for layout in layouts):
                yield layouts


def hidden_parameters(module: nn.Module) -> dict[str, Any]:
    """Return by name the leaf parameters behind `DTensor`s that DDP's forward put into modules."""
    leaves = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and is_dtensor(value) and value.grad_fn is not None:
                leaf = getattr(value.grad_fn.next_functions[0][0], "variable", None)
                if leaf is not None:
                    leaves[f"{path}.{name}".lstrip(".")] = leaf
    return leaves


def is_partial(gradient: Any) -> bool:
    """Return True for a `DTensor` gradient that is partial: not yet summed over ranks."""
    return is_dtensor(gradient) and any(placement.is_partial() for placement in gradient.placements)


def changed_attributes(module: nn.Module, reference: nn.Module) -> list[dict[str, object]]:
    """Return each submodule's original values of attributes that `wrap` changed (e.g. number of heads)."""
    return [
        {key: vars(ref)[key] for key, value in vars(part).items() if _is_changed(value, vars(ref).get(key))}
        for part, ref in zip(module.modules(), reference.modules(), strict=False)
    ]


def _is_changed(value: object, before: object) -> bool:
    return isinstance(value, int | float | str | tuple) and type(value) is type(before) and value != before


def as_dtensors(
    tensors: Iterable[tuple[str, torch.Tensor | None]], parts: Mapping[str, DTensorLayout]
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield (name, tensor); convert local tensors whose name is in `parts` to `DTensor`s."""
    for name, tensor in tensors:
        is_unchanged = tensor is None or name not in parts or is_dtensor(tensor)
        yield name, tensor if tensor is None or is_unchanged else parts[name].to_dtensor(tensor.detach())


def redistribute_like(parameter: Any, gradient: Any) -> Any:
    """Redistribute a gradient to the parameter's placements, by a collective if placements differ."""
    if not is_dtensor(gradient) or gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(parameter.device_mesh, parameter.placements)
