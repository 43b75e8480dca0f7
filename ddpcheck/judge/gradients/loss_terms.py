"""DDP305, 304 and 312: loss normalisation, coupled samples, and unexplained mismatches."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.evidence.gradients import LossTerm
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import capitalized, join_names
from ddpcheck.judge.judge_context import SingleProcessFacts


def explain_by_terms(facts: SingleProcessFacts) -> list[Finding]:
    """Judge the normalisation of each loss term, and coupled samples (DDP305, 304).

    Runs last: the weights assume that the ranks' gradients are weighted sums of the shards' gradients.
    """
    if routing := _chosen_by_batch(facts):  # shards use different parts of the model than the global batch
        return routing
    analysis = facts.analysis
    wrong = [term for term in analysis.terms if term.error > facts.tolerance]
    fitted = [term for term in wrong if term.is_normalised]
    if facts.world_changed and not all(term.rank_weights for term in fitted):
        fitted = []
    if all(term.coupled and not term.count and not term.is_sum for term in wrong):
        fitted = []  # one weight per shard also fits the root of a mean
    rest = [term for term in wrong if term not in fitted]
    fitted += [term for term in rest if term.doubles_with_batch and not facts.world_changed]
    findings = judge_normalisation(facts, fitted) if fitted else []
    counts_fit = bool(wrong) and not rest and not analysis.frozen  # then modules that mix samples change no gradients
    if facts.known.local.drew_from:
        return findings  # random numbers drawn per sample look like coupling
    coupling = analysis.coupling
    mixes_samples = coupling.module_class and not counts_fit
    gathers = facts.world_changed and any(call.elements > 1 for call in facts.known.local.calls)
    has_coupled = any(term.coupled for term in rest)
    if mixes_samples or (has_coupled and not gathers):  # if ranks gather samples, coupling changes no gradient
        findings += judge_coupling(facts, rest)
    elif not counts_fit and coupling.line is not None and not facts.world_changed:
        findings += _normalising_line(facts) if coupling.scaled and rest else judge_coupling(facts, rest)
    is_explained = (coupling.module_class and not analysis.frozen) or has_coupled or coupling.line
    if not rest or is_explained:
        return findings
    return findings + (_weighed_by_others(facts, rest) or (judge_unexplained(facts) if findings else []))


def format_term(term: LossTerm, terms: Sequence[LossTerm]) -> str:
    """Format a loss term; all terms of one line count as one term."""
    labels = [(t.name, t.location) if t.name or t.location else index for index, t in enumerate(terms)]
    distinct = list(dict.fromkeys(labels))
    if term not in terms or len(distinct) == 1:
        return "the loss"
    source = " at ".join(text for text in (term.name, str(term.location or "")) if text)
    number = distinct.index(labels[list(terms).index(term)]) + 1
    return f"term {number} of {len(distinct)} of the loss{f' ({source})' if source else ''}"


def judge_normalisation(facts: SingleProcessFacts, wrong: Sequence[LossTerm]) -> list[Finding]:
    """Report loss terms that are sums, or means over rank-dependent counts (DDP305)."""
    world_size, sizes, wrapper = facts.known.world_size, facts.known.local.shard_sizes, facts.known.wrapper.named
    by_sample = facts.analysis.numbers == "by sample"
    worst_first = sorted(wrong, key=lambda term: -term.error)
    reasons: dict[str, str] = {}
    for term in worst_first:
        name = format_term(term, facts.analysis.terms)
        if term.doubles_with_batch or (world_size > 1 and term.is_sum):
            message = (
                f"{name} sums over samples, and {wrapper} averages over ranks: its gradient is "
                f"{'' if term.is_sum else 'about '}1/{world_size} of the global batch's"
            )
            detail = (
                "the gradients of the shards add up to the global batch's"
                if term.is_sum
                else "its gradient doubles when every sample is in the batch twice"
            )
        else:
            message = (
                f"{name} is normalised by a count that differs between ranks, so the mean of the ranks' gradients is "
                "not the gradient of the global batch"
            )
            weights, rank_weights = (", ".join(f"{w:.4g}" for w in ws) for ws in (term.weights, term.rank_weights))
            detail = f"the global batch weighs the ranks by {weights}; {wrapper} weighs "
            detail += f"the ranks by {rank_weights}" if rank_weights else f"each by {1 / world_size:.4g}"
            if term.count not in ("", "samples"):
                detail = f"{term.count}: {' and '.join(f'{count:g}' for count in term.counts)} on the ranks; {detail}"
            elif not term.count and by_sample:
                detail += "; no count in the batch fits: the counted elements are chosen in the step, by a random mask "
                detail += "for example"
        reasons.setdefault(message, detail)
    (first, reason), *others = reasons.items()
    return facts.one_finding(
        "DDP305",
        f"{capitalized(first)}.",
        reason,
        *(f"{text}: {explanation}" for text, explanation in others),
        f"samples a rank: {', '.join(map(str, sizes))}" if len(set(sizes)) > 1 else "",
        location=worst_first[0].location or facts.known.loss_location,
        fix="Divide by the number of samples on the rank (reduction='mean'), or keep the sum and multiply this term "
        f"by {facts.known.count_of_replicas}."
        if " sums over " in first
        else "",
        tags=((IS_SUM,) if any(" sums over " in text for text in reasons) else ())
        + ((BY_SAMPLE,) if by_sample else ()),
    )


IS_SUM = "is a sum"
"""Tag of a DDP305 on a term that sums over samples."""

BY_SAMPLE = "random numbers by sample"
"""Tag of a DDP305 found with random numbers fixed per sample."""


def judge_coupling(facts: SingleProcessFacts, terms: Sequence[LossTerm] = ()) -> list[Finding]:
    """Report samples coupled by the model or the loss (DDP304)."""
    coupling, known = facts.analysis.coupling, facts.known
    module = f"{coupling.module or 'the model itself'} ({coupling.module_class})" if coupling.module_class else ""
    clues = ["no module mixes samples: the loss itself couples them"]
    if module:
        clues = [f"the output of {module} for one sample depends on the other samples of the batch"]
    if coupling.line:
        clues += [f"samples first meet at {coupling.line}"]
    if not module and any(term.coupled for term in terms):
        clues += ["if the outputs of the model for some samples change, the gradients of other samples change as well"]
    term_location = next((term.location for term in terms if term.coupled and term.location), None)
    return facts.one_finding(
        "DDP304",
        f"Samples are coupled through {module or 'the loss'}, so gradients on shards are up to "
        f"{facts.largest_error:.2g} (relative) away from those of the global batch.",
        *clues,
        subjects=(coupling.module or "loss",),
        location=known.module_locations.get(coupling.module)
        if coupling.module
        else coupling.line or term_location or known.loss_location,
        fix="Convert with nn.SyncBatchNorm.convert_sync_batchnorm, or use GroupNorm or LayerNorm; if statistics of "
        "each rank's own samples are intended, ignore DDP304."
        if "BatchNorm" in coupling.module_class
        else "Gather the samples to compare with by a differentiable all_gather (torch.distributed.nn.functional), or "
        "reduce the statistics over ranks; if each rank should see its own samples only, ignore DDP304.",
        tags=(BY_NORMALISATION,) if "Norm" in coupling.module_class else (),
    )


def _chosen_by_batch(facts: SingleProcessFacts) -> list[Finding]:
    """Report model parts whose use depends on the rest of the batch (DDP304)."""
    if facts.world_changed or not facts.analysis.other_parameters:
        return []
    names = facts.known.names
    subjects = names.subjects(facts.analysis.other_parameters)
    return facts.one_finding(
        "DDP304",
        f"Which parts of the model a sample goes through depends on the rest of its batch: {join_names(subjects)} "
        "contribute for some shards and not for the global batch, or vice versa.",
        "a shard gives these gradients in a single process too",
        subjects=subjects,
        location=names.location(facts.analysis.other_parameters),
        fix="Choose for each sample separately, or by a value that is the same on every rank (from the step, or "
        "reduced over ranks); if each rank should choose by its own samples, ignore DDP304.",
    )


def _weighed_by_others(facts: SingleProcessFacts, terms: Sequence[LossTerm]) -> list[Finding]:
    """Report sample weights computed from the local batch, without coupled samples (DDP305)."""
    coupled = facts.known.local.differing_buffers or any(term.coupled is not False for term in terms)
    if coupled or facts.analysis.error or facts.world_changed:
        return []
    return facts.one_finding(
        "DDP305",
        "The loss weighs samples by a quantity of the local batch that differs between ranks (such as class "
        "frequencies), so the mean of the ranks' gradients is not the gradient of the global batch.",
        "a shard gives these gradients in a single process too, and no count of its samples explains them",
        "the gradients of samples do not change with the outputs of the model for others",
        location=next((term.location for term in terms if term.location), None) or facts.known.loss_location,
        fix="all_reduce the values that the weights are computed from (such as the number of samples of each class), "
        "or compute the weights once for the dataset.",
    )


BY_NORMALISATION = "by normalisation"
"""Tag of a DDP304 on samples coupled by a normalisation layer."""


def _normalising_line(facts: SingleProcessFacts) -> list[Finding]:
    """Report a loss line that scales samples by the local batch (DDP305)."""
    return facts.one_finding(
        "DDP305",
        "The loss is normalised by a quantity of the local batch that differs between ranks, so the mean of the ranks' "
        "gradients is not the gradient of the global batch.",
        f"the result of {facts.analysis.coupling.line} for a sample has a different scale in the global batch",
        location=facts.analysis.coupling.line,
    )


def judge_unexplained(facts: SingleProcessFacts) -> list[Finding]:
    """Report a gradient mismatch that fits no pattern (DDP312)."""
    analysis = facts.analysis
    clues = [
        f"the shards could not be looked at one by one: {analysis.error}" if analysis.error else "",
        "gradients on the ranks differ from those of the same shards without a process group"
        if facts.world_changed
        else "",
        *(f"called in forward: {call}" for call in facts.known.local.calls[:3] if call.elements > 0),
    ]
    return facts.one_finding(
        "DDP312",
        f"The averaged gradients are up to {facts.largest_error:.2g} (relative) away from those of the global batch, "
        "and no cause was found.",
        *clues,
        location=facts.known.loss_location,
    )
