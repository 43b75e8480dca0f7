"""Loss terms on global batch and shards: normalization and coupling of each.

Runs in the single process if the ranks' average is not the gradient of the global batch (see `shard_analysis`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ddpcheck.findings.errors import TargetError
from ddpcheck.findings.evidence.gradients import LossTerm
from ddpcheck.findings.replace import replace
from ddpcheck.gather.autograd.autograd_graph import named_parameters, record_lines
from ddpcheck.gather.autograd.loss_terms import Edge, PairedTerms, backward_through_terms, split_loss
from ddpcheck.gather.ddp.loop_events import count_backwards
from ddpcheck.gather.phases.single_process import SingleProcess
from ddpcheck.gather.steps import training_step
from ddpcheck.gather.steps.batch_coupling import FirstActivations, factors_for_part, gradients_changed
from ddpcheck.gather.steps.gradient_distance import fit, norm
from ddpcheck.gather.steps.training_step import Gradients, Loss
from ddpcheck.recipe.pytree import batch_size, named_tensors, tree_map, upcast

MOST_ELEMENTS = 1 << 28  # limit for the gradients of all shards together, in memory at once

_MOST_TERMS = 16
_SAME = 1e-3
_MOST_PRECISE = 1e-5  # resolution of weights fitted to float32 gradients


@contextlib.contextmanager
def _forward_by_shard(module: nn.Module, shards: int, samples: int | None) -> Iterator[None]:
    """Make `module` process its input shard by shard in the block.

    `samples`: batch size if the input may be several augmented views of the batch, concatenated along dim 0; each
    forward then processes one shard of every view. None: the input has one row per sample.
    """
    original = module.forward
    override = vars(module).get("forward")

    def forward(rows: torch.Tensor) -> torch.Tensor:
        views = 1 if samples is None else len(rows) // samples
        if len(rows) % (views * shards):
            output: torch.Tensor = original(rows)
            return output
        parts = rows.unflatten(0, (views, shards, -1))
        outputs = [original(part.flatten(0, 1)).unflatten(0, (views, -1)) for part in parts.unbind(1)]
        return torch.stack(outputs, 1).flatten(0, 2)

    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if override is not None:
            module.forward = override


@dataclass(frozen=True, slots=True)
class ShardRun:
    """Settings to compute the loss on a part of the batch."""

    single_process: SingleProcess
    module: nn.Module  # in the model's dtype or in float64
    step: int
    eval_modules: Sequence[str] = ()  # modules set to eval mode during the run
    by_shard: Sequence[str] = ()  # modules that see one shard at a time
    shards: int = 1
    views: bool = False  # True if the input of a `by_shard` module is concatenated views of the batch
    activations: FirstActivations | None = None  # records the forward pass

    @property
    def exact(self) -> ShardRun | None:
        """Return these settings with the module's float64 copy; None if there is no copy."""
        double = self.single_process.double
        return None if double is None else replace(self, module=double)

    @contextlib.contextmanager
    def loss(self, part: Any) -> Iterator[Loss]:
        """Restore the step's initial state; yield the loss on `part`, ready for backward."""
        part = upcast(part) if self.module is self.single_process.double else part
        self.single_process.rewind(self.module)
        training_step.clear_gradients(self.module)
        with contextlib.ExitStack() as stack:
            stack.enter_context(training_step.random_numbers(self.single_process.numbers, self.module, part))
            for name in self.eval_modules:
                self.module.get_submodule(name).eval()
            stack.callback(lambda: [self.module.get_submodule(name).train() for name in self.eval_modules])
            for name in self.by_shard:
                count = batch_size(part) if self.views else None
                stack.enter_context(_forward_by_shard(self.module.get_submodule(name), self.shards, count))
            seed = training_step.step_seed(self.single_process.seed, self.step)
            with record_lines(), self.activations or contextlib.nullcontext():
                loss = training_step.compute_loss(
                    self.single_process.recipe, self.module, part, step=self.step, seed=seed, phase="shard by shard, "
                )
            yield loss

    def forward(self, part: Any) -> None:
        """Run only the forward pass on `part`."""
        with self.loss(part):
            pass

    def terms(self, part: Any) -> tuple[list[Edge], list[str]]:
        """Return the `Edge` of each loss term on `part`, and the names of `Loss.parts`."""
        with count_backwards() as backwards, self.loss(part) as loss:
            if backwards[0]:  # gradients accumulated inside the loss belong to all terms
                return [], []
            return split_loss(loss.total, loss.parts), loss.names

    def gradients(self, part: Any, paired: PairedTerms) -> Iterator[Gradients]:
        """Yield the gradients of each loss term on `part`."""
        with self.loss(part) as loss:
            if not len(paired):
                training_step.run_backward(loss.total)
                yield training_step.gradients_of(named_parameters(self.module))
                return
            edges = split_loss(loss.total, loss.parts)
            for term in paired.sort(edges):
                training_step.clear_gradients(self.module)
                backward_through_terms(loss.total, edges, term)
                yield training_step.gradients_of(named_parameters(self.module))


