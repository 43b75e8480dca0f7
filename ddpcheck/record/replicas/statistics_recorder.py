"""Detect running statistics that a script keeps outside of modules to normalize inputs.

Detection uses numbers, not names. If inputs of forward are (x - m) / c, and m += a * (x.mean(0) - m) since the last
recorded call, then m / c has moved by a / (1 - a) times the mean of the inputs: one equation per feature, with the same
unknown a for all features. If x is still in memory, the inputs are compared with x, too.

A rollout (reinforcement learning) calls the inner module or a submodule, and updates statistics many times before the
wrapper is called. A statistic found in these calls is recorded once the wrapper is given rows of the rollout.
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
_LARGEST_SHARE = 0.999  # of the last samples in a statistic; above, it is these samples' own mean


@dataclass(frozen=True, slots=True, eq=False)
class _Numbers:
    """Mean and some rows of a variable or forward input, reshaped to (samples, features)."""

    features: int  # number of all features
    count: int  # number of samples
    mean: torch.Tensor
    rounding: torch.Tensor  # rounding error of each mean
    rows: torch.Tensor  # some of the samples
    holder: type = NoneType  # class that holds a variable; `NoneType` for a function


@dataclass(slots=True)
class _Snapshot:
    """Program variables and forward inputs in one recorded call."""

    variables: dict[str, _Numbers] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    inputs: list[_Numbers] = field(default_factory=list)
    samples: list[_Numbers] = field(default_factory=list)  # inputs before normalization, possibly
    tables: list[_Numbers] = field(default_factory=list)  # larger tables of inputs or samples: a rollout
    offsets: dict[str, torch.Tensor] = field(default_factory=dict)  # means of samples, by name of the subtrahend
    calls: int = -1  # number of rollout calls so far

    def without_rows(self) -> _Snapshot:
        return replace(self, inputs=[replace(x, rows=x.rows[:0]) for x in self.inputs], samples=[], tables=[])


@dataclass(slots=True)
class _Tally:
    """Changes ("moves") of a variable between recorded calls, and if inputs explain each change."""

    moves: list[int] = field(default_factory=list)  # number of equations per move; 0 if no inputs fit
    features: int = 0  # features of a found statistic; 0 if none
    scale: torch.Tensor = field(default_factory=torch.Tensor)  # divisor of the normalization
    fits_between: bool | None = None  # False if ranks may synchronize the statistic between rollouts; None if unknown
    # (rows as given, rows before normalization) at each fit
    rows: deque[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=lambda: deque(maxlen=_MOST_SAMPLES))
    is_trained_on: bool = False  # True once the wrapper was given one of the rows


@dataclass(slots=True)
class _State:
    number: int
    without: set[int]
    forwards: int = 0
    last_forward: _Snapshot = field(default_factory=_Snapshot)  # in the last recorded call of the wrapper
    last_rollout: _Snapshot = field(default_factory=_Snapshot)  # in the last recorded call of a rollout
    tallies: dict[str, _Tally] = field(default_factory=dict)
    entry: int = 0  # `id()` of the submodule that a rollout calls; 0 for none
    rollouts: int = 0
    calls: int = 0  # calls in this rollout
    rollout_calls: int = 0  # calls in all rollouts


class StatisticsRecorder(Recorder, subjects=("replicas",)):
    """Recorder of program variables that are running statistics of the inputs of wrappers."""

    def __init__(self, run: Recording) -> None:
        self._run = run
        self._states: list[_State] = []
        self._collectives = Counter[str]()
        self._calls = 0

    def follow(self, wrapper: nn.Module, number: int) -> None:
        state = _State(number, {id(part) for part in wrapper.modules()})
        self._states.append(state)
        wrapper.register_forward_pre_hook(UnpickledHook(functools.partial(self._on_forward, state)), with_kwargs=True)
        if isinstance(wrapper, nn.parallel.DistributedDataParallel):
            hook = OutsideOfTraining(UnpickledHook(functools.partial(self._on_rollout, state)))
            for part in (wrapper.module, *wrapper.module.children()):
                user = part is wrapper.module or type(part) is nn.Sequential or is_of_program(file_of_class(type(part)))
                if user and not isinstance(part, nn.TransformerEncoderLayer):  # a hook disables the fast path
                    before_forward(part, hook, with_kwargs=True)

    def note_collective(self, call: Call, call_args: Mapping[str, Any]) -> None:
        """Count a collective whose input may contain a multiple of a known statistic."""
        sizes = {name: t.features for state in self._states for name, t in state.tallies.items() if t.features}
        if not sizes or len(call.members) < 2 or self._calls >= _MOST_CALLS:
            return
        tensors = map(tensor_of, tree_leaves(dict(call_args)))
        if not (inputs := [t for t in tensors if t is not None and t.numel() >= min(sizes.values())]):
            return
        self._calls += 1
        variables = _variables_of(set(sizes.values()), lambda _: False)[0].variables
        names = sizes.keys() & variables.keys()
        self._collectives.update(name for name in names if any(_contains(t, variables[name]) for t in inputs))

    def _on_rollout(self, state: _State, part: nn.Module, *inputs: Any) -> None:
        """Compare variables at a rollout's direct call of a submodule with earlier recorded calls."""
        if not state.entry:
            if any(frame.f_code.co_filename == DDP_FILE for frame in frames_from(sys._getframe(1))):
                return
            state.entry, state.rollouts, state.calls = id(part), state.rollouts + 1, 0
        if state.entry == id(part):
            count, rollout_calls = state.calls, state.rollout_calls
            state.calls, state.rollout_calls = count + 1, rollout_calls + 1
            if _is_recorded(state.rollouts) and _is_recorded(count) and (current := self._snapshot(state, inputs)):
                if state.last_forward.calls == rollout_calls:
                    _compare(state, current, state.last_forward, begins=True)
                if state.last_rollout.calls == rollout_calls:
                    _compare(state, current, state.last_rollout)
                state.last_rollout = current.without_rows()

    def _on_forward(self, state: _State, _module: nn.Module, *inputs: Any) -> None:
        count, state.forwards = state.forwards, state.forwards + 1
        ends_rollout, state.entry = state.entry != 0 and _is_recorded(state.rollouts), 0
        if not (ends_rollout or is_probed(count) or is_probed(count - 1)) or not (
            current := self._snapshot(state, inputs)
        ):
            return
        has_skipped = state.rollout_calls > max(state.last_rollout.calls, state.last_forward.calls, 0)
        counts = state.last_forward.calls == state.rollout_calls and _is_recorded(count - 1)
        _compare(state, current, state.last_forward, counts=counts)
        state.last_forward = current.without_rows()
        for name, tally in state.tallies.items():
            if not tally.features or (has_skipped and not tally.moves) or (mean := current.variables.get(name)) is None:
                continue
            tally.is_trained_on |= any(_contain_rollout_row(tally, x, mean) for x in current.inputs)
            fits = tally.is_trained_on and tally.fits_between is not False
            values, scales = (tuple(t[:_SHOWN].tolist()) for t in (mean.mean, tally.scale))
            line, equations = updating_line(name.partition(" / ")[0], mean.holder), sum(tally.moves) if fits else 0
            moves = self._collectives[name], len(tally.moves), tally.moves.count(0)
            tally.moves = []
            self._run.add(RunningStatistic(state.number, count, name, values, scales, equations, line, *moves))

    def _snapshot(self, state: _State, inputs: Sequence[Any]) -> _Snapshot | None:
        tensors = [t for t in tree_tensors(inputs) if t.is_floating_point() and is_usable(t)][:_MOST_INPUTS]
        current = _snapshot(tensors, self._run.samples, state.without) if tensors else None
        return current and replace(current, calls=state.rollout_calls)


