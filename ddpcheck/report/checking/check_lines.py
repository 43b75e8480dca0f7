"""The check lines of a report: what each check compared, how much of it held, and why the rest was not compared.

This module is light: it never imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ddpcheck.findings.report import CheckResult, CheckStatus, Finding, ParityEntry, select_findings
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.severity import Severity
from ddpcheck.findings.wording import counted, format_steps, join_names, make_finding


@dataclass(frozen=True, slots=True)
class Heading:
    """One check of a report: its name, and the codes it may give."""

    name: str
    codes: tuple[str, ...]


HEADINGS = (
    Heading("model", ()),
    Heading(
        "consistency",
        (
            *("DDP201", "DDP202", "DDP203", "DDP204", "DDP205", "DDP206", "DDP207", "DDP209"),
            *("DDP211", "DDP212", "DDP213", "DDP216", "DDP222", "DDP110"),
        ),
    ),
    Heading(
        "wrapping",
        ("DDP208", "DDP214", "DDP215", "DDP221", "DDP223", "DDP503", "DDP515"),
    ),
    Heading("parameters", ("DDP10", "DDP112", "DDP403", "DDP405", "DDP406", "DDP407", "DDP503", "DDP513")),
    Heading(
        "reducer",
        (
            *("DDP301", "DDP302", "DDP111", "DDP501", "DDP502", "DDP504", "DDP306", "DDP311", "DDP508", "DDP509"),
            *("DDP213", "DDP214", "DDP215", "DDP216", "DDP515", "DDP517"),
        ),
    ),
    Heading(
        "parity",
        (
            *("DDP303", "DDP304", "DDP305", "DDP307", "DDP308", "DDP309", "DDP310", "DDP312"),
            *("DDP505", "DDP510", "DDP514", "DDP516", "DDP519"),
        ),
    ),
)

_OF_BUFFERS = ("DDP214", "DDP215")  # which leave the gradients of a step as they are

UNTOLD = 0.5
"""A tolerance from which on a comparison tells nothing: the smallest fault that was measured is as large."""

_NEAR = 0.01  # an error that is no fault under any tolerance


def heading_of(code: str, *, after_steps: bool) -> str:
    """The check to which a finding belongs; of a code that several may give, the last where it is seen after steps."""
    names = [heading.name for heading in HEADINGS if code.startswith(heading.codes or ("-",))]
    return names[-1 if after_steps else 0] if names else ""


def is_asked(heading: Heading, select: Sequence[str], ignore: Sequence[str]) -> bool:
    """Whether any rule of a check is selected, and not ignored."""
    rules = [make_finding(code, (), "") for code in RULES if code.startswith(heading.codes or ("-",))]
    return not rules or bool(select_findings(rules, select=select, ignore=ignore))


@dataclass(frozen=True, slots=True)
class Tally:
    """Comparisons of gradients with one reference, counted.

    Attributes:
        held: Within a tolerance that tells something.
        differ: Beyond their tolerance.
        zero: Of zeros with zeros.
        untold: Within a tolerance so large that they tell nothing.
        steps: In which any was made.
        farthest: The largest relative error.
    """

    held: int = 0
    differ: int = 0
    zero: int = 0
    untold: int = 0
    steps: tuple[int, ...] = ()
    farthest: float = 0.0

    @classmethod
    def of(cls, entries: Iterable[ParityEntry]) -> Tally:
        """Count `entries`, all with one reference."""
        counts = {"held": 0, "differ": 0, "zero": 0, "untold": 0}
        steps, farthest = set(), 0.0
        for entry in entries:
            steps.add(entry.step)
            farthest = max(farthest, entry.relative_error)
            if not entry.relative_error <= entry.tolerance:
                counts["differ"] += 1
            elif not entry.reference_norm and not entry.absolute_error:
                counts["zero"] += 1
            else:
                near = entry.relative_error <= _NEAR  # whatever the yardstick says, which may have routed otherwise
                counts["held" if near or entry.tolerance < UNTOLD else "untold"] += 1
        return cls(**counts, steps=tuple(sorted(steps)), farthest=farthest)

    @property
    def only_zeros(self) -> bool:
        """Whether nothing but zeros was compared."""
        return not (self.held or self.differ or self.untold)

    def vacuous(self) -> str:
        """Why the comparisons tell nothing, empty where they do."""
        if not self.steps or self.held or self.differ:
            return ""
        if self.untold:
            return "rounding may be as large as the gradients themselves, so that nothing can be told"
        return "every gradient was zero or missing, so nothing was compared"

    def equal(self, what: str, of_steps: int) -> str:
        """How many held, in a sentence that ends with `what`."""
        more = [f"{self.zero} more {'is' if self.zero == 1 else 'are'} zero"] if self.zero else []
        more += [f"{self.untold} more cannot be told from rounding"] if self.untold else []
        verb = "equals" if self.held == 1 else "equal"
        text = f"{counted(self.held, 'gradient')} in {self._when(of_steps)} {verb} {what}"
        return f"{text} ({', '.join(more)})" if more else text

    def compressed(self, hook: str, of_steps: int) -> str:
        """A sentence on gradients that a communication hook compresses so much that they cannot be compared."""
        count = counted(self.held + self.untold, "gradient")
        away = f"what {hook} leaves of the average of the ranks' own is up to {self.farthest:.2g} away from it"
        return f"{count} in {self._when(of_steps)} equal each other on all ranks; {away}"

    def differing(self, of_steps: int) -> str:
        """How many did not hold; empty where all did."""
        if not self.differ:
            return ""
        verb = "differs" if self.differ == 1 else "differ"
        return f"{self.differ} of {counted(self.held + self.differ, 'gradient')} in {self._when(of_steps)} {verb}"

    def _when(self, of_steps: int) -> str:
        whole = len(self.steps) == of_steps
        return counted(of_steps, "step") if whole else format_steps(self.steps)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison that one check made.

    Attributes:
        held: What held, in a sentence; empty where nothing was compared.
        lacking: Why not all of it was compared; empty where it was.
        differing: How much did not hold; empty where all did.
    """

    held: str = ""
    lacking: str = ""
    differing: str = ""