def total_gradient(run: ShardRun, part: Any) -> tuple[Gradients, float]:
    """Return the gradient and the value of the whole loss on `part`."""
    with run.loss(part) as loss:
        training_step.run_backward(loss.total)
        return training_step.gradients_of(named_parameters(run.module)), loss.value


def fill_with_zeros(gradients: Gradients, like: Mapping[str, torch.Tensor]) -> Gradients:
    """Return `gradients` with zeros for names of `like` that are missing."""
    return {name: gradients.get(name, torch.zeros_like(tensor)) for name, tensor in like.items()}


def weighted_sum(parts: Sequence[Gradients], weights: Sequence[float]) -> Gradients:
    """Return the weighted sum of gradients with the same names."""
    return {n: torch.stack([w * part[n] for w, part in zip(weights, parts, strict=True)]).sum(0) for n in parts[0]}


# Loss terms


@dataclass(slots=True)
class Terms:
    """Gradients of the loss terms, on the global batch and on each shard."""

    terms: list[LossTerm]  # evidence per term
    whole: list[Gradients]  # per term, on the global batch
    parts: list[list[Gradients]]  # per term, per shard
    scale: Mapping[str, float]  # unit of gradient differences, by parameter

    @property
    def total(self) -> Gradients:
        """Return the gradient of the whole loss on the global batch."""
        return weighted_sum(self.whole, [1.0] * len(self.whole))

    @property
    def mean(self) -> Gradients:
        """Return the mean over the shards of the gradient of the whole loss."""
        return weighted_sum(
            [gradients for term_parts in self.parts for gradients in term_parts],
            [1 / len(term_parts) for term_parts in self.parts for _ in term_parts],
        )

    def rank_weights(self, averaged: Gradients) -> list[tuple[float, ...]] | None:
        """Return the weight of each shard in each loss term that explains `averaged`.

        `averaged`: averaged gradients of the ranks. Returns a tuple per term, or None if no weights fit.
        """
        flat = [_divide_by_scale(gradients, self.scale) for term_parts in self.parts for gradients in term_parts]
        weights, residual = fit(_divide_by_scale(averaged, self.scale), flat)
        count = len(self.parts[0])
        if residual > _SAME:
            return None
        return [tuple(weights[start : start + count]) for start in range(0, len(weights), count)]

    def error(self, number: int, weights: Sequence[float]) -> float:
        """Return the relative error between term `number` and the weighted sum of shard gradients."""
        residual = weighted_sum([self.whole[number], *self.parts[number]], [1.0, *(-weight for weight in weights)])
        total = _scaled_norm(self.total, self.scale)
        return _scaled_norm(residual, self.scale) / total if total else 0.0


