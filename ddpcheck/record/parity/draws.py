"""Recording of random draws on each rank, and replay in a single process.

A draw is identified by its function, its line (with or without gradients) and its index at that line.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import cat, nn

from ddpcheck.findings.source_lines import frames_from, is_of_program, location_of, variables_of
from ddpcheck.gather.patching import Patch, Recorder, guarded, patched
from ddpcheck.record.data.draw_recorder import NOT_OF_THE_STEP
from ddpcheck.record.parity.sample_store import NotTogetherError, rows_of
from ddpcheck.record.parity.samples import Samples

FUNCTIONS = (
    *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "normal", "bernoulli"),
    *("multinomial", "poisson"),
)
CONCATENATIONS = ("cat", "concat", "concatenate")
_IN_PLACE = ("normal_", "uniform_", "random_", "bernoulli_", "exponential_")
_OF_NUMPY = (
    *("rand", "randn", "random", "random_sample", "standard_normal", "normal", "uniform", "randint", "integers"),
    *("permutation", "choice", "beta", "binomial", "poisson", "exponential", "multivariate_normal", "dirichlet"),
)
_DEEPEST = 12  # max torch frames between the call and a line of the program


class RandomDraws(Recorder, subjects=("parity",)):
    """Recorder of random draws of program lines, or replay in a single process."""

    def __init__(self, samples: Samples, *, replays: bool) -> None:
        """Initialize; `replays`: if True, the single process gets the ranks' numbers."""
        self._samples = samples
        self._replays = replays
        self._process = os.getpid()
        self._drawn = Counter[str]()
        for owner, names in ((torch, FUNCTIONS), (torch.Tensor, _IN_PLACE)):
            for name in names:
                Patch(owner, name, functools.partial(self._drawing, name=name))
        if samples.replays:
            for name in ("__iter__", "split", "chunk", "unbind"):
                Patch(torch.Tensor, name, self._of_parts)
            for name in CONCATENATIONS:
                patched(torch, name, self._concatenates)

    def _drawing(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        drew = guarded(self._drew)

        @functools.wraps(original)
        def draw(*arguments: Any, **named: Any) -> Any:
            drawn = original(*arguments, **named)
            if not self._samples.draws or self._samples.loads or torch.compiler.is_compiling() or self.is_off:
                return drawn
            replayed = drew(sys._getframe(1), name, drawn)
            return drawn if replayed is None else replayed

        return draw

    def _drew(self, frame: FrameType, name: str, drawn: Any) -> Any:
        if os.getpid() != self._process or not rows_of(drawn) or not (line := _line_of_draw(frame)):
            return drawn
        key, number = f"{name} {line}", self._drawn[name + line]
        self._drawn[name + line] += 1
        if not self._samples.replays:
            self._samples.keep(f"{key}#{number}", drawn)
            return drawn
        if not self._replays:
            self._samples.refuse(key, "the script fails with the numbers of all ranks")
            return drawn
        rank_draws = self._samples.of_ranks(key, number) if name.endswith(("randperm", "permutation")) else ()
        if len(rank_draws) > 1 and rows_of(drawn) == sum(map(rows_of, rank_draws)):
            return drawn  # a permutation over the samples of all ranks; each rank only permuted its own shard
        try:
            value = self._samples.replayed(key, number, rows_of(drawn))
        except NotTogetherError as error:
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
        for name in _OF_NUMPY:
            if hasattr(module, name):
                Patch(module, name, functools.partial(self._drawing, name=f"numpy.random.{name}"))
        self._samples.seed("numpy", module.get_state, module.set_state)
        methods = {}
        for name in _OF_NUMPY:
            if callable(original := getattr(module.Generator, name, None)):
                methods[name] = self._drawing(original, f"Generator.{name}")
        generator_class = type("Generator", (module.Generator,), methods)

        def following(make: Callable[..., Any]) -> Callable[..., Any]:
            return functools.wraps(make)(lambda *args, **named: generator_class(make(*args, **named).bit_generator))

        Patch(module, "default_rng", following)

    def _concatenates(self, tensors: Any, dim: int = 0, **_named: Any) -> Iterator[None]:
        result: Any = yield
        self._samples.note_cat(result, tensors, dim)

    def _of_parts(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Make a method split each rank's part of a tensor; concatenate the pieces."""

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
    """Return the program line of a draw; "" outside of steps.

    An evaluation, possibly on rank 0 only, may run the same line as a step.
    """
    if str(frame.f_globals.get("__name__", "")).startswith("ddpcheck."):
        return ""
    for current in itertools.islice(frames_from(frame), _DEEPEST):
        if str(current.f_globals.get("__name__", "")).startswith(NOT_OF_THE_STEP):
            return ""
        if current.f_code.co_name == "__init__" and isinstance(variables_of(current).get("self"), nn.Module):
            return ""
        if is_of_program(current.f_code.co_filename):
            return f"{location_of(current)}{'' if torch.is_grad_enabled() else ' without gradients'}"
    return ""
