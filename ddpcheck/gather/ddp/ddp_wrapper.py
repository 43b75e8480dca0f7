"""DDP's constructor arguments, and which parameters changed since."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.evidence.modules import WrapperFacts
from ddpcheck.gather.autograd.autograd_graph import gradient_node
from ddpcheck.gather.ddp.ddp_constructor import comm_hook_of


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


def find_wrapper(module: nn.Module) -> nn.parallel.DistributedDataParallel:
    """The one `DistributedDataParallel` that `module` is or holds, or that has been made around it.

    Raises:
        UsageError: There is none, or there are several.
    """
    found = _wrappers_in(module) if isinstance(module, nn.Module) else []
    if not found:
        found = [wrapper for wrapper in living_wrappers() if vars(wrapper)["_modules"].get("module") is module]
    if len(found) != 1:
        many = f"{len(found)} of them" if found else "none"
        raise UsageError(
            "watch needs a DistributedDataParallel, or a module that holds one or is in one; there is "
            f"{many} for {type(module).__name__}"
        )
    return found[0]


def facts_of(wrapper: nn.Module, names: Mapping[int, str]) -> WrapperFacts:
    """The arguments of a `DistributedDataParallel`, or of what stands in its place; `names` are by identity."""
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
    )


def broadcasts_buffers(wrapper: nn.Module | None) -> bool:
    """Whether `wrapper` gives every rank rank 0's buffers before a forward."""
    will = getattr(wrapper, "will_sync_module_buffers", None)
    has_buffers = wrapper is not None and next(wrapper.buffers(), None) is not None
    return bool(getattr(wrapper, "broadcast_buffers", False)) and has_buffers and will is not None


@dataclass(frozen=True, slots=True)
class SeenParameter:
    """A parameter as DDP saw it: `node` is what DDP's hook sits on; a change of dtype or device makes a new one."""

    identity: int
    requires_grad: bool
    node: Any
    value: int = 0

    @classmethod
    def of(cls, parameter: nn.Parameter, value: int = 0) -> SeenParameter:
        """The parameter as it is now; `value` is its fingerprint, where that is wanted."""
        node = gradient_node(parameter) if parameter.requires_grad else None
        return cls(id(parameter), parameter.requires_grad, node, value)

    def change_to(self, now: SeenParameter) -> str:
        """How the parameter that has this name `now` differs, in a word; empty where it does not."""
        if self.identity != now.identity:
            return "replaced"
        if self.requires_grad != now.requires_grad:
            return "unfrozen" if now.requires_grad else "frozen"
        return "" if self.node is now.node else "cast or moved"


def changes(seen: Mapping[str, SeenParameter], module: nn.Module) -> dict[str, str]:
    """Changes of the parameters of `module` since they were `seen`, in a word, by name."""
    now = {name: SeenParameter.of(p) for name, p in module.named_parameters()}
    then, left = {one.identity for one in seen.values()}, {one.identity for one in now.values()}
    changed = {}
    for name in dict.fromkeys((*seen, *now)):
        before, after = seen.get(name), now.get(name)
        if (before is None and after is not None and after.identity in then) or (
            after is None and before is not None and before.identity in left
        ):
            continue  # it has another name now
        if before is None or after is None:
            changed[name] = "added" if before is None else "removed"
        elif kind := before.change_to(after):
            changed[name] = kind
    return changed


def changes_in_forward(seen: Mapping[str, SeenParameter], module: nn.Module) -> dict[str, tuple[str, str]]:
    """Changes of the parameters of `module` by a forward pass, in a word, and the names that now replace them, by name.

    One that has only moved to another name is still the one that DDP knows; `seen` has all of their names.
    """
    every = nn.Module.named_parameters(module, remove_duplicate=False)
    now = {name: SeenParameter.of(parameter) for name, parameter in every}
    there = {after.identity for after in now.values()}
    names = {before.identity: name for name, before in reversed(list(seen.items()))}
    changed = {}
    for name, before in seen.items():
        after = now.get(name)
        if after is None:
            if before.identity not in there and before.requires_grad:
                changed[name] = ("removed", "")
        elif kind := before.change_to(after):
            known = names.get(after.identity, "")
            trained = before.requires_grad or after.requires_grad
            if kind != "replaced" or (trained and not (known and before.identity in there)):
                changed[name] = (kind, known if kind == "replaced" else "")
    return changed
