"""Rank-local parts of a model: experts of a mixture, or sharded embedding tables.

Such a parameter contributes to the loss only through a differentiable all_to_all: a rank computes its part for the
samples of all ranks, so the part's gradient is complete on that rank.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import BackwardCFunction, Function, FunctionCtx
from torch.utils.weak import WeakIdKeyDictionary

from ddpcheck.findings.source_lines import code_of, frames_from, variables_of
from ddpcheck.gather.autograd.autograd_graph import LossGraph
from ddpcheck.gather.autograd.gradient_hooks import subclasses_of
from ddpcheck.gather.patching import Patch, patched

_MOST_FRAMES = 12
functions: set[type] = set()  # node classes of autograd Functions that call all_to_all
_patches: list[Patch] = []
_parts: Any = WeakIdKeyDictionary()


def running_functions(frame: FrameType | None) -> set[type]:
    """Find the autograd Function whose `forward` runs in `frame` or its callers.

    Returns the node class of the Function, or an empty set. Functions that inherit one `forward` without `ctx` argument
    cannot be told apart: all their classes are returned.
    """
    for caller in itertools.islice(frames_from(frame), _MOST_FRAMES):
        first = caller.f_code.co_varnames[:1]
        context = variables_of(caller).get(first[0]) if first else None
        if isinstance(context, FunctionCtx | BackwardCFunction):
            return {type(context)}
        if caller.f_code.co_name == "forward" and (classes := _classes_with_setup_context(caller.f_code)):
            return classes
    return set()


def _classes_with_setup_context(forward: CodeType) -> set[type]:
    """Return node classes of Functions that have the code `forward` and define `setup_context`."""
    return {
        cls._backward_cls
        for cls in subclasses_of(Function)
        if cls.setup_context is not Function.setup_context and code_of(cls.forward) is forward
    }


def record_all_to_all_functions() -> None:
    """Start recording which autograd Functions call all_to_all, for `record_rank_local`; idempotent."""
    if not _patches:
        _patches.extend(patched(dist, name, _record_function) for name in ("all_to_all", "all_to_all_single"))


def _record_function(*_arguments: Any, **_named: Any) -> None:
    functions.update(running_functions(sys._getframe(1)))


def record_rank_local(roots: Iterable[torch.Tensor], is_recorded: Callable[[torch.Tensor], bool]) -> None:
    """Record leaves that the graph of `roots` reaches only through all_to_all.

    Such a leaf, e.g. a parameter of an expert, is rank-local: all_to_all sends the samples of all ranks to this rank,
    so the gradient needs no averaging. Only leaves for which `is_recorded(leaf)` is True are recorded.
    """
    before = LossGraph(roots, is_end=_is_exchange)
    if before.is_complete and before.ends:
        reached = {id(leaf) for leaf in before.leaves}
        parts = (leaf for leaf in LossGraph(before.ends).leaves if id(leaf) not in reached)
        _parts.update((leaf, True) for leaf in parts if is_recorded(leaf))


def is_rank_local(parameter: torch.Tensor) -> bool:
    """Return True if `record_rank_local` recorded a parameter as rank-local."""
    return parameter in _parts


def param_of_gradient(gradient: torch.Tensor) -> torch.Tensor | None:
    """Return the rank-local parameter whose `.grad` is `gradient`, or None."""
    return next((part for part in list(_parts) if part.grad is gradient), None) if _parts else None


def has_rank_local_params() -> bool:
    """Return True if any rank-local parameter was recorded."""
    return bool(_parts)


def _is_exchange(node: Any) -> bool:
    return type(node) in functions or "alltoall" in node.name().lower().replace("_", "")
