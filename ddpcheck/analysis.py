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
from ddpcheck.gather.compare import fit, norm
from ddpcheck.gather.coupling import Coupling, first_coupling
from ddpcheck.gather.events import counted_backwards
from ddpcheck.gather.randomness import QuietRandomness, quiet_modules
from ddpcheck.gather.stepping import Gradients, clear_gradients, compute_loss, gradients_of, run_backward
from ddpcheck.graph import named_parameters
from ddpcheck.nests import batch_size, map_nest, to_device, upcast
from ddpcheck.reference import SingleProcess, make_batch, step_seed

_MOST_ELEMENTS = 1 << 28  # of the gradients of all shards together
_MOST_TERMS = 8
_SAME = 1e-3
_LARGEST_ROUNDING = 0.01  # of what may be put down to rounding where float64 tells it
_COUPLED_EXACTLY = 1e-9  # relative; parts of a float64 run may be in float32, and are the same row by row


def analyse(step: int, gradient_file: Path, world_size: int, threads: int) -> ShardAnalysis:
    """Run the shards one by one without a process group, to tell coupling from normalisation and from the world.

    Args:
        step: Counted from 0.
        gradient_file: Where rank 0 has put the average of the ranks' gradients.
        world_size: Number of ranks.
        threads: With which a rank computes. With as many, a shard gives the very same numbers here: a sum that is cut
            into other parts is rounded otherwise, and a deep network can make a thousand times more of that.

    Returns:
        What could be measured: where a shard cannot be run here, only what the global batch tells.
    """
    own: SingleProcess = this_rank.state["single"]
    here = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with own.aside():
            return _analyse(own, step, gradient_file, world_size)
    finally:
        torch.set_num_threads(here)


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
        parts, losses = _gradients_by_shard(own, own.module, shards, step)
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
    with contextlib.suppress(Exception):  # a model that insists on its dtype
        found = replace(found, rounded=_rounded(own, averaged, mean, batch, shards, step))
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


def _rounded(
    own: SingleProcess, averaged: Gradients, mean: Gradients, batch: Any, shards: Sequence[Any], step: int
) -> tuple[str, ...]:
    """The gradients that differ from the global batch's by rounding alone: in float64 the difference is gone.

    A single number, the gradient of a bias say, may lose far more on shards than it happened to lose on the global
    batch. Only where the ranks computed what the shards give by themselves, for the float64 run tells nothing of them.
    """
    if own.double is None:
        return ()
    ([whole], *_), _ = _gradients_by_shard(own, own.double, [upcast(batch)], step, apart=False)
    parts, _ = _gradients_by_shard(own, own.double, [upcast(shard) for shard in shards], step, apart=False)
    found = []
    for name, want in own.gradients.items():
        allowed = own.tolerance[name] * own.scale[name]
        gap = norm(averaged[name].double() - want.double()) if name in averaged else 0.0
        if not allowed < gap <= _LARGEST_ROUNDING * own.scale[name]:
            continue
        exact = torch.stack([term[name] for of_shard in parts for term in of_shard]).sum(0) / len(shards)
        if norm(averaged[name].double() - mean[name].double()) <= allowed and norm(exact - whole[name]) <= gap / 10:
            found.append(name)
    return tuple(found)


def _gradients_by_shard(
    own: SingleProcess, module: nn.Module, shards: Sequence[Any], step: int, *, apart: bool = True
) -> tuple[list[list[Gradients]], list[float]]:
    """The gradients of `module` on each shard by itself, with zeros where there is none, and the losses.

    Args:
        own: Of this process.
        module: The module, in its own dtype or in float64.
        shards: Parts of the batch, in the dtype of the module.
        step: Counted from 0.
        apart: Whether to keep the terms of the loss apart.
    """
    parts, losses = [], []
    for shard in shards:
        gradients, value = _gradients_by_part(own, module, shard, step, apart=apart)
        parts.append(gradients)
        losses.append(value)
    return parts, losses


def _gradients_by_part(
    own: SingleProcess, module: nn.Module, shard: Any, step: int, *, apart: bool = True
) -> tuple[list[Gradients], float]:
    own.rewind(module)
    clear_gradients(module)
    found: list[Gradients] = []
    with _hushed(own, module), counted_backwards() as backwards:
        seed = step_seed(own.seed, step)
        loss = compute_loss(own.recipe, module, shard, step=step, seed=seed, place="shard by shard, ")
        terms = [part for part in loss.parts if part.requires_grad]
        # What the loss has accumulated itself belongs to all of its terms.
        apart = apart and len(terms) <= _MOST_TERMS and not backwards[0]
        for term in terms if apart else [loss.total]:
            if apart:
                clear_gradients(module)
            run_backward(term, retain_graph=True)
            gradients = gradients_of(named_parameters(module))
            found.append({name: gradients.get(name, torch.zeros_like(own.gradients[name])) for name in own.gradients})
    return found, loss.value


@contextlib.contextmanager
def _hushed(own: SingleProcess, module: nn.Module) -> Iterator[None]:
    if not own.draws:
        yield
        return
    with quiet_modules(module), QuietRandomness():
        yield


def _summed_terms(own: SingleProcess, batch: Any, step: int) -> tuple[int, ...]:
    """The terms of the loss whose gradient doubles when every sample of the batch is there twice: they are sums.

    A mean stays what it was, and so does a BatchNorm, whose statistics do not change.
    """
    size = batch_size(batch)

    def twice(leaf: Any) -> Any:
        return torch.cat([leaf, leaf]) if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == size else leaf

    whole, _ = _gradients_by_part(own, own.module, batch, step)
    repeated, _ = _gradients_by_part(own, own.module, map_nest(twice, batch), step)
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
    """The first module whose output for a sample of `shard` depends on the other samples, and the line that does it.

    In float64 a coupling shows that is smaller than rounding in the model's own dtype.
    """

    def run(module: nn.Module, part: Any) -> Callable[[], None]:
        def forward() -> None:
            own.rewind(module)
            with quiet_modules(module), QuietRandomness():
                compute_loss(own.recipe, module, part, step=step, seed=step_seed(own.seed, step))

        return forward

    found = first_coupling(own.module, run(own.module, batch), run(own.module, shard))
    if found == Coupling() and own.double is not None:
        whole, part = run(own.double, upcast(batch)), run(own.double, upcast(shard))
        found = first_coupling(own.double, whole, part, rounding=_COUPLED_EXACTLY)
    if found.module is None:
        return {"line": found.line}
    kind = type(own.module.get_submodule(found.module)).__name__
    return {"module": found.module, "module_class": kind, "line": found.line}
