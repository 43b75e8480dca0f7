"""Tensor parallelism of a recipe: which ranks compute one model together, and what DDP keeps of it in plain tensors.

`parallelize_module` makes parameters `DTensor`s on the mesh of these ranks; `fully_shard` adds its own dimension to
that mesh, and `DistributedDataParallel(..., device_mesh=...)` has the local tensors in their place
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
from ddpcheck.gather.collectives.collective_log import unlogged
from ddpcheck.gather.ddp.sharding import is_sharded, mesh_of
from ddpcheck.gather.state.fingerprints import is_shard
from ddpcheck.gather.state.module_state import sharding_classes


@dataclass(frozen=True, slots=True)
class Part:
    """What the local tensor is that a rank has of a parameter."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, parameter: Any) -> Part:
        """What the local tensor of a `DTensor` is of it."""
        return cls(parameter.device_mesh, tuple(parameter.placements), parameter.shape, parameter.stride())

    def around(self, own: torch.Tensor) -> torch.Tensor:
        """The `DTensor` of which this rank has `own`."""
        tensor_module: Any = sys.modules["torch.distributed.tensor"]
        found: torch.Tensor = tensor_module.DTensor.from_local(
            own, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )
        return found


@dataclass(frozen=True, slots=True)
class DataPlace:
    """The place of a rank in the data dimension: of its model among those that are trained data parallel."""

    rank: int  # the number of the model
    size: int  # how many there are
    together: tuple[int, ...]  # the ranks that compute this one
    split: tuple[str, ...] = ()  # the parameters that are split over these
    sharded: tuple[str, ...] = ()  # those that `fully_shard` has sharded

    @property
    def splits_model(self) -> bool:
        """Whether several ranks compute one model together."""
        return len(self.together) > 1


def parts_of(module: nn.Module) -> dict[str, Part]:
    """What this rank has of each parameter that is a `DTensor`."""
    return {name: Part.of(p) for name, p in module.named_parameters() if is_shard(p)}


