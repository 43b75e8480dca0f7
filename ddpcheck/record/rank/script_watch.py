"""`ScriptWatch`: a watch that writes down what it would exchange with the other ranks.

It asks no other rank and touches nothing of the script: no collective, no wait, no gradient of zeros where one is
missing. What it writes is judged with the logs of the other ranks when the script has ended.
"""

from __future__ import annotations

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
from ddpcheck.findings.source_lines import classes_of_program, is_called_by_a_package, lines_of_program, user_location
from ddpcheck.gather.ddp.sharding import mesh_of
from ddpcheck.gather.patching import OF_A_WRAPPER, Recorder
from ddpcheck.gather.state.fingerprints import InRows, is_shard
from ddpcheck.gather.state.module_description import class_name, module_entries
from ddpcheck.gather.steps.gradient_distance import Kept, has_gradient, norms
from ddpcheck.record.data.input_recorder import InputRecorder
from ddpcheck.record.loop.apart_marks import ApartMarks
from ddpcheck.record.loop.bypass_recorder import BypassRecorder
from ddpcheck.record.loop.loop_record import ZEROED
from ddpcheck.record.loop.pace_recorder import PaceRecorder
from ddpcheck.record.loop.step_listener import StepListener
from ddpcheck.record.loop.step_recorder import EndedStep, RecorderOptions, StepRecorder
from ddpcheck.record.module_hooks import hold, release
from ddpcheck.record.rank.wrapper_collectives import WrapperCollectives
from ddpcheck.record.recording import Recording
from ddpcheck.record.replicas.replica_recorder import ReplicaRecorder
from ddpcheck.stream.entries import NotCompared, StepsReported, WrapperMade
from ddpcheck.stream.ledger import AROUND
from ddpcheck.stream.rank_log import RankLog
from ddpcheck.stream.rank_report import RankReport, is_probed, is_sampled

_ALWAYS_FOR, _THEN_EVERY = 32, 16  # steps after which parameters are asked whether they are frozen yet
_JOINED = "under Join, ranks without further batches may have left the loop"
_APART = "the communication hook lets ranks train apart for some steps"
_HIDDEN = "backward passes run under compiled autograd, in which steps cannot be followed"
_SINCE = ("added", "replaced", "unfrozen")
_INNER = ("called", "forward_begins", "forward_returned", "backward_begins", "reduced", "step")
_DISCARDED_STEPS = 2  # optimizer steps, one after the other, before which gradients were thrown away


