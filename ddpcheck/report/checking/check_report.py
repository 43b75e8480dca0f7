"""Report of a check: check lines, findings and gradient comparisons."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import chain
from typing import Any

from ddpcheck import __version__
from ddpcheck.findings.evidence.steps import ShardedStep
from ddpcheck.findings.report import CheckResult, Finding, ParityEntry, Report
from ddpcheck.findings.rules import RULES, is_selected, rules_of_check
from ddpcheck.findings.selection import sort_out
from ddpcheck.findings.wording import format_steps, join_names, plain_name, plural, shorten_texts
from ddpcheck.report.checking.check_state import CheckOptions, CheckState
from ddpcheck.rules.loss.ddp308_nondeterministic import NOT_COMPARED
from ddpcheck.rules.verdict import Verdict, status_of
from ddpcheck.trace.replicas import steps_with_equal_end

HEADINGS = ("model", "consistency", "wrapping", "parameters", "reducer", "parity")
"""Names of the checks, in display order."""

_WORLD = ("world_size", "backend", "device", "steps", "seed", "timeout")
_NEAR = 0.01  # smaller relative errors count as equal under any tolerance


def report_of(state: CheckState) -> Report:
    """Build the report of a judged check."""
    groups = [entries for entries in _entries(state).values() if any(_result_of(entry) != "zero" for entry in entries)]
    return make_report(
        state.asked,
        state.findings,
        lambda kept: (_check_line(state, name, kept) for name in HEADINGS),
        notes=[*state.log.notes, *state.rank_params.unmatched],
        parity=tuple(sorted(chain(*groups), key=lambda entry: (entry.step, entry.reference, entry.parameter))),
        timing={name: round(seconds, 4) for name, seconds in state.log.seconds.items()},
        error=state.log.error or next(iter(state.log.bugs), None),
        modules=state.modules,
        timelines=state.timelines,
    )


def make_report(
    asked: CheckOptions,
    findings: Sequence[Finding],
    lines: Callable[[Sequence[Finding]], Iterable[CheckResult]],
    *,
    notes: Iterable[str],
    **parts: Any,
) -> Report:
    """Build a report; `lines` makes the check lines from the findings that are counted."""
    chosen = sort_out(
        findings,
        asked.target,
        select=asked.select,
        ignore=asked.ignore,
        suppress=asked.suppress,
        baseline=asked.baseline,
    )
    launcher = {"launcher": asked.launcher} if asked.launcher is not None else {}
    report = Report(
        target=asked.target,
        tool={"name": "ddpcheck", "version": __version__},
        environment={
            "python": platform.python_version(),
            "torch": metadata.version("torch"),
            "platform": platform.system().lower(),
        },
        world={**{name: getattr(asked, name) for name in _WORLD}, **launcher, "notes": list(dict.fromkeys(notes))},
        checks=tuple(lines(chosen.kept)),
        **parts,
    )
    return shorten_texts(chosen.complete(report).with_excerpts())


# Check lines


def _check_line(state: CheckState, name: str, kept: Sequence[Finding]) -> CheckResult:
    pairs = [(finding, cause) for part, finding, cause in state.reported if _check_name_of(part, finding) == name]
    status, detail = status_of(_verdict(state, name), pairs, kept)
    if stopped := _why_stopped(state, name, kept):
        status, detail = "error", stopped
    detail += state.rank_params.left_out if name in ("wrapping", "reducer", "parity") else ""
    asked = is_asked(name, state.asked.select, state.asked.ignore)
    return CheckResult(name, status, round(state.log.seconds.get(name, 0.0), 4), detail, asked)


def is_asked(name: str, select: Sequence[str], ignore: Sequence[str]) -> bool:
    """Return True if any rule of a check is selected and not ignored."""
    codes = rules_of_check("report", name)
    return not codes or any(is_selected(code, select, ignore) for code in codes)


def _check_name_of(part: str, finding: Finding) -> str:
    """Return the name of the check line that shows a finding made in `part`."""
    names = RULES[finding.code].checks.get("report", ())
    return part if part in names else next(iter(names), "")


def _why_stopped(state: CheckState, name: str, kept: Sequence[Finding]) -> str:
    if state.log.error is not None and state.log.part == name:  # the code of a finding is enough
        return join_names([f.code for f in kept if RULES[f.code].ends_run], most=5) or state.log.error.message
    return "not judged, since ddpcheck itself failed" if name in state.log.unjudged else ""


# Comparisons


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of gradient comparisons with one reference."""

    matching: int = 0  # within an informative tolerance
    differ: int = 0  # beyond the tolerance
    zero: int = 0  # zero compared with zero
    undecided: int = 0  # within a tolerance that is too large to be informative
    steps: tuple[int, ...] = ()  # steps with any comparison
    largest_error: float = 0.0  # the largest relative error

    @classmethod
    def count(cls, entries: Iterable[ParityEntry]) -> Tally:
        """Count gradient comparisons by result; all `entries` have the same reference."""
        entries = list(entries)
        steps = tuple(sorted({entry.step for entry in entries}))
        largest_error = max([0.0, *(entry.relative_error for entry in entries)])
        return cls(**Counter(map(_result_of, entries)), steps=steps, largest_error=largest_error)

    def why_inconclusive(self) -> str:
        """Return why all comparisons are inconclusive, or ''."""
        if not self.steps or self.matching or self.differ:
            return ""
        if self.undecided:
            return "rounding may be as large as the gradients themselves, so nothing can be decided"
        return "every gradient was zero or missing, so nothing was compared"

    def equal(self, what: str, num_steps: int) -> str:
        """Describe how many gradients equal `what`."""
        more = [f"{self.zero} more {'is' if self.zero == 1 else 'are'} zero"] if self.zero else []
        more += [f"{self.undecided} more cannot be told from rounding"] if self.undecided else []
        verb = "equals" if self.matching == 1 else "equal"
        text = f"{plural(self.matching, 'gradient')} in {self._when(num_steps)} {verb} {what}"
        return f"{text} ({', '.join(more)})" if more else text

    def compressed(self, hook: str, num_steps: int) -> str:
        """Describe gradients that a communication hook compresses too much to be compared."""
        count = plural(self.matching + self.undecided, "gradient")
        average = "the average of the ranks' own"
        near = f"{self.matching} of them equal {average}; the others" if self.matching else "they"
        away = f"differ from {'it' if self.matching else average} by up to {self.largest_error:.2g}"
        return f"{count} in {self._when(num_steps)} equal each other on all ranks; {near} {away}, after {hook}"

    def differing(self, num_steps: int) -> str:
        """Describe how many gradients differ; empty if none."""
        if not self.differ:
            return ""
        verb = "differs" if self.differ == 1 else "differ"
        gradients = plural(self.matching + self.differ, "gradient")
        return f"{self.differ} of {gradients} in {self._when(num_steps)} {verb}"

    def _when(self, num_steps: int) -> str:
        return plural(num_steps, "step") if len(self.steps) == num_steps else format_steps(self.steps)


