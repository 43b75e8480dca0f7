"""Detect running statistics that a script keeps outside of modules to normalize inputs.

Detection uses numbers, not names. If inputs of forward are (x - m) / c, and m has moved towards the mean of the
samples x since the last look, then m / c has moved by a / (1 - a) of the mean of the inputs: an equation per feature,
with one unknown number for all features. If x is still in memory, the inputs are compared with x, too.

A rollout updates the statistics many times before the wrapper is called, and acts by calls of the inner module or of a
part. Such calls are recorded, too; a statistic found there counts once the wrapper is given rows of the rollout.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import torch
from torch import nn

from ddpcheck.findings.evidence.replicas import RunningStatistic
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.replace import replace
from ddpcheck.findings.source_lines import file_of_class, frames_from, is_of_program
from ddpcheck.gather.forward_hooks import OutsideOfTraining, before_forward
from ddpcheck.gather.patching import Recorder
from ddpcheck.recipe.pytree import tree_leaves, tree_tensors
from ddpcheck.record.loop.optimizer_steps import DDP_FILE
from ddpcheck.record.recording import Recording, UnpickledHook
from ddpcheck.record.source.program_numbers import is_usable, program_contents, tensor_of
from ddpcheck.record.source.source_scope import updating_line
from ddpcheck.stream.rank_report import is_probed

_MOST_INPUTS = 4  # max input tensors of a forward call
_MOST_COMPARED = 128  # max compared features, and rows
_MOST_SCALES = 32  # variables tried as divisors
_MOST_ROWS = 1 << 13  # max rows of a table that may contain the inputs
_MOST_HELD = 128  # max variables
_MOST_SAMPLES = 16  # variables tried as inputs before normalization, and kept rows of a rollout
_MOST_COUNTS = 8  # count variables per sum
_MOST_CALLS = 32  # collectives that are checked, once a statistic is known
_SHOWN = 16  # max elements of a statistic that are written to the log
_EPS = (0.0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)  # usual terms added to a variance
_FITS = 1e-3  # relative residual, in at least three features: two features fit one of many scales by chance
_SAME = 1e-4  # relative to the divisor of the inputs
_ROUNDED = 2e-3  # relative rounding error above which a move is unknown
_CLEARLY = 10  # factor by which a fit must beat the fit of the plain inputs
_LARGEST_SHARE = 0.999  # of the last samples in a statistic; a larger share means the samples' own mean


@dataclass(frozen=True, slots=True, eq=False)
class _Numbers:
    """Sampled features of a variable, or of a forward input as (samples, features)."""

    features: int  # number of all features
    count: int  # number of samples
    mean: torch.Tensor
    rounding: torch.Tensor  # rounding error of each mean
    rows: torch.Tensor  # some of the samples
    holder: type = NoneType  # class that holds a variable; `NoneType` for a function


@dataclass(slots=True)
class _Look:
    """Program variables and inputs at one call of forward."""

    variables: dict[str, _Numbers] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    inputs: list[_Numbers] = field(default_factory=list)
    samples: list[_Numbers] = field(default_factory=list)  # possible inputs before normalization
    whole: list[_Numbers] = field(default_factory=list)  # larger tables of inputs or samples: a rollout
    offsets: dict[str, torch.Tensor] = field(default_factory=dict)  # means of samples, by name of the subtrahend
    acts: int = -1  # number of rollout calls so far

    def without_rows(self) -> _Look:
        return replace(self, inputs=[replace(x, rows=x.rows[:0]) for x in self.inputs], samples=[], whole=[])


@dataclass(slots=True)
class _Tally:
    """Moves of a variable since the last recorded call of the wrapper."""

    moves: list[int] = field(default_factory=list)  # number of equations per move; 0 if not towards the inputs' mean
    features: int = 0  # features of a found statistic; 0 if none
    scale: torch.Tensor = field(default_factory=torch.Tensor)  # divisor of the normalization
    goes_on: bool | None = None  # True if found after a wrapper call; else ranks may synchronize the statistic there
    # (rows as given, rows before normalization) at each fit
    rows: deque[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=lambda: deque(maxlen=_MOST_SAMPLES))
    is_trained_on: bool = False  # True once the wrapper was given one of the rows


@dataclass(slots=True)
class _Followed:
    number: int
    without: set[int]
    forwards: int = 0
    called: _Look = field(default_factory=_Look)  # last look in a wrapper call
    acted: _Look = field(default_factory=_Look)  # last look in a rollout call
    tallies: dict[str, _Tally] = field(default_factory=dict)
    entry: int = 0  # `id()` of the part by which a rollout has entered the module
    rollouts: int = 0
    calls: int = 0  # calls in this rollout
    acts: int = 0  # calls in all rollouts


class StatisticsRecorder(Recorder, subjects=("replicas",)):
    """Recorder of program variables in some calls of wrappers, to find running statistics."""

    def __init__(self, run: Recording) -> None:
        self._run = run
        self._followed: list[_Followed] = []
        self._exchanged = Counter[str]()
        self._calls = 0

    def follow(self, wrapper: nn.Module, number: int) -> None:
        state = _Followed(number, {id(part) for part in wrapper.modules()})
        self._followed.append(state)
        wrapper.register_forward_pre_hook(UnpickledHook(functools.partial(self._called, state)), with_kwargs=True)
        if isinstance(wrapper, nn.parallel.DistributedDataParallel):
            hook = OutsideOfTraining(UnpickledHook(functools.partial(self._acts, state)))
            for part in (wrapper.module, *wrapper.module.children()):
                user = part is wrapper.module or type(part) is nn.Sequential or is_of_program(file_of_class(type(part)))
                if user and not isinstance(part, nn.TransformerEncoderLayer):  # a hook disables the fast path
                    before_forward(part, hook, with_kwargs=True)

    def note_collective(self, call: Call, call_args: Mapping[str, Any]) -> None:
        """Count a collective whose input may contain a multiple of a known statistic."""
        sizes = {name: t.features for state in self._followed for name, t in state.tallies.items() if t.features}
        if not sizes or len(call.members) < 2 or self._calls >= _MOST_CALLS:
            return
        tensors = map(tensor_of, tree_leaves(dict(call_args)))
        if not (inputs := [t for t in tensors if t is not None and t.numel() >= min(sizes.values())]):
            return
        self._calls += 1
        variables = _held_variables(set(sizes.values()), lambda _: False)[0].variables
        names = sizes.keys() & variables.keys()
        self._exchanged.update(name for name in names if any(_contains(t, variables[name]) for t in inputs))

    def _acts(self, state: _Followed, part: nn.Module, *inputs: Any) -> None:
        """Handle a call of a submodule, by the wrapper or in a rollout."""
        if not state.entry:
            if any(frame.f_code.co_filename == DDP_FILE for frame in frames_from(sys._getframe(1))):
                return
            state.entry, state.rollouts, state.calls = id(part), state.rollouts + 1, 0
        if state.entry == id(part):
            count, state.calls, acts, state.acts = state.calls, state.calls + 1, state.acts, state.acts + 1
            if _is_recorded_call(state.rollouts) and _is_recorded_call(count) and (look := self._look(state, inputs)):
                if state.called.acts == acts:
                    _compare(state, look, state.called, begins=True)
                if state.acted.acts == acts:
                    _compare(state, look, state.acted)
                state.acted = look.without_rows()

    def _called(self, state: _Followed, _module: nn.Module, *inputs: Any) -> None:
        count, state.forwards = state.forwards, state.forwards + 1
        acted, state.entry = state.entry != 0 and _is_recorded_call(state.rollouts), 0
        if not (acted or is_probed(count) or is_probed(count - 1)) or not (look := self._look(state, inputs)):
            return
        unseen = state.acts > max(state.acted.acts, state.called.acts, 0)
        _compare(state, look, state.called, counts=state.called.acts == state.acts and _is_recorded_call(count - 1))
        state.called = look.without_rows()
        for name, tally in state.tallies.items():
            if not tally.features or (unseen and not tally.moves) or (mean := look.variables.get(name)) is None:
                continue
            tally.is_trained_on |= any(_are_from(tally, x, mean) for x in look.inputs)
            fits = tally.is_trained_on and tally.goes_on is not False
            values, scales = (tuple(t[:_SHOWN].tolist()) for t in (mean.mean, tally.scale))
            line, equations = updating_line(name.partition(" / ")[0], mean.holder), sum(tally.moves) if fits else 0
            moves = self._exchanged[name], len(tally.moves), tally.moves.count(0)
            tally.moves = []
            self._run.add(RunningStatistic(state.number, count, name, values, scales, equations, line, *moves))

    def _look(self, state: _Followed, inputs: Sequence[Any]) -> _Look | None:
        tensors = [t for t in tree_tensors(inputs) if t.is_floating_point() and is_usable(t)][:_MOST_INPUTS]
        return replace(_look(tensors, self._run.samples, state.without), acts=state.acts) if tensors else None


def _compare(state: _Followed, look: _Look, last: _Look, *, counts: bool = True, begins: bool = False) -> None:
    """Record moves since the last look; without `counts`, only those of found statistics.

    `begins`: True if `look` is at the first call of a rollout, and `last` at a call of the wrapper.
    """
    _divide(look, last)
    both = [(name, now, last.variables[name]) for name, now in look.variables.items() if name in last.variables]
    alike = [(name, now, before) for name, now, before in both if now.features == before.features]
    changed = [name for name, now, before in alike if bool(((now.mean - before.mean).abs() > now.rounding).any())]
    finders = (_moved_with_inputs, _moved_with_samples, _moved_with_table)
    fits = {name: fit for finder in finders for name, fit in finder(look, last, changed).items()}
    for name in changed if counts else fits:
        tally, mean = state.tallies.setdefault(name, _Tally()), look.variables[name]
        if begins:
            tally.goes_on = name in fits or tally.goes_on is True
        tally.moves.append(fits[name][0] if name in fits else 0)
        if name in fits:
            tally.features, tally.scale = mean.features, fits[name][1]
            batches = [x.rows for x in look.inputs if x.features == mean.features]
            tally.rows += [(rows.clone(), rows * tally.scale + mean.mean) for rows in batches]


_Found = dict[str, tuple[int, torch.Tensor]]  # (number of equations, scale) by name of a statistic


def _is_recorded_call(count: int) -> bool:
    """Return True if a call or rollout is recorded: probed ones and their successors."""
    return is_probed(count) or is_probed(count - 1)


def _are_from(tally: _Tally, inputs: _Numbers, mean: _Numbers) -> bool:
    """Return True if `inputs` contain a rollout row, plain or normalized by `mean`."""
    if inputs.features != mean.features:
        return False
    new = inputs.rows[inputs.rows.any(1)][:, None]
    pairs = ((rows, (raw - mean.mean) / tally.scale) for rows, raw in tally.rows)
    return any(bool(((new - old).abs() <= _SAME).all(2).any()) for pair in pairs for old in pair)


def _moved_with_inputs(look: _Look, last: _Look, changed: Sequence[str]) -> _Found:
    """Find variables that moved like the mean of the inputs times another variable."""
    fits: _Found = {}
    for name in changed:
        now, before = look.variables[name], last.variables[name]
        best = _FITS
        for src, scaled_by in ((look, look), (last, last), (look, last)):  # updated before use, later, or right after
            inputs = [x for x in src.inputs if x.features == now.features > 1]
            inputs = [x for x in inputs if _may_fit(now, before, x)]
            scales = _scales(scaled_by, name) if inputs else torch.empty(0)
            for x in inputs if len(scales) else ():
                moved, mask = _moved(now, before, scales)
                mask &= x.rounding <= _ROUNDED * x.mean.norm()
                residual = _residuals(moved * mask, x.mean * mask)
                plain = (x.mean, x.mean - before.mean)  # plain sums or means of the inputs, no statistics
                plainly = torch.minimum(*(_residuals(moved * mask, base * mask / scales) for base in plain))
                residual[(residual * _CLEARLY >= plainly) | (mask.sum(1) < 3)] = 1.0
                number = int(residual.argmin())
                if residual[number] < best:
                    best, fits[name] = float(residual[number]), (int(mask[number].sum()) - 1, scales[number])
    return fits


def _may_fit(now: _Numbers, before: _Numbers, inputs: _Numbers) -> bool:
    """Return False if no positive scale fits the move to the inputs (quick test)."""
    moved, size = now.mean - before.mean, inputs.mean.norm()
    mask = (moved.abs() > 2 * now.rounding) & (inputs.rounding <= _ROUNDED * size)
    return not bool((mask & (moved * inputs.mean < 0) & (inputs.mean.abs() > 2 * _FITS * size)).any())


def _moved_with_samples(look: _Look, last: _Look, changed: Sequence[str]) -> _Found:
    """Find variables subtracted from known samples that moved towards the samples' mean."""
    fits: _Found = {}
    for x in look.inputs if changed else ():
        for samples in look.samples:
            for (offset, scale), name in itertools.product(_affine(x, samples), changed):
                now, before = look.variables[name], last.variables[name]
                if now.features == x.features and _is_at(offset, scale, now):
                    look.offsets[name] = samples.mean
                elif now.features != x.features or not _is_at(offset, scale, before):
                    continue
                moved, mask = _moved(now, before, scale[None])
                mask &= offset.abs() > _CLEARLY * _SAME * scale
                for mean in (samples.mean, last.offsets.get(name)):  # updated before or after use
                    if mean is not None and _are_shares(moved * mask, (mean - before.mean) / scale * mask)[0]:
                        fits[name] = max(1, int(mask.sum()) - 1), scale
    return fits


