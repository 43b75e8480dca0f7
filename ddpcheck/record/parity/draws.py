"""Random draws, dropout and batch statistics: recording on ranks, replay in a single process.

A draw is identified by its function, its line (with or without gradients) and its index at that line.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import cat, nn
from torch.nn import functional

from ddpcheck.findings.source_lines import frames_from, is_of_program, location_of, variables_of
from ddpcheck.gather.forward_hooks import scripting_in
from ddpcheck.gather.patching import Patch, Recorder, guarded, patched
from ddpcheck.record.data.draw_recorder import NOT_OF_THE_STEP
from ddpcheck.record.parity.sample_store import ConcatenationError, row_count
from ddpcheck.record.parity.samples import Samples
from ddpcheck.record.rank.environment import when_imported

FUNCTIONS = (
    *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "normal", "bernoulli"),
    *("multinomial", "poisson"),
)
CONCATENATIONS = ("cat", "concat", "concatenate")
_IN_PLACE = ("normal_", "uniform_", "random_", "bernoulli_", "exponential_")
_NUMPY_FUNCTIONS = (
    *("rand", "randn", "random", "random_sample", "standard_normal", "normal", "uniform", "randint", "integers"),
    *("permutation", "choice", "beta", "binomial", "poisson", "exponential", "multivariate_normal", "dirichlet"),
)
_MOST_FRAMES = 12  # max torch frames between the call and a line of the program


class DrawReplay(Recorder, subjects=("parity",)):
    """Recorder of the program's random numbers on ranks, replayed in the single process."""

    def __init__(self, samples: Samples, *, replays: bool) -> None:
        self._samples = samples
        self._replays = replays  # True if the single process gets the ranks' numbers
        self._process = os.getpid()
        self._draw_counts = Counter[str]()
        for owner, names in ((torch, FUNCTIONS), (torch.Tensor, _IN_PLACE)):
            for name in names:
                Patch(owner, name, functools.partial(self._patched_draw, name=name))
        if samples.replays:
            for name in ("__iter__", "split", "chunk", "unbind"):
                Patch(torch.Tensor, name, self._split_rows)
            for name in CONCATENATIONS:
                patched(torch, name, self._record_cat)

    def _patched_draw(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        record = guarded(self._record_draw)

        @functools.wraps(original)
        def draw(*arguments: Any, **named: Any) -> Any:
            drawn = original(*arguments, **named)
            if not self._samples.draws or self._samples.loads or torch.compiler.is_compiling() or self.is_off:
                return drawn
            replayed = record(sys._getframe(1), name, drawn)
            return drawn if replayed is None else replayed

        return draw

    def _record_draw(self, frame: FrameType, name: str, drawn: Any) -> Any:
        if os.getpid() != self._process or not row_count(drawn) or not (line := _line_of_draw(frame)):
            return drawn
        key, number = f"{name} {line}", self._draw_counts[name + line]
        self._draw_counts[name + line] += 1
        if not self._samples.replays:
            self._samples.keep(f"{key}#{number}", drawn)
            return drawn
        if not self._replays:
            self._samples.refuse(key, "the script fails with the numbers of all ranks")
            return drawn
        rank_draws = self._samples.rank_values(key, number) if name.endswith(("randperm", "permutation")) else ()
        if len(rank_draws) > 1 and row_count(drawn) == sum(map(row_count, rank_draws)):
            return drawn  # a permutation over the samples of all ranks; each rank only permuted its own shard
        try:
            value = self._samples.replayed(key, number, row_count(drawn))
        except ConcatenationError as error:
            self._samples.refuse(key, str(error))
            return drawn
        if isinstance(drawn, torch.Tensor):
            value = value.to(drawn.device)
            if name.endswith("_"):
                return drawn.copy_(value) if drawn.shape == value.shape else drawn
            value.requires_grad_(drawn.requires_grad)
        return value

    def follow_numpy(self, module: Any) -> None:
        """Patch numpy's global random functions and the generators that the script creates."""
        for name in _NUMPY_FUNCTIONS:
            if hasattr(module, name):
                Patch(module, name, functools.partial(self._patched_draw, name=f"numpy.random.{name}"))
        self._samples.seed("numpy", module.get_state, module.set_state)
        methods = {}
        for name in _NUMPY_FUNCTIONS:
            if callable(original := getattr(module.Generator, name, None)):
                methods[name] = self._patched_draw(original, f"Generator.{name}")
        generator_class = type("Generator", (module.Generator,), methods)

        def patched_constructor(make: Callable[..., Any]) -> Callable[..., Any]:
            return functools.wraps(make)(lambda *args, **named: generator_class(make(*args, **named).bit_generator))

        Patch(module, "default_rng", patched_constructor)

    def _record_cat(self, tensors: Any, dim: int = 0, **_named: Any) -> Iterator[None]:
        result: Any = yield
        self._samples.note_cat(result, tensors, dim)

    def _split_rows(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method such as `chunk`: split each rank's rows separately, then concatenate pieces."""

        @functools.wraps(original)
        def divide(tensor: Any, *arguments: Any, **named: Any) -> Any:
            parts = self._samples.parts.get(tensor) if len(self._samples.parts) else None
            if parts is None or torch.compiler.is_compiling():
                return original(tensor, *arguments, **named)
            pieces = [[*original(part, *arguments, **named)] for part in parts]
            is_even = len({len(chunks) for chunks in pieces}) == 1 and all(piece.dim() for piece in pieces[0])
            joined = [cat(group) for group in zip(*pieces, strict=True)] if is_even else []
            self._samples.note_rows(tuple(len(chunks[0]) for chunks in pieces) if joined else ())
            return (iter if original.__name__ == "__iter__" else tuple)(joined or original(tensor, *arguments, **named))

        return divide


def _line_of_draw(frame: FrameType) -> str:
    """Return the program line that draws random numbers; "" outside of training steps.

    Draws under `no_grad` (an evaluation, possibly on rank 0 only) have the suffix " without gradients".
    """
    if str(frame.f_globals.get("__name__", "")).startswith("ddpcheck."):
        return ""
    for current in itertools.islice(frames_from(frame), _MOST_FRAMES):
        if str(current.f_globals.get("__name__", "")).startswith(NOT_OF_THE_STEP):
            return ""
        if current.f_code.co_name == "__init__" and isinstance(variables_of(current).get("self"), nn.Module):
            return ""
        if is_of_program(current.f_code.co_filename):
            return f"{location_of(current)}{'' if torch.is_grad_enabled() else ' without gradients'}"
    return ""


DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


class DropoutReplay(Recorder, subjects=("parity",)):
    """Recorder of generator states at dropouts; the single process replays dropout rank by rank.

    In the replay, batch normalization uses the statistics of each rank's rows. The rows of the first rank update the
    running statistics. The first rank is rank 0, whose buffers DDP broadcasts, or another rank if noise is measured.
    """

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._process = os.getpid()
        self._backwards, self._calls = -1, 0  # forward calls since the last backward pass
        for name in DROPOUTS:
            Patch(functional, name, self._patched_dropout)
        Patch(functional, "scaled_dot_product_attention", self._patched_attention)
        if samples.replays:
            Patch(functional, "batch_norm", self._patched_batch_norm)

    def _rank_rows(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split `inputs` into each rank's rows; return () if the rows' ranks are unknown."""
        owners = self._samples.owners(len(inputs)) if inputs.dim() else None
        if owners is None:
            return ()
        # Random numbers are drawn in memory order, so keep the memory format of a rank's tensor.
        strides = inputs.stride()
        order = sorted(range(len(strides)), key=strides.__getitem__, reverse=True)
        inverse = sorted(range(len(strides)), key=order.__getitem__)
        parts = (inputs[owners.to(inputs.device) == rank] for rank in range(int(owners.max()) + 1))
        return tuple(part.permute(order).contiguous().permute(inverse) for part in parts)

    def _patched_dropout(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def dropout(inputs: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            training = arguments[1] if len(arguments) > 1 else named.get("training", True)
            p = arguments[0] if arguments else named.get("p", 0.5)
            if not training or not p or not self._is_active():
                return original(inputs, *arguments, **named)
            return self._draw_by_rank(lambda part: original(part, *arguments, **named), inputs)

        return dropout

    def _patched_attention(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def attention(query: Any, key: Any, value: Any, *arguments: Any, **named: Any) -> Any:
            p = arguments[1] if len(arguments) > 1 else named.get("dropout_p", 0.0)
            mask = arguments[0] if arguments else named.get("attn_mask")
            if not p or not self._is_active():
                return original(query, key, value, *arguments, **named)
            if mask is None or len(mask) != len(query):  # one mask for all rows
                return self._draw_by_rank(lambda *parts: original(*parts, *arguments, **named), query, key, value)
            rest_args, kwargs = arguments[1:], {name: item for name, item in named.items() if name != "attn_mask"}
            return self._draw_by_rank(lambda *parts: original(*parts, *rest_args, **kwargs), query, key, value, mask)

        return attention

    def _is_active(self) -> bool:
        is_rank = not self.is_off and os.getpid() == self._process
        return is_rank and self._samples.draws and not torch.compiler.is_compiling()

    def _draw_by_rank(self, compute: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """Replay `compute` with each rank's rows and generator state; ranks record the state."""
        if self._backwards != self._samples.backwards:
            self._backwards, self._calls = self._samples.backwards, 0
        key, generator = f"dropout {self._calls}", torch.default_generator
        if inputs[0].is_cuda:
            generator = torch.cuda.default_generators[inputs[0].device.index or 0]
        self._calls += 1
        if not self._samples.replays:
            entry = generator.get_state(), *(tuple(tensor.shape) for tensor in inputs)
            self._samples.keep(f"{key}#{self._backwards}", entry)
            return compute(*inputs)
        states, parts = self._samples.rank_values(key, self._backwards), [self._rank_rows(tensor) for tensor in inputs]
        if not states or any(len(input_parts) != len(states) for input_parts in parts):
            return compute(*inputs)
        saved_state, outputs = generator.get_state(), []
        for (state, *shapes), *args in zip(states, *parts, strict=True):
            generator.set_state(state)
            outputs.append(_without_padding(compute, args, shapes) if self._samples.is_padded else compute(*args))
        generator.set_state(saved_state)
        return self._samples.in_script_order(cat(outputs))

    def _patched_batch_norm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def batch_norm(
            inputs: torch.Tensor,
            mean: torch.Tensor | None,
            variance: torch.Tensor | None,
            weight: torch.Tensor | None = None,
            bias: torch.Tensor | None = None,
            training: bool = False,
            *more: Any,
            **named: Any,
        ) -> torch.Tensor:
            layer = sys._getframe(1).f_locals.get("self")
            parts = self._rank_rows(inputs) if training and not isinstance(layer, nn.SyncBatchNorm) else ()
            outputs: list[torch.Tensor] = []
            for part in parts or (inputs,):
                statistics = (None, None) if outputs else (mean, variance)
                outputs.append(original(part, *statistics, weight, bias, training, *more, **named))
            if parts:
                self._samples.splits_statistics = True
            return self._samples.in_script_order(cat(outputs)) if parts else outputs[0]

        return batch_norm


def _without_padding(
    compute: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Compute on inputs without padding (padding would draw extra random numbers); pad the output."""
    trimmed = [x[tuple(map(slice, (len(x), *shape[1:])))].clone() for x, shape in zip(inputs, shapes, strict=True)]
    output = compute(*trimmed)
    sizes = inputs[0].shape if len(inputs) == 1 else (*inputs[0].shape[:-1], output.shape[-1])  # dropout, attention
    missing = [size - output_size for size, output_size in zip(sizes, output.shape, strict=True)]
    return functional.pad(output, [count for size in reversed(missing) for count in (0, size)])


_REPLACED = (*FUNCTIONS, *CONCATENATIONS, *DROPOUTS, "scaled_dot_product_attention", "batch_norm")
_LIGHTNING = ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric")


class Frameworks(Recorder, subjects=("parity",)):
    """Patches: Lightning uses one device, and accelerate reports steps of schedules."""

    def __init__(self, *, is_single_process: bool) -> None:
        self.steps_schedules = False  # True if a schedule is stepped once per rank, as accelerate does
        if is_single_process:
            when_imported(_LIGHTNING, self._patch_lightning)
        when_imported(("accelerate.scheduler",), lambda home: patched(home.AcceleratedScheduler, "step", self._on_step))
        Patch(torch.jit, "script", functools.partial(scripting_in, _without_patches))

    def _patch_lightning(self, module: Any) -> None:
        for name in ("Trainer", "Fabric"):
            if hasattr(module, name):
                Patch(getattr(module, name), "__init__", _on_one_device)

    def _on_step(self, scheduler: Any, *_arguments: Any, **_named: Any) -> None:
        self.steps_schedules |= scheduler.step_with_optimizer and not scheduler.split_batches


@contextlib.contextmanager
def _without_patches(_code: object) -> Iterator[None]:
    """Restore the original functions while TorchScript compiles."""
    functions = ((owner, name) for owner in (torch, functional) for name in _REPLACED if hasattr(owner, name))
    current = [(owner, name, getattr(owner, name)) for owner, name in functions]
    for owner, name, function in current:
        setattr(owner, name, inspect.unwrap(function))
    try:
        yield
    finally:
        for owner, name, function in current:
            setattr(owner, name, function)


def _on_one_device(construct: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(construct)
    def __init__(trainer: Any, *arguments: Any, **named: Any) -> None:
        construct(trainer, *arguments, **{**named, "devices": 1, "num_nodes": 1})

    return __init__


_NOISE_SEED = 7919
_SPEED_UP = 16.0  # clock speed-up factor
_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "time_ns", "perf_counter_ns", "monotonic_ns")


class Noise:
    """Perturbation of clocks, random numbers and gradients, to measure how much chance changes results."""

    def __init__(self) -> None:
        self._has_begun = False
        # relative rounding error of gradients: of float32, or of the coarsest autocast dtype used
        self.eps = torch.finfo(torch.float32).eps
        self._signs = torch.Generator().manual_seed(_NOISE_SEED)
        patched(torch.autocast, "__enter__", self._record_autocast)
        for name in _CLOCKS:
            Patch(time, name, _sped_up_clock)
        for module in (torch, random):
            Patch(module, "manual_seed" if module is torch else "seed", self._patched_seed)

    def begin(self) -> None:
        """Reseed generators after parameter initialization: at the first optimizer construction or wrapper forward."""
        if self._has_begun:
            return
        self._has_begun = True
        torch.manual_seed(torch.initial_seed() % (1 << 62))
        random.seed(_NOISE_SEED)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(_NOISE_SEED)

    def _record_autocast(self, autocast: Any) -> None:
        if autocast._enabled:
            self.eps = max(self.eps, torch.finfo(autocast.fast_dtype).eps)

    def round(self, tensors: Iterable[torch.Tensor], times: int = 1) -> None:
        """Change each element by `times` relative rounding errors (`eps`), with random signs."""
        for tensor in tensors:
            if tensor.layout == torch.strided and tensor.is_floating_point():
                eps = times * max(self.eps, torch.finfo(tensor.dtype).eps)
                signs = torch.randint(0, 2, tensor.shape, generator=self._signs).mul_(2).sub_(1)
                tensor.detach().mul_(1 + eps * signs.to(tensor.device, tensor.dtype))

    def _patched_seed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def seed(*arguments: Any, **named: Any) -> Any:
            if self._has_begun and arguments and type(arguments[0]) is int:
                arguments = (arguments[0] + _NOISE_SEED, *arguments[1:])
            return original(*arguments, **named)

        return seed


def _sped_up_clock(original: Callable[[], Any]) -> Callable[[], Any]:
    begin_time = original()

    @functools.wraps(original)
    def clock() -> Any:
        return type(begin_time)(begin_time + (original() - begin_time) * _SPEED_UP)

    return clock
