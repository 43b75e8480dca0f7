"""Lines that change a module after wrapping, to which rules relocate their findings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from ddpcheck.findings.evidence.loop import ModuleChanged
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import format_ranks
from ddpcheck.trace.replicas import VALUE_CHANGES, Changes, changes_of_kind, ranks_by_call

_CALLS = ("load_state_dict", "apply")  # load_state_dict sets values, apply may; in-place writes come last


def locate_reduction(
    kinds: Sequence[str], finding: Finding, changes: Changes, _wrapped_at: Location | None = None
) -> Finding:
    """Relocate a finding to the last call that changed how gradients are reduced.

    `kinds`: values of `ModuleChanged.what` to consider, "hook" for a communication hook or "scale" for a divisor.
    """
    calls = changes_of_kind(changes, *kinds)
    calls = [call for call in calls if call.what != "scale" or not set(call.names).isdisjoint(finding.subjects)]
    if not calls:
        return finding
    moved = replace(finding, evidence=(*finding.evidence, f"{calls[-1].how} is called there"))
    return moved.relocated(calls[-1].location)


def locate_values(
    finding: Finding, changes: Changes, _wrapped_at: Location | None = None, *, after_forward: bool
) -> Finding:
    """Relocate a finding to a write of parameter values, preferably on some ranks only.

    `after_forward`: consider changes after the first forward pass, instead of changes before it.
    """
    subjects = set(finding.subjects)
    names: dict[tuple[str, Location | None], set[str]] = {}

    def sets_subjects(change: ModuleChanged) -> bool:
        is_relevant = change.what in VALUE_CHANGES and bool(change.forwards) == after_forward
        return is_relevant and not subjects.isdisjoint(change.names)

    ranks = ranks_by_call(changes, sets_subjects)
    partial_calls = {call: callers for call, callers in ranks.items() if len(callers) < len(changes)}
    if after_forward and ranks and not partial_calls:  # of calls on all ranks, only writes by hand explain differences
        for change in filter(sets_subjects, chain.from_iterable(changes)):
            if change.how not in _CALLS:
                names.setdefault((change.how, change.location), set()).update(change.names)
        written = [call for call in names if names[call] >= subjects]
        if not written and subjects <= set().union(*names.values()):
            written, lines = [*names][:1], sorted({str(line) for _, line in [*names][1:] if line is not None})
            finding = replace(finding, evidence=(*finding.evidence, *(f"others are written at {pos}" for pos in lines)))
        if len(written) != 1:
            return finding
        ranks = {written[0]: ranks[written[0]]}
    calls = partial_calls or ranks
    if not calls:
        return finding
    how, location = min(calls, key=lambda call: _CALLS.index(call[0]) if call[0] in _CALLS else len(_CALLS))
    callers, is_write = calls[how, location], how not in _CALLS
    only = f"only on {format_ranks(callers)}" if len(callers) < len(changes) else "on every rank"
    action = (
        f"they are written there ({how}), outside of the optimizer's step"
        if is_write
        else f"{how} is called there after wrapping"
    )
    return replace(
        finding,
        location=location,
        ranks=tuple(callers) if len(callers) < len(changes) else finding.ranks,
        evidence=(*finding.evidence, f"{action}, {only}"),
        fix="Write the same values on every rank (all_reduce the values that they depend on), or dist.broadcast them "
        "from rank 0."
        if is_write
        else finding.fix,
    )
