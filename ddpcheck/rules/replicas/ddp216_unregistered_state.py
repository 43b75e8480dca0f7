"""DDP216 unregistered-state: warning, takes_severity, stops_run

A tensor that is a plain attribute of a module, neither parameter nor buffer, differs between ranks.

Why: DDP synchronises only parameters and buffers. If each rank builds another tensor from its own random numbers or
    data, the values stay different. The tensor is also missing from the state dict.
Fix: Build it in __init__ from the same seed on every rank, or register it with register_buffer before wrapping. If it
    changes during training, make the same change on every rank: all_reduce the values that it is computed from.
Detected: Before the first step and after each step, the ranks compare the tensors that modules hold as plain
    attributes. A tensor is reported if it differs between ranks. A tensor that the first step makes is reported only if
    the gradients also differ from those of the global batch. If the gradients differ from those of the global batch,
    `ddpcheck report` also compares program variables that change in the steps.
Ignore: If the tensor is a cache of the rank's own samples, or differs on purpose.
Line: The line that creates the first tensor.
Checks: report consistency, reducer, parity; run replicas; repro attributes
Explains: DDP303 DDP304 DDP312; DDP516 if only the loss
Example:
    self.projection = torch.randn(8, 8)      # right: self.register_buffer("projection", torch.randn(8, 8))
"""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.wording import group_by_value, join_names, minority_of_any, new_finding, plural_verb
from ddpcheck.rules.replicas.comparisons import program_data_finding
from ddpcheck.trace.check_context import SingleProcessFacts
from ddpcheck.trace.replicas import ReplicaFacts, differing_names, differing_program_data, differing_values


def judge_plain_tensors(state: Sequence[tuple[tuple[str, tuple[int, ...], int], ...]]) -> list[Finding]:
    mismatches = differing_values([{name: (shape, value) for name, shape, value in tensors} for tensors in state])
    if not mismatches:
        return []
    names = list(mismatches)
    return new_finding(
        "DDP216",
        names,
        f"{join_names(names)}, which the model holds and has not registered, {plural_verb('differs', 'differ', names)} "
        "between ranks; DDP never synchronises unregistered tensors.",
        ranks=minority_of_any(mismatches.values()),
        evidence=[f"{name}: {_compare_shapes([v[0] for v in values])}" for name, values in mismatches.items()],
    )


def _compare_shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    difference = "other values" if len(set(shapes)) == 1 else f"other shapes: {'; '.join(group_by_value(shapes))}"
    return f"shape {shapes[0]}, {difference}"


def judge_new_state(facts: ReplicaFacts) -> list[Finding]:
    """DDP216: unregistered tensors that forward keeps from the first step, different on each rank.

    Judged only if gradients differ from the global batch: a cache of a rank's own samples is harmless.
    """
    first, *later = facts.by_step.values()
    names = [
        name
        for name in differing_names([item.new_state for item in first])
        if later
        and all(
            item.new_state.get(name) == first_item.new_state[name]
            for items in later
            for item, first_item in zip(items, first, strict=True)
        )
    ]
    if not names:
        return []
    return new_finding(
        "DDP216",
        names,
        f"{join_names(names)} is made in the forward pass, with different values on each rank, and kept without "
        "being registered; DDP never synchronises it.",
        evidence=["it stays the same from step to step, and the gradients are not those of the global batch"],
        severity=Severity.ERROR,
    )


def judge_unregistered_state(facts: ReplicaFacts) -> list[Finding]:
    """DDP216: unregistered tensors that exist before the first step and diverge between ranks."""
    names = list(facts.first_steps(lambda item: item.state))
    if not names:
        return []
    return new_finding(
        "DDP216",
        names,
        f"{join_names(names)} is held by the model without being registered and diverges between ranks; DDP never "
        "synchronises it.",
        location=facts.known.names.location(names),
    )


def judge_changing_data(facts: SingleProcessFacts) -> list[Finding]:
    """DDP216: program variables that change in the steps, differently on each rank."""
    data, changed = differing_program_data(facts.known.program_data), facts.known.changed_data
    values = {name: by_rank for name, by_rank in data.items() if name in changed}
    if not values:
        return []
    change, them = plural_verb("changes", "change", [*values]), plural_verb("it", "them", [*values])
    difference = f"{change} in the steps, differently on each rank, and nothing synchronises {them}:"
    return program_data_finding("DDP216", facts, values, difference)
