"""Record the steps of a wrapper on one rank, for comparison or a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from msgspec import Struct
from torch import nn

from ddpcheck.findings.evidence.modules import ShardedFacts
from ddpcheck.findings.evidence.steps import LoopEvent, StepEvidence
from ddpcheck.findings.replace import replace
from ddpcheck.findings.source_lines import step_location
from ddpcheck.findings.wording import Names
from ddpcheck.gather.autograd.autograd_graph import all_names, named_parameters
from ddpcheck.gather.autograd.exchanges import record_all_to_all_functions, record_rank_local
from ddpcheck.gather.ddp.ddp_wrapper import (
    broadcasts_buffers,
    inner_module,
    parameters_in_wrappers,
    ranks_may_diverge,
    ranks_of,
    uses_join,
    wrapper_facts,
)
from ddpcheck.gather.ddp.sharding import mesh_of, split_of
from ddpcheck.gather.state.module_description import KnownParts
from ddpcheck.gather.steps.gradient_distance import Kept, KeptParts
from ddpcheck.gather.steps.training_step import visible_tensors
from ddpcheck.record.loop.loop_record import LoopRecord, Snapshot, StepListener, switch_calls
from ddpcheck.record.loop.optimizer_steps import BypassRecorder, OptimizerSteps
from ddpcheck.record.loop.step_tracker import StepTracker
from ddpcheck.record.loss.micro_batches import MicroBatches
from ddpcheck.record.parameters.parameter_history import ParameterHistory, StepProbe
from ddpcheck.record.recording import follow_steps, unfollow_steps
from ddpcheck.record.replicas.replica_capture import ReplicaCapture
from ddpcheck.stream.ledger import Contribution
from ddpcheck.stream.rank_report import FIRST_SETTLED, RankReport, WatchContext, is_probed, is_settled

_MOST_PARTS = 8  # largest number of ranks for which each part of a reduced gradient is sampled


class EndedStep(Struct, frozen=True):
    """Step whose synchronized backward pass has ended."""

    number: int  # counted from 0
    is_due: bool  # True if the step is sampled, even if ranks train independently
    incomplete: bool  # True if DDP waits for gradients
    probe: StepProbe | None  # probe of the step, if any
    snapshot: Snapshot | None  # of the last forward pass, if repeatable
    compares: bool  # True if the replicas are compared after the step
    reports: bool  # True if ranks report after the step, even without a finding


class StepSink(Protocol):
    """Receiver of the events of a `StepRecorder`."""

    def alarm(self, step: int) -> None:
        """Request a report after `step`; called before this rank joins the step's reduction."""

    def report_now(self, report: RankReport) -> None:
        """Report a fault that `report` alone proves; may raise `FindingsError`."""

    def cannot_follow(self) -> None:
        """Handle a backward pass under compiled autograd: ends of steps are no longer detected."""

    def left_out(self, step: int) -> None:
        """Handle missing parameters of the ended `step`, whose possible second backward pass never ran."""

    def absent(self, report: RankReport) -> None:
        """Handle shards that the starting backward pass will not reach: collectives may mismatch."""

    def reduced(self, ended: EndedStep) -> None:
        """Handle an ended step; may wait for other ranks, and raise `FindingsError`."""