def _result_of(entry: ParityEntry) -> str:
    if not entry.relative_error <= entry.tolerance:
        return "differ"
    if not entry.reference_norm and not entry.absolute_error:
        return "zero"
    near = entry.relative_error <= _NEAR  # even if the reference run of the tolerance routed differently
    return "matching" if near or entry.tells else "undecided"


def _verdict(state: CheckState, name: str) -> Verdict:
    if name not in state.log.seconds and not (name == "reducer" and state.steps.ddp_skipped):
        return Verdict(lacking=_why_not_reached(state))
    several = state.asked.world_size > 1
    if name == "model":
        return Verdict(matching="built on every rank" if several else "built on one rank")
    if name in ("consistency", "wrapping"):
        built, wrapped = "parameters, buffers and modules", "values, options and optimizers"
        wrapped = f"values before {state.wrapper.named}, and optimizers," if state.wrapper.sharded else wrapped
        noun = built if name == "consistency" else wrapped
        return Verdict((), f"{noun} are the same on every rank" if several else "one rank, so that nothing can differ")
    if name == "parameters":
        return _parameters_verdict(state)
    reference = "local" if name == "reducer" else "single-process"
    tally = Tally.count(_entries(state).get(reference, ()))
    hook = state.wrapper.comm_hook if name == "reducer" else ""
    if hook and state.steps.optimizer_averages:
        reason = f"not compared: {hook} leaves each rank its own gradients, and the optimizer averages"
        return Verdict(lacking=f"{reason}; the parameters are the same on every rank after each step")
    if hook and tally.undecided and not _why_not_compared(state, name, tally.steps):
        return Verdict(matching=tally.compressed(hook, state.asked.steps), differing=tally.differing(state.asked.steps))
    noun = "the average of the ranks' own, and each other" if several else "those without the wrapper"
    if several and state.wrapper.sharded:
        noun = "the average of the ranks' own, each gathered from its shards"
    if state.models:
        noun = "the average of those of the model that is not split, each put together from its parts"
    if name == "parity":
        noun = "those of the global batch in a single process"
        if any(item.random.libraries for item in state.steps.local):
            constants = state.single.constants
            noun += f", with {'constants instead of' if constants else 'the same'} random numbers"
            noun += "" if constants else " for each sample"
    text = tally.equal(noun, state.asked.steps) if tally.matching else ""
    sharded = [item for item in state.steps.ddp if isinstance(item, ShardedStep) and not item.rank]
    updates = sum(not difference.bad for item in sharded for difference in item.against_whole)
    if text and name == "reducer" and updates:
        of = "parts" if state.models else "shards"
        params = plural(updates, "parameter")
        text = f"{text}; {params} after a step on {of} equal those after a step on whole parameters"
    return Verdict(
        matching=text,
        lacking=tally.why_inconclusive() or _why_not_compared(state, name, tally.steps),
        differing=tally.differing(state.asked.steps),
    )


