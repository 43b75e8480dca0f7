"""Modules sharded by `fully_shard` (FSDP2): facts, gathering and reduction settings.

Each parameter is a `DTensor`, of which a rank has a shard; `DTensor.full_tensor` gathers it, and is a collective
(https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.findings.errors import DDPCheckError, UsageError
from ddpcheck.findings.evidence.modules import ShardedFacts
from ddpcheck.findings.evidence.steps import LoopEvent
from ddpcheck.findings.source_lines import user_location
from ddpcheck.gather.collectives.collective_log import without_logging
from ddpcheck.gather.patching import CALLER, Patch, patched
from ddpcheck.gather.state.fingerprints import fingerprints, is_dtensor, local_part
from ddpcheck.gather.state.module_state import non_persistent_buffers, sharding_classes
from ddpcheck.gather.steps.gradient_distance import eps_of, norms

_SYNC_SETTINGS = ("set_requires_gradient_sync", "set_requires_all_reduce")
_UNUSED_SETTING = "set_reduce_scatter_unused_params"
SCALING = ("set_gradient_divide_factor", "set_reduce_scatter_divide_factor", "set_force_sum_reduction_for_comms")
"""Methods of `FSDPModule` that decide what a reduction divides by."""


def is_sharded(module: nn.Module) -> bool:
    """Return True if any parameter is a `DTensor`."""
    return any(map(is_dtensor, module.parameters()))


def sharded_facts(
    module: nn.Module, values_built: Mapping[str, int], settings: Iterable[LoopEvent] = ()
) -> ShardedFacts:
    """Return the facts of a sharded module; `settings`: the events of `recorded_settings`.

    `values_built`: by name, fingerprints of parameters that still have the values that this rank built (`values_kept`).
    """
    unused = [event.synchronises for event in settings if event.kind == _UNUSED_SETTING]
    is_set = any(getattr(group, "reduce_scatter_unused_params", False) for group in parameter_groups(module))
    return ShardedFacts(
        is_ddp=False,
        ignored=frozenset(name for name, p in module.named_parameters() if not is_dtensor(p)),
        not_saved=non_persistent_buffers(module),
        reduces_unused=unused[-1:] == [True] or is_set,
        values_built=values_built,
        policies=policies_of(module),
    )


def values_kept(module: nn.Module, full_params: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return fingerprints of full parameters whose values sharding left unchanged on this rank.

    `full_params`: parameters as this rank built them. A parameter is omitted if the shard in `module` has other values.
    """
    tensor_module: Any = sys.modules.get("torch.distributed.tensor")
    unchanged = {}
    for name, parameter in module.named_parameters():
        shard: Any = parameter.detach()
        if name not in full_params or not is_dtensor(shard) or full_params[name].shape != shard.shape:
            continue
        with without_logging(), contextlib.suppress(RuntimeError, TypeError, ValueError):  # uneven shards along dim > 0
            expected = tensor_module.distribute_tensor(
                full_params[name].detach(), shard.device_mesh, shard.placements, src_data_rank=None
            )
            if torch.equal(expected.to_local(), shard.to_local()):
                unchanged[name] = full_params[name]
    return fingerprints(unchanged.items())


# FullyShardedDataParallel


def refuse_fsdp1(module: nn.Module, what: str, error: type[DDPCheckError] = UsageError) -> None:
    """Raise `error` if `module` has a `FullyShardedDataParallel` (FSDP1), which is not supported.

    `what` describes the module in the message.
    """
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if kind is not None and any(isinstance(part, kind) for part in module.modules()):
        raise error(
            f"{what} is or holds a FullyShardedDataParallel (FSDP1), which ddpcheck does not compare; shard the model "
            "with torch.distributed.fsdp.fully_shard"
        )


def count_in_fsdp1(parameters: Iterable[torch.Tensor]) -> int:
    """Count the flat parameters of FSDP1, which torch marks by a private attribute."""
    return sum(map(hasattr, parameters, repeat("_fsdp_flattened")))


# Gathering


