"""Turn the evidence of a check into findings: judges and their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ddpcheck.findings.errors import RankError
from ddpcheck.findings.evidence.gradients import RepeatedStep
from ddpcheck.findings.evidence.steps import DdpStepEvidence
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.wording import group_by, without_prefix
from ddpcheck.report.checking.check_state import CheckState
from ddpcheck.rules.causes import find_causes
from ddpcheck.rules.compilation.ddp522_rank_dependent_compilation import judge_compilations, judge_recompilations
from ddpcheck.rules.data.ddp510_shared_augmentation_seed import judge_forward_draws
from ddpcheck.rules.data.loaders import judge_samples
from ddpcheck.rules.gradients.reducer import (
    describe_compiled,
    judge_compiled,
    judge_loop,
    judge_reducer,
    judge_sharded,
    judge_wrapper_error,
)
from ddpcheck.rules.loss.ddp307_nothing_compared import judge_nothing_compared
from ddpcheck.rules.loss.ddp308_nondeterministic import judge_repeat
from ddpcheck.rules.loss.ddp312_unexplained_difference import UNEXPLAINED
from ddpcheck.rules.loss.single_process import judge_single_process
from ddpcheck.rules.optimizers.ddp223_optimizer_options import OF_PARTS
from ddpcheck.rules.optimizers.ddp504_stale_optimizer import judge_optimizer
from ddpcheck.rules.parameters.contribution import judge_parameters
from ddpcheck.rules.replicas.ddp306_state_diverged import judge_updates
from ddpcheck.rules.replicas.model_parts import judge_norms_of_steps
from ddpcheck.rules.replicas.steps import judge_state
from ddpcheck.trace.check_context import JudgeContext, LocalFacts, group_by_step
from ddpcheck.trace.compilation import trained_functions
from ddpcheck.trace.gradients import UNEQUAL, ReducerFacts
from ddpcheck.trace.replicas import differing_names

_NEAR = 10.0  # an error below this multiple of the tolerance may be rounding
_FEWEST_COMPILED = 3  # steps needed to distinguish permanent from occasional compilations
_LIBRARIES = {"random": "Python's random"}


def decide_on_ddp(state: CheckState, step: int) -> None:
    """Set `ddp_skipped` if the wrapper would raise or hang in this step."""
    if state.steps.ddp_skipped or not (state.wrapper.is_ddp or state.wrapper.sharded):
        return
    evidence = [item for item in state.steps.parameters if item.step == step]
    findings = state.log.call_judge("parameters", judge_parameters, evidence, state.wrapper, state.names)
    rules = [RULES[finding.code] for finding in findings if finding.severity is Severity.ERROR]
    if any(rule.stops_ddp and not (state.wrapper.tolerates_unused and rule.search_tolerates) for rule in rules):
        effect = "the ranks' reductions differ" if state.wrapper.sharded else "DDP raise or hang"
        state.steps.ddp_skipped = f"not run from step {step} on: the finding on parameters would make {effect}"


def ddp_step_is_wrong(state: CheckState, evidence: Sequence[DdpStepEvidence]) -> bool:
    """Add the evidence of a DDP step; return True if its gradients are wrong."""
    evidence = state.without_rank_params(evidence)
    differing = differing_names([item.parameters for item in evidence])
    if state.models and any(item.random.libraries for item in state.steps.local):
        state.steps.parts_draw |= any(difference.bad for item in evidence for difference in item.against_local)
        evidence = [replace(item, against_local=()) for item in evidence] if state.steps.parts_draw else evidence
    state.steps.ddp += evidence
    state.steps.ranks_differ |= bool(differing)
    return bool(state.log.call_judge("reducer", _reducer_judge(state), evidence, judge_context(state)))


def _reducer_judge(state: CheckState) -> Callable[[Sequence[DdpStepEvidence], JudgeContext], list[Finding]]:
    return judge_sharded if state.wrapper.sharded else judge_reducer


def withhold_if_noisy(state: CheckState, step: int, repeated: Sequence[RepeatedStep]) -> None:
    """Add a repeated step; withhold gradient verdicts if the repetitions differ."""
    state.repeats.add(repeated)
    by_rank = {rank: item.differences for rank, item in enumerate(repeated)}
    findings = state.log.call_judge("parity", judge_repeat, by_rank, step)
    state.add(findings, "parity")
    state.repeats.differ = bool(findings)


def judge_wrapper_failure(state: CheckState, error: RankError) -> list[Finding]:
    """Return findings on an error of the wrapper's step, if the error is known."""
    if state.log.part != "reducer":
        return []
    return state.log.call_judge("reducer", judge_wrapper_error, error.failures, error.results, judge_context(state))