def _compare(state: _State, current: _Snapshot, last: _Snapshot, *, counts: bool = True, begins: bool = False) -> None:
    """Add changes (moves) of variables since the last snapshot to `state.tallies`.

    If `counts` is True, moves that no inputs explain are added, too. `begins`: True if `current` is from the first call
    of a rollout, and `last` from a call of the wrapper.
    """
    _add_quotients(current, last)
    both = [(name, now, last.variables[name]) for name, now in current.variables.items() if name in last.variables]
    pairs = [(name, now, before) for name, now, before in both if now.features == before.features]
    changed = [name for name, now, before in pairs if bool(((now.mean - before.mean).abs() > now.rounding).any())]
    finders = (_fits_of_inputs, _fits_of_samples, _fits_of_table)
    fits = {name: fit for finder in finders for name, fit in finder(current, last, changed).items()}
    for name in changed if counts else fits:
        tally, mean = state.tallies.setdefault(name, _Tally()), current.variables[name]
        if begins:
            tally.fits_between = name in fits or tally.fits_between is True
        tally.moves.append(fits[name][0] if name in fits else 0)
        if name in fits:
            tally.features, tally.scale = mean.features, fits[name][1]
            batches = [x.rows for x in current.inputs if x.features == mean.features]
            tally.rows += [(rows.clone(), rows * tally.scale + mean.mean) for rows in batches]


