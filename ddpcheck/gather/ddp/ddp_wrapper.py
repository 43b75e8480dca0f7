"""Find the DDP wrapper, compare its options across ranks, and detect parameter changes."""

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
from ddpcheck.findings.evidence.modules import MAY_DIFFER, WHEN_NONE, WrapperFacts, are_harmless_differences
from ddpcheck.gather.autograd.autograd_graph import gradient_nodes
from ddpcheck.gather.autograd.gradient_hooks import subclasses_of
from ddpcheck.gather.collectives.store_exchange import StoreExchange
from ddpcheck.gather.ddp.sharding import is_sharded, mesh_of, refuse_fsdp1, sharded_facts
from ddpcheck.gather.state.fingerprints import fingerprint, is_dtensor
from ddpcheck.gather.state.module_state import non_persistent_buffers, sharding_classes
from ddpcheck.gather.steps.gradient_distance import eps_of
from ddpcheck.worlds import rank as this_rank

_ATTRIBUTES = (
    *("find_unused_parameters", "broadcast_buffers", "static_graph", "gradient_as_bucket_view"),
    *("require_forward_param_sync", "skip_all_reduce_unused_params"),
)
_ONE_DAY = 86400.0  # seconds; the parent process enforces the timeout


def live_wrappers() -> list[nn.parallel.DistributedDataParallel]:
    """Return every `DistributedDataParallel` of this process (takes about 0.1 s)."""
    ddp = nn.parallel.DistributedDataParallel
    classes = {ddp, *subclasses_of(ddp)}  # faster than issubclass on ABCs, and isinstance would trigger proxies
    return [obj for obj in gc.get_objects() if type(obj) in classes]


def parameters_in_wrappers(*, but: nn.Module | None = None) -> set[int]:
    """Return the ids of parameters in every `DistributedDataParallel` except `but`."""
    return {id(p) for wrapper in live_wrappers() if wrapper is not but for p in wrapper.parameters()}


def _wrappers_in(module: nn.Module) -> list[nn.parallel.DistributedDataParallel]:
    return [part for part in module.modules() if isinstance(part, nn.parallel.DistributedDataParallel)]


def find_ddp(wrapped: nn.Module) -> nn.Module:
    """Return the only `DistributedDataParallel` in `wrapped`, or `wrapped` if none or several."""
    wrappers = _wrappers_in(wrapped)
    return wrappers[0] if len(wrappers) == 1 else wrapped


def find_wrapper(module: nn.Module) -> nn.Module:
    """Return the only DDP wrapper in or around `module`, or the outermost sharded module.

    Raises `UsageError` if `module` has no such wrapper, or several.
    """
    wrappers: list[Any] = [*_wrappers_in(module)] if isinstance(module, nn.Module) else []
    if not wrappers:
        wrappers = [wrapper for wrapper in live_wrappers() if vars(wrapper)["_modules"].get("module") is module]
    if not wrappers and isinstance(module, nn.Module) and not (wrappers := outermost_sharded(module)):
        refuse_fsdp1(module, f"the {type(module).__name__} that is to be watched")
    if len(wrappers) != 1:
        raise UsageError(
            "watch needs a DistributedDataParallel, or a module that holds one or is in one, or one that fully_shard "
            f"has sharded; there is {f'{len(wrappers)} of them' if wrappers else 'none'} for {type(module).__name__}"
        )
    return cast("nn.Module", wrappers[0])


