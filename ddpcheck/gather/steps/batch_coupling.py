"""Detect samples of a batch that are coupled in forward or loss."""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ddpcheck.findings.evidence.gradients import Coupling
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import is_user_file, location_of
from ddpcheck.findings.tracebacks import forwards_calls
from ddpcheck.gather.forward_hooks import after_forward, before_forward
from ddpcheck.gather.steps.gradient_distance import fit
from ddpcheck.recipe.pytree import tree_tensors

_MOST_ELEMENTS = 1 << 26  # max elements recorded per forward pass
_SMALL_CHANGE = 1e-2  # relative
_LARGE_CHANGE = -1e3  # factor: makes the losses of these samples the largest or smallest
_GRADIENT_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-4}  # largest relative gradient change by rounding
_MOST_ROWS = 16  # rows of a part searched in the whole batch
_TOLERANCE_IN_EPS = 1e3  # tolerance in units of machine eps
_SCALED = 1e-3  # largest relative residual of tensors that differ by a factor


@dataclass(slots=True)
class _ForwardRecord:
    """Results of modules and of user lines in a forward pass, in completion order."""

    # of modules: name, inputs, outputs, and number of operations before the end of the call
    calls: list[tuple[str, list[torch.Tensor], list[torch.Tensor], int]] = field(default_factory=list)
    operations: list[tuple[Location, list[torch.Tensor]]] = field(default_factory=list)
    elements: int = 0

    def copy_tensors(self, result: Any) -> list[torch.Tensor]:
        with torch._C.DisableTorchFunction():
            tensors = [
                t for t in tree_tensors(result) if t.is_floating_point() and t.dim() and t.layout == torch.strided
            ]
            self.elements += sum(t.numel() for t in tensors)
            return [t.detach().clone() for t in tensors] if self.elements < _MOST_ELEMENTS else []


class _OperationRecorder(TorchFunctionMode):
    def __init__(self, record: _ForwardRecord) -> None:
        super().__init__()
        self.record = record

    @forwards_calls
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        caller = sys._getframe(1)
        if is_user_file(caller.f_code.co_filename) and not isinstance(result, bool | int | float | torch.Size):
            self.record.operations.append((location_of(caller), self.record.copy_tensors(result)))
        return result


def first_coupling(
    module: nn.Module, run_whole: Callable[[], None], run_part: Callable[[], None], *, rounding: float = 0.0
) -> Coupling:
    """Find the first operation whose result for a sample depends on other samples.

    `run_whole` computes the loss on a batch and `run_part` on some of its samples; the results for these samples are
    compared. `rounding`: relative tolerance; 0 for a multiple of the dtype's machine eps.
    """
    whole, part = _record_forward(module, run_whole), _record_forward(module, run_part)
    whole_inputs = _tensors_by_key((name, inputs) for name, inputs, _, _ in whole.calls)
    whole_outputs = _tensors_by_key((name, outputs) for name, _, outputs, _ in whole.calls)
    whole_lines = _tensors_by_key(whole.operations)
    name, until = next(
        (
            (name, until)
            for name, inputs, outputs, until in part.calls
            if _is_coupled(whole_outputs[name], outputs, rounding)
            and not _is_coupled(whole_inputs[name], inputs, rounding)
        ),
        (None, len(part.operations)),
    )
    kind = "" if name is None else type(module.get_submodule(name)).__name__
    for line, outputs in part.operations[:until]:  # later operations get samples already coupled in the module
        if _is_coupled(whole_lines[line], outputs, rounding, pairs=True):
            tensors = [tensor for same_shape in whole_lines[line].values() for tensor in same_shape]
            return Coupling(name, kind, line, _is_scaled(tensors, outputs))
    return Coupling(name, kind)


_ByShape = dict[torch.Size, deque[torch.Tensor]]


def _tensors_by_key(results: Iterable[tuple[Any, Sequence[torch.Tensor]]]) -> dict[Any, _ByShape]:
    tensors_by_key: dict[Any, _ByShape] = defaultdict(lambda: defaultdict(deque))
    for key, tensors in results:
        for tensor in tensors:
            tensors_by_key[key][tensor.shape].append(tensor)
    return tensors_by_key


