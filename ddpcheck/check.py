"""`check(recipe)`: orders the checks, runs them on real ranks, and gathers what they find in a `Report`.

This module is light: torch is only imported on the ranks, and by a caller who builds a `Recipe`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpcheck import __version__
from ddpcheck.anomalous import judge_parameters, judge_uninitialised, zero_everywhere
from ddpcheck.collectives import DeadlockWatch, judge_collectives, judge_failure, read_log
from ddpcheck.consistency import (
    differing_names,
    judge_changes,
    judge_descriptions,
    judge_options,
    judge_values_after_wrapping,
)
from ddpcheck.errors import EXIT_HANG, EXIT_TARGET, DdpcheckError, HangError, RankError, TargetError, UsageError
from ddpcheck.evidence import (
    Built,
    DdpStepEvidence,
    Difference,
    LocalStep,
    ShardAnalysis,
    SingleStep,
    StepEvidence,
    Wrapped,
    WrapperFacts,
)
from ddpcheck.findings import (
    CheckResult,
    CheckStatus,
    Finding,
    ParityEntry,
    Report,
    ReportError,
    Severity,
    select_findings,
)
from ddpcheck.harness import Pending, World
from ddpcheck.parity import (
    Circumstances,
    judge_nothing_compared,
    judge_reducer,
    judge_repeat,
    judge_single_process,
    judge_state,
    judge_wrapper_error,
    merge_causes,
)
from ddpcheck.target import find_file, is_path, split_target
from ddpcheck.wording import Names, listed

if TYPE_CHECKING:
    from ddpcheck.recipe import Recipe

_NO_GROUP = ("process group", "init_process_group", "not been initialized")


def check(
    target: Recipe | str,
    *,
    world_size: int = 2,
    backend: str | None = None,
    device: str = "cpu",
    steps: int = 3,
    timeout: float = 30.0,
    seed: int = 0,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Check a recipe on `world_size` real ranks with the real DDP reducer.

    Args:
        target: A `Recipe`, or a TARGET ("path/to/file.py:attr"), which is loaded on the ranks and not here.
        world_size: Number of ranks.
        backend: "gloo" or "nccl"; default: nccl where every rank has a GPU of its own, else gloo.
        device: "cpu" or "cuda".
        steps: Training steps to run.
        timeout: Seconds that one phase of the check may take before it counts as a hang.
        seed: Of all random numbers.
        select: Codes, prefixes or names of the rules to report; default: all.
        ignore: Those not to report.
        progress: Called with a few words at the beginning of each phase.

    Returns:
        The report. A target that fails, or hangs, is in `Report.error`; what was found before is not lost.

    Raises:
        UsageError: An argument is wrong, or `target` names no recipe.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= 10_000:
        raise UsageError(f"steps must be a number from 1 to 10000, not {steps!r}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UsageError(f"seed must be a whole number, not {seed!r}")
    if isinstance(target, str) and is_path(place := split_target(target)[0]):
        find_file(place)
    gathered = _Check(
        target=target,
        world_size=world_size,
        backend=backend or _default_backend(device, world_size),
        device=device,
        steps=steps,
        timeout=timeout,
        seed=seed,
        progress=progress or (lambda _text: None),
    )
    gathered.run()
    return gathered.report(select=select, ignore=ignore)


def _default_backend(device: str, world_size: int) -> str:
    if device != "cuda":
        return "gloo"
    import torch

    return "nccl" if isinstance(world_size, int) and 0 < world_size <= torch.cuda.device_count() else "gloo"


def _on_rank(module: str, function: str, *args: Any) -> Any:
    """Call a function of ddpcheck on a rank; named by strings, so that the caller need not import torch."""
    return getattr(importlib.import_module(f"ddpcheck.{module}"), function)(*args)


class _Stopped(Exception):
    """The rest of the check cannot be run; the reason is in the gathered evidence already."""


@dataclasses.dataclass
class _Check:
    """One check under way: what was asked, and what has been gathered so far."""

    target: Recipe | str
    world_size: int
    backend: str
    device: str
    steps: int
    timeout: float
    seed: int
    progress: Callable[[str], None]

    checks: list[CheckResult] = dataclasses.field(default_factory=list)
    findings: list[Finding] = dataclasses.field(default_factory=list)
    parity: list[ParityEntry] = dataclasses.field(default_factory=list)
    timing: dict[str, float] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    error: ReportError | None = None

    evidence: list[StepEvidence] = dataclasses.field(default_factory=list)
    ddp_evidence: list[DdpStepEvidence] = dataclasses.field(default_factory=list)
    against_single: dict[int, tuple[Difference, ...]] = dataclasses.field(default_factory=dict)
    norms: dict[int, float] = dataclasses.field(default_factory=dict)
    analysis: ShardAnalysis | None = None
    wrapped: Sequence[Wrapped] = ()
    local: Sequence[LocalStep] = ()
    names: Names = dataclasses.field(default_factory=Names)
    awake: frozenset[str] = frozenset()
    withheld: bool = False
    ddp_skipped: str = ""
    single_skipped: str = ""

    # Running

    def run(self) -> None:
        """Run all checks, whatever happens on the way."""
        begun = time.perf_counter()
        with contextlib.ExitStack() as stack:
            try:
                with self._timed("start"):
                    self.progress(f"starting {self.world_size} ranks")
                    self.world = stack.enter_context(self._make_world(self.world_size, group=True))
                    self.single = stack.enter_context(self._make_world(1, group=False))
                self._run_phases()
            except _Stopped:
                pass
            except RankError as error:
                self._fail(error)
            self._judge_all()
        self.timing["total"] = time.perf_counter() - begun

    def _make_world(self, world_size: int, *, group: bool) -> World:
        return World(
            world_size,
            backend=self.backend if group else "gloo",
            device=self.device,
            timeout=self.timeout,
            process_group=group,
            watch=DeadlockWatch() if group else None,
        )

    def _run_phases(self) -> None:
        single = self._start(self.single, "reference", "start", self.target, self.seed)
        with self._check("model", "loading the target and building the model"):
            built: list[Built] = self._all("session", "build", self.target, self.seed)
            if not any(item.trainable for item in built):
                raise TargetError("no parameter of the model requires grad, so there is nothing that DDP could do")
            self._settle_single(single)
        with self._check("consistency", "comparing the modules of the ranks"):
            self._check_before_wrapping(built)
        with self._check("wrapping", "wrapping the model"):
            self.wrapped = self._all("session", "wrap")
            self._check_after_wrapping()
        for step in range(self.steps):
            self._run_step(step)
        self._look_again()
        self.notes += self._all("session", "notes")[0]

    def _check_before_wrapping(self, built: Sequence[Built]) -> None:
        found = judge_uninitialised([item.uninitialised for item in built])
        if len({item.digest for item in built}) > 1:
            found += judge_descriptions(self._all("session", "description"))
        found += judge_options("DDP221", self._all("session", "option_digest"), "What the wrapper is told")
        self._locate(found)
        self.findings += found
        stopping = [f for f in found if f.code not in ("DDP216", "DDP222") and f.severity is Severity.ERROR]
        if stopping:
            self._skip_rest(f"{stopping[0].code}: DDP would stop, hang or pair up the wrong tensors")

    def _check_after_wrapping(self) -> None:
        facts = self.wrapped[0].facts
        found = judge_options("DDP221", [item.options for item in self.wrapped], "The wrapper")
        found += judge_changes([item.changed for item in self.wrapped])
        found += judge_options("DDP223", [item.optimizer for item in self.wrapped], "The optimizer")
        found += judge_values_after_wrapping(
            [{k: v for k, v in item.parameters.items() if k not in item.facts.ignored} for item in self.wrapped],
            [{k: v for k, v in item.buffers.items() if k not in item.facts.ignored} for item in self.wrapped],
        )
        self._locate(found)
        self.findings += found
        if not facts.is_ddp:
            self.notes.append(f"the wrapper is a {self.wrapped[0].wrapper}, which is no DistributedDataParallel")
        if any(finding.code == "DDP221" and finding.severity is Severity.ERROR for finding in found):
            self.ddp_skipped = "DDP221: the ranks' wrappers would not work together"
        named = list(self.wrapped[0].parameters)
        self.names = Names(
            aliases=self._all("session", "aliases")[0],
            locations=self.world.run(_on_rank, "session", "locations", [*named, *self.wrapped[0].buffers])[0],
        )

    def _run_step(self, step: int) -> None:
        words = f"step {step + 1} of {self.steps}"
        with self._check("parameters", f"{words}: each rank by itself"):
            self.local = self._all("session", "local_step", step)
            self.evidence += [item.evidence for item in self.local]
            self._check_in_step(step)
            draws = any(item.drew for item in self.local)
            if not self.single_skipped:
                self._all("session", "save_state", step, self.world.directory)
        files = [self.world.directory / f"state-{step}.pt", self.world.directory / f"averaged-{step}.pt"]
        pending = None
        if not self.single_skipped:
            pending = self._start(self.single, "reference", "run_step", step, files[0])
        with self._check("parity", f"{words}: averaging"):
            self._all("session", "average", step, None if draws else self.world.directory)
        self._decide_on_ddp(step)
        repeat = False
        if self.ddp_skipped:
            with self._check("parity", f"{words}: optimizer"):
                self._all("session", "local_update", step)
        else:
            repeat = self._run_ddp(step, words)
        if pending is not None and (result := self._settle_single(pending)) is not None:
            with self._check("parity", f"{words}: the single process"):
                repeat |= self._compare_with_single(step, result, draws, files)
        if repeat and self.analysis_step is None:
            self._check_repeatable(step)
        for file in files:
            file.unlink(missing_ok=True)

    analysis_step: int | None = None

    def _check_in_step(self, step: int) -> None:
        """What must hold before anything of ours relies on the ranks being in step."""
        if len({item.calls for item in self.local}) > 1 or self._logs_differ():
            mismatch = judge_collectives(self._logs())
            if mismatch:
                self.findings += mismatch
                self._skip_rest("DDP403: the ranks are out of step")
        self._check_batch([item.batch for item in self.local], step)

    def _logs_differ(self) -> bool:
        return any(item.calls for item in self.local) and bool(judge_collectives(self._logs()))

    def _check_batch(self, batches: Sequence[tuple[int, ...]], step: int) -> None:
        if len(set(batches)) > 1:
            raise TargetError(
                f"batch({step}) is not the same on every call: two processes got different values for the same step; "
                "make it depend on step and on seeded generators only"
            )

    def _decide_on_ddp(self, step: int) -> None:
        """Whether the wrapper can be used in this step, or would raise, hang or abort."""
        if self.ddp_skipped:
            return
        facts = self.wrapped[0].facts
        now = [item for item in self.evidence if item.step == step]
        blocking = judge_parameters(now, facts, self.names)
        codes = sorted({f.code for f in blocking if f.severity is Severity.ERROR} & _STOPS_DDP)
        if facts.is_ddp and facts.tolerates_unused:
            codes = [code for code in codes if code not in ("DDP103",)]
        if facts.is_ddp and codes:
            self.ddp_skipped = f"not run from step {step} on: the finding on parameters would make DDP raise or hang"

    def _run_ddp(self, step: int, words: str) -> bool:
        try:
            with self._check("reducer", f"{words}: through the wrapper"):
                evidence = self._all("session", "ddp_step", step)
        except RankError as error:
            found = judge_wrapper_error(error, self._circumstances()) if not isinstance(error, HangError) else []
            if not found:
                raise
            self.findings += found
            self._skip_rest(f"{found[0].code}: the wrapper raised")
        self.ddp_evidence += evidence
        for difference in evidence[0].against_local:
            self._note_parity(step, "local", difference)
        return bool(judge_reducer(evidence, self._circumstances()))

    def _compare_with_single(self, step: int, result: SingleStep, draws: bool, files: Sequence[Path]) -> bool:
        self._check_batch([self.local[0].batch, result.batch, *([result.again] if result.again else [])], step)
        if result.double_trouble and not any("float64" in note for note in self.notes):
            self.notes.append(f"no float64 run to measure rounding with: {result.double_trouble}")
        if draws:
            self._all("session", "quiet_step", step)
            self._all("session", "average", step, self.world.directory)
        self.norms[step] = max(result.norm, max(item.norm for item in self.local))
        trained = list(self.local[0].evidence.states)
        pending = self._start(self.single, "reference", "compare_with", files[1], trained)
        differences = self._settle_single(pending)
        if differences is None:
            return False
        self.against_single[step] = differences
        for difference in differences:
            self._note_parity(step, "single-process", difference)
        if not any(difference.bad for difference in differences):
            return False
        if self.analysis is None:
            pending = self._start(self.single, "reference", "analyse", step, files[1], self.world_size)
            self.analysis = self._settle_single(pending)
        return True

    def _check_repeatable(self, step: int) -> None:
        self.analysis_step = step
        with self._check("parity", "running the step again"):
            differences = self._all("session", "repeat_step", step)
        found = judge_repeat(dict(enumerate(differences)), step)
        self.findings += found
        self.withheld = bool(found)

    def _look_again(self) -> None:
        zero = zero_everywhere(self.evidence)
        if zero and self.norms and any(self.norms.values()):
            with self._check("parameters", "looking again at zero gradients"):
                self.awake = frozenset().union(*self._all("session", "wake", zero, self.steps - 1))

    # Ranks

    def _start(self, world: World, module: str, function: str, *args: Any) -> Pending:
        if module == "reference" and function == "start" or function == "build":
            target, seed = args
            return world.start(_load_and_call, module, function, target, seed)
        return world.start(_on_rank, module, function, *args)

    def _all(self, module: str, function: str, *args: Any) -> list[Any]:
        return self._start(self.world, module, function, *args).result()

    def _settle_single(self, pending: Pending) -> Any:
        """The result of the single process, or None when it cannot be had; then the reason is noted."""
        try:
            return pending.result()[0]
        except RankError as error:
            first = error.first
            if first is not None and isinstance(first.exception, UsageError):
                raise
            said = str(error.first.message if error.first else error).removeprefix("rank 0 ")
            if any(word in said for word in _NO_GROUP):
                said = (
                    "the model or the loss needs a process group; guard it with torch.distributed.is_initialized() "
                    f"to have it compared with a single process ({said})"
                )
            self.single_skipped = f"the single process {said}"
            return None

    def _logs(self) -> list[Any]:
        return [read_log(self.world.directory, rank) for rank in range(self.world_size)]

    # Bookkeeping

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.timing[name] = self.timing.get(name, 0.0) + time.perf_counter() - begun

    @contextlib.contextmanager
    def _check(self, name: str, words: str) -> Iterator[None]:
        self.progress(words)
        self.at = name
        with self._timed(name):
            try:
                yield
            except TargetError as error:
                self.error = ReportError(str(error), EXIT_TARGET, error.detail)
                raise _Stopped from error

    at: str = "start"

    def _skip_rest(self, reason: str) -> None:
        self.rest_skipped = reason
        raise _Stopped

    rest_skipped: str = ""

    def _fail(self, error: RankError) -> None:
        """A world failed: keep the root cause, and why the rest was not checked."""
        first = error.first
        if first is not None and isinstance(first.exception, UsageError):
            raise first.exception
        found = judge_failure(error, self._logs(), self.world_size)
        if first is not None and isinstance(first.exception, DdpcheckError):
            everywhere = len({f.rank for f in error.failures if f.kind == "raised"}) == self.world_size
            self.findings += [] if everywhere else found
            where = "" if everywhere else f"rank {first.rank}: "
            self.error = ReportError(f"{where}{first.exception}", EXIT_TARGET, first.exception.detail)
        else:
            self.findings += found
            stuck = isinstance(error, HangError) or any(finding.code == "DDP403" for finding in found)
            self.error = ReportError(str(error), EXIT_HANG if stuck else EXIT_TARGET, error.detail)

    def _note_parity(self, step: int, reference: str, difference: Difference) -> None:
        self.parity.append(ParityEntry(step, difference.name, reference, difference.error, difference.tolerance))

    def _locate(self, found: list[Finding]) -> None:
        """Fill in the lines that made the first subject of each finding."""
        subjects = sorted({finding.subjects[0] for finding in found if finding.location is None and finding.subjects})
        if not subjects:
            return
        by_rank = self.world.run(_on_rank, "session", "locations", subjects)
        for index, finding in enumerate(found):
            where = next((of_rank[finding.subjects[0]] for of_rank in by_rank if finding.subjects[0] in of_rank), None)
            if finding.location is None and where is not None:
                found[index] = dataclasses.replace(finding, location=where)

    def _circumstances(self) -> Circumstances:
        return Circumstances(
            names=self.names,
            wrapper=self.wrapped[0].facts if self.wrapped else WrapperFacts(),
            world_size=self.world_size,
            shard_sizes=tuple(item.samples for item in self.local),
            hooked=self.wrapped[0].hooked if self.wrapped else (),
            collectives=self.local[0].blind_calls if self.local else (),
            module_locations=self._module_locations(),
            local_buffers=tuple(differing_names([item.buffers for item in self.local])) if self.local else (),
            broadcasts_buffers=bool(self.wrapped) and self.wrapped[0].broadcasts_buffers,
        )

    def _module_locations(self) -> dict[str, Any]:
        module = self.analysis.module if self.analysis else ""
        if not module or self.world.failed:
            return {}
        found: dict[str, Any] = self.world.run(_on_rank, "session", "locations", [module])[0]
        return found

    # Judging

    def _judge_all(self) -> None:
        """Turn everything that was gathered into findings, whatever it was that stopped the check."""
        known = self._circumstances()
        if self.evidence:
            self.findings += judge_parameters(self.evidence, known.wrapper, self.names, awake=self.awake)
        found: list[Finding] = []
        if not self.withheld:
            reducer = judge_reducer(self.ddp_evidence, known) if self.ddp_evidence else []
            found += reducer
            found += judge_single_process(self.against_single, self.analysis, known)
            if self.ddp_evidence:
                found += judge_state(self.ddp_evidence, known, gradients_differ=bool(reducer))
            if self.error is None:
                found += judge_nothing_compared(self.norms)
        self.findings = merge_causes([*self.findings, *found])

    def report(self, *, select: Sequence[str], ignore: Sequence[str]) -> Report:
        """What has been gathered, as a report."""
        return Report(
            target=self.target if isinstance(self.target, str) else "recipe",
            tool={"name": "ddpcheck", "version": __version__},
            environment={
                "python": platform.python_version(),
                "torch": metadata.version("torch"),
                "platform": platform.system().lower(),
            },
            world={
                "world_size": self.world_size,
                "backend": self.backend,
                "device": self.device,
                "steps": self.steps,
                "seed": self.seed,
                "timeout": self.timeout,
                "notes": list(dict.fromkeys(self.notes)),
            },
            checks=tuple(self._results()),
            findings=select_findings(self.findings, select=select, ignore=ignore),
            parity=tuple(sorted(self.parity, key=lambda entry: (entry.step, entry.reference, entry.parameter))),
            timing=self.timing,
            error=self.error,
        )

    def _results(self) -> Iterator[CheckResult]:
        reached = list(self.timing)
        for name, prefixes, done in (
            ("model", (), "built on every rank"),
            ("consistency", ("DDP20", "DDP21", "DDP222", "DDP110"), "parameters, buffers and modules are the same on every rank"),
            ("wrapping", ("DDP208", "DDP221", "DDP223"), "values, options and optimizers are the same on every rank"),
            ("parameters", ("DDP10", "DDP112", "DDP406"), f"in {self._counted(self.evidence)} steps, on each rank by itself"),
            ("reducer", ("DDP301", "DDP302", "DDP111", "DDP501", "DDP306", "DDP311"), f"{self._compared('local')} gradients compared with the ranks' own average"),
            ("parity", ("DDP303", "DDP304", "DDP305", "DDP307", "DDP308", "DDP309", "DDP310"), f"{self._compared('single-process')} gradients compared with the global batch in a single process"),
        ):  # fmt: skip
            found = [f for f in self.findings if f.code.startswith(prefixes)] if prefixes else []
            status: CheckStatus = "passed"
            detail = done
            if name not in reached or (name == "reducer" and not self.ddp_evidence and not found):
                status = "skipped"
                stop = self.rest_skipped or (self.error.message if self.error else "")
                detail = (self.ddp_skipped if name == "reducer" else "") or stop or "not reached"
            elif self.error is not None and self.at == name:
                status, detail = "error", self.error.message
            elif name == "parity" and self.single_skipped and not found:
                status, detail = "skipped", self.single_skipped
            elif any(f.severity is Severity.ERROR for f in found):
                status = "failed"
            if found and status == "passed":
                detail += f"; {listed([f.code for f in found])}"
            elif found and status == "failed":
                detail = listed(list(dict.fromkeys(f.code for f in found)))
            yield CheckResult(name, status, round(self.timing.get(name, 0.0), 4), detail)

    @staticmethod
    def _counted(evidence: Sequence[StepEvidence]) -> int:
        return len({item.step for item in evidence})

    def _compared(self, reference: str) -> int:
        return sum(entry.reference == reference for entry in self.parity)


_STOPS_DDP = frozenset({"DDP101", "DDP102", "DDP103", "DDP104", "DDP105", "DDP112", "DDP406"})


def _load_and_call(module: str, function: str, target: Any, seed: int) -> Any:
    return getattr(importlib.import_module(f"ddpcheck.{module}"), function)(target, seed=seed)
