"""DDP3xx: what differs between gradients that should be equal, and the pattern that names the cause.

Pure functions from measured differences (`ddpcheck.gather.compare`, `ddpcheck.reference`) to findings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ddpcheck.consistency import differing_names
from ddpcheck.errors import RankError
from ddpcheck.evidence import Call, DdpStepEvidence, Difference, ShardAnalysis, WrapperFacts
from ddpcheck.findings import Finding, Location, Severity
from ddpcheck.rules import RULES
from ddpcheck.wording import Names, listed, spelled, spelled_steps


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What else is known when a difference is to be explained.

    Attributes:
        names: How to speak of parameters.
        wrapper: What the wrapper was told.
        world_size: Number of ranks.
        losses: Of each rank.
        shard_sizes: Samples a rank, where they are known.
        hooked: Parameters that carry the user's tensor hooks.
        collectives: What the forward pass called, without a derivative, on rank 0.
        module_locations: The lines that made the modules.
        local_buffers: Buffers that a step by itself leaves different on the ranks.
        broadcasts_buffers: Whether the wrapper broadcasts buffers before a forward.
    """

    names: Names
    wrapper: WrapperFacts
    world_size: int
    losses: tuple[float, ...] = ()
    shard_sizes: tuple[int, ...] = ()
    hooked: tuple[str, ...] = ()
    collectives: tuple[Call, ...] = ()
    module_locations: Mapping[str, Location] = field(default_factory=dict)
    local_buffers: tuple[str, ...] = ()
    broadcasts_buffers: bool = False


_LOOSEST_FIT = 0.05
"""A pattern explains a difference when it leaves less than this share of it (and the rest is rounding)."""


def judge_reducer(evidence: Sequence[DdpStepEvidence], known: Circumstances) -> list[Finding]:
    """DDP301, 302 and 303 (with DDP111 and 501 as their causes): what the wrapper made of the ranks' gradients."""
    by_step: dict[int, list[DdpStepEvidence]] = {}
    for item in evidence:
        by_step.setdefault(item.step, []).append(item)
    unequal: dict[str, dict[int, tuple[int, ...]]] = {}
    wrong: dict[str, dict[int, Difference]] = {}
    for step, items in sorted(by_step.items()):
        for name, ranks in differing_names([item.gradients for item in items]).items():
            unequal.setdefault(name, {})[step] = ranks
        for item in items:
            for difference in item.against_local:
                seen = wrong.get(difference.name, {}).get(step)
                if difference.bad and (seen is None or seen.error < difference.error):
                    wrong.setdefault(difference.name, {})[step] = difference
    findings = []
    ignored = [name for name in unequal if name in known.wrapper.ignored]
    if ignored:
        findings.append(
            _finding(
                "DDP111",
                known.names.subjects(ignored),
                f"{listed(known.names.subjects(ignored))} is trained, but the wrapper was told to ignore it: "
                "its gradients are not averaged and differ between the ranks.",
                location=known.names.location(ignored),
            )
        )
    bypassed = [item for item in evidence if item.wrapper_calls == 0 and item.inner_calls > 0]
    names = [name for name in unequal if name not in ignored]
    steps = sorted({step for name in names for step in unequal[name]})
    facts = [wrong[name][min(wrong[name])].tell() for name in names if name in wrong][:3]
    if bypassed:
        ranks = tuple(sorted({item.rank for item in bypassed}))
        findings.append(
            _finding(
                "DDP501",
                ("forward",),
                "The loss calls the wrapped module and not the wrapper, so DDP does not take part in the step.",
                ranks=ranks if len(ranks) < known.world_size else (),
                steps=_some(sorted({item.step for item in bypassed}), len(by_step)),
                evidence=[f"gradients of {len(names)} parameters differ between ranks", *facts] if names else facts,
            )
        )
    elif names:
        every = len(names) == len(evidence[0].gradients)
        findings.append(
            _finding(
                "DDP301",
                known.names.subjects(names),
                f"The gradients of {'all' if every else f'{len(names)} of'} {len(evidence[0].gradients)} parameters "
                f"differ between ranks after backward, from {spelled_steps(steps[:1])} on.",
                steps=_some(steps, len(by_step)),
                location=known.names.location(names),
                evidence=facts,
            )
        )
    told = set(unequal)
    mismatched = {name: steps for name, steps in wrong.items() if name not in told}
    if mismatched and not findings:
        findings.append(_judge_mismatch(mismatched, by_step, known))
    return findings


