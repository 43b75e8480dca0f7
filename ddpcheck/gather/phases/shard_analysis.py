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
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddpcheck.findings.evidence.gradients import Coupling, Fit, ShardAnalysis, WeightedFit
from ddpcheck.findings.replace import replace
from ddpcheck.gather.phases import shard_terms
from ddpcheck.gather.phases.single_process import SingleProcess
from ddpcheck.gather.state.tensor_file import TensorFile
from ddpcheck.gather.steps.batch_coupling import first_coupling
from ddpcheck.gather.steps.gradient_distance import distance, fit
from ddpcheck.gather.steps.training_step import Gradients, compute_loss, random_numbers, step_seed
from ddpcheck.recipe.pytree import to_device, upcast
from ddpcheck.recipe.recipe import summary
from ddpcheck.worlds import rank as this_rank

_SAME = 1e-3
_LARGEST_ROUNDING = 1e-4  # max difference in float64 to blame rounding in the model's dtype
_COUPLED_EXACTLY = 1e-9  # relative; parts of a float64 run may be in float32, identical per row


def analyse(step: int, gradient_file: Path, exact_file: Path | None, world_size: int, threads: int) -> ShardAnalysis:
    """Run each of `world_size` shards without a process group to explain a mismatch.

    The files have the ranks' averaged gradients, `exact_file` in float64. `threads`, of a rank, reproduce the rank's
    values bit by bit: sums split differently round differently, and a deep network can amplify the error by 1000.
    """
    own: SingleProcess = this_rank.state["single"]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with own.aside():
            return _analyse(own, step, gradient_file, exact_file, world_size)
    finally:
        torch.set_num_threads(num_threads)


def _analyse(
    own: SingleProcess, step: int, gradient_file: Path, exact_file: Path | None, world_size: int
) -> ShardAnalysis:
    averaged = TensorFile(gradient_file, device=own.device)
    compared = {name: averaged[name] for name in own.step.gradients if name in averaged}
    facts = ShardAnalysis(global_loss=own.step.loss, numbers=own.numbers)
    beyond = _beyond(own, averaged, own.step.gradients)
    batch = to_device(own.global_batch(step), own.device)
    if exact_file is not None and own.double is not None:
        with contextlib.suppress(Exception):  # the model may not run in float64
            exact = TensorFile(exact_file, device=own.device)
            whole, _ = shard_terms.total_gradient(shard_terms.ShardRun(own, own.double, step), upcast(batch))
            facts = replace(facts, rounded=_rounded(own, averaged, exact, whole))
            if facts.rounded and beyond <= set(facts.rounded):
                return facts
    try:
        shards = [own.recipe.local_batch(batch, rank, world_size) for rank in range(world_size)]
    except Exception as error:
        return replace(facts, error=summary(error))
    with contextlib.suppress(Exception):
        facts = replace(facts, rounded=(*facts.rounded, *_rounded_on_shards(own, compared, batch, shards, step)))
        if facts.rounded and beyond <= set(facts.rounded):
            return facts
    facts = replace(facts, against_global=_fit(compared, own.step.gradients))
    size = sum(gradient.numel() for gradient in own.step.gradients.values())
    if world_size * size > shard_terms.MOST_ELEMENTS:
        return replace(facts, error="the gradients of all shards together are too large to be kept")
    try:
        runs = [shard_terms.total_gradient(shard_terms.ShardRun(own, own.module, step), shard) for shard in shards]
    except Exception as error:  # e.g. a model with a fixed batch size
        return replace(facts, error=summary(error))
    filled_runs = [shard_terms.filled(gradients, own.step.gradients) for gradients, _ in runs]
    mean = shard_terms.weighted_sum(filled_runs, [1 / world_size] * world_size)
    weights, residual = fit(compared, filled_runs)
    facts = replace(
        facts,
        against_shards=_fit(compared, mean),
        rank_weights=WeightedFit(tuple(weights), residual),
        shard_losses=tuple(loss for _, loss in runs),
        other_parameters=tuple(sorted(set().union(*(grads for grads, _ in runs)) ^ set(own.step.gradients))),
    )
    return _add_terms(own, facts, compared, mean, batch, shards, step)


def _add_terms(
    own: SingleProcess,
    facts: ShardAnalysis,
    compared: Gradients,
    mean: Gradients,
    batch: Any,
    shards: Sequence[Any],
    step: int,
) -> ShardAnalysis:
    """Add the terms of the loss, and what couples the samples; `mean`: mean gradient of the shards."""
    try:
        exactly, seen = _look_at_terms(own, batch, shards, step)
    except Exception as error:  # fails both in float64 and in the model's dtype
        return replace(facts, error=summary(error))
    if exactly:
        facts = replace(facts, shard_rounding=_fit(mean, seen.mean).residual)
    if len(seen.whole) > 1:
        ratios, terms_residual = fit(compared, seen.whole)
    else:
        ratios, terms_residual = [facts.against_global.ratio], facts.against_global.residual
    by_shards = facts.against_shards
    changed = max(abs(by_shards.ratio - 1), by_shards.residual) > _SAME
    rank_weights = seen.rank_weights(compared) if changed else None
    with contextlib.suppress(Exception):  # forward may return anything
        facts = replace(facts, coupling=_coupling(own, batch, shards[0], step))
    norms = [name for name, module in own.module.named_modules() if isinstance(module, _BatchNorm) and module.training]
    if norms and changed:
        facts = replace(facts, by_statistics=_with_statistics_of_shards(own, compared, batch, step, norms, len(shards)))
    if norms and any(term.residual > _SAME * term.error for term in seen.terms):
        with contextlib.suppress(Exception):  # causes other than the batch statistics
            seen = shard_terms.look_at_terms(own, batch, shards, step, exactly=exactly, eval_modules=norms)
            facts = replace(facts, frozen=tuple(norms))
    terms = [replace(term, ratio=ratio) for term, ratio in zip(seen.terms, ratios, strict=True)]
    if rank_weights is not None:
        terms = [
            replace(term, rank_weights=rank_weights[number], error=seen.error(number, rank_weights[number]))
            for number, term in enumerate(terms)
        ]
    own.step.before.restore(own.module)
    return replace(facts, terms=tuple(terms), terms_residual=terms_residual)


