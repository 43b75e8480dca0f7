"""Comparison of replicas: modules, parameters, buffers and gradients of all ranks, also over several meshes."""

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
from ddpcheck.findings.evidence.steps import DdpStepEvidence
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import group_by
from ddpcheck.gather.autograd.autograd_graph import named_parameters
from ddpcheck.gather.collectives.allreduce import average_over_ranks, rms_over_ranks
from ddpcheck.gather.collectives.store_exchange import default_store
from ddpcheck.gather.ddp.ddp_wrapper import comm_hook_of, group_of, hook_loss
from ddpcheck.gather.ddp.sharding import mesh_of, shard_number, uneven_parts
from ddpcheck.gather.patching import Recorder
from ddpcheck.gather.state.fingerprints import digest_of, fingerprints
from ddpcheck.gather.steps.gradient_distance import against_average, dense, norm
from ddpcheck.monitor.alarms import AlarmBoard
from ddpcheck.recipe.pytree import tree_tensors
from ddpcheck.record.loop.loop_record import Snapshot, StepListener
from ddpcheck.record.loop.step_recorder import StepRecorder
from ddpcheck.record.parameters.parameter_history import StepProbe
from ddpcheck.rules.gradients.ddp301_not_synchronised import judge_separate_meshes
from ddpcheck.rules.gradients.ddp521_shard_as_whole import judge_repeated
from ddpcheck.rules.replicas.steps import judge_replica_states
from ddpcheck.stream.entries import ReplicaCaptured
from ddpcheck.stream.rank_report import ReplicaState
from ddpcheck.trace.captured import averages_elsewhere
from ddpcheck.worlds.wire import get_value, put_value, remove_value


def captured_shards(recorder: StepRecorder, step: int) -> ReplicaCaptured:
    """Capture the shards of this rank, with their number in the mesh."""
    mesh = mesh_of(recorder.module)
    number = next((shard_number(shard, mesh) for shard in recorder.parameters.values()), -1)
    values = DdpStepEvidence(recorder.rank, step, parameters=fingerprints(recorder.parameters.items()))
    return ReplicaCaptured(0, step, ReplicaState(ModuleDescription(), values), shard=number)


@dataclass
class ReplicaComparison:
    """Replica comparisons of a watch."""

    _recorder: StepRecorder
    _alarms: AlarmBoard
    again: int = -1  # step after which the ranks are compared regardless of the options; the same on all ranks

    @property
    def next_key(self) -> str:
        """Return the key of the first gather in the next comparison."""
        return f"digest/{self._recorder.replica.count}"

    def compare(self, step: int, *, after_backward: bool, probe: StepProbe | None = None) -> list[Finding]:
        """Compare the replicas, in full if digests differ; collective on the group.

        `step` is the number of ended steps; with `after_backward`, another step has just been reduced, before the
        optimizer step, and the gradients kept by its `probe` are compared with the average.
        """
        digest_key, key = self.next_key, self._recorder.replica.count
        state = self._recorder.replica.capture(step, after_backward=after_backward)
        alike = len(set(self._alarms.gather(digest_key, digest_of(state)))) == 1
        wrapper = self._recorder.wrapper
        keeps = probe is not None and probe.keep is not None
        if self._alarms.open and probe is not None and keeps and wrapper is not None:  # on all ranks
            differences = self._differences_from_average(probe.local, wrapper)
            state = replace(state, values=replace(state.values, against_local=differences))
            alike &= not any(self._alarms.gather(f"parity/{key}", any(difference.bad for difference in differences)))
        repeated = self._compare_shards(step, key) if self._recorder.is_sharded else []
        if alike:
            return repeated
        states = self._alarms.gather(f"state/{key}", state)
        context = self._recorder.context
        if wrapper is not None:  # hooks may be registered after construction
            context = replace(context, wrapper=replace(context.wrapper, comm_hook=comm_hook_of(wrapper)))
        if not step and after_backward and averages_elsewhere([replica.values for replica in states], context, step):
            self.again = 1  # check that parameters stay equal
        findings = judge_replica_states(states, context, step, after_backward=after_backward, first=not key)
        return repeated + findings

    def _compare_shards(self, step: int, key: int) -> list[Finding]:
        """Find ranks with equal values in shards of different numbers."""
        captured = captured_shards(self._recorder, step)
        digest = digest_of(captured.state.values.parameters)
        pairs = self._alarms.gather(f"shards/{key}", (captured.shard, digest))
        if len({digest for _, digest in pairs}) >= len({shard for shard, _ in pairs}):
            return []
        parts = uneven_parts(self._recorder.parameters, mesh_of(self._recorder.module))
        return judge_repeated(self._alarms.gather(f"parts/{key}", replace(captured, parts=parts)))

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
                lossy=hook_loss(wrapper),
            )
            for (name, parameter), average, scale in zip(parameters.items(), averaged, scales, strict=True)
        )


