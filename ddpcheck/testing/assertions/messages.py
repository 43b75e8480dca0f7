"""What a test accepts: from a report, or from what each rank says of its parameters, to the message of an assertion.

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
    "reducer": ("local", ("DDP301", "DDP302")),
    "parity": ("single-process", ("DDP303", "DDP304", "DDP305", "DDP309", "DDP310", "DDP312")),
}
"""By check: the reference that it compares with, and the rules that say what comes of it."""

_BY_TOLERANCE = frozenset({"DDP302", "DDP303", "DDP304", "DDP305", "DDP309", "DDP310", "DDP312"})
_NO_VERDICT = frozenset({"DDP307", "DDP308"})
_MOST_ENTRIES = 5


def parity_failure_message(
    report: Report,
    *,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    tolerance: tuple[float, float] | None = None,
) -> str:
    """Why the gradients of a report are not those of its references, or cannot be said to be; empty where they are.

    Args:
        report: With all findings, whatever is ignored.
        select: Rules to fail on; default: all.
        ignore: Rules not to fail on.
        tolerance: rtol and atol of `ddpcheck.assert_parity`, in place of the measured tolerances.
    """
    relevant = [finding for finding in report.findings if _is_on_gradients(finding)]
    kept = select_findings(relevant, select=select, ignore=ignore)
    wanted = {
        check: reference
        for check, (reference, codes) in _VERDICTS.items()
        if any(_is_kept(code, select, ignore) for code in codes)
    }
    entries = [entry for entry in report.parity if entry.reference in wanted.values()]
    far = [entry for entry in entries if _is_far(entry, tolerance)]
    if tolerance is not None and not far:
        kept = tuple(finding for finding in kept if finding.code not in _BY_TOLERANCE)
    explained = {finding.code for finding in relevant} if tolerance is None else set()
    unexplained = [] if explained or kept else far  # what is ignored is explained
    withheld = [finding for finding in relevant if finding.code in _NO_VERDICT and finding not in kept]
    lacking = [] if report.error is None else [report.error.message]
    lacking += [_not_made(check, report) for check in wanted if report.error is None and _was_not_made(check, report)]
    lines = [line for finding in (*kept, *withheld) for line in _told(finding)]
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
    worst = sorted(far, key=lambda entry: -_excess(entry, tolerance))[:_MOST_ENTRIES]
    more = [f"  and {len(far) - len(worst)} more"] if len(far) > len(worst) else []
    allowed = [f"{len(far)} of {of} comparisons of a gradient with its reference are beyond the tolerance:"]
    return [*allowed, *(_entry(entry, tolerance) for entry in worst), *more]


def _is_on_gradients(finding: Finding) -> bool:
    """Whether a finding is a difference of gradients, has one as its consequence, or makes training wrong anyhow."""
    carries = any(fact.startswith("with it comes DDP3") for fact in finding.evidence)
    return finding.code.startswith("DDP3") or finding.severity is Severity.ERROR or carries


def _is_kept(code: str, select: Sequence[str], ignore: Sequence[str]) -> bool:
    return bool(select_findings([make_finding(code, (), "")], select=select, ignore=ignore))


def _was_not_made(check: str, report: Report) -> bool:
    """Whether a comparison was not made at all, or not in every step."""
    reference = _VERDICTS[check][0]
    in_part = any(result.name == check and result.status == "skipped" for result in report.checks)
    return in_part or not any(entry.reference == reference for entry in report.parity)


def _not_made(check: str, report: Report) -> str:
    result = next((result for result in report.checks if result.name == check), None)
    what = {
        "reducer": "DDP's gradients were not compared with the average of the ranks' own",
        "parity": "the gradients were not compared with those of a single process",
    }[check]
    return f"{what}: {result.detail if result and result.detail else 'not reached'}"


def _room(entry: ParityEntry, tolerance: tuple[float, float]) -> float:
    """How large the norm of the difference may be; follows from |g - r| <= atol + rtol * |r| for every element."""
    rtol, atol = tolerance
    return atol * math.sqrt(entry.elements) + rtol * entry.reference_norm


def _is_far(entry: ParityEntry, tolerance: tuple[float, float] | None) -> bool:
    if tolerance is None:
        return not entry.relative_error <= entry.tolerance
    return not entry.absolute_error <= _room(entry, tolerance)


def _excess(entry: ParityEntry, tolerance: tuple[float, float] | None) -> float:
    got, room = (
        (entry.relative_error, entry.tolerance)
        if tolerance is None
        else (entry.absolute_error, _room(entry, tolerance))
    )
    return got / room if room else math.inf


def _entry(entry: ParityEntry, tolerance: tuple[float, float] | None) -> str:
    where = f"  {entry.parameter} in step {entry.step}, against {entry.reference}:"
    if tolerance is None:
        return f"{where} relative error {entry.relative_error:.2g}, allowed {entry.tolerance:.2g}"
    rtol, atol = tolerance
    return (
        f"{where} norm of the difference {entry.absolute_error:.4g}, allowed {_room(entry, tolerance):.4g} "
        f"({atol:g} * sqrt({entry.elements}) + {rtol:g} * {entry.reference_norm:.4g})"
    )


def _told(finding: Finding) -> list[str]:
    where = f" (at {finding.location})" if finding.location else ""
    lines = [f"{finding.code} {', '.join(finding.subjects)}: {finding.message}{where}"]
    lines += [f"  {fact}" for fact in finding.evidence]
    return [*lines, f"  fix: {finding.what_to_do}"]


# Parameters and the loss


@dataclass(frozen=True, slots=True)
class Anomaly:
    """A parameter that gets no gradient, or a tensor that gets one and is no parameter.

    Attributes:
        name: With all its names, where it is tied.
        shape: Of it.
        registered: Whether it is a parameter of the model.
        location: The line that makes it, as "path:line"; may be empty.
        cause: Why it gets no gradient, in a sentence, where that is known.
    """

    name: str
    shape: tuple[int, ...] = ()
    registered: bool = True
    location: str = ""
    cause: str = ""


@dataclass(frozen=True, slots=True)
class PartAccount:
    """What one rank says of its parameters and its loss; `trouble` where it can say nothing."""

    anomalies: tuple[Anomaly, ...] = ()
    trouble: str = ""


def tell_anomalies(accounts: Sequence[PartAccount], ranks: Sequence[int]) -> str:
    """The message of the assertion; empty where no rank has anything to say."""
    where: dict[str, list[int]] = {}
    by_name: dict[str, Anomaly] = {}
    for rank, account in zip(ranks, accounts, strict=True):
        for anomaly in account.anomalies:
            where.setdefault(anomaly.name, []).append(rank)
            by_name.setdefault(anomaly.name, anomaly)
    if not by_name:
        return ""
    missing = [one for one in by_name.values() if one.registered]
    everywhere = [one for one in missing if len(where[one.name]) == len(ranks)]
    somewhere = [one for one in missing if one not in everywhere]
    strange = [one for one in by_name.values() if not one.registered]
    lines = ["Not every parameter takes part in the loss!"]
    for group, one_is, several_are in (
        (
            everywhere,
            "parameter gets no gradient from this loss (DDP101, DDP102 or DDP103: unused, left out of the loss or "
            "detached)",
            "parameters get no gradient from this loss (DDP101, DDP102 or DDP103: unused, left out of the loss or "
            "detached)",
        ),
        (
            somewhere,
            "parameter contributes on some ranks only, on which DDP hangs (DDP104)",
            "parameters contribute on some ranks only, on which DDP hangs (DDP104)",
        ),
        (
            strange,
            "tensor gets a gradient and is no parameter of the model, so DDP never synchronises it (DDP106)",
            "tensors get a gradient and are no parameters of the model, so DDP never synchronises them (DDP106)",
        ),
    ):
        if not group:
            continue
        lines += ["", f"{len(group)} {plural_verb(one_is, several_are, group)}:"]
        for one in group:
            at = f", made at {one.location}" if one.location else ""
            on = f", {'not ' if one.registered else ''}on {format_ranks(where[one.name])}"
            on = on if len(where[one.name]) < len(ranks) else ""
            lines.append(f"  {one.name} of shape {one.shape}{on}{at}")
        lines += [f"  {cause}" for cause in dict.fromkeys(one.cause for one in group if one.cause)]
    return "\n".join(lines)
