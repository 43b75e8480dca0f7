"""Distances between gradients: error, ratio, worst element. `ddpcheck.rules` evaluates the numbers.

Also sketches of gradients: short vectors, linear in the gradient, of about its norm. The sketch of an average is the
average of the sketches, so a reduced gradient can be compared with the average of the ranks' gradients later, without a
collective and without storing gradients. Each number is the sum of a block of elements with random signs (Alon, Matias
and Szegedy, "The space complexity of approximating the frequency moments", 1996): the expected square of the sketch's
norm is that of the gradient's norm.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from msgspec import Struct

from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.replace import replace
from ddpcheck.gather.state.fingerprints import (
    StackedTensors,
    floats_of,
    is_small,
    local_part,
    numbers_of,
    plain_values,
    stack_rows,
    stack_small,
)

SIZE = 64
"""Least number of blocks; they estimate a norm within some 25 %."""

_SEED = 20231
_KEPT = 4096  # max cached signs; longer vectors are recomputed to save device memory


def sketch(gradient: torch.Tensor) -> torch.Tensor:
    """Compress a gradient to at most 2 * `SIZE` random projections of similar norm."""
    parts = plain_values(gradient) or (torch.zeros(0),)  # not readable: norm 0
    rows = [_to_real_rows(part.reshape(1, -1)) for part in parts]
    return _sketch_rows(torch.cat(rows, 1) if len(rows) > 1 else rows[0])[0]


class Kept(Struct):
    """Gradient kept until the step ends: a copy if small, otherwise its `sketch`."""

    value: torch.Tensor
    is_sketch: bool

    @classmethod
    def record(cls, gradient: torch.Tensor) -> Kept:
        """Keep a detached gradient."""
        if gradient.is_complex() or not is_small(gradient):
            return cls(sketch(gradient), is_sketch=True)
        return cls(gradient.clone(), is_sketch=False)

    def __add__(self, other: Kept) -> Kept:
        wide = _real_dtype(self.value.dtype)
        return Kept(self.value.to(wide) + other.value.to(wide), self.is_sketch)


@dataclass(slots=True)
class KeptParts:
    """Local gradient under `fully_shard`, split by the rank to which reduce-scatter sends each part."""

    parts: list[Kept]

    @classmethod
    def record(cls, gradient: torch.Tensor, count: int, dim: int) -> KeptParts:
        """Split `gradient` into `count` parts along `dim`, as `torch.chunk` does, and keep the parts."""
        return cls([Kept.record(part) for part in gradient.chunk(count, dim)])

    def __add__(self, other: KeptParts) -> KeptParts:
        return KeptParts([a + b for a, b in zip(self.parts, other.parts, strict=True)])


def sketches(gradients: Mapping[str, torch.Tensor] | StackedTensors) -> dict[str, tuple[float, ...]]:
    """Return the `sketch` of each gradient, up to rounding, with one transfer per device.

    Small gradients of one shape are batched.
    """
    grouped = stack_small(gradients)
    numbers = numbers_of((names, value.double()) for names, value in _sketch_all(grouped))
    return {name: numbers[name] for name in grouped.names}


def short_sketches(gradients: StackedTensors | Mapping[str, Kept]) -> dict[str, array[float]]:
    """Return each gradient's `sketch` in float32, possibly taken from a `Kept` record."""
    if isinstance(gradients, StackedTensors):
        names, sketched_rows = gradients.names, _sketch_all(gradients)
    else:
        names = [*gradients]
        copies = {name: kept.value for name, kept in gradients.items() if not kept.is_sketch}
        sketched_rows = _sketch_all(StackedTensors(names, stack_rows(copies), {}))
        sketched_rows += [((name,), kept.value) for name, kept in gradients.items() if kept.is_sketch]
    numbers = floats_of(sketched_rows)
    return {name: numbers[name] for name in names}


def _sketch_all(tensors: StackedTensors) -> list[tuple[Sequence[str], torch.Tensor]]:
    sketched_rows: list[tuple[Sequence[str], torch.Tensor]]
    sketched_rows = [(names, _sketch_rows(_to_real_rows(values))) for names, values in tensors.rows]
    return sketched_rows + [((name,), sketch(value)) for name, value in tensors.others.items()]


