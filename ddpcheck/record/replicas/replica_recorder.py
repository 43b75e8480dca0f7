"""What a comparison of the replicas would compare, written down; and buffers that have changed."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ddpcheck.findings.evidence.changes import ModuleChanged
from ddpcheck.findings.replace import replace
from ddpcheck.gather.ddp.ddp_wrapper import comm_hook_of, has_own_hook, hook_loss
from ddpcheck.gather.state.fingerprints import fingerprints
from ddpcheck.gather.steps.gradient_distance import eps_of
from ddpcheck.gather.steps.gradient_sketch import sketches
from ddpcheck.record.loop.step_recorder import StepRecorder
from ddpcheck.record.parameters.step_probe import StepProbe
from ddpcheck.record.source.updating_line import writing_line
from ddpcheck.stream.entries import ReplicaCaptured, Sketch
from ddpcheck.stream.rank_log import RankLog


class ReplicaRecorder:
    """Writes down the replica of one wrapper, as it is in steps that are compared."""

    def __init__(self, recorder: StepRecorder, log: RankLog, number: int) -> None:
        """Of the `number`-th wrapper."""
        self._recorder = recorder
        self._module = recorder.module
        self._log = log
        self._number = number
        self._captured: ReplicaCaptured | None = None
        self._buffers = self._own_buffers(fingerprints(self._module.named_buffers()))
        self._written: set[str] = set()  # those of them that have changed

    def write(self) -> None:
        """Write what was captured, with the parameters of now.

        An optimizer is about to step: some have moved parameters between forward and backward, and put them back.
        """
        captured, self._captured = self._captured, None
        if captured is not None:
            values = replace(captured.state.values, parameters=self._recorder.replica.parameters())
            self._log.add(replace(captured, state=replace(captured.state, values=values)))

    def capture(self, step: int, probe: StepProbe | None) -> None:
        """Keep what there is after the backward pass of a step, until it is written."""
        state = self._recorder.replica.capture(step, after_backward=True)
        buffers = self._own_buffers(state.values.buffers)
        self._note_writes(buffers, step)
        state = replace(state, values=replace(state.values, buffers=buffers))
        captured = ReplicaCaptured(self._number, step, state)
        wrapper = self._recorder.wrapper
        if probe is not None and probe.keep is not None and wrapper is not None:
            lossy = hook_loss(wrapper)
            tensors = self._recorder.parameters
            left = {name: p.grad for name, p in tensors.items() if p.grad is not None}
            eps = {name: max(eps_of(tensor.dtype), lossy) for name, tensor in tensors.items()}
            hook, own_hook = comm_hook_of(wrapper), has_own_hook(wrapper)
            own, averaged = (
                {name: Sketch("f", numbers) for name, numbers in of_all.items()}
                for of_all in (sketches(probe.local), sketches(left))
            )
            captured = replace(captured, own=own, averaged=averaged, eps=eps, hook=hook, own_hook=own_hook)
        self.write()
        self._captured = captured

    def _own_buffers(self, values: Mapping[str, int]) -> dict[str, int]:
        theirs = batch_statistics(self._module)
        return {name: value for name, value in values.items() if name not in theirs}

    def _note_writes(self, buffers: dict[str, int], step: int) -> None:
        changed = {name for name in buffers if self._buffers.get(name, buffers[name]) != buffers[name]}
        for name in sorted(changed - self._written):
            where = writing_line(self._module, name)
            self._log.add(ModuleChanged(self._number, "buffer", "", (name,), where, step=step))
        self._buffers, self._written = buffers, self._written | changed


def batch_statistics(module: nn.Module) -> set[str]:
    """The buffers of normalisation layers: that each rank takes them from its own samples is DDP's plain way."""
    return {
        f"{path}.{name}".lstrip(".")
        for path, part in module.named_modules()
        if isinstance(part, _NormBase)
        for name, _ in part.named_buffers(recurse=False)
    }
