"""Descriptions, values and wrappers of replicas, compared between ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ddpcheck.findings.evidence.loop import ModuleChanged
from ddpcheck.findings.evidence.steps import DdpStepEvidence
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.findings.wording import format_ranks, minority_ranks, ranks_or_all
from ddpcheck.trace.check_context import JudgeContext

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
RUNNING_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # of torch's normalisation layers
VALUE_CHANGES = ("values", "written")  # `ModuleChanged.what` of changes of parameter values
Changes = Sequence[Sequence[ModuleChanged]]  # changes of one wrapper, or of copies, by rank
WriteFacts = tuple[Location | None, list[str], tuple[int, ...]]  # line of a write, evidence, ranks (() for all)


def common_values(by_rank: Sequence[Mapping[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """Map each key that all ranks have to its values by rank."""
    common = [key for key in by_rank[0] if all(key in values for values in by_rank)] if by_rank else []
    return {key: [values[key] for values in by_rank] for key in common}


def aligned(by_rank: Sequence[Mapping[Any, _Value]]) -> list[list[_Value]]:
    """Return values by rank for each key that all ranks have, sorted by key."""
    return [values for _, values in sorted(common_values(by_rank).items())]


def differing_values(by_rank: Sequence[Mapping[_Key, Any]]) -> dict[_Key, list[Any]]:
    """Map each key whose values differ between ranks to its values by rank."""
    return {name: values for name, values in common_values(by_rank).items() if len(set(values)) > 1}


def differing_names(values: Sequence[Mapping[str, Hashable]]) -> dict[str, tuple[int, ...]]:
    """Map names whose values differ between ranks to the ranks in the minority."""
    return {name: minority_ranks(per_rank) for name, per_rank in differing_values(values).items()}


def values_differ(values: Sequence[Mapping[str, int]]) -> bool:
    """Return True if ranks have the same tensor names, but different values."""
    return all(state.keys() == values[0].keys() for state in values) and any(state != values[0] for state in values)


def changes_of_kind(changes: Changes, *kinds: str) -> list[ModuleChanged]:
    """Return the changes of some kinds (`ModuleChanged.what`), rank after rank."""
    return [change for rank_changes in changes for change in rank_changes if change.what in kinds]


def ranks_by_call(
    changes: Changes, matches: Callable[[ModuleChanged], bool]
) -> dict[tuple[str, Location | None], list[int]]:
    """Map (call, line) of each matching change to the ranks that made the change."""
    ranks: dict[tuple[str, Location | None], list[int]] = {}
    for rank, rank_changes in enumerate(changes):
        for change in filter(matches, rank_changes):
            ranks.setdefault((change.how, change.location), []).append(rank)
    return ranks


def copy_writes(changes: Changes, copy: str) -> WriteFacts:
    """Return line, evidence and ranks of the writes to a module copy named `copy`.

    Calls that only some ranks make are preferred. If the calls are not all at one line, return (None, [], ()).
    """
    ranks = ranks_by_call(changes, lambda change: copy in change.names)
    writers_by_call = {call: writers for call, writers in ranks.items() if len(writers) < len(changes)} or ranks
    if len({line for _, line in writers_by_call}) != 1:
        return None, [], ()
    (how, location), writers = next(iter(writers_by_call.items()))
    if len(writers) == len(changes):
        return location, [f"it is written there ({how}), on every rank"], ()
    return location, [f"it is written there ({how}), on {format_ranks(writers)}"], tuple(writers)


def buffer_writes(changes: Changes, name: str) -> dict[int, ModuleChanged]:
    """Return by rank the last change of the buffer `name`."""
    return {
        rank: change
        for rank, rank_changes in enumerate(changes)
        for change in rank_changes
        if change.what == "buffer" and name in change.names
    }


@dataclass(frozen=True, slots=True)
class Divergence:
    """First step after which parameters or optimizer state differ between ranks."""

    step: int
    names: list[str]  # parameters, else optimizer state, that differ after this step or a later one
    optimizer: list[str]  # optimizer state that differs
    before_optimizer: bool = False  # if parameters, equal before the step, differ before the optimizer's step
    changed_ranks: tuple[int, ...] = ()  # the only ranks on which parameters changed before the optimizer's step
    skipped_ranks: tuple[int, ...] = ()  # the only ranks on which the optimizer's step changed no parameter


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """State of the ranks after each step."""

    by_step: Mapping[int, Sequence[DdpStepEvidence]]  # evidence of all ranks by step, in order
    start: Sequence[Mapping[str, int]]  # parameter fingerprints before the first step, by rank
    known: JudgeContext  # other facts of the check

    def first_steps(self, pick: Callable[[DdpStepEvidence], Mapping[str, int]]) -> dict[str, int]:
        """Map names whose fingerprints differ between ranks to the first step with a difference."""
        steps: dict[str, int] = {}
        for step, items in self.by_step.items():
            if items[0].is_local_sgd:
                continue
            for name in differing_names([pick(item) for item in items]):
                steps.setdefault(name, step)
        return steps

    def first_divergence(self) -> Divergence | None:
        parameters = self.first_steps(lambda item: item.parameters)
        optimizer = self.first_steps(lambda item: item.optimizer)
        diverged = parameters or optimizer
        if not diverged:
            return None
        step = min([*parameters.values(), *optimizer.values()])
        divergence = Divergence(step, list(diverged), list(optimizer))
        items = self.by_step[step]
        previous = {c.rank: c.parameters for c in self.by_step.get(step - 1, ())} or dict(enumerate(self.start))
        after = {item.rank: item.parameters_after_backward for item in items}
        names = [n for n, first in diverged.items() if first == step and all(n in values for values in after.values())]
        if not names or any(len({values.get(name) for values in previous.values()}) > 1 for name in names):
            return divergence  # different before the step
        if any(len({values[name] for values in after.values()}) > 1 for name in names):
            before = {rank: {**values, **previous.get(rank, {})} for rank, values in after.items()}
            changed = [rank for rank, values in after.items() if any(values[n] != before[rank][n] for n in names)]
            return replace(divergence, before_optimizer=True, changed_ranks=ranks_or_all(changed, len(items)))
        skipped = [item.rank for item in items if all(after[item.rank][n] == item.parameters.get(n) for n in names)]
        return replace(divergence, skipped_ranks=ranks_or_all(skipped, len(items)))


def steps_with_equal_end(by_step: Mapping[int, Sequence[DdpStepEvidence]]) -> list[int]:
    """Return steps after which ranks have equal parameters, before the next update at latest."""
    after = {step for step, items in by_step.items() if not differing_names([item.parameters for item in items])}
    before = {
        step - 1
        for step, items in by_step.items()
        if not differing_names([item.parameters_before_optimizer for item in items])
    }
    return sorted(after | (before & by_step.keys()))


def differing_program_data(data: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Return variables whose text differs between ranks by more than the rank number."""
    values = differing_values(data) if data else {}
    return {name: by_rank for name, by_rank in values.items() if not _differ_by_rank_number(by_rank)}


def _differ_by_rank_number(values: Sequence[str]) -> bool:
    """Return True if values differ only by the rank number that they contain ("cuda:1")."""
    spelled_out = {re.sub(rf"(?<!\d){rank}(?!\d)", "#", value) for rank, value in enumerate(values)}
    return len(spelled_out) == 1 and all(re.fullmatch(r"\d+|'.*'", value) for value in values)
