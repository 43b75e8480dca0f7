"""Recorder of random draws between optimizer steps, with the generator state."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch

from ddpcheck.findings.evidence.loop import StepDraw
from ddpcheck.findings.source_lines import frames_from, is_user_file, user_location, variables_of
from ddpcheck.gather.patching import Recorder, guarded
from ddpcheck.gather.state.fingerprints import digest_of
from ddpcheck.record.data.constructions import (
    available_generators,
    generator_bytes,
    generator_state,
    generators,
    numpy_digest,
    restored_by,
    seed_line,
)
from ddpcheck.record.recording import Recording, follow_steps, unfollow_steps

_MOST_INTERVALS = 7  # intervals start at the first wrapper and at optimizer steps; a step may have two optimizers
_MOST_CALLS = 1 << 18  # max C calls per interval; later calls are ignored
_MOST_DRAWS = 32  # per interval
_NOISE = frozenset(
    {
        *("rand", "randn", "rand_like", "randn_like", "normal", "normal_", "uniform_", "bernoulli", "bernoulli_"),
        *("exponential_", "log_normal_", "cauchy_", "poisson"),
    }
)
_BACKWARD = "run_backward"
_CHOICES = frozenset({"randint", "randint_like", "randperm", "multinomial", "random_"})
NOT_OF_THE_STEP = ("torch.utils.data", "torch.nn.init", "torch.optim", "torch._dynamo", "torch._inductor")
_FORWARDING_PACKAGE = "ddpcheck.record.parity."  # patches torch's functions and passes calls on
_WRAPPER = "torch.nn.parallel.distributed"
_STATE_SIZE = 624  # state size of a Mersenne Twister, regenerated when used up

_State = tuple[int, int]  # digest of the state, index of the next number
_Pair = tuple[_State, _State]  # before and after


class DrawRecorder(Recorder, subjects=("data",)):
    """Recorder of random draws in the first intervals between optimizer steps.

    Uses Python's profile function; if the program has set its own, nothing is recorded.
    """

    def __init__(self, run: Recording) -> None:
        self._run = run
        self._intervals = self._calls = 0
        self._draws: list[StepDraw] = []  # of the current interval
        self._num_draws_before_backward: int | None = None  # None until the first backward pass
        self._states_at_start: Mapping[str, _State] = {}
        self._own_states: list[bytes] = []  # states of the program's own generators at the begin of the interval
        self._open_call: tuple[Any, Mapping[str, _State]] | None = None
        self._profile = guarded(self._note_event)
        follow_steps(self)

    def begin(self) -> None:
        """Start the first interval at the first wrapper's construction: earlier draws may shuffle data."""
        if not self._intervals:
            self._begin_interval()

    def close(self) -> None:
        self._stop_profiling()
        self._states_at_start = {}

    def _stop_profiling(self) -> None:
        if self._states_at_start and sys.getprofile() is self._profile:
            sys.setprofile(None)

    def after_step(self, *_arguments: Any) -> None:
        if self._intervals >= _MOST_INTERVALS and not self._states_at_start:
            unfollow_steps(self)
        else:
            self._begin_interval()

    def _begin_interval(self) -> None:
        if self._intervals >= _MOST_INTERVALS or self._states_at_start or sys.getprofile() is not None:
            return
        self._intervals += 1
        self._calls, self._num_draws_before_backward = 0, None
        self._draws = []
        self._states_at_start, self._open_call = _generator_states(others=True), None
        self._own_states = [numpy_digest(generator) for generator, _ in generators]
        sys.setprofile(self._profile)

    def before_step(self, *_arguments: Any) -> None:
        states_at_start = self._states_at_start
        if not states_at_start:
            return
        self.close()
        # draws after backward affect gradients or weights: equal on all ranks
        del self._draws[self._num_draws_before_backward or 0 :]
        now = _generator_states(others=True)
        for name in ("python", "numpy"):
            if name in states_at_start and name in now and states_at_start[name] != now[name]:
                self._add_draw(name, "any", (states_at_start[name], now[name]), None, in_forward=False)
        for before, (generator, line) in zip(self._own_states, generators, strict=False):
            if numpy_digest(generator) != before:
                self._draws.append(StepDraw(self._run.steps, "", "any", 0, 0, 0, location=line))
        for draw in self._draws:
            self._run.add(draw)

    def _note_event(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call":
            self._calls += 1
            name = getattr(function, "__name__", "")
            if (name in _NOISE or name in _CHOICES) and self._open_call is None and not torch.compiler.is_compiling():
                self._open_call = function, _generator_states()
            elif name == _BACKWARD:
                self._num_draws_before_backward = len(self._draws)
            elif self._calls > _MOST_CALLS:
                self._stop_profiling()
                if self._num_draws_before_backward is None:
                    self._num_draws_before_backward = len(self._draws)
        elif self._open_call is not None and event in ("c_return", "c_exception"):
            called, before = self._open_call
            if called == function:  # bound methods are new objects in each call
                self._open_call = None
                self._note_draw(frame, called.__name__, before)

    def _note_draw(self, frame: FrameType, name: str, before: Mapping[str, _State]) -> None:
        if len(self._draws) >= _MOST_DRAWS or (in_forward := _is_in_forward(frame)) is None:
            return
        kind = "noise" if name in _NOISE else "choice"
        now = _generator_states()
        changed = [generator for generator in now if generator in before and before[generator] != now[generator]]
        for generator in changed:
            self._add_draw(generator, kind, (before[generator], now[generator]), frame, in_forward=in_forward)
        if not changed:
            self._add_draw("", kind, ((0, 0), (0, 0)), frame, in_forward=in_forward)

    def _add_draw(self, generator: str, kind: str, states: _Pair, frame: FrameType | None, *, in_forward: bool) -> None:
        before, after = states
        count = 0 if not generator or generator == "cuda" else (after[1] - before[1]) % _STATE_SIZE or _STATE_SIZE
        location = None if frame is None else user_location(frame)
        name, step = {"cuda": "torch"}.get(generator, generator), self._run.steps
        origin = location, seed_line(name), restored_by(name)
        self._draws.append(StepDraw(step, generator, kind, count, before[0], after[0], in_forward, *origin))


def _generator_states(*, others: bool = False) -> dict[str, _State]:
    states = {name: generator_state(name) for name in (available_generators() if others else ["torch"])}
    if torch.cuda.is_initialized():
        state = generator_bytes(torch.cuda.default_generators[torch.cuda.current_device()])
        states["cuda"] = (int(digest_of(state)[:15], 16), 0)
    return states


def _is_in_forward(frame: FrameType) -> bool | None:
    """Return True if a wrapper's forward calls `frame`; None for code outside of steps.

    Data loaders, constructors of modules and optimizers, and ddpcheck itself are outside of steps.
    """
    in_forward, in_program = False, False
    for current in frames_from(frame):
        name = str(current.f_globals.get("__name__", ""))
        if name.startswith(_FORWARDING_PACKAGE):
            continue
        if name.startswith(NOT_OF_THE_STEP) or (name.startswith("ddpcheck.") and not in_program):
            return None
        if current.f_code.co_name == "__init__" and isinstance(variables_of(current).get("self"), torch.nn.Module):
            return None
        in_forward |= name == _WRAPPER
        in_program |= is_user_file(current.f_code.co_filename)
    return in_forward