def _judge_mismatch(
    wrong: Mapping[str, Mapping[int, Difference]],
    by_step: Mapping[int, Sequence[DdpStepEvidence]],
    known: Circumstances,
) -> Finding:
    names = list(wrong)
    steps = sorted({step for of_name in wrong.values() for step in of_name})
    differences = [of_name[min(of_name)] for of_name in wrong.values()]
    worst = sorted(differences, key=lambda item: -item.error)
    ratio = _constant_ratio(differences)
    facts = [item.tell() for item in worst[:3]]
    if ratio is not None:
        return _finding(
            "DDP303",
            known.names.subjects(names),
            f"Under the wrapper every one of these gradients is {_factor(ratio, known.world_size)} times the average "
            "of the ranks' own gradients.",
            steps=_some(steps, len(by_step)),
            evidence=facts,
        )
    drifted = list(known.local_buffers)
    again = max(item.wrapper_calls for items in by_step.values() for item in items)
    if known.broadcasts_buffers and again > 1 and drifted:
        return _finding(
            "DDP311",
            drifted,
            f"DDP broadcasts {listed(drifted)} before each of {again} forwards, which overwrites what the backward of "
            "the forwards before it needs.",
            steps=_some(steps, len(by_step)),
            location=known.names.location(drifted),
            evidence=facts,
        )
    return _finding(
        "DDP302",
        known.names.subjects(names),
        f"What the wrapper left in .grad of {len(names)} parameter(s) is not the average of the ranks' own gradients.",
        steps=_some(steps, len(by_step)),
        location=known.names.location(names),
        evidence=facts,
    )