def _is_scaled(whole: Sequence[torch.Tensor], part: Sequence[torch.Tensor]) -> bool:
    """Return True if `part` equals the first rows of a result in `whole`, scaled."""
    for piece, full in product(part, whole):
        axes = axes_that_grow(full, piece)
        if len(axes) == 1 and piece.numel() > 1:
            (factor,), residual = fit({"": piece}, [{"": full.narrow(axes[0], 0, piece.shape[axes[0]])}])
            if factor and residual <= _SCALED:
                return True
    return False


def _is_coupled(whole: _ByShape, part: Sequence[torch.Tensor], rounding: float, *, pairs: bool = False) -> bool:
    """Return True if results of samples change without the rest of the batch.

    `whole`: results of the whole batch. `part`: results of some samples alone, changed if `whole` lacks their rows.
    `pairs`: also return True for results with an entry per pair of samples, such as a similarity matrix.
    """
    for piece in part:
        axes = {shape: len(axes_that_grow(tensors[0], piece)) for shape, tensors in whole.items()}
        grown = [shape for shape, count in axes.items() if count == 1]
        candidates = grown + [piece.shape] * (piece.shape in whole)  # micro-batch of the same size
        if grown and all(_all_lack_rows(whole[shape], piece, rounding) for shape in candidates):
            return True
        if pairs and any(count > 1 for count in axes.values()):
            return True
    return False


def _all_lack_rows(whole: deque[torch.Tensor], part: torch.Tensor, rounding: float) -> bool:
    for _ in range(len(whole)):
        whole.rotate(-1)  # if a line runs in a loop, the next call begins with the next iteration's result
        if not _lacks_rows(whole[-1], part, rounding):
            return False
    return True


def _record_forward(module: nn.Module, forward: Callable[[], None]) -> _ForwardRecord:
    record = _ForwardRecord()
    inputs: dict[str, list[list[torch.Tensor]]] = defaultdict(list)  # of active calls

    def leave(name: str, output: Any) -> None:
        record.calls.append((name, inputs[name].pop(), record.copy_tensors(output), len(record.operations)))

    with (
        watched_modules(module, lambda name, args: inputs[name].append(record.copy_tensors(args)), leave),
        _OperationRecorder(record),
    ):
        forward()
    return record


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


def _lacks_rows(whole: torch.Tensor, part: torch.Tensor, rounding: float) -> bool:
    """Return True if a row of `part` is nowhere in `whole`, up to `rounding`."""
    axis = (axes_that_grow(whole, part) or [0])[0]
    all_rows, rows = (t.movedim(axis, 0).unsqueeze(-1).flatten(1).double() for t in (whole, part))
    scale = float(torch.linalg.vector_norm(all_rows, dim=1).max()) if len(all_rows) else 0.0
    allowed = (rounding or _TOLERANCE_IN_EPS * float(torch.finfo(part.dtype).eps)) * scale
    return any(float(torch.linalg.vector_norm(all_rows - row, dim=1).min()) > allowed for row in rows[:_MOST_ROWS])


def axes_that_grow(whole: torch.Tensor, part: torch.Tensor) -> list[int]:
    """Return the axes that grow with the batch, along which `whole` exceeds `part`."""
    if whole.dim() != part.dim() or any(full < size for full, size in zip(whole.shape, part.shape, strict=True)):
        return []
    grown = [axis for axis in range(whole.dim()) if whole.shape[axis] > part.shape[axis]]
    factors = {whole.shape[axis] / part.shape[axis] if part.shape[axis] else 0.0 for axis in grown}
    return grown if len(factors) == 1 else []


# Coupling by the loss: change the first activations of some samples and compare the gradients of the others. If the
# loss is a sum over samples, divided by any count, mixed second derivatives between samples are zero. The data stay
# unchanged, and so do counts and masks.