_Fits = dict[str, tuple[int, torch.Tensor]]  # (number of equations, scale) by name of a statistic


def _is_recorded(count: int) -> bool:
    """Return True for a sampled call, or the next call, which shows the change."""
    return is_probed(count) or is_probed(count - 1)


def _contain_rollout_row(tally: _Tally, inputs: _Numbers, mean: _Numbers) -> bool:
    """Return True if `inputs` contain a rollout's row, unchanged or normalized by `mean`."""
    if inputs.features != mean.features:
        return False
    new = inputs.rows[inputs.rows.any(1)][:, None]
    pairs = ((rows, (raw - mean.mean) / tally.scale) for rows, raw in tally.rows)
    return any(bool(((new - old).abs() <= _SAME).all(2).any()) for pair in pairs for old in pair)


def _fits_of_inputs(current: _Snapshot, last: _Snapshot, changed: Sequence[str]) -> _Fits:
    """Find variables whose change, divided by a divisor, is proportional to the inputs' mean."""
    fits: _Fits = {}
    for name in changed:
        now, before = current.variables[name], last.variables[name]
        best = _FITS
        for src, scaled_by in ((current, current), (last, last), (current, last)):  # updated before, later, right after
            inputs = [x for x in src.inputs if x.features == now.features > 1]
            inputs = [x for x in inputs if _may_fit(now, before, x)]
            scales = _divisors(scaled_by, name) if inputs else torch.empty(0)
            for x in inputs if len(scales) else ():
                moved, mask = _scaled_moves(now, before, scales)
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
    """Return False if the statistic's change and the mean of `inputs` differ in sign."""
    moved, size = now.mean - before.mean, inputs.mean.norm()
    mask = (moved.abs() > 2 * now.rounding) & (inputs.rounding <= _ROUNDED * size)
    return not bool((mask & (moved * inputs.mean < 0) & (inputs.mean.abs() > 2 * _FITS * size)).any())


def _fits_of_samples(current: _Snapshot, last: _Snapshot, changed: Sequence[str]) -> _Fits:
    """Find variables that normalization subtracts from samples, and that moved towards the samples' mean."""
    fits: _Fits = {}
    for x in current.inputs if changed else ():
        for samples in current.samples:
            for (offset, scale), name in itertools.product(_normalization(x, samples), changed):
                now, before = current.variables[name], last.variables[name]
                if now.features == x.features and _is_offset(offset, scale, now):
                    current.offsets[name] = samples.mean
                elif now.features != x.features or not _is_offset(offset, scale, before):
                    continue
                moved, mask = _scaled_moves(now, before, scale[None])
                mask &= offset.abs() > _CLEARLY * _SAME * scale
                for mean in (samples.mean, last.offsets.get(name)):  # updated before or after use
                    if mean is not None and _are_shares(moved * mask, (mean - before.mean) / scale * mask)[0]:
                        fits[name] = max(1, int(mask.sum()) - 1), scale
    return fits


