"""Wrappers of a script, the copies of their modules, and comparisons by check line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

from ddpcheck.findings.evidence.loop import OF_A_COPY, ModuleChanged
from ddpcheck.findings.evidence.replicas import EvalCall
from ddpcheck.findings.evidence.script import LocalModel
from ddpcheck.findings.report import Finding
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.wording import format_ranks, plural
from ddpcheck.stream.entries import NotCompared, ReplicaCaptured, StepsReported
from ddpcheck.trace.captured import without_rounding
from ddpcheck.trace.gradients import UNEQUAL
from ddpcheck.trace.losses import scales_loss_for_sums
from ddpcheck.trace.replicas import Changes
from ddpcheck.trace.script_facts import ScriptFacts, WrapperTrace
from ddpcheck.trace.unwrapped_params import all_gradients_agree
from ddpcheck.trace.view import NotRecorded, ScriptView, View

LOSSY_HOOK = 0.1
"""Relative error of a communication hook, from which on gradients are not compared with the average."""

NOT_REDUCED = (
    "not compared with the average: gradients that are split among more than 8 ranks or along several dimensions, and "
    "those of shards that the program also uses directly"
)


@dataclass(frozen=True, slots=True)
class Constructions(ScriptView):
    """Wrappers that the ranks construct, including unfinished ones."""

    checks = ("collectives", "replicas")


@dataclass(frozen=True, slots=True)
class Wrappers(ScriptView):
    """Steps, replicas and gradients of wrappers."""

    checks = ("parameters", "replicas", "reducer", "loop")
    needs_all_ranks = False

    def compared(self, check: str, findings: Sequence[Finding]) -> Iterator[str]:
        facts = self.facts
        if not facts.steps:
            return
        if missing := sorted({rank for wrapper in facts.wrappers for rank in wrapper.missing}):
            raise NotRecorded(describe_missing_ranks(missing))
        steps = plural(facts.steps, "step")
        if check == "parameters":
            reports = [entry.report for wrapper in facts.wrappers for entry in chain(*wrapper.events(StepsReported))]
            may_miss = any(report.missing or report.sometimes_missing or report.never_used for report in reports)
            unused = ", except those that may be unused" if may_miss else ""
            yield f"every trainable parameter contributed to the loss in {steps}{unused}"
        elif check == "replicas":
            yield from self._compare_replicas([finding for finding in findings if self.check_of(finding) == check])
        elif check == "reducer":
            yield from self._compare_gradients(findings)
        else:
            switch = "reduction switches" if self._are_sharded else "no_sync"
            yield f"forward, backward, {switch} and optimizer steps had a valid order in {steps}"

    @property
    def _are_sharded(self) -> bool:
        return all(wrapper.made.context.sharded for wrapper in self.facts.wrappers)

    def _compare_replicas(self, findings: Sequence[Finding]) -> Iterator[str]:
        facts = self.facts
        count = max(sum(map(len, w.events(ReplicaCaptured))) // len(w.ranks) for w in facts.wrappers)
        if count and all(RULES[finding.code].buffers_only for finding in findings):
            subjects = "modules, parameters, buffers and gradients"
            if self._are_sharded:
                built = [(context.values_built, wrapper) for wrapper in facts.wrappers for context in wrapper.sharded]
                is_known = all(values.keys() >= {*wrapper.made.context.trainable} for values, wrapper in built)
                subjects = f"modules and buffers{', and values before fully_shard,' if is_known else ''}"
            elif any(facts.non_averaging_hook(wrapper.number) for wrapper in facts.wrappers):
                subjects = "modules and buffers"
            yield f"{subjects} match between ranks, compared {plural(count, 'time')}"
        self._require_all_steps(count)

    def _compare_gradients(self, findings: Sequence[Finding]) -> Iterator[str]:
        facts = self.facts
        captured = [replicas for wrapper in facts.wrappers for replicas in wrapper.events(ReplicaCaptured)]
        lossy = [[r.hook for r in replicas if max(r.eps.values(), default=0.0) >= LOSSY_HOOK] for replicas in captured]
        reasons = [f"gradients that {hook} compresses are not compared" for hook in dict.fromkeys(chain(*lossy))]
        count = max(len(replicas) - len(rank_lossy) for replicas, rank_lossy in zip(captured, lossy, strict=True))
        by_hand = (facts.non_averaging_hook(w.number) for w in facts.wrappers if facts.averages_by_hand(w.number))
        if hook := next(filter(None, by_hand), ""):
            reasons, count = [f"{hook} leaves each rank its own gradients, and the script averages them"], 0
        elif any(UNEQUAL in finding.tags for finding in findings):
            reasons, count = ["the gradients differ between ranks"], 0
        has_own = [all(any(r.own for r in replicas) for replicas in w.events(ReplicaCaptured)) for w in facts.wrappers]
        is_partial = any(wrapper.made.context.sharded for wrapper in facts.wrappers) and not all(has_own)
        if count and (any(has_own) or not is_partial):
            average = "average or sum" if any(map(scales_loss_for_sums, facts.wrappers)) else "average"
            is_wrong = any(self.check_of(finding) == "reducer" for finding in findings)
            result = "and the average" if is_wrong else f"equal the {average}"
            yield f"gradients {result} of the ranks' own, compared {plural(count, 'time')}"
        self._require_all_steps(count, reasons)
        if is_partial:
            raise NotRecorded(NOT_REDUCED)

    def _require_all_steps(self, count: int, reasons: Sequence[str] = ()) -> None:
        """Raise `NotRecorded` unless all steps were compared; `count`: number of compared steps."""
        entries = (entry for wrapper in self.facts.wrappers for entry in chain(*wrapper.events(NotCompared)))
        parts = "; ".join((*sorted({entry.why for entry in entries}), *reasons))
        if parts or not count:
            raise NotRecorded(": ".join(filter(None, ("" if count else "no step was compared", parts))))


def describe_missing_ranks(missing: Sequence[int]) -> str:
    """Explain why some ranks were not compared, or return ''."""
    return f"not compared with {format_ranks(missing)}, which left no log here" if missing else ""


@dataclass(frozen=True, slots=True)
class Copies(View):
    """States of modules outside of wrappers, such as copies; sequences are by rank."""

    checks = ("replicas",)
    states: Sequence[Sequence[LocalModel]]  # before optimizer steps
    uses: Sequence[Sequence[EvalCall]]  # in evaluations; [] if the ranks train different parameters
    changes: Changes = ()
    wrappers: Sequence[WrapperTrace] = ()

    @classmethod
    def from_facts(cls, facts: ScriptFacts) -> Self:
        states = facts.events(LocalModel)
        are_whole = all(len(wrapper.made.ranks) == len(facts.ranks) for wrapper in facts.wrappers)
        if not are_whole or facts.model_groups:
            states = [[state for state in rank_states if not state.is_independent] for rank_states in states]
        steps = [rank_steps for opt in facts.optimizers for rank_steps in opt.steps if rank_steps[0].ddp_params]
        uses = facts.events(EvalCall) if are_whole and all(map(all_gradients_agree, steps)) else []
        changes = [[change for change in log if change.wrapper == OF_A_COPY] for log in facts.events(ModuleChanged)]
        return cls(states, uses, changes, facts.wrappers)

    def require_exact_parameters(self) -> None:
        """Raise `NotRecorded` if wrappers' parameters, and so their copies, differ between ranks by rounding."""
        steps = (replicas for wrapper in self.wrappers for replicas in wrapper.compared.values())
        if any(without_rounding(replicas) != replicas for replicas in steps):
            raise NotRecorded("copies not compared: the parameters that are copied differ between ranks by rounding")
