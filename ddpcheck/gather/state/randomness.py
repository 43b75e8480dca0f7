"""Random numbers: seeding, detection of draws, and reproducible or constant replacements.

Numbers that belong to a sample are the same on its rank and in the global batch.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddpcheck.findings.tracebacks import forwards_calls
from ddpcheck.worlds.rank_setup import generators, set_generators


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, numpy (if imported) and torch."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if _has_only_cpu():
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


@functools.cache
def _has_only_cpu() -> bool:
    """Return True if no accelerator exists, so that seeding the CPU generator is enough.

    `torch.manual_seed` takes 5 ms, since it formats the stack for each uninitialized device type
    (torch/cuda/__init__.py, `_lazy_call`), and a check seeds a dozen times per rank.
    """
    if torch.cuda.device_count():  # does not initialize CUDA, so a rank can still fork workers
        return False
    accelerator = getattr(torch, "accelerator", None)  # since torch 2.6
    return accelerator is not None and not accelerator.is_available()


def make_deterministic(device: torch.device) -> None:
    """Make GPU kernels as deterministic as possible; no-op on CPU.

    See https://docs.pytorch.org/docs/stable/notes/randomness.html; remaining nondeterminism is measured.
    """
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)


def mixed_seed(seed: int, *parts: int) -> int:
    """Return a seed derived from `seed` and `parts` (splitmix64 finalizer, Steele et al. 2014)."""
    value = seed & 0xFFFFFFFFFFFFFFFF
    for part in parts:
        value = (value + 0x9E3779B97F4A7C15 * (part + 1)) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 31
    return value % 2**31


@dataclass(frozen=True, slots=True)
class UserGenerator:
    """Access to a user's random generator: its library, and state getter and setter."""

    library: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]


def user_generator(value: Any) -> UserGenerator | None:
    """Remember random generator `value` for `generator_states`; return access, or None if not a generator."""
    if isinstance(value, torch.Generator):
        source = UserGenerator("torch", lambda: value.get_state().clone(), value.set_state)
    elif isinstance(value, random.Random):
        source = UserGenerator("random", value.getstate, value.setstate)
    elif issubclass(type(value), _numpy_classes("Generator")):
        bits = value.bit_generator
        source = UserGenerator("numpy", lambda: copy.deepcopy(bits.state), lambda state: setattr(bits, "state", state))
    elif issubclass(type(value), _numpy_classes("RandomState")):
        source = UserGenerator("numpy", lambda: value.get_state(legacy=False), value.set_state)
    else:
        return None
    _watched[id(value)] = source
    return source


def _numpy_classes(name: str) -> tuple[type, ...]:
    return (getattr(sys.modules["numpy.random"], name),) if "numpy.random" in sys.modules else ()


_watched: dict[int, UserGenerator] = {}  # generators of the recipe by `id`; kept alive by their `read`