def judge_context(state: CheckState, module_locations: Mapping[str, Location] | None = None) -> JudgeContext:
    """Return the facts that may explain a gradient difference."""
    wrapped, single, repeated = state.wrapped, state.single, state.repeats.by_rank
    local = single.analysed or state.steps.local
    drew_from = {_LIBRARIES.get(name, name) for item in local for name in item.random.libraries - {"torch"}}
    return JudgeContext(
        names=state.names,
        wrapper=state.wrapper,
        world_size=len(state.models) or state.asked.world_size,
        models=state.models,
        local=LocalFacts(
            losses=tuple(item.loss for item in local),
            shard_sizes=tuple(item.samples for item in local),
            calls=local[0].forward_calls if local else (),
            differing_buffers=tuple(differing_names([item.buffers for item in local])) if local else (),
            backwards=(single.backwards, max((item.backwards for item in local), default=1)),
            drew_from=tuple(sorted(drew_from)),
            choices=_decisive_choices(state),
        ),
        module_locations=module_locations or {},
        broadcasts_buffers=bool(wrapped) and wrapped[0].broadcasts_buffers,
        program_data=single.program_data,
        changed_data=single.changed_data,
        differing_at_start=frozenset(differing_names([item.parameters for item in wrapped]) if wrapped else ()),
        wrapper_class=wrapped[0].wrapper if wrapped else "",
        nonlinear=tuple(dict.fromkeys(name for item in repeated for name in item.nonlinear)),
        hooks=tuple(dict.fromkeys(hook for item in repeated for hook in item.hooks)),
        loss_location=wrapped[0].loss_location if wrapped else None,
        wrap_hooks=wrapped[0].hooks if wrapped else (),
        gradients_differ=any(state.differs(step) for step in single.differences),
        plain_optimizer=all(item.optimizer.get("module", "").startswith("torch.optim.") for item in wrapped),
    )


def judge(state: CheckState, module_locations: Mapping[str, Location]) -> None:
    """Turn all evidence into findings, even after an early stop."""
    context = judge_context(state, module_locations)
    if state.steps.parameters:
        kwargs = {"nonzero_when_perturbed": state.steps.nonzero_when_perturbed, "zero_ends": state.steps.zero_ends}
        args = state.steps.parameters, context.wrapper, context.names
        parameters = state.log.call_judge("parameters", judge_parameters, *args, **kwargs)
        codes = {finding.code for finding in parameters}  # more specific than a raised backward
        state.keep(lambda finding: finding.subjects != ("backward",) or finding.code not in codes)
        state.add(parameters, "parameters")
    if not state.repeats.differ:
        _judge_gradients(state, context)
    if state.replicas_stay_equal:  # each rank may step only its part of the parameters and share the result
        state.keep(lambda finding: OF_PARTS not in finding.tags)
    if any(item.compiles for item in state.steps.local):
        state.log.notes.append(describe_compiled(state.steps.compiled))
        state.add(state.log.call_judge("reducer", _judge_compilations, state), "reducer")
        state.part_findings = [(part, without_prefix(finding)) for part, finding in state.part_findings]
    state.findings = [finding for _, finding in state.part_findings]
    for causes in state.log.call_judge("", lambda: [find_causes(state.findings)]):
        state.findings = causes.findings
        pairs = zip(state.part_findings, causes.root_causes, strict=True)
        state.reported = [(part, finding, cause) for (part, finding), cause in pairs if cause is not None]


