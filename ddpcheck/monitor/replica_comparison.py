"""Comparison of the replicas: modules, parameters, buffers and gradients of all ranks, by fingerprints."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.evidence.steps import DdpStepEvidence
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding
from ddpcheck.gather.autograd.autograd_graph import named_parameters
from ddpcheck.gather.collectives.allreduce import average_over_ranks
from ddpcheck.gather.ddp.ddp_wrapper import hook_loss
from ddpcheck.gather.state.fingerprints import digest_of, fingerprints
from ddpcheck.gather.state.module_description import describe
from ddpcheck.gather.steps.gradient_distance import against_average, dense, norm
from ddpcheck.monitor.alarms import AlarmBoard
from ddpcheck.monitor.judging import judge_replica_states
from ddpcheck.monitor.step_probe import StepProbe
from ddpcheck.monitor.synced_parameters import SyncedParameters
from ddpcheck.stream.rank_report import ReplicaState, WatchContext


class ReplicaComparison:
    """The comparisons of one watch."""

    def __init__(
        self,
        module: nn.Module,
        synced: SyncedParameters,
        context: WatchContext,
        alarms: AlarmBoard,
        *,
        keeps_start: bool,
    ) -> None:
        """Begin where the wrapper has just been made; `keeps_start` keeps the fingerprints that it has."""
        self._module = module
        self._synced = synced
        self._context = context
        self._alarms = alarms
        self._count = 0
        self._constructed = fingerprints(module.named_parameters()) if keeps_start else {}
        self._at_first_forward: dict[str, int] = {}
        self._in_step: dict[str, int] = {}

    @property
    def next_key(self) -> str:
        """Under which the ranks gather first in the next comparison."""
        return f"digest/{self._count}"

    def forward_begins(self) -> None:
        """Keep the fingerprints before the first forward pass, where those of the construction are kept."""
        if self._constructed and not self._at_first_forward:
            self._at_first_forward = fingerprints(self._module.named_parameters())

    def forward_returned(self) -> None:
        """Keep those after the first pass of a step that is compared: some move parameters in it, and put them back."""
        if not self._in_step:
            self._in_step = self._parameters()

    def compare(self, step: int, *, after_backward: bool, probe: StepProbe | None = None) -> list[Finding]:
        """Compare the replicas, in full only where their digests differ; every rank of the group has to call this.

        So many steps have ended, and `after_backward` another one just now, before the optimizer's step; the gradients
        that its `probe` has kept are compared with the average.
        """
        digest_key, key = self.next_key, self._count
        state = self.capture(step, after_backward=after_backward)
        alike = len(set(self._alarms.gather(digest_key, digest_of(state)))) == 1
        wrapper = self._synced.wrapper
        keeps = probe is not None and probe.keep is not None
        if self._alarms.open and probe is not None and keeps and wrapper is not None:  # every rank is here
            differences = self._differences_from_average(probe.local, wrapper)
            state = replace(state, values=replace(state.values, against_local=differences))
            alike &= not any(self._alarms.gather(f"parity/{key}", any(difference.bad for difference in differences)))
        if alike:
            return []
        states = self._alarms.gather(f"state/{key}", state)
        return judge_replica_states(states, self._context, step, after_backward=after_backward, first=not key)

    def capture(self, step: int, *, after_backward: bool) -> ReplicaState:
        """The replica on this rank: a description of the module, and fingerprints of its tensors."""
        in_step, self._in_step = self._in_step, {}
        trained = {name: p for name, p in self._module.named_parameters() if p.requires_grad and after_backward}
        values = DdpStepEvidence(
            rank=self._alarms.rank,
            step=step,
            gradients=_gradients(trained),
            parameters=(after_backward and in_step) or self._parameters(),
            buffers=fingerprints(self._module.named_buffers()),
        )
        description, first = describe(self._module), not self._count
        self._count += 1
        if step or after_backward or not first:  # once it has run, tensors that are not registered (metrics, its
            description = replace(description, state=())  # last outputs) may differ by right
        if step:
            return ReplicaState(description, values)
        return ReplicaState(description, values, self._constructed, self._at_first_forward)

    def _parameters(self) -> dict[str, int]:
        return fingerprints(self._module.named_parameters())

    def _differences_from_average(
        self, local: Mapping[str, torch.Tensor], wrapper: nn.parallel.DistributedDataParallel
    ) -> tuple[Difference, ...]:
        """Differences of `.grad` from the average of the ranks' own gradients, made by an all-reduce of ddpcheck's.

        Every rank of the wrapper's group has to call this. Nothing is compared where a gradient is not finite.
        """
        known = set(self._synced.names)
        parameters = {name: p for name, p in named_parameters(wrapper.module).items() if name in known}
        mine = [local.get(name) for name in parameters]
        group = wrapper.process_group
        averaged = average_over_ranks(mine, list(parameters.values()), group=group)
        sizes = torch.tensor([0.0 if g is None else norm(g) ** 2 for g in mine], dtype=torch.float64)
        sizes = sizes.to(next(iter(parameters.values())).device)
        dist.all_reduce(sizes, group=group)
        world_size = dist.get_world_size(group)
        if not bool(sizes.isfinite().all()):
            return ()
        return tuple(
            against_average(
                name,
                None if parameter.grad is None else dense(parameter.grad),
                want,
                world_size=world_size,
                scale=scale,
                lossy=hook_loss(wrapper),
            )
            for (name, parameter), want, scale in zip(
                parameters.items(), averaged, (sizes / world_size).sqrt().tolist(), strict=True
            )
        )


def _gradients(trained: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The fingerprints of their gradients; 0 for one that has none."""
    known = fingerprints((name, dense(p.grad)) for name, p in trained.items() if p.grad is not None)
    return {name: known.get(name, 0) for name in trained}
