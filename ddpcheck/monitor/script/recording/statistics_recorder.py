"""Running statistics that a script keeps outside of wrapped modules, and by which it normalises what it gives them.

They are known by numbers, not by names. Where inputs of forward are (x - m) / c, and m has moved towards the mean of
the samples x since the last look, then m / c has moved by a / (1 - a) of the mean of the inputs: an equation for each
feature, with one unknown number for all of them. Where x itself is still there, the inputs are compared with it, too.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ddpcheck.findings.evidence.running_statistics import RunningStatistic
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.monitor.module_hooks import UnpickledHook
from ddpcheck.monitor.rank_report import is_probed
from ddpcheck.monitor.script.recording.program_numbers import held_by_program
from ddpcheck.monitor.script.recording.updating_line import updating_line
from ddpcheck.recipe.pytree import tree_leaves, tree_tensors

_MOST_INPUTS = 4
_MOST_ELEMENTS = 1 << 22  # of an input
_MOST_COMPARED = 512  # features, and rows
_MOST_HELD = 128  # variables
_MOST_COUNTS = 8  # beside a sum
_MOST_CALLS = 32  # of collectives that are looked at, once there is a statistic that they may be given
_SHOWN = 16
_EPS = (0.0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)  # as added to a variance
_FITS = 1e-3  # relative residual
_SAME = 1e-4  # of what inputs are divided by
_ROUNDED = 2e-3  # relative rounding of what has changed, from which on nothing is known
_CLEARLY = 10  # times the residual of what the inputs as they are would explain
_LARGEST_SHARE = 0.999  # of the last samples in a statistic: their own mean is no running one


@dataclass(frozen=True, slots=True, eq=False)
class _Numbers:
    """A variable, or an input of forward as samples by features: some of the features."""

    features: int  # all of them
    count: int  # of the samples
    mean: torch.Tensor
    rounding: torch.Tensor  # of each mean
    rows: torch.Tensor  # some of the samples


@dataclass(slots=True)
class _Look:
    """What was held, and given, when forward was called."""

    held: dict[str, _Numbers] = field(default_factory=dict)
    inputs: list[_Numbers] = field(default_factory=list)
    samples: list[_Numbers] = field(default_factory=list)  # what the inputs may have been before
    offsets: dict[str, torch.Tensor] = field(default_factory=dict)  # by name of what is subtracted, means of samples


@dataclass(slots=True)
class _Followed:
    number: int
    without: set[int]
    forwards: int = 0
    last: _Look = field(default_factory=_Look)
    scales: dict[str, torch.Tensor] = field(default_factory=dict)  # by name of a statistic that was found


class StatisticsRecorder:
    """Looks at what the program holds in some calls of wrappers; hands running statistics to `sink`."""

    def __init__(
        self, sink: Callable[[RunningStatistic], object], samples: Callable[[], Iterable[torch.Tensor]]
    ) -> None:
        """Begin; `samples` gives copies of the tensors of the last batch of a loader."""
        self._sink = sink
        self._samples = samples
        self._followed: list[_Followed] = []
        self._exchanged: dict[str, int] = {}
        self._calls = 0

    def follow(self, wrapper: nn.Module, number: int) -> None:
        """Listen to the calls of a wrapper."""
        one = _Followed(number, {id(part) for part in wrapper.modules()})
        self._followed.append(one)
        wrapper.register_forward_pre_hook(UnpickledHook(functools.partial(self._called, one)), with_kwargs=True)

    def note_collective(self, call: Call, given: Mapping[str, Any]) -> None:
        """A collective is about to be made: of a statistic, perhaps, or of its multiple."""
        known = {name: one.last.held[name] for one in self._followed for name in one.scales if name in one.last.held}
        if not known or len(call.members) < 2 or self._calls >= _MOST_CALLS:
            return
        fewest = min(one.features for one in known.values())
        handed = [one for leaf in tree_leaves(dict(given)) if (one := _tensor(leaf)) is not None]
        if not any(one.numel() >= fewest for one in handed):
            return
        self._calls += 1
        now = _held({one.features for one in known.values()}, set())[0]
        for name in known.keys() & now.keys():
            if any(_contains(one, now[name]) for one in handed):
                self._exchanged[name] = self._exchanged.get(name, 0) + 1

    def _called(self, one: _Followed, _module: nn.Module, *given: Any) -> None:
        count, one.forwards = one.forwards, one.forwards + 1
        if not is_probed(count) and not is_probed(count - 1):  # what has changed from one call to the next
            return
        tensors = [t for t in tree_tensors(given) if t.is_floating_point() and _is_usable(t)][:_MOST_INPUTS]
        if not tensors:
            return
        inputs = [layout for tensor in tensors for layout in _layouts(tensor)]
        totals = {tensor.numel() for tensor in tensors}
        held, samples = _held({layout.features for layout in inputs}, totals, one.without)
        samples += [t for t in self._samples() if t.numel() in totals]
        look = _Look(held, inputs, [layout for tensor in samples for layout in _layouts(tensor)])
        last, one.last = one.last, look
        changed = [name for name in held if name in last.held and _has_moved(held[name], last.held[name])]
        found = {**_found_by_inputs(look, last, changed), **_found_by_samples(look, last, changed)}
        for name in found.keys() | (one.scales.keys() & held.keys()):
            equations, scale = found.get(name, (0, one.scales.get(name)))
            assert scale is not None
            one.scales[name] = scale
            values, scales = held[name].mean[:_SHOWN].tolist(), scale[:_SHOWN].tolist()
            where, times = updating_line(name.partition(" / ")[0]), self._exchanged.get(name, 0)
            self._sink(RunningStatistic(one.number, count, name, values, scales, equations, where, times))
        look.inputs = [replace(given, rows=given.rows[:0]) for given in look.inputs]
        look.samples = []


_Found = dict[str, tuple[int, torch.Tensor]]  # by name of a statistic: the number of equations, and the scale


def _found_by_inputs(look: _Look, last: _Look, changed: Sequence[str]) -> _Found:
    """What has moved as the mean of the inputs, times a scale that is held too."""
    found: _Found = {}
    for name in changed:
        now, before = look.held[name], last.held[name]
        best = _FITS
        for of, scaled_by in ((look, look), (last, last), (look, last)):  # updated before it is used, later, just after
            for given in of.inputs if now.features > 1 else ():
                for scale in _scales(scaled_by, name) if given.features == now.features else ():
                    known = _known(now, before, scale) & (given.rounding <= _ROUNDED * given.mean.norm())
                    moved, mean, weight = (now.mean - before.mean)[known], given.mean[known], scale[known]
                    if len(moved) < 2 or (residual := _residual(moved / weight, mean)) >= best:
                        continue
                    plainly = [
                        _residual(moved / weight, wanted / weight) for wanted in (mean, mean - before.mean[known])
                    ]
                    if residual * _CLEARLY < min(plainly):  # it is no sum or mean of the inputs as they are
                        best, found[name] = residual, (len(moved) - 1, scale)
    return found


def _found_by_samples(look: _Look, last: _Look, changed: Sequence[str]) -> _Found:
    """What is subtracted from samples that are still there, and has moved towards their mean."""
    found: _Found = {}
    for given in look.inputs if changed else ():
        for samples in look.samples:
            if (line := _affine(given, samples)) is None:
                continue
            offset, scale = line
            for name in changed:
                now, before = look.held[name], last.held[name]
                subtracted = [one for one in (now, before) if _is_same(one, given.features, offset, scale)]
                if not subtracted:
                    continue
                if now in subtracted:
                    look.offsets[name] = samples.mean
                known = _known(now, before, scale) & (offset.abs() > _CLEARLY * _SAME * scale)
                moved = ((now.mean - before.mean) / scale)[known]
                for mean in (samples.mean, last.offsets.get(name)):
                    if mean is not None and _is_share(moved, ((mean - before.mean) / scale)[known]):
                        found[name] = max(1, len(moved) - 1), scale
    return found


def _is_same(one: _Numbers, features: int, offset: torch.Tensor, scale: torch.Tensor) -> bool:
    return one.features == features and bool(((one.mean - offset).abs() <= _SAME * scale).all())


def _has_moved(now: _Numbers, before: _Numbers) -> bool:
    return now.features == before.features and bool(((now.mean - before.mean).abs() > now.rounding).any())


def _known(now: _Numbers, before: _Numbers, scale: torch.Tensor) -> torch.Tensor:
    """The features whose change is known well enough, beside that of all."""
    there: torch.Tensor = scale > 0
    moved = torch.where(there, (now.mean - before.mean) / scale, 0.0)
    there &= now.rounding <= _ROUNDED * scale * moved.norm() / len(moved) ** 0.5
    return there


def _scales(look: _Look, name: str) -> Iterator[torch.Tensor]:
    """By what the inputs may have been divided: a variable of as many features, or the root of one."""
    mean = look.held.get(name)
    for key, one in look.held.items() if mean is not None else ():
        if mean is None or key == name or one.features != mean.features or not bool((one.mean >= 0).all()):
            continue
        yield one.mean
        for variance in (one.mean, one.mean - mean.mean.square()):
            if bool((variance >= 0).all()):
                yield from ((variance + eps).sqrt() for eps in _EPS)


def _residual(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The relative part of `got` that a positive multiple of `wanted` does not explain."""
    factor = float(torch.dot(got, wanted) / torch.dot(wanted, wanted).clamp_min(1e-300))
    return float((got - factor * wanted).norm() / got.norm()) if 0 < factor < math.inf else 1.0


