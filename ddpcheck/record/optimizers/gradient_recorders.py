"""Recorders of gradients between backward and the optimizer step: clipping, other changes, zeroing.

Programs zero gradients in many ways that the ledger, which gets only the events of a wrapper's loop, does not see: so
the gradient of a sample parameter of each optimizer is checked.
"""

from __future__ import annotations

import math
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad

from ddpcheck.findings.evidence.loop import AutogradGradCalled, GradientsChanged, StaleGradients
from ddpcheck.findings.evidence.script import GradientsClipped, GradientsZeroed
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import user_location, variables_of
from ddpcheck.gather.autograd.autograd_graph import LossGraph
from ddpcheck.gather.autograd.exchanges import has_rank_local_params, param_of_gradient
from ddpcheck.gather.ddp.ddp_wrapper import optimizer_params
from ddpcheck.gather.patching import Recorder, patched
from ddpcheck.gather.state.fingerprints import StackedTensors, fingerprint, is_dtensor, stack_small, version_counter
from ddpcheck.gather.state.tensor_file import tensor_ref
from ddpcheck.gather.steps.gradient_distance import dense, has_gradient, norms, sketch
from ddpcheck.record.rank.wrapper_recorder import WrapperRecorder
from ddpcheck.record.recording import Recording
from ddpcheck.record.replicas.program_state import names_of_parameters
from ddpcheck.stream.rank_report import is_probed

_TORCH_CLIP = "_clip_grads_with_norm_"  # private to torch; called by all imports of clip_grad_norm_
_FEW = 4  # max elements of a reduced tensor that is no gradient
_MOST_INPUTS = 4096  # max all_reduce inputs per step


class ClipRecorder(Recorder, subjects=("optimizers",)):
    """Recorder of gradient clipping, and of gradient norms between sampled backward passes."""

    def __init__(self, run: Recording, before: Callable[[], object], after: Callable[[], object]) -> None:
        """Initialize; `before` and `after` are called before and after each clip."""
        # True if there was a clip or sampled backward pass since the last optimizer step or backward begin
        self.follows = False
        self._run = run
        self._before_clip, self._after_clip = before, after
        self._num_clips = 0
        self._last_clip: tuple[str, Location | None] = ("", None)
        self._backward_line: Location | None = None  # line of the last backward pass
        self._norms: dict[int, float] = {}  # gradient norm after backward, by wrapper number
        patch_clip_grad_norm(self._record_clip_by_norm)
        patched(nn.utils, "clip_grad_value_", self._record_clip_by_value)

    def _record_clip_by_norm(self, *arguments: Any, **named: Any) -> Generator[None, Any, None]:
        norm = norm_before_clip(arguments, named)
        self._before_clip()
        result = yield
        limit = named["max_norm"] if "max_norm" in named else arguments[1]
        self._note_clip("clip_grad_norm_", result if norm is None else norm, limit)

    def _record_clip_by_value(self, *arguments: Any, **named: Any) -> Iterator[None]:
        parameters = arguments[0] if arguments else named.get("parameters")
        is_list = isinstance(parameters, torch.Tensor | list | tuple)
        norm = _total_norm(parameters) if is_list and self._run.is_written(self._num_clips) else None
        self._before_clip()
        yield
        self._note_clip("clip_grad_value_", norm)

    def _note_clip(self, name: str, norm: Any, limit: Any = 0.0) -> None:
        if norm is math.inf:
            return
        self._last_clip, self.follows = (name, user_location()), True
        if type(norm) in (torch.Tensor, float) and self._run.is_written(self._num_clips) and not math.isnan(norm):
            where = self._last_clip[1], self._run.steps, name
            self._run.add(GradientsClipped(self._num_clips, float(norm), *where, float(limit), has_rank_local_params()))
        self._num_clips += 1
        self._after_clip()

    def backward_begins(self) -> None:
        """Record how the program changed gradient norms since the last backward pass."""
        last_norms = self._norms
        location = user_location() if last_norms else None
        for watch in list(self._run.watches) if last_norms else ():
            last_norm = last_norms.get(watch.number)
            if last_norm is None:
                continue
            norm = _total_norm(watch.parameters.values()) or 0.0
            if 0.0 < norm < math.inf:
                name, clip_line = self._last_clip
                put_off = watch.has_unreduced
                if put_off or location == self._backward_line:  # otherwise the next loss may involve other parameters
                    change = norm / last_norm
                    clip_line = clip_line or location
                    self._run.add(GradientsChanged(watch.number, self._run.steps, name, change, clip_line, put_off))
        self.forget()

    def backward_ended(self) -> None:
        """Record gradient norms; called after a backward pass in a sampled step."""
        self._backward_line, self.follows = user_location(), True
        for watch in list(self._run.watches):
            norm = _total_norm(watch.parameters.values(), watch.reduced_gradients)
            if norm is not None and 0.0 < norm < math.inf:
                self._norms[watch.number] = norm

    def forget(self) -> None:
        self._norms, self._last_clip, self.follows = {}, ("", None), False