def gathered(tensors: Iterable[tuple[str, torch.Tensor | None]], group: Any) -> dict[str, torch.Tensor]:
    """Return the full tensors by name; a collective over all ranks.

    Plain tensors are returned unchanged, gathered tensors in new memory. A name is missing in the result if its tensor
    is None, or if the tensor is a shard that another rank lacks and that cannot be gathered.
    """
    by_name = {name: tensor.detach() for name, tensor in tensors if tensor is not None}
    shards = [name for name, tensor in by_name.items() if is_dtensor(tensor)]
    names_by_rank: list[Any] = [None] * dist.get_world_size(group)
    with without_logging():
        dist.all_gather_object(names_by_rank, shards, group=group)
        on_all_ranks = set(shards).intersection(*names_by_rank)
        whole: dict[str, Any] = {name: _gathered_copy(by_name[name]) for name in sorted(on_all_ranks)}
    return {name: whole.get(name, tensor) for name, tensor in by_name.items() if name in whole or name not in shards}


def _gathered_copy(shard: Any) -> torch.Tensor:
    full: torch.Tensor = shard.full_tensor()
    return full.clone() if full.data_ptr() == shard.to_local().data_ptr() else full


def copy_local_tensors(tensors: Iterable[tuple[str, torch.Tensor | None]]) -> dict[str, torch.Tensor]:
    """Return copies of this rank's local tensors by name; skip entries that are None."""
    return {name: local_part(tensor).clone() for name, tensor in tensors if tensor is not None}


