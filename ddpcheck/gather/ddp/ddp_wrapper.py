"""The wrapper: where it is, its options, compared with the other ranks', and parameters that have changed since."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.findings.errors import OptionsDifferError, UsageError
from ddpcheck.findings.evidence.modules import MAY_DIFFER, WHEN_NONE, WrapperFacts, are_harmless
from ddpcheck.gather.autograd.autograd_graph import gradient_nodes
from ddpcheck.gather.collectives.store_exchange import StoreExchange
from ddpcheck.gather.ddp.sharding import is_sharded, mesh_of, refuse_fsdp1, sharded_facts
from ddpcheck.gather.state.fingerprints import fingerprint, is_shard
from ddpcheck.gather.state.module_state import buffers_left_out, sharding_classes
from ddpcheck.gather.steps.gradient_distance import eps_of
from ddpcheck.worlds import rank as this_rank

_ATTRIBUTES = (
    *("find_unused_parameters", "broadcast_buffers", "static_graph", "gradient_as_bucket_view"),
    *("require_forward_param_sync", "skip_all_reduce_unused_params"),
)
_FOR_EVER = 86400.0  # the parent's clock is the one that counts


def living_wrappers() -> list[nn.parallel.DistributedDataParallel]:
    """Every `DistributedDataParallel` of this process; finding them takes a tenth of a second."""
    classes: list[type] = [nn.parallel.DistributedDataParallel]
    for one in classes:  # which grows
        classes += type.__subclasses__(one)
    known = set(classes)  # to ask issubclass of an abstract class takes microseconds, and isinstance wakes proxies
    return [thing for thing in gc.get_objects() if type(thing) in known]


def parameters_in_wrappers(*, but: nn.Module | None = None) -> set[int]:
    """The identities of the parameters in every `DistributedDataParallel` of this process, but in one."""
    return {id(p) for wrapper in living_wrappers() if wrapper is not but for p in wrapper.parameters()}


def _wrappers_in(module: nn.Module) -> list[nn.parallel.DistributedDataParallel]:
    return [part for part in module.modules() if isinstance(part, nn.parallel.DistributedDataParallel)]


def find_ddp(wrapped: nn.Module) -> nn.Module:
    """The one `DistributedDataParallel` inside what `wrap` returned (a compiled module, say), else `wrapped`."""
    inside = _wrappers_in(wrapped)
    return inside[0] if len(inside) == 1 else wrapped


def find_wrapper(module: nn.Module) -> nn.Module:
    """The wrapper that `module` is or holds: one `DistributedDataParallel`, or the outermost sharded module.

    Also the `DistributedDataParallel` that has been made around it.

    Raises:
        UsageError: There is none, or there are several.
    """
    found: list[Any] = [*_wrappers_in(module)] if isinstance(module, nn.Module) else []
    if not found:
        found = [wrapper for wrapper in living_wrappers() if vars(wrapper)["_modules"].get("module") is module]
    if not found and isinstance(module, nn.Module):
        found = outermost_sharded(module)
    if not found and isinstance(module, nn.Module):
        refuse_fsdp1(module, f"the {type(module).__name__} that is to be watched")
    if len(found) != 1:
        raise UsageError(
            "watch needs a DistributedDataParallel, or a module that holds one or is in one, or one that fully_shard "
            f"has sharded; there is {f'{len(found)} of them' if found else 'none'} for {type(module).__name__}"
        )
    return cast("nn.Module", found[0])


def outermost_sharded(module: nn.Module) -> list[nn.Module]:
    """The modules in `module` that `fully_shard` was called on and that are in no other such module."""
    if isinstance(module, sharding_classes()) and is_sharded(module):
        return [module]
    return [found for child in module.children() for found in outermost_sharded(child)]


def is_ddp(wrapper: nn.Module) -> bool:
    """Whether it is a `DistributedDataParallel`, and not a module that `fully_shard` has sharded."""
    return isinstance(wrapper, nn.parallel.DistributedDataParallel)


def inner_module(wrapper: nn.Module) -> nn.Module:
    """What is wrapped: of a sharded module, itself."""
    return wrapper.module if isinstance(wrapper, nn.parallel.DistributedDataParallel) else wrapper


def group_of(wrapper: nn.Module) -> Any:
    """The process group that averages gradients; `None` for the default one, or where a mesh has several."""
    if isinstance(wrapper, nn.parallel.DistributedDataParallel):
        return wrapper.process_group
    mesh = mesh_of(wrapper)
    return mesh.get_group() if mesh.ndim == 1 and mesh.size() < dist.get_world_size() else None


def ranks_of(wrapper: nn.Module) -> tuple[int, ...]:
    """The ranks whose gradients are averaged."""
    if isinstance(wrapper, nn.parallel.DistributedDataParallel):
        return tuple(dist.get_process_group_ranks(wrapper.process_group or dist.group.WORLD))
    return tuple(mesh_of(wrapper).mesh.flatten().tolist())


def joins(wrapper: nn.Module) -> bool:
    """Whether ranks without further batches may have left the loop (`Join`)."""
    return isinstance(wrapper, nn.parallel.DistributedDataParallel) and bool(wrapper._join_config.enable)


# Its options


def constructor_options(constructor: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, str]:
    """The arguments of a call of the DDP constructor in words, by name; empty where it cannot be called so."""
    try:
        given = inspect.signature(constructor).bind(*args, **kwargs)
    except TypeError:
        return {}  # the constructor will say what is wrong
    given.apply_defaults()
    module = given.arguments.get("module")
    names = {id(p): name for name, p in module.named_parameters()} if isinstance(module, nn.Module) else {}
    found = {}
    for key, value in given.arguments.items():
        if key == "self" or key in MAY_DIFFER:
            continue
        value = WHEN_NONE.get(key) if value is None else value
        if key == "delay_all_reduce_named_params" and isinstance(value, list | tuple):
            value = [name for name, _ in value]
        elif isinstance(value, torch.Tensor):
            value = names.get(id(value), "?")
        elif isinstance(value, dist.ProcessGroup):
            value = dist.get_process_group_ranks(value)
        found[key] = spelled_option(value)
    return found


def compare_options(mine: dict[str, str]) -> None:
    """Ask the other ranks, over the store, whether they construct the wrapper with the same `constructor_options`.

    Raises:
        OptionsDifferError: They do not, in a way that would make DDP stop, hang or pair up the wrong tensors.
    """
    alone = mine.get("process_group", "None") != "None"  # of another group: nobody else may come
    if dist.get_world_size() == 1 or alone or not mine:
        return
    this_rank.set_collective("DistributedDataParallel(...)")
    exchange = StoreExchange.over(None, "wrapper", _FOR_EVER)
    everyone = exchange.all_gather("detail", mine)
    this_rank.set_collective("")
    differing = {name for options in everyone for name in options if options.get(name) != everyone[0].get(name)}
    if differing and not are_harmless(differing, everyone):
        raise OptionsDifferError("DistributedDataParallel has different options on another rank", everyone)


def wrapper_attributes(wrapper: nn.Module) -> dict[str, str]:
    """Attributes that may be changed after construction and must be the same on every rank, as text."""
    found = {name: str(getattr(wrapper, name)) for name in _ATTRIBUTES if hasattr(wrapper, name)}
    found["communication hook"] = comm_hook_of(wrapper) or "None"
    for _hook, state in getattr(wrapper, "_comm_hooks", ()):
        found |= {f"communication hook {name}": value for name, value in plain_attributes(state).items()}
    return found


def plain_attributes(thing: object) -> dict[str, str]:
    """The numbers, flags and texts that an object of one of torch's classes holds, as text; of others nothing."""
    if not type(thing).__module__.startswith("torch."):
        return {}
    names = [*getattr(thing, "__slots__", ()), *getattr(thing, "__dict__", ())]
    values = {name: getattr(thing, name, None) for name in names}
    return {name: repr(value) for name, value in values.items() if isinstance(value, int | float | str)}


