"""An all-gather of values over the rendezvous store: it has a deadline where a collective might hang.

This module is light: it imports torch only on a rank that exchanges something.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ddpcheck.worlds.wire import get_value, put_value


class RanksTimedOutError(Exception):
    """Some ranks did not take part in time."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(f"no answer from {list(ranks)}")
        self.ranks = tuple(ranks)


@dataclass(frozen=True, slots=True)
class StoreExchange:
    """All-gathers values over the rendezvous store of the default process group."""

    prefix: str  # of the keys; one that has not been used before
    rank: int
    ranks: Sequence[int]  # that take part
    timeout: float  # seconds to wait for all of them together with the first one that is silent

    @classmethod
    def over(cls, group: Any, purpose: str, timeout: float | None = None) -> StoreExchange:
        """An exchange between the ranks of `group`: the n-th for a purpose on one rank meets the n-th on the others.

        The store itself counts, so that groups do not disturb each other, and a new store begins anew. The bytes that a
        rank wrote the time before last are deleted: all others have read them, or they would not have come as far.

        `None` for all ranks as group, and for the group's own timeout.
        """
        import torch.distributed as dist

        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        rank = dist.get_rank()
        among = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
        base = f"ddpcheck/{purpose}/{among}"
        number = default_store().add(f"{base}/calls/{rank}", 1)
        exchange = cls(f"{base}/{number}", rank, ranks, group_timeout(group) if timeout is None else timeout)
        if number > 2:
            cls(f"{base}/{number - 2}", rank, ranks, 0.0).delete("digest", "detail", "measured")
        return exchange

    def all_gather(self, key: str, value: object) -> list[Any]:
        """The value of each rank under `key`, in the order of `ranks`.

        Raises:
            RanksTimedOutError: A rank has written nothing before the deadline.
        """
        store = default_store()
        self.put(key, value)
        found: list[bytes] = []
        silent: list[int] = []
        for rank in self.ranks:
            name = f"{self.prefix}/{key}/{rank}"
            try:
                if not silent:
                    store.wait([name], timedelta(seconds=self.timeout))
                elif not _holds(store, name):
                    raise TimeoutError
                found.append(get_value(store.get, name))
            except Exception:  # the stores raise classes of their own on a timeout
                silent.append(rank)
        if silent:
            # A rank that comes too late must not take these bytes for an answer, nor this rank for one that never came.
            with contextlib.suppress(Exception):
                store.set(self._gave_up_key(key, self.rank), b"")
            self.delete(key)
            gave_up = [rank for rank in silent if _holds(store, self._gave_up_key(key, rank))]
            raise RanksTimedOutError([rank for rank in silent if rank not in gave_up] or silent)
        return [pickle.loads(data) for data in found]

    def put(self, key: str, value: object) -> None:
        """Write the value of this rank under `key`, and wait for no other rank."""
        put_value(default_store().set, f"{self.prefix}/{key}/{self.rank}", pickle.dumps(value))

    def delete(self, *keys: str) -> None:
        """Delete the bytes of this rank under these keys; of large ones the first piece."""
        for key in keys:
            with contextlib.suppress(Exception):  # not every store can
                default_store().delete_key(f"{self.prefix}/{key}/{self.rank}")

    def _gave_up_key(self, key: str, rank: int) -> str:
        """Set by a rank that has given up waiting for the others."""
        return f"{self.prefix}/{key}/{rank}/gave-up"


def _holds(store: Any, name: str) -> bool:
    try:
        return bool(store.check([name]))
    except Exception:  # the process with the store is gone
        return False


def default_store() -> Any:
    """The rendezvous store of the default process group; private to torch."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def group_timeout(group: Any) -> float:
    """Seconds after which an operation of `group` gives up, or those of the store where the group does not tell."""
    import torch
    import torch.distributed as dist

    try:
        device = str(dist.get_backend_config(group)).split(",")[0].partition(":")[0]  # the first that it takes
        whole: Any = group or dist.group.WORLD
        return float(whole._get_backend(torch.device(device)).options._timeout.total_seconds())
    except Exception:  # not every backend has options
        return float(default_store().timeout.total_seconds())