class StepRecorder(StepListener):
    """Recorder of the steps of one wrapper on one rank."""

    steps_on_local_grads = False  # True if consecutive steps have used gradients left unreduced by `no_sync`
    # True if the current step is sampled; decided at its first forward pass, and True without a forward pass or for
    # shards, where loaded files add sampled steps
    is_due = True
    # True if ranks may have left the loop, or train independently on purpose (post-local SGD), so that nothing is
    # compared; updated at the start of each forward pass with gradients
    may_diverge = False

    def __init__(
        self,
        wrapper: nn.Module,  # DDP wrapper, or module sharded by `fully_shard`
        sink: StepSink,
        *,
        checks_parameters: bool,  # detect missing, zero and unregistered parameters
        checks_weights: bool,  # measure the weights of targets in the loss
        compares: Callable[[int], bool],  # by step number: compare the replicas after the step
        keeps: Callable[[int], bool],  # by step number: keep this rank's own gradients
        # True if the ranks are compared in training, not by their logs afterwards: adds zero gradients that DDP waits
        # for, keeps whole gradients, captures parameters but no shards, and hooks forward passes of a sharded module
        is_live: bool,
        began_alike: bool,  # True if parameters are known to be equal on all ranks at wrapping
        keeps_start: bool,  # True to keep the parameter values at wrapping
        built: Mapping[str, int] | None = None,  # known fingerprints of parameters before sharding, by name
        listeners: Sequence[StepListener] = (),  # called after the recorder
    ) -> None:
        """Create the recorder; nothing is recorded until `attach`."""
        self.module = inner_module(wrapper)  # wrapped module
        self.parts = KnownParts(self.module)
        self.rank = dist.get_rank()  # rank in the default process group
        self.ranks = ranks_of(wrapper)  # ranks of the wrapper's process group
        self._sink = sink
        self._checks_parameters, self._is_live = checks_parameters, is_live
        self._compares_after, self._keeps_gradients = compares, keeps
        self._start_time = time.monotonic()
        self.loop = LoopRecord(sink.alarm)
        self.tracker = StepTracker(wrapper, self.loop, (self, *listeners), completes=is_live)
        synced = self.tracker.parameters
        # parameters that the wrapper synchronizes, by name
        self.parameters = dict(zip(synced.names, synced.tensors, strict=True))
        self.is_sharded = synced.is_sharded  # True if the module is sharded by `fully_shard`
        # description of the wrapper at construction of the recorder
        self.context = _watch_context(wrapper, synced.names, built or {}, began_alike=began_alike)
        self.history = ParameterHistory(self.rank, self.module, self.parameters, self.context.wrapper)
        self.replica = ReplicaCapture(
            self.parts,
            self.rank,
            keeps_start=keeps_start and not self.is_sharded,
            with_parameters=is_live,
            shards=self.parameters if self.is_sharded or getattr(wrapper, "device_mesh", None) is not None else None,
            with_shards=not (is_live and self.is_sharded),  # ranks of a DDP group hold the same shards
        )
        mesh = mesh_of(wrapper) if self.is_sharded else None
        self._splits = {n: split_of(p, mesh) for n, p in self.parameters.items()} if self.is_sharded else {}
        self._has_few_parts = all(split is not None and split[0] <= _MOST_PARTS for split in self._splits.values())
        self._probe: StepProbe | None = None
        self._micro_batches = MicroBatches(synced.tensors) if checks_weights else None
        self.bypass = BypassRecorder(self.module, synced.tensors, self.loop.add)
        self._optimizer_steps = OptimizerSteps(
            self.tracker,
            self.loop,
            lambda: self.has_others,
            self.report_unreduced,
            self.report_replaced,
            self.bypass.locate_bypass,
        )

    def attach(self) -> None:
        record_all_to_all_functions()
        follow_steps(self._optimizer_steps)
        if self._is_live or not self.is_sharded:
            self.tracker.attach()
        if self.wrapper is not None:
            self.loop.attach(self.wrapper)

    def detach(self) -> None:
        self.bypass.close()
        self.tracker.detach()
        self.loop.detach()
        unfollow_steps(self._optimizer_steps)
        if self._micro_batches is not None:
            self._micro_batches.close()
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    @property
    def wrapper(self) -> nn.Module | None:
        return self.tracker.parameters.wrapper()

    @property
    def step(self) -> int:
        """Return the number of finished synchronized backward passes."""
        return self.tracker.number

    @property
    def has_others(self) -> bool:
        return len(self.ranks) > 1 and dist.is_initialized()

    @property
    def uses_join(self) -> bool:
        """Return True if the wrapper runs under `Join`, where ranks may end training early."""
        wrapper = self.tracker.parameters.wrapper()
        return wrapper is not None and uses_join(wrapper)

    def report_unreduced(self, used: Contribution | None) -> None:
        """Report optimizer steps that use gradients that no reduction has averaged.

        `used`: the last backward pass that computed such gradients; None if all of them bypass the wrapper's forward.
        """
        if self.uses_join:  # under Join, a rank without batches steps a sharded optimizer for the others
            return
        if used is not None and used.after is not None:
            self.report_unpaired()
            return
        self.steps_on_local_grads |= used is not None and used.no_sync_line is not None
        self.bypass.locate_bypass()
        bypassing = self.bypass.event, LoopEvent("step", location=str(step_location() or ""))
        switches = switch_calls if self.is_sharded else ()
        self.report_now(*switches, *(bypassing if used is None else used.events))

    def report_unpaired(self) -> None:
        """Report a backward pass without a new forward pass of the wrapper."""
        self.loop.report(self.step)
        self.report_now(*self.loop.to_report)

    def report_replaced(self) -> None:
        """Report trained parameters that were replaced or added after wrapping with DDP."""
        changed = {name: kind for name, kind in self.history.changed().items() if kind in ("replaced", "added")}
        if "added" in changed.values():
            params, other_ids = named_parameters(self.module), parameters_in_wrappers(but=self.wrapper)
            trained = {name for name, p in params.items() if p.grad is not None and id(p) not in other_ids}
            changed = {name: kind for name, kind in changed.items() if kind == "replaced" or name in trained}
        if changed and self._checks_parameters and not self.uses_join:
            self._sink.report_now(replace(self._plain_report(self.step), changes=changed))

    def report_now(self, *events: LoopEvent) -> None:
        """Report `events` that show a fault even without the reports of other ranks."""
        self._sink.report_now(replace(self._plain_report(self.step), events=events))

    def _plain_report(self, step: int) -> RankReport:
        return RankReport(StepEvidence(self.rank, step, {}))

    # Methods of `StepListener`

    def forward_begins(self) -> None:
        """Update `may_diverge` (ranks differ on purpose); keep fingerprints before the first forward pass."""
        wrapper = self.tracker.parameters.wrapper()
        self.may_diverge = wrapper is not None and ranks_may_diverge(wrapper)
        if self.replica.awaits_forward:
            self.replica.forward_begins()
        ledger = self.loop.ledger
        if ledger.open and ledger.has_unreduced and ledger.unpaired and not self._optimizer_steps.has_stepped:
            self.loop.report(self.step)  # no known optimizer: presumably used

    def step_begins(self, step: int) -> None:
        self.is_due = self.is_sharded or is_probed(step) or self._keeps_gradients(step) or self._compares_after(step)
        if not self.is_due:
            return
        keeps = self._keeps_gradients(step) and not self.may_diverge and self._has_few_parts
        if self._probe is not None:
            self._probe.attach()
        elif (self._checks_parameters and self._reports(step)) or keeps:
            leaves = self.tracker.parameters.leaves
            keep = self._sample_gradient if keeps else None
            self._probe = StepProbe(self.module, self.parts, self.parameters, leaves, keep=keep)

    def _sample_gradient(self, name: str, gradient: torch.Tensor) -> Any:
        split = self._splits.get(name)
        if split is not None:
            return KeptParts.record(gradient, *split)
        return gradient.clone() if self._is_live else Kept.record(gradient)

    def forward_returned(self, step: int, output: Any, tensors: Sequence[torch.Tensor], *, synced: bool) -> None:
        if self.is_due and self._compares(step):
            if self.context.wrapper.ignored:
                param_ids = {*map(id, self.parameters.values())}
                record_rank_local(tensors, lambda leaf: id(leaf) not in param_ids)
            self.replica.forward_returned()
        if self._micro_batches is not None:
            self._micro_batches.forward_returned(step, output)
        if (synced or self.is_sharded) and self._probe is not None:
            if self.is_sharded:  # leaves are known now
                self._probe.attach()
            self._probe.forward_returned(tensors)
        if synced and step == 0 and self._checks_parameters and self.context.wrapper.tolerates_unused:
            visible, opaque = visible_tensors([output], static_graph=self.context.wrapper.static_graph)
            if opaque and not visible:  # DDP may raise in this backward pass
                self._sink.report_now(RankReport(StepEvidence(self.rank, step, {}, output_type=opaque)))

    def backward_begins(self) -> None:
        if self._probe is not None:
            self._probe.backward_begins()

    def parameters_missing(self, step: int, names: Sequence[str]) -> None:
        """Request an exchange of reports, unless the missing parameters were already reported."""
        if self._probe is not None:
            self._probe.detach()
        if self._checks_parameters and not self.history.is_reported(names):
            self._sink.alarm(step)

    def parameters_left_out(self, step: int, names: Sequence[str], snapshot: Snapshot | None) -> None:
        """Request an exchange of reports one step later, unless these parameters were already reported."""
        if self._checks_parameters and not self.history.is_reported(names):
            self.history.left_out(step, names, snapshot)
            self._sink.left_out(step)

    def backward_unpaired(self, *, raises: bool) -> None:
        """Report a backward pass without forward pass, unless the optimizer step will report it."""
        if raises:
            self.report_unpaired()

    def parameters_absent(self, step: int, names: Sequence[str]) -> None:
        """Report shards that backward will not reach, unless they have already been reported."""
        if self._checks_parameters and not self.history.is_reported(names):
            self._sink.alarm(step)
            self._sink.absent(replace(self._plain_report(step), missing={step: tuple(names)}))

    def backward_hidden(self) -> None:
        if self._probe is not None:
            self._probe.close()
        self._sink.cannot_follow()

    def static_graph_broken(self, step: int, names: Sequence[str]) -> None:
        """Report `names` without waiting for other ranks, since DDP will raise on this rank."""
        if self._checks_parameters:
            self._sink.report_now(replace(self._plain_report(step), missing={0: tuple(names), step: ()}))

    def step_ended(self, step: int, unused: frozenset[str], awaited: frozenset[str], snapshot: Snapshot | None) -> None:
        if self._micro_batches is not None:
            self._micro_batches.step_ended()
        probe, self._probe = self._probe, None
        if probe is not None:
            probe.close()
        if self._checks_parameters:
            missing = unused if self.is_sharded else awaited
            self.history.step_ended(step, probe, unused, missing, self.tracker.accumulated, self.tracker.late)
        reduced = self._is_live or not awaited
        self.loop.step_ended(step, reduced=reduced)
        due, self.is_due = self.is_due, True
        compares, reports = due and reduced and self._compares(step), due and self._reports(step)
        self._sink.reduced(EndedStep(step, due, bool(awaited), probe, snapshot, compares, reports))

    def _compares(self, step: int) -> bool:
        return (self._keeps_gradients(step) or self._compares_after(step)) and not self.may_diverge

    def _reports(self, step: int) -> bool:
        wanted = self._checks_parameters or self._micro_batches is not None
        return wanted and is_probed(step) and not self.may_diverge

    # Reports

    def notices_unfrozen(self, ended: EndedStep) -> bool:
        """Return True the first time that a parameter frozen at construction requires grad.

        Return False if `ended.probe` exists (hooks recorded this step's gradients): the step's report names the
        parameter anyway.
        """
        return self._checks_parameters and ended.probe is None and self.history.notices_unfrozen()

    def report(self, ended: EndedStep, parameters: Mapping[str, nn.Parameter] | None = None) -> RankReport:
        """Return this rank's report up to `ended`; `parameters`: the module's parameters now, if known."""
        report = self._plain_report(ended.number)
        if self._checks_parameters:
            report = self.history.report(
                ended.number,
                probe=ended.probe,
                snapshot=None if self.is_sharded else ended.snapshot,  # a rerun would need all ranks
                settled=is_settled(ended.number),
                thorough=ended.compares,
                parameters=parameters,
            )
        measured = () if self._micro_batches is None else self._micro_batches.measured()
        seconds = (time.monotonic() - self._start_time) / (ended.number + 1)
        events, self.loop.to_report = self.loop.to_report, ()
        return replace(report, events=events, micro_batches=measured, seconds=seconds)

    def last_report(self) -> RankReport | None:
        """Return a report of facts not reported so far; None if there are none."""
        if self.judges_at_end:
            return self.history.report(self.step - 1, settled=True)
        if self.history.not_reported or self.loop.to_report:
            return replace(self.history.report(self.step, settled=False), events=self.loop.to_report)
        return None

    @property
    def judges_at_end(self) -> bool:
        """Return True if unused parameters that DDP tolerates are judged when the script ends.

        With `watch`, these parameters were already judged during training, except in a short run.
        """
        trains_on = self.context.wrapper.continues_unused and self._checks_parameters
        return trains_on and 2 < self.step and (not self._is_live or self.step <= FIRST_SETTLED)


def _watch_context(
    wrapper: nn.Module, synced: Sequence[str], built: Mapping[str, int], *, began_alike: bool
) -> WatchContext:
    module = inner_module(wrapper)
    aliases = {names[0]: names for names in all_names(module).values() if len(names) > 1}
    facts = wrapper_facts(wrapper, {id(p): name for name, p in module.named_parameters()})
    return WatchContext(
        Names(aliases),
        facts,
        world_size=len(ranks_of(wrapper)),
        broadcasts_buffers=broadcasts_buffers(wrapper),
        wrapper_class=type(wrapper).__name__,
        trainable=tuple(synced),
        began_alike=began_alike,
        sharded=replace(facts, values_built=built) if isinstance(facts, ShardedFacts) else None,
    )