def _is_at(offset: torch.Tensor, scale: torch.Tensor, numbers: _Numbers) -> bool:
    return bool(((numbers.mean - offset).abs() <= _SAME * scale).all())


def _moved_with_table(look: _Look, last: _Look, changed: Sequence[str]) -> _Found:
    """Find variables that moved towards the mean of a table with the raw inputs."""
    fits: _Found = {}
    for whole in look.whole if changed else ():
        for name in (name for name in changed if look.variables[name].features == whole.features > 1):
            now, before = look.variables[name], last.variables[name]
            scales = torch.cat([torch.ones_like(now.mean)[None], _scales(look, name)])
            moved, mask = _moved(now, before, scales)
            shares = _are_shares(moved * mask, (whole.mean - before.mean) / scales * mask) & (mask.sum(1) > 1)
            inputs = [x for x in look.inputs if x.features == whole.features]
            for number in shares.nonzero().flatten().tolist():
                if any(_are_in(x.rows * scales[number] + now.mean, whole, scales[number]) for x in inputs):
                    fits[name] = int(mask[number].sum()) - 1, scales[number]
    return fits


def _are_in(rows: torch.Tensor, whole: _Numbers, scale: torch.Tensor | float) -> bool:
    """Return True if the first, middle and last row are in a table."""
    few = [rows[0], rows[len(rows) // 2], rows[-1]]
    return all(bool(((whole.rows - row).abs() <= _SAME * scale).all(1).any()) for row in few)


def _moved(now: _Numbers, before: _Numbers, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return moves per scale, and a mask of features with known moves."""
    moved = (now.mean - before.mean) / scales
    size: torch.Tensor = moved.norm(dim=1, keepdim=True) / moved.shape[1] ** 0.5
    return moved, now.rounding <= _ROUNDED * scales * size


def _scales(look: _Look, name: str) -> torch.Tensor:
    """Return possible divisors of the inputs, one per row: variables and their roots."""
    mean = look.variables[name]
    means = [x.mean for x in look.variables.values() if x.features == mean.features]
    positive = [t for t in means if bool((t >= 0).all()) and bool((t > 0).any())][:_MOST_SCALES]
    divisors = torch.stack(positive or [mean.mean.abs()])
    variances = torch.cat([divisors, divisors - mean.mean.square()])
    variances = variances[(variances >= 0).all(1)]
    roots = (variances + torch.tensor(_EPS, dtype=torch.float64)[:, None, None]).sqrt().flatten(0, 1)
    return torch.cat([divisors, roots]).clamp_min(1e-300)


def _residuals(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return, per row, the relative residual of `got` from a positive multiple of `wanted`."""
    factors = (got * wanted).sum(1, keepdim=True) / (wanted * wanted).sum(1, keepdim=True).clamp_min(1e-300)
    residuals = (got - factors * wanted).norm(dim=1) / got.norm(dim=1).clamp_min(1e-300)
    fits: torch.Tensor = torch.where((factors[:, 0] > 0) & residuals.isfinite(), residuals, 1.0)
    return fits


def _are_shares(moved: torch.Tensor, way: torch.Tensor) -> torch.Tensor:
    """Return True for each row that moved by a common share of `way`."""
    part: torch.Tensor = (moved.norm(dim=1) < _LARGEST_SHARE * way.norm(dim=1)) & (moved.norm(dim=1) > 0)
    part &= _residuals(moved, way) < _FITS
    return part


def _affine(inputs: _Numbers, samples: _Numbers) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return [(m, c)] if inputs are (samples - m) / c, else []."""
    if (inputs.features, inputs.count) != (samples.features, samples.count) or inputs.count < 3:
        return []
    x_mean, y_mean = samples.rows.mean(0), inputs.rows.mean(0)
    x, y = samples.rows - x_mean, inputs.rows - y_mean
    scale = (x * y).sum(0) / (y * y).sum(0).clamp_min(1e-300)
    offset = x_mean - scale * y_mean
    fits = bool(((x - scale * y).norm(dim=0) <= _FITS * x.norm(dim=0)).all()) and bool((scale > 0).all())
    return [(offset, scale)] if fits else []


def _look(tensors: Sequence[torch.Tensor], samples: Iterable[torch.Tensor], without: Collection[int]) -> _Look:
    totals = {tensor.numel() for tensor in tensors}
    rows = {tensor[0].numel() for tensor in tensors if tensor.dim() > 1}
    sizes = {size for tensor in tensors for size in _features(tensor)}
    look, variables = _held_variables(sizes, lambda t: t.numel() in totals or _row_of(t) in rows, without)
    candidates = [tensor for tensor in (*variables, *samples) if tensor.numel() in totals]
    wanted = {x.features for x in look.variables.values() if x.features > 1 or candidates}
    tables = [t.reshape(-1, _row_of(t)) for t in variables if max(totals) < t.numel() and _row_of(t) in wanted]
    look.inputs = [layout for tensor in tensors for layout in _layouts(tensor, wanted)]
    look.samples = [layout for tensor in candidates for layout in _layouts(tensor, wanted)]
    look.whole = [_numbers(table, most=_MOST_ROWS) for table in tables if len(table) <= _MOST_ROWS]
    pairs = [(whole, [x for x in look.inputs if x.features == whole.features]) for whole in look.whole]
    look.inputs += [whole for whole, inputs in pairs if any(_are_in(x.rows, whole, 1.0) for x in inputs)]
    return look


def _divide(look: _Look, last: _Look) -> None:
    """Add each variable divided by a count that changed in the same object."""
    counts = [name for name, number in look.counts.items() if last.counts.get(name, number) != number]
    for src in (look, last) if counts else ():
        for name, numbers in list(src.variables.items()):
            for count in [count for count in counts if _holder(count) == _holder(name)][:_MOST_COUNTS]:
                for minus, divisor in ((0, count), (1, f"({count} - 1)")):  # - 1 for a variance
                    if (number := src.counts[count] - minus) > 0 and numbers.features > 1:
                        mean, rounding = numbers.mean / number, numbers.rounding / number
                        src.variables.setdefault(f"{name} / {divisor}", replace(numbers, mean=mean, rounding=rounding))


def _row_of(tensor: torch.Tensor) -> int:
    """Return the last dimension of a table; 0 for a vector or scalar."""
    return tensor.shape[-1] if tensor.dim() > 1 else 0


def _features(tensor: torch.Tensor) -> set[int]:
    """Return possible feature counts: 1, sample size, second or last dimension."""
    return {1, tensor[0].numel() if tensor.dim() > 1 else tensor.numel(), *tensor.shape[1:2], *tensor.shape[-1:]}


def _layouts(tensor: torch.Tensor, wanted: Collection[int]) -> list[_Numbers]:
    """Return a tensor as samples by features, for each wanted feature count."""
    tensor, layouts = tensor.detach(), {}
    for features in _features(tensor) & set(wanted):
        second = tensor.dim() > 2 and features not in (1, tensor[0].numel(), tensor.shape[-1])
        layouts[features] = (tensor.movedim(1, -1) if second else tensor).reshape(-1, features)
    return [_numbers(rows) for rows in layouts.values()]


def _numbers(rows: torch.Tensor, *, most: int = _MOST_COMPARED) -> _Numbers:
    count, features = rows.shape
    few = rows[:, _spread(features)]
    eps = torch.finfo(rows.dtype).eps if rows.is_floating_point() else 0.0
    mean = few.mean(0, dtype=torch.float64).cpu()
    rounding = eps * few.abs().amax(0).double().cpu()
    for bound in (few.amax(), few.amin()) if most else ():  # the mean of clipped samples is unknown
        if float(2 * bound).is_integer() or int((few == bound).sum()) > 1:
            rounding[(few == bound).any(0).cpu()] = math.inf
    return _Numbers(features, count, mean, rounding, few[_spread(count, most)].double().cpu())


def _spread(count: int, most: int = _MOST_COMPARED) -> torch.Tensor | slice:
    return slice(min(count, most)) if count <= most or not most else torch.linspace(0, count - 1, most).long()


def _held_variables(
    sizes: Collection[int], are_samples: Callable[[torch.Tensor], bool], without: Collection[int] = ()
) -> tuple[_Look, list[torch.Tensor]]:
    """Return variables with a size in `sizes`, counts, and tensors that may be samples."""
    look = _Look()
    items = look.variables
    samples: list[torch.Tensor] = []
    ids: dict[str, int] = {}  # `id()` by name
    kinds: dict[str, type] = {}
    for path, value in program_contents(wide=True, without=without):
        tensor, name = tensor_of(value), path.partition(".")[2]
        if ids.setdefault(name, id(value)) != id(value):  # another function has a variable of the same name
            name = path
        kinds[name] = type(value)
        if tensor is None or name in items or len(items) >= _MOST_HELD:
            continue
        if tensor.numel() == 1 and (number := float(tensor)) >= 1 and number.is_integer():
            look.counts[name] = number
        elif tensor.numel() in sizes and bool(tensor.isfinite().all()):
            items[name] = replace(_numbers(tensor.reshape(1, -1), most=0), holder=kinds.get(_holder(name), NoneType))
        if tensor.dim() and len(samples) < _MOST_SAMPLES and are_samples(tensor):
            samples.append(tensor)
    return look, samples


def _holder(name: str) -> str:
    return name[: max(name.rfind("."), name.rfind("["))] if "." in name or "[" in name else ""


def _contains(inputs: torch.Tensor, statistic: _Numbers) -> bool:
    """Return True if the input of a collective contains a multiple of a statistic."""
    numbers = inputs.detach().flatten().double().cpu()[: 1 << 16]
    if statistic.features > min(len(numbers), _MOST_COMPARED):
        return len(numbers) >= statistic.features  # unknown: assume so
    windows = numbers.unfold(0, statistic.features, 1)
    if statistic.features == 1:
        return bool(((windows - statistic.mean).abs() <= 1e-6 * statistic.mean.abs()).any())
    alike = windows @ statistic.mean
    return bool((alike.abs() >= (1 - 1e-6) * statistic.mean.norm() * windows.norm(dim=1)).logical_and(alike != 0).any())
