"""What judges say, and the check lines that are made of it: one shape for all doors.

A judge returns findings; a row makes a `Verdict` of them, which also says what was compared; `judge_all` asks all rows
of a table. A check line is made of the verdicts under one heading: nothing else says what was compared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ddpcheck.findings.report import CheckStatus, Finding, Severity
from ddpcheck.findings.wording import join_names, without_prefix
from ddpcheck.judge.causes import find_causes

Facts = TypeVar("Facts")
OF_BUFFERS = ("DDP214", "DDP215")  # which leave the gradients of a step as they are

Told = tuple[Finding, Finding]  # a finding, and the one of the report that tells it: itself, or its cause


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one comparison has come to."""

    findings: Sequence[Finding] = ()  # what was found
    held: str = ""  # what held, in a sentence; empty where nothing was compared
    lacking: str = ""  # why not all of it was compared; empty where it was
    differing: str = ""  # how much did not hold; empty where all did


Verdicts = Mapping[str, Verdict]  # by heading, which is the name of a check line


@dataclass(frozen=True, slots=True)
class Row(Generic[Facts]):
    """A row of the table of a door."""

    judge: Callable[[Facts], Verdicts]  # from the facts to verdicts
    headings: tuple[str, ...]  # those under which these are
    codes: tuple[str, ...]  # what it can find
    # its findings of these codes are left out where an earlier row has found one of them, which says more
    yields: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()  # it is not asked where an earlier row has found one of these
    over_ranks: bool = True  # whether it compares all ranks


@dataclass(frozen=True, slots=True)
class Judged:
    """What the rows of a table have come to."""

    findings: list[Finding]  # causes only
    told: Mapping[str, list[Told]]  # all that was found, by heading
    verdicts: Mapping[str, list[Verdict]]  # by heading
    errors: Mapping[str, Exception]  # what a judge has raised, which is a bug of ddpcheck, by heading
    found: Sequence[tuple[str, Finding]]  # all that was found, with its heading, as judges say it
    reported: Sequence[tuple[str, Finding]]  # what yields to findings of earlier rows, with its heading

    def status_of(self, heading: str, kept: Sequence[Finding]) -> tuple[CheckStatus, str] | None:
        """How the check under a heading ended, and a sentence on it; `None` where it had no subject.

        Findings that are not among those `kept` are ignored.
        """
        told = self.told.get(heading, [])
        said = zip(*((one.held, one.lacking, one.differing) for one in self.verdicts.get(heading, [])), strict=True)
        texts = ["; ".join(dict.fromkeys(filter(None, some))) for some in said] or ["", "", ""]
        return status_of(Verdict((), *texts), told, kept) if told or texts[0] or texts[1] else None

    def adding(self, heading: str, findings: Sequence[Finding]) -> Judged:
        """The same with findings that were made when these were known; some of these may come of them."""
        added = [*self.found, *((heading, finding) for finding in findings)]
        return _by_causes(added, self.verdicts, self.errors, self.reported)


def judge_all(facts: Facts, rows: Sequence[Row[Facts]], but: Collection[str] = ()) -> Judged:
    """Ask one row after the other, without what is under some headings; a judge that raises leaves the others be."""
    found: list[tuple[str, Finding]] = []
    verdicts: dict[str, list[Verdict]] = {}
    errors: dict[str, Exception] = {}
    reported: list[tuple[str, Finding]] = []
    for row in rows:
        known = {finding.code for _, finding in found}
        if not known.isdisjoint(row.unless):
            continue
        try:
            said = row.judge(facts)
        except Exception as error:
            errors |= dict.fromkeys(row.headings, error)
            continue
        left_out = () if known.isdisjoint(row.yields) else row.yields
        for heading, verdict in said.items():
            if heading in but:
                continue
            verdicts.setdefault(heading, []).append(verdict)
            found += ((heading, finding) for finding in verdict.findings if finding.code not in left_out)
            reported += ((heading, finding) for finding in verdict.findings if finding.code in left_out)
    return _by_causes(found, verdicts, errors, reported)


def _by_causes(
    found: Sequence[tuple[str, Finding]],
    verdicts: Mapping[str, list[Verdict]],
    errors: Mapping[str, Exception],
    reported: Sequence[tuple[str, Finding]],
) -> Judged:
    """Find causes; `reported` yield to findings of the same code, which stand for them on their check lines."""
    causes = find_causes([finding for _, finding in found])
    told: dict[str, list[Told]] = {}
    for (heading, finding), by in zip(found, causes.told_by, strict=True):
        if by is not None:
            told.setdefault(heading, []).append((without_prefix(finding), without_prefix(by)))
    every = [one for some in told.values() for one in some]
    for heading, finding in reported:
        by = next((root for one, root in every if one.code == finding.code), None)
        if by is not None:
            told.setdefault(heading, []).append((without_prefix(finding), by))
    return Judged([*map(without_prefix, causes.findings)], told, verdicts, errors, found, reported)


# Check lines


def status_of(verdict: Verdict, told: Sequence[Told], kept: Sequence[Finding]) -> tuple[CheckStatus, str]:
    """How a check ended, and a sentence on it; findings that are not among those `kept` are ignored."""
    shown = [(finding, by) for finding, by in told if by in kept]
    severities = ((by if by.code == finding.code else finding).severity for finding, by in shown)
    worst = min(severities, key=lambda severity: severity.rank, default=None)
    said = _listed(shown, verdict)
    if worst is Severity.ERROR:
        return "failed", said
    hidden = _listed([(finding, by) for finding, by in told if by not in kept], verdict)
    if verdict.differing:  # in some of the steps, where others are lacking
        if shown:
            return "warned", said
        return ("ignored", f"ignored: {hidden}") if hidden else ("failed", f"{verdict.differing}, cause unknown")
    if verdict.lacking:
        held = _without_buffers(verdict.held) if told else verdict.held
        return "skipped", f"{held}; {verdict.lacking}" if held else verdict.lacking
    if worst is Severity.WARNING:
        return "warned", said
    if hidden:
        return "ignored", f"ignored: {hidden}"
    return "passed", f"{verdict.held}; {said}" if said else verdict.held


def _listed(told: Sequence[Told], verdict: Verdict) -> str:
    """The codes of what was found, and how much differs, or holds all the same; empty where nothing was found."""
    said = [f.code for f, by in told if by.code == f.code]
    said += [f"{f.code}, which comes with {by.code}" for f, by in told if by.code != f.code]
    codes = join_names(list(dict.fromkeys(said)), most=5)
    if not codes or verdict.differing:
        return f"{codes}: {verdict.differing}" if codes else ""
    stands = bool(verdict.held) and all(finding.code in OF_BUFFERS for finding, _ in told)
    return f"{codes}; {_without_buffers(verdict.held)}" if stands else codes


def _without_buffers(held: str) -> str:
    """Return in words what matches between ranks if buffers differ."""
    return held.replace(", buffers and", " and").replace(" and buffers", "")