def _explain_local_sgd(state: CheckState) -> str:
    """Explain why steps of post-local SGD, in which ranks train independently, are not compared."""
    by_step = state.steps.local_sgd_steps
    equal = steps_with_equal_end(by_step)
    holds = f"the parameters are the same on every rank after {format_steps(equal)}"
    return (
        f"not compared from step {min(by_step)} on: {state.wrapper.comm_hook} averages over fewer ranks, and "
        f"{holds if equal else 'no step that was run averages the parameters'}"
    )


def _parameters_verdict(state: CheckState) -> Verdict:
    steps = sorted({item.step for item in state.steps.parameters})
    if not steps:
        return Verdict(lacking=_why_not_reached(state))
    states = [item.states for item in state.steps.parameters]
    names = states[0]
    unused = [name for name in names if any(state.get(name) in ("missing", "lost") for state in states)]
    where = " on every rank" if state.asked.world_size > 1 else ""
    when = plural(len(steps), "step")
    subject = "every parameter" if len(names) == len(state.wrapped[0].parameters) else "every trainable parameter"
    text = f"{subject} contributed to the loss in {when}{where}"
    if unused:
        text = f"{len(names) - len(unused)} of {len(names)} parameters contributed to the loss in each of {when}{where}"
        if state.wrapper.find_unused_parameters:
            text += "; find_unused_parameters=True allows the rest to be unused"
    return Verdict(matching=text, lacking="" if len(steps) == state.asked.steps else _why_not_reached(state))


def _why_not_compared(state: CheckState, name: str, steps: Sequence[int]) -> str:
    """Explain why a gradient check skipped steps; empty if every step was compared."""
    if state.repeats.differ:
        return NOT_COMPARED
    if len(steps) == state.asked.steps:
        return ""
    if name == "reducer":
        if len(steps) + len(state.steps.local_sgd_steps) == state.asked.steps:
            return _explain_local_sgd(state)
        parts = "gradients differ, and the forward draws random numbers, which differ between parts and the whole"
        return state.steps.ddp_skipped or (parts if state.steps.parts_draw else "") or _why_not_reached(state)
    diverged = "the ranks' parameters differ, so no single process can represent all of them"
    reason = state.single.incomparable or state.single.skipped or (diverged if state.steps.ranks_differ else "")
    return reason or _why_not_reached(state)


def _why_not_reached(state: CheckState) -> str:
    return state.log.rest_skipped or "not reached"


def _entries(state: CheckState) -> dict[str, list[ParityEntry]]:
    if state.repeats.differ:
        return {}
    ddp_steps = () if state.steps.optimizer_averages else state.steps.ddp
    compared = [(item.step, "local", item.against_local) for item in ddp_steps if item.rank == 0]
    for step, differences in state.single.differences.items():
        if not (state.single.incomparable and state.differs(step)):
            compared.append((step, "single-process", differences))
    entries: dict[str, list[ParityEntry]] = {}
    for step, reference, differences in compared:
        for item in differences:
            sizes = item.absolute_error, item.reference_norm, item.elements
            tolerance = state.repeats.allowed(item.name, item.tolerance)
            entry = ParityEntry(step, plain_name(item.name), reference, item.error, tolerance, *sizes)
            entries.setdefault(reference, []).append(entry)
    return entries