def shard_states(optimizer: Any, shards: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return norms of the optimizer state of sharded parameters, e.g. {"weight: exp_avg": 0.3}."""
    states: dict[str, torch.Tensor] = {}
    for name, shard in shards.items():
        state, part = optimizer.state.get(shard), local_part(shard)
        if isinstance(state, dict) and 0 < part.numel() < shard.numel():
            tensors = {key: local_part(v) for key, v in state.items() if isinstance(v, torch.Tensor)}
            changed = varying_params(
                {key: v for key, v in tensors.items() if v.shape == part.shape}
            )  # skips Adagrad's init
            states |= {f"{name}: {key}": v for key, v in tensors.items() if key == "step" or key in changed}
    return norms(states)


# Settings


@contextlib.contextmanager
def recorded_settings() -> Iterator[list[LoopEvent]]:
    """Record, in the block, calls that set how an `FSDPModule` reduces gradients.

    Such a call switches reduction on or off, or sets the divisor. The value passed is the event's `synchronises`.
    """
    events: list[LoopEvent] = []
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    with contextlib.ExitStack() as stack:
        for patch in note_settings(fsdp, events.append, SCALING):
            stack.enter_context(patch)
        yield events


def note_settings(fsdp: Any, sink: Callable[[LoopEvent], object], more: Iterable[str] = ()) -> list[Patch]:
    """Pass an event to `sink` for each call that switches gradient reduction.

    `fsdp`: the class `FSDPModule`. `more`: names of other methods to record too. Undo the returned patches to stop.
    """

    def record_call(name: str, _module: nn.Module, value: bool = True, **kwargs: Any) -> None:
        location = user_location(sys._getframe(CALLER))
        value = next((arg for key, arg in kwargs.items() if key == name.removeprefix("set_")), value)
        sink(LoopEvent(name, str(location) if location else "", synchronises=bool(value)))

    names = [name for name in (*_SYNC_SETTINGS, _UNUSED_SETTING, *more) if hasattr(fsdp, name)]
    return [patched(fsdp, name, functools.partial(record_call, name)) for name in names]


def parameter_groups(module: nn.Module) -> list[Any]:
    """Return the parameter groups of `fully_shard` in `module`; empty if torch lacks them.

    Private to torch. Attributes used: `reduce_grads`, `all_reduce_grads`, `reduce_scatter_unused_params`, the mesh of
    `mesh_info`, and `sharded_param`, `_unsharded_param` and `_module_info` of `fsdp_params`.
    """
    groups: list[Any] = []
    for part in module.modules():
        if isinstance(part, sharding_classes()):
            with contextlib.suppress(AttributeError):
                state: Any = part._get_fsdp_state()  # type: ignore[operator]
                groups += getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return list({id(group): group for group in groups if group is not None}.values())


def shards_in_use(module: nn.Module) -> set[int]:
    """Return ids of sharded and unsharded parameters that `fully_shard` uses; empty if unknown.

    Includes parameters that `fully_shard` adopts after `Module.to` and `load_state_dict(assign=True)`.
    """
    return set().union(*map(_tensor_ids, _parameters_of_groups(module)))


def shards_in_use_as(module: nn.Module, part: nn.Module, name: str) -> set[int]:
    """Return the `shards_in_use` that belong to parameter `name` of submodule `part`."""
    identities: set[int] = set()
    for param in _parameters_of_groups(module):
        info = getattr(param, "_module_info", None)
        if info is None or any(owner is part and attribute == name for owner, attribute in _module_attributes(info)):
            identities |= _tensor_ids(param)
    return identities


def shards_of_tied_params(module: nn.Module) -> set[int]:
    """Return ids of shards that `fully_shard` lists repeatedly because parameters were tied after sharding."""
    counts = Counter(id(getattr(param, "sharded_param", None)) for param in _parameters_of_groups(module))
    return {identity for identity, times in counts.items() if times > 1}


def _parameters_of_groups(module: nn.Module) -> list[Any]:
    return [param for group in parameter_groups(module) for param in getattr(group, "fsdp_params", ())]


def _tensor_ids(param: Any) -> set[int]:
    tensors = (getattr(param, name, None) for name in ("sharded_param", "_unsharded_param"))
    return {id(tensor) for tensor in tensors if tensor is not None}


def _module_attributes(info: Any) -> Iterator[tuple[Any, Any]]:
    yield getattr(info, "module", None), getattr(info, "param_name", None)
    yield from zip(getattr(info, "shared_modules", ()), getattr(info, "shared_param_names", ()), strict=False)


def reduces_gradients(groups: Iterable[Any]) -> bool:
    """Return True if backward reduces gradients of all trainable groups, as currently set."""
    switches = ("reduce_grads", "all_reduce_grads")
    return all(getattr(group, name, True) for group in groups if _is_trainable(group) for name in switches)


def _is_trainable(group: Any) -> bool:
    params = (getattr(param, "sharded_param", None) for param in getattr(group, "fsdp_params", ()))
    return any(getattr(shard, "requires_grad", True) for shard in params)


def mesh_of(module: nn.Module) -> Any:
    """Return the mesh of `fully_shard` for `module` (shard and replicate dimensions).

    Falls back to a parameter's mesh, which has another dimension under tensor parallelism.
    """
    meshes = [getattr(getattr(group, "mesh_info", None), "mesh", None) for group in parameter_groups(module)]
    meshes += [getattr(parameter, "device_mesh", None) for parameter in module.parameters()]
    return next(mesh for mesh in meshes if mesh is not None)


def shard_number(shard: Any, mesh: Any = None) -> int:
    """Return the index of this rank's shard; replicas of a shard share the index.

    `mesh`: count only shards along dimensions of this mesh (of `fully_shard`); default: along all dimensions.
    """
    number = 0
    for size, coord, placement in _dimensions(shard, mesh):
        number = number if placement.is_replicate() else number * size + coord
    return number


def _dimensions(shard: Any, mesh: Any) -> list[tuple[int, int, Any]]:
    """Return (size, coordinate, placement) of the shard's mesh dimensions that are in `mesh`."""
    full: Any = shard.device_mesh
    names = None if mesh is None or mesh.ndim == full.ndim else mesh.mesh_dim_names
    dims = zip(full.shape, full.get_coordinate(), shard.placements, full.mesh_dim_names or full.shape, strict=True)
    return [(size, coord, placement) for size, coord, placement, name in dims if names is None or name in names]


def is_gathered(parameter: Any, shard: Any) -> bool:
    """Return True if `parameter` is the unsharded version of `shard`.

    The unsharded version is a plain tensor or, under tensor parallelism, a `DTensor` on the tensor-parallel mesh only.
    """
    return not is_dtensor(parameter) or (is_dtensor(shard) and parameter.device_mesh.ndim < shard.device_mesh.ndim)


def split_of(shard: Any, mesh: Any = None) -> tuple[int, int] | None:
    """Return (number of shards, split dim) of a parameter; None if split several times.

    The result is (1, 0) if the parameter is not split. `mesh`: as in `shard_number`.
    """
    dimensions = _dimensions(shard, mesh)
    split = [(size, p.dim) for size, _, p in dimensions if not p.is_replicate() and hasattr(p, "dim")]
    plain = all(p.is_replicate() or hasattr(p, "dim") for _, _, p in dimensions)
    return (split or [(1, 0)])[0] if plain and len(split) < 2 else None


def varying_shards(parameters: Mapping[str, torch.Tensor], mesh: Any) -> tuple[str, ...]:
    """Return names of sharded parameters whose local values are not all equal."""
    splits = {name: split_of(parameter, mesh) for name, parameter in parameters.items() if is_dtensor(parameter)}
    return varying_params({name: parameters[name] for name, s in splits.items() if s is not None and s[0] > 1})


def varying_params(parameters: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Return names of tensors whose local values are not all equal (NaN is ignored)."""
    parts = {name: local_part(p).flatten() for name, p in parameters.items()}
    return tuple(
        name
        for name, part in parts.items()
        if part.numel() > 1 and bool(((part != part[0]) & (part == part)).any())  # NaN != NaN
    )


def shard_position(value: Any, parameters: Mapping[str, torch.Tensor]) -> tuple[int, int] | None:
    """Return (shard index, shard count) if `value` has shards of all `parameters`, else None.

    `value` may be a dict, such as a state dict, in which each parameter name has a tensor of the local shape.
    """
    split = {name: p for name, p in parameters.items() if is_dtensor(p) and local_part(p).shape != p.shape}
    if not split or not any(_has_all_shards(mapping, split) for mapping in _nested_dicts(value)):
        return None
    first = next(iter(split.values()))
    parts = math.prod(size for size, _, placement in _dimensions(first, None) if not placement.is_replicate())
    return shard_number(first), parts


def _has_all_shards(values: Mapping[Any, Any], split: Mapping[str, torch.Tensor]) -> bool:
    pairs = [(values.get(name), parameter) for name, parameter in split.items()]
    return all(isinstance(v, torch.Tensor) and local_part(v).shape == local_part(p).shape for v, p in pairs)


def _nested_dicts(value: Any, depth: int = 2) -> Iterator[Mapping[Any, Any]]:
    if isinstance(value, Mapping):
        yield value
        for item in value.values() if depth else ():
            yield from _nested_dicts(item, depth - 1)


def mixed_precision(module: nn.Module) -> torch.dtype | None:
    """Return the coarsest dtype in which `fully_shard` computes or reduces gradients, or None."""
    dtypes = set()
    for _, policy in _policies(module):  # an unreadable policy counts as bfloat16
        dtypes |= {torch.bfloat16} if policy is None else {policy.param_dtype, policy.reduce_dtype}
    return max(dtypes - {None}, key=eps_of, default=None)


def policies_of(module: nn.Module) -> dict[str, str]:
    """Return as text the first `mp_policy` of `fully_shard`, and deviating policies by module path."""
    policies = {path: repr(policy) for path, policy in _policies(module) if policy is not None}
    first = next(iter(policies.values()), "")
    others = {f"mp_policy of {path}": text for path, text in policies.items() if text != first}
    return {"mp_policy": first, **others} if policies else {}


def _policies(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, part in module.named_modules():
        if isinstance(part, sharding_classes()):
            state: Any = getattr(part, "_get_fsdp_state", lambda: None)
            yield path, getattr(state(), "_mp_policy", None)


@contextlib.contextmanager
def before_sharding(act: Callable[[], object]) -> Iterator[None]:
    """Call `act` once before `fully_shard` shards anything in the block.

    Patches a private method of torch; without this method, `act` is never called.
    """
    state = getattr(sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state"), "FSDPState", None)
    done: list[object] = []

    def act_once(*_args: Any, **_kwargs: Any) -> None:
        if not done:
            done.append(act())

    with patched(state, "init", act_once) if hasattr(state, "init") else contextlib.nullcontext():
        yield
