"""Comparisons of ranks in a watched loop: replicas, shards across meshes, tensor parallel parts."""

from __future__ import annotations

import contextlib
import math
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.evidence.modules import ModuleDescription
from ddpcheck.findings.evidence.replicas import ModelSplit, PartStep
from ddpcheck.findings.evidence.script import EvaluationInputs, Inputs
from ddpcheck.findings.evidence.steps import DdpStepEvidence
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import group_by
from ddpcheck.gather.autograd.autograd_graph import named_parameters
from ddpcheck.gather.collectives.allreduce import average_over_ranks, rms_over_ranks
from ddpcheck.gather.collectives.store_exchange import default_store
from ddpcheck.gather.ddp.ddp_wrapper import comm_hook_of, group_of, hook_error
from ddpcheck.gather.ddp.model_parts import dtensor_layouts_in_use, split_over
from ddpcheck.gather.ddp.sharding import mesh_of, shard_number, varying_shards
from ddpcheck.gather.patching import Recorder
from ddpcheck.gather.state.fingerprints import digest_of, fingerprints
from ddpcheck.gather.steps.gradient_distance import against_average, dense, norm
from ddpcheck.monitor.alarms import AlarmBoard
from ddpcheck.recipe.pytree import tree_tensors
from ddpcheck.record.data.datasets import InputRecorder
from ddpcheck.record.loop.loop_record import Snapshot, StepListener
from ddpcheck.record.loop.step_recorder import StepRecorder
from ddpcheck.record.optimizers.part_recorder import PartRecorder
from ddpcheck.record.parameters.parameter_history import StepProbe
from ddpcheck.rules.data.ddp516_rank_dependent_program_data import judge_model_batches
from ddpcheck.rules.gradients.ddp301_not_synchronised import judge_separate_meshes
from ddpcheck.rules.gradients.ddp521_shard_as_whole import judge_equal_shards
from ddpcheck.rules.replicas.model_parts import judge_model_parts
from ddpcheck.rules.replicas.steps import judge_replica_states
from ddpcheck.stream.entries import ReplicaCaptured
from ddpcheck.stream.rank_report import ReplicaState
from ddpcheck.trace.captured import may_average_by_hand
from ddpcheck.worlds.wire import get_value, put_value, remove_value


def capture_shards(recorder: StepRecorder, step: int) -> ReplicaCaptured:
    """Return fingerprints of this rank's shards, and this rank's shard index in the mesh."""
    mesh = mesh_of(recorder.module)
    number = next((shard_number(shard, mesh) for shard in recorder.parameters.values()), -1)
    values = DdpStepEvidence(recorder.rank, step, parameters=fingerprints(recorder.parameters.items()))
    return ReplicaCaptured(0, step, ReplicaState(ModuleDescription(), values), shard=number)


@dataclass
class ReplicaComparison:
    """Comparison of modules, parameters, buffers and gradients between the ranks of a watch."""

    _recorder: StepRecorder
    _alarms: AlarmBoard
    again: int = -1  # step after which the ranks are compared regardless of the options; the same on all ranks

    @property
    def next_key(self) -> str:
        """Return the store key under which the next comparison gathers digests."""
        return f"digest/{self._recorder.replica.count}"

    def compare(self, step: int, *, after_backward: bool, probe: StepProbe | None = None) -> list[Finding]:
        """Compare the replicas; must be called by all ranks of the group.

        Ranks exchange digests, and full states only if the digests differ. `step`: number of ended steps.
        `after_backward`: True if DDP has reduced the gradients of the next step, and no optimizer has used them.
        `probe`: recorder of the step. If `probe` kept the rank's own gradients, `.grad` is compared with their average.
        """
        digest_key, key = self.next_key, self._recorder.replica.count
        state = self._recorder.replica.capture(step, after_backward=after_backward)
        is_equal = len(set(self._alarms.gather(digest_key, digest_of(state)))) == 1
        wrapper = self._recorder.wrapper
        keeps_gradients = probe is not None and probe.keep is not None
        if self._alarms.open and probe is not None and keeps_gradients and wrapper is not None:  # on all ranks
            differences = self._differences_from_average(probe.local, wrapper)
            state = replace(state, values=replace(state.values, against_local=differences))
            is_equal &= not any(self._alarms.gather(f"parity/{key}", any(difference.bad for difference in differences)))
        repeated = self._compare_shards(step, key) if self._recorder.is_sharded else []
        if is_equal:
            return repeated
        states = self._alarms.gather(f"state/{key}", state)
        context = self._recorder.context
        if wrapper is not None:  # hooks may be registered after construction
            context = replace(context, wrapper=replace(context.wrapper, comm_hook=comm_hook_of(wrapper)))
        if not step and after_backward and may_average_by_hand([replica.values for replica in states], context, step):
            self.again = 1  # check that parameters stay equal
        findings = judge_replica_states(states, context, step, after_backward=after_backward, first=not key)
        return repeated + findings

    def _compare_shards(self, step: int, key: int) -> list[Finding]:
        """Find ranks whose shards have equal values, although their indices in the mesh differ."""
        captured = capture_shards(self._recorder, step)
        digest = digest_of(captured.state.values.parameters)
        pairs = self._alarms.gather(f"shards/{key}", (captured.shard, digest))
        if len({digest for _, digest in pairs}) >= len({shard for shard, _ in pairs}):
            return []
        parts = varying_shards(self._recorder.parameters, mesh_of(self._recorder.module))
        return judge_equal_shards(self._alarms.gather(f"parts/{key}", replace(captured, parts=parts)))

    def _differences_from_average(
        self, local: Mapping[str, torch.Tensor], wrapper: nn.Module
    ) -> tuple[Difference, ...]:
        """Return differences of `.grad` from the average of the ranks' own gradients.

        Must be called by every rank of the wrapper's group. Returns () if a gradient is not finite.
        """
        live = named_parameters(self._recorder.module)  # without the tensors that replace DTensors after a forward pass
        parameters = {name: live.get(name, param) for name, param in self._recorder.parameters.items()}
        if not parameters:
            return ()
        grads = [local.get(name) for name in parameters]
        group = group_of(wrapper)
        averaged = average_over_ranks(grads, list(parameters.values()), group=group)
        norms = [0.0 if grad is None else norm(grad) for grad in grads]
        scales = rms_over_ranks(norms, next(iter(parameters.values())).device, group)
        if not all(map(math.isfinite, scales)):
            return ()
        return tuple(
            against_average(
                name,
                None if parameter.grad is None else dense(parameter.grad),
                average,
                world_size=dist.get_world_size(group),
                scale=scale,
                lossy=hook_error(wrapper),
            )
            for (name, parameter), average, scale in zip(parameters.items(), averaged, scales, strict=True)
        )


