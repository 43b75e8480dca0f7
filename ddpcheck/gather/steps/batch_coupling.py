"""Where samples of a batch come to depend on each other: one forward pass on the whole batch, one on a part of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ddpcheck.findings.evidence.single_process import Coupling
from ddpcheck.findings.exception_origin import passes_on
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import is_user_file, relative_path
from ddpcheck.recipe.pytree import tree_tensors

_MOST_ELEMENTS = 1 << 26  # of what is kept of one forward pass
_MOST_ROWS = 16  # of a part that are looked for in the whole
_NOT_ROUNDING = 1e3  # times machine eps


@dataclass(slots=True)
class _Pass:
    """Results of a forward pass: by module and call, and by line of the user's code, in order."""

    inputs: dict[tuple[str, int], list[torch.Tensor]] = field(default_factory=dict)
    outputs: dict[tuple[str, int], list[torch.Tensor]] = field(default_factory=dict)
    operations: list[tuple[Location, list[torch.Tensor]]] = field(default_factory=list)
    elements: int = 0

    def kept(self, result: Any) -> list[torch.Tensor]:
        tensors = [t for t in tree_tensors(result) if t.is_floating_point() and t.dim() and t.layout == torch.strided]
        self.elements += sum(t.numel() for t in tensors)
        return [t.detach().clone() for t in tensors] if self.elements < _MOST_ELEMENTS else []


class _Operations(TorchFunctionMode):
    """Keeps what each operation gives that a line of the user's code calls."""

    def __init__(self, seen: _Pass) -> None:
        super().__init__()
        self.seen = seen

    @passes_on
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        caller = sys._getframe(1)
        if is_user_file(caller.f_code.co_filename) and not isinstance(result, bool | int | float | torch.Size):
            with torch._C.DisableTorchFunction():
                kept = self.seen.kept(result)
            where = Location(relative_path(caller.f_code.co_filename), caller.f_lineno)
            self.seen.operations.append((where, kept))
        return result


def first_coupling(
    module: nn.Module, whole: Callable[[], None], part: Callable[[], None], *, rounding: float = 0.0
) -> Coupling:
    """Find where an output for a sample of a part of the batch is another one than in the whole batch.

    Args:
        module: Whose submodules are watched.
        whole: Runs the loss on the whole batch.
        part: Runs it on a part.
        rounding: What is no difference, relative; 0: by the dtype.
    """
    of_whole, of_part = _watch(module, whole), _watch(module, part)
    given, made = _by_module(of_whole.inputs), _by_module(of_whole.outputs)
    lines: dict[Location, list[torch.Tensor]] = {}
    for line, outputs in of_whole.operations:
        lines.setdefault(line, []).extend(outputs)

    def meet(full: Sequence[torch.Tensor], alone: Sequence[torch.Tensor], *, pairs: bool = False) -> bool:
        return _meet(full, alone, rounding, pairs=pairs)

    modules = (
        key[0]
        for key, alone in of_part.outputs.items()
        if meet(made.get(key[0], ()), alone) and not meet(given.get(key[0], ()), of_part.inputs[key])
    )
    first = next(
        ((line, alone) for line, alone in of_part.operations if meet(lines.get(line, ()), alone, pairs=True)), None
    )
    name = next(modules, None)
    kind = "" if name is None else type(module.get_submodule(name)).__name__
    if first is None:
        return Coupling(name, kind)
    return Coupling(name, kind, first[0], _is_scaled(lines[first[0]], first[1]))


def _is_scaled(whole: Sequence[torch.Tensor], part: Sequence[torch.Tensor]) -> bool:
    """Whether the rows of `part` are the first rows of one of `whole`, all times one number."""
    for alone in part:
        for full in whole:
            axes = axes_that_grow(full, alone)
            if len(axes) != 1 or alone.numel() < 2:
                continue
            rows = full.narrow(axes[0], 0, alone.shape[axes[0]]).double()
            power = float((rows * rows).sum())
            factor = float((rows * alone.double()).sum()) / power if power else 0.0
            left = float(torch.linalg.vector_norm(alone.double() - factor * rows))
            if factor and left <= 1e-3 * float(torch.linalg.vector_norm(alone.double())):
                return True
    return False


