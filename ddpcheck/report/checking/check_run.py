"""Run of a check: phases of the ranks, their order, reasons to stop."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ddpcheck.findings.errors import EXIT_HANG, DDPCheckError, HangError, OptionsDifferError, RankError, TargetError
from ddpcheck.findings.evidence.gradients import RandomNumbers, RepeatedStep, ShardAnalysis, SingleStep
from ddpcheck.findings.evidence.modules import BuiltModule, ShardedFacts, WrappedModule
from ddpcheck.findings.evidence.steps import LocalStep, NoExplanation, PathEnd, ShardedStep
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import ReportError, Severity
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.wording import Names, format_ranks, join_names
from ddpcheck.harness import RunFuture
from ddpcheck.report import calls
from ddpcheck.report.checking import judging
from ddpcheck.report.checking.check_state import CheckState, bug_error
from ddpcheck.report.checking.check_worlds import CheckStopped, CheckWorlds
from ddpcheck.rules.collectives.ddp403_collective_mismatch import judge_collectives
from ddpcheck.rules.collectives.ddp407_payload_mismatch import judge_packing
from ddpcheck.rules.collectives.timelines import make_timelines
from ddpcheck.rules.data.ddp516_rank_dependent_program_data import judge_batch_values, judge_shards
from ddpcheck.rules.gradients.reducer import NOT_COMPARED, reason_updates_not_compared
from ddpcheck.rules.loss.ddp305_loss_normalisation import judge_undefined_losses
from ddpcheck.rules.optimizers.ddp223_optimizer_options import judge_constructed_optimizers
from ddpcheck.rules.parameters.ddp107_zero_gradient_parameter import parameters_with_zero_gradients
from ddpcheck.rules.parameters.ddp110_uninitialised_parameter import judge_uninitialised
from ddpcheck.rules.replicas.ddp208_parameter_value import judge_values_before_sharding
from ddpcheck.rules.replicas.ddp221_wrapper_options import STOPPED, judge_wrapper_options
from ddpcheck.rules.replicas.ddp503_changed_after_wrapping import judge_changes
from ddpcheck.rules.replicas.ddp515_values_changed_after_wrapping import judge_values_changed
from ddpcheck.rules.replicas.descriptions import judge_descriptions, judge_layouts, judge_values_after_wrapping
from ddpcheck.rules.replicas.model_parts import describe_split, model_groups_of_recipe

_UNLIKE_REDUCTIONS = "the ranks would not make the same reductions"


class CheckRun(CheckWorlds):
    """One check, which runs its phases on the ranks in order."""

    def run(self) -> CheckState:
        """Run all phases and judge the evidence, even after a failure."""
        start = time.perf_counter()
        with contextlib.ExitStack() as stack:
            try:
                self._start_worlds(stack)
                self._run_phases()
            except CheckStopped:
                pass
            except RankError as error:
                self._fail(error)
            except DDPCheckError:
                raise
            except Exception as error:
                self.state.log.error = bug_error(error)
            if self.reference is not None:
                self.state.reuse_single_process(self.reference)
            if self.state.single.hang and self.state.log.error is None:
                self.state.log.error = ReportError(self.state.single.hang, EXIT_HANG)
            judging.judge(self.state, self._locate_module())
        self.state.log.seconds["total"] = time.perf_counter() - start
        return self.state

    # Phases

    def _run_phases(self) -> None:
        self._prepare()
        with self._phase("wrapping", "wrapping the model"):
            self.state.wrapped = self.state.without_rank_params(self._wrap())
            self._check_after_wrapping(self.state.wrapped)
        self._explained("what each program holds", None, calls.program_data.note_program_data)
        for step in range(self.asked.steps):
            self._run_step(step)
        self._examine_zero_gradients()
        self.state.log.notes += self._explained("how the ranks ran the recipe", [], calls.model_build.notes)[0]

    def _prepare(self) -> None:
        pending = None if self.reference else self._start_single(self._earlier[0])
        with self._phase("model", "loading the target and building the model"):
            built: list[BuiltModule] = self._all(calls.model_build.build, self.target, self.asked.seed)
            self.state.modules, self._large = built[0].modules, built[0].large
            if not any(item.trainable for item in built):
                raise TargetError("no parameter of the model requires grad, so there is nothing that DDP could do")
            if pending is not None:
                self._settle_single(pending)
        with self._phase("consistency", "comparing the modules of the ranks"):
            findings = judge_uninitialised([item.uninitialised for item in built])
            if len({item.digest for item in built}) > 1:
                findings += judge_descriptions(self._all(calls.model_build.description))
            self._add(findings)
            fatal = [f for f in findings if RULES[f.code].stops_ddp and f.severity is Severity.ERROR]
            if fatal:
                self._skip_rest(f"{fatal[0].code}: DDP would stop, hang or pair up the wrong tensors")

    def _wrap(self) -> list[WrappedModule]:
        """Wrap the model; stop the check before DDP hangs if ranks' wrapper options differ."""
        try:
            return self._all(self.wrap)
        except RankError as error:
            mismatch = next((f.exception for f in error.failures if isinstance(f.exception, OptionsDifferError)), None)
            if mismatch is None:
                raise
            self.state.add(judge_wrapper_options(mismatch.options, "The wrapper"))
            self._skip_rest(STOPPED)

    def _check_after_wrapping(self, wrapped: Sequence[WrappedModule]) -> None:
        facts = wrapped[0].facts
        layout_findings = judge_descriptions(self._all(calls.local_step.layout)) if facts.sharded else []
        options = judge_wrapper_options([item.options for item in wrapped], "The wrapper")
        findings = options + judge_changes([item.changes for item in wrapped])
        findings += layout_findings or judge_constructed_optimizers([item.optimizer for item in wrapped])
        initial = [item.parameters_at_construction for item in wrapped]
        changed_values = judge_values_changed(initial, [item.parameters for item in wrapped])
        findings += changed_values
        changed = {name for finding in changed_values for name in finding.subjects}
        findings += judge_values_after_wrapping(
            [{k: v for k, v in item.parameters.items() if k not in item.facts.ignored | changed} for item in wrapped],
            [{k: v for k, v in item.buffers.items() if k not in item.facts.ignored} for item in wrapped],
        )
        differing = {name for finding in findings for name in finding.subjects}
        self.state.steps.ranks_differ |= any(RULES[finding.code].values_differ for finding in findings)
        if facts.sharded:
            built = [item.facts.values_built for item in wrapped if isinstance(item.facts, ShardedFacts)]
            before = judge_values_before_sharding(built, wrapped[0].parameters)
            findings += [finding for finding in before if differing.isdisjoint(finding.subjects)]
            self.state.log.notes += [] if facts.named != "fully_shard" else [NOT_COMPARED]
        if models := self.state.models:
            self.state.log.notes.append(describe_split(models))
        self._add(findings)
        if layout_findings:
            self._skip_rest(f"{layout_findings[0].code}: {_UNLIKE_REDUCTIONS}")
        self._send_replaced_module(wrapped[0])
        if not (facts.is_ddp or facts.sharded):
            self.state.log.notes.append(f"the wrapper is a {wrapped[0].wrapper}, not a DistributedDataParallel")
        if any(finding.severity is Severity.ERROR for finding in options):
            self.state.steps.ddp_skipped = f"{options[0].code}: the ranks' wrappers would not work together"
        self.state.names = Names(
            aliases=self._explained("which parameters are tied", {}, calls.model_build.aliases)[0],
            locations=self._lines_of([*wrapped[0].parameters, *wrapped[0].buffers])[0],
        )

    def _send_replaced_module(self, wrapped: WrappedModule) -> None:
        if wrapped.transfer_error:
            self.state.single.skipped = f"wrap makes another module, which {wrapped.transfer_error}"
        elif wrapped.replaces_module and self.reference is None:
            self._earlier.append(partial(calls.single_process.adopt, self.world.directory / "module.pickle"))
            self._settle_single(self._start_single(self._earlier[-1]))

    def _run_step(self, step: int) -> None:
        words = f"step {step + 1} of {self.asked.steps}"
        state, averaged = (self.world.directory / f"{name}-{step}.pt" for name in ("state", "averaged"))
        with self._phase("parameters", f"{words}: each rank alone"):
            needs_single = not (self.reference or self.state.single.skipped or self.state.steps.ranks_differ)
            saves = needs_single or self._large
            self._all(calls.local_step.begin_step, step, state if saves else None, shared=self._can_share(step))
            shutil.rmtree(self.world.directory / f"state-{step - 1}.pt", ignore_errors=True)
            run_single = partial(self._start_single, partial(calls.single_process.run_step, step, state))
            future = run_single() if needs_single and not self._large else None
            local = self._local_step(step, (lambda: future or run_single()) if needs_single else None)
            if any("missing" in item.evidence.states.values() for item in local):
                local = [item.explained(ends) for item, ends in zip(local, self._explain(local, step), strict=True)]
            self.state.steps.add_local(local, self.state.per_model(local))
            if findings := judge_shards(local, self.state.models):
                self._add(findings)
                self._skip_rest(f"{findings[0].code}: ranks that compute one model together have different samples")
            self._check_split_by_hand(local)
            self._check_collectives(is_needed=any(item.calls for item in local))
            self._check_layout(local, step)
            self._check_packing(local, step)
            self._check_batches([item.batch for item in local], step)
        with self._phase("parity", f"{words}: averaging the ranks' gradients"):
            draws = any(item.random.libraries for item in local)
            saves = self._large or not draws
            self._all(calls.local_step.average, step, averaged if saves else None, shared=self._one_machine)
        is_wrong = self._train(step, words)
        with self._phase("parity", f"{words}: the single process"):
            result = self._settle_single(future or run_single()) if needs_single else None
            if isinstance(result, str):
                self.state.single.skipped = f"in a single process, the recipe builds a different model: {result}"
            elif result is not None:
                self._check_batch([local[0].batch, result.batch, result.batch_again], step)
                self.state.add_single(step, result)
                compare = partial(self._compare_random, numbers=result.numbers) if draws else self._compare_with_single
                is_wrong |= compare(step, averaged)
            if self.state.steps.generators_equal() and step == 0:
                topic = "whether the ranks draw the same numbers"
                self.state.single.draws = self._explained(topic, [], calls.repeated_step.draws, step)
                self.state.single.draws = self.state.per_model(self.state.single.draws)
            if is_wrong and not self.state.repeats.differ:
                topic = f"whether step {step} gives the same gradients again"
                repeated = self._explained(topic, RepeatedStep(), calls.repeated_step.repeat_step, step)
                judging.withhold_if_noisy(self.state, step, repeated)
        if self.state.steps.ddp_skipped:  # update after all phases that restore the state before the step
            with self._phase("parameters", f"{words}: the optimizer"):
                self._all(calls.local_step.local_update, step)
        shutil.rmtree(averaged, ignore_errors=True)

    def _check_split_by_hand(self, local: Sequence[LocalStep]) -> None:
        """Stop the check if `model` splits layers over ranks without DTensor."""
        split = model_groups_of_recipe(local, [item.parameters for item in self.state.wrapped])
        if split:
            self.state.keep(lambda finding: not RULES[finding.code].unless_split)
            del self.state.log.seconds["wrapping"]  # the phase compared parts
            self.state.log.notes.append(
                f"model() splits layers over {join_names([*map(format_ranks, split)])} without DTensor, and report "
                "cannot put their parts together: check the script with `ddpcheck run`, or call parallelize_module in "
                "wrap"
            )
            self.state.steps.ddp_skipped = "not compared: each rank has parts of the model"
            self._skip_rest(self.state.steps.ddp_skipped)

    def _can_share(self, step: int) -> bool:
        """Return True if ranks have equal parameters and can read them from one file."""
        ranks = [item for item in self.state.steps.ddp if item.step == step - 1] if step else self.state.wrapped
        equal = len(ranks) == self.asked.world_size and all(entry.parameters == ranks[0].parameters for entry in ranks)
        return equal and self._one_machine and not self.state.steps.ranks_differ

    def _local_step(self, step: int, single: Callable[[], RunFuture[SingleStep | str]] | None) -> list[LocalStep]:
        """Run each rank's step without the wrapper; report losses that are not finite."""
        try:
            return self._all(calls.local_step.local_step, step)
        except RankError as error:
            result = None if single is None else self._settle_single(single())
            loss = result.loss if isinstance(result, SingleStep) else math.nan
            findings = judge_undefined_losses(error.failures, loss, step, self.asked.world_size)
            if not findings:
                raise
            line = self.state.wrapped[0].loss_location if self.state.wrapped else None
            self.state.add([replace(finding, location=finding.location or line) for finding in findings])
            self._skip_rest(f"{findings[0].code}: the loss is not finite on {format_ranks(findings[0].ranks)}")

    def _train(self, step: int, words: str) -> bool:
        """Run the step through the wrapper unless skipped; return True if gradients are wrong."""
        judging.decide_on_ddp(self.state, step)
        if self.state.steps.ddp_skipped:
            return False
        is_wrong = self._run_ddp(step, words)
        if any(item.compiles for item in self.state.steps.local) and self._is_repeatable(step):
            with self._phase("reducer", f"{words}: through the compiled wrapper"):
                self.state.steps.compiled += self._all(calls.ddp_step.compiled_step, step)
        return is_wrong

    def _is_repeatable(self, step: int) -> bool:
        """Return True if the step can be repeated with a compiled wrapper.

        A communication hook counts its calls and may keep error feedback. With `static_graph`, DDP expects gradients of
        the same parameters in each step, but compiled code returns zero gradients for missing parameters.
        """
        state = self.state
        if state.steps.ranks_differ or state.wrapper.comm_hook or state.wrapper.sharded or state.models:
            return False
        missing = any(state.steps.missing().get((step, item.evidence.rank)) for item in state.steps.local)
        return not (state.wrapper.static_graph and missing)

    def _explain(self, local: Sequence[LocalStep], step: int) -> list[dict[str, PathEnd]]:
        """Find out on each rank why gradients are missing, if ranks' collectives still match."""
        in_step = not (any(item.calls for item in local) and judge_collectives(self._logs()))
        topic = "why gradients are missing"
        return self._explained(topic, {}, calls.repeated_step.explain, step) if in_step else [{} for _ in local]

    def _compare_random(self, step: int, averaged: Path, *, numbers: RandomNumbers) -> bool:
        """Give the ranks and a single process equal random numbers, and compare gradients.

        Numbers "by sample" are equal for equal samples, and keep the number of zeros in a dropout mask. But if forward
        does not draw per sample, ranks still draw different numbers. Therefore a difference is reported only if other
        weights of the shards' gradients explain the difference; else the comparison is repeated with constants.
        """
        single = self.state.single
        if numbers == "by sample":
            if not self._average_with_numbers(numbers, step, averaged):
                if not self._compare_with_single(step, averaged):
                    return False
                if single.analysis is not None and single.analysis.is_all_normalisation:
                    return True
            single.analysis = None
            single.differences.pop(step, None)
            if self.single.failed:  # during the analysis
                return False
            result = self._settle_single(self._start_single(partial(calls.single_process.run_with_constants, step)))
            if result is None:
                return False
            self.state.add_single(step, result)
        if reason := self._average_with_numbers("constant", step, averaged):
            single.skipped = f"not comparable with constants in place of random numbers: {reason}"
            return False
        single.constants = True
        return self._compare_with_single(step, averaged)

    def _average_with_numbers(self, numbers: RandomNumbers, step: int, averaged: Path) -> str:
        """Repeat a step with random `numbers`; save average gradients; return an error or ""."""
        topic = f"the gradients with random numbers {numbers}"
        replies = self._explained(topic, "the step with them failed", calls.local_step.comparable_step, step, numbers)
        if reason := next((item for item in replies if isinstance(item, str)), ""):
            return reason
        self.state.add_comparable_steps([item for item in replies if not isinstance(item, str)])
        self._all(calls.local_step.average, step, averaged, shared=self._one_machine)
        return ""

    def _check_collectives(self, *, is_needed: bool) -> None:
        """If `is_needed`, stop the check if the ranks have called different collectives."""
        if is_needed and (mismatch := judge_collectives(self._logs())):
            self.state.timelines = make_timelines(self._logs())
            self._add(mismatch)
            self._skip_rest(f"{mismatch[0].code}: the ranks are out of step")

    def _check_layout(self, local: Sequence[LocalStep], step: int) -> None:
        """Check that module layouts, which DDP compares only at construction, are still equal."""
        facts = self.state.wrapper
        if len({item.layout for item in local}) == 1 or not (facts.is_ddp or facts.sharded):
            return
        broadcasts = self.state.wrapped[0].broadcasts_buffers
        findings = judge_layouts(self._all(calls.local_step.layout), step, broadcasts=broadcasts)
        if not findings:
            return
        lines = self._all(calls.model_build.assignments, [name for finding in findings for name in finding.subjects])[0]
        self._add([replace(finding, location=lines.get(finding.subjects[0])) for finding in findings])
        effect = _UNLIKE_REDUCTIONS if facts.sharded else "DDP would stop, hang or abort at its next collective"
        self._skip_rest(f"{findings[0].code}: {effect}")

    def _check_packing(self, local: Sequence[LocalStep], step: int) -> None:
        """Check once that tensors reduced in forward have equal element order on all ranks."""
        if self._packing_checked or not any(item.calls for item in local):
            return
        in_forward = [call for call in self._logs()[0] if call.place == f"step {step}: forward"]
        if any("reduce" in call.operation and call.elements > 1 for call in in_forward):
            self._packing_checked = True
            topic = "the order in which ranks pack the elements that they reduce"
            self._add(judge_packing(self._explained(topic, (), calls.repeated_step.packed_payloads, step)))

    def _check_batches(self, batches: Sequence[tuple[int, ...]], step: int) -> None:
        """Check that `batch(step)` returns equal global batches in every call on every rank."""
        if len(set(batches)) > 1 and self._all(calls.local_step.batch_again, step) == list(batches):
            findings = judge_batch_values(batches, step)
            self._add(findings)
            self._skip_rest(f"{findings[0].code}: the ranks do not train on parts of one batch")
        self._check_batch(batches, step)

    def _check_batch(self, batches: Sequence[tuple[int, ...]], step: int) -> None:
        if len({batch for batch in batches if batch}) > 1:
            raise TargetError(
                f"batch({step}) is not the same on every call: two calls gave different values for the same step; "
                "make it depend on step and on seeded generators only"
            )

    def _run_ddp(self, step: int, words: str) -> bool:
        """Run one step through the wrapper; return True if gradients are wrong."""
        try:
            with self._phase("reducer", f"{words}: through the wrapper"):
                steps = self._all(calls.ddp_step.ddp_step, step)
                notes = {text for s in steps if isinstance(s, ShardedStep) and (text := reason_updates_not_compared(s))}
                self.state.log.notes += [f"parameters after a step are not compared: {note}" for note in sorted(notes)]
                is_wrong = judging.ddp_step_is_wrong(self.state, steps)
                self._check_collectives(is_needed=self.state.wrapped[0].broadcasts_buffers)
                return is_wrong
        except RankError as error:
            findings = judging.judge_wrapper_failure(self.state, error)
            if not findings or isinstance(error, HangError) or (error.first is not None and error.first.bug):
                raise
            self.state.add(findings)
            name = "the sharded module" if self.state.wrapper.sharded else "the wrapper"
            self._skip_rest(f"{findings[0].code}: {name} raised")

    def _compare_with_single(self, step: int, averaged: Path) -> bool:
        """Compare averaged gradients with the global batch; return True if they differ."""
        trained = list(self.state.steps.local[0].evidence.states)
        comparison = partial(calls.single_process.compare_with, averaged, trained)
        differences = self._settle_single(self._start_single(comparison))
        if differences is not None:
            differences = tuple(item for item in differences if not self.state.rank_params.has(item.name))
            self.state.single.differences[step] = differences
        if not any(difference.bad for difference in differences or ()):
            return False
        if self.state.wants_analysis:
            if not self.state.add_analysis(step, self._analyse(step, averaged)):
                return False
            topic = "what each program holds"
            self.state.single.program_data = self._explained(topic, {}, calls.program_data.program_data)
            changed = self._explained(topic, [], calls.program_data.changed_data)
            self.state.single.changed_data = frozenset().union(*changed)
        return True

    def _analyse(self, step: int, averaged: Path) -> ShardAnalysis:
        """Analyse each shard to explain why the ranks' average differs from the global batch."""
        topic = "why the ranks' average differs from the global batch"
        local = self.state.steps.local
        args = (step, averaged, self._average_exactly(step), len(local), local[0].threads)
        result = self._settle_single(self.single.start(partial(calls.try_call, calls.shard_analysis.analyse, *args)))
        if result is None or isinstance(result, NoExplanation):
            self.state.log.add_unexplained(topic, result)
            return ShardAnalysis(error="that failed")
        return result

    def _average_exactly(self, step: int) -> Path | None:
        """Save the float64 average gradients, if forward calls collectives; return the file, or None."""
        if not any(item.forward_calls for item in self.state.steps.local):
            return None
        file = self.world.directory / f"exact-{step}.pt"
        return None if any(self._all(calls.local_step.average_exactly, step, file)) else file

    def _examine_zero_gradients(self) -> None:
        """Find which always-zero gradients become nonzero under perturbation, and why others are zero."""
        steps, last = self.state.steps, self.asked.steps - 1
        zeros = parameters_with_zero_gradients(steps.parameters) if any(steps.norms.values()) else []
        if not zeros:
            return
        with self._phase("parameters", "looking again at zero gradients"):
            topic = "whether gradients that are zero stay so"
            nonzero = self._explained(topic, zeros, calls.repeated_step.nonzero_when_perturbed, last, zeros)
            steps.nonzero_when_perturbed = frozenset().union(*nonzero)
            zeros = [name for name in zeros if name not in steps.nonzero_when_perturbed]
            if zeros:
                topic = "where gradients become zero"
                steps.zero_ends = self._explained(topic, {}, calls.repeated_step.why_zero, last, zeros)[0]
