"""What each rank does: one step in several alternatives, in turns, and the clock around each."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ddpcheck
from benchmarks.wrapper.cases import Case
from ddpcheck.record.loop.step_tracker import StepTracker
from ddpcheck.record.recording import UnpickledHook, follow_steps, unfollow_steps

PLAIN, CHECKED, UNUSED, MMENGINE, SECOND = "plain", "checked", "unused", "mmengine", "second"
FIRST_ROUNDS = 32
_AHEAD = 2**20 + 1  # a round that is far from the next thorough look
_RATE = 1e-9
_PATIENCE = 5  # times the seconds: beyond, the first rounds are left out

Sample = tuple[float, float]
"""Seconds of wall time, and of the processor in the thread that trains."""


class Chain(nn.Module):
    """Linear layers with a way around each."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


class Transformer(nn.Module):
    """An encoder with a head."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


def _model(case: Case) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    dtype: torch.dtype = getattr(torch, case.dtype)
    if case.is_transformer:
        return Transformer(12, 384).to(dtype), torch.randn(case.samples, 32, 384, dtype=dtype)
    with torch.device("meta"):
        chain = Chain(case.tensors // 2, case.width).to(dtype)
    chain = chain.to_empty(device="cpu")
    for parameter in chain.parameters():
        parameter.data.uniform_(-1, 1).mul_(case.width**-1.5)  # small, so that a long chain does not overflow
    return chain, torch.randn(case.samples, case.width, dtype=dtype)


class Loop:
    """A wrapper with its optimizer, and the step that every alternative makes."""

    def __init__(self, wrapper: nn.Module, batch: torch.Tensor) -> None:
        self.wrapper = wrapper
        self.batch = batch
        self.optimizer = torch.optim.SGD(wrapper.parameters(), lr=_RATE)

    def step(self, after: Callable[[torch.Tensor], None] | None = None) -> None:
        """One step of training; `after` gets the loss, where mmengine's wrapper looks at it."""
        self.optimizer.zero_grad()
        loss = self.wrapper(self.batch).square().mean()
        loss.backward()
        self.optimizer.step()
        if after is not None:
            after(loss)


class Switch:
    """The hooks of a watch, off and on again: the same wrapper in the same memory, with and without them."""

    def __init__(self, watch: ddpcheck.Watch) -> None:
        self._recorder: Any = watch._recorder
        self.off()

    def off(self) -> None:
        self._recorder.tracker.detach()
        unfollow_steps(self._recorder._optimizer_steps)

    def on(self) -> None:
        self._recorder.tracker.attach()
        follow_steps(self._recorder._optimizer_steps)

    def go_to(self, number: int) -> None:
        """Go on with another step."""
        self._recorder.tracker.number = number

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        self.on()
        try:
            yield
        finally:
            self.off()


def measure(case: Case, names: Sequence[str], seconds: float, least: int) -> dict[str, Any]:
    """Measure `case` in this rank; every rank gets the same arguments.

    Args:
        case: What to train.
        names: Which alternatives; the plain one and ours are always there.
        seconds: How long to measure each of the three parts, roughly.
        least: The least number of turns; what `seconds` says gives way to it.

    Returns:
        "samples": by alternative, a `Sample` a turn. "own": a `Sample` a watched step, of our own code in it. "first":
        by repetition, the `Sample`s of plain and watched steps. "tensors" and "weights": what the model has.
    """
    torch.set_num_threads(1)
    sys.setrecursionlimit(10**6)  # mmengine's detector calls itself for each node of the graph
    model, batch = _model(case)
    options = {"gradient_as_bucket_view": True}
    checked = ddpcheck.CheckedDistributedDataParallel(model, **options)
    ours, hooks = Loop(checked, batch), Switch(checked.watch)
    steps: dict[str, Callable[[], None]] = {PLAIN: ours.step, CHECKED: ours.step}
    if MMENGINE in names:
        from mmengine.model.utils import detect_anomalous_params

        steps[MMENGINE] = lambda: ours.step(lambda loss: detect_anomalous_params(loss, model=checked))
    for name, extra in ((UNUSED, {"find_unused_parameters": True}), (SECOND, {})):
        if name in names:
            other = nn.parallel.DistributedDataParallel(_model(case)[0], **options, **extra)
            steps[name] = Loop(other, batch).step
    contexts = {CHECKED: hooks}

    began = time.perf_counter()
    for number in range(3):
        for name, step in steps.items():
            with contexts.get(name, contextlib.nullcontext)():
                _timed(step)
        if number == 1:
            began, for_one = time.perf_counter(), time.perf_counter() - began
    for_one = min(for_one / 2, time.perf_counter() - began)
    turns = _agreed(max(least, min(400, int(seconds / for_one))))
    hooks.go_to(_AHEAD)
    gc.collect()
    gc.freeze()
    samples: dict[str, list[Sample]] = {name: [] for name in steps}
    order, shuffled = list(steps), random.Random(0)
    for _ in range(turns):
        shuffled.shuffle(order)
        for name in order:
            with contexts.get(name, contextlib.nullcontext)():
                samples[name].append(_timed(steps[name]))
    share = for_one / len(steps)
    own = _own(ours.step, hooks, _agreed(max(least, min(400, int(seconds / 2 / share)))))
    repetitions = _agreed(min(9, int(_PATIENCE * seconds / (2 * FIRST_ROUNDS * share))))
    first = [_first(checked, ours.step) for _ in range(repetitions)]
    return {
        "samples": samples,
        "own": own,
        "first": first,
        "tensors": len(list(model.parameters())),
        "weights": sum(parameter.numel() for parameter in model.parameters()),
    }


def _agreed(number: int) -> int:
    """What rank 0 says."""
    told = torch.tensor([number])
    dist.broadcast(told, 0)
    return int(told)


def _timed(step: Callable[[], None]) -> Sample:
    dist.barrier()
    wall, cpu = time.perf_counter(), time.thread_time()
    step()
    return time.perf_counter() - wall, time.thread_time() - cpu


def _own(step: Callable[[], None], hooks: Switch, count: int) -> list[Sample]:
    """What is spent in our own code, in each of `count` watched steps."""
    wall = cpu = 0.0
    inside = False
    found = []

    def clocked(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal wall, cpu, inside
            if inside:
                return original(*args, **kwargs)
            inside = True
            began, began_cpu = time.perf_counter(), time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                wall, cpu = wall + time.perf_counter() - began, cpu + time.thread_time() - began_cpu
                inside = False

        return call

    doors = [
        (UnpickledHook, "__call__"),
        (StepTracker, "_on_backward_end"),
    ]  # all that torch calls
    originals = [getattr(owner, name) for owner, name in doors]
    for (owner, name), original in zip(doors, originals, strict=True):
        setattr(owner, name, clocked(original))
    try:
        with hooks():
            for _ in range(count):
                wall = cpu = 0.0
                _timed(step)
                found.append((wall, cpu))
    finally:
        for (owner, name), original in zip(doors, originals, strict=True):
            setattr(owner, name, original)
    return found


def _first(wrapper: nn.Module, step: Callable[[], None]) -> dict[str, list[Sample]]:
    """The first rounds of a new watch, and as many plain steps between them."""
    found: dict[str, list[Sample]] = {PLAIN: [], CHECKED: []}
    with ddpcheck.watch(wrapper) as watch:
        hooks = Switch(watch)
        for number in range(FIRST_ROUNDS):
            for name in (PLAIN, CHECKED) if number % 2 else (CHECKED, PLAIN):
                with hooks() if name == CHECKED else contextlib.nullcontext():
                    found[name].append(_timed(step))
        hooks.on()  # for close
    return found
