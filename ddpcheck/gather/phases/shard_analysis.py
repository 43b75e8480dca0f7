"""Explain why the ranks' average differs from the gradient of the global batch.

Runs the shards in the single process, once, at the first step with a mismatch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ddpcheck.findings.evidence.gradients import Coupling, Fit, ShardAnalysis, WeightedFit
from ddpcheck.findings.replace import replace
from ddpcheck.gather.phases import shard_terms
from ddpcheck.gather.phases.shard_terms import ShardRun, total_gradient
from ddpcheck.gather.phases.single_process import SingleProcess, SingleStepData
from ddpcheck.gather.state.tensor_file import TensorFile
from ddpcheck.gather.steps.batch_coupling import first_coupling
from ddpcheck.gather.steps.gradient_distance import distance, fit
from ddpcheck.gather.steps.training_step import Gradients
from ddpcheck.recipe.pytree import to_device
from ddpcheck.recipe.recipe import error_summary
from ddpcheck.worlds import rank as this_rank

_SAME = 1e-3
_LARGEST_ROUNDING = 1e-4  # max difference in float64 to blame rounding in the model's dtype
_COUPLED_EXACTLY = 1e-9  # relative; parts of a float64 run may be in float32, identical per row


def analyse(step: int, gradient_file: Path, exact_file: Path | None, world_size: int, threads: int) -> ShardAnalysis:
    """Run each of `world_size` shards without a process group to explain a mismatch.

    Both files have the averaged gradients of the ranks; `exact_file` has float64 gradients. `threads`: threads of a
    rank. With another number of threads, sums round differently, and a deep network can amplify the difference by 1000.
    """
    single: SingleProcess = this_rank.state["single"]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with single.external_state.restored():
            return _analyse(ShardRun(single, single.module, step), gradient_file, exact_file, world_size)
    finally:
        torch.set_num_threads(num_threads)


def _analyse(run: ShardRun, gradient_file: Path, exact_file: Path | None, world_size: int) -> ShardAnalysis:
    single, data = run.single_process, run.single_process.step
    averaged = TensorFile(gradient_file, device=single.device)
    compared = {name: averaged[name] for name in data.gradients if name in averaged}
    facts = ShardAnalysis(global_loss=data.loss, numbers=single.numbers)
    mismatches = _mismatches(data, averaged, data.gradients)
    batch = to_device(single.global_batch(run.step), single.device)
    if exact_file is not None and run.exact is not None:
        with contextlib.suppress(Exception):  # the model may not run in float64
            exact = TensorFile(exact_file, device=single.device)
            facts = replace(facts, rounded=_rounded(data, averaged, exact, total_gradient(run.exact, batch)[0]))
            if facts.rounded and mismatches <= set(facts.rounded):
                return facts
    try:
        shards = [single.recipe.local_batch(batch, rank, world_size) for rank in range(world_size)]
    except Exception as error:
        return replace(facts, error=error_summary(error))
    with contextlib.suppress(Exception):
        facts = replace(facts, rounded=(*facts.rounded, *_rounded_on_shards(run, compared, batch, shards)))
        if facts.rounded and mismatches <= set(facts.rounded):
            return facts
    facts = replace(facts, against_global=_fit_ratio(compared, data.gradients))
    size = sum(gradient.numel() for gradient in data.gradients.values())
    if world_size * size > shard_terms.MOST_ELEMENTS:
        return replace(facts, error="the gradients of all shards together are too large to be kept")
    try:
        results = [total_gradient(run, shard) for shard in shards]
    except Exception as error:  # e.g. a model with a fixed batch size
        return replace(facts, error=error_summary(error))
    shard_gradients = [shard_terms.fill_with_zeros(gradients, data.gradients) for gradients, _ in results]
    mean = shard_terms.weighted_sum(shard_gradients, [1 / world_size] * world_size)
    weights, residual = fit(compared, shard_gradients)
    facts = replace(
        facts,
        against_shards=_fit_ratio(compared, mean),
        rank_weights=WeightedFit(tuple(weights), residual),
        shard_losses=tuple(loss for _, loss in results),
        other_parameters=tuple(sorted(set().union(*(grads for grads, _ in results)) ^ set(data.gradients))),
    )
    return _add_terms(run, facts, compared, mean, batch, shards)


def _add_terms(
    run: ShardRun, facts: ShardAnalysis, compared: Gradients, mean: Gradients, batch: Any, shards: Sequence[Any]
) -> ShardAnalysis:
    """Add loss terms and dependencies between samples to `facts`; `mean`: mean gradient of shards."""
    for terms_run in filter(None, (run.exact, run)):
        try:
            results = shard_terms.analyse_terms(terms_run, batch, shards)
            break
        except Exception as error:  # the model may not run in float64
            message = error_summary(error)
    else:
        return replace(facts, error=message)
    if terms_run is not run:
        facts = replace(facts, shard_rounding=_fit_ratio(mean, results.mean).residual)
    if len(results.whole) > 1:
        ratios, terms_residual = fit(compared, results.whole)
    else:
        ratios, terms_residual = [facts.against_global.ratio], facts.against_global.residual
    by_shards = facts.against_shards
    changed = max(abs(by_shards.ratio - 1), by_shards.residual) > _SAME
    rank_weights = results.rank_weights(compared) if changed else None
    with contextlib.suppress(Exception):  # forward may return anything
        facts = replace(facts, coupling=_coupling(run, batch, shards[0]))
    norms = [name for name, module in run.module.named_modules() if isinstance(module, _BatchNorm) and module.training]
    if norms and changed:
        facts = replace(facts, by_statistics=_with_statistics_of_shards(run, compared, batch, norms, len(shards)))
    if norms and any(term.residual > _SAME * term.error for term in results.terms):
        with contextlib.suppress(Exception):  # causes other than the batch statistics
            results = shard_terms.analyse_terms(replace(terms_run, eval_modules=norms), batch, shards)
            facts = replace(facts, frozen=tuple(norms))
    terms = [replace(term, ratio=ratio) for term, ratio in zip(results.terms, ratios, strict=True)]
    if rank_weights is not None:
        terms = [
            replace(term, rank_weights=rank_weights[index], error=results.error(index, rank_weights[index]))
            for index, term in enumerate(terms)
        ]
    run.single_process.step.before.restore(run.module)
    return replace(facts, terms=tuple(terms), terms_residual=terms_residual)


def _with_statistics_of_shards(
    run: ShardRun, compared: Mapping[str, torch.Tensor], batch: Any, norms: Sequence[str], shards: int
) -> Fit:
    """Test if BatchNorm per shard, instead of over the batch, explains the gradients `compared`."""
    best = Fit()
    for views in (False, True):
        with contextlib.suppress(Exception):  # rows may not be samples
            by_shard = replace(run, by_shard=norms, shards=shards, views=views)
            best = min(best, _fit_ratio(compared, total_gradient(by_shard, batch)[0]), key=lambda f: f.residual)
    return best


def _fit_ratio(target: Mapping[str, torch.Tensor], part: Mapping[str, torch.Tensor]) -> Fit:
    ratio, residual = fit(target, [part])
    return Fit(ratio[0], residual)


def _mismatches(
    data: SingleStepData, averaged: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> set[str]:
    return {
        name
        for name, gradient in expected.items()
        if name in averaged and distance(averaged[name], gradient) > data.tolerance[name] * data.scale[name]
    }


def _rounded(
    data: SingleStepData, averaged: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor], whole: Gradients
) -> tuple[str, ...]:
    """Return names of gradients whose difference is rounding, since it vanishes in float64.

    A scalar, e.g. the gradient of a bias, may lose far more precision on shards than on the global batch, and a deep
    model with batch statistics of few samples loses precision in all gradients. `exact` is the ranks' average in
    float64, `whole` the gradient of the global batch in float64.
    """
    names = []
    for name in sorted(_mismatches(data, averaged, data.gradients) & set(exact) & set(whole)):
        gap = distance(averaged[name], data.gradients[name])
        if distance(exact[name], whole[name]) <= min(gap / 10, _LARGEST_ROUNDING * data.scale[name]):
            names.append(name)
    return tuple(names)


def _rounded_on_shards(
    run: ShardRun, averaged: Mapping[str, torch.Tensor], batch: Any, shards: Sequence[Any]
) -> tuple[str, ...]:
    """Return names from `_rounded`, called only with averages equal to the mean over shards."""
    if run.exact is None:
        return ()
    data = run.single_process.step
    as_shards = {name: averaged[name] for name in averaged.keys() - _mismatches(data, averaged, _mean_of(run, shards))}
    exact = _mean_of(run.exact, shards)
    return _rounded(data, as_shards, exact, total_gradient(run.exact, batch)[0])


def _mean_of(run: ShardRun, shards: Sequence[Any]) -> Gradients:
    """Return the mean of the shards' gradients; only one shard's gradients are in memory."""
    mean: Gradients = {}
    for shard in shards:
        for name, gradient in total_gradient(run, shard)[0].items():
            part = gradient / len(shards)
            mean[name] = mean[name] + part if name in mean else part
    return mean


def _coupling(run: ShardRun, batch: Any, shard: Any) -> Coupling:
    coupling = first_coupling(run.module, partial(run.forward, batch), partial(run.forward, shard))
    # float64 reveals a coupling smaller than rounding in the model's dtype.
    if coupling.module is None and (exact_run := run.exact) is not None:
        forwards = partial(exact_run.forward, batch), partial(exact_run.forward, shard)
        exact = first_coupling(exact_run.module, *forwards, rounding=_COUPLED_EXACTLY)
        coupling = exact if coupling == Coupling() or exact.module is not None else coupling
    return coupling
