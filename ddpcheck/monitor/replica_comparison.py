"""Comparison of the replicas: modules, parameters, buffers and gradients of all ranks, by fingerprints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from ddpcheck.findings.report import Finding
from ddpcheck.gather.state.module_description import digest_of, fingerprints
from ddpcheck.monitor.alarms import AlarmBoard
from ddpcheck.monitor.judging import WatchContext, judge_replica_states
from ddpcheck.monitor.step_probe import StepProbe, capture_replica_state, differences_from_average


class ReplicaComparison:
    """The comparisons of one watch."""

    def __init__(self, module: nn.Module, context: WatchContext, alarms: AlarmBoard, *, keeps_start: bool) -> None:
        """Begin where the wrapper has just been made.

        Args:
            module: That is wrapped.
            context: Of the watch.
            alarms: Of the ranks.
            keeps_start: Whether to keep fingerprints of the parameters as they are now.
        """
        self._module = module
        self._context = context
        self._alarms = alarms
        self._count = 0
        self._constructed = fingerprints(module.named_parameters()) if keeps_start else {}
        self._at_first_forward: dict[str, int] = {}

    @property
    def next_key(self) -> str:
        """Under which the ranks gather first in the next comparison."""
        return f"digest/{self._count}"

    def forward_begins(self) -> None:
        """Keep the fingerprints before the first forward pass, where those of the construction are kept."""
        if self._constructed and not self._at_first_forward:
            self._at_first_forward = fingerprints(self._module.named_parameters())

    def compare(
        self,
        step: int,
        *,
        after_backward: bool,
        probe: StepProbe | None = None,
        wrapper: nn.parallel.DistributedDataParallel | None = None,
        names: Sequence[str] = (),
    ) -> list[Finding]:
        """Compare the replicas, in full only where their digests differ; every rank of the group has to call this.

        Args:
            step: How many steps have ended.
            after_backward: Whether another one has just ended, and the optimizer has not stepped since.
            probe: Of that step, where there was one: the gradients that it has kept are compared with the average.
            wrapper: Whose reducer has averaged them.
            names: Of the parameters that it synchronises.
        """
        trained = {name: p for name, p in self._module.named_parameters() if p.requires_grad and after_backward}
        first = not self._count
        rank, has_run = self._alarms.rank, not first or after_backward or bool(step)
        state = capture_replica_state(self._module, rank, step, trained, has_run=has_run)
        if not step:
            state = replace(state, constructed=self._constructed, at_first_forward=self._at_first_forward)
        digest_key, key = self.next_key, self._count
        self._count += 1
        alike = len(set(self._alarms.gather(digest_key, digest_of(state)))) == 1
        if self._alarms.open and probe is not None and probe.keeps and wrapper is not None:  # every rank is here
            differences = differences_from_average(probe.local, wrapper, names)
            state = replace(state, values=replace(state.values, against_local=differences))
            alike &= not any(self._alarms.gather(f"parity/{key}", state.is_bad))
        if alike:
            return []
        states = self._alarms.gather(f"state/{key}", state)
        return judge_replica_states(states, self._context, step, after_backward=after_backward, first=first)
