"""Random numbers that belong to a sample: the same on the rank that has it and in the global batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ddpcheck.findings.exception_origin import passes_on
from ddpcheck.gather.state.randomness import QuietRandomness, mixed_seed

_MOST_SAMPLES = 4096

NumbersLike = Callable[..., torch.Tensor | None]


class SampleRandomness(QuietRandomness):
    """While active, each sample's part of a random tensor is seeded by that sample; what has no such parts is constant.

    So masks and noise are real ones, and yet a rank and the single process draw the same for a sample. A part is an
    element of the first dimension that is as long as the batch, or an equal share of the first dimension.

    Every operation takes one number from the generator that it would draw from, whatever its size: the parts of the
    next one differ, and a checkpoint that restores the generator draws the same again.
    """

    def __init__(self, samples: Sequence[int]) -> None:
        """`samples`: a number for each sample of the batch, by which its random numbers are seeded."""
        super().__init__()
        self._samples = samples if len(samples) <= _MOST_SAMPLES else ()

    @passes_on
    def _answer(self, constants: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        if name == "native_dropout_backward":
            return func(*args, **kwargs)
        generator = kwargs.get("generator") or torch.default_generator
        before = generator.get_state()
        draw = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        after = generator.get_state()

        def numbers(like: torch.Tensor, *, normal: bool = False) -> torch.Tensor | None:
            return self._numbers(like, draw, normal=normal)

        result = None
        if name in _OF_SAMPLES:
            given = {item.name: item.default_value for item in func._schema.arguments}
            given |= dict(zip(given, args, strict=False)) | kwargs
            result = _OF_SAMPLES[name](func(*args, **kwargs), given, numbers)
        if result is None:
            generator.set_state(before)
            result = constants(func, args, kwargs)
            if name == "native_dropout":
                result = result[0] / max(1 - args[1], 1e-3), result[1]  # as its backward, which is the real one
        generator.set_state(after)
        return result

    def _numbers(self, like: torch.Tensor, draw: int, *, normal: bool) -> torch.Tensor | None:
        """Uniform or normal numbers in the shape of `like`; None where that has no part for each sample.

        In float32, so that a model in float64 has the same ones.
        """
        count = len(self._samples)
        shape = like.shape
        along = next((dim for dim in (0, 1) if like.dim() > dim and shape[dim] == count), None)
        if not count or not like.dim() or (along is None and (not shape[0] or shape[0] % count)):
            return None
        part = [shape[0] // count, *shape[1:]] if along is None else [*shape[:along], *shape[along + 1 :]]
        draws, generator = torch.randn if normal else torch.rand, torch.Generator()
        parts = [draws(part, generator=generator.manual_seed(mixed_seed(sample, draw))) for sample in self._samples]
        return (torch.cat(parts) if along is None else torch.stack(parts, along)).to(like.device)


Given = Mapping[str, Any]


def _fill_uniform(drawn: torch.Tensor, given: Given, numbers: NumbersLike) -> torch.Tensor | None:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return None if (found := numbers(drawn)) is None else drawn.copy_(low + (high - low) * found)


def _fill_normal(drawn: torch.Tensor, given: Given, numbers: NumbersLike) -> torch.Tensor | None:
    found = numbers(drawn, normal=True)
    return None if found is None else drawn.copy_(given.get("mean", 0.0) + given.get("std", 1.0) * found)


def _fill_bernoulli(drawn: torch.Tensor, given: Given, numbers: NumbersLike) -> torch.Tensor | None:
    return None if (found := numbers(drawn)) is None else drawn.copy_(found < given.get("p", given["self"]))


def _drop(drawn: tuple[torch.Tensor, torch.Tensor], given: Given, numbers: NumbersLike) -> Any:
    if given["train"] is False:
        return drawn
    if (found := numbers(drawn[0])) is None:
        return None
    kept, rate = found >= given["p"], given["p"]
    return given["input"] * kept / (1 - rate) if rate < 1 else torch.zeros_like(drawn[0]), kept


def _fill_integers(drawn: torch.Tensor, given: Given, numbers: NumbersLike) -> torch.Tensor | None:
    low, high = given.get("low", given.get("from")) or 0, given.get("high", given.get("to"))
    if high is None or (found := numbers(drawn)) is None:
        return None
    return drawn.copy_((low + (high - low) * found).floor().clamp_max(high - 1))


def _fill_exponential(drawn: torch.Tensor, given: Given, numbers: NumbersLike) -> torch.Tensor | None:
    found = numbers(drawn)
    return None if found is None else drawn.copy_(_waiting(found) / given["lambd"])


def _waiting(uniform: torch.Tensor) -> torch.Tensor:
    """Exponential numbers, which are never 0: their logarithm is often taken (a Gumbel softmax)."""
    return -torch.log1p(-uniform).clamp_max(-torch.finfo(uniform.dtype).tiny)


def _choose(drawn: torch.Tensor, given: Given, numbers: NumbersLike) -> torch.Tensor | None:
    """As torch does: without replacement the largest of weight over exponential number, with it by the sums."""
    weights = given["self"]
    if weights.dim() != 2 or (found := numbers(drawn if given["replacement"] else weights)) is None:
        return None
    if not given["replacement"]:
        return drawn.copy_((weights / _waiting(found)).topk(drawn.shape[1]).indices)
    sums = weights.float().cumsum(1)
    return drawn.copy_(torch.searchsorted(sums, found * sums[:, -1:], right=True).clamp_max(weights.shape[1] - 1))


_OF_SAMPLES: dict[str, Callable[[Any, Given, NumbersLike], Any]] = {
    **dict.fromkeys(("rand", "rand_like", "uniform", "uniform_"), _fill_uniform),
    **dict.fromkeys(("randn", "randn_like", "normal", "normal_"), _fill_normal),
    **dict.fromkeys(("bernoulli", "bernoulli_"), _fill_bernoulli),
    **dict.fromkeys(("randint", "randint_like", "random_"), _fill_integers),
    "exponential_": _fill_exponential,
    "multinomial": _choose,
    "native_dropout": _drop,
}
