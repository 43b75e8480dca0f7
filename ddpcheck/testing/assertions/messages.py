"""Messages of assertions: from a report, and from the anomalies that each rank finds.

Pure functions on plain data. This module is light: it never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddpcheck.findings.report import Finding, ParityEntry, Report, Severity, select_findings
from ddpcheck.findings.selection import is_any_selected
from ddpcheck.findings.wording import format_ranks, group_by, plural_verb

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
        if is_any_selected(codes, select=select, ignore=ignore)
    }
    entries = [entry for entry in report.parity if entry.reference in wanted.values()]
    far = [entry for entry in entries if not _is_near(entry, tolerance)]
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
    measured = [(entry, *_distance(entry, tolerance)) for entry in far]
    worst = sorted(measured, key=lambda one: -one[1] / (one[2] or 1e-300))[:_MOST_ENTRIES]
    lines = [f"{len(far)} of {of} comparisons of a gradient with its reference are beyond the tolerance:"]
    lines += [f"  {one.parameter} in step {one.step}, against {one.reference}: {how}" for one, _, _, how in worst]
    return [*lines, f"  and {len(far) - _MOST_ENTRIES} more"] if len(far) > _MOST_ENTRIES else lines


def _distance(entry: ParityEntry, tolerance: tuple[float, float] | None) -> tuple[float, float, str]:
    """How far a gradient is from its reference, how far it may be, and both in words.

    What may be with a tolerance follows from |g - r| <= atol + rtol * |r| for every element.
    """
    if tolerance is None:
        got, allowed = entry.relative_error, entry.tolerance
        return got, allowed, f"relative error {got:.2g}, allowed {allowed:.2g}"
    rtol, atol = tolerance
    got, allowed = entry.absolute_error, atol * math.sqrt(entry.elements) + rtol * entry.reference_norm
    terms = f"{atol:g} * sqrt({entry.elements}) + {rtol:g} * {entry.reference_norm:.4g}"
    return got, allowed, f"norm of the difference {got:.4g}, allowed {allowed:.4g} ({terms})"


def _is_near(entry: ParityEntry, tolerance: tuple[float, float] | None) -> bool:
    got, allowed, _ = _distance(entry, tolerance)
    return got <= allowed


def _is_on_gradients(finding: Finding) -> bool:
    """A finding is a difference of gradients, has one as its consequence, or is an error."""
    carries = any(tag.startswith("DDP3") for tag in finding.tags)
    return finding.code.startswith("DDP3") or finding.severity is Severity.ERROR or carries


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


def anomalies_message(by_rank: Mapping[int, Sequence[Anomaly]]) -> str:
    """The message of an assertion on the anomalies of all ranks; empty where there are none."""
    found = [(rank, anomaly) for rank, anomalies in by_rank.items() for anomaly in anomalies]
    where = {name: [rank for rank, _ in of] for name, of in group_by(found, lambda one: one[1].name).items()}
    by_name = {anomaly.name: anomaly for _, anomaly in reversed(found)}
    kinds = group_by(
        (by_name[name] for name in where),
        lambda one: (not one.registered, one.registered and len(where[one.name]) < len(by_rank)),
    )
    lines = ["Not every parameter takes part in the loss!"] if found else []
    for kind, group in sorted(kinds.items(), key=lambda one: one[0]):
        lines += ["", f"{len(group)} {plural_verb(*_ANOMALIES[kind], group)}:"]
        for one in group:
            at = f", made at {one.location}" if one.location else ""
            on = f", {'not ' if one.registered else ''}on {format_ranks(where[one.name])}"
            on = on if len(where[one.name]) < len(by_rank) else ""
            lines.append(f"  {one.name} of shape {one.shape}{on}{at}")
        lines += [f"  {cause}" for cause in dict.fromkeys(one.cause for one in group if one.cause)]
    return "\n".join(lines)


_UNUSED = "from this loss (DDP101, DDP102 or DDP103: unused, left out of the loss or detached)"
_ON_SOME = "on some ranks only, on which DDP hangs (DDP104)"
_ANOMALIES = {
    (False, False): (f"parameter gets no gradient {_UNUSED}", f"parameters get no gradient {_UNUSED}"),
    (False, True): (f"parameter contributes {_ON_SOME}", f"parameters contribute {_ON_SOME}"),
    (True, False): (
        "tensor gets a gradient and is no parameter of the model, so DDP never synchronises it (DDP106)",
        "tensors get a gradient and are no parameters of the model, so DDP never synchronises them (DDP106)",
    ),
}
"""One anomaly, and several, by whether they are tensors that are no parameters, and whether on some ranks only."""