# Several meshes

_MOST_KEPT = 8  # max steps in the store; a mesh further behind is not compared
_Written = tuple[tuple[int, ...], bool, ReplicaCaptured]
"""(ranks of a mesh, True for a pipeline stage, state of one of the ranks)"""


class OtherMeshes(StepListener, Recorder, subjects=("replicas",)):
    """Comparison of ranks that shard the same model over different meshes, n-th watch by n-th watch.

    Each rank writes its state at the steps that its own mesh compares, and reads the earlier states of other meshes. If
    any rank has no watch, or has a pipeline stage, nothing is compared.
    """

    def __init__(
        self,
        recorder: Callable[[], StepRecorder],
        is_due: Callable[[int], bool],
        report: Callable[[Iterable[Finding]], object],
    ) -> None:
        """Initialize; `recorder` returns the watch's recorder, `is_due` selects the steps."""
        self._recorder = recorder
        self._is_due = is_due
        self._report = report
        self._number = 0
        self._looks: list[int] = []  # steps written by this rank

    def step_ended(self, step: int, unused: frozenset[str], awaited: frozenset[str], snapshot: Snapshot | None) -> None:
        """Write this rank's state; compare the first and second-last written steps."""
        recorder = self._recorder()
        if not self._is_due(step) or not _misses_ranks(recorder):
            return
        inputs = tree_tensors((snapshot.arguments, snapshot.named)) if snapshot is not None else ()
        is_stage = any(tensor.requires_grad for tensor in inputs)  # its backward pass continues in another stage
        by_step: dict[int, list[_Written]] = {}
        with contextlib.suppress(RuntimeError):  # the process with the store has exited
            self._put(step, recorder, pickle.dumps((recorder.ranks, is_stage, captured_shards(recorder, step))))
            by_step = self._all_of([self._looks[0], self._looks[-2]] if len(self._looks) > 2 else [])
        if by_step and not any(stage for entries in by_step.values() for _, stage, _ in entries):
            groups = {key: group_by(entries, lambda entry: entry[0]) for key, entries in by_step.items()}
            states = {key: [[item for *_, item in mesh] for mesh in group.values()] for key, group in groups.items()}
            self._report(judge_separate_meshes(list(groups[self._looks[0]]), states, None))

    def _put(self, step: int, recorder: StepRecorder, data: bytes) -> None:
        store = default_store()
        self._number = self._number or store.add(f"ddpcheck/meshes/calls/{recorder.rank}", 1)
        put_value(store.set, self._key(step, recorder.rank), data)
        self._looks.append(step)
        if len(self._looks) > _MOST_KEPT:
            remove_value(store.delete_key, self._key(self._looks.pop(1), recorder.rank))

    def _all_of(self, steps: Sequence[int]) -> dict[int, list[_Written]]:
        """Return all ranks' states at the given steps; empty if any is missing."""
        store, ranks = default_store(), range(dist.get_world_size())
        if not steps or not store.check([self._key(step, rank) for step in steps for rank in ranks]):
            return {}
        return {step: [pickle.loads(get_value(store.get, self._key(step, rank))) for rank in ranks] for step in steps}

    def _key(self, step: int, rank: int) -> str:
        return f"ddpcheck/meshes/{self._number}/{step}/{rank}"


def _misses_ranks(recorder: StepRecorder) -> bool:
    """Return True if the mesh omits ranks, other than for tensor parallelism."""
    if not recorder.is_sharded or len(recorder.ranks) == dist.get_world_size():
        return False
    mesh = mesh_of(recorder.module)
    shards: Iterable[Any] = recorder.parameters.values()
    return all(shard.device_mesh.ndim == mesh.ndim for shard in shards)
