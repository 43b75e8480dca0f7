"""What has come of a check so far: the evidence, what it is judged to mean, and the `Report` made of both.

This module is light: it never imports torch.
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any

from ddpcheck import __version__
from ddpcheck.findings.errors import EXIT_USAGE, RankError
from ddpcheck.findings.evidence.gradients import Difference, RepeatedStep
from ddpcheck.findings.evidence.modules import WrappedModule, WrapperFacts
from ddpcheck.findings.evidence.parameters import PathEnd, StepEvidence
from ddpcheck.findings.evidence.single_process import ShardAnalysis, SingleStep
from ddpcheck.findings.evidence.steps import CompiledStep, DdpStepEvidence, LocalStep, NoExplanation, SharedDraw
from ddpcheck.findings.exception_origin import as_bug
from ddpcheck.findings.report import CheckResult, Finding, Location, ParityEntry, Report, ReportError, select_findings
from ddpcheck.findings.severity import Severity
from ddpcheck.findings.shortening import limited
from ddpcheck.findings.wording import Names, counted, join_names
from ddpcheck.judge.compiled_step import judge_compiled, plain_name, tell_compiled, without_prefix
from ddpcheck.judge.judge_context import JudgeContext, LocalFacts
from ddpcheck.judge.parameters import judge_parameters, zero_everywhere
from ddpcheck.judge.reducer import judge_reducer
from ddpcheck.judge.replica_state import judge_state
from ddpcheck.judge.replicas import differing_names
from ddpcheck.judge.root_causes import merged_with
from ddpcheck.judge.single_process import judge_nothing_compared, judge_repeat, judge_single_process
from ddpcheck.judge.training_loop import judge_draws, judge_loop, judge_optimizer, judge_samples
from ddpcheck.judge.wrapper_error import judge_wrapper_error
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


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """What was asked for."""

    target: str
    world_size: int
    backend: str
    device: str
    steps: int
    seed: int
    timeout: float
    preload: tuple[str, ...] = ()
    launcher: str | None = None  # who has started the processes that the ranks belong to


_NOISE_MULTIPLE = 5.0
_LIBRARIES = {"random": "Python's random"}
_ENDINGS = ("DDP401", "DDP402", "DDP403", "DDP404")
_STOPS_DDP = frozenset({"DDP101", "DDP102", "DDP103", "DDP104", "DDP105", "DDP112", "DDP406", "DDP503", "DDP513"})


@dataclass
class CheckState:
    """Evidence and findings of one check, gathered phase by phase; complete or not, it makes a report.

    Attributes:
        withheld: Whether a step differs from itself, so that nothing can be said of its gradients.
        held: Plain values that each rank's program holds, spelled, by name.
        changed: Those that the steps have changed.
        ranks_apart: Whether the parameters have come to differ between ranks; from then on no single process can
            stand for all of them.
        rest_skipped: Why the checks after the one under way were not run.
        ddp_skipped: Why no step goes through the wrapper any more.
        single_skipped: Why there is no single process to compare with.
        unshared: Why a difference from the single process tells nothing.
        bugs: Of ddpcheck, which the check has gone on after.
    """

    asked: CheckOptions
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    timing: dict[str, float] = field(default_factory=dict)
    error: ReportError | None = None
    wrapped: Sequence[WrappedModule] = ()
    local: Sequence[LocalStep] = ()
    names: Names = field(default_factory=Names)
    analysis: ShardAnalysis | None = None
    held: Sequence[Mapping[str, str]] = ()
    changed: frozenset[str] = frozenset()
    awake: frozenset[str] = frozenset()
    zero_ends: Mapping[str, PathEnd] = field(default_factory=dict)
    withheld: bool = False
    ranks_apart: bool = False
    rest_skipped: str = ""
    ddp_skipped: str = ""
    single_skipped: str = ""
    unshared: str = ""
    bugs: list[ReportError] = field(default_factory=list)
    _unjudged: set[str] = field(default_factory=set)
    _at: str = ""
    _evidence: list[StepEvidence] = field(default_factory=list)
    _ddp: list[DdpStepEvidence] = field(default_factory=list)
    _compiled: list[CompiledStep] = field(default_factory=list)
    _single: dict[int, tuple[Difference, ...]] = field(default_factory=dict)
    _norms: dict[int, float] = field(default_factory=dict)
    _parity: list[ParityEntry] = field(default_factory=list)
    _noise: dict[str, float] = field(default_factory=dict)
    _repeated: list[RepeatedStep] = field(default_factory=list)
    _draws: Sequence[Sequence[SharedDraw]] = ()
    _first_local: Sequence[LocalStep] = ()
    _analysed: Sequence[LocalStep] = ()
    _choices: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _single_backwards: int = 1
    _after_steps: frozenset[Finding] = frozenset()
    _came_with: Sequence[tuple[Finding, Finding]] = ()

    # What ddpcheck itself cannot do

    def add_bug(self, bug: ReportError) -> None:
        """A bug of ddpcheck has kept something from being told or compared; the rest goes on."""
        if bug.message not in [known.message for known in self.bugs]:
            self.bugs.append(bug)

    def add_unexplained(self, what: str, answer: object) -> bool:
        """Whether a rank's answer is that it cannot tell `what`; then that is noted."""
        if not isinstance(answer, NoExplanation):
            return False
        self.notes.append(f"{what}: not known, since finding out failed ({answer.reason})")
        if answer.bug:
            self.add_bug(ReportError(answer.bug, EXIT_USAGE, answer.detail))
        return True

    @property
    def unfinished(self) -> ReportError | None:
        """The bug of ddpcheck that has kept the check from a verdict, if there is one."""
        if self.error is not None and self.error.exit_code == EXIT_USAGE:
            return self.error
        return self.bugs[0] if self._unjudged else None

    def judged(self, check: str, judge: Callable[..., list[Any]], *args: Any, **kwargs: Any) -> list[Any]:
        """What `judge` says, which belongs to `check`; where it raises, that is a bug of ddpcheck, and nothing said."""
        try:
            return judge(*args, **kwargs)
        except Exception as error:
            bug = as_bug(error)
            self.add_bug(ReportError(str(bug), EXIT_USAGE, bug.detail))
            self._unjudged.add(check)
            return []

    # Gathering

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time that the block takes to what `name` has taken."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.timing[name] = self.timing.get(name, 0.0) + time.perf_counter() - begun

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A block of the check called `name`, one of the headings."""
        self._at = name
        with self.timed(name):
            yield

    def add_local(self, local: Sequence[LocalStep]) -> None:
        """What the ranks saw in a step by themselves."""
        self.local = local
        self._first_local = self._first_local or local
        self._evidence += [item.evidence for item in local]
        step = local[0].evidence.step
        self._norms[step] = max(item.norm for item in local)

    def add_quiet_steps(self, steps: Sequence[tuple[float, tuple[str, ...]]]) -> None:
        """The ranks' losses of the last step without random numbers, which are those to compare with other runs."""
        quiet = zip(self.local, steps, strict=True)
        self.local = [
            replace(item, loss=loss, random=replace(item.random, choices=choices)) for item, (loss, choices) in quiet
        ]
        self._choices[self.local[0].evidence.step] = tuple(dict.fromkeys(one for _, some in steps for one in some))

    def decide_on_ddp(self, step: int) -> None:
        """Find out whether the wrapper can be used in this step, or would raise, hang or abort."""
        facts = self._facts
        if self.ddp_skipped or not facts.is_ddp:
            return
        evidence = [item for item in self._evidence if item.step == step]
        found = self.judged("parameters", judge_parameters, evidence, facts, self.names)
        stops = {f.code for f in found if f.severity is Severity.ERROR} & _STOPS_DDP
        if stops - ({"DDP103", "DDP503"} if facts.tolerates_unused else set()):
            self.ddp_skipped = f"not run from step {step} on: the finding on parameters would make DDP raise or hang"

    def add_ddp(self, evidence: Sequence[DdpStepEvidence]) -> bool:
        """What the ranks saw in a step through the wrapper; returns whether anything is wrong with it."""
        self._ddp += evidence
        self.ranks_apart |= bool(differing_names([item.parameters for item in evidence]))
        for difference in evidence[0].against_local:
            self._note_parity(evidence[0].step, "local", difference)
        return bool(self.judged("reducer", judge_reducer, evidence, self._judge_context()))

    def add_compiled(self, evidence: Sequence[CompiledStep]) -> None:
        """What the ranks saw in a step through the wrapper as the recipe compiles it."""
        self._compiled += evidence

    def add_single(self, step: int, result: SingleStep) -> None:
        """What the single process says of a step."""
        self._single_backwards = result.backwards
        self._norms[step] = max(result.norm, self._norms.get(step, 0.0))
        if result.float64_error and not any("float64" in note for note in self.notes):
            self.notes.append(f"no float64 run to measure rounding with: {result.float64_error}")

    def add_single_differences(self, step: int, differences: tuple[Difference, ...]) -> bool:
        """How far the ranks' average is from the global batch; returns whether that is too far."""
        self._single[step] = differences
        for difference in differences:
            self._note_parity(step, "single-process", difference)
        return any(difference.bad for difference in differences)

    def add_analysis(self, step: int, analysis: ShardAnalysis | None) -> bool:
        """What the shards tell of a step that differs; returns whether it still does, rounding aside."""
        rounded = analysis.rounded if analysis is not None else ()
        self._single[step] = tuple(
            replace(item, tolerance=max(item.tolerance, item.error)) if item.name in rounded else item
            for item in self._single[step]
        )
        self._parity = [
            replace(entry, tolerance=max(entry.tolerance, entry.relative_error))
            if (entry.step, entry.reference) == (step, "single-process") and entry.parameter in rounded
            else entry
            for entry in self._parity
        ]
        differs = any(item.bad for item in self._single[step])
        if differs:  # else the next step that differs is looked at
            self.analysis, self._analysed = analysis, self.local
        return differs

    @property
    def wants_analysis(self) -> bool:
        """Whether the step that differs is to be looked at: the first one, or one after it that chose nothing."""
        return self.analysis is None or (
            bool(self._choices.get(self._analysed[0].evidence.step)) and not self.local[0].random.choices
        )

    def take_single_process(self, reference: CheckState) -> None:
        """Compare with the single process of a finished check of the same target."""
        self.single_skipped = reference.single_skipped
        self.analysis, self._analysed = reference.analysis, reference._analysed
        self.held, self.changed = reference.held, reference.changed
        self._choices, self._draws = reference._choices, reference._draws
        self._single, self._single_backwards = reference._single, reference._single_backwards
        self._parity += [entry for entry in reference._parity if entry.reference == "single-process"]
        self._noise = {**reference._noise, **self._noise}
        self._repeated = self._repeated or reference._repeated
        for step, norm in reference._norms.items():
            self._norms[step] = max(norm, self._norms.get(step, 0.0))

    @property
    def stopped_by_target(self) -> bool:
        """Whether something has ended the check that does not depend on the wrapper's options."""
        options = self.rest_skipped.startswith("DDP221")
        return bool(self.error or self.rest_skipped) and self._at != "reducer" and not options

    def draws_alike(self) -> bool:
        """Whether the forward passes left torch's generator in the same state on all ranks, which were seeded apart."""
        states = {item.random.generator_state for item in self.local}
        return len(self.local) > 1 and len(states) == 1 and 0 not in states

    def add_draws(self, draws: Sequence[Sequence[SharedDraw]]) -> None:
        """What the ranks drew for their samples, by rank."""
        self._draws = draws

    def add_repeat(self, step: int, repeated: Sequence[RepeatedStep]) -> None:
        """How far a step is from itself, by rank; verdicts on gradients are withheld where that is not nothing."""
        differences = [item.differences for item in repeated]
        self._repeated = self._repeated or list(repeated)
        for difference in (item for of_rank in differences for item in of_rank):
            self._noise[difference.name] = max(difference.error, self._noise.get(difference.name, 0.0))
        found = self.judged("parity", judge_repeat, dict(enumerate(differences)), step)
        self.findings += found
        self.withheld = bool(found)

    def against_local(self) -> float | None:
        """The largest relative error of a gradient under the wrapper against the average of the ranks' own."""
        return max((d.error for item in self._ddp for d in item.against_local), default=None)

    def absent(self) -> dict[tuple[int, int], frozenset[str]]:
        """By step and rank, the parameters that did not contribute there."""
        return {
            (item.step, item.rank): frozenset(name for name, state in item.states.items() if state == "missing")
            for item in self._evidence
        }

    def zero_everywhere(self) -> list[str]:
        """The parameters whose gradient was zero in every step, unless all gradients were."""
        return zero_everywhere(self._evidence) if any(self._norms.values()) else []

    def _note_parity(self, step: int, reference: str, difference: Difference) -> None:
        self._parity.append(
            ParityEntry(
                step,
                difference.name,
                reference,
                difference.error,
                difference.tolerance,
                difference.absolute_error,
                difference.reference_norm,
                difference.elements,
            )
        )

    # Judging

    @property
    def _facts(self) -> WrapperFacts:
        return self.wrapped[0].facts if self.wrapped else WrapperFacts()

    def _judge_context(self, module_locations: Mapping[str, Location] | None = None) -> JudgeContext:
        local = self._analysed or self.local
        return JudgeContext(
            names=self.names,
            wrapper=self._facts,
            world_size=self.asked.world_size,
            local=LocalFacts(
                losses=tuple(item.loss for item in local),
                shard_sizes=tuple(item.samples for item in local),
                calls=local[0].forward_calls if local else (),
                differing_buffers=tuple(differing_names([item.buffers for item in local])) if local else (),
                backwards=(self._single_backwards, max((item.backwards for item in local), default=1)),
                drew_from=tuple(
                    sorted({_LIBRARIES.get(name, name) for item in local for name in item.random.libraries - {"torch"}})
                ),
                choices=self._decisive_choices(),
            ),
            module_locations=module_locations or {},
            broadcasts_buffers=bool(self.wrapped) and self.wrapped[0].broadcasts_buffers,
            program_data=self.held,
            changed_data=self.changed,
            differing_at_start=frozenset(
                differing_names([item.parameters for item in self.wrapped]) if self.wrapped else ()
            ),
            wrapper_class=self.wrapped[0].wrapper if self.wrapped else "",
            nonlinear=tuple(dict.fromkeys(name for item in self._repeated for name in item.nonlinear)),
            hooks=tuple(dict.fromkeys(hook for item in self._repeated for hook in item.hooks)),
            loss_location=self.wrapped[0].loss_location if self.wrapped else None,
            wrap_hooks=self.wrapped[0].hooks if self.wrapped else (),
            gradients_differ=any(self._differs(step) for step in self._single),
        )

    def judge_wrapper_failure(self, error: RankError) -> list[Finding]:
        """What a failure in the wrapper's step means, where it is one of those that ddpcheck knows."""
        if self._at != "reducer":
            return []
        return self.judged("reducer", judge_wrapper_error, error, self._judge_context())

    def judge(self, module_locations: Mapping[str, Location]) -> None:
        """Turn everything that was gathered into findings, whatever it was that stopped the check."""
        known = self._judge_context(module_locations)
        found = list(self.findings)
        before = frozenset(found)
        if self._evidence:
            more = {"nonzero_when_perturbed": self.awake, "zero_ends": self.zero_ends}
            parameters = self.judged("parameters", judge_parameters, self._evidence, known.wrapper, self.names, **more)
            by_name = {finding.code for finding in parameters}  # which say more than that backward raised
            found = [f for f in found if f.subjects != ("backward",) or f.code not in by_name] + parameters
        if not self.withheld:
            ddp = [replace(item, against_local=self._widened(item.against_local)) for item in self._ddp]
            first = self._analysed[0].evidence.step if self._analysed else 0
            judged = [step for step in self._single if step >= first or not self._differs(step)]
            single = {step: self._widened(self._single[step]) for step in judged}
            reducer = self.judged("reducer", judge_reducer, ddp, known) if ddp else []
            found += reducer or self.judged("reducer", judge_compiled, self._compiled, known)
            if self._first_local:
                found += self.judged("parity", judge_samples, self._first_local, differs=known.gradients_differ)
            found += self.judged("parity", judge_draws, self._draws)
            found += self._comparable(self.judged("parity", judge_single_process, single, self.analysis, known), known)
            if self._ddp:
                start = [item.parameters for item in self.wrapped]
                unequal = bool(reducer) or "reducer" in self._unjudged
                found += self.judged("reducer", judge_state, self._ddp, known, gradients_differ=unequal, start=start)
                found += self.judged("reducer", judge_loop, self._ddp, unequal=unequal) if known.wrapper.is_ddp else []
                found += self.judged("reducer", judge_optimizer, self.wrapped, self._ddp, self.names)
            if self.error is None:
                found += self.judged("parity", judge_nothing_compared, self._norms)
        if any(item.compiles for item in self.local):
            self.notes.append(tell_compiled(self._compiled))
            found, before = list(map(without_prefix, found)), frozenset(map(without_prefix, before))
        self._after_steps = frozenset(found) - before
        self.findings, self._came_with = found, []
        if pairs := self.judged("", lambda: [merged_with(found)]):
            self.findings, self._came_with = pairs[0]

    def _comparable(self, found: list[Finding], known: JudgeContext) -> list[Finding]:
        """Without what no pattern explains, where samples drew numbers that no two runs can share: they may be it."""
        kept = [finding for finding in found if finding.code != "DDP312"]
        local = known.local
        if not (local.drew_from or local.choices) or len(kept) == len(found):
            return found
        self.unshared = (
            f"the forward draws from {' and '.join(local.drew_from)}, and no two runs can share those numbers sample "
            "by sample"
            if local.drew_from
            else f"the forward chooses by random numbers ({local.choices[0]}), and each rank among its own samples"
        )
        beyond = {step for step in self._single if self._differs(step)}
        self._parity = [entry for entry in self._parity if entry.reference == "local" or entry.step not in beyond]
        return kept

    def _decisive_choices(self) -> tuple[str, ...]:
        """What the step that was looked at chose at random, unless steps without differ as well, or may do so."""
        analysed = self._analysed or self.local
        found = self._choices.get(analysed[0].evidence.step, ()) if analysed else ()
        equal = any(not self._differs(step) for step in self._single if not self._choices.get(step))
        carried = any(call.carries_gradient for item in analysed for call in item.forward_calls)
        return found if equal or not carried else ()

    def _differs(self, step: int) -> bool:
        return any(difference.bad for difference in self._widened(self._single[step]))

    def _widened(self, differences: Sequence[Difference]) -> tuple[Difference, ...]:
        """The same with room for what the step differs from itself (kernels that add up in no fixed order)."""
        return tuple(replace(item, tolerance=self._room(item.name, item.tolerance)) for item in differences)

    def _room(self, name: str, tolerance: float) -> float:
        return max(tolerance, _NOISE_MULTIPLE * self._noise.get(name, 0.0))

    # Showing

    def report(self, *, select: Sequence[str] = (), ignore: Sequence[str] = ()) -> Report:
        """What has been gathered, as a report."""
        asked = self.asked
        kept = select_findings(self.findings, select=select, ignore=ignore)
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
                "notes": list(dict.fromkeys(self.notes)),
            },
            checks=tuple(self._line(heading, kept, select, ignore) for heading in HEADINGS),
            findings=kept,
            ignored=tuple(sorted(finding.code for finding in self.findings if finding not in kept)),
            parity=tuple(
                sorted(self._told_entries(), key=lambda entry: (entry.step, entry.reference, entry.parameter))
            ),
            timing={name: round(seconds, 4) for name, seconds in self.timing.items()},
            error=self.error or next(iter(self.bugs), None),
        )
        return limited(report)

    def _line(
        self, heading: Heading, kept: Sequence[Finding], select: Sequence[str], ignore: Sequence[str]
    ) -> CheckResult:
        told = [Told(finding, finding) for finding in self.findings]
        told += [Told(finding, cause) for finding, cause in self._came_with]
        here = [item for item in told if self._heading_of(item.finding) == heading.name]
        return check_line(
            heading,
            self._comparison(heading.name),
            here,
            kept=frozenset(kept),
            asked=is_asked(heading, select, ignore),
            seconds=round(self.timing.get(heading.name, 0.0), 4),
            stopped=self._why_stopped(heading.name, kept),
        )

    def _why_stopped(self, name: str, kept: Sequence[Finding]) -> str:
        """Why one of the checks has come to no verdict; empty where it has."""
        if self.error is not None and self._at == name:  # where a finding tells it, that is enough
            return join_names([f.code for f in kept if f.code.startswith(_ENDINGS)], most=5) or self.error.message
        return "not judged, since ddpcheck itself failed" if name in self._unjudged else ""

    def _heading_of(self, finding: Finding) -> str:
        """The check that gave `finding`; causes have gathered evidence since."""
        plain = replace(finding, evidence=())
        same = (plain == replace(other, evidence=(), severity=finding.severity) for other in self._after_steps)
        return heading_of(finding.code, after_steps=any(same))

    def _comparison(self, name: str) -> Comparison:
        """What one of the checks has compared."""
        if name not in self.timing and not (name == "reducer" and self.ddp_skipped):
            return Comparison(lacking=self._why_not_reached())
        several = self.asked.world_size > 1
        if name == "model":
            return Comparison("built on every rank" if several else "built on one rank")
        if name in ("consistency", "wrapping"):
            built, wrapped = "parameters, buffers and modules", "values, options and optimizers"
            what = built if name == "consistency" else wrapped
            return Comparison(
                f"{what} are the same on every rank" if several else "one rank, so that nothing can differ"
            )
        if name == "parameters":
            return self._part_taken()
        reference = "local" if name == "reducer" else "single-process"
        tally = Tally.of(entry for entry in self._entries() if entry.reference == reference)
        hook = self._facts.comm_hook if name == "reducer" else ""
        if hook and tally.untold and not self._why_not_compared(name, tally.steps):
            return Comparison(tally.compressed(hook, self.asked.steps), differing=tally.differing(self.asked.steps))
        what = "the average of the ranks' own, and each other" if several else "those without the wrapper"
        what = what if name == "reducer" else "those of the global batch in a single process"
        return Comparison(
            tally.equal(what, self.asked.steps) if tally.held else "",
            tally.vacuous() or self._why_not_compared(name, tally.steps),
            tally.differing(self.asked.steps),
        )

    def _part_taken(self) -> Comparison:
        """Which parameters take part in the loss."""
        steps = sorted({item.step for item in self._evidence})
        if not steps:
            return Comparison(lacking=self._why_not_reached())
        states = [item.states for item in self._evidence]
        names = states[0]
        absent = [name for name in names if any(state.get(name) in ("missing", "lost") for state in states)]
        where = " on every rank" if self.asked.world_size > 1 else ""
        when = counted(len(steps), "step")
        every = "every parameter" if len(names) == len(self.wrapped[0].parameters) else "every trainable parameter"
        text = f"{every} takes part, in {when}{where}"
        if absent:
            text = f"{len(names) - len(absent)} of {len(names)} parameters take part in each of {when}{where}"
            if self._facts.find_unused_parameters:
                text += ", and find_unused_parameters=True allows for the rest"
        return Comparison(text, "" if len(steps) == self.asked.steps else self._why_not_reached())

    def _why_not_compared(self, name: str, steps: Sequence[int]) -> str:
        """Why not every step was compared, in one of the checks of gradients; empty where all were."""
        if self.withheld:
            return "DDP308: the same step run twice differs from itself, so comparisons mean nothing"
        if len(steps) == self.asked.steps:
            return ""
        if name == "reducer":
            return self.ddp_skipped or self._why_not_reached()
        apart = (
            "the ranks' parameters differ, so no single process can stand for all of them" if self.ranks_apart else ""
        )
        return self.unshared or self.single_skipped or apart or self._why_not_reached()

    def _why_not_reached(self) -> str:
        return self.rest_skipped or "not reached"

    def _told_entries(self) -> list[ParityEntry]:
        """Without those with a reference where only zeros were compared."""
        entries = self._entries()
        empty = [
            reference
            for reference in ("local", "single-process")
            if Tally.of(entry for entry in entries if entry.reference == reference).only_zeros
        ]
        return [entry for entry in entries if entry.reference not in empty]

    def _entries(self) -> list[ParityEntry]:
        """The comparisons of gradients that mean something."""
        if self.withheld:
            return []
        return [
            replace(
                entry, parameter=plain_name(entry.parameter), tolerance=self._room(entry.parameter, entry.tolerance)
            )
            for entry in self._parity
        ]
