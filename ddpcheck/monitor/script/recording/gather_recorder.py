"""Features that a script gathers from all ranks by a collective without gradient, and their use in the loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddpcheck.findings.evidence.gathers import GatheredConstant
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.exception_origin import passes_on
from ddpcheck.findings.report import Location
from ddpcheck.gather.steps.training_step import row_fingerprints
from ddpcheck.monitor.module_hooks import guarded
from ddpcheck.monitor.rank_report import is_probed

_MOST_NODES = 256
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


class GatherRecorder:
    """Looks at what has been gathered in some of the optimizer steps, and at the losses of these; tells `sink`."""

    def __init__(self, sink: Callable[[GatheredConstant], object], steps: Callable[[], int]) -> None:
        """Begin; `steps` says how often optimizers have stepped."""
        self._sink = sink
        self._steps = steps
        self._gathered: list[_Gathered] = []
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
            self._gathered, self._step = [], step
        tensor = given.get(_INPUTS.get(call.operation, ""))
        if not is_probed(step) or call.differentiable or not isinstance(tensor, torch.Tensor) or tensor.dim() != 2:
            return
        if tensor.grad_fn is not None and tensor.is_floating_point() and tensor.numel() <= _MOST_ELEMENTS:
            shape = len(tensor) * dist.get_world_size(given.get("group")), tensor.shape[1]
            where = Location.parse(call.location)
            self._gathered.append(_Gathered(call.operation, where, shape, _rows(tensor), tensor.grad_fn))

    def _look(self, losses: Any) -> None:
        gathered, self._gathered = self._gathered, []
        if not gathered or self._step != self._steps() or not isinstance(losses, torch.Tensor):
            return
        for factor in _factors(losses.grad_fn, gathered):
            for one in gathered:
                if tuple(factor.shape) == one.shape and one.rows <= _rows(factor):
                    self._sink(GatheredConstant(self._step, one.operation, one.location, one.shape[0]))
                    return


def _factors(root: Any, gathered: list[_Gathered]) -> Iterator[torch.Tensor]:
    """The constants of such a shape, in rows, with which a loss multiplies what it is made of."""
    shapes, ends = {one.shape for one in gathered}, {one.node for one in gathered}
    pending, seen = [root], {root}
    for node in pending:  # which grows
        if node is None or node in ends:
            continue
        for name in _FACTORS:
            # The size is asked for first: to ask for a tensor calls what a checkpoint has it packed by.
            size = tuple(getattr(node, f"_saved_{name}_sym_sizes", None) or ())
            if size in shapes or size[::-1] in shapes:
                factor = getattr(node, f"_saved_{name}")
                if isinstance(factor, torch.Tensor) and not factor.requires_grad:
                    yield factor if size in shapes else factor.T
        for following, _ in node.next_functions:
            if following is not None and following not in seen and len(pending) < _MOST_NODES:
                seen.add(following)
                pending.append(following)


def _rows(tensor: torch.Tensor) -> set[int]:
    return set(row_fingerprints(tensor.detach().cpu().contiguous()).tolist())