def _constant_ratio(differences: Sequence[Difference]) -> float | None:
    """The factor that all differences share, or None."""
    ratios = [item.ratio for item in differences]
    if not ratios or any(item.residual > max(item.tolerance, _LOOSEST_FIT * item.error) for item in differences):
        return None
    middle = sorted(ratios)[len(ratios) // 2]
    spread = max(abs(ratio - middle) for ratio in ratios)
    return middle if spread <= 0.01 * abs(middle) and middle != 0.0 else None


def _factor(ratio: float, world_size: int) -> str:
    for text, value in ((f"1/{world_size}", 1 / world_size), (str(world_size), float(world_size))):
        if math.isclose(ratio, value, rel_tol=1e-2):
            return f"{text} (one over the world size)" if text.startswith("1/") else f"{text} (the world size)"
    return f"{ratio:.4g}"


def _some(steps: Sequence[int], of: int) -> tuple[int, ...]:
    return tuple(steps) if len(steps) < of else ()


def judge_single_process(
    differences: Mapping[int, Sequence[Difference]], analysis: ShardAnalysis | None, known: Circumstances
) -> list[Finding]:
    """DDP303, 304, 305, 309 and 310: what data parallelism itself changed.

    Args:
        differences: By step: the ranks' averaged gradients against the global batch's.
        analysis: Of the first step that differs.
        known: What else is known.
    """
    bad = {step: [item for item in items if item.bad] for step, items in differences.items()}
    bad = {step: items for step, items in bad.items() if items}
    if not bad or analysis is None:
        return []
    first = bad[min(bad)]
    worst = sorted(first, key=lambda item: -item.error)
    total = len(differences[min(bad)])
    steps = _some(sorted(bad), len(differences))
    facts = [f"{len(first)} of {total} gradients differ from the single process", *(item.tell() for item in worst[:3])]
    tolerance = min(max(max(item.tolerance for item in first), 1e-6), _LOOSEST_FIT)
    far = max(item.error for item in first)
    ran = bool(analysis.weights)
    world_changed = ran and (abs(analysis.world_ratio - 1) > tolerance or analysis.world_residual > tolerance)
    scaled = _is_explained(analysis.global_ratio, analysis.global_residual, tolerance)
    by_world = world_changed and _is_explained(analysis.world_ratio, analysis.world_residual, tolerance)
    blind = [call for call in known.collectives if _may_carry_the_loss(call)] if world_changed or not ran else []
    blind.sort(key=lambda call: (not call.carries_gradient, -call.elements))
    hooked = [name for name in known.hooked if any(item.name == name for item in first)]
    if scaled and not by_world and (world_changed or not ran) and not any(call.elements > 1 for call in blind):
        # Shards alone give other gradients, or cannot be run alone: the loss values must tell.
        if _losses_are_scaled(analysis.shard_losses, known.losses, analysis.global_ratio):
            by_world, analysis = True, replace(analysis, world_ratio=analysis.global_ratio)
        else:
            weight = 1 / (known.world_size * analysis.global_ratio)
            return [_judge_weights(replace(analysis, weights=(weight,) * known.world_size), known, steps, facts)]
    if by_world:
        return [
            _finding(
                "DDP303",
                ("loss",),
                f"Every gradient is {_factor(analysis.world_ratio, known.world_size)} times that of the same shards "
                "without a process group: the model or the loss scales by the world size, and DDP averages already.",
                steps=steps,
                evidence=facts,
            )
        ]
    if world_changed and analysis.rank_residual <= tolerance:
        share = ", ".join(f"{weight:.4g}" for weight in analysis.rank_weights)
        return [
            _finding(
                "DDP303",
                ("loss",),
                f"The ranks weigh their gradients by {share} and not by {1 / known.world_size:.4g} each: the loss or "
                "the model applies a factor that depends on the rank.",
                steps=steps,
                evidence=facts,
            )
        ]
    if blind:
        calls = list(dict.fromkeys(str(call) for call in blind))
        path, _, line = next((call.location for call in blind if call.location), "").rpartition(":")
        return [
            _finding(
                "DDP309",
                tuple(dict.fromkeys(call.operation for call in blind)),
                f"The forward pass calls {calls[0]}, through which no gradient flows, and the averaged gradients are "
                f"{far:.2g} away from those of the global batch.",
                steps=steps,
                location=Location(path, int(line)) if path else None,
                evidence=[*(f"called: {call}" for call in calls[1:]), *facts],
            )
        ]
    if hooked and len(hooked) >= len(first) / 2:
        return [
            _finding(
                "DDP310",
                known.names.subjects(hooked),
                f"A hook changes the local gradient of {listed(known.names.subjects(hooked))} before it is averaged, "
                f"and the result is {far:.2g} away from that of the global batch.",
                steps=steps,
                location=known.names.location(hooked),
                evidence=facts,
            )
        ]
    if ran and not world_changed and analysis.weights_residual <= tolerance:
        if scaled:  # with a common factor there is no need to tell the ranks' weights apart
            weight = 1 / (known.world_size * analysis.global_ratio)
            analysis = replace(analysis, weights=(weight,) * known.world_size)
        return [_judge_weights(analysis, known, steps, facts)]
    found = []
    if not world_changed and _adds_up(analysis, known):
        found.append(
            _finding(
                "DDP305",
                ("loss",),
                f"The loss sums over samples, and DDP averages over ranks: its gradient is about 1/{known.world_size} "
                "of the global batch's.",
                steps=steps,
                evidence=["the losses of the ranks add up to the global batch's, and do not average to it", *facts],
            )
        )
    if not ran:
        return found or [
            _finding(
                "DDP304",
                ("loss",),
                f"Gradients on shards are up to {far:.2g} (relative) away from the global batch's, and the shards "
                "cannot be run one by one to tell why.",
                steps=steps,
                evidence=facts,
                severity=Severity.ERROR,
            )
        ]
    where = f"{analysis.module} ({analysis.module_class})" if analysis.module else "the loss"
    how = (
        f"the output of {where} for one sample depends on the other samples of the batch"
        if analysis.module
        else "no module mixes samples: the loss itself couples them"
    )
    found.append(
        _finding(
            "DDP304",
            (analysis.module or "loss",),
            f"Samples are coupled through {where}, so gradients on shards are up to {far:.2g} (relative) away from "
            "those of the global batch.",
            steps=steps,
            location=known.module_locations.get(analysis.module),
            evidence=[how, *facts],
        )
    )
    return found


def _may_carry_the_loss(call: Call) -> bool:
    """Whether what comes out of a collective may be part of the loss: not a barrier, an object, or a logged number."""
    return not call.differentiable and call.elements > 0 and (call.elements > 1 or call.carries_gradient)


def _adds_up(analysis: ShardAnalysis, known: Circumstances) -> bool:
    """Whether both the losses and the gradients of the ranks are nearer to adding up than to averaging."""
    if not known.losses or not analysis.global_loss or known.world_size < 2:
        return False
    share = 1 / known.world_size
    ratio = sum(known.losses) / len(known.losses) / analysis.global_loss
    return all(0.8 * share <= value <= 1.25 * share for value in (ratio, analysis.global_ratio))


def _is_explained(ratio: float, residual: float, tolerance: float) -> bool:
    """Whether a constant factor other than 1 accounts for a difference."""
    return abs(ratio - 1) > tolerance and residual <= max(tolerance, _LOOSEST_FIT * abs(1 - ratio))


def _losses_are_scaled(alone: Sequence[float], together: Sequence[float], ratio: float) -> bool:
    """Whether the losses on the ranks are nearer to `ratio` times those of the shards alone than to the same."""
    pairs = [(a, t) for a, t in zip(alone, together, strict=False) if a * t > 0]
    if not pairs or ratio <= 0:
        return False
    middle = sum(math.log(t / a) for a, t in pairs) / len(pairs)
    return abs(middle - math.log(ratio)) < abs(middle)


def _judge_weights(analysis: ShardAnalysis, known: Circumstances, steps: tuple[int, ...], facts: list[str]) -> Finding:
    terms = max(len(analysis.weights) // known.world_size, 1)
    by_term = [analysis.weights[term::terms] for term in range(terms)]
    spoken = "; ".join(", ".join(f"{weight:.4g}" for weight in weights) for weights in by_term)
    summed = [all(math.isclose(weight, 1.0, rel_tol=1e-3) for weight in weights) for weights in by_term]
    if any(summed) and known.world_size > 1:
        which = "The loss" if all(summed) else f"Term {summed.index(True)} of {terms} of the loss"
        message = (
            f"{which} sums over samples, and DDP averages over ranks: its gradient is 1/"
            f"{known.world_size} of the global batch's."
        )
        why = "the gradients of the shards add up to the global batch's"
    else:
        message = (
            "The loss is normalised by a count that differs between ranks, so the mean of the ranks' gradients is not "
            "the gradient of the global batch."
        )
        why = f"the global batch weighs the ranks by {spoken}; DDP weighs each by {1 / known.world_size:.4g}"
    sizes = [f"samples a rank: {', '.join(map(str, known.shard_sizes))}"] if len(set(known.shard_sizes)) > 1 else []
    return _finding("DDP305", ("loss",), message, steps=steps, evidence=[why, *sizes, *facts])


def judge_state(evidence: Sequence[DdpStepEvidence], known: Circumstances, *, gradients_differ: bool) -> list[Finding]:
    """DDP306, 214, 215 and 216: parameters, buffers and the rest after the steps."""
    by_step: dict[int, list[DdpStepEvidence]] = {}
    for item in evidence:
        by_step.setdefault(item.step, []).append(item)
    findings = []
    diverged: dict[str, int] = {}
    drifted: dict[str, int] = {}
    state: dict[str, int] = {}
    for step, items in sorted(by_step.items()):
        for found, picked in (
            (diverged, [item.parameters for item in items]),
            (diverged, [item.optimizer for item in items]),
            (drifted, [item.buffers for item in items]),
            (state, [item.state for item in items]),
        ):
            for name in differing_names(picked):
                found.setdefault(name, step)
    if diverged and not gradients_differ:
        names = [name for name in diverged if not name.startswith("optimizer ")] or list(diverged)
        first = min(diverged.values())
        findings.append(
            _finding(
                "DDP306",
                known.names.subjects(names),
                f"{len(names)} parameter(s) differ between ranks after the optimizer's step {first}, although their "
                "gradients were equal.",
                steps=_some(range(first, len(by_step)), len(by_step)),
                location=known.names.location(names),
                evidence=[f"optimizer state: {name}" for name in diverged if name.startswith("optimizer ")][:3],
            )
        )
    if drifted:
        names = list(drifted)
        code = "DDP215" if known.broadcasts_buffers else "DDP214"
        consequence = (
            "the next forward overwrites them with rank 0's, so what the other ranks computed is discarded"
            if known.broadcasts_buffers
            else "nothing synchronises them, and a checkpoint keeps rank 0's"
        )
        findings.append(
            _finding(
                code,
                names,
                f"{len(names)} buffer(s) differ between ranks after step {min(drifted.values())}: {consequence}.",
                location=known.names.location(names),
                severity=Severity.WARNING,
            )
        )
    if state:
        findings.append(
            _finding(
                "DDP216",
                list(state),
                f"{listed(list(state))} is held by the model without being registered and drifts apart between ranks; "
                "DDP never synchronises it.",
                location=known.names.location(list(state)),
            )
        )
    return findings


_WRAPPER_ERRORS = (
    (
        "mark a variable ready only once",
        "DDP406",
        "DDP took a gradient to be complete, and it came again",
    ),
    ("modified by an inplace operation", "DDP311", "What backward needs was overwritten after the forward pass"),
    (
        "Expected to have finished reduction",
        "DDP302",
        "A parameter that takes part without the wrapper did not under it",
    ),
)


def judge_wrapper_error(error: RankError, known: Circumstances) -> list[Finding]:
    """DDP302, 311, 406 and 501 from how the wrapper fails in a step that the unwrapped module has just done."""
    first = error.first
    finished = [item for item in error.results.values() if isinstance(item, DdpStepEvidence)]
    bypassed = [item.rank for item in finished if item.wrapper_calls == 0 and item.inner_calls > 0]
    if bypassed:
        return [
            _finding(
                "DDP501",
                ("forward",),
                f"On {spelled(bypassed)} the loss calls the wrapped module and not the wrapper; the other ranks wait "
                "for its gradients.",
                ranks=bypassed,
                steps=(finished[0].step,),
                evidence=[failure.message for failure in error.failures],
            )
        ]
    if first is None or first.kind != "raised":
        return []
    whole = f"{first.message}\n{first.traceback}"
    for words, code, message in _WRAPPER_ERRORS:
        if words in whole:
            ranks = tuple(sorted(failure.rank for failure in error.failures if failure.kind == "raised"))
            named = tuple(dict.fromkeys(re.findall(r"parameter (?:name|at index \d+ with name) (\S+)", whole)))
            return [
                _finding(
                    code,
                    known.names.subjects(named) or ("backward",),
                    f"{message}, in {first.place or 'the step'}.",
                    ranks=ranks if len(ranks) < known.world_size else (),
                    evidence=[first.message],
                )
            ]
    return []


def merge_causes(findings: Sequence[Finding]) -> list[Finding]:
    """One finding a root cause: consequences become evidence of what brought them about."""
    merged: list[Finding] = []
    for finding in findings:
        if not any(f.code == finding.code and set(finding.subjects) <= set(f.subjects) for f in merged):
            merged.append(finding)
    for cause, consequence, says in _CONSEQUENCES:
        causes = [f for f in merged if f.code in cause]
        for found in [f for f in merged if f.code in consequence and causes and f not in causes and says(causes[0], f)]:
            merged.remove(found)
            place = merged.index(causes[0])
            causes[0] = replace(
                causes[0], evidence=(*causes[0].evidence, f"with it comes {found.code}: {found.message}")
            )
            merged[place] = causes[0]
    return merged


def _always(_cause: Finding, _consequence: Finding) -> bool:
    return True


def _are_statistics(cause: Finding, consequence: Finding) -> bool:
    """Whether the buffers that differ are the running statistics of the layers that couple the samples."""
    names = ("running_mean", "running_var", "num_batches_tracked")
    return "Norm" in cause.message and all(name.rpartition(".")[2] in names for name in consequence.subjects)


def _same_subjects(cause: Finding, consequence: Finding) -> bool:
    return set(consequence.subjects) <= set(cause.subjects)


_CONSEQUENCES: tuple[tuple[tuple[str, ...], tuple[str, ...], Callable[[Finding, Finding], bool]], ...] = (
    (("DDP304",), ("DDP214", "DDP215"), _are_statistics),
    (("DDP208",), ("DDP301", "DDP302", "DDP303", "DDP304", "DDP305", "DDP306"), _always),
    (("DDP223",), ("DDP306",), _always),
    (("DDP111",), ("DDP208", "DDP306", "DDP301"), _always),
    (("DDP222",), ("DDP301", "DDP302", "DDP304", "DDP305", "DDP214", "DDP215", "DDP216"), _always),
    (("DDP406",), ("DDP301", "DDP302"), _always),
    (("DDP104", "DDP105"), ("DDP301", "DDP302", "DDP303", "DDP304", "DDP305"), _always),
    (
        ("DDP503",),
        ("DDP101", "DDP102", "DDP103", "DDP106", "DDP301", "DDP302", "DDP303", "DDP304", "DDP305", "DDP306"),
        _always,
    ),
    (("DDP112",), ("DDP301", "DDP302", "DDP406"), _always),
    (("DDP216",), ("DDP304", "DDP303", "DDP216"), _always),
    (("DDP214",), ("DDP304",), _always),
)


def judge_nothing_compared(norms: Mapping[int, float]) -> list[Finding]:
    """DDP307 when every gradient was zero or missing (norm of all single-process or local gradients, by step)."""
    empty = sorted(step for step, norm in norms.items() if norm == 0.0)
    if not norms or len(empty) < len(norms):
        return []
    return [
        _finding(
            "DDP307",
            ("loss",),
            "Every gradient was zero or missing in every step, so nothing was compared.",
            evidence=["a comparison of zeros with zeros would pass whatever DDP did"],
        )
    ]


def judge_repeat(differences: Mapping[int, Sequence[Difference]], step: int) -> list[Finding]:
    """DDP308 when the same step, run twice on a rank from the same state, gave other gradients (by rank)."""
    bad = {rank: [item for item in items if item.bad] for rank, items in differences.items()}
    ranks = tuple(sorted(rank for rank, items in bad.items() if items))
    if not ranks:
        return []
    worst = max((item for items in bad.values() for item in items), key=lambda item: item.error)
    return [
        _finding(
            "DDP308",
            ("loss",),
            f"The same step run twice on {spelled(ranks)} gave other gradients, so comparisons mean nothing.",
            ranks=ranks if len(ranks) < len(differences) else (),
            steps=(step,),
            evidence=[worst.tell(), "the generators of torch, numpy and random were seeded alike both times"],
        )
    ]


def _finding(
    code: str,
    subjects: Sequence[str],
    message: str,
    *,
    ranks: Sequence[int] = (),
    steps: Sequence[int] = (),
    location: Location | None = None,
    evidence: Sequence[str] = (),
    severity: Severity | None = None,
) -> Finding:
    return Finding(
        code=code,
        subjects=tuple(subjects),
        message=message,
        severity=severity or RULES[code].severity,
        ranks=tuple(ranks),
        steps=tuple(steps),
        location=location,
        evidence=tuple(evidence),
    )