def data_place(module: nn.Module, parts: Mapping[str, Part], group: Any) -> DataPlace:
    """The place of this rank; all ranks of `group`, which are all there are, have to call it.

    The model is wrapped or sharded; `parts` are of the parameters that DDP has in plain tensors.

    Raises:
        TargetError: The ranks are not divided into groups of the same size.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return DataPlace(0, 1, (0,))
    sharding = _meshes_of(module)
    own = parts_of(module)
    split = split_over(module, {**own, **parts})
    mine = torch.zeros(world_size, dtype=torch.int64, device=next(module.parameters()).device)
    mine[sorted({rank, *itertools.chain(*split.values())})] = 1
    masks = [torch.zeros_like(mine) for _ in range(world_size)]
    with unlogged():
        dist.all_gather(masks, mine, group=group)  # of objects, it would need numpy
    everyone = [tuple(mask.nonzero().flatten().tolist()) for mask in masks]
    groups = sorted(set(everyone))
    if sorted(one for of_group in groups for one in of_group) != [*range(world_size)] or len(set(map(len, groups))) > 1:
        raise TargetError(
            f"wrap(module, device) splits the model over the ranks {everyone[rank]}, and ranks are not divided into "
            "groups of the same size that compute a model each: report cannot tell which ranks have the same part; "
            "check the script with `ddpcheck run`"
        )
    sharded = tuple(name for name, part in own.items() if _is_sharded(part, sharding))
    return DataPlace(groups.index(everyone[rank]), len(groups), everyone[rank], (*split,), sharded)


def split_over(module: nn.Module, parts: Mapping[str, Part]) -> dict[str, list[int]]:
    """By name of a parameter that `fully_shard` has not split alone, the ranks over which it is split beside that."""
    sharding = _meshes_of(module)
    return {name: others for name, part in parts.items() if len(others := _ranks_over(part, sharding)) > 1}


def _meshes_of(module: nn.Module) -> list[Any]:
    return [mesh_of(one) for one in module.modules() if isinstance(one, sharding_classes()) and is_sharded(one)]


def _ranks_over(part: Part, sharding: Sequence[Any]) -> list[int]:
    """The ranks over which a parameter is split by something else than `fully_shard` on these meshes."""
    of_data = {name for mesh in sharding for name in mesh.mesh_dim_names or ()}
    place = part.mesh.get_coordinate()
    if part.mesh in sharding or place is None:
        return []
    names = part.mesh.mesh_dim_names or ("",) * part.mesh.ndim
    split = [not one.is_replicate() and name not in of_data for one, name in zip(part.placements, names, strict=True)]
    at: Any = tuple(slice(None) if own else one for own, one in zip(split, place, strict=True))
    ranks: list[int] = part.mesh.mesh[at].flatten().tolist()
    return ranks if any(split) else []


def _is_sharded(part: Part, sharding: Sequence[Any]) -> bool:
    of_data = {name for mesh in sharding for name in mesh.mesh_dim_names or ()}
    return part.mesh in sharding or not of_data.isdisjoint(part.mesh.mesh_dim_names or ())


def parts_in_use(module: nn.Module) -> dict[nn.Module, dict[str, Part]]:
    """By submodule, what this rank has of its own parameters; of a module in DDP, once a forward pass has run."""
    found = {}
    for part in module.modules():
        held = {**vars(part), **dict(part.named_parameters(recurse=False))}
        if parts := {name: Part.of(p) for name, p in held.items() if isinstance(p, torch.Tensor) and is_shard(p)}:
            found[part] = parts
    return found


def input_layouts(module: nn.Module) -> Iterator[Sequence[Any]]:
    """How the plan of `parallelize_module` has the inputs of a module split, as far as its hooks tell.

    They are private to torch: in what a hook is a closure over is the style, or a call with its layouts.
    """
    for hook in module._forward_pre_hooks.values():
        for cell in getattr(hook, "__closure__", None) or ():
            held = cell.cell_contents
            layouts = held.args[0] if isinstance(held, functools.partial) and held.args else held
            layouts = getattr(layouts, "input_layouts", layouts)
            if isinstance(layouts, tuple) and any(hasattr(one, "is_replicate") for one in layouts):
                yield layouts


def hidden_parameters(module: nn.Module) -> dict[str, Any]:
    """The parameters that DDP has, by name, in the place of which `module` has `DTensor`s since its first forward."""
    found = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and is_shard(value) and value.grad_fn is not None:
                leaf = getattr(value.grad_fn.next_functions[0][0], "variable", None)
                if leaf is not None:
                    found[f"{path}.{name}".lstrip(".")] = leaf
    return found


def is_sum(gradient: Any) -> bool:
    """Whether a rank has a term of a gradient, and the optimizer adds them up."""
    return is_shard(gradient) and any(placement.is_partial() for placement in gradient.placements)


def changed_attributes(module: nn.Module, reference: nn.Module) -> list[dict[str, object]]:
    """By submodule, what plain attributes were that `wrap` has changed, as the number of heads of a part."""
    pairs = zip(module.modules(), reference.modules(), strict=False)
    return [
        {key: vars(other)[key] for key, value in vars(one).items() if _is_changed(value, vars(other).get(key))}
        for one, other in pairs
    ]


def _is_changed(value: object, before: object) -> bool:
    return isinstance(value, int | float | str | tuple) and type(value) is type(before) and value != before


def as_wholes(
    tensors: Iterable[tuple[str, torch.Tensor | None]], parts: Mapping[str, Part]
) -> Sequence[tuple[str, torch.Tensor | None]]:
    """`tensors` with those that are local tensors of a part as `DTensor`s, as far as they have its shape."""
    return [
        (
            name,
            tensor if tensor is None or name not in parts or is_shard(tensor) else parts[name].around(tensor.detach()),
        )
        for name, tensor in tensors
    ]


def placed_as(parameter: Any, gradient: Any) -> Any:
    """A gradient, as an optimizer has it: split as its parameter; all ranks that have both have to call it."""
    if not is_shard(gradient) or gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(parameter.device_mesh, parameter.placements)
