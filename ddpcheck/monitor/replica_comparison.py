"""Comparison of replicas: modules, parameters, buffers and gradients of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.evidence.modules import ModuleDescription
from ddpcheck.findings.evidence.steps import DdpStepEvidence
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding
from ddpcheck.gather.autograd.autograd_graph import named_parameters
from ddpcheck.gather.collectives.allreduce import average_over_ranks
from ddpcheck.gather.ddp.ddp_wrapper import comm_hook_of, group_of, hook_loss
from ddpcheck.gather.ddp.sharding import mesh_of, shard_number, uneven_parts
from ddpcheck.gather.state.fingerprints import digest_of, fingerprints
from ddpcheck.gather.steps.gradient_distance import against_average, dense, norm
from ddpcheck.monitor.alarms import AlarmBoard
from ddpcheck.record.loop.step_recorder import StepRecorder
from ddpcheck.record.parameters.parameter_history import StepProbe
from ddpcheck.rules.gradients.ddp521_shard_as_whole import judge_repeated
from ddpcheck.rules.replicas.watched_steps import judge_replica_states
from ddpcheck.stream.entries import ReplicaCaptured
from ddpcheck.stream.rank_report import ReplicaState
from ddpcheck.trace.captured import averages_elsewhere


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
        parameters = self._recorder.parameters
        mesh = mesh_of(self._recorder.module)
        number = next((shard_number(shard, mesh) for shard in parameters.values()), -1)
        values = fingerprints(parameters.items())
        pairs = self._alarms.gather(f"shards/{key}", (number, digest_of(values)))
        if len({digest for _, digest in pairs}) >= len({shard for shard, _ in pairs}):
            return []
        parts = uneven_parts(parameters, mesh)
        evidence = DdpStepEvidence(self._recorder.rank, step, parameters=values)
        state = ReplicaState(ModuleDescription(), evidence)
        return judge_repeated(
            self._alarms.gather(f"parts/{key}", ReplicaCaptured(0, step, state, shard=number, parts=parts))
        )

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
        sizes = torch.tensor([0.0 if grad is None else norm(grad) ** 2 for grad in grads], dtype=torch.float64)
        sizes = sizes.to(next(iter(parameters.values())).device)
        dist.all_reduce(sizes, group=group)
        world_size = dist.get_world_size(group)
        if not bool(sizes.isfinite().all()):
            return ()
        return tuple(
            against_average(
                name,
                None if parameter.grad is None else dense(parameter.grad),
                average,
                world_size=world_size,
                scale=scale,
                lossy=hook_loss(wrapper),
            )
            for (name, parameter), average, scale in zip(
                parameters.items(), averaged, (sizes / world_size).sqrt().tolist(), strict=True
            )
        )
