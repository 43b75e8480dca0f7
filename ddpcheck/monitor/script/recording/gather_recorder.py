"""Features that a script gathers from all ranks by a collective without gradient, and their use in the loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddpcheck.findings.evidence.gathers import GatheredConstant, OwnPartPutBack
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.exception_origin import passes_on
from ddpcheck.findings.report import Location
from ddpcheck.gather.steps.training_step import row_fingerprints
from ddpcheck.monitor.module_hooks import guarded
from ddpcheck.monitor.rank_report import is_probed

_MOST_NODES = 256
_MOST_GATHERED = 64  # tensors in a step
_JOINS = ("CatBackward", "StackBackward")
_MOST_ELEMENTS = 1 << 22
_INPUTS = {"all_gather": "tensor", "all_gather_into_tensor": "input_tensor"}
_FACTORS = ("self", "mat2", "mat1")  # that products of matrices save, with their sizes


@dataclass(slots=True)
class _Gathered:
    operation: str
    location: Location | None
    shape: tuple[int, int]
    rows: set[int]  # fingerprints of the rank's own
    node: Any  # of the graph, which made them


@dataclass(slots=True)
class _Parts:
    count: int  # of ranks
    own: int
    shape: tuple[int, ...]  # of all together


class GatherRecorder:
    """Looks at what has been gathered in some of the optimizer steps, and at the losses of these; tells `sink`."""

    def __init__(self, sink: Callable[[GatheredConstant | OwnPartPutBack], object], steps: Callable[[], int]) -> None:
        """Begin; `steps` says how often optimizers have stepped."""
        self._sink = sink
        self._steps = steps
        self._gathered: list[_Gathered] = []
        self._parts: list[_Parts] = []
        self._step = -1  # in which that was
        module: Any = torch.autograd
        original, look = module.backward, guarded(self._look)

        @functools.wraps(original)
        @passes_on
        def backward(tensors: Any, *arguments: Any, **named: Any) -> None:
            look(tensors)
            original(tensors, *arguments, **named)

        module.backward = backward

    def note_collective(self, call: Call, given: Mapping[str, Any]) -> None:
        """A collective is about to be made."""
        step = self._steps()
        if self._step != step:
            self._gathered, self._parts, self._step = [], [], step
        tensor = given.get(_INPUTS.get(call.operation, ""))
        if not is_probed(step) or call.differentiable or not isinstance(tensor, torch.Tensor) or not tensor.dim():
            return
        group = given.get("group")
        if tensor.is_floating_point() and len(self._parts) < _MOST_GATHERED:
            count = dist.get_world_size(group)
            self._parts.append(_Parts(count, dist.get_rank(group), (len(tensor) * count, *tensor.shape[1:])))
        if tensor.dim() != 2:
            return
        if tensor.grad_fn is not None and tensor.is_floating_point() and tensor.numel() <= _MOST_ELEMENTS:
            shape = len(tensor) * dist.get_world_size(group), tensor.shape[1]
            where = Location.parse(call.location)
            self._gathered.append(_Gathered(call.operation, where, shape, _rows(tensor), tensor.grad_fn))

    def _look(self, losses: Any) -> None:
        (gathered, self._gathered), (parts, self._parts) = (self._gathered, []), (self._parts, [])
        if not parts or self._step != self._steps() or not isinstance(losses, torch.Tensor):
            return
        ends = {one.node for one in gathered}
        if any(_puts_back(node, parts, ends) for node in _nodes(losses.grad_fn, ends)):
            self._sink(OwnPartPutBack(self._step))
        for factor in _factors(losses.grad_fn, gathered):
            for one in gathered:
                if tuple(factor.shape) == one.shape and one.rows <= _rows(factor):
                    self._sink(GatheredConstant(self._step, one.operation, one.location, one.shape[0]))
                    return


def _factors(root: Any, gathered: list[_Gathered]) -> Iterator[torch.Tensor]:
    """The constants of such a shape, in rows, with which a loss multiplies what it is made of."""
    shapes = {one.shape for one in gathered}
    for node in _nodes(root, {one.node for one in gathered}):
        for name in _FACTORS:
            # The size is asked for first: to ask for a tensor calls what a checkpoint has it packed by.
            size = tuple(getattr(node, f"_saved_{name}_sym_sizes", None) or ())
            if size in shapes or size[::-1] in shapes:
                factor = getattr(node, f"_saved_{name}")
                if isinstance(factor, torch.Tensor) and not factor.requires_grad:
                    yield factor if size in shapes else factor.T


def _puts_back(node: Any, parts: list[_Parts], ends: set[Any]) -> bool:
    """Whether a node joins what was gathered, and the rank's own part of it alone carries a gradient."""
    following = [one for one, _ in node.next_functions]
    if isinstance(node, torch.autograd.function.BackwardCFunction):  # which a program has written for that
        return not ends.isdisjoint(following)
    if node.name().startswith(_JOINS):
        there = [number for number, one in enumerate(following) if one is not None]
        return any(len(following) == part.count and there == [part.own] for part in parts)
    into_constant = node.name().endswith("CopySlices") and following[0] is None
    return into_constant and any(tuple(node._input_metadata[0].shape) == part.shape for part in parts)


def _nodes(root: Any, ends: set[Any]) -> Iterator[Any]:
    """Those of a graph that lie above its `ends`, as far as they are followed."""
    pending, seen = [root], {root}
    for node in pending:  # which grows
        if node is None or node in ends:
            continue
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen and len(pending) < _MOST_NODES:
                seen.add(following)
                pending.append(following)


def _rows(tensor: torch.Tensor) -> set[int]:
    return set(row_fingerprints(tensor.detach().cpu().contiguous()).tolist())
