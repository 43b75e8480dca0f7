"""The report of a check: its check lines, findings and comparisons of gradients.

This module is light: it never imports torch.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata

from ddpcheck import __version__
from ddpcheck.findings.report import CheckResult, Finding, ParityEntry, Report, select_findings
from ddpcheck.findings.shortening import limited
from ddpcheck.findings.wording import counted, join_names
from ddpcheck.judge.compiled_step import plain_name
from ddpcheck.report.checking.check_lines import (
    HEADINGS,
    Comparison,
    Heading,
    Tally,
    Told,
    check_line,
    heading_of,
    is_asked,
)
from ddpcheck.report.checking.check_state import CheckState

_ENDINGS = ("DDP401", "DDP402", "DDP403", "DDP404")


def report_of(state: CheckState, *, select: Sequence[str] = (), ignore: Sequence[str] = ()) -> Report:
    """The report of a check that has been judged.

    Args:
        state: Of the check.
        select: Codes, prefixes or names of the rules to report; all where there are none.
        ignore: Those not to report.
    """
    asked = state.asked
    kept = select_findings(state.findings, select=select, ignore=ignore)
    report = Report(
        target=asked.target,
        tool={"name": "ddpcheck", "version": __version__},
        environment={
            "python": platform.python_version(),
            "torch": metadata.version("torch"),
            "platform": platform.system().lower(),
        },
        world={
            "world_size": asked.world_size,
            "backend": asked.backend,
            "device": asked.device,
            "steps": asked.steps,
            "seed": asked.seed,
            "timeout": asked.timeout,
            **({"launcher": asked.launcher} if asked.launcher is not None else {}),
            "notes": list(dict.fromkeys(state.log.notes)),
        },
        checks=tuple(_line(state, heading, kept, select, ignore) for heading in HEADINGS),
        findings=kept,
        ignored=tuple(sorted(finding.code for finding in state.findings if finding not in kept)),
        parity=tuple(sorted(_told_entries(state), key=lambda entry: (entry.step, entry.reference, entry.parameter))),
        timing={name: round(seconds, 4) for name, seconds in state.log.seconds.items()},
        error=state.log.error or next(iter(state.log.bugs), None),
    )
    return limited(report)


def _line(
    state: CheckState, heading: Heading, kept: Sequence[Finding], select: Sequence[str], ignore: Sequence[str]
) -> CheckResult:
    told = [Told(finding, finding) for finding in state.findings]
    told += [Told(finding, cause) for finding, cause in state.merged]
    here = [item for item in told if _heading_of(state, item.finding) == heading.name]
    return check_line(
        heading,
        _comparison(state, heading.name),
        here,
        kept=frozenset(kept),
        asked=is_asked(heading, select, ignore),
        seconds=round(state.log.seconds.get(heading.name, 0.0), 4),
        stopped=_why_stopped(state, heading.name, kept),
    )


def _why_stopped(state: CheckState, name: str, kept: Sequence[Finding]) -> str:
    """Why one of the checks has come to no verdict; empty where it has."""
    if state.log.error is not None and state.log.part == name:  # where a finding tells it, that is enough
        return join_names([f.code for f in kept if f.code.startswith(_ENDINGS)], most=5) or state.log.error.message
    return "not judged, since ddpcheck itself failed" if name in state.log.unjudged else ""


def _heading_of(state: CheckState, finding: Finding) -> str:
    """The check that gave `finding`; causes have gathered evidence since."""
    plain = replace(finding, evidence=())
    same = (plain == replace(other, evidence=(), severity=finding.severity) for other in state.found_after_steps)
    return heading_of(finding.code, after_steps=any(same))


def _comparison(state: CheckState, name: str) -> Comparison:
    """The comparison that one of the checks has made."""
    if name not in state.log.seconds and not (name == "reducer" and state.steps.ddp_skipped):
        return Comparison(lacking=_why_not_reached(state))
    several = state.asked.world_size > 1
    if name == "model":
        return Comparison("built on every rank" if several else "built on one rank")
    if name in ("consistency", "wrapping"):
        built, wrapped = "parameters, buffers and modules", "values, options and optimizers"
        what = built if name == "consistency" else wrapped
        return Comparison(f"{what} are the same on every rank" if several else "one rank, so that nothing can differ")
    if name == "parameters":
        return _part_taken(state)
    reference = "local" if name == "reducer" else "single-process"
    tally = Tally.of(entry for entry in _entries(state) if entry.reference == reference)
    hook = state.wrapper.comm_hook if name == "reducer" else ""
    if hook and tally.untold and not _why_not_compared(state, name, tally.steps):
        return Comparison(tally.compressed(hook, state.asked.steps), differing=tally.differing(state.asked.steps))
    what = "the average of the ranks' own, and each other" if several else "those without the wrapper"
    what = what if name == "reducer" else "those of the global batch in a single process"
    return Comparison(
        tally.equal(what, state.asked.steps) if tally.held else "",
        tally.vacuous() or _why_not_compared(state, name, tally.steps),
        tally.differing(state.asked.steps),
    )


def _part_taken(state: CheckState) -> Comparison:
    """Which parameters take part in the loss."""
    steps = sorted({item.step for item in state.steps.parameters})
    if not steps:
        return Comparison(lacking=_why_not_reached(state))
    states = [item.states for item in state.steps.parameters]
    names = states[0]
    absent = [name for name in names if any(state.get(name) in ("missing", "lost") for state in states)]
    where = " on every rank" if state.asked.world_size > 1 else ""
    when = counted(len(steps), "step")
    every = "every parameter" if len(names) == len(state.wrapped[0].parameters) else "every trainable parameter"
    text = f"{every} takes part, in {when}{where}"
    if absent:
        text = f"{len(names) - len(absent)} of {len(names)} parameters take part in each of {when}{where}"
        if state.wrapper.find_unused_parameters:
            text += ", and find_unused_parameters=True allows for the rest"
    return Comparison(text, "" if len(steps) == state.asked.steps else _why_not_reached(state))


def _why_not_compared(state: CheckState, name: str, steps: Sequence[int]) -> str:
    """Why not every step was compared, in one of the checks of gradients; empty where all were."""
    if state.repeats.differ:
        return "DDP308: the same step run twice differs from itself, so comparisons mean nothing"
    if len(steps) == state.asked.steps:
        return ""
    if name == "reducer":
        return state.steps.ddp_skipped or _why_not_reached(state)
    apart = "the ranks' parameters differ, so no single process can stand for all of them"
    why = state.single.incomparable or state.single.skipped or (apart if state.steps.ranks_differ else "")
    return why or _why_not_reached(state)


def _why_not_reached(state: CheckState) -> str:
    return state.log.rest_skipped or "not reached"


def _told_entries(state: CheckState) -> list[ParityEntry]:
    """Without those with a reference where only zeros were compared."""
    entries = _entries(state)
    empty = [
        reference
        for reference in ("local", "single-process")
        if Tally.of(entry for entry in entries if entry.reference == reference).only_zeros
    ]
    return [entry for entry in entries if entry.reference not in empty]


def _entries(state: CheckState) -> list[ParityEntry]:
    """The comparisons of gradients that mean something."""
    if state.repeats.differ:
        return []
    return [
        replace(
            entry,
            parameter=plain_name(entry.parameter),
            tolerance=state.repeats.allowed(entry.parameter, entry.tolerance),
        )
        for entry in state.parity
    ]
