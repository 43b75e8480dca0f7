"""Where the ranks of a watched loop leave word for each other: the rendezvous store, at no cost while nobody has any.

A rank that has something to tell posts an alarm *before* it takes part in the reduction of that backward pass. Who has
come through the reduction has therefore been preceded by every alarm of it, and one question to the store tells.
"""

from __future__ import annotations

import contextlib
import pickle
import warnings
from typing import Any

import torch
import torch.distributed as dist

from ddpcheck.exchange import SilentRanksError, StoreExchange, default_store
from ddpcheck.wording import spelled

_ALWAYS_FOR = 32
_THEN_EVERY = 16


def is_asked(number: int) -> bool:
    """Whether the ranks ask each other after synchronised backward pass `number`: a question takes 50 microseconds."""
    return number < _ALWAYS_FOR or number % _THEN_EVERY == _THEN_EVERY - 1


class Board:
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
        self._handed_in: list[str] = []

    @property
    def open(self) -> bool:
        """Whether there is anyone to ask."""
        return len(self.ranks) > 1 and not self.silent and dist.is_initialized()

    def post(self, number: int) -> None:
        """Have all ranks meet at the next question after backward pass `number`, or after it."""
        while not is_asked(number):
            number += 1
        if self.open:
            with contextlib.suppress(Exception):  # whoever keeps the store is gone: this rank's word is its own then
                default_store().set(self._alarm(number), b"1")

    def has_word(self, number: int) -> bool:
        """Whether anyone has posted for backward pass `number`, whose reduction this rank has come through."""
        if not (self.open and is_asked(number)):
            return False
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # the host runs ahead of the reduction
        try:
            return bool(default_store().check([self._alarm(number)]))
        except Exception:
            return False

    def _alarm(self, number: int) -> str:
        return f"{self._exchange.prefix}/alarm/{number}"

    def gather(self, key: str, value: Any) -> list[Any]:
        """What each rank hands in under `key`, which is used once; from silent ranks nothing."""
        if not self.open:
            return [value]
        try:
            found = [pickle.loads(data) for data in self._exchange.gather(key, pickle.dumps(value))]
        except SilentRanksError as error:
            self.silent = error.ranks
            warnings.warn(
                f"ddpcheck: {spelled(error.ranks)} did not answer within {self._exchange.timeout:g} s; from here on "
                f"rank {self.rank} judges by itself",
                stacklevel=2,
            )
            return [value]
        self._forget(key)
        return found

    def _forget(self, key: str) -> None:
        """Delete what was handed in two gatherings ago: everyone has read it, or would not have come this far."""
        self._handed_in.append(f"{self._exchange.prefix}/{key}/{self.rank}")
        if len(self._handed_in) > 2:
            with contextlib.suppress(Exception):  # not every store can
                default_store().delete_key(self._handed_in.pop(0))