def analyse_terms(run: ShardRun, batch: Any, shards: Sequence[Any]) -> Terms:
    """Measure gradients, normalization and sample coupling of each loss term."""
    data = run.single_process.step
    size = sum(gradient.numel() for gradient in data.gradients.values())
    most = min(_MOST_TERMS, MOST_ELEMENTS // ((len(shards) + 1) * max(size, 1)))
    edges, (names, *_) = zip(*(run.terms(part) for part in (batch, *shards)), strict=True)
    paired = PairedTerms(edges if all(edges) else [], most=max(most, 1))
    like: Mapping[str, torch.Tensor] = data.gradients
    if run.module is run.single_process.double:
        like = {name: gradient.double() for name, gradient in like.items()}
    whole = [fill_with_zeros(gradients, like) for gradients in run.gradients(batch, paired)]
    by_shard = [[fill_with_zeros(gradients, like) for gradients in run.gradients(shard, paired)] for shard in shards]
    parts = [[shard_gradients[index] for shard_gradients in by_shard] for index in range(len(whole))]
    results = Terms([], whole, parts, {name: data.scale.get(name, 0.0) for name in like})
    for index, gradients in enumerate(whole):
        weights, residual = fit(
            _divide_by_scale(gradients, results.scale), [_divide_by_scale(part, results.scale) for part in parts[index]]
        )
        ends = paired.sort(edges[0])[index] if len(paired) else []
        count, counts = _matching_count(shards, weights, precision=min(max(_MOST_PRECISE, 100 * residual), _SAME))
        results.terms.append(
            LossTerm(
                name=names[ends[0].part] if len(names) > 1 and len({end.part for end in ends}) == 1 else "",
                location=ends[0].location if len({end.location for end in ends}) == 1 else None,
                error=results.error(index, [1 / len(shards)] * len(shards)),
                weights=tuple(weights),
                residual=results.error(index, weights),
                count=count,
                counts=counts,
            )
        )
    with contextlib.suppress(Exception):  # the batch may not be repeatable
        doubled = _summed_terms(run, batch, paired, whole)
        results.terms = [replace(t, doubles_with_batch=s) for t, s in zip(results.terms, doubled, strict=True)]
    with contextlib.suppress(Exception):  # forward may reject changed activations
        for large in (False, True):
            tested = [not large or (term.coupled is False and not term.is_normalised) for term in results.terms]
            if any(tested):
                coupled = _coupled_terms(run, batch, shards[0], paired, large=large)
                results.terms = [
                    replace(term, coupled=is_coupled) if is_tested else term
                    for term, is_coupled, is_tested in zip(results.terms, coupled, tested, strict=True)
                ]
    return results


def _divide_by_scale(gradients: Gradients, scale: Mapping[str, float]) -> Gradients:
    return {name: gradient / scale[name] for name, gradient in gradients.items() if scale[name]}


def _scaled_norm(gradients: Gradients, scale: Mapping[str, float]) -> float:
    return math.sqrt(sum(norm(gradient) ** 2 for gradient in _divide_by_scale(gradients, scale).values()))


def _summed_terms(run: ShardRun, batch: Any, paired: PairedTerms, whole: Sequence[Gradients]) -> list[bool]:
    """Return True for terms that are sums: duplicated samples double the gradient.

    Means and BatchNorm statistics do not change with duplicated samples.
    """
    size = batch_size(batch)

    def duplicate(leaf: Any) -> Any:
        return torch.cat([leaf, leaf]) if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == size else leaf

    doubled = []
    for single, double in zip(whole, run.gradients(tree_map(duplicate, batch), paired), strict=True):
        ratio, residual = fit(fill_with_zeros(double, single), [single])
        doubled.append(abs(ratio[0] - 2) < _SAME and residual < _SAME)
    return doubled


def _coupled_terms(run: ShardRun, batch: Any, shard: Any, paired: PairedTerms, *, large: bool) -> list[bool | None]:
    """Return, per term, True if gradients of other samples depend on samples of `shard`."""
    part = FirstActivations()
    replace(run, activations=part).forward(shard)

    def gradients_by_term(activations: FirstActivations) -> list[dict[int, torch.Tensor]]:
        gradients = []
        for _ in replace(run, activations=activations).gradients(batch, paired):
            gradients.append(activations.gradients)
            activations.gradients = {}
        return gradients

    whole = FirstActivations()
    before = gradients_by_term(whole)
    changes = factors_for_part(whole.values, part.values, large=large)
    after = gradients_by_term(FirstActivations({index: factor for index, (_, factor) in changes.items()}))
    return [gradients_changed(old, new, changes) for old, new in zip(before, after, strict=True)]


# Normalization of the loss


def _matching_count(
    shards: Sequence[Any], weights: Sequence[float], *, precision: float
) -> tuple[str, tuple[float, ...]]:
    """Find the count (e.g. of targets) in each shard that is proportional to `weights`.

    Returns the name of the count, and its value in each shard; empty if no count is proportional within `precision`
    (accuracy of `weights`). If several counts are, returns the closest.
    """
    counts: dict[str, list[float]] = {}
    for shard in shards:
        for name, value in _counts(shard):
            counts.setdefault(name, []).append(value)
    total = sum(weights)
    nearest: tuple[str, tuple[float, ...]] = "", ()
    for name, values in counts.items():
        if len(values) != len(shards) or len(set(values)) == 1 or min(values) < 0 or not total:
            continue
        distance = max(abs(v / sum(values) - w / total) for v, w in zip(values, weights, strict=True))
        if distance < precision:
            nearest, precision = (name, tuple(values)), distance
    return nearest


def _counts(shard: Any) -> Iterator[tuple[str, float]]:
    """Yield name and value of each count that may normalize a loss."""
    with contextlib.suppress(TargetError):
        yield "samples", float(batch_size(shard))
    for path, tensor in named_tensors(shard, "batch"):
        if tensor.is_complex() or tensor.layout != torch.strided or tensor.is_quantized:
            continue
        if not tensor.is_floating_point() and tensor.dtype != torch.bool:
            yield f"{path} != -100", float((tensor != -100).sum())
        yield (path if tensor.dtype == torch.bool else f"{path} != 0"), float((tensor != 0).sum())
        yield f"the sum of {path}", float(tensor.sum(dtype=torch.float64))
        yield f"elements of {path}", float(tensor.numel())
