"""Detect samples of a batch that are coupled in forward or loss."""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ddpcheck.findings.evidence.gradients import Coupling
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import is_user_file, location_of
from ddpcheck.findings.tracebacks import passes_on
from ddpcheck.gather.forward_hooks import after_forward, before_forward
from ddpcheck.recipe.pytree import tree_tensors

_MOST_ELEMENTS = 1 << 26  # max elements recorded per forward pass
_SMALL_CHANGE = 1e-2  # relative
_LARGE_CHANGE = -1e3  # factor: makes the losses of these samples the largest or smallest
_FELT = {torch.float64: 1e-8, torch.float32: 1e-4}  # relative gradient change above rounding
_MOST_ROWS = 16  # rows of a part searched in the whole batch
_NOT_ROUNDING = 1e3  # tolerance in units of machine eps


@dataclass(slots=True)
class _Pass:
    """Results of a forward pass by module and user line, in completion order."""

    # of modules: name, inputs, outputs, and number of operations before the end of the call
    calls: list[tuple[str, list[torch.Tensor], list[torch.Tensor], int]] = field(default_factory=list)
    operations: list[tuple[Location, list[torch.Tensor]]] = field(default_factory=list)
    elements: int = 0

    def kept(self, result: Any) -> list[torch.Tensor]:
        tensors = [t for t in tree_tensors(result) if t.is_floating_point() and t.dim() and t.layout == torch.strided]
        self.elements += sum(t.numel() for t in tensors)
        return [t.detach().clone() for t in tensors] if self.elements < _MOST_ELEMENTS else []


class _Operations(TorchFunctionMode):
    """Record the result of each operation called from user code."""

    def __init__(self, seen: _Pass) -> None:
        super().__init__()
        self.seen = seen

    @passes_on
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        caller = sys._getframe(1)
        if is_user_file(caller.f_code.co_filename) and not isinstance(result, bool | int | float | torch.Size):
            with torch._C.DisableTorchFunction():
                tensors = self.seen.kept(result)
            self.seen.operations.append((location_of(caller), tensors))
        return result


def first_coupling(
    module: nn.Module, whole: Callable[[], None], part: Callable[[], None], *, rounding: float = 0.0
) -> Coupling:
    """Find the first output for a sample that differs between part and batch.

    `whole` and `part` run the loss; `rounding` is the relative tolerance (0: by dtype).
    """
    of_whole, of_part = _watch(module, whole), _watch(module, part)
    known_inputs: dict[str, _ByShape] = defaultdict(dict)
    known_outputs: dict[str, _ByShape] = defaultdict(dict)
    lines: dict[Location, _ByShape] = defaultdict(dict)
    for called, inputs, outputs, _ in of_whole.calls:
        _add(known_inputs[called], inputs)
        _add(known_outputs[called], outputs)
    for line, outputs in of_whole.operations:
        _add(lines[line], outputs)
    name, until = next(
        (
            (called, until)
            for called, inputs, outputs, until in of_part.calls
            if _meet(known_outputs[called], outputs, rounding) and not _meet(known_inputs[called], inputs, rounding)
        ),
        (None, len(of_part.operations)),
    )
    kind = "" if name is None else type(module.get_submodule(name)).__name__
    for line, outputs in of_part.operations[:until]:  # later operations get samples already coupled in the module
        if _meet(lines[line], outputs, rounding, pairs=True):
            seen = [full for tensors in lines[line].values() for full in tensors]
            return Coupling(name, kind, line, _is_scaled(seen, outputs))
    return Coupling(name, kind)


_ByShape = dict[torch.Size, deque[torch.Tensor]]


