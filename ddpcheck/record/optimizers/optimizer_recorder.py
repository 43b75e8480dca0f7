"""Recorder of optimizer steps: options, state, gradients, and parameters that no wrapper synchronizes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from operator import call
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddpcheck.findings.evidence.loop import ScheduleState
from ddpcheck.findings.evidence.script import OptimizerEnd, OptimizerStep
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import first_difference_of_stacks, lines_of_program, step_location, user_frame
from ddpcheck.gather.autograd.autograd_graph import in_backward
from ddpcheck.gather.autograd.exchanges import is_rank_local
from ddpcheck.gather.autograd.gradient_hooks import hooks_on
from ddpcheck.gather.ddp.ddp_wrapper import optimizer_options, optimizer_params, parameters_in_wrappers
from ddpcheck.gather.ddp.sharding import count_in_fsdp1, shard_states
from ddpcheck.gather.patching import Recorder, patched
from ddpcheck.gather.state.fingerprints import (
    PLAIN,
    fingerprint,
    fingerprints,
    is_dtensor,
    storage_address,
    version_counter,
)
from ddpcheck.gather.state.tensor_file import tensor_ref
from ddpcheck.gather.steps.gradient_distance import dense, norms, sketches
from ddpcheck.record.loss.loss_source import gradients_changed_at, gradients_scaled_at
from ddpcheck.record.optimizers.gradient_recorders import AllreduceInputRecorder, ClipRecorder, ZeroingRecorder
from ddpcheck.record.optimizers.part_recorder import shard_norm_at
from ddpcheck.record.optimizers.schedule_recorder import ScheduleRecorder
from ddpcheck.record.rank.line_recorder import LineRecorder
from ddpcheck.record.rank.wrapper_recorder import WrapperRecorder
from ddpcheck.record.recording import Recording, UnpickledHook, follow_steps
from ddpcheck.record.replicas.module_uses import LoadRecorder, UseRecorder, WriteRecorder
from ddpcheck.record.replicas.program_state import StateRecorder, names_of_parameters, names_of_tensors
from ddpcheck.record.replicas.tables import tables_of_program
from ddpcheck.record.source.source_scope import assignment_in_program, skipping_lines

_MOST_MARKS = _MOST_SUMS = 4096
_MOST_SKETCHED = 64  # max gradients outside wrappers
_MOST_CHECKED = 16  # max optimizers checked for averaging after the step


@dataclass(slots=True)
class _Optimizer:
    number: int
    steps: int = 0
    reduced: dict[int, int] = field(default_factory=dict)  # reductions at the last step, by wrapper number
    unwrapped: dict[int, str] = field(default_factory=dict)  # names of parameters in no wrapper, by id
    in_no_module: set[int] = field(default_factory=set)  # ids of those parameters that are in no module either
    marks: list[int] = field(default_factory=list)
    marked: Callable[[], Any] | None = None  # a small parameter in no wrapper
    is_settled: bool = False  # True if zeroing is no longer followed
    is_stepping: bool = False  # True while `step` runs
    schedule: ScheduleState | None = None  # schedule at the last step
    may_diverge: bool = False  # ranks may have run out of batches, or train independently: step numbers do not match
    sample: Callable[[], Any] = lambda: None  # a parameter
    last_backward: tuple[int, tuple[str, ...]] = (-1, ())  # backward passes until the last step, and its call stack
    late_sum: Location | None = None  # line of an all_reduce of gradients after the step
    rescaled_at: Location | None = None  # line that scales gradients by the world size
    norm_at: Location | None = None  # line that takes the norm of gradient shards
    changed_at: Location | None = None  # line that writes gradients before the step
    watches: tuple[Any, list[ref[WrapperRecorder]]] = field(default=((), []))  # wrapper watches, with their cache key


class OptimizerRecorder(Recorder, subjects=("replicas", "optimizers", "loop")):
    """Recorder of every optimizer of this process."""

    def __init__(self, run: Recording, lines: LineRecorder, writes: WriteRecorder) -> None:
        self._run = run
        self._lines = lines  # locates optimizer constructors
        self._writes = writes  # gets each step
        self._entries: WeakKeyDictionary[Any, _Optimizer] = WeakKeyDictionary()
        self._by_number: list[_Optimizer] = []  # by number; the optimizers may have been deleted
        self._backwards = 0
        self._backward_stack: tuple[str, ...] = ()  # call stack of the last backward pass, if a sampled step follows
        self._due_numbers: set[int] = set()  # numbers of optimizers whose next step is recorded
        self._num_stepped = 0  # number of optimizers with a recorded construction that have stepped
        self._schedules = ScheduleRecorder(run.add, lambda: self._backwards + run.steps, self._number_of)
        register_optimizer_step_pre_hook(run.count_step)
        follow_steps(self)
        patched(torch.optim.Optimizer, "zero_grad", self._before_zero_grad)
        patched(nn.Module, "zero_grad", self._before_module_zero_grad)
        self._zeroings = ZeroingRecorder(run.add, self._names_of)
        self._clips = ClipRecorder(run, self._before_clip, self._zeroings.note_changed)
        self._loads = LoadRecorder(run.add)
        # recorder of models that no optimizer holds, run before sampled steps
        self.states = StateRecorder(run, UseRecorder(run, self._params), writes.follow_copy)
        self.allreduce_inputs = AllreduceInputRecorder(run)
        self._last_sum_line: Location | None = None  # line of the last all_reduce since backward that left a sum
        # sketches by id of a parameter in no wrapper: of the gradient after backward, and before a clip
        self._local: dict[int, tuple[float, ...]] = {}
        self._unclipped: dict[int, tuple[float, ...]] = {}
        self._sums: dict[int, tuple[Callable[[], Any], int, Location | None]] = {}  # (tensor, version, line) by `id()`

    def close(self) -> None:
        """Write the final entry of each optimizer; called when the script ends."""
        self._loads.report_loads()
        living = {entry.number: optimizer for optimizer, entry in list(self._entries.items())}
        for entry in self._by_number:
            optimizer = living.get(entry.number)
            watches = [] if optimizer is None else self._watches_of(optimizer, entry)
            reductions = sum(watch.step for watch in watches) if watches and not entry.may_diverge else -1
            schedule = entry.schedule if optimizer is None else self._schedules.state_of(optimizer)
            self._run.add(OptimizerEnd(entry.number, entry.steps, reductions, tuple(entry.marks), schedule))

    def note_sum(self, tensor: Any, location: Location | None, callers: tuple[str, ...] = ()) -> None:
        """Record that an all_reduce over all ranks left a sum in `tensor`."""
        for entry in self._by_number[:_MOST_CHECKED]:
            is_after = entry.last_backward[0] == self._backwards and not entry.is_stepping and entry.late_sum is None
            if is_after and getattr(entry.sample(), "grad", None) is tensor is not None:
                entry.late_sum = Location.parse(first_difference_of_stacks(callers, entry.last_backward[1])) or location
        if type(tensor) is torch.Tensor and self._run.is_written(self._run.steps) and len(self._sums) < _MOST_SUMS:
            self._sums[id(tensor)] = tensor_ref(tensor), version_counter(tensor), location
            self._last_sum_line = location if tensor.is_floating_point() and tensor.numel() > 1 else self._last_sum_line

    def are_gradients(self, places: Collection[int]) -> bool:
        """Return True if any parameter's gradient is at one of the memory addresses `places`."""
        return any(p.grad is not None and storage_address(p.grad) in places for p in self._params())

    def steps_of(self, optimizer: Any) -> int:
        entry = self._entries.get(optimizer)
        return 0 if entry is None else entry.steps

    def _number_of(self, optimizer: Any) -> int:
        entry = self._entries.get(optimizer)
        return -1 if entry is None else entry.number

    def _params(self) -> list[torch.Tensor]:
        return [p for optimizer in list(self._entries) for p in optimizer_params(optimizer)]

    # Steps

    def before_step(self, optimizer: Any, _has_closure: bool, inside: bool) -> None:
        if self._loads.waits:
            self._loads.report_loads()
        self._writes.patch_for_step(begins=True)
        if self._writes.seen:
            self._writes.write()
        if self._clips.follows:
            self._clips.forget()
        entry = self._entries.get(optimizer)
        if entry is None:
            entry = self._entries[optimizer] = _Optimizer(len(self._by_number))
            self._by_number.append(entry)
            self._inspect_parameters(optimizer, entry)
        entry.is_stepping = True
        entry.schedule = self._schedules.state_of(optimizer) if self._schedules.followed_types else None
        watches = self._watches_of(optimizer, entry)
        if watches and in_backward():
            self._lines.note_step_in_backward(optimizer)
        if watches and inside:
            return
        if not entry.is_settled:
            entry.is_settled = self._zeroings.note_step_begin(optimizer, entry.number)
        for watch in watches:
            entry.may_diverge |= watch.may_diverge
            watch.optimizer_steps()
        if entry.marked is not None and (marked := entry.marked()) is not None and len(entry.marks) < _MOST_MARKS:
            entry.marks.append(fingerprint(marked))
        if not entry.steps or entry.number in self._due_numbers:
            self._run.add(self._step_entry(optimizer, entry, watches))
            entry.marks = []
            if entry.steps or not entry.number:  # others may be constructed in each step, for an inner loop
                self.states.record_models(entry.number, entry.steps, self._params())
        self._sums.clear()
        self.allreduce_inputs.clear()
        entry.reduced = {}
        for watch in watches:
            entry.reduced[watch.number] = watch.step
        entry.steps += 1
        self._run.rounds = max(self._run.rounds, entry.steps)
        (self._due_numbers.add if self._run.is_written(entry.steps) else self._due_numbers.discard)(entry.number)

    def after_step(self, optimizer: Any, _has_closure: bool) -> None:
        self._writes.patch_for_step(begins=False)
        if (entry := self._entries.get(optimizer)) is not None:
            entry.is_stepping = False
            if self._zeroings.follows or not entry.is_settled:
                self._zeroings.note_step_end(optimizer, self._run.steps)

    def _step_entry(self, optimizer: Any, entry: _Optimizer, watches: list[WrapperRecorder]) -> OptimizerStep:
        params = optimizer_params(optimizer)
        shards = {id(p): p for p in params if type(p) not in PLAIN and is_dtensor(p)}
        wrapped = {key: name for watch in watches for key, name in watch.numbered.items()}
        synced = {wrapped[id(p)]: p for p in params if id(p) in wrapped}
        unsharded = {name: p for name, p in synced.items() if id(p) not in shards} if shards else synced
        unwrapped = {entry.unwrapped[id(p)]: p for p in params if id(p) in entry.unwrapped and not is_rank_local(p)}
        reductions = sum(watch.step for watch in watches)
        idle_watches = [watch for watch in watches if watch.step == entry.reduced.get(watch.number, 0)]
        settled = not entry.may_diverge and not any(watch.has_unreduced for watch in watches)
        options = optimizer_options(optimizer, {})
        gradients = ([p.grad for p in group if p.grad is not None] for group in (unwrapped.values(), self._params()))
        scaler = self._lines.scaler
        named = {**unsharded, **unwrapped}
        summed: dict[str, Location | None] = {}
        if self._sums:
            # gradients written in place before the sum may have been divided
            written = [name for name, p in unwrapped.items() if p.grad is not None and version_counter(p.grad)]
            summed = {n: line for n, p in named.items() if n not in written and (line := self._line_of_sum(p.grad))}
        others = [opt for opt in self._lines.optimizers() if opt not in self._entries]
        numbered = [watch.numbered for watch in self._run.watches] if others else []
        idle = {names[id(p)] for names in numbered for opt in others for p in optimizer_params(opt) if id(p) in names}
        step = OptimizerStep(
            entry.number,
            entry.steps,
            {name: value for name, value in options.items() if not name.endswith((" parameters", " order"))},
            step_location(),
            ddp_params=tuple(synced),
            reductions=reductions if watches and not entry.may_diverge else -1,
            averaged=reductions > sum(entry.reduced.values()) and settled,
            unaveraged=tuple(f"{watch.number}/{n}" for watch in idle_watches for n in watch.parameters),
            norms=norms({name: gradient for name, p in unsharded.items() if (gradient := p.grad) is not None}),
            states=_state_norms(optimizer, named),
            local_params=fingerprints(unwrapped.items()),
            gradients=sketches({name: dense(p.grad) for name, p in unwrapped.items() if p.grad is not None}),
            marks=tuple(entry.marks),
            loose_params=tuple(name for p, name in entry.unwrapped.items() if p in entry.in_no_module),
            collectives=self._run.log.collectives,
            idle_params=tuple(sorted(idle)),
            schedule=entry.schedule,
            summed=tuple(summed),
            summed_at=next(iter(summed.values()), self._last_sum_line),
            local={name: self._local[id(p)] for name, p in unwrapped.items() if id(p) in self._local},
            unclipped={name: self._unclipped[id(p)] for name, p in unwrapped.items() if id(p) in self._unclipped},
            shards=sum(p.requires_grad for p in shards.values()),
            shard_scales={name: scale for watch in watches for name, scale in watch.shard_scales().items()},
            in_fsdp1=count_in_fsdp1(params),
            initial_rates=self._lines.rates.get(optimizer, ""),
            scale=scaler.get_scale() if scaler else 0.0,
            scale_at=self._lines.restored.get(scaler) if scaler else None,
            seed=self._lines.seeded[0],
            seeded_at=self._lines.seeded[1],
            allreduce_inputs=self.allreduce_inputs.inputs_for(*gradients),
            own_reduced=self._names_of([p for p in params if self.allreduce_inputs.is_reduced(p)]),
            shard_states=shard_states(optimizer, {n: p for n, p in synced.items() if id(p) in shards}),
        )
        return self._with_lines(step, optimizer, entry, has_shards=bool(shards))

    def _with_lines(self, step: OptimizerStep, optimizer: Any, entry: _Optimizer, *, has_shards: bool) -> OptimizerStep:
        """Add the source lines that construct the optimizer, change gradients and reduce gradients."""
        lines = lines_of_program(sys._getframe(1))
        if not entry.steps:
            frame = user_frame(sys._getframe(1))
            entry.rescaled_at = gradients_scaled_at(frame)
            entry.changed_at = gradients_changed_at(frame)
            entry.norm_at = shard_norm_at(frame) if has_shards else None
        entry.last_backward = self._backwards, lines
        return replace(
            step,
            built_at=self._lines.constructed.get(optimizer),
            rate=(entry.schedule and entry.schedule.built_at) or assignment_in_program("lr"),
            left_out_at=skipping_lines(lines, self._backward_stack) if self._backward_stack else (),
            late_sum_at=entry.late_sum,
            restored_at=self._lines.restored.get(optimizer),
            rescaled_at=entry.rescaled_at,
            norm_at=entry.norm_at,
            changed_at=entry.changed_at,
            reduced_at=self.allreduce_inputs.largest,
            broadcast_at=self.allreduce_inputs.line_before_backward,
            own_reduced_at=self.allreduce_inputs.part_line,
        )

    def _unwrapped_sketches(self) -> dict[int, tuple[float, ...]]:
        params = ((p, entry) for optimizer, entry in list(self._entries.items()) for p in optimizer_params(optimizer))
        unwrapped = {str(id(p)): p.grad for p, entry in params if id(p) in entry.unwrapped and p.grad is not None}
        sampled = dict(itertools.islice(unwrapped.items(), _MOST_SKETCHED))
        return {int(key): numbers for key, numbers in sketches({k: dense(g) for k, g in sampled.items()}).items()}

    def _before_clip(self) -> None:
        self._unclipped = self._unclipped or (self._unwrapped_sketches() if self._local else {})

    def _line_of_sum(self, gradient: torch.Tensor | None) -> Location | None:
        """Return the line of the all_reduce that last wrote a gradient, or None."""
        summed, version, line = self._sums.get(id(gradient), (lambda: None, 0, None))
        return line if gradient is not None and summed() is gradient and version_counter(gradient) == version else None

    def _names_of(self, parameters: list[torch.Tensor]) -> tuple[str, ...]:
        names = {key: name for watch in list(self._run.watches) for key, name in watch.numbered.items()}
        if unwrapped := {id(p) for p in parameters} - names.keys():
            names |= names_of_parameters(unwrapped)
        return tuple(names.get(id(p), "?") for p in parameters)

    def _watches_of(self, optimizer: Any, entry: _Optimizer) -> list[WrapperRecorder]:
        """Return the recorders of the wrappers of an optimizer's parameters (cached)."""
        key = len(optimizer.param_groups), self._run.watches.refs
        if entry.watches[0] != key:
            ids = {id(p) for p in optimizer_params(optimizer)}
            watches = []
            for last in sorted(self._run.watches, key=lambda watch: -watch.number):  # the newest wrapper of a parameter
                if shared := ids & {id(p) for p in last.parameters.values()}:
                    watches.append(last)
                    ids -= shared
            entry.watches = key, list(map(ref, watches))
        return [*filter(None, map(call, entry.watches[1]))]

    def _inspect_parameters(self, optimizer: Any, entry: _Optimizer) -> None:
        """Record an optimizer's schedules and its parameters outside of wrappers, at its first step."""
        entry.sample = tensor_ref(optimizer_params(optimizer)[0])
        self._num_stepped += self._lines.constructed.get(optimizer) is not None
        self._schedules.follow_attributes(optimizer)
        if not entry.number:
            for table in tables_of_program():
                self._run.add(table)
        watches = list(self._run.watches)
        watched = {id(p) for watch in watches for p in watch.parameters.values()}
        unwrapped = [p for p in optimizer_params(optimizer) if id(p) not in watched and _is_plain_tensor(p)]
        later: dict[int, str] = {}  # parameters unknown to their wrapper
        if unwrapped:
            later = {id(p): f"{watch.number}/{name}" for watch in watches for name, p in watch.later_parameters()}
            wrapped = parameters_in_wrappers() - later.keys()  # ignored by DDP on request
            unwrapped = [p for p in unwrapped if id(p) not in wrapped]
        if unwrapped:
            names = names_of_parameters({id(p) for p in unwrapped}) | later
            entry.in_no_module = {id(p) for p in unwrapped} - names.keys()
            names |= names_of_tensors(entry.in_no_module) if entry.in_no_module else {}
            for index, p in enumerate(unwrapped):
                entry.unwrapped[id(p)] = names.get(id(p), f"? {index} {tuple(p.shape)}")
            entry.marked = tensor_ref(min(unwrapped, key=torch.Tensor.numel))

    # Zeroed gradients

    def reductions(self) -> dict[int, int]:
        """Return the count of gradient reductions of each wrapper, by the wrapper's number."""
        return {watch.number: watch.step for watch in list(self._run.watches)}

    def have_hooks(self) -> bool:
        """Return True if the script has hooks on gradients of wrapped parameters."""
        params = itertools.chain.from_iterable(watch.parameters.values() for watch in self._run.watches)
        return any(not isinstance(hook, UnpickledHook) for hook in hooks_on(params))

    def unaveraged_wrappers(self) -> set[int]:
        """Return the numbers of wrappers with gradients not yet averaged."""
        return {watch.number for watch in list(self._run.watches) if watch.has_unreduced}

    def before_backward(self, loss: Any) -> None:
        self._backwards += 1
        self._local, self._unclipped, self._last_sum_line = {}, {}, None
        self.allreduce_inputs.backward_begins()
        is_step_due = (
            self._due_numbers or self._num_stepped < self._lines.optimizer_count
        )  # the following step, possibly
        self._backward_stack = lines_of_program(sys._getframe(1)) if is_step_due else ()
        for watch in filter(None, map(call, self._run.watches.refs)):  # performance: runs in each step
            watch.any_backward_begins()
        if self._clips.follows:
            self._clips.backward_begins()
        if self._zeroings.follows:
            self._zeroings.backward_begins(loss)

    def after_backward(self) -> None:
        if self._run.is_written(self._run.steps):
            self._clips.backward_ended()
            self._local = self._unwrapped_sketches()
        for watch in filter(None, map(call, self._run.watches.refs)):
            watch.any_backward_ended()
        if self._zeroings.follows:
            self._zeroings.backward_ended()

    def _before_zero_grad(self, optimizer: Any, *_arguments: Any, **_named: Any) -> None:
        entry = self._entries.get(optimizer)
        if entry is None or entry.is_stepping:
            return
        for watch in self._watches_of(optimizer, entry):
            watch.gradients_zeroed()
        if not entry.is_settled:
            self._zeroings.note_zero_grad(optimizer)

    def _before_module_zero_grad(self, module: nn.Module, *_arguments: Any, **_named: Any) -> None:
        module_ids = {id(p) for p in module.parameters()}
        for optimizer in list(self._entries):
            if {id(p) for p in optimizer_params(optimizer)} <= module_ids:
                self._before_zero_grad(optimizer)


def _state_norms(optimizer: Any, params: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return norms of parameter-shaped optimizer state: `{"0/weight: exp_avg": 0.1}`."""
    names = {id(p): name for name, p in params.items()} if optimizer.state else {}
    return norms(
        {
            f"{names[id(p)]}: {key}": value
            for p, state in optimizer.state.items()
            if id(p) in names and isinstance(state, dict)
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and value.shape == p.shape
        }
    )


def _is_plain_tensor(parameter: torch.Tensor) -> bool:
    plain = type(parameter) in (torch.Tensor, nn.Parameter) and parameter.layout == torch.strided
    return plain and not count_in_fsdp1([parameter])
