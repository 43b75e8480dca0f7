"""Alarms between the ranks of a watched loop over the rendezvous store; without an alarm, the ranks do not communicate.

A rank that has something to report posts an alarm *before* it takes part in the reduction of that step. So all alarms
of a step are in the store when any rank has come through its reduction, and one question to the store is enough.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddpcheck.findings.replace import replace
from ddpcheck.findings.source_lines import user_location
from ddpcheck.findings.wording import format_ranks
from ddpcheck.gather.collectives.store_exchange import RanksTimedOutError, StoreExchange, default_store

_ALWAYS_FOR = 32
_THEN_EVERY = 16
_LONG = 0.02  # seconds of a step beside which a question, of some 50 microseconds, does not count


@dataclass(frozen=True, slots=True)
class Left:
    """Stands for the value of a rank that has left, with the reason."""

    why: str


class AlarmBoard:
    """Alarms of the ranks of one process group, and the exchange of values after one.

    Attributes:
        silent: Ranks that have left or have not answered in time; from then on this rank is on its own.
    """

    _every = _THEN_EVERY

    def __init__(self, group: Any, timeout: float) -> None:
        self._exchange = StoreExchange.over(group, "watch", timeout)
        self.rank = self._exchange.rank
        self.ranks = tuple(self._exchange.ranks)
        self.silent: tuple[int, ...] = ()
        self._kept: list[str] = []  # keys of the last gatherings

    @property
    def open(self) -> bool:
        """Whether there are other ranks that answer."""
        return len(self.ranks) > 1 and dist.is_initialized() and not self.silent

    def is_checked(self, step: int) -> bool:
        """Whether the ranks look for alarms after a step: the same on all of them."""
        return step < _ALWAYS_FOR or step % self._every == self._every - 1

    def set_pace(self, seconds: Iterable[float]) -> None:
        """Look for alarms after every step where one takes long on every rank; `seconds` a step, by rank."""
        self._every = 1 if min(seconds) >= _LONG else _THEN_EVERY

    def post(self, step: int) -> None:
        """Have all ranks exchange reports after this step, or the next one after which they look for alarms."""
        while not self.is_checked(step):
            step += 1
        if self.open:
            with contextlib.suppress(Exception):  # the process with the store is gone: this rank is on its own
                default_store().set(self._key(step), b"1")

    def is_posted(self, step: int) -> bool:
        """Whether any rank has posted an alarm for a step whose reduction this rank has come through."""
        if not (self.open and self.is_checked(step)):
            return False
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # the host runs ahead of the reduction
        try:
            return bool(default_store().check([self._key(step)]))
        except Exception:
            return False

    def _key(self, step: int) -> str:
        return f"{self._exchange.prefix}/alarm/{step}"

    def gather(self, key: str, value: Any, *, at_most: float = math.inf) -> list[Any]:
        """The value of each rank under `key`, which is used once; that of this rank alone where another is silent.

        It waits for `at_most` seconds, where that is less than usual.
        """
        if not self.open:
            return [value]
        exchange = replace(self._exchange, timeout=min(self._exchange.timeout, at_most))
        try:
            found = exchange.all_gather(key, value)
        except RanksTimedOutError as error:
            self.silent = error.ranks
            why = f"{format_ranks(error.ranks)} did not answer within {exchange.timeout:g} s; from now on rank"
            warnings.warn(f"ddpcheck: {why} {self.rank} judges alone", stacklevel=2)
            return [value]
        left = {r: one.why for r, one in zip(self.ranks, found, strict=True) if isinstance(one, Left)}
        if left:
            self.silent = tuple(left)
            where = user_location()
            waits = f" rank {self.rank} met no other rank at {where}, and" if where else f" rank {self.rank}"
            gone = "; ".join(f"rank {rank} {why}" for rank, why in left.items())
            warnings.warn(f"ddpcheck: {gone};{waits} judges alone from now on", stacklevel=2)
            return [value]
        self._kept.append(key)
        if len(self._kept) > 2:  # every rank has read what this one wrote two gatherings ago, or it would not be here
            self._exchange.delete(self._kept.pop(0))
        return found

    def leave(self, keys: Iterable[str], why: str) -> None:
        """Tell the others why this rank has left, under each key of a gathering where they may wait for it."""
        if self.open:
            for key in set(keys).difference(self._kept):  # another rank may not have read yet what is there
                with contextlib.suppress(Exception):  # the process with the store is gone
                    self._exchange.put(key, Left(why))