def names_in_failed_clip(error: BaseException) -> list[list[str]]:
    """Return parameter names in a failed `clip_grad_norm_` call: [names of DTensors, of plain tensors]."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    clip = next((frame for frame in frames if frame.f_code.co_name == "clip_grad_norm_"), None)
    parameters = None if clip is None else variables_of(clip).get("parameters")
    trained = [p for p in parameters if p.grad is not None] if isinstance(parameters, list | tuple) else []
    names = names_of_parameters({id(p) for p in trained}) if trained else {}
    return [
        [names.get(id(p), "?").partition(".")[2] for p in trained if is_dtensor(p) is kind] for kind in (True, False)
    ]


def patch_clip_grad_norm(before: Callable[..., Any]) -> None:
    """Patch torch to call `before` at each clip by norm, with the clip's arguments."""
    has_norm = hasattr(clip_grad, _TORCH_CLIP)
    patched(clip_grad if has_norm else nn.utils, _TORCH_CLIP if has_norm else "clip_grad_norm_", before)


def norm_before_clip(arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Return the gradient norm before a clip (infinity if `max_norm` is infinite), or None."""
    if math.isinf(named["max_norm"] if "max_norm" in named else arguments[1]):
        return math.inf
    if not hasattr(clip_grad, _TORCH_CLIP):
        return None
    return named["total_norm"] if "total_norm" in named else arguments[2]


def _total_norm(parameters: Any, rows: StackedTensors | None = None) -> float | None:
    """Return the total gradient norm of parameters, or None; `rows`: gradients from `stack_small`."""
    if rows is None:
        params = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        rows = stack_small({str(number): p.grad for number, p in enumerate(params) if p.grad is not None})
    if not rows.names or any(type(gradient) is not torch.Tensor for gradient in rows.others.values()):
        return None
    return math.hypot(*norms(rows).values())


_MOST_TRACKED_STEPS = 16  # max steps per optimizer
_MOST_STEPS = 1024  # max steps of all optimizers
_MOST_READ_PARAMS = 8  # of an optimizer, read at each zero_grad in its first steps

_GradientState = tuple[Callable[[], Any], int]  # weak reference to a gradient, and its version
_NO_GRADIENT: _GradientState = (lambda: None, 0)


@dataclass(slots=True)
class _TrackedOptimizer:
    number: int
    sample_ref: Callable[[], Any]  # weak reference to a sample parameter
    is_plain: bool  # True if the gradient is a plain tensor, no shard
    steps: int = 0
    last_gradient: _GradientState = _NO_GRADIENT  # gradient after the last backward pass or clip

    stale_mark: int = 0  # gradient fingerprint after a step, 0 if zero or None
    is_own: bool = False  # True if recorded after a step of this optimizer
    backward_line: Location | None = None  # of the last backward pass that changed the gradient
    mixed_lines: tuple[Location | None, Location | None] | None = None  # lines of two accumulated backward passes
    stale_steps: int = 0
    stale_params: list[Callable[[], Any]] = field(default_factory=list)  # parameters whose gradient a step left

    zeroed: dict[Location | None, int] = field(default_factory=dict)  # zero_grad count since the last step, by line
    zeroed_before: dict[Location | None, int] = field(default_factory=dict)  # same, before the last step
    times_zeroed: int = 0  # consecutive steps with the same counts
    is_for_inputs: bool = False  # True if a backward pass was for inputs (adversarial attack, gradient penalty)


class ZeroingRecorder(Recorder, subjects=("loop",)):
    """Recorder of stale or repeatedly zeroed gradients, checked on one parameter of each optimizer."""

    def __init__(
        self,
        sink: Callable[[StaleGradients | GradientsZeroed], object],
        names: Callable[[list[torch.Tensor]], tuple[str, ...]],
    ) -> None:
        self._sink = sink
        self._names = names
        self._steps = 0
        self._known: WeakKeyDictionary[Any, _TrackedOptimizer] = WeakKeyDictionary()
        self.follows = False  # True if any parameter is followed

    def note_step_begin(self, optimizer: Any, number: int) -> bool:
        """Record stale and zeroed gradients before a step; return True once tracking has ended."""
        tracked = self._known.get(optimizer)
        if tracked is None:
            params = [p for p in optimizer_params(optimizer) if p.grad is not None]
            if params:
                is_plain = type(params[0].grad) is torch.Tensor
                self._known[optimizer] = _TrackedOptimizer(number, tensor_ref(params[0]), is_plain)
                self.follows = True
            return False
        self._note_stale(optimizer, tracked)
        self._note_zeroed(tracked)
        return tracked.steps >= _MOST_TRACKED_STEPS

    def note_step_end(self, optimizer: Any, steps: int) -> None:
        """Record gradients after an optimizer step; `steps`: steps of all optimizers so far."""
        self._steps = steps
        tracked_pairs = self._tracked_optimizers()
        self.follows = bool(tracked_pairs)
        for tracked_optimizer, tracked in tracked_pairs:
            tracked.steps += tracked_optimizer is optimizer
            if tracked.is_plain and (tracked_optimizer is optimizer or not tracked.stale_mark):
                tracked.stale_mark, tracked.is_own = (_grad_hash(tracked.sample_ref()), tracked_optimizer is optimizer)

    def backward_begins(self, loss: Any) -> None:
        """Detect gradients not zeroed since the last step; called before a backward pass."""
        leaves: Iterable[Any] | None = None
        for optimizer, tracked in self._tracked_optimizers():
            tracked.last_gradient = _gradient_of(tracked)
            if (tracked.stale_mark or tracked.mixed_lines) and not (value := _grad_hash(tracked.sample_ref())):
                tracked.stale_mark, tracked.mixed_lines = 0, None  # zeroed
                if (
                    tracked.steps == 1
                    and (p := next(filter(_grad_hash, optimizer_params(optimizer)), None)) is not None
                ):
                    tracked.sample_ref, tracked.is_plain = tensor_ref(p), type(p.grad) is torch.Tensor  # was not zeroed
            elif tracked.stale_mark and value != tracked.stale_mark:
                tracked.stale_mark = 0
            elif tracked.stale_mark:
                tracked.stale_params = [tensor_ref(p) for p in optimizer_params(optimizer) if _grad_hash(p)]
            if _repeats(tracked.zeroed_before) and not tracked.is_for_inputs and isinstance(loss, torch.Tensor):
                leaves = LossGraph([loss]).leaves if leaves is None else leaves
                tracked.is_for_inputs = any(not isinstance(leaf, nn.Parameter) for leaf in leaves)

    def backward_ended(self) -> None:
        location: Location | None = None
        for _, tracked in self._tracked_optimizers():
            if not tracked.is_plain or getattr(tracked.sample_ref(), "grad", None) is None or _is_unchanged(tracked):
                continue
            location = location or user_location()
            if tracked.stale_mark:
                tracked.mixed_lines, tracked.stale_mark = (tracked.backward_line, location), 0
            tracked.backward_line = location
        self.note_changed()

    def note_changed(self) -> None:
        """Record the gradients after backward or a clip, to notice later changes."""
        for _, tracked in self._tracked_optimizers():
            tracked.last_gradient = _gradient_of(tracked)

    def note_zero_grad(self, optimizer: Any) -> None:
        """Count a `zero_grad` call that zeroes nonzero gradients of an optimizer, by line."""
        tracked = self._known.get(optimizer)
        if tracked is None or tracked.steps >= _MOST_TRACKED_STEPS:
            return
        gradients = [p.grad for p in optimizer_params(optimizer) if p.grad is not None]
        if gradients and bool(sum(float(dense(g).detach().abs().sum()) for g in gradients[:_MOST_READ_PARAMS])):
            location = user_location()
            tracked.zeroed[location] = tracked.zeroed.get(location, 0) + 1

    def _note_stale(self, optimizer: Any, tracked: _TrackedOptimizer) -> None:
        mixed, tracked.mixed_lines = tracked.mixed_lines, None
        is_repeated = mixed is not None and (tracked.is_own or mixed[0] != mixed[1])
        tracked.stale_steps = tracked.stale_steps + 1 if is_repeated else 0
        if mixed is not None and is_repeated:
            params = [p for ref in tracked.stale_params if (p := ref()) is not None]
            count = len([p for p in optimizer_params(optimizer) if p.grad is not None])
            names = self._names(params) if len(params) < count else ()
            lines = *mixed, user_location()
            self._sink(StaleGradients(tracked.number, tracked.is_own, *lines, names, tracked.stale_steps))

    def _note_zeroed(self, tracked: _TrackedOptimizer) -> None:
        """Record that gradients are zeroed repeatedly before each step, at the same lines.

        Skipped if a gradient changed after backward: the program itself adds up gradients before zeroing them.
        """
        repeats = tracked.zeroed == tracked.zeroed_before and _repeats(tracked.zeroed)
        is_repeated = repeats and _is_unchanged(tracked) and not tracked.is_for_inputs
        tracked.times_zeroed = tracked.times_zeroed + 1 if is_repeated else 0
        if is_repeated:
            location = max(tracked.zeroed, key=lambda line: tracked.zeroed[line])
            self._sink(GradientsZeroed(tracked.number, tracked.zeroed[location], location, tracked.times_zeroed))
        tracked.zeroed, tracked.zeroed_before = {}, tracked.zeroed
        tracked.is_for_inputs = False

    def _tracked_optimizers(self) -> list[tuple[Any, _TrackedOptimizer]]:
        if not self.follows or self._steps >= _MOST_STEPS:
            return []
        return [(opt, tracked) for opt, tracked in list(self._known.items()) if tracked.steps < _MOST_TRACKED_STEPS]


def _repeats(zeroed: dict[Location | None, int]) -> bool:
    return any(times > 1 for times in zeroed.values())


def _gradient_of(tracked: _TrackedOptimizer) -> _GradientState:
    gradient = getattr(tracked.sample_ref(), "grad", None)
    return _NO_GRADIENT if gradient is None else (tensor_ref(gradient), version_counter(gradient))


def _is_unchanged(tracked: _TrackedOptimizer) -> bool:
    gradient, (gradient_ref, version) = getattr(tracked.sample_ref(), "grad", None), tracked.last_gradient
    return gradient is not None and gradient_ref() is gradient and version_counter(gradient) == version


def _grad_hash(parameter: Any) -> int:
    if parameter is None or not has_gradient(parameter):
        return 0
    return fingerprint(dense(parameter.grad)) or 1


class AllreduceInputRecorder(Recorder, subjects=("optimizers", "data")):
    """Recorder of inputs of all_reduce over all ranks, by which scripts average gradients."""

    def __init__(self, run: Recording) -> None:
        # line of the last all_reduce of the gradient of a parameter that only this rank has
        self.part_line: Location | None = None
        # line of the largest collective over all ranks before the first backward pass (of parameters, possibly)
        self.line_before_backward: Location | None = None
        self._largest: tuple[int, str] = (0, "")  # (elements, line)
        self._has_backward = False
        self._run = run
        self._inputs: list[tuple[int, int]] = []  # (elements, fingerprint)
        self.clear = self._inputs.clear  # clears the recorded inputs after a step
        self._reduction_counts: Counter[int] = Counter()  # all_reduce count of the gradient, by parameter id

    def note(self, call: Call, call_args: Mapping[str, Any]) -> None:
        tensor = call_args.get("tensor")
        if len(call.members) != dist.get_world_size():
            return
        if call.elements > max(self._largest[0], _FEW):
            self._largest = call.elements, call.location
        if call.operation != "all_reduce" or type(tensor) is not torch.Tensor or not tensor.is_floating_point():
            return
        if (part := param_of_gradient(tensor)) is not None:
            self._reduction_counts[id(part)] += 1
            self.part_line = Location.parse(call.location)
        if self._run.is_written(self._run.steps) and tensor.numel() > _FEW and len(self._inputs) < _MOST_INPUTS:
            if next(iter(self._run.watches), None) is None:  # no wrapper: the script averages gradients
                self._inputs.append((tensor.numel(), fingerprint(tensor)))

    def backward_begins(self) -> None:
        if not self._has_backward:
            self._has_backward, self.line_before_backward = True, self.largest
        self._largest = (0, "")

    @property
    def largest(self) -> Location | None:
        """Return the line of the largest collective of all ranks since backward began."""
        return Location.parse(self._largest[1])

    def inputs_for(self, *gradients: list[torch.Tensor]) -> tuple[int, ...]:
        """Return input fingerprints; () if the inputs' total size matches no list in `gradients`."""
        sizes = [[gradient.numel() for gradient in group] for group in gradients]
        elements = {sum(size for size in group if size > least) for group in sizes for least in (0, _FEW)}
        return tuple(digest for _, digest in self._inputs) if sum(size for size, _ in self._inputs) in elements else ()

    def is_reduced(self, parameter: torch.Tensor) -> bool:
        """Return True if gradients of `parameter`, which only this rank has, were all-reduced repeatedly."""
        return self._reduction_counts[id(parameter)] > 1


_MOST_MARKS = 1024  # fingerprints per entry
_MOST_PARAMETERS = 64  # compared parameters per call


@dataclass(slots=True)
class _AutogradGrads:
    names: dict[int, str]  # parameter names, by id()
    calls: int = 0
    marks: list[int] = field(default_factory=list)
    location: Location | None = None


class AutogradGradRecorder(Recorder, subjects=("loop",)):
    """Recorder of sampled `torch.autograd.grad` results for wrapped parameters."""

    def __init__(self, run: Recording) -> None:
        self._run = run
        self._known: WeakKeyDictionary[WrapperRecorder, _AutogradGrads] = WeakKeyDictionary()

    def close(self) -> None:
        for watch, followed in list(self._known.items()):
            if followed.calls and followed.location is not None:
                self._write_entry(watch, followed, {}, followed.location)

    def note_results(self, inputs: Any, gradients: Any) -> None:
        if not isinstance(inputs, tuple) or not isinstance(gradients, tuple):
            return
        pairs = [(p, g) for p, g in zip(inputs, gradients, strict=False) if isinstance(p, torch.nn.Parameter)]
        for watch in list(self._run.watches) if pairs else ():
            followed = self._known.get(watch)
            if followed is None:
                followed = self._known[watch] = _AutogradGrads({id(p): name for name, p in watch.parameters.items()})
            entries = [(followed.names[id(p)], p, g) for p, g in pairs if id(p) in followed.names]
            if not entries:
                continue
            if is_probed(followed.calls):
                grads = {name: g for name, _, g in entries[:_MOST_PARAMETERS] if type(g) is torch.Tensor}
                followed.location = user_location()
                self._write_entry(watch, followed, grads, followed.location)
            elif len(followed.marks) < _MOST_MARKS and not watch.step:
                followed.marks.append(fingerprint(min((p for _, p, _ in entries), key=torch.Tensor.numel)))
            followed.calls += 1

    def _write_entry(
        self,
        watch: WrapperRecorder,
        followed: _AutogradGrads,
        gradients: dict[str, torch.Tensor],
        where: Location | None,
    ) -> None:
        params = dict(list(watch.parameters.items())[:_MOST_PARAMETERS])
        self._run.add(
            AutogradGradCalled(
                watch.number,
                followed.calls,
                where,
                reductions=watch.step,
                is_unreduced=watch.has_unreduced,
                gradients={name: tuple(sketch(dense(g.detach())).tolist()) for name, g in gradients.items()},
                parameters={name: fingerprint(p) for name, p in params.items()},
                marks=tuple(followed.marks),
            )
        )
        followed.marks.clear()