def _is_share(moved: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether what has moved is one share of the whole way."""
    shares = len(moved) > 0 and 0 < float(moved.norm()) < _LARGEST_SHARE * float(whole.norm())
    return shares and _residual(moved, whole) < _FITS


def _affine(given: _Numbers, samples: _Numbers) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The offset m and the scale c, for each feature, by which inputs are (samples - m) / c; `None` if they are not."""
    if (given.features, given.count) != (samples.features, samples.count) or given.count < 3:
        return None
    x_mean, y_mean = samples.rows.mean(0), given.rows.mean(0)
    x, y = samples.rows - x_mean, given.rows - y_mean
    scale = (x * y).sum(0) / (y * y).sum(0).clamp_min(1e-300)
    offset = x_mean - scale * y_mean
    fits = bool(((x - scale * y).norm(dim=0) <= _FITS * x.norm(dim=0)).all()) and bool((scale > 0).all())
    return (offset, scale) if fits else None


# What is there


def _layouts(tensor: torch.Tensor) -> list[_Numbers]:
    """A tensor as samples by features: these may be all but its first dimension, its last, its second, or just one."""
    tensor = tensor.detach()
    found = [tensor.reshape(len(tensor), -1) if tensor.dim() > 1 else tensor.reshape(1, -1), tensor.reshape(-1, 1)]
    if tensor.dim() > 2:
        found += [tensor.reshape(-1, tensor.shape[-1]), tensor.movedim(1, -1).reshape(-1, tensor.shape[1])]
    by_features = {one.shape[1]: one for one in reversed(found)}
    return [_numbers(one) for one in by_features.values()]


def _numbers(rows: torch.Tensor, *, keep: bool = True) -> _Numbers:
    count, features = rows.shape
    few = rows[:, _spread(features)]
    eps = torch.finfo(rows.dtype).eps if rows.is_floating_point() else 0.0
    mean = few.mean(0, dtype=torch.float64).cpu()
    rounding = eps * few.abs().amax(0).double().cpu()
    return _Numbers(features, count, mean, rounding, few[_spread(count) if keep else slice(0)].double().cpu())


def _spread(count: int) -> torch.Tensor | slice:
    return slice(None) if count <= _MOST_COMPARED else torch.linspace(0, count - 1, _MOST_COMPARED).long()


def _tensor(value: Any) -> torch.Tensor | None:
    """The numbers of a variable, as they are."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(type(value), numpy.ndarray | numpy.floating) and value.dtype.kind == "f":
        plain = value.dtype.itemsize in (4, 8) and 0 < value.size <= _MOST_ELEMENTS
        return torch.from_numpy(numpy.array(value)) if plain else None
    if type(value) in (float, int):
        return torch.tensor(float(value), dtype=torch.float64) if abs(value) < 1e300 else None
    if type(value) is list and 1 < len(value) <= _MOST_COMPARED and all(type(one) is float for one in value):
        return torch.tensor(value, dtype=torch.float64)
    return value if type(value) is torch.Tensor and not value.requires_grad and _is_usable(value) else None


def _is_usable(tensor: torch.Tensor) -> bool:
    plain = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_complex()
    return plain and tensor.device.type != "meta" and 0 < tensor.numel() <= _MOST_ELEMENTS


def _held(
    sizes: Collection[int], totals: Collection[int], without: Collection[int] = ()
) -> tuple[dict[str, _Numbers], list[torch.Tensor]]:
    """The variables with as many features, the quotients of sums and counts too; and those with as many elements."""
    found: dict[str, _Numbers] = {}
    samples: list[torch.Tensor] = []
    counts: dict[str, list[tuple[str, float]]] = {}
    known: dict[str, int] = {}  # by name, the identity
    for path, value in held_by_program(wide=True, without=without):
        tensor, name = _tensor(value), path.partition(".")[2]
        if known.setdefault(name, id(value)) != id(value):  # another function has a variable of that name
            name = path
        if tensor is None or name in found or len(found) >= _MOST_HELD:
            continue
        if tensor.numel() == 1 and (number := float(tensor)) >= 1 and number.is_integer():
            counts.setdefault(_holder(name), []).append((name, number))
        elif tensor.numel() in sizes and bool(tensor.isfinite().all()):
            found[name] = _numbers(tensor.reshape(1, -1), keep=False)
        if tensor.numel() in totals and tensor.dim() and len(samples) < _MOST_HELD:
            samples.append(tensor)
    for name, one in list(found.items()):
        for count, number in counts.get(_holder(name), [])[:_MOST_COUNTS]:
            mean, rounding = one.mean / number, one.rounding / number
            found[f"{name} / {count}"] = replace(one, mean=mean, rounding=rounding)
    return found, samples


def _holder(name: str) -> str:
    return name[: max(name.rfind("."), name.rfind("["))] if "." in name or "[" in name else ""


def _contains(handed: torch.Tensor, held: _Numbers) -> bool:
    """Whether some of the numbers that a collective is given are a statistic, or a multiple of it."""
    numbers = handed.detach().flatten().double().cpu()[: 1 << 16]
    if held.features > min(len(numbers), _MOST_COMPARED):
        return len(numbers) >= held.features  # not known
    windows = numbers.unfold(0, held.features, 1)
    if held.features == 1:
        return bool(((windows - held.mean).abs() <= 1e-6 * held.mean.abs()).any())
    alike = windows @ held.mean
    return bool((alike.abs() >= (1 - 1e-6) * held.mean.norm() * windows.norm(dim=1)).logical_and(alike != 0).any())
