"""Bytes from every rank to every rank over the rendezvous store: where a collective might hang, this has a deadline.

This module is light: it imports torch only on a rank that exchanges something.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

_PIECE = 1 << 22  # bytes; a TCPStore closes the connection on a value of more than 8 MiB


class RanksTimedOutError(Exception):
    """Some ranks did not take part in time.

    Attributes:
        ranks: Which.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(f"no answer from {list(ranks)}")
        self.ranks = tuple(ranks)


@dataclass(frozen=True, slots=True)
class StoreExchange:
    """All-gathers bytes over the rendezvous store of the default process group.

    Attributes:
        prefix: Of the keys; one that has not been used before.
        rank: This rank.
        ranks: Those that take part.
        timeout: Seconds to wait for all of them together with the first one that is silent.
    """

    prefix: str
    rank: int
    ranks: Sequence[int]
    timeout: float

    @classmethod
    def over(cls, group: Any, purpose: str, timeout: float | None = None) -> StoreExchange:
        """An exchange between the ranks of `group`: the n-th for a purpose on one rank meets the n-th on the others.

        The store itself counts, so that groups do not disturb each other, and a new store begins anew. What a rank
        handed in the time before last is deleted: all others have read it, or they would not have come as far.

        Args:
            group: A process group that this rank is in; `None` for all ranks.
            purpose: What it is for, as part of the keys.
            timeout: Default: that of the group.
        """
        import torch.distributed as dist

        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        rank = dist.get_rank()
        among = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
        base = f"ddpcheck/{purpose}/{among}"
        store = default_store()
        number = store.add(f"{base}/calls/{rank}", 1)
        exchange = cls(f"{base}/{number}", rank, ranks, group_timeout(group) if timeout is None else timeout)
        if number > 2:
            cls(f"{base}/{number - 2}", rank, ranks, 0.0)._forget(store)
        return exchange

    def gather(self, key: str, data: bytes) -> list[bytes]:
        """What each rank handed in under `key`, in the order of `ranks`.

        Raises:
            SilentRanksError: A rank handed in nothing before the deadline.
        """
        store = default_store()
        self.hand_in(key, data)
        found: list[bytes] = []
        silent: list[int] = []
        for rank in self.ranks:
            name = f"{self.prefix}/{key}/{rank}"
            try:
                if not silent:
                    store.wait([name], timedelta(seconds=self.timeout))
                elif not _holds(store, name):
                    raise TimeoutError
                found.append(_pick_up(store, name))
            except Exception:  # the stores raise classes of their own on a timeout
                silent.append(rank)
        if silent:
            # Who comes too late shall not take it for an answer to something else, nor us for one that never came.
            with contextlib.suppress(Exception):
                store.set(self._sign_of(key, self.rank), b"")
            self._delete(store, key)
            raise RanksTimedOutError([rank for rank in silent if not _holds(store, self._sign_of(key, rank))] or silent)
        return found

    def hand_in(self, key: str, data: bytes) -> None:
        """Hand in what others may wait for under `key`, and wait for nobody."""
        _hand_in(default_store(), f"{self.prefix}/{key}/{self.rank}", data)

    def _sign_of(self, key: str, rank: int) -> str:
        """Set by a rank that was there, and has given up waiting for the others."""
        return f"{self.prefix}/{key}/{rank}/gave-up"

    def _forget(self, store: Any) -> None:
        self._delete(store, "digest", "detail", "measured")

    def _delete(self, store: Any, *keys: str) -> None:
        for key in keys:
            with contextlib.suppress(Exception):  # not every store can
                store.delete_key(f"{self.prefix}/{key}/{self.rank}")


def _holds(store: Any, name: str) -> bool:
    try:
        return bool(store.check([name]))
    except Exception:  # whoever keeps the store is gone
        return False


def _hand_in(store: Any, name: str, data: bytes) -> None:
    """Set `name` last, so that who has waited for it finds all of it."""
    pieces = [data[start : start + _PIECE] for start in range(0, len(data), _PIECE)] or [b""]
    for index, piece in enumerate(pieces[1:], 1):
        store.set(f"{name}/{index}", piece)
    store.set(name, len(pieces).to_bytes(4, "big") + pieces[0])


def _pick_up(store: Any, name: str) -> bytes:
    first = store.get(name)
    more = range(1, int.from_bytes(first[:4], "big"))
    return b"".join([first[4:], *(store.get(f"{name}/{index}") for index in more)])


def default_store() -> Any:
    """The rendezvous store of the default process group; private to torch."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def group_timeout(group: Any = None) -> float:
    """Seconds after which an operation of `group` gives up, or those of the store where the group does not tell."""
    import torch.distributed as dist

    try:
        whole: Any = group or dist.group.WORLD
        backend = whole._get_backend(_devices(group)[0])
        return float(backend.options._timeout.total_seconds())
    except Exception:  # not every backend has options
        return float(default_store().timeout.total_seconds())


def _devices(group: Any) -> list[Any]:
    """The kinds of device whose tensors `group` takes."""
    import torch
    import torch.distributed as dist

    pairs = str(dist.get_backend_config(group)).split(",")
    return [torch.device(pair.partition(":")[0]) for pair in pairs]