def outermost_sharded(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules in `module` that `fully_shard` was called on."""
    if isinstance(module, sharding_classes()) and is_sharded(module):
        return [module]
    return [wrapper for child in module.children() for wrapper in outermost_sharded(child)]


def is_ddp(wrapper: nn.Module) -> bool:
    """Return True for a `DistributedDataParallel`, False for a `fully_shard` module."""
    return isinstance(wrapper, nn.parallel.DistributedDataParallel)


def inner_module(wrapper: nn.Module) -> nn.Module:
    """Return the module inside a DDP wrapper; return a sharded module unchanged."""
    return wrapper.module if isinstance(wrapper, nn.parallel.DistributedDataParallel) else wrapper


def group_of(wrapper: nn.Module) -> Any:
    """Return the process group that averages gradients; None for the default or several groups."""
    if isinstance(wrapper, nn.parallel.DistributedDataParallel):
        return wrapper.process_group
    mesh = mesh_of(wrapper)
    return mesh.get_group() if mesh.ndim == 1 and mesh.size() < dist.get_world_size() else None


def ranks_of(wrapper: nn.Module) -> tuple[int, ...]:
    """Return the ranks over which gradients are averaged."""
    if isinstance(wrapper, nn.parallel.DistributedDataParallel):
        return tuple(dist.get_process_group_ranks(wrapper.process_group or dist.group.WORLD))
    return tuple(mesh_of(wrapper).mesh.flatten().tolist())


def uses_join(wrapper: nn.Module) -> bool:
    """Return True in DDP's `Join` context, where ranks may run out of batches early."""
    return isinstance(wrapper, nn.parallel.DistributedDataParallel) and bool(wrapper._join_config.enable)


# Options


def constructor_options(constructor: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, str]:
    """Return DDP constructor arguments as text; empty if the constructor will reject them."""
    try:
        bound = inspect.signature(constructor).bind(*args, **kwargs)
    except TypeError:
        return {}  # the constructor will raise
    bound.apply_defaults()
    module = bound.arguments.get("module")
    names = {id(p): name for name, p in module.named_parameters()} if isinstance(module, nn.Module) else {}
    options = {}
    for key, value in bound.arguments.items():
        if key == "self" or key in MAY_DIFFER:
            continue
        value = WHEN_NONE.get(key) if value is None else value
        if key == "delay_all_reduce_named_params" and isinstance(value, list | tuple):
            value = [name for name, _ in value]
        elif isinstance(value, torch.Tensor):
            value = names.get(id(value), "?")
        elif isinstance(value, dist.ProcessGroup):
            value = dist.get_process_group_ranks(value)
        options[key] = option_text(value)
    return options


def compare_options(local_options: dict[str, str]) -> None:
    """Compare `constructor_options` with the other ranks over the store.

    Raises `OptionsDifferError` if a difference would make DDP raise, hang or mismatch tensors.
    """
    is_custom = local_options.get("process_group", "None") != "None"  # custom group: other ranks may not take part
    if dist.get_world_size() == 1 or is_custom or not local_options:
        return
    this_rank.set_collective("DistributedDataParallel(...)")
    exchange = StoreExchange.next_exchange(None, "wrapper", _ONE_DAY)
    all_options = exchange.all_gather("detail", local_options)
    this_rank.set_collective("")
    mismatches = {name for options in all_options for name in options if options.get(name) != all_options[0].get(name)}
    if mismatches and not are_harmless_differences(mismatches, all_options):
        raise OptionsDifferError("DistributedDataParallel has different options on another rank", all_options)


def wrapper_attributes(wrapper: nn.Module) -> dict[str, str]:
    """Return changeable attributes of the wrapper that must match on all ranks, as text."""
    attributes = {name: str(getattr(wrapper, name)) for name in _ATTRIBUTES if hasattr(wrapper, name)}
    attributes["communication hook"] = comm_hook_of(wrapper) or "None"
    for _hook, state in getattr(wrapper, "_comm_hooks", ()):
        attributes |= {f"communication hook {name}": value for name, value in plain_attributes(state).items()}
    return attributes


def plain_attributes(value: object) -> dict[str, str]:
    """Return number and string attributes of torch objects as text; {} for other objects."""
    if not type(value).__module__.startswith("torch."):
        return {}
    names = [*getattr(value, "__slots__", ()), *getattr(value, "__dict__", ())]
    values = {name: getattr(value, name, None) for name in names}
    return {name: repr(item) for name, item in values.items() if isinstance(item, int | float | str)}


def comm_hook_of(wrapper: nn.Module) -> str:
    """Return the names of communication hooks except torch's mixed precision hook, or ''."""
    hooks = getattr(wrapper, "_comm_hooks", ())
    names = [getattr(hook, "__qualname__", type(hook).__qualname__) for hook, _state in hooks]
    return " and ".join(name for name in names if name != "_reducer_allreduce_and_upcast_hook")


_EXACT_HOOKS = (  # exact unless compressing; from torch.distributed.algorithms.ddp_comm_hooks
    *("allreduce_hook", "noop_hook", "post_localSGD_hook", "powerSGD_hook", "batched_powerSGD_hook"),
)
_QUANTIZES = "quantization"
_APPROXIMATION_ERROR = 0.1
_FEEDBACK_ERROR = 1e6  # error feedback adds what a step lost to the next gradients, however small these are


def hook_error(wrapper: nn.Module | None) -> float:
    """Return the largest relative error of communication hooks in the last backward pass.

    The error is 0 for torch's exact hooks (PowerSGD is exact until `start_powerSGD_iter`), 0.1 for hooks that quantize
    or approximate, 1e6 for hooks with error feedback (one step cannot be judged), and bfloat16 eps for other hooks.
    """
    errors = [0.0]
    for hook, state in getattr(wrapper, "_comm_hooks", ()):
        module, name = getattr(hook, "__module__", ""), getattr(hook, "__name__", "")
        start_iter = getattr(state, "start_powerSGD_iter", None)
        warms_up = start_iter is not None and getattr(state, "iter", 0) <= start_iter
        if getattr(state, "use_error_feedback", False) and not warms_up:
            errors.append(_FEEDBACK_ERROR)
        elif _QUANTIZES in f"{module}.{name}" or (start_iter is not None and not warms_up):
            errors.append(_APPROXIMATION_ERROR)
        elif name not in _EXACT_HOOKS:
            errors.append(eps_of(torch.bfloat16))
    return max(errors)


def has_user_hook(wrapper: nn.Module | None) -> bool:
    """Return True if a communication hook, or a hook inside it, is user code."""
    return any(map(_is_user_hook, (hook for hook, _state in getattr(wrapper, "_comm_hooks", ()))))


def _is_user_hook(hook: object) -> bool:
    contents = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    is_user = not str(getattr(hook, "__module__", "")).startswith("torch.")
    return is_user or any(callable(value) and _is_user_hook(value) for value in contents)


def ranks_may_diverge(wrapper: nn.Module) -> bool:
    """Return True if ranks may differ legitimately: `uses_join` or `uses_local_sgd`."""
    if isinstance(wrapper, nn.parallel.DistributedDataParallel) and wrapper._join_config.enable:  # saves one call
        return True
    return bool(getattr(wrapper, "_comm_hooks", ())) and uses_local_sgd(wrapper)


def uses_local_sgd(wrapper: nn.Module) -> bool:
    """Return True if the post-local SGD hook averages over a subset of ranks now."""
    states = (state for _hook, state in getattr(wrapper, "_comm_hooks", ()))
    starts = ((state, getattr(state, "start_localSGD_iter", None)) for state in states)
    return any(start is not None and getattr(state, "iter", 0) >= start for state, start in starts)


def option_text(value: object) -> str:
    """Return an option as text, equal on all ranks for equal options.

    A tensor of several elements is described by shape only: it is working memory, e.g. a buffer.
    """
    if isinstance(value, torch.Tensor):
        return f"tensor {fingerprint(value):x}" if value.numel() == 1 else f"tensor of shape {tuple(value.shape)}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = type(value).__name__, {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {option_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, tuple | list):
        spelled = ", ".join(map(option_text, value))
        return f"({spelled})" if isinstance(value, tuple) else f"[{spelled}]"
    plain = isinstance(value, int | float | str | bool | type(None) | torch.dtype)
    return repr(value) if plain else type(value).__name__


def optimizer_params(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_options(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, str]:
    """Return an optimizer's class, groups and options as text; `names`: parameter names by `id`."""
    kind = type(optimizer)
    options = {"class": kind.__name__, "module": kind.__module__, "groups": str(len(optimizer.param_groups))}
    for index, group in enumerate(optimizer.param_groups):
        param_names = [names.get(id(p), "?") for p in group["params"]]
        options[f"group {index} parameters"] = ", ".join(sorted(param_names))
        options[f"group {index} order"] = ", ".join(param_names)
        options.update({f"group {index} {key}": option_text(v) for key, v in group.items() if key != "params"})
    averager = plain_attributes(getattr(optimizer, "averager", None))  # of PostLocalSGDOptimizer
    return {**options, **{f"averager {name}": value for name, value in averager.items()}}


def wrapper_facts(wrapper: nn.Module, names: Mapping[int, str]) -> WrapperFacts:
    """Return the facts of a DDP or sharded module; `names`: parameter names by `id`."""
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
        not_saved=non_persistent_buffers(inner_module(wrapper)),
    )


def broadcasts_buffers(wrapper: nn.Module | None) -> bool:
    """Return True if `wrapper` broadcasts buffers of rank 0 before a forward."""
    can_sync = getattr(wrapper, "will_sync_module_buffers", None)
    has_buffers = wrapper is not None and next(wrapper.buffers(), None) is not None
    return bool(getattr(wrapper, "broadcast_buffers", False)) and has_buffers and can_sync is not None


# Parameters


class SeenParameter(NamedTuple):
    """State of a parameter at construction of DDP, or later for comparison."""

    identity: int
    requires_grad: bool
    node: Any  # its AccumulateGrad node, on which DDP has a hook; a change of dtype or device replaces it
    value: int = 0  # fingerprint, or 0 if not requested

    @classmethod
    def current_params(cls, parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, SeenParameter]:
        """Return the current state of `parameters` by name."""
        named = dict(parameters)
        nodes = gradient_nodes([*named.values()])
        return {n: cls(id(p), p.requires_grad, node) for (n, p), node in zip(named.items(), nodes, strict=True)}

    def change_to(self, now: SeenParameter) -> str:
        """Return "replaced", "frozen", "unfrozen" or "cast or moved"; '' if `now` is equal."""
        if self.identity != now.identity:
            return "replaced"
        if self.requires_grad != now.requires_grad:
            return "unfrozen" if now.requires_grad else "frozen"
        return "" if self.node is now.node else "cast or moved"


def parameter_changes(
    seen: Mapping[str, SeenParameter], module: nn.Module, parameters: Mapping[str, nn.Parameter] | None = None
) -> dict[str, str]:
    """Return the kind of change of each changed parameter since `seen`, by name."""
    now = SeenParameter.current_params((parameters or dict(module.named_parameters())).items())
    if now == seen:
        return {}
    common = {param.identity for param in seen.values()} & {param.identity for param in now.values()}
    changed = {}
    for name, param in {**seen, **now}.items():
        before, after = seen.get(name), now.get(name)
        if before is None or after is None:
            if param.identity not in common and not _is_dtensor_now(module, name):  # otherwise only renamed
                changed[name] = "added" if before is None else "removed"
        elif kind := before.change_to(after):
            changed[name] = kind
    return changed


def _is_dtensor_now(module: nn.Module, name: str) -> bool:
    """Return True if DDP's first forward replaced a parameter by a `DTensor`.

    DDP replaces parameters under tensor parallelism, if the `device_mesh` of DDP is one dimension of a larger mesh.
    """
    path, _, attribute = name.rpartition(".")
    with contextlib.suppress(AttributeError):
        value = getattr(module.get_submodule(path), attribute)
        return is_dtensor(value) and not isinstance(value, nn.Parameter)
    return False


def changes_in_forward(seen: Mapping[str, SeenParameter], module: nn.Module) -> dict[str, tuple[str, str]]:
    """Return parameters that forward changed: name -> (kind, name of the replacement, or '').

    The replacement has a name if it is a parameter in `seen`, which has every name of tied parameters. A parameter that
    only moved to another name is not changed for DDP.
    """
    now = SeenParameter.current_params(nn.Module.named_parameters(module, remove_duplicate=False))
    identities = {after.identity for after in now.values()}
    names = {before.identity: name for name, before in reversed(list(seen.items()))}
    changed = {}
    for name, before in seen.items():
        after = now.get(name)
        if after is None:
            if before.identity not in identities and before.requires_grad and not _is_dtensor_now(module, name):
                changed[name] = ("removed", "")
        elif kind := before.change_to(after):
            known = names.get(after.identity, "")
            trained = before.requires_grad or after.requires_grad
            if kind != "replaced" or (trained and not (known and before.identity in identities)):
                changed[name] = (kind, known if kind == "replaced" else "")
    return changed