def _is_offset(offset: torch.Tensor, scale: torch.Tensor, numbers: _Numbers) -> bool:
    return bool(((numbers.mean - offset).abs() <= _SAME * scale).all())


def _fits_of_table(current: _Snapshot, last: _Snapshot, changed: Sequence[str]) -> _Fits:
    """Find variables that moved towards the mean of a rollout's inputs before normalization."""
    fits: _Fits = {}
    for table in current.tables if changed else ():
        for name in (name for name in changed if current.variables[name].features == table.features > 1):
            now, before = current.variables[name], last.variables[name]
            scales = torch.cat([torch.ones_like(now.mean)[None], _divisors(current, name)])
            moved, mask = _scaled_moves(now, before, scales)
            shares = _are_shares(moved * mask, (table.mean - before.mean) / scales * mask) & (mask.sum(1) > 1)
            inputs = [x for x in current.inputs if x.features == table.features]
            for number in shares.nonzero().flatten().tolist():
                if any(_table_contains(x.rows * scales[number] + now.mean, table, scales[number]) for x in inputs):
                    fits[name] = int(mask[number].sum()) - 1, scales[number]
    return fits


def _table_contains(rows: torch.Tensor, table: _Numbers, scale: torch.Tensor | float) -> bool:
    """Return True if a table contains the first, middle and last of `rows`."""
    few = [rows[0], rows[len(rows) // 2], rows[-1]]
    return all(bool(((table.rows - row).abs() <= _SAME * scale).all(1).any()) for row in few)


def _scaled_moves(now: _Numbers, before: _Numbers, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return changes divided by each scale, and a mask of changes above rounding errors."""
    moved = (now.mean - before.mean) / scales
    size: torch.Tensor = moved.norm(dim=1, keepdim=True) / moved.shape[1] ** 0.5
    return moved, now.rounding <= _ROUNDED * scales * size


def _divisors(current: _Snapshot, name: str) -> torch.Tensor:
    """Return possible normalization divisors, as rows: variables, and square roots of variances."""
    mean = current.variables[name]
    means = [x.mean for x in current.variables.values() if x.features == mean.features]
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


def _are_shares(moved: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """Return a mask of rows in which `moved` is a fraction of `distance`."""
    part: torch.Tensor = (moved.norm(dim=1) < _LARGEST_SHARE * distance.norm(dim=1)) & (moved.norm(dim=1) > 0)
    part &= _residuals(moved, distance) < _FITS
    return part


def _normalization(inputs: _Numbers, samples: _Numbers) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return [(offset, divisor)] if `inputs` are (`samples` - offset) / divisor, else []."""
    if (inputs.features, inputs.count) != (samples.features, samples.count) or inputs.count < 3:
        return []
    x_mean, y_mean = samples.rows.mean(0), inputs.rows.mean(0)
    x, y = samples.rows - x_mean, inputs.rows - y_mean
    scale = (x * y).sum(0) / (y * y).sum(0).clamp_min(1e-300)
    offset = x_mean - scale * y_mean
    fits = bool(((x - scale * y).norm(dim=0) <= _FITS * x.norm(dim=0)).all()) and bool((scale > 0).all())
    return [(offset, scale)] if fits else []


def _snapshot(tensors: Sequence[torch.Tensor], samples: Iterable[torch.Tensor], without: Collection[int]) -> _Snapshot:
    totals = {tensor.numel() for tensor in tensors}
    rows = {tensor[0].numel() for tensor in tensors if tensor.dim() > 1}
    sizes = {size for tensor in tensors for size in _feature_counts(tensor)}
    current, variables = _variables_of(sizes, lambda t: t.numel() in totals or _row_size(t) in rows, without)
    candidates = [tensor for tensor in (*variables, *samples) if tensor.numel() in totals]
    wanted = {x.features for x in current.variables.values() if x.features > 1 or candidates}
    tables = [t.reshape(-1, _row_size(t)) for t in variables if max(totals) < t.numel() and _row_size(t) in wanted]
    current.inputs = [layout for tensor in tensors for layout in _layouts(tensor, wanted)]
    current.samples = [layout for tensor in candidates for layout in _layouts(tensor, wanted)]
    current.tables = [_numbers_of(table, most=_MOST_ROWS) for table in tables if len(table) <= _MOST_ROWS]
    pairs = [(table, [x for x in current.inputs if x.features == table.features]) for table in current.tables]
    current.inputs += [table for table, inputs in pairs if any(_table_contains(x.rows, table, 1.0) for x in inputs)]
    return current


def _add_quotients(current: _Snapshot, last: _Snapshot) -> None:
    """Add means to both snapshots, computed from sums and counts in the same object."""
    counts = [name for name, number in current.counts.items() if last.counts.get(name, number) != number]
    for src in (current, last) if counts else ():
        for name, numbers in list(src.variables.items()):
            for count in [count for count in counts if _holder(count) == _holder(name)][:_MOST_COUNTS]:
                for minus, divisor in ((0, count), (1, f"({count} - 1)")):  # - 1 for a variance
                    if (number := src.counts[count] - minus) > 0 and numbers.features > 1:
                        mean, rounding = numbers.mean / number, numbers.rounding / number
                        src.variables.setdefault(f"{name} / {divisor}", replace(numbers, mean=mean, rounding=rounding))


def _row_size(tensor: torch.Tensor) -> int:
    return tensor.shape[-1] if tensor.dim() > 1 else 0


def _feature_counts(tensor: torch.Tensor) -> set[int]:
    """Return possible feature counts: 1, elements per sample, size of dimension 1 or -1."""
    return {1, tensor[0].numel() if tensor.dim() > 1 else tensor.numel(), *tensor.shape[1:2], *tensor.shape[-1:]}


def _layouts(tensor: torch.Tensor, wanted: Collection[int]) -> list[_Numbers]:
    """Return a tensor as (samples, features), for each wanted feature count."""
    tensor, layouts = tensor.detach(), {}
    for features in _feature_counts(tensor) & set(wanted):
        second = tensor.dim() > 2 and features not in (1, tensor[0].numel(), tensor.shape[-1])
        layouts[features] = (tensor.movedim(1, -1) if second else tensor).reshape(-1, features)
    return [_numbers_of(rows) for rows in layouts.values()]


def _numbers_of(rows: torch.Tensor, *, most: int = _MOST_COMPARED) -> _Numbers:
    count, features = rows.shape
    few = rows[:, _sample_indices(features)]
    eps = torch.finfo(rows.dtype).eps if rows.is_floating_point() else 0.0
    mean = few.mean(0, dtype=torch.float64).cpu()
    rounding = eps * few.abs().amax(0).double().cpu()
    for bound in (few.amax(), few.amin()) if most else ():  # the mean of clipped samples is unknown
        if float(2 * bound).is_integer() or int((few == bound).sum()) > 1:
            rounding[(few == bound).any(0).cpu()] = math.inf
    return _Numbers(features, count, mean, rounding, few[_sample_indices(count, most)].double().cpu())


def _sample_indices(count: int, most: int = _MOST_COMPARED) -> torch.Tensor | slice:
    return slice(min(count, most)) if count <= most or not most else torch.linspace(0, count - 1, most).long()


def _variables_of(
    sizes: Collection[int], are_samples: Callable[[torch.Tensor], bool], without: Collection[int] = ()
) -> tuple[_Snapshot, list[torch.Tensor]]:
    """Return program variables with a size in `sizes`, and tensors that may be samples."""
    current = _Snapshot()
    items = current.variables
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
            current.counts[name] = number
        elif tensor.numel() in sizes and bool(tensor.isfinite().all()):
            items[name] = replace(_numbers_of(tensor.reshape(1, -1), most=0), holder=kinds.get(_holder(name), NoneType))
        if tensor.dim() and len(samples) < _MOST_SAMPLES and are_samples(tensor):
            samples.append(tensor)
    return current, samples


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
    dots = windows @ statistic.mean
    return bool((dots.abs() >= (1 - 1e-6) * statistic.mean.norm() * windows.norm(dim=1)).logical_and(dots != 0).any())