def _with_statistics_of_shards(
    own: SingleProcess, compared: Mapping[str, torch.Tensor], batch: Any, step: int, norms: Sequence[str], shards: int
) -> Fit:
    """Return the best fit with `norms` seeing one shard each, over view layouts."""
    best = Fit()
    for views in (False, True):
        with contextlib.suppress(Exception):  # rows may not be samples
            run = shard_terms.ShardRun(own, own.module, step, by_shard=norms, shards=shards, views=views)
            best = min(best, _fit(compared, shard_terms.total_gradient(run, batch)[0]), key=lambda f: f.residual)
    return best


def _fit(target: Mapping[str, torch.Tensor], part: Mapping[str, torch.Tensor]) -> Fit:
    ratio, residual = fit(target, [part])
    return Fit(ratio[0], residual)


def _look_at_terms(own: SingleProcess, batch: Any, shards: Sequence[Any], step: int) -> tuple[bool, shard_terms.Terms]:
    """Return (True, loss terms in float64), or (False, terms in the model's dtype)."""
    if own.double is not None:
        with contextlib.suppress(Exception):
            return True, shard_terms.look_at_terms(own, batch, shards, step, exactly=True)
    return False, shard_terms.look_at_terms(own, batch, shards, step, exactly=False)


def _beyond(own: SingleProcess, averaged: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> set[str]:
    return {
        name
        for name, want in wanted.items()
        if name in averaged and distance(averaged[name], want) > own.step.tolerance[name] * own.step.scale[name]
    }


def _rounded(
    own: SingleProcess, averaged: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor], whole: Gradients
) -> tuple[str, ...]:
    """Return the gradients whose difference vanishes in float64, so is rounding.

    A scalar, e.g. the gradient of a bias, may lose far more precision on shards than on the global batch, and a deep
    model with statistics of few samples loses much everywhere. `exact` is the ranks' average in float64, `whole` the
    gradient of the global batch in float64.
    """
    names = []
    for name in sorted(_beyond(own, averaged, own.step.gradients) & set(exact) & set(whole)):
        gap = distance(averaged[name], own.step.gradients[name])
        if distance(exact[name], whole[name]) <= min(gap / 10, _LARGEST_ROUNDING * own.step.scale[name]):
            names.append(name)
    return tuple(names)


def _rounded_on_shards(
    own: SingleProcess, averaged: Mapping[str, torch.Tensor], batch: Any, shards: Sequence[Any], step: int
) -> tuple[str, ...]:
    """Apply `_rounded` to gradients that match the local shards, rerun in float64."""
    if own.double is None:
        return ()
    mean = _mean_of(shard_terms.ShardRun(own, own.module, step), shards)
    as_shards = {name: averaged[name] for name in averaged.keys() - _beyond(own, averaged, mean)}
    exact = _mean_of(shard_terms.ShardRun(own, own.double, step), [upcast(shard) for shard in shards])
    whole, _ = shard_terms.total_gradient(shard_terms.ShardRun(own, own.double, step), upcast(batch))
    return _rounded(own, as_shards, exact, whole)


def _mean_of(run: shard_terms.ShardRun, shards: Sequence[Any]) -> Gradients:
    """Return the mean of the shards' gradients, keeping one shard at a time."""
    mean: Gradients = {}
    for shard in shards:
        for name, gradient in shard_terms.total_gradient(run, shard)[0].items():
            part = gradient / len(shards)
            mean[name] = mean[name] + part if name in mean else part
    return mean


# Coupling between samples


def _coupling(own: SingleProcess, batch: Any, shard: Any, step: int) -> Coupling:
    """Find the first module whose output for a sample depends on other samples.

    float64 reveals a coupling smaller than rounding in the model's dtype.
    """

    def run(module: nn.Module, part: Any) -> None:
        own.rewind(module)
        with random_numbers(own.numbers, module, part):
            compute_loss(own.recipe, module, part, step=step, seed=step_seed(own.seed, step))

    coupling = first_coupling(own.module, partial(run, own.module, batch), partial(run, own.module, shard))
    if coupling.module is None and own.double is not None:
        whole, part = partial(run, own.double, upcast(batch)), partial(run, own.double, upcast(shard))
        exact = first_coupling(own.double, whole, part, rounding=_COUPLED_EXACTLY)
        coupling = exact if coupling == Coupling() or exact.module is not None else coupling
    return coupling