def _to_real_rows(rows: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows
    return real.to(_real_dtype(rows.dtype))


def _real_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def _sketch_rows(rows: torch.Tensor) -> torch.Tensor:
    length = max(1, rows.shape[1] // SIZE)
    make = _random_signs if length <= _KEPT else _random_signs.__wrapped__
    signs = make(length, rows.device, rows.dtype)
    whole = rows.shape[1] // length * length
    blocks = rows[:, :whole].reshape(len(rows), -1, length) @ signs
    rest = rows[:, whole:] @ signs[: rows.shape[1] - whole]
    return torch.cat([blocks, rest.unsqueeze(1)], 1)


@functools.lru_cache(maxsize=256)
def _random_signs(count: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return random signs, equal on every rank, without using the script's generators."""
    generator = torch.Generator(device=device).manual_seed(_SEED)
    return torch.randint(0, 2, (count,), generator=generator, device=device).to(dtype) * 2 - 1


_EPS_MULTIPLE = 16.0
_NOISE_MULTIPLE = 3.0
_UNMEASURED_MULTIPLE = 256.0
_MOST_CONVERTED = 1 << 20  # elements converted to another dtype at a time
_LARGEST = 1e30  # replaces non-finite values, which JSON cannot represent


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached strided copy or view of `tensor` (`DTensor`: local tensor)."""
    tensor = local_part(tensor)
    return tensor.to_dense() if tensor.layout != torch.strided else tensor


def has_gradient(parameter: torch.Tensor) -> bool:
    """Return True if a parameter has a nonzero gradient."""
    return parameter.grad is not None and bool(dense(parameter.grad).count_nonzero())


def norm(tensor: torch.Tensor) -> float:
    """Return the Frobenius norm, computed in float64."""
    return math.hypot(*(float(_norms_of(piece)) for (piece,) in _pieces(dense(tensor))))


def distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the Frobenius norm of `first - second` (same shape), computed in float64."""
    wide = _wide_dtype(torch.promote_types(first.dtype, second.dtype))
    return math.hypot(*(float(torch.linalg.vector_norm(a.to(wide) - b.to(wide))) for a, b in _pieces(first, second)))


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield chunks of the tensors (of equal shape), to limit memory for converted copies."""
    if tensors[0].numel() <= _MOST_CONVERTED:
        yield tensors
        return
    flat = [tensor.reshape(-1) for tensor in tensors]
    yield from zip(*(tensor.split(_MOST_CONVERTED) for tensor in flat), strict=True)


def norms(tensors: Mapping[str, torch.Tensor] | StackedTensors) -> dict[str, float]:
    """Return the norm of each tensor, with one transfer per device."""
    grouped = stack_small(tensors)
    sizes = [(names, _norms_of(values, dim=1)) for names, values in grouped.rows]
    sizes += [((name,), _norms_of(dense(tensor))) for name, tensor in grouped.others.items()]
    numbers = numbers_of(sizes)
    return {name: numbers[name][0] for name in grouped.names}


def _norms_of(values: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    if not (values.is_floating_point() or values.is_complex()):
        values = values.double()  # e.g. 8-bit optimizer state
    result: torch.Tensor = torch.linalg.vector_norm(values, dim=dim, dtype=_wide_dtype(values.dtype))
    return result


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


@functools.cache
def eps_of(dtype: torch.dtype) -> float:
    """Return the machine epsilon of a floating-point or complex dtype."""
    return float(torch.finfo(dtype).eps)


def is_subnormal(gradient: torch.Tensor | None) -> bool:
    """Return True for a float16 gradient whose RMS is subnormal, so that rounding dominates."""
    if gradient is None or gradient.dtype is not torch.float16:
        return False
    return norm(gradient) <= math.sqrt(gradient.numel()) * float(torch.finfo(torch.float16).smallest_normal)


def scales(reference: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the norm that divides each gradient's error, to give a relative error.

    This norm is at least the largest root mean square of any gradient in the same module, times the square root of the
    number of elements: a bias before a BatchNorm has a gradient of pure rounding error, whose norm is too small.
    """
    l2 = {name: norm(tensor) for name, tensor in reference.items()}
    rms = {name: l2[name] / math.sqrt(max(tensor.numel(), 1)) for name, tensor in reference.items()}
    largest: dict[str, float] = {}
    for name in reference:
        module = name.rpartition(".")[0]
        largest[module] = max(largest.get(module, 0.0), rms[name])
    total = math.sqrt(sum(value * value for value in l2.values()) / max(sum(t.numel() for t in reference.values()), 1))
    result = {}
    for name, tensor in reference.items():
        size = math.sqrt(max(tensor.numel(), 1))
        eps = eps_of(tensor.dtype)
        floor = total * size * min(1.0, (_EPS_MULTIPLE if eps < 1e-5 else 1.0) * eps)
        result[name] = max(l2[name], largest[name.rpartition(".")[0]] * size, floor)
    return result


def tolerances(
    reference: Mapping[str, torch.Tensor], scale: Mapping[str, float], noise: Mapping[str, float] | None
) -> dict[str, float]:
    """Return the largest relative error that is accepted for each gradient.

    With `noise`, it is the largest of: 16 machine eps (correct DDP stays within about 1.4 at any depth), 3 times the
    parameter's relative noise, and 3 times the median relative noise of all parameters. `noise`: norm of the rounding
    error (gradient in the model's dtype minus gradient in float64) by name, or None without a float64 run.
    """
    if noise is None:
        return {
            name: _EPS_MULTIPLE * eps_of(t.dtype) if eps_of(t.dtype) > 1e-5 else _UNMEASURED_MULTIPLE * eps_of(t.dtype)
            for name, t in reference.items()
        }
    relative = {name: noise[name] / scale[name] if scale[name] else 0.0 for name in reference if name in noise}
    ordered = sorted(relative.values())
    typical = ordered[len(ordered) // 2] if ordered else 0.0
    return {
        name: max(_EPS_MULTIPLE * eps_of(t.dtype), _NOISE_MULTIPLE * max(relative.get(name, 0.0), typical))
        for name, t in reference.items()
    }


def difference(
    name: str, got: torch.Tensor | None, want: torch.Tensor | None, *, scale: float, tolerance: float
) -> Difference:
    """Compare `got` with `want` relative to the norm `scale`; None counts as zeros."""

    def relative(size: float) -> float:
        return _to_finite(size / scale) if scale else (0.0 if size == 0.0 else _LARGEST)

    if got is None or want is None:
        present = got if got is not None else want
        size = norm(present) if present is not None else 0.0
        result = Difference(name, relative(size), tolerance, absolute_error=_to_finite(size))
        known = 0.0 if want is None else _to_finite(size)
        elements = 0 if present is None else present.numel()
        return replace(result, residual=result.error, elements=elements, reference_norm=known)
    got, want = dense(got), dense(want).to(got.device)
    if got.shape != want.shape:
        return Difference(
            name, _LARGEST, tolerance, ratio=0.0, residual=_LARGEST, elements=want.numel(), absolute_error=_LARGEST
        )
    wide = _wide_dtype(want.dtype)
    delta = math.hypot(*(float(torch.linalg.vector_norm(_subtract(a, b), dtype=wide)) for a, b in _pieces(got, want)))
    exact = tolerance if want.dtype is torch.float16 else 1.0  # float16 gradients may be genuinely subnormal
    if delta <= math.sqrt(max(want.numel(), 1)) * exact * float(torch.finfo(want.dtype).smallest_normal):
        delta = 0.0  # subnormal: results depend on dividing before or after the sum
    size = _to_finite(float(torch.linalg.vector_norm(want, dtype=_at_least_float32(want.dtype))))
    result = Difference(
        name, relative(delta), tolerance, elements=want.numel(), absolute_error=_to_finite(delta), reference_norm=size
    )
    if result.error <= tolerance:
        return result

    def pieces() -> Iterator[list[torch.Tensor]]:
        for both in _pieces(got, want):
            real = (torch.view_as_real(t.to(wide)) if wide.is_complex else t.to(wide) for t in both)
            yield [t.reshape(-1) for t in real]

    power = sum(float((expected * expected).sum()) for _, expected in pieces())
    ratio = sum(float((actual * expected).sum()) for actual, expected in pieces()) / power if power else 0.0
    shape = (*got.shape, 2) if wide.is_complex else got.shape
    allowed = tolerance * scale / math.sqrt(max(math.prod(shape), 1))
    residual, beyond, start, worst, largest = 0.0, 0, 0, (0, 0.0, 0.0), -1.0
    for actual, expected in pieces():
        residual = math.hypot(residual, float(torch.linalg.vector_norm(actual - ratio * expected)))
        gap = (actual - expected).abs()
        beyond += int((gap > allowed).sum())
        gap = gap.nan_to_num(nan=math.inf)
        index = int(gap.argmax())
        if float(gap[index]) > largest:
            largest, worst = float(gap[index]), (start + index, float(actual[index]), float(expected[index]))
        start += len(gap)
    return replace(
        result,
        ratio=_to_finite(ratio),
        residual=_to_finite(residual / scale) if scale else _LARGEST,
        elements_beyond=beyond,
        worst_index=tuple(int(i) for i in torch.unravel_index(torch.tensor(worst[0]), shape)),
        worst_got=_to_finite(worst[1]),
        worst_want=_to_finite(worst[2]),
    )


def against_average(
    name: str,
    got: torch.Tensor | None,
    want: torch.Tensor | None,
    *,
    world_size: int,
    scale: float = 0.0,
    lossy: float = 0.0,
    floor: float = 0.0,
    noise: float = 0.0,
) -> Difference:
    """Compare a gradient that a wrapper has reduced with the average of local gradients.

    Args:
        name: Parameter name.
        got: Gradient after the wrapper's reduction.
        want: Average of the local gradients.
        world_size: Number of averaged ranks.
        scale: RMS norm of the local gradients; 0 if unknown.
        lossy: Relative error of a communication hook; 0 if none.
        floor: Minimum scale if the wrapper rounds differently, to ignore gradients that are pure rounding error.
        noise: Norm of the rounding error of the wrapper's compute dtype; 0 if it is the same dtype.
    """
    if got is None and (want is None or not bool(want.count_nonzero())):
        return Difference(name, 0.0, 0.0)
    if want is None:  # find_unused_parameters may return zeros for globally unused ones
        assert got is not None
        want = torch.zeros_like(got)
    tolerance = (8 + world_size) * max(eps_of(want.dtype), lossy)
    scale = max(scale or norm(want), floor)
    if scale:
        tolerance = max(tolerance, _NOISE_MULTIPLE * noise / scale)
    return difference(name, got, want, scale=scale, tolerance=tolerance)


def _subtract(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Subtract in at least float32; float64 is not needed, since close numbers subtract exactly."""
    dtype = _at_least_float32(torch.promote_types(got.dtype, want.dtype))
    return got.to(dtype) - want.to(dtype)


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _to_finite(value: float) -> float:
    if math.isnan(value):
        return _LARGEST  # a negative NaN must not become a small error
    return value if math.isfinite(value) and abs(value) < _LARGEST else math.copysign(_LARGEST, value)


def fit(target: Mapping[str, torch.Tensor], parts: Sequence[Mapping[str, torch.Tensor]]) -> tuple[list[float], float]:
    """Return least-squares weights with which `parts` sum to `target`, and the relative residual."""
    names = [name for name in target if all(name in part for part in parts)]
    count = len(parts)
    gram = torch.zeros(count, count, dtype=torch.float64)
    right = torch.zeros(count, dtype=torch.float64)
    power = 0.0

    def pieces() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for name in names:
            for wanted, *others in _pieces(*(dense(tensors[name]) for tensors in (target, *parts))):
                yield wanted.double().reshape(-1), torch.stack([part.double().reshape(-1) for part in others])

    for wanted, rows in pieces():
        gram += (rows @ rows.T).cpu()
        right += (rows @ wanted).cpu()
        power += float(wanted @ wanted)
    weights = torch.linalg.lstsq(gram, right.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    left_over = 0.0
    for wanted, rows in pieces():
        explained = sum(weight * row for weight, row in zip(weights.tolist(), rows, strict=True))
        left_over += float((wanted - explained).square().sum())
    return weights.tolist(), math.sqrt(left_over / power) if power else 0.0