def generator_states(device: torch.device) -> dict[tuple[str, int], Any]:
    """Return the states of the global and the recipe's generators, to compare by `drawn_since`."""
    states: dict[tuple[str, int], Any] = {("random", 0): random.getstate(), ("torch", 0): torch.get_rng_state()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy", 0] = (name, keys.tobytes(), *rest)
    if device.type == "cuda":
        states["torch", 1] = torch.cuda.get_rng_state(device)
    for key, generator in _watched.items():
        states[generator.library, key] = repr(generator.read()) if generator.library == "numpy" else generator.read()
    # Convert to bytes for comparison; via a list, since numpy may be missing.
    return {key: bytes(s.tolist()) if isinstance(s, torch.Tensor) else s for key, s in states.items()}


def drawn_since(before: Mapping[tuple[str, int], Any], device: torch.device) -> frozenset[str]:
    """Return the libraries whose generator states differ from `before`."""
    now = generator_states(device)
    return frozenset(library for (library, key), state in before.items() if now.get((library, key)) != state)


@contextlib.contextmanager
def preserve_generators() -> Iterator[None]:
    """Restore all generator states after the block."""
    states = generators(thorough=True)
    try:
        yield
    finally:
        set_generators(states)


_MOST_DRAWS = 10_000


class QuietRandomness(TorchDispatchMode):
    """Mode that replaces results of torch's random operations by constants.

    A run on shards and a run on the global batch cannot draw the same numbers for a sample. With constants (dropout
    keeps all elements) both compute the same deterministic function, in forward, backward and checkpoint recomputation.
    Scalars drawn by Python's `random` or numpy are not replaced: they are equal because the seeds are equal.

    After 10,000 draws real numbers are returned, so that rejection sampling loops end.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._remaining = _MOST_DRAWS

    @forwards_calls
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace != "aten" or not (name in _QUIET or name in _DETERMINISTIC) or self._remaining <= 0:
            return func(*args, **(kwargs or {}))
        self._remaining -= 1
        return self._replaced_result(name, func, args, dict(kwargs or {}))

    @forwards_calls
    def _replaced_result(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in _DETERMINISTIC:
            return _DETERMINISTIC[name](func, args, kwargs)
        return _QUIET[name](func(*args, **kwargs), _arguments_by_name(func, args, kwargs))


Kwargs = Mapping[str, Any]  # arguments of an operation by name


def _arguments_by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    arguments = {item.name: item.default_value for item in func._schema.arguments}
    return arguments | dict(zip(arguments, args, strict=False)) | kwargs


def _fill_with(value: float) -> Callable[[Any, Kwargs], Any]:
    return lambda drawn, _kwargs: drawn.fill_(value)


def _bernoulli(drawn: torch.Tensor, kwargs: Kwargs) -> torch.Tensor:
    prob = kwargs.get("p", kwargs["self"])
    return drawn.copy_(prob > 0) if isinstance(prob, torch.Tensor) else drawn.fill_(float(prob > 0))


def _most_likely(drawn: torch.Tensor, kwargs: Kwargs) -> torch.Tensor:
    order = kwargs["self"].argsort(dim=-1, descending=True, stable=True)
    return drawn.copy_(order[..., torch.arange(drawn.shape[-1], device=drawn.device) % order.shape[-1]])


_UNIFORM = 0.5 + 1e-3  # kept by `rand < keep`, `rand > drop` and `floor(keep + rand)` for drop rates up to 0.49
_NORMAL = 0.5  # not 0, which would zero a product
_QUIET: dict[str, Callable[[Any, Kwargs], Any]] = {
    **dict.fromkeys(("rand", "rand_like", "uniform", "uniform_"), _fill_with(_UNIFORM)),
    **dict.fromkeys(("randn", "randn_like", "normal", "normal_", "log_normal_", "cauchy_"), _fill_with(_NORMAL)),
    "binomial": lambda _drawn, kwargs: (kwargs["count"] * kwargs["prob"]).round(),  # the mean
    **dict.fromkeys(("exponential_", "geometric_", "poisson", "_standard_gamma", "_sample_dirichlet"), _fill_with(1.0)),
    **dict.fromkeys(("bernoulli", "bernoulli_"), _bernoulli),
    "randint": lambda drawn, kwargs: drawn.fill_(kwargs.get("low", 0)),
    **dict.fromkeys(("randint_like", "random_"), _fill_with(0)),
    "randperm": lambda drawn, _kwargs: drawn.copy_(torch.arange(drawn.numel(), device=drawn.device)),
    "multinomial": _most_likely,
    "native_dropout": lambda drawn, kwargs: (kwargs["input"].clone(), torch.ones_like(drawn[1])),
    "native_dropout_backward": lambda _drawn, kwargs: kwargs["grad_output"] * kwargs["mask"],
}
"""Operation -> function of the drawn result and the arguments by name that returns the constant result."""


def _rrelu_without_noise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute randomized leaky ReLU with the midpoint of its range as slope."""
    kwargs = _arguments_by_name(func, args, kwargs)
    value, noise = kwargs["self"], kwargs["noise"]
    slope = (kwargs["lower"] + kwargs["upper"]) / 2
    noise.copy_(torch.where(value <= 0, torch.full_like(value, slope), torch.ones_like(value)))
    result = value * noise
    return value.copy_(result) if func.overloadpacket.__name__.endswith("_") else result


def _without_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = [argument.name for argument in func._schema.arguments]
    without_dropout = [0.0 if name in _DROPOUT else value for name, value in zip(names, args, strict=False)]
    return func(*without_dropout, **{name: 0.0 if name in _DROPOUT else value for name, value in kwargs.items()})


_DROPOUT = ("dropout", "dropout_p")
_DETERMINISTIC: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("rrelu_with_noise", "rrelu_with_noise_"), _rrelu_without_noise),
    **dict.fromkeys(
        (
            *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
            *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
            *("_flash_attention_forward", "_efficient_attention_forward"),
            *("_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn"),
        ),
        _without_dropout,
    ),
}
"""Operation that draws random numbers and computes with them -> function to call instead."""

for _handler in (*_QUIET.values(), *_DETERMINISTIC.values()):
    forwards_calls(_handler)


@contextlib.contextmanager
def without_rnn_dropout(module: nn.Module) -> Iterator[None]:
    """Disable dropout of recurrent layers, whose fused kernels draw unseen by a `TorchDispatchMode`."""
    saved = [(layer, layer.dropout) for layer in module.modules() if isinstance(layer, nn.RNNBase)]
    for layer, _ in saved:
        layer.dropout = 0.0
    try:
        yield
    finally:
        for layer, dropout in saved:
            layer.dropout = dropout


_MOST_SAMPLES = 4096


class _NoPartsError(Exception):
    """Raised if a random tensor cannot be divided into one part per sample."""


