"""Gradients that stay in `.grad` after a step, and that the next backward pass adds to: nobody has zeroed them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ddpcheck.findings.evidence.pace import GradientsLeft
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import user_location
from ddpcheck.gather.state.fingerprints import fingerprint
from ddpcheck.gather.state.tensor_refs import tensor_ref
from ddpcheck.gather.state.tensor_values import version_of
from ddpcheck.gather.steps.gradient_distance import dense, has_gradient

_MOST_LOOKED_AT = 16  # steps of an optimizer
_FEWEST = 3  # steps, one after the other


@dataclass(slots=True)
class _Followed:
    number: int
    sample: Callable[[], Any]  # a parameter
    steps: int = 0
    now: tuple[int, int] | None = None  # its gradient and version, as the backward pass that runs has met it
    left: int = 0  # a fingerprint of its gradient after a step; 0 where it is zero or gone
    own: bool = False  # whether that step was its optimizer's
    line: Location | None = None  # of the last backward pass that has reached it
    mixed: tuple[Location | None, Location | None] | None = None  # of a pass that added to what was left, and of that
    times: int = 0
    told: bool = False


class LeftoverRecorder:
    """Follows a parameter of each optimizer; hands what it finds to `sink`."""

    def __init__(self, sink: Callable[[GradientsLeft], object]) -> None:
        self._sink = sink
        self._known: WeakKeyDictionary[Any, _Followed] = WeakKeyDictionary()

    def begins_to_step(self, optimizer: Any, number: int) -> None:
        """An optimizer is about to step."""
        one = self._known.get(optimizer)
        if one is None:
            held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if held and type(held[0].grad) is torch.Tensor:
                self._known[optimizer] = _Followed(number, tensor_ref(held[0]))
            return
        mixed, one.mixed = one.mixed, None
        again = mixed is not None and (one.own or mixed[0] != mixed[1])
        one.times = one.times + 1 if again else 0
        if mixed is not None and one.times == _FEWEST and not one.told:
            one.told = True
            self._sink(GradientsLeft(number, one.own, mixed[0], mixed[1], user_location()))

    def has_stepped(self, optimizer: Any) -> None:
        """It has stepped: what do all of them leave behind?"""
        for other, one in self._living():
            one.steps += other is optimizer
            if other is optimizer or not one.left:
                one.left, one.own = _mark(one.sample()), other is optimizer

    def backward_begins(self) -> None:
        """A backward pass of the script begins."""
        for _, one in self._living():
            gradient = getattr(one.sample(), "grad", None)
            one.now = None if gradient is None else (id(gradient), version_of(gradient))
            if (one.left or one.mixed) and not (value := _mark(one.sample())):
                one.left, one.mixed = 0, None  # zeroed
            elif one.left and value != one.left:
                one.left = 0

    def backward_ended(self) -> None:
        """It has ended."""
        here: Location | None = None
        for _, one in self._living():
            gradient = getattr(one.sample(), "grad", None)
            if gradient is None or one.now == (id(gradient), version_of(gradient)):
                continue
            here = here or user_location()
            if one.left:
                one.mixed, one.left = (one.line, here), 0
            one.line = here

    def _living(self) -> list[tuple[Any, _Followed]]:
        return [(other, one) for other, one in list(self._known.items()) if one.steps < _MOST_LOOKED_AT]


def _mark(parameter: Any) -> int:
    """A fingerprint of its gradient; 0 where there is none, or it is zero."""
    if parameter is None or not has_gradient(parameter):
        return 0
    return fingerprint(dense(parameter.grad)) or 1
