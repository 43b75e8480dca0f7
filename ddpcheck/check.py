"""`check(recipe)`: orders the checks, runs them on real ranks, and gathers what they find in a `Report`.

This module is light: torch is only imported on the ranks, and by a caller who builds a `Recipe`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ddpcheck.anomalous import judge_uninitialised
from ddpcheck.collectives import read_log
from ddpcheck.consistency import judge_descriptions, judge_values_after_wrapping
from ddpcheck.errors import (
    EXIT_HANG,
    EXIT_TARGET,
    EXIT_USAGE,
    DdpcheckError,
    HangError,
    OptionsDifferError,
    RankError,
    TargetError,
    UsageError,
)
from ddpcheck.evidence import Built, Call, LocalStep, PathEnd, Wrapped
from ddpcheck.findings import Finding, Location, Report, ReportError, Severity
from ddpcheck.harness import Pending, World
from ddpcheck.lockstep import (
    DeadlockWatch,
    judge_collectives,
    judge_empty_shards,
    judge_failure,
    judge_packing,
)
from ddpcheck.loop import judge_values_changed
from ddpcheck.outcome import Asked, Outcome
from ddpcheck.program import judge_batches, judge_changes, judge_options
from ddpcheck.target import find_file, is_path, split_target
from ddpcheck.wording import Names

if TYPE_CHECKING:
    from ddpcheck.recipe import Recipe

_OUR_OWN_PLACES = ("beginning", "comparison", "averaging local gradients")
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
    preload: Sequence[str] = (),
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
        preload: Modules that are imported once, before ranks are forked; see `World`.
        select: Codes, prefixes or names of the rules to report; default: all.
        ignore: Those not to report.
        progress: Called with a few words at the beginning of each phase.

    Returns:
        The report. A target that fails, or hangs, is in `Report.error`; what was found before is not lost.

    Raises:
        UsageError: An argument is wrong, or `target` names no recipe.
    """
    asked = ask(
        target,
        world_size=world_size,
        backend=backend,
        device=device,
        steps=steps,
        timeout=timeout,
        seed=seed,
        preload=preload,
    )
    outcome = CheckRun(target, asked, progress=progress or (lambda _text: None)).run()
    return outcome.report(select=select, ignore=ignore)