def comm_hook_of(wrapper: nn.Module) -> str:
    """The name of the communication hook of `wrapper` (the one of its own for mixed precision left out), or ""."""
    hooks = getattr(wrapper, "_comm_hooks", ())
    names = [getattr(hook, "__qualname__", type(hook).__qualname__) for hook, _state in hooks]
    return " and ".join(name for name in names if name != "_reducer_allreduce_and_upcast_hook")


_EXACT_HOOKS = (  # of torch.distributed.algorithms.ddp_comm_hooks, while they do not compress
    *("allreduce_hook", "noop_hook", "post_localSGD_hook", "powerSGD_hook", "batched_powerSGD_hook"),
)
_QUANTIZES = "quantization"
_LOST_ON_PURPOSE = 0.1
_LOST_FOR_A_TIME = 1e6  # what one step loses is added to the next one's gradients, which may be smaller by any factor


def hook_loss(wrapper: nn.Module | None) -> float:
    """Machine eps of what communication hooks compress to in the backward pass that has just ended.

    It is 0.1 for those that lose more on purpose. Of those that make up for it in later steps (PowerSGD with its error
    feedback), no single step tells anything. PowerSGD averages exactly until it has counted `start_powerSGD_iter`.
    """
    found = [0.0]
    for hook, state in getattr(wrapper, "_comm_hooks", ()):
        module, name = getattr(hook, "__module__", ""), getattr(hook, "__name__", "")
        begins = getattr(state, "start_powerSGD_iter", None)
        warms_up = begins is not None and getattr(state, "iter", 0) <= begins
        if getattr(state, "use_error_feedback", False) and not warms_up:
            found.append(_LOST_FOR_A_TIME)
        elif _QUANTIZES in f"{module}.{name}" or (begins is not None and not warms_up):
            found.append(_LOST_ON_PURPOSE)
        elif name not in _EXACT_HOOKS:
            found.append(eps_of(torch.bfloat16))
    return max(found)