def _judge_gradients(state: CheckState, context: JudgeContext) -> None:
    steps, single, repeats, call_judge = state.steps, state.single, state.repeats, state.log.call_judge
    ddp = [replace(item, against_local=repeats.widened(item.against_local)) for item in steps.ddp]
    if state.models:  # diverged parameters change the gradients of later steps
        drifted = [n for n, items in group_by_step(ddp).items() if differing_names([item.parameters for item in items])]
        ddp = [item for item in ddp if not drifted or item.step <= min(drifted)]
    first_step = single.analysed[0].evidence.step if single.analysed else 0
    judged = [step for step in single.differences if step >= first_step or not state.differs(step)]
    differences = {step: repeats.widened(single.differences[step]) for step in judged}
    reducer = call_judge("reducer", _reducer_judge(state), ddp, context) if ddp else []
    if state.models:
        reducer = reducer or call_judge("reducer", judge_updates, ReducerFacts.from_evidence(ddp, context))
        reducer = reducer or call_judge("reducer", judge_norms_of_steps, ddp, state.models)
    only_unequal = len(reducer) == 1 and UNEQUAL in reducer[0].tags
    if context.wrapper.comm_hook and only_unequal and state.replicas_stay_equal:
        steps.optimizer_averages = True
    else:
        state.add(reducer or call_judge("reducer", judge_compiled, steps.compiled, context), "reducer")
    parity = []
    if steps.first_local:
        parity += call_judge("parity", judge_samples, steps.first_local, gradients_differ=context.gradients_differ)
    parity += call_judge("parity", judge_forward_draws, single.draws)
    compared = call_judge("parity", judge_single_process, differences, single.analysis, context)
    state.add(parity + _without_inconclusive(state, compared, context.local), "parity")
    if steps.ddp:
        start = [item.parameters for item in state.wrapped]
        unequal = bool(reducer) or "reducer" in state.log.unjudged
        findings = call_judge("reducer", judge_state, steps.ddp, context, gradients_differ=unequal, start=start)
        findings += call_judge("reducer", judge_loop, steps.ddp, unequal=unequal) if context.wrapper.is_ddp else []
        findings += call_judge("reducer", judge_optimizer, state.wrapped, steps.ddp, state.names)
        state.add(findings, "reducer")
    if state.log.error is None:
        gradients = [use for item in steps.parameters for use in item.states.values()]
        state.add(call_judge("parity", judge_nothing_compared, steps.norms, gradients), "parity")


def _judge_compilations(state: CheckState) -> list[Finding]:
    """Judge recompilations; also judge compiled graphs, except with random draws or few steps."""
    by_rank = group_by(state.steps.compiled, lambda item: item.rank)
    compiled = [[entry for item in steps for entry in item.compiled] for steps in by_rank.values()]
    is_random = any(item.random.libraries - {"torch"} for item in state.steps.local)
    few = len({item.step for item in state.steps.compiled}) < _FEWEST_COMPILED
    return judge_recompilations(trained_functions(compiled)) if is_random or few else judge_compilations(compiled)


def _without_inconclusive(state: CheckState, findings: list[Finding], local: LocalFacts) -> list[Finding]:
    """Drop unexplained differences if random numbers, rounding or a hang hide the cause."""
    kept = [finding for finding in findings if UNEXPLAINED not in finding.tags]
    if len(kept) == len(findings):
        return findings
    if state.single.hang:
        error = max(item.error for items in state.single.differences.values() for item in items if item.bad)
        state.single.incomparable = (
            f"gradients are up to {error:.1e} (relative) away from those of the global batch, and there was no time to "
            f"find out why: {state.single.hang}"
        )
        state.log.notes.append(state.single.incomparable)
        return kept
    wrong = [item for items in state.single.differences.values() for item in items if item.bad]
    analysis = state.single.analysis
    if analysis is not None and analysis.error and all(item.error < _NEAR * item.tolerance for item in wrong):
        largest = max(item.error for item in wrong)
        state.single.incomparable = (
            f"gradients are up to {largest:.1e} (relative) away from those of the global batch, which may be rounding: "
            f"the shards could not be looked at one by one ({analysis.error})"
        )
        return kept
    if not (local.drew_from or local.choices):
        return findings
    state.single.incomparable = (
        f"the forward draws from {' and '.join(local.drew_from)}, and no two runs can share those numbers sample "
        "by sample"
        if local.drew_from
        else f"the forward chooses by random numbers ({local.choices[0]}), and each rank among its own samples"
    )
    return kept


def _decisive_choices(state: CheckState) -> tuple[str, ...]:
    """Return random choices of the analysed step that may explain the difference."""
    single = state.single
    analysed = single.analysed or state.steps.local
    choices = single.choices.get(analysed[0].evidence.step, ()) if analysed else ()
    equal = any(not state.differs(step) for step in single.differences if not single.choices.get(step))
    carried = any(call.carries_gradient for item in analysed for call in item.forward_calls)
    return choices if equal or not carried else ()
