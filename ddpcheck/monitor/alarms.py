"""Where the ranks of a watched loop leave word for each other: the rendezvous store, at no cost while nobody has any.

A rank that has something to tell posts an alarm *before* it takes part in the reduction of that backward pass. Who has
come through the reduction has therefore been preceded by every alarm of it, and one question to the store tells.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ddpcheck.findings.source_lines import user_location
from ddpcheck.findings.wording import format_ranks
from ddpcheck.gather.collectives.store_exchange import RanksTimedOutError, StoreExchange, default_store

_ALWAYS_FOR = 32
_THEN_EVERY = 16
_LONG = 0.02  # seconds of a step of which a question, of some 50 microseconds, is next to nothing


@dataclass(frozen=True, slots=True)
class Left:
    """What a rank hands in where the others may wait for it, and it will not come: why."""

    why: str


class AlarmBoard:
    """Alarms and gatherings of the ranks of one process group.

    Attributes:
        rank: This rank.
        ranks: Those of the group.
        silent: Ranks that have not answered in time; from then on nobody is asked any more.
    """

    def __init__(self, group: Any, timeout: float) -> None:
        self._exchange = StoreExchange.over(group, "watch", timeout)
        self.rank = self._exchange.rank
        self.ranks = tuple(self._exchange.ranks)
        self.silent: tuple[int, ...] = ()
        self._every = _THEN_EVERY
        self._handed_in: list[str] = []

    @property
    def has_others(self) -> bool:
        """Whether there are other ranks to average with."""
        return len(self.ranks) > 1 and dist.is_initialized()

    @property
    def open(self) -> bool:
        """Whether there is anyone to ask."""
        return self.has_others and not self.silent

    def is_asked(self, number: int) -> bool:
        """Whether the ranks ask each other after synchronised backward pass `number`: the same on all of them."""
        return number < _ALWAYS_FOR or number % self._every == self._every - 1

    def pace(self, seconds: Iterable[float]) -> None:
        """Ask after every backward pass where a step takes long on every rank; `seconds` a step, by rank."""
        self._every = 1 if min(seconds) >= _LONG else _THEN_EVERY

    def post(self, number: int) -> None:
        """Have all ranks meet at the next question after backward pass `number`, or after it."""
        while not self.is_asked(number):
            number += 1
        if self.open:
            with contextlib.suppress(Exception):  # whoever keeps the store is gone: this rank's word is its own then
                default_store().set(self._alarm(number), b"1")

    def has_word(self, number: int) -> bool:
        """Whether anyone has posted for backward pass `number`, whose reduction this rank has come through."""
        if not (self.open and self.is_asked(number)):
            return False
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # the host runs ahead of the reduction
        try:
            return bool(default_store().check([self._alarm(number)]))
        except Exception:
            return False

    def _alarm(self, number: int) -> str:
        return f"{self._exchange.prefix}/alarm/{number}"

    def gather(self, key: str, value: Any, *, at_most: float = math.inf) -> list[Any]:
        """What each rank hands in under `key`, which is used once; from silent ranks nothing.

        Args:
            key: Of the gathering.
            value: Of this rank.
            at_most: Seconds to wait, where that is less than usual.
        """
        if not self.open:
            return [value]
        exchange = replace(self._exchange, timeout=min(self._exchange.timeout, at_most))
        try:
            found = [pickle.loads(data) for data in exchange.gather(key, pickle.dumps(value))]
            left = {r: one.why for r, one in zip(self.ranks, found, strict=True) if isinstance(one, Left)}
            if left:
                return [self._without(left, value)]
        except RanksTimedOutError as error:
            self.silent = error.ranks
            warnings.warn(
                f"ddpcheck: {format_ranks(error.ranks)} did not answer within {exchange.timeout:g} s; from here on "
                f"rank {self.rank} judges by itself",
                stacklevel=2,
            )
            return [value]
        self._forget(key)
        return found

    def _without(self, left: dict[int, str], value: Any) -> Any:
        """Go on without ranks that have left."""
        self.silent = tuple(left)
        where = user_location()
        waits = f" rank {self.rank} has met nobody at {where}, and" if where else f" rank {self.rank}"
        gone = "; ".join(f"rank {rank} {why}" for rank, why in left.items())
        warnings.warn(f"ddpcheck: {gone};{waits} judges by itself from here on", stacklevel=2)
        return value

    def leave(self, keys: Iterable[str], why: str) -> None:
        """Tell the others, in each gathering at which they may wait for this rank, that it will not come."""
        if self.open:
            for key in keys:
                with contextlib.suppress(Exception):  # whoever keeps the store is gone
                    self._exchange.hand_in(key, pickle.dumps(Left(why)))

    def _forget(self, key: str) -> None:
        """Delete what was handed in two gatherings ago: everyone has read it, or would not have come this far."""
        self._handed_in.append(f"{self._exchange.prefix}/{key}/{self.rank}")
        if len(self._handed_in) > 2:
            with contextlib.suppress(Exception):  # not every store can
                default_store().delete_key(self._handed_in.pop(0))