def has_own_hook(wrapper: nn.Module | None) -> bool:
    """Whether a communication hook, or one that another of torch's wraps, is none of torch's."""
    return any(map(_is_own, (hook for hook, _state in getattr(wrapper, "_comm_hooks", ()))))


def _is_own(hook: object) -> bool:
    inside = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    own = not str(getattr(hook, "__module__", "")).startswith("torch.")
    return own or any(callable(one) and _is_own(one) for one in inside)


def are_apart(wrapper: nn.Module) -> bool:
    """Whether ranks may have left the loop (`joins`), or train apart on purpose (`trains_apart`)."""
    if isinstance(wrapper, nn.parallel.DistributedDataParallel) and wrapper._join_config.enable:  # one call a step
        return True
    return bool(getattr(wrapper, "_comm_hooks", ())) and trains_apart(wrapper)


def trains_apart(wrapper: nn.Module) -> bool:
    """Whether a communication hook is to average the next gradients over a part of the ranks: post-local SGD."""
    states = (state for _hook, state in getattr(wrapper, "_comm_hooks", ()))
    begins = ((state, getattr(state, "start_localSGD_iter", None)) for state in states)
    return any(begin is not None and getattr(state, "iter", 0) >= begin for state, begin in begins)


def spelled_option(value: object) -> str:
    """An option in words that are the same wherever it is the same.

    A tensor of several elements is no option, but what its owner works with: a buffer to fill, say.
    """
    if isinstance(value, torch.Tensor):
        return f"tensor {fingerprint(value):x}" if value.numel() == 1 else f"tensor of shape {tuple(value.shape)}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = type(value).__name__, {one.name: getattr(value, one.name, None) for one in dataclasses.fields(value)}
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {spelled_option(one)}' for key, one in value.items())}}}"
    if isinstance(value, tuple | list):
        spelled = ", ".join(map(spelled_option, value))
        return f"({spelled})" if isinstance(value, tuple) else f"[{spelled}]"
    plain = isinstance(value, int | float | str | bool | type(None) | torch.dtype)
    return repr(value) if plain else type(value).__name__


