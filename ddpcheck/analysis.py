"""Why the ranks' average differs from the global batch's gradient: what the shards, one by one, tell about it.

Runs in the single process, once, at the first step that differs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddpcheck import rank as this_rank
from ddpcheck.errors import TargetError
from ddpcheck.evidence import ShardAnalysis
from ddpcheck.gather.compare import fit
from ddpcheck.gather.coupling import first_coupling
from ddpcheck.gather.events import counted_backwards
from ddpcheck.gather.randomness import QuietRandomness, quiet_modules
from ddpcheck.gather.stepping import Gradients, clear_gradients, compute_loss, gradients_of
from ddpcheck.graph import named_parameters
from ddpcheck.nests import batch_size, map_nest, to_device
from ddpcheck.reference import SingleProcess, make_batch, step_seed

_MOST_ELEMENTS = 1 << 28  # of the gradients of all shards together
_MOST_TERMS = 8
_SAME = 1e-3


def analyse(step: int, gradient_file: Path, world_size: int) -> ShardAnalysis:
    """Run the shards one by one without a process group, to tell coupling from normalisation and from the world.

    Returns:
        What could be measured: where a shard cannot be run here, only what the global batch tells.
    """
    own: SingleProcess = this_rank.state["single"]
    with own.aside():
        return _analyse(own, step, gradient_file, world_size)


def _analyse(own: SingleProcess, step: int, gradient_file: Path, world_size: int) -> ShardAnalysis:
    averaged: Gradients = torch.load(gradient_file, map_location=own.device, weights_only=True, mmap=True)
    compared = {name: averaged[name] for name in own.gradients if name in averaged}
    global_ratio, global_residual = fit(compared, [own.gradients])
    found = ShardAnalysis(global_ratio=global_ratio[0], global_residual=global_residual, global_loss=own.loss)
    size = sum(gradient.numel() for gradient in own.gradients.values())
    if own.state is None or world_size * size > _MOST_ELEMENTS:
        return found
    batch = to_device(make_batch(own.recipe, step, seed=own.seed), own.device)
    try:
        shards = [own.recipe.local_batch(batch, rank, world_size) for rank in range(world_size)]
        parts, losses = [], []
        for shard in shards:
            gradients, value = _gradients_by_part(own, shard, step)
            parts.append(gradients)
            losses.append(value)
    except Exception:  # a model that insists on its batch size, say
        return found
    terms = [term for of_shard in parts for term in of_shard]
    mean: Gradients = {}
    for name in own.gradients:
        mean[name] = torch.stack([term[name] for term in terms]).sum(0) / world_size
    world_ratio, world_residual = fit({name: averaged[name] for name in compared}, [mean])
    weights, weights_residual = fit(own.gradients, terms)
    together = [{name: torch.stack([t[name] for t in part]).sum(0) for name in own.gradients} for part in parts]
    rank_weights, rank_residual = fit(compared, together)
    found = replace(
        found,
        weights=tuple(weights),
        weights_residual=weights_residual,
        world_ratio=world_ratio[0],
        world_residual=world_residual,
        rank_weights=tuple(rank_weights),
        rank_residual=rank_residual,
        shard_losses=tuple(losses),
    )
    with contextlib.suppress(Exception):  # a batch that cannot be repeated
        found = replace(found, summed=_summed_terms(own, batch, step))
    count = len(weights) // world_size
    for term in range(count):
        name, counts = _what_counts(shards, weights[term::count])
        if name:
            found = replace(found, count=name, counts=counts)
            break
    with contextlib.suppress(Exception):  # what a forward returns may be anything
        found = replace(found, **_coupling(own, batch, shards[0], step))
    own.state.restore(own.module)
    return found


def _gradients_by_part(own: SingleProcess, shard: Any, step: int) -> tuple[list[Gradients], float]:
    """The gradients of each term of the loss on one shard, with zeros where there is none, and the loss."""
    own.rewind(own.module)
    clear_gradients(own.module)
    found: list[Gradients] = []
    with _hushed(own), counted_backwards() as backwards:
        seed = step_seed(own.seed, step)
        loss = compute_loss(own.recipe, own.module, shard, step=step, seed=seed, place="shard by shard, ")
        terms = [part for part in loss.parts if part.requires_grad]
        apart = len(terms) <= _MOST_TERMS and not backwards[0]  # what the loss has accumulated itself belongs to all
        for term in terms if apart else [loss.total]:
            if apart:
                clear_gradients(own.module)
            term.backward(retain_graph=True)
            gradients = gradients_of(named_parameters(own.module))
            found.append({name: gradients.get(name, torch.zeros_like(own.gradients[name])) for name in own.gradients})
    return found, loss.value


@contextlib.contextmanager
def _hushed(own: SingleProcess) -> Iterator[None]:
    if not own.draws:
        yield
        return
    with quiet_modules(own.module), QuietRandomness():
        yield


def _summed_terms(own: SingleProcess, batch: Any, step: int) -> tuple[int, ...]:
    """The terms of the loss whose gradient doubles when every sample of the batch is there twice: they are sums.

    A mean stays what it was, and so does a BatchNorm, whose statistics do not change.
    """
    size = batch_size(batch)

    def twice(leaf: Any) -> Any:
        return torch.cat([leaf, leaf]) if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == size else leaf

    whole, _ = _gradients_by_part(own, batch, step)
    repeated, _ = _gradients_by_part(own, map_nest(twice, batch), step)
    found = []
    for term, (once, double) in enumerate(zip(whole, repeated, strict=True)):
        ratio, residual = fit(double, [once])
        if abs(ratio[0] - 2) < _SAME and residual < _SAME:
            found.append(term)
    return tuple(found)


# What the loss is divided by


def _what_counts(shards: Sequence[Any], weights: Sequence[float]) -> tuple[str, tuple[float, ...]]:
    """The count in the shards of the batch that goes as `weights` do, and its value on each rank."""
    counts: dict[str, list[float]] = {}
    for shard in shards:
        for name, value in _counts(shard):
            counts.setdefault(name, []).append(value)
    total = sum(weights)
    for name, values in counts.items():
        if len(values) != len(shards) or len(set(values)) == 1 or min(values) < 0 or not total:
            continue
        if all(abs(v / sum(values) - w / total) < _SAME for v, w in zip(values, weights, strict=True)):
            return name, tuple(values)
    return "", ()


def _counts(shard: Any) -> Iterator[tuple[str, float]]:
    """What a loss may be divided by, in words, and how much of it there is."""
    with contextlib.suppress(TargetError):
        yield "samples", float(batch_size(shard))
    for path, tensor in _named_tensors(shard, "batch"):
        if tensor.is_complex() or tensor.layout != torch.strided or tensor.is_quantized:
            continue
        if not tensor.is_floating_point() and tensor.dtype != torch.bool:
            yield f"{path} != -100", float((tensor != -100).sum())
        yield (path if tensor.dtype == torch.bool else f"{path} != 0"), float((tensor != 0).sum())
        yield f"the sum of {path}", float(tensor.sum(dtype=torch.float64))
        yield f"elements of {path}", float(tensor.numel())


def _named_tensors(nest: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(nest, torch.Tensor):
        yield path, nest
    elif isinstance(nest, Mapping):
        for key in nest:
            yield from _named_tensors(nest[key], f"{path}[{key!r}]")
    elif isinstance(nest, tuple) and hasattr(nest, "_fields"):
        for key in nest._fields:
            yield from _named_tensors(getattr(nest, key), f"{path}.{key}")
    elif isinstance(nest, list | tuple):
        for index, item in enumerate(nest):
            yield from _named_tensors(item, f"{path}[{index}]")
    elif is_dataclass(nest):
        for item in fields(nest):
            yield from _named_tensors(getattr(nest, item.name), f"{path}.{item.name}")


# What couples the samples


def _coupling(own: SingleProcess, batch: Any, shard: Any, step: int) -> dict[str, Any]:
    """The first module whose output for a sample of `shard` depends on the other samples, and the line that does it."""

    def run(part: Any) -> Callable[[], None]:
        def forward() -> None:
            own.rewind(own.module)
            with quiet_modules(own.module), QuietRandomness():
                compute_loss(own.recipe, own.module, part, step=step, seed=step_seed(own.seed, step))

        return forward

    found = first_coupling(own.module, run(batch), run(shard))
    kind = type(_submodule(own.module, found.module)).__name__ if found.module else ""
    return {"module": found.module, "module_class": kind, "line": found.line}


def _submodule(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name)
