"""Record on one rank, for a later comparison, the state that ranks would exchange.

A `WrapperRecorder` never communicates, waits, or adds zero gradients. The log is compared with the logs of the other
ranks after the script has ended.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.findings.evidence.gradients import LEAST
from ddpcheck.findings.evidence.loop import ModuleChanged
from ddpcheck.findings.evidence.steps import LoopEvent
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import (
    classes_of_program,
    is_called_by_a_package,
    lines_of_program,
    step_location,
    user_location,
)
from ddpcheck.gather.ddp.sharding import mesh_of
from ddpcheck.gather.patching import OF_A_WRAPPER, Recorder
from ddpcheck.gather.state.fingerprints import StackedTensors, is_dtensor
from ddpcheck.gather.state.module_description import class_name, module_entries
from ddpcheck.gather.steps.gradient_distance import has_gradient, norms
from ddpcheck.record.data.datasets import InputRecorder
from ddpcheck.record.loop.loop_record import ZEROED, StepListener
from ddpcheck.record.loop.step_recorder import EndedStep, StepRecorder
from ddpcheck.record.loop.wrapper_checks import LocalSgdTracker, PaceRecorder, WrapperCollectives
from ddpcheck.record.recording import Recording, keep_alive, stop_keeping_alive
from ddpcheck.record.replicas.replica_recorder import ReplicaRecorder
from ddpcheck.record.source.source_scope import updating_line
from ddpcheck.stream.entries import AttributesSet, NotCompared, StepsReported, WrapperMade
from ddpcheck.stream.ledger import BYPASSING_EVENTS
from ddpcheck.stream.rank_log import RankLog
from ddpcheck.stream.rank_report import RankReport, is_probed, is_sampled

_ALWAYS_FOR, _THEN_EVERY = 32, 16  # check for unfrozen parameters in the first 32 steps, then every 16
_JOINED = "under Join, ranks without further batches may have left the loop"
_APART = "the communication hook lets ranks train apart for some steps"
_HIDDEN = "backward passes run under compiled autograd, in which steps cannot be followed"
_SINCE = ("added", "replaced", "unfrozen")
_INNER = ("called", "forward_begins", "forward_returned", "backward_begins", "reduced", "step")


class WrapperRecorder(StepListener, Recorder, subjects=OF_A_WRAPPER, inner=_INNER):
    """Recorder of one wrapper of a script, the `number`-th constructed on this rank.

    Receives the reports of a `StepRecorder`, and listens to its step events.
    """

    def __init__(
        self,
        run: Recording,
        wrapper: nn.Module,
        note_changes: Callable[[WrapperRecorder, Sequence[str]], None],
        *,
        began_alike: bool,
        of_group: int = 1,
        built: Mapping[str, int] | None = None,
        at: Location | None = None,
    ) -> None:
        self._log: RankLog = run.log
        self.number = run.wrappers
        self.may_diverge = False  # True if ranks may have left the loop or diverge on purpose (see `StepRecorder`)
        self._every = run.every
        log, number = self._log, self.number
        self._collectives = WrapperCollectives(log, number, f"wrapper {of_group}" if of_group > 1 else "")
        self._note_changes = note_changes
        self._inputs = InputRecorder(log.add, number, lambda: run.samples)
        self._pace = PaceRecorder(run, number)
        self._loss_from_forward = False  # True if the running backward pass starts at an output of the wrapper
        self._is_incomplete = False  # True if the last reduction still waits for gradients
        self._is_attached = True
        self._has_reported_skip = False  # True once a comparison is reported as skipped
        self._local_sgd = LocalSgdTracker(lambda: self._recorder, number)
        self._is_report_due = False  # True if a report is due at the end of the step
        self._is_fresh = False  # True after a sampled step, until an optimizer steps or zeroes gradients
        self._fresh_params: dict[str, torch.Tensor] = {}  # with a nonzero averaged gradient at `zero_grad`
        self._reduced_norms: dict[str, float] = {}  # gradient norms of shards after the last reduction, by name
        self._load_count = 0  # `torch.load` calls before the end of the last step
        self._discarded_steps = 0  # consecutive optimizer steps without any of the `_fresh_params` gradients
        self._recorder = StepRecorder(
            wrapper,
            self,
            checks_parameters=True,
            checks_weights=True,
            compares=self._is_due,
            keeps=self._is_due,
            is_live=False,
            began_alike=began_alike,
            keeps_start=began_alike,
            built=built,
            listeners=[self],
        )
        self._replica = ReplicaRecorder(self._recorder, log, number)
        self.is_sharded = self._recorder.is_sharded  # True if the module is sharded by `fully_shard`
        mesh = mesh_of(wrapper) if self.is_sharded else None
        self._gather_group = mesh.get_group() if mesh is not None and mesh.ndim == 1 else None
        is_world = len(self._recorder.ranks) == dist.get_world_size()
        self._records_gathers = mesh is not None and (is_world or self._gather_group is not None)
        # wrapper number and parameter name by `id()` of the parameter, e.g. "0/fc.weight".
        self.numbered = {id(p): f"{number}/{name}" for name, p in self.parameters.items()}
        self._paths = {id(part): path for path, part in self.module.named_modules()}
        self._constructor_attributes = frozenset(vars(wrapper))  # names of attributes that the constructor has set
        self._recorder.attach()
        keep_alive(self.module, self)
        self._write_construction(at or user_location())

    def _write_construction(self, location: Location | None) -> None:
        self._log.add(
            WrapperMade(
                class_name(self.module),
                self._recorder.ranks,
                self._recorder.context,
                location,
                is_called_by_a_package(),
                classes_of_program(self.module),
                module_entries(self.module) if self.number == 0 and dist.get_rank() == 0 else (),
            )
        )

    @property
    def module(self) -> nn.Module:
        return self._recorder.module

    @property
    def forwards(self) -> int:
        return self._collectives.forwards

    @property
    def called_in(self) -> tuple[CodeType | None, Location | None]:
        """Return the calling function and line of the last forward pass with gradients."""
        return self._collectives.code, self._collectives.line

    def has_other_shards(self) -> bool:
        """Return True if new shards replaced the recorded shards, e.g. after `load_state_dict(assign=True)`."""
        name, param = next(iter(self.parameters.items()), ("", None))
        value: Any = self.module
        for attribute in name.split("."):
            value = getattr(value, attribute, None)
        return value is not param and isinstance(value, torch.Tensor) and is_dtensor(value)

    def shards_forward(self, wrapper: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Record the start of a sharded module's forward pass, and its all-gather."""
        if self._records_gathers:
            self._collectives.note_gather(self._gather_group)
        self._recorder.tracker.before_forward(wrapper, arguments, named)

    def shards_returned(self, wrapper: nn.Module, output: Any) -> None:
        self._recorder.tracker.after_forward(wrapper, (), output)

    def note_scale(self, name: str, part: nn.Module, where: Location | None) -> None:
        """Record a call that sets the divisor of a sharded module's reduction."""
        param_ids = {id(p) for p in part.parameters()}
        names = tuple(n for n, p in self.module_parameters() if id(p) in param_ids)
        self._log.add(ModuleChanged(self.number, "scale", name, names, where, self.forwards, self.step))

    def note_module(self, path: str, part: nn.Module, where: Location | None) -> None:
        """Record a module that replaced a sharded module before the first forward pass."""
        names = tuple(f"{path}.{name}" for name, _ in part.named_parameters())
        self._log.add(ModuleChanged(self.number, "module", path, names, where))

    def note_replaced(self, name: str, where: Location | None, *, later: bool) -> None:
        """Record a parameter that replaced a shard and is not gathered by `fully_shard`.

        `later`: True after the first forward pass, which may have run without gradients.
        """
        forwards = max(self.forwards, 1) if later else 0
        self._log.add(ModuleChanged(self.number, "replaced", name, (name,), where, forwards, self.step))

    def find_unsharded(self, prefix: str, part: nn.Module) -> None:
        """Look up the unsharded parameters of `part`, named with `prefix`, as forward begins."""
        self._recorder.tracker.parameters.find_unsharded(prefix, part)

    def shard_scales(self) -> dict[str, float]:
        """Return, by shard, the factor by which gradient norms have changed since the reduction."""
        gradients = {name: self.parameters[name].grad for name in self._reduced_norms}
        now = norms({name: gradient for name, gradient in gradients.items() if gradient is not None})
        return {f"{self.number}/{name}": size / self._reduced_norms[name] for name, size in now.items()}

    @property
    def step(self) -> int:
        return self._recorder.tracker.number

    @property
    def has_live_wrapper(self) -> bool:
        """Return True if the wrapper is alive; training may continue without the wrapper."""
        return self._recorder.wrapper is not None

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        return self._recorder.parameters

    def module_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return (name, parameter) pairs of all current parameters of the wrapped module."""
        return iter(self._recorder.parts.now().parameters.items())

    def later_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return (name, parameter) pairs of parameters added, replaced or unfrozen after wrapping."""
        changed = self._recorder.history.changed()
        params = dict(self.module_parameters())
        return ((name, params[name]) for name, kind in changed.items() if kind in _SINCE and name in params)

    def path_of(self, module: nn.Module) -> str | None:
        return self._paths.get(id(module))

    @property
    def is_sampled(self) -> bool:
        return self._is_sampled(self.step)

    @property
    def has_unreduced(self) -> bool:
        """Return True if gradients are not reduced yet, or the last reduction is incomplete."""
        return self._recorder.loop.ledger.awaits_reduction or self._is_incomplete

    def expects(self, reducer: object, outputs: Any) -> None:
        """Expect a backward pass: a framework has called `prepare_for_backward` of `reducer`."""
        wrapper = self._recorder.wrapper
        if wrapper is not None and getattr(wrapper, "reducer", None) is reducer:
            self._recorder.tracker.expect(outputs)

    def gradients_zeroed(self) -> None:
        """Record `zero_grad` of the wrapper, or of an optimizer of its parameters."""
        self._recorder.loop.add(ZEROED)
        if self._is_fresh:
            self._is_fresh = False
            sizes = self._gradient_norms()
            self._fresh_params = {n: self.parameters[n] for n, size in sizes.items() if 0 < size < math.inf}

    def _gradient_norms(self) -> dict[str, float]:
        return norms({name: p.grad for name, p in self.parameters.items() if p.grad is not None})

    @property
    def reduced_gradients(self) -> StackedTensors | None:
        """Return the gradients captured after this backward pass's reduction, or `None`."""
        return None if self.is_sharded else self._replica.reduced

    def any_backward_begins(self) -> None:
        self._loss_from_forward = False
        self._replica.reduced = None  # left by a backward pass that raised
        if not self.is_sharded:
            tracker = self._recorder.tracker
            self._recorder.bypass.backward_begins(tracker.number, in_forward=tracker.in_forward)

    def any_backward_ended(self) -> None:
        """Check after any backward pass if the pass bypassed the wrapper (never for shards)."""
        self._replica.reduced = None
        recorder = self._recorder
        if self._loss_from_forward or self.is_sharded or recorder.tracker.number != recorder.bypass.reductions:
            return
        if not self.has_unreduced and not recorder.uses_join:
            recorder.bypass.backward_ended()

    def parameters_written(self) -> None:
        self._replica.changed |= self.forwards > 0

    def optimizer_steps(self) -> None:
        if self._replica.waits:
            self._replica.write()
        self._is_fresh = False
        fresh, self._fresh_params = self._fresh_params, {}
        loop = self._recorder.loop
        if not fresh or not loop.ledger.zeroed:
            return
        if any(map(has_gradient, fresh.values())):
            self._discarded_steps = 0
            return
        self._discarded_steps += 1
        line = str(step_location() or "")
        loop.add(LoopEvent("zero_grad", location=line, discarded=tuple(fresh), in_a_row=self._discarded_steps))
        self._recorder.report_now(*loop.ledger.lost[-1].events)

    def close(self, *, failing: bool = False) -> None:
        """Write last entries and detach, once; `failing`: True if the script raised an exception."""
        was_attached, self._is_attached = self._is_attached, False
        self._replica.write()
        if was_attached and not failing:
            self._replica.write_buffers()
            self._pace.ended(self.step)
        if was_attached and (mark := self._local_sgd.final_entry()) is not None:
            self._log.add(mark)
        self._recorder.detach()
        stop_keeping_alive(self.module, self)
        if was_attached and not failing and self.is_sharded and self.step:
            self._replica.write_statistics(self.step)
        if was_attached and not failing and (report := self._recorder.last_report()) is not None:
            self._log.add(StepsReported(self.number, report, closing=self._recorder.judges_at_end))

    # Methods of `StepSink`

    def alarm(self, _step: int) -> None:
        self._is_report_due = True

    def report_now(self, report: RankReport) -> None:
        if any(event.kind in BYPASSING_EVENTS for event in report.events) and report.events[-1].kind == "step":
            self._recorder.bypass.close()  # its line is not needed any more
        self._log.add(StepsReported(self.number, report, is_conclusive=True))

    def left_out(self, step: int) -> None:
        """Report parameters missing in `step` immediately, since the next forward pass may raise."""
        self._report(self._recorder.history.report(step, settled=False))

    def absent(self, report: RankReport) -> None:
        """Write now that shards are absent from backward; mismatched collectives may abort the process."""
        self._log.add(StepsReported(self.number, report, is_unfinished=True))

    def reduced(self, ended: EndedStep) -> None:
        """Finish a step after its reduction: write report, replica and forward inputs if due."""
        step = ended.number
        if not step:
            self._write_attributes()
        alarmed, self._is_report_due = self._is_report_due, False
        if (step < _ALWAYS_FOR or step % _THEN_EVERY == 0) and self._recorder.notices_unfrozen(ended):
            self._is_report_due = True
        parts = self._recorder.parts.now() if ended.compares else None
        if ended.compares or ended.reports or alarmed:
            self._report(self._recorder.report(ended, parts and parts.parameters))
        if parts is not None:
            self._replica.capture(step, ended.probe, parts)
        elif ended.is_due and not self._has_reported_skip and self._is_due(step) and self.may_diverge:
            self._has_reported_skip = True
            self._log.add(NotCompared(self.number, _JOINED if self._recorder.uses_join else _APART))
        self._load_count = self._log.loads
        self._is_incomplete = ended.incomplete
        self._reduced_norms = {}
        if not (self.may_diverge and self._recorder.uses_join):
            self._pace.reduced(step)
        if ended.is_due and self._is_sampled(step):
            self._is_fresh = True
            if self.is_sharded:
                self._reduced_norms = {n: size for n, size in self._gradient_norms().items() if LEAST < size < math.inf}
            if (snapshot := ended.snapshot) is not None:
                self._inputs.trained(step, (snapshot.arguments, dict(snapshot.named)), self._collectives.line)
        self._log.count(self.number, step + 1, step + 1)

    def _write_attributes(self) -> None:
        """Write names of module attributes that the script has set on the wrapper instead."""
        wrapper = self._recorder.wrapper
        values = {} if wrapper is None or self.is_sharded else vars(wrapper)
        set_later = sorted(name for name in values.keys() - self._constructor_attributes if not callable(values[name]))
        listings = nn.Module.named_parameters, nn.Module.named_buffers  # `_parameters` of a ScriptModule is no dict
        tensors = {name for listing in listings for name, _ in listing(self.module, recurse=False)}
        names = [n for n in set_later if n in tensors or inspect.getattr_static(self.module, n, None) is not None]
        if names:
            kind: type = type(wrapper)
            self._log.add(AttributesSet(self.number, tuple(names), updating_line(names[0], kind, own=True)))

    def _report(self, mine: RankReport) -> None:
        self._recorder.history.note_reported([mine])
        if mine.changes:
            self._note_changes(self, tuple(mine.changes.values()))
        self._log.add(StepsReported(self.number, mine))

    # Methods of `StepListener`

    def called(self, wrapper: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Record the buffer broadcast of a forward pass, and inputs if gradients are disabled."""
        if not self._is_attached:
            return
        self._collectives.note_broadcast(wrapper)
        if not torch.is_grad_enabled():
            self._inputs.evaluates(self.step, (arguments, dict(named)))

    def forward_begins(self) -> None:
        """Write the state of the last step, unless an optimizer step has done so."""
        if self._replica.waits:
            self._replica.write()
            self._replica.write_buffers()
        self.may_diverge = self._recorder.may_diverge
        if self.may_diverge:
            self._local_sgd.forward_begins()

    def forward_returned(self, step: int, output: Any, tensors: Sequence[torch.Tensor], *, synced: bool) -> None:
        self._collectives.forward_returned(synced=synced)
        if (wrapper := self._recorder.tracker.parameters.wrapper()) is not None and wrapper.training:
            self._pace.forwards += 1
            self._pace.lines = self._pace.lines or lines_of_program(sys._getframe(1))

    def cannot_follow(self) -> None:
        self._log.add(NotCompared(self.number, _HIDDEN))

    def _is_due(self, step: int) -> bool:
        if not self._every:
            return False
        return is_sampled(step, self._every) or (self.is_sharded and self._log.loads > self._load_count)

    def _is_sampled(self, step: int) -> bool:
        return is_probed(step) or (self._is_due(step) and not self.may_diverge)

    def backward_begins(self) -> None:
        self._loss_from_forward = True
        wrapper, step = self._recorder.tracker.parameters.wrapper(), self._recorder.tracker.number
        if wrapper is not None:
            self._collectives.note_reduction(wrapper)
        self._log.count(self.number, step + 1, step)