class FirstActivations(TorchFunctionMode):
    """Mode that records the first activations: results computed directly from data and parameters.

    Backward records their gradients. To perturb samples, activation number `i` is multiplied by `factors[i]`.
    """

    def __init__(self, factors: Mapping[int, torch.Tensor] | None = None) -> None:
        super().__init__()
        self.values: list[torch.Tensor] = []  # as used by the rest of forward; empty beyond `_MOST_ELEMENTS`
        self.gradients: dict[int, torch.Tensor] = {}  # of `values` by position, set by backward
        self._factors = factors or {}
        self._dependents: dict[int, Any] = {}  # by `id`: tensors computed from activations, kept alive
        self._elements = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, torch.Tensor) and type(result) is not tuple:
            return result
        with torch._C.DisableTorchFunction():
            outputs = [tensor for tensor in tree_tensors(result) if tensor.requires_grad]
            inputs = list(tree_tensors([args, kwargs or {}])) if outputs else []
            if any(id(tensor) in self._dependents for tensor in inputs):
                self._dependents.update((id(tensor), tensor) for tensor in outputs)
            elif outputs and any(_is_data(tensor) for tensor in inputs):
                first = result if isinstance(result, torch.Tensor) else result[0]
                if isinstance(first, torch.Tensor) and first.requires_grad and first.dim():
                    changed = self._record_activation(first)
                    result = changed if first is result else (changed, *result[1:])
                    self._dependents.update((id(tensor), tensor) for tensor in (changed, *outputs))
        return result

    def _record_activation(self, result: torch.Tensor) -> torch.Tensor:
        index = len(self.values)
        factor = self._factors.get(index)
        if factor is not None and factor.shape[0] == result.shape[0]:
            result = result * factor
        self._elements += result.numel()
        self.values.append(result.detach().clone() if self._elements < _MOST_ELEMENTS else result.new_empty(0))

        def keep_gradient(gradient: torch.Tensor) -> None:
            self.gradients[index] = gradient.detach().clone()

        result.register_hook(keep_gradient)
        return result


def _is_data(tensor: torch.Tensor) -> bool:
    return bool(tensor.dim()) and not isinstance(tensor, nn.Parameter) and tensor.is_leaf


def mask_of_part(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor | None:
    """Return the mask of rows (dim 0) of `whole` that `part` contains, or None.

    `part` may have the first samples of `whole`; or both concatenate 2 to 4 views (augmentations) of their samples, as
    in contrastive learning, and `part` has the first samples of each view.
    """
    if axes_that_grow(whole, part) != [0]:
        return None
    size, share = len(whole), len(part)
    for views in (1, *(views for views in range(2, 5) if size % views == 0 and share % views == 0)):
        first = whole.unflatten(0, (views, -1))[:, : share // views].flatten(0, 1)
        if torch.allclose(first, part, rtol=1e-5, atol=1e-7 * float(part.abs().max()) if part.numel() else 0.0):
            mask = torch.zeros(views, size // views, dtype=torch.bool)
            mask[:, : share // views] = True
            return mask.flatten()
    return None


Changes = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Mask of the changed rows and factors of an activation, by position in the forward pass."""


def factors_for_part(whole: Sequence[torch.Tensor], part: Sequence[torch.Tensor], *, large: bool) -> Changes:
    """Return factors for `FirstActivations` that change only the samples of `part`.

    `whole` and `part` are the first activations of a batch and of some of its samples. `large` factors negate and
    enlarge, so that discrete choices change too, such as a sample's expert or the samples with the largest losses.
    """
    changes = {}
    generator = torch.Generator().manual_seed(0)
    for index, (full, piece) in enumerate(zip(whole, part, strict=False)):
        rows = mask_of_part(full, piece) if full.numel() and piece.numel() else None
        if rows is None or bool(rows.all()):
            continue
        factor = torch.ones(full.shape, dtype=full.dtype)
        noise = torch.rand(factor[rows].shape, generator=generator, dtype=torch.float64) * 2 - 1
        factor[rows] = _LARGE_CHANGE if large else factor[rows] + _SMALL_CHANGE * noise.to(factor.dtype)
        changes[index] = (rows, factor.to(full.device))
    return changes


def gradients_changed(
    before: Mapping[int, torch.Tensor], after: Mapping[int, torch.Tensor], changes: Changes
) -> bool | None:
    """Return True if changing some samples changed other samples' gradients; None if not comparable."""
    compared = False
    for index, (rows, _) in changes.items():
        old, new = before.get(index), after.get(index)
        if old is None or new is None or old.shape != new.shape or old.dtype not in _GRADIENT_ROUNDING:
            continue
        unchanged_rows = ~rows.to(old.device)
        size = float(torch.linalg.vector_norm(old[unchanged_rows]))
        compared = compared or size > 0
        change = float(torch.linalg.vector_norm(old[unchanged_rows] - new[unchanged_rows]))
        if change > _GRADIENT_ROUNDING[old.dtype] * size:
            return True
    return False if compared else None
