"""Record states of replicas, to compare ranks, and changed buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import repeat
from operator import sub
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ddpcheck.findings.evidence.loop import GradientsHooked, ModuleChanged
from ddpcheck.findings.evidence.modules import ModuleDescription
from ddpcheck.findings.evidence.steps import DdpStepEvidence
from ddpcheck.findings.replace import replace
from ddpcheck.gather.ddp.ddp_wrapper import comm_hook_of, has_user_hook, hook_error
from ddpcheck.gather.ddp.sharding import mesh_of, mixed_precision, shard_number, varying_params, varying_shards
from ddpcheck.gather.patching import Recorder
from ddpcheck.gather.state.fingerprints import StackedTensors, fingerprints, is_dtensor, local_part, stack_small
from ddpcheck.gather.state.module_description import Parts
from ddpcheck.gather.steps.gradient_distance import KeptParts, eps_of, is_subnormal, short_sketches, sketches
from ddpcheck.record.loop.step_recorder import StepRecorder
from ddpcheck.record.parameters.parameter_history import StepProbe
from ddpcheck.record.source.source_scope import writing_line
from ddpcheck.stream.entries import BuffersKept, ReplicaCaptured, Sketch
from ddpcheck.stream.rank_log import RankLog
from ddpcheck.stream.rank_report import ReplicaState


class ReplicaRecorder(Recorder, subjects=("replicas", "reducer")):
    """Recorder of one wrapper's replica in steps that are compared across ranks."""

    changed = False  # True if parameters changed outside of optimizer steps since the first forward pass
    waits = False  # True if `write_buffers` may have something to write

    def __init__(self, recorder: StepRecorder, log: RankLog, number: int) -> None:
        self._recorder = recorder
        self._module = recorder.module
        self._log = log
        self._number, self._world_size = number, dist.get_world_size()
        self._mesh = mesh_of(self._module) if recorder.is_sharded else None
        self._captured_state: tuple[ReplicaCaptured, Mapping[str, nn.Parameter]] | None = None
        self.reduced: StackedTensors | None = (
            None  # gradients after the last reduction, until the backward pass has ended
        )
        parts = recorder.parts.now()
        self._buffers = self._own_buffers(fingerprints(parts.buffers.items()), parts)
        self._written_names: set[str] = set()  # names of buffers that have changed
        self._captured_step = -1  # captured step without a forward pass since then; -1 for none

    def write(self) -> None:
        """Write the captured state to the log, with the current parameters.

        Called at an optimizer step: some scripts perturb parameters temporarily between forward and backward.
        """
        pending, self._captured_state = self._captured_state, None
        if pending is not None:
            captured, parameters = pending
            values = replace(captured.state.values, parameters=self._recorder.replica.parameters(parameters))
            tensors, sharded = self._recorder.parameters, captured.shard >= 0
            in_parts = not sharded and not captured.step and len(self._recorder.ranks) < self._world_size
            parts = varying_shards(tensors, self._mesh) if sharded else varying_params(tensors) if in_parts else ()
            before = captured.state.at_first_forward
            self.changed |= any(values.parameters.get(name) != value for name, value in before.items())
            unsharded = self._recorder.parameters if self.changed and captured.shard < 0 else {}
            sketched = {name: Sketch("f", numbers) for name, numbers in sketches(unsharded).items()}
            state = replace(captured.state, values=values)
            self._log.add(replace(captured, state=state, parts=parts, values=sketched))

    def write_buffers(self) -> None:
        step, self._captured_step, self.waits = self._captured_step, -1, False
        parts = self._recorder.parts.now() if step >= 0 else None
        if parts is not None and (buffers := self._own_buffers(fingerprints(parts.buffers.items()), parts)):
            self._log.add(BuffersKept(self._number, step, buffers))

    def capture(self, step: int, probe: StepProbe | None, parts: Parts) -> None:
        """Capture the state after the backward pass of a step, for a later `write`."""
        tensors = self._recorder.parameters
        gradients = {name: p.grad for name, p in tensors.items() if p.grad is not None}
        self.reduced = rows = stack_small({n: local_part(g) if is_dtensor(g) else g for n, g in gradients.items()})
        state = self._recorder.replica.capture(step, after_backward=True, parts=parts, reduced=(tensors, rows))
        buffers = self._own_buffers(state.values.buffers, parts)
        changed = {name for name in buffers if self._buffers.get(name, buffers[name]) != buffers[name]}
        for name in sorted(changed - self._written_names):
            location = writing_line(self._module, name)
            self._log.add(ModuleChanged(self._number, "buffer", "", (name,), location, step=step))
        self._buffers, self._written_names = buffers, self._written_names | changed
        state = replace(state, values=replace(state.values, buffers=buffers))
        shards = self._recorder.parameters.values() if self._recorder.is_sharded else ()
        shard = next((shard_number(p, self._mesh) for p in shards), -1)
        captured = ReplicaCaptured(self._number, step, state, shard=shard)
        wrapper = self._recorder.wrapper
        if probe is not None and probe.keep is not None and wrapper is not None:
            lossy = hook_error(wrapper)
            coarsest = mixed_precision(self._module) if self._recorder.is_sharded else None
            lossy = max(lossy, eps_of(coarsest) if coarsest is not None else 0.0)
            eps = {name: max(eps_of(tensor.dtype), lossy) for name, tensor in tensors.items()}
            hook, own_hook = comm_hook_of(wrapper), has_user_hook(wrapper)
            excluded = {*probe.bypassing_shards, *(name for name, grad in gradients.items() if is_subnormal(grad))}
            local = {name: kept for name, kept in probe.local.items() if name not in excluded}
            own, averaged = (
                {name: Sketch("f", numbers) for name, numbers in vectors.items()}
                for vectors in (short_sketches(_by_shard(local)), _reduced_sketches(rows, probe.grads_before))
            )
            captured = replace(captured, own=own, averaged=averaged, eps=eps, hook=hook, own_hook=own_hook)
            if probe.hooked.changed or probe.hooked.factors:
                hooked = probe.hooked.location, probe.hooked.changed, probe.hooked.factors
                self._log.add(GradientsHooked(self._number, step, *hooked))
        self.write()
        self._captured_state, self._captured_step, self.waits = (captured, parts.parameters), step, True

    def write_statistics(self, step: int) -> None:
        """Write the running statistics of normalization layers at the end of training.

        `fully_shard` does not synchronize running statistics; a script may synchronize the statistics occasionally.
        """
        statistics = batch_statistics(dict(self._module.named_modules()))
        buffers = fingerprints((name, buffer) for name, buffer in self._module.named_buffers() if name in statistics)
        if buffers:
            values = DdpStepEvidence(self._recorder.rank, step, buffers=buffers)
            self._log.add(ReplicaCaptured(self._number, step, ReplicaState(ModuleDescription(), values)))

    def _own_buffers(self, values: Mapping[str, int], parts: Parts) -> dict[str, int]:
        statistics = batch_statistics(parts.modules) if values else set()
        return {name: value for name, value in values.items() if name not in statistics}


def _by_shard(local: Mapping[str, Any]) -> dict[str, Any]:
    """Return gradients by name, and parts of `fully_shard` gradients by "0/name", "1/name" ..."""
    by_shard: dict[str, Any] = {}
    for name, kept in local.items():
        is_split = isinstance(kept, KeptParts)
        by_shard |= {f"{number}/{name}": part for number, part in enumerate(kept.parts)} if is_split else {name: kept}
    return by_shard


def _reduced_sketches(grads: StackedTensors, grads_before: Mapping[str, torch.Tensor]) -> Mapping[str, Iterable[float]]:
    """Sketch what this reduction added to the gradients, without gradients accumulated before."""
    if not grads_before:
        return short_sketches(grads)
    before = sketches(grads_before)
    return {name: map(sub, numbers, before.get(name, repeat(0.0))) for name, numbers in sketches(grads).items()}


def batch_statistics(modules: Mapping[str, nn.Module]) -> set[str]:
    """Return names of normalization layers' buffers, which differ between ranks by design."""
    return {
        f"{path}.{name}".lstrip(".")
        for path, part in modules.items()
        if isinstance(part, _NormBase)
        for name, _ in part.named_buffers(recurse=False)
    }
