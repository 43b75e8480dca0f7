"""What is true of an architecture under DDP, found out with plain autograd in one process, without ddpcheck.

Which parameters get no gradient, or a zero one, with the model's own dropout, over several seeds and on every shard;
and whether the mean of the shards' gradients is the gradient of the global batch, in float64 with nothing random.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

from tests.models.architecture import Architecture

Gradients = dict[str, torch.Tensor]
SEEDS, MANY_SEEDS = 6, 60  # many where layers are dropped by chance, all of one kind at once perhaps
RANDOM_WORDS = ("drop", "jitter", "mask_time_prob", "mask_feature_prob")
EXACT, IN_FLOAT32 = 2e-6, 1e-3  # relative; parts of a float64 model may compute in float32


@dataclass(frozen=True)
class Truth:
    """What holds for one architecture.

    Attributes:
        never: Parameters without gradient in any step on any shard.
        sometimes: Those without gradient in some.
        zero: Those whose gradient is there and exactly zero, always, for other weights too.
        gap: Largest relative distance between the mean of the shards' gradients and the global batch's.
        summed: Whether the global batch's gradient is the sum of the shards'.
        weights: Of the shards, where the global batch's gradient is a weighted sum of theirs; else empty.
        exact: Whether that was computed in float64.
    """

    never: frozenset[str]
    sometimes: frozenset[str]
    zero: frozenset[str]
    gap: float
    summed: bool
    weights: tuple[float, ...]
    exact: bool

    @property
    def parity(self) -> bool:
        """Whether data parallelism computes the gradient of the global batch."""
        return self.gap <= (EXACT if self.exact else IN_FLOAT32)


def find_truth(architecture: Architecture, world_size: int = 2) -> Truth:
    """Measure one architecture."""
    never, sometimes, zero = participation(architecture, world_size)
    try:
        with torch.random.fork_rng():
            gap, summed, weights = parity(architecture, world_size, torch.float64)
        exact = True
    except (RuntimeError, ValueError, ArithmeticError):  # some kernels have no float64
        gap, summed, weights = parity(architecture, world_size, torch.float32)
        exact = False
    return Truth(never, sometimes, zero, gap, summed, weights, exact)


def shards_of(architecture: Architecture, batch: dict[str, Any], world_size: int) -> list[dict[str, Any]]:
    if architecture.shard is not None:
        return [architecture.shard(batch, rank, world_size) for rank in range(world_size)]
    size = next(len(value) for value in batch.values() if isinstance(value, torch.Tensor)) // world_size
    return [
        {k: v[rank * size : (rank + 1) * size] if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        for rank in range(world_size)
    ]


def all_gradients(architecture: Architecture, module: nn.Module, batch: dict[str, Any]) -> tuple[Gradients, float]:
    module.zero_grad(set_to_none=True)
    loss = architecture.recipe().loss(module, batch)
    loss.backward()
    named = module.named_parameters(remove_duplicate=False)
    return {name: p.grad.clone() for name, p in named if p.grad is not None}, float(loss.detach())


def participation(architecture: Architecture, world_size: int) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    torch.manual_seed(1)
    module = architecture.build()
    names = {name for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    missing: list[set[str]] = []
    moving: set[str] = set()
    by_chance = any("DDP104" in codes for codes in (architecture.expected, *architecture.unlike.values()))
    for seed in range(MANY_SEEDS if by_chance else SEEDS):
        torch.manual_seed(seed)
        batch = architecture.batch(seed)
        if seed % 2:  # weights that begin as zeros, as in LoRA, must not make a gradient zero for good
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter += 0.05 * torch.randn_like(parameter)
        for rank, shard in enumerate(shards_of(architecture, batch, world_size)):
            torch.manual_seed(100 * seed + rank)
            found, _ = all_gradients(architecture, module, shard)
            missing.append(names - found.keys())
            moving |= {name for name, gradient in found.items() if gradient.count_nonzero()}
    never = frozenset.intersection(*map(frozenset, missing))
    sometimes = frozenset().union(*missing) - never
    return never, sometimes, frozenset(names - moving - never - sometimes)


def parity(architecture: Architecture, world_size: int, dtype: torch.dtype) -> tuple[float, bool, tuple[float, ...]]:
    worst, summed, weights = 0.0, False, ()
    for step in range(2):
        torch.manual_seed(1)
        module = architecture.build().to(dtype)
        put_out(module)
        torch.manual_seed(step)
        batch = in_dtype(architecture.batch(step), dtype)
        state = {name: buffer.clone() for name, buffer in module.named_buffers()}
        with the_same_for_every_sample():
            whole, value = all_gradients(architecture, module, batch)
            again, _ = all_gradients(architecture, restored(module, state), batch)
            parts = [
                all_gradients(architecture, restored(module, state), shard)[0]
                for shard in shards_of(architecture, batch, world_size)
            ]
        if not math.isfinite(value):
            raise ArithmeticError("the loss is not finite")
        noise = distance(again, whole)
        assert noise <= (EXACT if dtype == torch.float64 else IN_FLOAT32), f"still random: {noise}"
        mean = combined(parts, [1 / world_size] * world_size)
        gap = distance(mean, whole)
        if gap > worst:
            worst = gap
            summed = distance(combined(parts, [1.0] * world_size), whole) < 1e-5
            weights = fitting(parts, whole, min(1e-4, gap / 10))
    return worst, summed, weights


def put_out(module: nn.Module) -> None:
    """Set every rate of everything random to 0, in the modules and in their configurations."""
    holders: list[Any] = [*module.modules()]
    configs = [vars(holder).get("config") for holder in holders]
    while configs:
        config = configs.pop()
        if config is not None and config not in holders and hasattr(config, "__dict__"):
            holders.append(config)
            configs += [value for value in vars(config).values() if type(value).__name__.endswith("Config")]
    for holder in holders:
        if isinstance(holder, nn.modules.dropout._DropoutNd):
            holder.p = 0.0
        for name, value in vars(holder).items():
            if isinstance(value, float) and any(word in name for word in RANDOM_WORDS):
                setattr(holder, name, 0.0)


@contextlib.contextmanager
def the_same_for_every_sample() -> Iterator[None]:
    """Have random tensors repeat one row: what is drawn for a sample does not depend on the others."""
    generator = torch.Generator()
    drawn = {name: getattr(torch, name) for name in ("rand", "randn", "randint")}

    def row(name: str, size: tuple[int, ...], *limits: int, **options: Any) -> torch.Tensor:
        generator.manual_seed(0)
        options.pop("generator", None)
        made: torch.Tensor = drawn[name](*limits, size[1:], generator=generator, **options)
        return made.expand(size).clone()

    def sized(name: str) -> Any:
        def draw(*size: Any, **options: Any) -> torch.Tensor:
            return row(name, tuple(size[0]) if size and not isinstance(size[0], int) else size, **options)

        return draw

    def integers(*arguments: Any, **options: Any) -> torch.Tensor:
        *limits, size = arguments
        return row("randint", tuple(size), *(limits if len(limits) > 1 else [0, *limits]), **options)

    with (
        mock.patch("torch.rand", sized("rand")),
        mock.patch("torch.randn", sized("randn")),
        mock.patch("torch.randint", integers),
    ):
        yield


def restored(module: nn.Module, state: Mapping[str, torch.Tensor]) -> nn.Module:
    for name, buffer in module.named_buffers():
        buffer.copy_(state[name])
    return module


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, dict):
        return {key: in_dtype(item, dtype) for key, item in value.items()}
    if isinstance(value, list):
        return [in_dtype(item, dtype) for item in value]
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def combined(parts: list[Gradients], weights: list[float] | tuple[float, ...]) -> Gradients:
    names = {name for part in parts for name in part}
    return {
        name: sum((w * part[name].double() for w, part in zip(weights, parts, strict=True) if name in part))  # type: ignore[misc]
        for name in names
    }


def distance(got: Gradients, want: Gradients) -> float:
    """The largest relative distance of one parameter; against what is next to nothing beside the others, that."""
    total = math.sqrt(sum(float(g.double().square().sum()) for g in want.values()))
    worst = 0.0
    for name in got.keys() | want.keys():
        there = want.get(name, torch.zeros(()))
        gap = float((got.get(name, torch.zeros(())).double() - there.double()).norm())
        worst = max(worst, gap / max(float(there.double().norm()), 1e-7 * total, 1e-300))
    return worst


def fitting(parts: list[Gradients], whole: Gradients, tolerance: float) -> tuple[float, ...]:
    """The weights of the parts that add up to the whole, up to a relative distance of `tolerance`; empty without."""
    names = sorted(whole)
    columns = [torch.cat([part.get(n, torch.zeros_like(whole[n])).double().flatten() for n in names]) for part in parts]
    target = torch.cat([whole[n].double().flatten() for n in names])
    weights = torch.linalg.lstsq(torch.stack(columns, 1), target[:, None]).solution[:, 0].tolist()
    return tuple(weights) if distance(combined(parts, weights), whole) < tolerance else ()