def _add(seen: _ByShape, tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        seen.setdefault(tensor.shape, deque()).append(tensor)


def _is_scaled(whole: Sequence[torch.Tensor], part: Sequence[torch.Tensor]) -> bool:
    for piece in part:
        for full in whole:
            axes = axes_that_grow(full, piece)
            if len(axes) != 1 or piece.numel() < 2:
                continue
            rows = full.narrow(axes[0], 0, piece.shape[axes[0]]).double()
            power = float((rows * rows).sum())
            factor = float((rows * piece.double()).sum()) / power if power else 0.0
            residual = float(torch.linalg.vector_norm(piece.double() - factor * rows))
            if factor and residual <= 1e-3 * float(torch.linalg.vector_norm(piece.double())):
                return True
    return False


def _meet(whole: _ByShape, part: Sequence[torch.Tensor], rounding: float, *, pairs: bool = False) -> bool:
    """Return True if `part` shows coupled samples: rows not in `whole`, or pairs."""
    for piece in part:
        axes = {shape: len(axes_that_grow(tensors[0], piece)) for shape, tensors in whole.items()}
        grown = [shape for shape, count in axes.items() if count == 1]
        candidates = grown + [piece.shape] * (piece.shape in whole)  # micro-batch of the same size
        if grown and all(_depends_on_all(whole[shape], piece, rounding) for shape in candidates):
            return True
        if pairs and any(count > 1 for count in axes.values()):
            return True
    return False


def _depends_on_all(whole: deque[torch.Tensor], part: torch.Tensor, rounding: float) -> bool:
    """Return True if every tensor in `whole` lacks rows of `part`; rotates `whole`.

    For a line called in a loop, each result is first compared with the one of the same iteration.
    """
    for _ in range(len(whole)):
        whole.rotate(-1)
        if not _depends(whole[-1], part, rounding):
            return False
    return True


def _watch(module: nn.Module, forward: Callable[[], None]) -> _Pass:
    seen = _Pass()
    running: dict[str, list[list[torch.Tensor]]] = defaultdict(list)  # inputs of active calls

    def enter(name: str, inputs: Any) -> None:
        with torch._C.DisableTorchFunction():
            running[name].append(seen.kept(inputs))

    def leave(name: str, output: Any) -> None:
        with torch._C.DisableTorchFunction():
            seen.calls.append((name, running[name].pop(), seen.kept(output), len(seen.operations)))

    with watched_modules(module, enter, leave), _Operations(seen):
        forward()
    return seen


@contextlib.contextmanager
def watched_modules(
    module: nn.Module, enter: Callable[[str, Any], object], leave: Callable[[str, Any], object]
) -> Iterator[None]:
    """Call `enter(name, inputs)` and `leave(name, output)` around each module's forward."""

    def before(name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:  # a result would replace inputs
        enter(name, [args, kwargs])

    def after(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        leave(name, output)

    with contextlib.ExitStack() as stack:
        for name, part in module.named_modules():
            stack.enter_context(before_forward(part, partial(before, name), with_kwargs=True))
            stack.enter_context(after_forward(part, partial(after, name)))
        yield


def _depends(whole: torch.Tensor, part: torch.Tensor, rounding: float) -> bool:
    """Return True if rows of `part` are missing in `whole`, at any position."""
    axes = axes_that_grow(whole, part) or [0]
    all_rows = whole.movedim(axes[0], 0).flatten(1).double() if whole.dim() > 1 else whole[:, None].double()
    rows = part.movedim(axes[0], 0).flatten(1).double() if part.dim() > 1 else part[:, None].double()
    scale = float(torch.linalg.vector_norm(all_rows, dim=1).max()) if len(all_rows) else 0.0
    allowed = (rounding or _NOT_ROUNDING * float(torch.finfo(part.dtype).eps)) * scale
    return any(float(torch.linalg.vector_norm(all_rows - row, dim=1).min()) > allowed for row in rows[:_MOST_ROWS])


def axes_that_grow(whole: torch.Tensor, part: torch.Tensor) -> list[int]:
    """Return the axes that grow by one common batch factor, or []."""
    if whole.dim() != part.dim() or any(full < size for full, size in zip(whole.shape, part.shape, strict=True)):
        return []
    grown = [axis for axis in range(whole.dim()) if whole.shape[axis] > part.shape[axis]]
    factors = {whole.shape[axis] / part.shape[axis] if part.shape[axis] else 0.0 for axis in grown}
    return grown if len(factors) == 1 else []


# Coupling by the loss: change the first activations of some samples and compare the gradients of the others. If the
# loss is a sum over samples, divided by any count, mixed second derivatives between samples are zero. The data stay
# unchanged, and so do counts and masks.


@dataclass(slots=True)
class Activation:
    """First result that combines data and parameters, in forward order."""

    value: torch.Tensor  # value used by the rest of forward
    gradient: torch.Tensor | None = None  # set by backward

    def arrived(self, gradient: torch.Tensor) -> None:
        self.gradient = gradient.detach().clone()


class FirstActivations(TorchFunctionMode):
    """Record the first activations of a forward pass, multiplied by `factors` if set.

    `factors` are by position in the forward pass.
    """

    def __init__(self, factors: Mapping[int, torch.Tensor] | None = None) -> None:
        super().__init__()
        self.activations: list[Activation] = []
        self._factors = factors or {}
        self._later: dict[int, Any] = {}  # by `id`: tensors computed from activations, kept alive
        self._elements = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, torch.Tensor) and type(result) is not tuple:
            return result
        with torch._C.DisableTorchFunction():
            outputs = [tensor for tensor in tree_tensors(result) if tensor.requires_grad]
            inputs = list(tree_tensors([args, kwargs or {}])) if outputs else []
            if any(id(tensor) in self._later for tensor in inputs):
                self._later.update((id(tensor), tensor) for tensor in outputs)
            elif outputs and any(_is_data(tensor) for tensor in inputs):
                first = result if isinstance(result, torch.Tensor) else result[0]
                if isinstance(first, torch.Tensor) and first.requires_grad and first.dim():
                    changed = self._first(first)
                    result = changed if first is result else (changed, *result[1:])
                    self._later.update((id(tensor), tensor) for tensor in (changed, *outputs))
        return result

    def _first(self, result: torch.Tensor) -> torch.Tensor:
        factor = self._factors.get(len(self.activations))
        if factor is not None and factor.shape[0] == result.shape[0]:
            result = result * factor
        self._elements += result.numel()
        activation = Activation(result.detach().clone() if self._elements < _MOST_ELEMENTS else result.new_empty(0))
        result.register_hook(activation.arrived)
        self.activations.append(activation)
        return result


def _is_data(tensor: torch.Tensor) -> bool:
    """Return True for a non-parameter leaf (e.g. input of a gradient penalty)."""
    return bool(tensor.dim()) and not isinstance(tensor, nn.Parameter) and tensor.is_leaf


def rows_of_part(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor | None:
    """Return the mask of rows (dim 0) of `whole` in `part`, or None.

    Tries consecutive samples first, then several concatenated views of all samples.
    """
    if axes_that_grow(whole, part) != [0]:
        return None
    size, share = len(whole), len(part)
    for views in (1, *(views for views in range(2, 5) if size % views == 0 and share % views == 0)):
        first = whole.unflatten(0, (views, -1))[:, : share // views].flatten(0, 1)
        if torch.allclose(first, part, rtol=1e-5, atol=1e-7 * float(part.abs().max()) if part.numel() else 0.0):
            owned = torch.zeros(views, size // views, dtype=torch.bool)
            owned[:, : share // views] = True
            return owned.flatten()
    return None


def changes_for(
    whole: Sequence[Activation], part: Sequence[Activation], *, large: bool
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return by position: the part's rows among first activations, and factors to change.

    `large` factors negate and grow, to also flip choices: the expert of a sample, or the samples with the largest
    losses.
    """
    changes = {}
    generator = torch.Generator().manual_seed(0)
    for number, (full, piece) in enumerate(zip(whole, part, strict=False)):
        owned = rows_of_part(full.value, piece.value) if full.value.numel() and piece.value.numel() else None
        if owned is None or bool(owned.all()):
            continue
        factor = torch.ones(full.value.shape, dtype=full.value.dtype)
        noise = torch.rand(factor[owned].shape, generator=generator, dtype=torch.float64) * 2 - 1
        factor[owned] = (
            _LARGE_CHANGE * factor[owned] if large else factor[owned] + _SMALL_CHANGE * noise.to(factor.dtype)
        )
        changes[number] = (owned, factor.to(full.value.device))
    return changes


def are_felt(
    before: Sequence[torch.Tensor | None],
    after: Sequence[torch.Tensor | None],
    changes: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
) -> bool | None:
    """Return True if gradients of other samples changed; None if not comparable."""
    compared = False
    for number, (owned, _) in changes.items():
        old, new = (gradients[number] if number < len(gradients) else None for gradients in (before, after))
        if old is None or new is None or old.shape != new.shape or old.dtype not in _FELT:
            continue
        others = ~owned.to(old.device)
        size = float(torch.linalg.vector_norm(old[others]))
        compared = compared or size > 0
        if float(torch.linalg.vector_norm(old[others] - new[others])) > _FELT[old.dtype] * size:
            return True
    return False if compared else None