def facts_of(wrapper: nn.Module, names: Mapping[int, str]) -> WrapperFacts:
    """The arguments of a `DistributedDataParallel`, or of what stands in its place; `names` are by identity."""
    if not is_ddp(wrapper) and is_sharded(wrapper):
        return sharded_facts(wrapper, {})
    tables = [m for m in wrapper.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    delayed = {names[id(p)] for p in getattr(wrapper, "_delay_all_reduce_params", ()) if id(p) in names}
    ignored = frozenset(getattr(wrapper, "parameters_to_ignore", ())) - delayed
    return WrapperFacts(
        is_ddp=isinstance(wrapper, nn.parallel.DistributedDataParallel),
        find_unused_parameters=bool(getattr(wrapper, "find_unused_parameters", False)),
        static_graph=bool(getattr(wrapper, "static_graph", False)),
        ignored=ignored & set(names.values()),
        delayed=frozenset(delayed),
        comm_hook=comm_hook_of(wrapper),
        sparse=frozenset(names[id(table.weight)] for table in tables if id(table.weight) in names),
        not_saved=buffers_left_out(inner_module(wrapper)),
    )


def broadcasts_buffers(wrapper: nn.Module | None) -> bool:
    """Whether `wrapper` gives every rank rank 0's buffers before a forward."""
    will = getattr(wrapper, "will_sync_module_buffers", None)
    has_buffers = wrapper is not None and next(wrapper.buffers(), None) is not None
    return bool(getattr(wrapper, "broadcast_buffers", False)) and has_buffers and will is not None


# Its parameters


class SeenParameter(NamedTuple):
    """A parameter as DDP saw it: `node` is what DDP's hook sits on; a change of dtype or device makes a new one."""

    identity: int
    requires_grad: bool
    node: Any
    value: int = 0  # its fingerprint, where that is wanted

    @classmethod
    def of_all(cls, parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, SeenParameter]:
        """Those of a module as they are now, by name."""
        named = dict(parameters)
        nodes = gradient_nodes([*named.values()])
        return {n: cls(id(p), p.requires_grad, node) for (n, p), node in zip(named.items(), nodes, strict=True)}

    def change_to(self, now: SeenParameter) -> str:
        """How the parameter that has this name `now` differs, in a word; empty where it does not."""
        if self.identity != now.identity:
            return "replaced"
        if self.requires_grad != now.requires_grad:
            return "unfrozen" if now.requires_grad else "frozen"
        return "" if self.node is now.node else "cast or moved"


def changes(
    seen: Mapping[str, SeenParameter], module: nn.Module, parameters: Mapping[str, nn.Parameter] | None = None
) -> dict[str, str]:
    """Changes of the `parameters` of `module` since they were `seen`, in a word, by name."""
    now = SeenParameter.of_all((parameters or dict(module.named_parameters())).items())
    if now == seen:
        return {}
    still = {one.identity for one in seen.values()} & {one.identity for one in now.values()}
    changed = {}
    for name, one in {**seen, **now}.items():
        before, after = seen.get(name), now.get(name)
        if before is None or after is None:
            if one.identity not in still and not _is_in_dtensor(module, name):  # else it has another name now
                changed[name] = "added" if before is None else "removed"
        elif kind := before.change_to(after):
            changed[name] = kind
    return changed


def _is_in_dtensor(module: nn.Module, name: str) -> bool:
    """Whether DDP itself has a `DTensor` of a parameter in its place, from its first forward pass on.

    It does that where it is given a dimension of a device mesh, of which another one is for tensor parallelism.
    """
    place, _, own = name.rpartition(".")
    with contextlib.suppress(AttributeError):
        held = getattr(module.get_submodule(place), own)
        return is_shard(held) and not isinstance(held, nn.Parameter)
    return False


def changes_in_forward(seen: Mapping[str, SeenParameter], module: nn.Module) -> dict[str, tuple[str, str]]:
    """Changes of the parameters of `module` by a forward pass, in a word, and the names that now replace them, by name.

    One that has only moved to another name is still the one that DDP knows; `seen` has all of their names.
    """
    now = SeenParameter.of_all(nn.Module.named_parameters(module, remove_duplicate=False))
    there = {after.identity for after in now.values()}
    names = {before.identity: name for name, before in reversed(list(seen.items()))}
    changed = {}
    for name, before in seen.items():
        after = now.get(name)
        if after is None:
            if before.identity not in there and before.requires_grad and not _is_in_dtensor(module, name):
                changed[name] = ("removed", "")
        elif kind := before.change_to(after):
            known = names.get(after.identity, "")
            trained = before.requires_grad or after.requires_grad
            if kind != "replaced" or (trained and not (known and before.identity in there)):
                changed[name] = (kind, known if kind == "replaced" else "")
    return changed
