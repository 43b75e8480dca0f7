"""Alarms between the ranks of a watched loop over the rendezvous store.

A rank with something to report posts an alarm *before* it joins the reduction of that step. So all alarms of a step are
in the store when any rank has completed the reduction, and a single query is enough.
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

_FIRST_STEPS = 32
_LATER_INTERVAL = 16
_LONG_STEP = 0.02  # seconds per step; a store query of about 50 microseconds is then negligible


@dataclass(frozen=True, slots=True)
class Gone:
    """Placeholder for the value of a rank that has left, with the reason."""

    why: str


class AlarmBoard:
    """Alarms in the store, by which a rank requests that all ranks exchange reports."""

    def __init__(self, group: Any, timeout: float) -> None:
        self._exchange = StoreExchange.next_exchange(group, "watch", timeout)
        self.rank = self._exchange.rank
        self.ranks = tuple(self._exchange.ranks)
        self.silent: tuple[int, ...] = ()  # ranks that have left or timed out; then this rank stops communicating
        self._interval = _LATER_INTERVAL
        self._gathered_keys: list[str] = []  # keys of the last gathers

    @property
    def open(self) -> bool:
        """Return True if ranks can still exchange reports: none has left or timed out."""
        return len(self.ranks) > 1 and dist.is_initialized() and not self.silent

    def is_checked(self, step: int) -> bool:
        """Return True if all ranks check for alarms after a step."""
        return step < _FIRST_STEPS or step % self._interval == self._interval - 1

    def set_pace(self, seconds: Iterable[float]) -> None:
        """Check for alarms after every step if each rank's steps take long (`seconds`)."""
        self._interval = 1 if min(seconds) >= _LONG_STEP else _LATER_INTERVAL

    def post(self, step: int) -> None:
        """Request an exchange of reports after the first checked step from `step` on."""
        while not self.is_checked(step):
            step += 1
        if self.open:
            with contextlib.suppress(Exception):  # the process with the store has exited
                default_store().set(self._key(step), b"1")

    def is_posted(self, step: int) -> bool:
        """Return True if a rank posted an alarm for `step`; call after gradient reduction."""
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
        """Gather a value from each rank; return only this rank's value after a timeout.

        Waits at most `at_most` seconds if less than the default timeout.
        """
        if not self.open:
            return [value]
        exchange = replace(self._exchange, timeout=min(self._exchange.timeout, at_most))
        try:
            replies = exchange.all_gather(key, value)
        except RanksTimedOutError as error:
            self.silent = error.ranks
            why = f"{format_ranks(error.ranks)} did not answer within {exchange.timeout:g} s; from now on rank"
            warnings.warn(f"ddpcheck: {why} {self.rank} judges alone", stacklevel=2)
            return [value]
        reasons = {rank: reply.why for rank, reply in zip(self.ranks, replies, strict=True) if isinstance(reply, Gone)}
        if reasons:
            self.silent = tuple(reasons)
            location = user_location()
            waits = f" rank {self.rank} met no other rank at {location}, and" if location else f" rank {self.rank}"
            gone = "; ".join(f"rank {rank} {why}" for rank, why in reasons.items())
            warnings.warn(f"ddpcheck: {gone};{waits} judges alone from now on", stacklevel=2)
            return [value]
        self._gathered_keys.append(key)
        if len(self._gathered_keys) > 2:  # this gather completed, so every rank has read the values of two gathers ago
            self._exchange.delete(self._gathered_keys.pop(0))
        return replies

    def leave(self, keys: Iterable[str], why: str) -> None:
        """Tell ranks that wait for values under `keys` why this rank has left."""
        if self.open:
            for key in set(keys).difference(self._gathered_keys):  # other ranks may not have read yet
                with contextlib.suppress(Exception):  # the process with the store has exited
                    self._exchange.put(key, Gone(why))