@dataclass(frozen=True, slots=True)
class Told:
    """A finding of a check, and the one of the report that tells it: itself, or its cause."""

    finding: Finding
    by: Finding

    def __str__(self) -> str:
        return self.finding.code if self.by is self.finding else f"{self.finding.code}, which comes with {self.by.code}"


def check_line(
    heading: Heading,
    comparison: Comparison,
    told: Sequence[Told],
    *,
    kept: frozenset[Finding],
    asked: bool,
    seconds: float,
    stopped: str = "",
) -> CheckResult:
    """One check of a report: how it ended, and a sentence on what was compared.

    Args:
        heading: Of the check.
        comparison: What was compared.
        told: What was found in it.
        kept: The findings that are in the report, and not ignored.
        asked: Whether the check was asked for.
        seconds: How long it took.
        stopped: Why the report ends in this check; empty where it does not.
    """
    status, detail = _status(comparison, told, kept)
    if stopped:
        status, detail = "error", stopped
    return CheckResult(heading.name, status, seconds, detail, asked)


def _status(comparison: Comparison, told: Sequence[Told], kept: frozenset[Finding]) -> tuple[CheckStatus, str]:
    shown = [item for item in told if item.by in kept]
    worst = min((item.finding.severity for item in shown), key=lambda severity: severity.rank, default=None)
    said = _listed(shown, comparison)
    if worst is Severity.ERROR:
        return "failed", said
    hidden = [item for item in told if item.by not in kept]
    if comparison.differing:  # in some of the steps, where others are lacking
        if shown:
            return "warned", said
        unknown = f"{comparison.differing}, cause unknown"
        return ("ignored", f"ignored: {_listed(hidden, comparison)}") if hidden else ("failed", unknown)
    if comparison.lacking:
        return "skipped", f"{comparison.held}; {comparison.lacking}" if comparison.held else comparison.lacking
    if worst is Severity.WARNING:
        return "warned", said
    if hidden:
        return "ignored", f"ignored: {_listed(hidden, comparison)}"
    return "passed", f"{comparison.held}; {said}" if said else comparison.held


def _listed(told: Sequence[Told], comparison: Comparison) -> str:
    """The codes of what was found, and how much differs, or holds all the same."""
    codes = join_names(list(dict.fromkeys(map(str, told))), most=5)
    if not codes or comparison.differing:
        return f"{codes}: {comparison.differing}" if codes else ""
    stands = bool(comparison.held) and all(item.finding.code in _OF_BUFFERS for item in told)
    return f"{codes}; {comparison.held}" if stands else codes
