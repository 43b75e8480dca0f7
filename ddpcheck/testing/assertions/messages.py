"""Messages of assertions: from a report, and from the anomalies that each rank finds.

Pure functions on plain data. This module is light: it never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ddpcheck.findings.report import Finding, ParityEntry, Report, select_findings
from ddpcheck.findings.severity import Severity
from ddpcheck.findings.wording import format_ranks, make_finding, plural_verb

# Gradients and their references

_VERDICTS = {
    "reducer": (
        "local",
        "DDP's gradients were not compared with the average of the ranks' own",
        ("DDP301", "DDP302"),
    ),
    "parity": (
        "single-process",
        "the gradients were not compared with those of a single process",
        ("DDP303", "DDP304", "DDP305", "DDP309", "DDP310", "DDP312"),
    ),
}
"""By check: the reference that it compares with, what to say where it was not made, and the rules on what it finds."""

_BY_TOLERANCE = frozenset(code for _, _, codes in _VERDICTS.values() for code in codes) - {"DDP301"}
_NO_VERDICT = frozenset({"DDP307", "DDP308"})
_MOST_ENTRIES = 5


def parity_failure_message(
    report: Report,
    *,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    tolerance: tuple[float, float] | None = None,
) -> str:
    """The message of `ddpcheck.assert_parity`: gradients differ, or were not compared; empty where they agree.

    `tolerance` is rtol and atol; it takes the place of the measured tolerances.
    """
    relevant = [finding for finding in report.findings if _is_on_gradients(finding)]
    kept = select_findings(relevant, select=select, ignore=ignore)
    wanted = {
        check: reference
        for check, (reference, _, codes) in _VERDICTS.items()
        if any(_is_kept(code, select, ignore) for code in codes)
    }
    entries = [entry for entry in report.parity if entry.reference in wanted.values()]
    far = [entry for entry in entries if not _error(entry, tolerance) <= _allowed(entry, tolerance)]
    if tolerance is not None and not far:
        kept = tuple(finding for finding in kept if finding.code not in _BY_TOLERANCE)
    explained = {finding.code for finding in relevant} if tolerance is None else set()
    unexplained = [] if explained or kept else far  # what is ignored is explained
    withheld = [finding for finding in relevant if finding.code in _NO_VERDICT and finding not in kept]
    lacking = [] if report.error is None else [report.error.message]
    lacking += [sentence for check in wanted if report.error is None and (sentence := _not_made(check, report))]
    lines = [line for finding in (*kept, *withheld) for line in _finding_lines(finding)]
    if unexplained or (far and tolerance is not None):
        lines += _beyond(far, len(entries), tolerance)
        lines += [f"  note: {note}" for note in report.world.get("notes", ()) if tolerance is None]
    if not lacking and not lines:
        return ""
    differ = far or any(f.code.startswith("DDP3") and f.code not in _NO_VERDICT for f in kept)
    undecided = lacking or any(f.code in _NO_VERDICT for f in relevant)
    title = "Gradients could not be compared!" if undecided and not differ else "Gradients are not close!"
    world = f"{report.world.get('world_size', '?')} ranks, {report.world.get('steps', '?')} steps"
    return "\n".join([title, "", f"{report.target}: {world}", *lacking, *lines])


def _beyond(far: Sequence[ParityEntry], of: int, tolerance: tuple[float, float] | None) -> list[str]:
    worst = sorted(far, key=lambda entry: -_error(entry, tolerance) / (_allowed(entry, tolerance) or 1e-300))
    lines = [f"{len(far)} of {of} comparisons of a gradient with its reference are beyond the tolerance:"]
    for entry in worst[:_MOST_ENTRIES]:
        got, allowed = _error(entry, tolerance), _allowed(entry, tolerance)
        how = f"relative error {got:.2g}, allowed {allowed:.2g}"
        if tolerance is not None:
            rtol, atol = tolerance
            terms = f"{atol:g} * sqrt({entry.elements}) + {rtol:g} * {entry.reference_norm:.4g}"
            how = f"norm of the difference {got:.4g}, allowed {allowed:.4g} ({terms})"
        lines.append(f"  {entry.parameter} in step {entry.step}, against {entry.reference}: {how}")
    return [*lines, f"  and {len(far) - _MOST_ENTRIES} more"] if len(far) > _MOST_ENTRIES else lines


def _error(entry: ParityEntry, tolerance: tuple[float, float] | None) -> float:
    return entry.relative_error if tolerance is None else entry.absolute_error


def _allowed(entry: ParityEntry, tolerance: tuple[float, float] | None) -> float:
    """How large `_error` may be; with a tolerance it follows from |g - r| <= atol + rtol * |r| for every element."""
    if tolerance is None:
        return entry.tolerance
    rtol, atol = tolerance
    return atol * math.sqrt(entry.elements) + rtol * entry.reference_norm


def _is_on_gradients(finding: Finding) -> bool:
    """A finding is a difference of gradients, has one as its consequence, or is an error."""
    carries = any(tag.startswith("DDP3") for tag in finding.tags)
    return finding.code.startswith("DDP3") or finding.severity is Severity.ERROR or carries


def _is_kept(code: str, select: Sequence[str], ignore: Sequence[str]) -> bool:
    return bool(select_findings([make_finding(code, (), "")], select=select, ignore=ignore))


def _not_made(check: str, report: Report) -> str:
    """Says that a comparison was not made at all, or not in every step; empty where it was."""
    reference, what, _ = _VERDICTS[check]
    result = next((result for result in report.checks if result.name == check), None)
    in_part = result is not None and result.status == "skipped"
    if not in_part and any(entry.reference == reference for entry in report.parity):
        return ""
    return f"{what}: {result.detail if result and result.detail else 'not reached'}"


def _finding_lines(finding: Finding) -> list[str]:
    where = f" (at {finding.location})" if finding.location else ""
    lines = [f"{finding.code} {', '.join(finding.subjects)}: {finding.message}{where}"]
    lines += [f"  {fact}" for fact in finding.evidence]
    return [*lines, f"  fix: {finding.what_to_do}"]


# Parameters and the loss


@dataclass(frozen=True, slots=True)
class Anomaly:
    """A parameter that gets no gradient, or a tensor that gets one and is no parameter."""

    name: str  # all of them, where it is tied
    shape: tuple[int, ...] = ()
    registered: bool = True  # as a parameter of the model
    location: str = ""  # of the line that makes it, as "path:line", where that is known
    cause: str = ""  # why it gets no gradient, in a sentence, where that is known


def anomalies_message(by_rank: Sequence[Sequence[Anomaly]], ranks: Sequence[int]) -> str:
    """The message of an assertion on the anomalies of all ranks; empty where there are none."""
    where: dict[str, list[int]] = {}
    by_name: dict[str, Anomaly] = {}
    for rank, anomalies in zip(ranks, by_rank, strict=True):
        for anomaly in anomalies:
            where.setdefault(anomaly.name, []).append(rank)
            by_name.setdefault(anomaly.name, anomaly)
    if not by_name:
        return ""
    unused = "from this loss (DDP101, DDP102 or DDP103: unused, left out of the loss or detached)"
    some = "on some ranks only, on which DDP hangs (DDP104)"
    foreign = "of the model, so DDP never synchronises"
    everywhere = [one for one in by_name.values() if one.registered and len(where[one.name]) == len(ranks)]
    somewhere = [one for one in by_name.values() if one.registered and len(where[one.name]) < len(ranks)]
    groups = [
        (f"parameter gets no gradient {unused}", f"parameters get no gradient {unused}", everywhere),
        (f"parameter contributes {some}", f"parameters contribute {some}", somewhere),
        (
            f"tensor gets a gradient and is no parameter {foreign} it (DDP106)",
            f"tensors get a gradient and are no parameters {foreign} them (DDP106)",
            [one for one in by_name.values() if not one.registered],
        ),
    ]
    lines = ["Not every parameter takes part in the loss!"]
    for one_is, several_are, group in groups:
        lines += ["", f"{len(group)} {plural_verb(one_is, several_are, group)}:"] if group else []
        for one in group:
            at = f", made at {one.location}" if one.location else ""
            on = f", {'not ' if one.registered else ''}on {format_ranks(where[one.name])}"
            on = on if len(where[one.name]) < len(ranks) else ""
            lines.append(f"  {one.name} of shape {one.shape}{on}{at}")
        lines += [f"  {cause}" for cause in dict.fromkeys(one.cause for one in group if one.cause)]
    return "\n".join(lines)
