"""Parameters that are parts of a model of all ranks: experts of a mixture, or tables of embeddings, of each rank's own.

The loss has them only through an exchange, an all_to_all that autograd differentiates: with its part, a rank computes
for the samples of all ranks, and the gradient of the part is complete there.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import BackwardCFunction, Function, FunctionCtx
from torch.utils.weak import WeakIdKeyDictionary

from ddpcheck.findings.source_lines import code_of, frames_from, variables_of
from ddpcheck.gather.autograd.autograd_graph import walk_graph
from ddpcheck.gather.autograd.gradient_hooks import subclasses_of
from ddpcheck.gather.patching import Patch, patched

_MOST_FRAMES = 12
functions: set[type] = set()  # the nodes of functions that exchange
_patches: list[Patch] = []
_parts: Any = WeakIdKeyDictionary()


def running_functions(frame: FrameType | None) -> set[type]:
    """The classes of nodes of which one is that of the autograd function of Python that has called this frame.

    They are several where functions inherit a forward that is given no context.
    """
    for one in itertools.islice(frames_from(frame), _MOST_FRAMES):
        first = one.f_code.co_varnames[:1]
        context = variables_of(one).get(first[0]) if first else None
        if isinstance(context, FunctionCtx | BackwardCFunction):
            return {type(context)}
        if one.f_code.co_name == "forward" and (found := _without_context(one.f_code)):
            return found
    return set()


def _without_context(forward: CodeType) -> set[type]:
    """The classes of nodes of the functions with this forward, the context of which is given to `setup_context`."""
    return {
        one._backward_cls
        for one in subclasses_of(Function)
        if one.setup_context is not Function.setup_context and code_of(one.forward) is forward
    }


def follow_exchanges() -> None:
    """Know the functions that exchange from now on; may be called again."""
    if not _patches:
        _patches.extend(patched(dist, name, _note) for name in ("all_to_all", "all_to_all_single"))


def _note(*_arguments: Any, **_named: Any) -> None:
    functions.update(running_functions(sys._getframe(1)))


def note_parts(roots: Iterable[torch.Tensor], asked: Callable[[torch.Tensor], bool]) -> None:
    """Know the parts, of which graphs are made, among the parameters that are `asked` for."""
    _parts.update((leaf, True) for leaf in _parts_behind(list(roots)) if asked(leaf))


def is_part(parameter: torch.Tensor) -> bool:
    """Whether a parameter is known as a part."""
    return parameter in _parts


def part_of_gradient(gradient: torch.Tensor) -> torch.Tensor | None:
    """The part that a tensor is the gradient of."""
    return next((part for part in list(_parts) if part.grad is gradient), None) if _parts else None


def has_parts() -> bool:
    """Whether there are any."""
    return bool(_parts)


def _parts_behind(roots: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The leaves of graphs to which no way leads but through an exchange."""
    before = walk_graph(roots, not_behind=_is_exchange)
    if before.complete and before.ends:
        reached = {id(leaf) for leaf in before.leaves}
        yield from (leaf for leaf in walk_graph((), nodes=before.ends).leaves if id(leaf) not in reached)


def _is_exchange(node: Any) -> bool:
    return type(node) in functions or "alltoall" in node.name().lower().replace("_", "")