def ask(
    target: Recipe | str,
    *,
    world_size: int,
    backend: str | None,
    device: str,
    steps: int,
    timeout: float,
    seed: int,
    preload: Sequence[str],
) -> Asked:
    """What was asked for, with the defaults that depend on the machine filled in.

    Raises:
        UsageError: An argument is wrong, or `target` names no file.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= 10_000:
        raise UsageError(f"steps must be a number from 1 to 10000, not {steps!r}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UsageError(f"seed must be a whole number, not {seed!r}")
    if isinstance(target, str) and is_path(place := split_target(target)[0]):
        find_file(place)
    return Asked(
        target=target if isinstance(target, str) else "recipe",
        world_size=world_size,
        backend=backend or _default_backend(device, world_size),
        device=device,
        steps=steps,
        seed=seed,
        timeout=timeout,
        preload=tuple(preload),
    )


def _default_backend(device: str, world_size: int) -> str:
    if device != "cuda":
        return "gloo"
    import torch

    return "nccl" if isinstance(world_size, int) and 0 < world_size <= torch.cuda.device_count() else "gloo"


def on_rank(function: str, *args: Any) -> Any:
    """Call a function of ddpcheck on a rank; named by a string, so that the caller need not import torch."""
    module, _, name = function.rpartition(".")
    return getattr(importlib.import_module(f"ddpcheck.{module}"), name)(*args)


class Stopped(Exception):
    """The rest of the check cannot be run; the reason is in the outcome already."""


class OptionsStopped(Stopped):
    """The options that the wrapper is given differ between ranks, so that its constructor would not return."""


class CheckRun:
    """One check under way: sends the ranks through their phases, and keeps what they tell in an `Outcome`."""

    def __init__(self, target: Recipe | str, asked: Asked, *, progress: Callable[[str], None]) -> None:
        self.target = target
        self.asked = asked
        self.progress = progress
        self.outcome = Outcome(asked)
        self._alone_in_group = False
        self._single_hang = ""
        self._packing_checked = False
        self._earlier: list[tuple[Any, ...]] = [("reference.start", target, asked.seed)]

    def run(self) -> Outcome:
        """Run all checks, whatever happens on the way."""
        begun = time.perf_counter()
        with contextlib.ExitStack() as stack:
            try:
                self._start_worlds(stack)
                self._run_phases()
            except Stopped:
                pass
            except RankError as error:
                self._fail(error)
            if self._single_hang and self.outcome.error is None:
                self.outcome.error = ReportError(self._single_hang, EXIT_HANG)
            self.outcome.judge(self._locate_module())
        self.outcome.timing["total"] = time.perf_counter() - begun
        return self.outcome

    def _start_worlds(self, stack: contextlib.ExitStack) -> None:
        with self.outcome.timed("start"):
            self.progress(f"starting {self.asked.world_size} ranks")
            self.world = stack.enter_context(self._make_world(self.asked.world_size, group=True))
            self.single = stack.enter_context(self._make_world(1, group=False))
            self._worlds = stack

    def _make_world(self, world_size: int, *, group: bool) -> World:
        return World(
            world_size,
            backend=self.asked.backend if group else "gloo",
            device=self.asked.device,
            timeout=self.asked.timeout,
            process_group=group,
            preload=self.asked.preload,
            hash_seeds=group,
            watch=DeadlockWatch() if group else None,
        )

    # Phases

    def _run_phases(self) -> None:
        self._prepare()
        with self._phase("wrapping", "wrapping the model"):
            self.outcome.wrapped = self._wrap("session.wrap")
            self._check_after_wrapping(self.outcome.wrapped)
        self._run_steps()
        self.outcome.notes += self._all("session.notes")[0]

    def _prepare(self) -> None:
        """Build the model everywhere, and compare what the ranks have built."""
        building = self._start_single(*self._earlier[0])
        with self._phase("model", "loading the target and building the model"):
            built: list[Built] = self._all("session.build", self.target, self.asked.seed)
            if not any(item.trainable for item in built):
                raise TargetError("no parameter of the model requires grad, so there is nothing that DDP could do")
            self._settle_single(building)
        with self._phase("consistency", "comparing the modules of the ranks"):
            self._check_before_wrapping(built)

    def _run_steps(self) -> None:
        for step in range(self.asked.steps):
            self._run_step(step)
        self._look_again()

    def _check_before_wrapping(self, built: Sequence[Built]) -> None:
        found = judge_uninitialised([item.uninitialised for item in built])
        if len({item.digest for item in built}) > 1:
            found += judge_descriptions(self._all("session.description"))
        self._add(found)
        stopping = [f for f in found if f.code not in ("DDP216", "DDP222") and f.severity is Severity.ERROR]
        if stopping:
            self._skip_rest(f"{stopping[0].code}: DDP would stop, hang or pair up the wrong tensors")

    def _wrap(self, function: str, *args: Any) -> list[Wrapped]:
        """Wrap by `function`; options of the wrapper that differ between ranks end the check before DDP hangs."""
        try:
            return self._all(function, *args)
        except RankError as error:
            differing = next((f.exception for f in error.failures if isinstance(f.exception, OptionsDifferError)), None)
            if differing is None:
                raise
            self.outcome.findings += judge_options("DDP221", differing.options, "What the wrapper is told")
            self.outcome.rest_skipped = "DDP221: DDP would stop, hang or abort"
            raise OptionsStopped from error

    def _check_after_wrapping(self, wrapped: Sequence[Wrapped]) -> None:
        found = judge_options("DDP221", [item.options for item in wrapped], "The wrapper")
        found += judge_changes([item.changed for item in wrapped])
        found += judge_options("DDP223", [item.optimizer for item in wrapped], "The optimizer")
        found += judge_values_changed(wrapped)
        changed = {name for finding in found if finding.code == "DDP515" for name in finding.subjects}
        found += judge_values_after_wrapping(
            [{k: v for k, v in item.parameters.items() if k not in item.facts.ignored | changed} for item in wrapped],
            [{k: v for k, v in item.buffers.items() if k not in item.facts.ignored} for item in wrapped],
        )
        self._add(found)
        self.outcome.ranks_apart = any(finding.code in ("DDP208", "DDP515") for finding in found)
        self._hand_over(wrapped[0])
        if not wrapped[0].facts.is_ddp:
            self.outcome.notes.append(f"the wrapper is a {wrapped[0].wrapper}, which is no DistributedDataParallel")
        if any(finding.code == "DDP221" and finding.severity is Severity.ERROR for finding in found):
            self.outcome.ddp_skipped = "DDP221: the ranks' wrappers would not work together"
        self.outcome.names = Names(
            aliases=self._all("session.aliases")[0],
            locations=self._all("session.locations", [*wrapped[0].parameters, *wrapped[0].buffers])[0],
        )

    def _hand_over(self, wrapped: Wrapped) -> None:
        """Where `wrap` has made another module of it, the single process must have that one too."""
        if wrapped.not_handed_over:
            self.outcome.single_skipped = f"wrap makes another module, which {wrapped.not_handed_over}"
        elif wrapped.reshaped:
            self._earlier.append(("reference.adopt", self.world.directory / "module.pickle"))
            self._settle_single(self._start_single(*self._earlier[-1]))

    def _run_step(self, step: int) -> None:
        words = f"step {step + 1} of {self.asked.steps}"
        state = self.world.directory / f"state-{step}.pt"
        averaged = self.world.directory / f"averaged-{step}.pt"
        with self._phase("parameters", f"{words}: each rank by itself"):
            wanted = not self.outcome.single_skipped and not self.outcome.ranks_apart
            self._all("local.begin_step", step, state if wanted else None)
            single = self._start_single("reference.run_step", step, state) if wanted else None
            local: list[LocalStep] = self._all("local.local_step", step)
            if any("missing" in item.evidence.states.values() for item in local):
                local = [item.explained(ends) for item, ends in zip(local, self._explain(local, step), strict=True)]
            self.outcome.add_local(local)
            self._check_in_step(local)
            self._check_packing(local, step)
            self._check_batches([item.batch for item in local], step)
        with self._phase("parity", f"{words}: averaging the ranks' gradients"):
            draws = any(item.drew for item in local)
            self._all("local.average", step, None if draws else averaged)
        doubtful = self._train(step, words)
        with self._phase("parity", f"{words}: the single process"):
            if single is not None and (result := self._settle_single(single)) is not None:
                self._check_batch([local[0].batch, result.batch, result.again], step)
                self.outcome.add_single(step, result)
                if not draws or self._quieten(step, averaged):
                    doubtful |= self._compare_with_single(step, averaged)
            if self.outcome.draws_alike() and step == 0:
                self.outcome.add_draws(self._all("draws.draws", step))
            if doubtful and not self.outcome.withheld:
                self.outcome.add_repeat(step, self._all("repeat.repeat_step", step))
        self._update_alone(step, words)
        for file in (state, averaged):
            file.unlink(missing_ok=True)

    def _train(self, step: int, words: str) -> bool:
        """Go through the wrapper, where that is possible; returns whether it needs a second look."""
        self.outcome.decide_on_ddp(step)
        return False if self.outcome.ddp_skipped else self._run_ddp(step, words)

    def _update_alone(self, step: int, words: str) -> None:
        """Change the weights where the wrapper did not; after all that puts the step's first state back."""
        if self.outcome.ddp_skipped:
            with self._phase("parameters", f"{words}: the optimizer"):
                self._all("local.local_update", step)

    def _explain(self, local: Sequence[LocalStep], step: int) -> list[dict[str, PathEnd]]:
        """Why gradients are missing, by rank; nobody replays where the ranks are out of step already."""
        in_step = not (any(item.calls for item in local) and judge_collectives(self._logs()))
        return self._all("local.explain", step) if in_step else [{} for _ in local]

    def _quieten(self, step: int, averaged: Path) -> bool:
        """Average gradients without random numbers; returns whether the loss can do without."""
        trouble = next((said for said in self._all("local.quiet_step", step) if said), "")
        if trouble:
            self.outcome.single_skipped = f"not comparable with random numbers silenced: {trouble}"
            return False
        self._all("local.average", step, averaged)
        return True

    def _check_in_step(self, local: Sequence[LocalStep]) -> None:
        """Before anything of ours relies on it: the ranks must have made the same collectives."""
        mismatch = judge_collectives(self._logs()) if any(item.calls for item in local) else []
        if mismatch:
            self._add(mismatch)
            self._skip_rest("DDP403: the ranks are out of step")

    def _check_packing(self, local: Sequence[LocalStep], step: int) -> None:
        """Once, where ranks reduce vectors in forward: whether they pack them alike."""
        if self._packing_checked or not any(item.calls for item in local):
            return
        calls = [call for call in self._logs()[0] if call.place == f"step {step}: forward"]
        if any("reduce" in call.operation and call.elements > 1 for call in calls):
            self._packing_checked = True
            self._add(judge_packing(self._all("shards.packed_payloads", step)))

    def _check_batches(self, batches: Sequence[tuple[int, ...]], step: int) -> None:
        """The global batch is the same everywhere; where it is not, a rank that gets its own again is at fault."""
        if len(set(batches)) > 1 and self._all("local.batch_again", step) == list(batches):
            self._add(judge_batches(batches, step))
            self._skip_rest("DDP516: the ranks do not train on parts of one batch")
        self._check_batch(batches, step)

    def _check_batch(self, batches: Sequence[tuple[int, ...]], step: int) -> None:
        if len({batch for batch in batches if batch}) > 1:
            raise TargetError(
                f"batch({step}) is not the same on every call: two calls gave different values for the same step; "
                "make it depend on step and on seeded generators only"
            )

    def _run_ddp(self, step: int, words: str) -> bool:
        """One step through the wrapper; returns whether its result needs a second look."""
        try:
            with self._phase("reducer", f"{words}: through the wrapper"):
                return self.outcome.add_ddp(self._all("ddp.ddp_step", step))
        except RankError as error:
            found = self.outcome.judge_wrapper_failure(error)
            if not found or isinstance(error, HangError):
                raise
            self.outcome.findings += found
            self._skip_rest(f"{found[0].code}: the wrapper raised")

    def _compare_with_single(self, step: int, averaged: Path) -> bool:
        """The averaged gradients against the global batch's; returns whether they differ."""
        trained = list(self.outcome.local[0].evidence.states)
        differences = self._settle_single(self._start_single("reference.compare_with", averaged, trained))
        if differences is None or not self.outcome.add_single_differences(step, differences):
            return False
        if self.outcome.analysis is None:
            analysing = self._start_single("analysis.analyse", step, averaged, self.asked.world_size)
            if not self.outcome.add_analysis(step, self._settle_single(analysing)):
                return False
            self.outcome.held = self._all("program.program_data")
        return True

    def _look_again(self) -> None:
        asleep = self.outcome.zero_everywhere()
        if asleep:
            with self._phase("parameters", "looking again at zero gradients"):
                last = self.asked.steps - 1
                self.outcome.awake = frozenset().union(*self._all("local.wake", asleep, last))
                asleep = [name for name in asleep if name not in self.outcome.awake]
                self.outcome.zero_ends = self._all("local.why_zero", asleep, last)[0] if asleep else {}

    # Ranks

    def _all(self, function: str, *args: Any) -> list[Any]:
        return self.world.run(on_rank, f"gather.{function}", *args)

    def _start_single(self, function: str, *args: Any) -> Pending:
        self._last_single = (function, *args)
        return self.single.start(on_rank, function, *args)

    def _settle_single(self, pending: Pending) -> Any:
        """The result of the single process, or None when it cannot be had; then the reason is noted."""
        try:
            return pending.result()[0]
        except RankError as error:
            first = error.first
            if first is not None and isinstance(first.exception, UsageError):
                raise
            said = str(first.message if first else error).removeprefix("rank 0 ")
            if first is not None and "silenced" in first.place:
                self.outcome.single_skipped = f"not comparable with random numbers silenced: the single process {said}"
                return None
            if isinstance(error, HangError):
                self._single_hang = f"the single process hung: {error}"
                self.outcome.single_skipped = self._single_hang
                return None
            if not self._alone_in_group and any(words in said for words in _NO_GROUP):
                return self._retry_in_group()
            self.outcome.single_skipped = f"the single process {said}"
            return None

    def _retry_in_group(self) -> Any:
        """Models that insist on a process group get one of a single rank."""
        self._alone_in_group = True
        self.outcome.notes.append("the single process has a process group of one, since the model does not run without")
        last = self._last_single
        self.single = self._worlds.enter_context(self._make_world(1, group=False))
        for earlier in (("reference.join_alone",), *self._earlier):
            if self._settle_single(self._start_single(*earlier)) is None and self.outcome.single_skipped:
                return None
        return None if last == self._earlier[-1] else self._settle_single(self._start_single(*last))

    def _logs(self) -> list[list[Call]]:
        return [read_log(self.world.directory, rank) for rank in range(self.asked.world_size)]

    # Bookkeeping

    @contextlib.contextmanager
    def _phase(self, name: str, words: str) -> Iterator[None]:
        self.progress(words)
        with self.outcome.phase(name):
            try:
                yield
            except TargetError as error:
                self.outcome.error = ReportError(str(error), EXIT_TARGET, error.detail)
                raise Stopped from error

    def _skip_rest(self, reason: str) -> NoReturn:
        self.outcome.rest_skipped = reason
        raise Stopped

    def _fail(self, error: RankError) -> None:
        """A world failed: keep the root cause, and why the rest was not checked."""
        first = error.first
        if first is not None and isinstance(first.exception, UsageError):
            raise first.exception
        if first is not None and first.kind == "raised" and first.place.endswith(_OUR_OWN_PLACES):
            message = f"{first.message} in {first.place}, while ddpcheck itself was at work; this is a bug in ddpcheck"
            self.outcome.error = ReportError(message, EXIT_USAGE, error.detail)
            return
        if empty := judge_empty_shards(error, self.asked.world_size):
            self.outcome.findings += empty
            self.outcome.rest_skipped = f"DDP405: {error.first.exception}" if error.first else ""
            return
        found = self.outcome.judge_wrapper_failure(error)
        found = found or judge_failure(error, self._logs(), self.asked.world_size)
        if first is not None and isinstance(first.exception, DdpcheckError):
            everywhere = len({f.rank for f in error.failures if f.kind == "raised"}) == self.asked.world_size
            self.outcome.findings += [] if everywhere else found
            where = "" if everywhere else f"rank {first.rank}: "
            self.outcome.error = ReportError(f"{where}{first.exception}", EXIT_TARGET, first.exception.detail)
        else:
            self.outcome.findings += found
            stuck = isinstance(error, HangError) or any(finding.code == "DDP403" for finding in found)
            self.outcome.error = ReportError(str(error), EXIT_HANG if stuck else EXIT_TARGET, error.detail)

    def _add(self, found: Sequence[Finding]) -> None:
        """Keep findings, with the lines that made their first subjects."""
        nameless = sorted({finding.subjects[0] for finding in found if finding.location is None})
        by_rank = self._all("session.locations", nameless) if nameless else []
        for finding in found:
            where = next((lines[finding.subjects[0]] for lines in by_rank if finding.subjects[0] in lines), None)
            self.outcome.findings.append(finding if where is None else dataclasses.replace(finding, location=where))

    def _locate_module(self) -> dict[str, Location]:
        module = self.outcome.analysis.module if self.outcome.analysis else ""
        if not module or self.world.failed or self.world.closed:
            return {}
        found: dict[str, Location] = self._all("session.locations", [module])[0]
        return found