class SampleRandomness(QuietRandomness):
    """Mode that draws each sample's part of a random tensor from the sample's seed.

    Masks and noise are random, yet a rank and the single process draw the same numbers for a sample. If dim 0 or dim 1
    has the batch size, a part is one index of this dim; otherwise, dim 0 is divided into equal parts. If dim 0 is
    not divisible, the tensor gets constants, as in `QuietRandomness`.

    Every operation draws exactly one number from its generator, so the parts of the next operation differ, and a
    checkpoint that restores the generator draws the same numbers again.
    """

    def __init__(self, samples: Sequence[int]) -> None:
        """Create the mode; `samples` has one seed per sample of the batch."""
        super().__init__()
        self._samples = samples if len(samples) <= _MOST_SAMPLES else ()

    @forwards_calls
    def _replaced_result(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "native_dropout_backward":
            return func(*args, **kwargs)
        generator = kwargs.get("generator") or torch.default_generator
        draw = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        after = generator.get_state()
        try:
            if name not in _PER_SAMPLE:
                raise _NoPartsError
            numbers = functools.partial(self._numbers, draw)
            result = _PER_SAMPLE[name](func(*args, **kwargs), _arguments_by_name(func, args, kwargs), numbers)
        except _NoPartsError:
            result = super()._replaced_result(name, func, args, kwargs)
            if name == "native_dropout":
                result = result[0] / max(1 - args[1], 1e-3), result[1]  # matches the unreplaced backward
        generator.set_state(after)
        return result

    def _numbers(self, draw: int, like: torch.Tensor, *, normal: bool = False) -> torch.Tensor:
        """Return numbers shaped like `like`: one part per sample, seeded by sample and `draw`.

        The numbers are float32, so that a model in float64 gets the same numbers.
        """
        count = len(self._samples)
        shape = like.shape
        axis = next((dim for dim in (0, 1) if like.dim() > dim and shape[dim] == count), None)
        if not count or not like.dim() or (axis is None and (not shape[0] or shape[0] % count)):
            raise _NoPartsError
        part = [shape[0] // count, *shape[1:]] if axis is None else [*shape[:axis], *shape[axis + 1 :]]
        draws, generator = torch.randn if normal else torch.rand, torch.Generator()
        parts = [draws(part, generator=generator.manual_seed(mixed_seed(sample, draw))) for sample in self._samples]
        return (torch.cat(parts) if axis is None else torch.stack(parts, axis)).to(like.device)


Numbers = Callable[..., torch.Tensor]  # `SampleRandomness._numbers` of one operation


def _draw_uniform(drawn: torch.Tensor, kwargs: Kwargs, numbers: Numbers) -> torch.Tensor:
    low, high = kwargs.get("from", 0.0), kwargs.get("to", 1.0)
    return drawn.copy_(low + (high - low) * numbers(drawn))


def _draw_normal(drawn: torch.Tensor, kwargs: Kwargs, numbers: Numbers) -> torch.Tensor:
    return drawn.copy_(kwargs.get("mean", 0.0) + kwargs.get("std", 1.0) * numbers(drawn, normal=True))


def _draw_integers(drawn: torch.Tensor, kwargs: Kwargs, numbers: Numbers) -> torch.Tensor:
    low, high = kwargs.get("low", kwargs.get("from")) or 0, kwargs.get("high", kwargs.get("to"))
    if high is None:
        raise _NoPartsError
    return drawn.copy_((low + (high - low) * numbers(drawn)).floor().clamp_max(high - 1))


def _to_exponential(uniform: torch.Tensor) -> torch.Tensor:
    """Convert uniform to exponential numbers, never 0, since Gumbel softmax takes their logarithm."""
    return -torch.log1p(-uniform).clamp_max(-torch.finfo(uniform.dtype).tiny)


def _draw_multinomial(drawn: torch.Tensor, kwargs: Kwargs, numbers: Numbers) -> torch.Tensor:
    """Draw like `torch.multinomial`: top-k of weight / exponential, or inverse cumulative sum."""
    weights = kwargs["self"]
    if weights.dim() != 2:
        raise _NoPartsError
    if not kwargs["replacement"]:
        return drawn.copy_((weights / _to_exponential(numbers(weights))).topk(drawn.shape[1]).indices)
    sums = weights.float().cumsum(1)
    places = torch.searchsorted(sums, numbers(drawn) * sums[:, -1:], right=True)
    return drawn.copy_(places.clamp_max(weights.shape[1] - 1))


def _draw_dropout(drawn: tuple[torch.Tensor, torch.Tensor], kwargs: Kwargs, numbers: Numbers) -> Any:
    if kwargs["train"] is False:
        return drawn
    mask, rate = numbers(drawn[0]) >= kwargs["p"], kwargs["p"]
    return kwargs["input"] * mask / (1 - rate) if rate < 1 else torch.zeros_like(drawn[0]), mask


_PER_SAMPLE: dict[str, Callable[[Any, Kwargs, Numbers], Any]] = {
    **dict.fromkeys(("rand", "rand_like", "uniform", "uniform_"), _draw_uniform),
    **dict.fromkeys(("randn", "randn_like", "normal", "normal_"), _draw_normal),
    **dict.fromkeys(
        ("bernoulli", "bernoulli_"),
        lambda drawn, kwargs, numbers: drawn.copy_(numbers(drawn) < kwargs.get("p", kwargs["self"])),
    ),
    **dict.fromkeys(("randint", "randint_like", "random_"), _draw_integers),
    "exponential_": lambda drawn, kwargs, numbers: drawn.copy_(_to_exponential(numbers(drawn)) / kwargs["lambd"]),
    "multinomial": _draw_multinomial,
    "native_dropout": _draw_dropout,
}