class ScriptWatch(StepListener, Recorder, subjects=OF_A_WRAPPER, inner=_INNER):
    """The watch on one wrapper of a script, which is the `number`-th that this rank has constructed.

    The door of a `StepRecorder`, and itself told of the steps.

    Attributes:
        is_sharded: Whether it is a module that `fully_shard` has sharded.
        apart: Whether ranks may have left the loop, or train apart on purpose, as `StepRecorder` knows it.
        numbered: By identity of its parameters, the number of the wrapper and the name: "0/fc.weight".
    """

    def __init__(
        self,
        run: Recording,
        wrapper: nn.Module,
        note_changes: Callable[[ScriptWatch, Sequence[str]], None],
        *,
        began_alike: bool,
        of_group: int = 1,
        built: Mapping[str, int] | None = None,
        at: Location | None = None,
    ) -> None:
        self._log: RankLog = run.log
        self.number = run.wrappers
        self.apart = False
        self._every = run.every
        log, number = self._log, self.number
        self._collectives = WrapperCollectives(log, number, f"wrapper {of_group}" if of_group > 1 else "")
        self._note_changes = note_changes
        self._inputs = InputRecorder(log.add, number, lambda: run.samples)
        self._pace = PaceRecorder(run, number)
        self._through_forward = False  # the backward pass that runs comes from what the wrapper has returned
        self._incomplete = False  # the last reduction, which waits for gradients that have not come
        self._attached = True
        self._told_apart = False  # that steps are not compared
        self._marks = ApartMarks(lambda: self._recorder, number)
        self._alarmed = False  # a report is due when the step has ended
        self._is_fresh = False  # what a sampled step has left: no optimizer has stepped since then, and none zeroed
        self._fresh: dict[str, torch.Tensor] = {}  # parameters whose averaged gradient was not zero
        self._reduced: dict[str, float] = {}  # norms of gradients of shards, as the last reduction has left them
        self._loads = 0  # of files, before the last step that has ended
        self._discarded = 0  # optimizer steps before which all of these were thrown away by it
        self._recorder = StepRecorder(
            wrapper,
            self,
            RecorderOptions(
                parameters=True,
                normalisation=True,
                compares=self._is_due,
                keeps=self._is_due,
                keep=Kept.of,
                completes=False,
                settles_at_end=True,
                parameters_later=True,
                shards=True,
                hooks_shards=False,
                bypassed=lambda: self._bypass.found(),
            ),
            began_alike=began_alike,
            keeps_start=began_alike,
            built=built,
            listeners=[self],
        )
        self._replica = ReplicaRecorder(self._recorder, log, number)
        self.is_sharded = self._recorder.is_sharded
        mesh = mesh_of(wrapper) if self.is_sharded else None
        self._gathers_in = mesh.get_group() if mesh is not None and mesh.ndim == 1 else None
        of_all = len(self._recorder.ranks) == dist.get_world_size()
        self._gathers_together = mesh is not None and (of_all or self._gathers_in is not None)
        self.numbered = {id(p): f"{number}/{name}" for name, p in self.parameters.items()}
        self._paths = {id(part): path for path, part in self.module.named_modules()}
        self._bypass = BypassRecorder(self.module, self._recorder.tracker.parameters.tensors, self._recorder.loop.add)
        self._recorder.attach()
        hold(self.module, self)
        log.add(
            WrapperMade(
                class_name(self.module),
                self._recorder.ranks,
                self._recorder.context,
                at or user_location(),
                is_called_by_a_package(),
                classes_of_program(self.module),
                module_entries(self.module) if number == 0 and dist.get_rank() == 0 else (),
            )
        )

    @property
    def module(self) -> nn.Module:
        return self._recorder.module

    @property
    def forwards(self) -> int:
        """How many forward passes there have been that may train."""
        return self._collectives.forwards

    @property
    def called_in(self) -> tuple[CodeType | None, Location | None]:
        """The function of the program that has called the wrapper last, in a pass that may train, and its line."""
        return self._collectives.code, self._collectives.line

    def has_other_shards(self) -> bool:
        """Whether a sharded module has other parameters now, as after `load_state_dict(assign=True)`, and uses them."""
        name, known = next(iter(self.parameters.items()), ("", None))
        here: Any = self.module
        for part in name.split("."):
            here = getattr(here, part, None)
        return here is not known and isinstance(here, torch.Tensor) and is_shard(here)

    def shards_forward(self, wrapper: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """The forward pass of a sharded module is about to run, and to gather its parameters."""
        if self._gathers_together:
            self._collectives.gathers(self._gathers_in)
        self._recorder.tracker.before_forward(wrapper, arguments, named)

    def shards_returned(self, wrapper: nn.Module, output: Any) -> None:
        self._recorder.tracker.after_forward(wrapper, (), output)

    def note_scale(self, name: str, part: nn.Module, where: Location | None) -> None:
        """A method of a sharded module is called that decides what its reduction divides by."""
        theirs = {id(p) for p in part.parameters()}
        names = tuple(n for n, p in self.module_parameters() if id(p) in theirs)
        self._log.add(ModuleChanged(self.number, "scale", name, names, where, self.forwards, self.step))

    def note_module(self, path: str, part: nn.Module, where: Location | None) -> None:
        """A module was assigned in the place of one that `fully_shard` had sharded, before the first forward pass."""
        names = tuple(f"{path}.{name}" for name, _ in part.named_parameters())
        self._log.add(ModuleChanged(self.number, "module", path, names, where))

    def note_replaced(self, name: str, where: Location | None, *, later: bool) -> None:
        """A parameter was assigned in the place of a shard, and is none that `fully_shard` gathers.

        `later`: after the first forward pass, which may have been one that does not train.
        """
        forwards = max(self.forwards, 1) if later else 0
        self._log.add(ModuleChanged(self.number, "replaced", name, (name,), where, forwards, self.step))

    def look_for_leaves(self, prefix: str, part: nn.Module) -> None:
        """The parameters of a part of a sharded module are in the place of their shards."""
        self._recorder.tracker.parameters.look_for_leaves(prefix, part)

    def shard_scales(self) -> dict[str, float]:
        """By what factor the norm of each shard's gradient has grown since the reduction, by number and name."""
        gradients = {name: self.parameters[name].grad for name in self._reduced}
        now = norms({name: gradient for name, gradient in gradients.items() if gradient is not None})
        return {f"{self.number}/{name}": size / self._reduced[name] for name, size in now.items()}

    @property
    def step(self) -> int:
        """The number of synchronised backward passes that have ended."""
        return self._recorder.tracker.number

    @property
    def is_of_living_wrapper(self) -> bool:
        """Whether the wrapper is still there; the module that it wrapped may be trained without it."""
        return self._recorder.wrapper is not None

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Those that the wrapper synchronises, by name."""
        return self._recorder.parameters

    def module_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters of the wrapped module as it is now, by name."""
        return iter(self._recorder.parts.now().parameters.items())

    def later_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that the wrapped module has, and that were added, replaced or unfrozen after the wrapper was made."""
        changed = self._recorder.history.changed()
        known = dict(self.module_parameters())
        return ((name, known[name]) for name, how in changed.items() if how in _SINCE and name in known)

    def path_of(self, module: nn.Module) -> str | None:
        """Where a module was in the wrapped one when that was wrapped; `None` for another."""
        return self._paths.get(id(module))

    @property
    def is_sampled(self) -> bool:
        """Whether the step that is under way is looked at."""
        return self._is_sampled(self.step)

    @property
    def has_unreduced(self) -> bool:
        """Whether a parameter has what backward passes have added since the last reduction, or that has not ended."""
        return self._recorder.loop.ledger.put_off or self._incomplete

    @property
    def joins(self) -> bool:
        """Whether ranks without further batches may have left the loop (`Join`)."""
        return self._recorder.joins

    def expects(self, reducer: object, outputs: Any) -> None:
        """`prepare_for_backward` is called by a framework: a backward pass comes, perhaps inside of forward."""
        wrapper = self._recorder.wrapper
        if wrapper is not None and getattr(wrapper, "reducer", None) is reducer:
            self._recorder.tracker.expect(outputs)

    def gradients_zeroed(self) -> None:
        """`zero_grad` is called on the wrapper, or on an optimizer that holds some of its parameters."""
        self._recorder.loop.add(ZEROED)
        if self._is_fresh:
            self._is_fresh = False
            self._fresh = {name: self.parameters[name] for name, size in self._norms().items() if 0 < size < math.inf}

    def _norms(self) -> dict[str, float]:
        return norms({name: p.grad for name, p in self.parameters.items() if p.grad is not None})

    @property
    def reduced_gradients(self) -> InRows | None:
        """The gradients, where the backward pass that ends now has reduced them and they were captured."""
        return None if self.is_sharded else self._replica.reduced

    def any_backward_begins(self) -> None:
        """A backward pass of the script begins, of whatever."""
        self._through_forward = False
        self._replica.reduced = None  # of one that has raised
        if not self.is_sharded:
            tracker = self._recorder.tracker
            self._bypass.backward_begins(tracker.number, in_forward=tracker.in_forward)

    def any_backward_ended(self) -> None:
        """It has ended; shards are reduced whichever module's forward it comes through."""
        self._replica.reduced = None
        if self._through_forward or self.is_sharded or self._recorder.tracker.number != self._bypass.reductions:
            return
        if not self.has_unreduced and not self.joins:
            self._bypass.backward_ended()

    def parameters_written(self) -> None:
        """The script has written parameters by itself."""
        self._replica.changed |= self.forwards > 0

    def optimizer_steps(self) -> None:
        """An optimizer with parameters of the wrapper is about to step."""
        if self._replica.waits:
            self._replica.write()
        self._is_fresh = False
        fresh, self._fresh = self._fresh, {}
        loop = self._recorder.loop
        if not fresh or not loop.ledger.zeroed:
            return
        if any(map(has_gradient, fresh.values())):
            self._discarded = 0
            return
        self._discarded += 1
        loop.add(LoopEvent("zero_grad", location=str(user_location() or ""), discarded=tuple(fresh)))
        if self._discarded == _DISCARDED_STEPS:
            self._recorder.tell(*loop.ledger.lost[-1].events)

    def close(self, *, failing: bool = False) -> None:
        """Leave the wrapper as it was; may be called again. `failing`: the script ends in an exception."""
        was_attached, self._attached = self._attached, False
        self._replica.write()
        if was_attached and not failing:
            self._replica.write_buffers()
            self._pace.ended(self.step)
        if was_attached and (apart := self._marks.at_last()) is not None:
            self._log.add(apart)
        self._bypass.close()
        self._recorder.detach()
        release(self.module, self)
        if was_attached and not failing and self.is_sharded and self.step:
            self._replica.write_statistics(self.step)
        if was_attached and not failing and (last := self._recorder.last_report()) is not None:
            self._log.add(StepsReported(self.number, last, closing=self._recorder.settles))

    # As the door of the recorder

    def alarm(self, _step: int) -> None:
        """Have this rank write its report when the step has ended."""
        self._alarmed = True

    def tell(self, report: RankReport) -> None:
        if any(event.kind in AROUND for event in report.events):
            self._bypass.close()
        self._log.add(StepsReported(self.number, report, alone=True))

    def left_out(self, step: int) -> None:
        """Write a report: the next forward pass may raise."""
        self._report(self._recorder.history.report(step, settled=False))

    def absent(self, report: RankReport) -> None:
        """Write it: the reduction may abort this process."""
        self._log.add(StepsReported(self.number, report, begun=True))

    def reduced(self, ended: EndedStep) -> None:
        """Write the report, the replica, and what the forward pass was given, if it is their turn; and count."""
        step = ended.number
        alarmed, self._alarmed = self._alarmed, False
        if (step < _ALWAYS_FOR or step % _THEN_EVERY == 0) and self._recorder.notices_unfrozen(ended):
            self._alarmed = True
        parts = self._recorder.parts.now() if ended.compares else None
        if ended.compares or ended.reports or alarmed:
            self._report(self._recorder.report(ended, parts and parts.parameters))
        if parts is not None:
            self._replica.capture(step, ended.probe, parts)
        elif ended.is_due and not self._told_apart and self._is_due(step) and self.apart:
            self._told_apart = True
            self._log.add(NotCompared(self.number, _JOINED if self.joins else _APART))
        self._loads = self._log.loads
        self._incomplete = ended.incomplete
        self._reduced = {}
        if not (self.apart and self.joins):
            self._pace.reduced(step)
        if ended.is_due and self._is_sampled(step):
            self._is_fresh = True
            if self.is_sharded:
                self._reduced = {name: size for name, size in self._norms().items() if LEAST < size < math.inf}
            if (given := ended.snapshot) is not None:
                self._inputs.trained(step, (given.arguments, dict(given.named)), self._collectives.line)
        self._log.count(self.number, step + 1, step + 1)

    def _report(self, mine: RankReport) -> None:
        self._recorder.history.note_reported([mine])
        if mine.changes:
            self._note_changes(self, tuple(mine.changes.values()))
        self._log.add(StepsReported(self.number, mine))

    # As a listener

    def called(self, wrapper: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Note what the forward pass has the ranks exchange; and what it is given, where it is to train nothing."""
        if not self._attached:
            return
        self._collectives.broadcasts(wrapper)
        if not torch.is_grad_enabled():
            self._inputs.evaluates(self.step, (arguments, dict(named)))

    def forward_begins(self) -> None:
        """Write what was captured in the last step, where no optimizer has stepped, and what is kept of its buffers."""
        if self._replica.waits:
            self._replica.write()
            self._replica.write_buffers()
        self.apart = self._recorder.apart
        if self.apart:
            self._marks.forward_begins()

    def forward_returned(self, step: int, output: Any, tensors: Sequence[torch.Tensor], *, synced: bool) -> None:
        """Count it, by its line."""
        self._collectives.forward_returned(synced=synced)
        if (wrapper := self._recorder.tracker.parameters.wrapper()) is not None and wrapper.training:
            self._pace.forwards += 1
            self._pace.lines = self._pace.lines or lines_of_program(sys._getframe(1))

    def cannot_follow(self) -> None:
        self._log.add(NotCompared(self.number, _HIDDEN))

    def _is_due(self, step: int) -> bool:
        if not self._every:
            return False
        return is_sampled(step, self._every) or (self.is_sharded and self._log.loads > self._loads)

    def _is_sampled(self, step: int) -> bool:
        return is_probed(step) or (self._is_due(step) and not self.apart)

    def backward_begins(self) -> None:
        """Note the collectives of the reduction that comes."""
        self._through_forward = True
        wrapper, step = self._recorder.tracker.parameters.wrapper(), self._recorder.tracker.number
        if wrapper is not None:
            self._collectives.reduces(wrapper)
        self._log.count(self.number, step + 1, step)