# Over the store, without waiting: each rank reads what other ranks have already written

_MOST_KEPT = 8  # max steps in the store; a rank further behind is not compared


class _StepStore:
    """Values that ranks exchange through the rendezvous store, written by step and rank."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._number = 0  # of the instance, from 1

    def write(self, step: int, rank: int, value: object) -> None:
        store = default_store()
        self._number = self._number or store.add(f"{self._prefix}/calls/{rank}", 1)
        put_value(store.set, self._key(step, rank), pickle.dumps(value))

    def remove(self, step: int, rank: int) -> None:
        remove_value(default_store().delete_key, self._key(step, rank))

    def read(self, steps: Iterable[int], ranks: Sequence[int]) -> list[list[Any]]:
        """Return for each step the values of `ranks`; empty if any value is missing."""
        store = default_store()
        keys = [[self._key(step, rank) for rank in ranks] for step in steps]
        if not keys or not store.check([key for step_keys in keys for key in step_keys]):
            return []
        return [[pickle.loads(get_value(store.get, key)) for key in step_keys] for step_keys in keys]

    def _key(self, step: int, rank: int) -> str:
        return f"{self._prefix}/{self._number}/{step}/{rank}"


_WrittenShards = tuple[tuple[int, ...], bool, ReplicaCaptured]
"""(ranks of a mesh, True for a pipeline stage, state of one of the ranks)"""


class MeshComparison(StepListener, Recorder, subjects=("replicas",)):
    """Comparison of replicas that `fully_shard` shards over separate meshes, each with some ranks.

    The n-th watch of a rank is compared with the n-th watches of other ranks. Each rank writes its state at the steps
    at which a comparison is due, and reads all ranks' earlier states from the store. If any rank has no watch, or has a
    pipeline stage, nothing is compared.
    """

    def __init__(
        self,
        recorder: Callable[[], StepRecorder],
        is_due: Callable[[int], bool],
        report: Callable[[Iterable[Finding]], object],
    ) -> None:
        """Initialize; `recorder()`: recorder of the watch; `is_due(step)`: True to compare this step."""
        self._recorder = recorder
        self._is_due = is_due
        self._report = report
        self._store = _StepStore("ddpcheck/meshes")
        self._written: list[int] = []  # steps written by this rank

    def step_ended(self, step: int, unused: frozenset[str], awaited: frozenset[str], snapshot: Snapshot | None) -> None:
        """Write this rank's state; judge all ranks' states at the first and next-to-last write."""
        recorder = self._recorder()
        if not self._is_due(step) or not _is_partial_mesh(recorder):
            return
        inputs = tree_tensors((snapshot.arguments, snapshot.named)) if snapshot is not None else ()
        is_stage = any(tensor.requires_grad for tensor in inputs)  # its backward pass continues in another stage
        steps: list[int] = []
        entries: list[list[_WrittenShards]] = []
        with contextlib.suppress(RuntimeError):  # the process with the store has exited
            self._store.write(step, recorder.rank, (recorder.ranks, is_stage, capture_shards(recorder, step)))
            self._written.append(step)
            if len(self._written) > _MOST_KEPT:
                self._store.remove(self._written.pop(1), recorder.rank)
            steps = [self._written[0], self._written[-2]] if len(self._written) > 2 else []
            entries = self._store.read(steps, range(dist.get_world_size()))
        if entries and not any(stage for step_entries in entries for _, stage, _ in step_entries):
            groups = [group_by(step_entries, lambda entry: entry[0]) for step_entries in entries]
            states = [[[state for *_, state in mesh] for mesh in group.values()] for group in groups]
            self._report(judge_separate_meshes(list(groups[0]), dict(zip(steps, states, strict=True)), None))


def _is_partial_mesh(recorder: StepRecorder) -> bool:
    """Return True if the mesh of `fully_shard` has only some ranks, without tensor parallelism."""
    if not recorder.is_sharded or len(recorder.ranks) == dist.get_world_size():
        return False
    mesh = mesh_of(recorder.module)
    shards: Iterable[Any] = recorder.parameters.values()
    return all(shard.device_mesh.ndim == mesh.ndim for shard in shards)


_FEWEST_STEPS = 3  # min steps to judge
_WrittenPart = tuple[PartStep, Inputs | None]


class SplitModelComparison(StepListener, Recorder, subjects=("replicas",)):
    """Comparison of the ranks over which tensor parallelism splits one model.

    The n-th instance of a rank is compared with the n-th instances of other ranks. Each rank writes its state before
    optimizer steps, and judges all written steps except the newest step. Earlier steps have been written by all ranks,
    since the collectives of a forward pass have synchronized the ranks after these steps.
    """

    def __init__(
        self, recorder: Callable[[], StepRecorder], every: int, report: Callable[[Iterable[Finding]], object]
    ) -> None:
        """Initialize; `recorder()`: recorder of the model; `every`: optimizer steps between comparisons."""
        self._recorder = recorder
        self._report = report
        self._store = _StepStore("ddpcheck/parts")
        self._parts = PartRecorder(self._handle_entry, [self], every)
        self._inputs = InputRecorder(self._handle_entry, 0, tuple)
        self._inputs_of_forward: Inputs | None = None  # of the last forward pass
        self._split: ModelSplit | None = None
        self._paths: dict[int, str] | None = None  # module paths by id, set after a step
        self._written = 0
        self._entries: dict[int, list[list[_WrittenPart]]] = {}  # steps with the entries of all ranks, by optimizer

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        return self._recorder().parameters

    @property
    def is_sharded(self) -> bool:
        return self._recorder().is_sharded

    def path_of(self, module: nn.Module) -> str | None:
        return (self._paths or {}).get(id(module))

    def close(self) -> None:
        self._parts.close()

    def step_ended(self, step: int, unused: frozenset[str], awaited: frozenset[str], snapshot: Snapshot | None) -> None:
        """Record the inputs of the step's last forward pass; find the split modules once."""
        if self._paths is None:
            self._find_split_modules()
        if self._split is not None and snapshot is not None:
            self._inputs.trained(step, (snapshot.arguments, snapshot.named), None)

    def _find_split_modules(self) -> None:
        module = self._recorder().module
        self._paths = {id(part): path for path, part in module.named_modules()}
        split: dict[nn.Module, list[str]] = {}
        ranks: set[int] = set()
        for part, parts in dtensor_layouts_in_use(module).items():
            if ranks_by_param := split_over(module, parts):
                split[part] = list(ranks_by_param)
                ranks.update(*ranks_by_param.values())
        if ranks:
            self._parts.hook_split_inputs(module.modules())
            self._parts.split(tuple(sorted(ranks)), split, None)

    def _handle_entry(self, entry: ModelSplit | PartStep | Inputs | EvaluationInputs) -> None:
        if isinstance(entry, ModelSplit):
            self._split = entry
        elif isinstance(entry, Inputs):
            self._inputs_of_forward = entry
        elif isinstance(entry, PartStep) and not self.parameters.keys().isdisjoint(entry.norms):
            inputs, self._inputs_of_forward = self._inputs_of_forward, None
            with contextlib.suppress(RuntimeError):  # the process with the store has exited
                self._write_and_judge(entry, inputs)

    def _write_and_judge(self, step: PartStep, inputs: Inputs | None) -> None:
        if self._split is None:
            return
        rank, number = self._recorder().rank, self._written
        self._store.write(number, rank, (step, inputs))
        if number >= _MOST_KEPT:
            self._store.remove(number - _MOST_KEPT, rank)
        self._written += 1
        for entries in self._store.read([number - 1] if number else [], self._split.ranks):
            if len({(part_step.optimizer, part_step.count) for part_step, _ in entries}) == 1:
                steps = self._entries.setdefault(entries[0][0].optimizer, [])
                steps.append(entries)
                if len(steps) >= _FEWEST_STEPS:
                    self._report(_judge_parts(steps, self._split))


def _judge_parts(steps: list[list[_WrittenPart]], split: ModelSplit) -> list[Finding]:
    parts = [[step for step, _ in entries] for entries in steps]
    inputs = [[batch for _, batch in entries if batch is not None] for entries in zip(*steps, strict=True)]
    if any(step.splits_inputs for entries in parts for step in entries):
        inputs = []
    findings = judge_model_batches([[] for _ in split.ranks], inputs, split.ranks, split)
    return findings or judge_model_parts(parts, split.ranks, split, wrapped=True)
