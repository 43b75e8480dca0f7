"""The options of the wrapper on this rank, compared with the other ranks' before the constructor hangs on them."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.findings.ddp_options import MAY_DIFFER, WHEN_NONE, are_harmless
from ddpcheck.findings.errors import OptionsDifferError
from ddpcheck.gather.collectives.store_exchange import StoreExchange
from ddpcheck.gather.state.module_description import fingerprint
from ddpcheck.gather.steps.gradient_distance import eps_of
from ddpcheck.worlds import rank as this_rank

_ATTRIBUTES = (
    *("find_unused_parameters", "broadcast_buffers", "static_graph", "gradient_as_bucket_view"),
    *("require_forward_param_sync", "skip_all_reduce_unused_params"),
)
_FOR_EVER = 86400.0  # the parent's clock is the one that counts


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
    everyone = [pickle.loads(data) for data in exchange.all_gather("detail", pickle.dumps(mine))]
    this_rank.set_collective("")
    differing = {name for options in everyone for name in options if options.get(name) != everyone[0].get(name)}
    if differing and not are_harmless(differing, everyone):
        raise OptionsDifferError("DistributedDataParallel is constructed with other options on another rank", everyone)


def wrapper_attributes(wrapper: nn.Module) -> dict[str, str]:
    """Attributes that may be changed after construction and must be the same on every rank, as text."""
    found = {name: str(getattr(wrapper, name)) for name in _ATTRIBUTES if hasattr(wrapper, name)}
    return {**found, "communication hook": comm_hook_of(wrapper) or "None"}


def comm_hook_of(wrapper: nn.Module) -> str:
    """The name of the communication hook of `wrapper` (the one of its own for mixed precision left out), or ""."""
    hooks = getattr(wrapper, "_comm_hooks", ())
    names = [getattr(hook, "__qualname__", type(hook).__qualname__) for hook, _state in hooks]
    return " and ".join(name for name in names if name != "_reducer_allreduce_and_upcast_hook")


_EXACT_HOOKS = ("allreduce_hook", "noop_hook")  # of torch.distributed.algorithms.ddp_comm_hooks
_LOSSY_HOOKS = ("powerSGD", "quantization", "post_localSGD")
_LOST_ON_PURPOSE = 0.1


def hook_loss(wrapper: nn.Module | None) -> float:
    """Machine eps of what communication hooks may compress to; 0.1 for those that lose more on purpose (PowerSGD)."""
    found = [0.0]
    for hook, _state in getattr(wrapper, "_comm_hooks", ()):
        module, name = getattr(hook, "__module__", ""), getattr(hook, "__name__", "")
        if any(word in f"{module}.{name}" for word in _LOSSY_HOOKS):
            found.append(_LOST_ON_PURPOSE)
        elif name not in _EXACT_HOOKS:
            found.append(eps_of(torch.bfloat16))
    return max(found)


def spelled_option(value: object) -> str:
    """An option in words that are the same wherever it is the same."""
    if isinstance(value, torch.Tensor):
        return f"tensor {fingerprint(value):x}"
    if isinstance(value, int | float | str | bool | type(None) | tuple | list | dict | torch.dtype):
        return repr(value)
    return repr(value) if dataclasses.is_dataclass(value) else type(value).__name__