def _by_module(calls: Mapping[tuple[str, int], Sequence[torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
    found: dict[str, list[torch.Tensor]] = {}
    for (name, _), tensors in calls.items():
        found.setdefault(name, []).extend(tensors)
    return found


def _meet(whole: Sequence[torch.Tensor], part: Sequence[torch.Tensor], rounding: float, *, pairs: bool = False) -> bool:
    """Whether samples depend on each other in one of `part`: its rows are in none of `whole`, of which there may be
    several (micro-batches); or, where `pairs` are asked for, it has an element for every pair of samples.
    """
    for alone in part:
        alike = [full for full in whole if full.shape == alone.shape]  # a micro-batch of the same size
        grown = [full for full in whole if len(axes_that_grow(full, alone)) == 1]
        if grown and all(_depends(full, alone, rounding) for full in (*grown, *alike)):
            return True
        if pairs and any(_pairs(full, alone) for full in whole):
            return True
    return False


def _watch(module: nn.Module, forward: Callable[[], None]) -> _Pass:
    seen = _Pass()
    with _kept_calls(module, seen), _Operations(seen):
        forward()
    return seen


@contextmanager
def _kept_calls(module: nn.Module, seen: _Pass) -> Iterator[None]:
    counts: dict[str, int] = {}
    given: dict[str, list[list[torch.Tensor]]] = {}  # to calls that have not ended

    def before(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            with torch._C.DisableTorchFunction():
                given.setdefault(name, []).append(seen.kept([args, kwargs]))

        return hook

    def after(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            counts[name] = counts.get(name, 0) + 1
            with torch._C.DisableTorchFunction():
                seen.inputs[name, counts[name]] = given[name].pop()
                seen.outputs[name, counts[name]] = seen.kept(output)

        return hook

    handles = [m.register_forward_pre_hook(before(name), with_kwargs=True) for name, m in module.named_modules()]
    handles += [m.register_forward_hook(after(name)) for name, m in module.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _depends(whole: torch.Tensor, part: torch.Tensor, rounding: float) -> bool:
    """Whether rows of `part` are not among those of `whole`; they may be at other places (two views in one batch)."""
    axes = axes_that_grow(whole, part) or [0]
    all_rows = whole.movedim(axes[0], 0).flatten(1).double() if whole.dim() > 1 else whole[:, None].double()
    rows = part.movedim(axes[0], 0).flatten(1).double() if part.dim() > 1 else part[:, None].double()
    scale = float(torch.linalg.vector_norm(all_rows, dim=1).max()) if len(all_rows) else 0.0
    allowed = (rounding or _NOT_ROUNDING * float(torch.finfo(part.dtype).eps)) * scale
    return any(float(torch.linalg.vector_norm(all_rows - row, dim=1).min()) > allowed for row in rows[:_MOST_ROWS])


def _pairs(whole: torch.Tensor, part: torch.Tensor) -> bool:
    """Whether there is an element for every pair of samples."""
    return len(axes_that_grow(whole, part)) > 1


def axes_that_grow(whole: torch.Tensor, part: torch.Tensor) -> list[int]:
    """The axes that grow with the batch, all of them alike; none where the tensors are of different kinds."""
    if whole.dim() != part.dim() or any(full < alone for full, alone in zip(whole.shape, part.shape, strict=True)):
        return []
    grown = [axis for axis in range(whole.dim()) if whole.shape[axis] > part.shape[axis]]
    factors = {whole.shape[axis] / part.shape[axis] if part.shape[axis] else 0.0 for axis in grown}
    return grown if len(factors) == 1 else []
