"""Copies of models, and other modules outside of the wrappers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from ddpcheck.findings.evidence.loop import OF_A_COPY, ModuleChanged
from ddpcheck.findings.evidence.replicas import StateUsed
from ddpcheck.findings.evidence.script import StateHeld
from ddpcheck.trace.captured import without_rounding
from ddpcheck.trace.replicas import Changes
from ddpcheck.trace.script_facts import ScriptFacts, WatchedWrapper
from ddpcheck.trace.unwrapped_params import all_gradients_agree
from ddpcheck.trace.view import NotRecorded, View


@dataclass(frozen=True, slots=True)
class Copies(View):
    """States of modules outside of the wrappers; sequences are by rank."""

    checks: ClassVar[tuple[str, ...]] = ("replicas",)
    states: Sequence[Sequence[StateHeld]]  # before optimizer steps
    uses: Sequence[Sequence[StateUsed]]  # in evaluations; [] if the ranks train different parameters
    changes: Changes = ()
    wrappers: Sequence[WatchedWrapper] = ()

    @classmethod
    def of(cls, facts: ScriptFacts) -> Self:
        states = facts.of(StateHeld)
        are_whole = all(len(wrapper.made.ranks) == len(facts.ranks) for wrapper in facts.wrappers)
        if not are_whole or facts.model_groups:
            states = [[state for state in rank_states if not state.other] for rank_states in states]
        steps = [rank_steps for opt in facts.optimizers for rank_steps in opt.steps if rank_steps[0].held]
        uses = facts.of(StateUsed) if are_whole and all(map(all_gradients_agree, steps)) else []
        changes = [[change for change in log if change.wrapper == OF_A_COPY] for log in facts.of(ModuleChanged)]
        return cls(states, uses, changes, facts.wrappers)

    def require_exact_parameters(self) -> None:
        """Raise `NotRecorded` if parameters of wrappers, and so their copies, differ between ranks by rounding."""
        steps = (replicas for wrapper in self.wrappers for replicas in wrapper.compared.values())
        if any(without_rounding(replicas) != replicas for replicas in steps):
            raise NotRecorded("copies not compared: the parameters that are copied differ between ranks by rounding")
