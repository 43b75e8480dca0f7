"""The wrapper that a watch attaches to: found in or around a module, and described for judges."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.wording import Names
from ddpcheck.gather.autograd.autograd_graph import all_names
from ddpcheck.gather.ddp.ddp_wrapper import broadcasts_buffers, facts_of, living_wrappers
from ddpcheck.monitor.judging import WatchContext


def find_wrapper(module: nn.Module) -> nn.parallel.DistributedDataParallel:
    """The one `DistributedDataParallel` that `module` is or holds, or that has been made around it.

    Raises:
        UsageError: There is none, or there are several.
    """
    ddp = nn.parallel.DistributedDataParallel
    found = [part for part in module.modules() if isinstance(part, ddp)] if isinstance(module, nn.Module) else []
    if not found:
        found = [wrapper for wrapper in living_wrappers() if vars(wrapper)["_modules"].get("module") is module]
    if len(found) != 1:
        many = f"{len(found)} of them" if found else "none"
        raise UsageError(
            "watch needs a DistributedDataParallel, or a module that holds one or is in one; there is "
            f"{many} for {type(module).__name__}"
        )
    return found[0]


def context_of(wrapper: nn.parallel.DistributedDataParallel, trainable: Sequence[str]) -> WatchContext:
    """The context of a watch: options of the wrapper, and names of its parameters; `trainable`: those that it syncs."""
    module = wrapper.module
    names = {id(p): name for name, p in module.named_parameters()}
    aliases = {of_one[0]: of_one for of_one in all_names(module).values() if len(of_one) > 1}
    return WatchContext(
        names=Names(aliases),
        wrapper=facts_of(wrapper, names),
        trainable=tuple(trainable),
        broadcasts_buffers=broadcasts_buffers(wrapper),
        wrapper_class=type(wrapper).__name__,
    )
