"""All-gather of values over the rendezvous store, with a timeout.

Imports torch only on a rank that exchanges values.
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
    """Raised if ranks did not take part before the timeout."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(f"no answer from {list(ranks)}")
        self.ranks = tuple(ranks)


@dataclass(frozen=True, slots=True)
class StoreExchange:
    """All-gather of values over the rendezvous store of the default process group."""

    prefix: str  # unique key prefix
    rank: int
    ranks: Sequence[int]  # participating ranks
    timeout: float  # seconds to wait per rank; after the first timeout, ranks are only polled

    @classmethod
    def next_exchange(cls, group: Any, purpose: str, timeout: float | None = None) -> StoreExchange:
        """Return this rank's next exchange for `purpose` with the ranks of `group` (None: all).

        The n-th calls of all ranks give the same exchange. The store counts calls separately for each set of ranks, so
        groups do not interfere and a new store starts from zero. Keys that this rank wrote two exchanges ago are
        deleted, since all ranks have read these keys. `timeout`: seconds; default: the timeout of the group.
        """
        import torch.distributed as dist

        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        rank = dist.get_rank()
        digest = hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
        base = f"ddpcheck/{purpose}/{digest}"
        number = default_store().add(f"{base}/calls/{rank}", 1)
        exchange = cls(f"{base}/{number}", rank, ranks, group_timeout(group) if timeout is None else timeout)
        if number > 2:
            cls(f"{base}/{number - 2}", rank, ranks, 0.0).delete("digest", "detail", "measured")
        return exchange

    def all_gather(self, key: str, value: object) -> list[Any]:
        """Return each rank's value under `key`, in order, or raise `RanksTimedOutError`."""
        store = default_store()
        self.put(key, value)
        payloads: list[bytes] = []
        missing_ranks: list[int] = []
        for rank in self.ranks:
            name = f"{self.prefix}/{key}/{rank}"
            try:
                if not missing_ranks:
                    store.wait([name], timedelta(seconds=self.timeout))
                elif not _has_key(store, name):
                    raise TimeoutError
                payloads.append(get_value(store.get, name))
            except Exception:  # timeout exceptions differ by store
                missing_ranks.append(rank)
        if missing_ranks:
            # A late rank must neither read stale bytes nor report this rank as missing.
            with contextlib.suppress(Exception):
                store.set(self._gave_up_key(key, self.rank), b"")
            self.delete(key)
            gave_up = [rank for rank in missing_ranks if _has_key(store, self._gave_up_key(key, rank))]
            raise RanksTimedOutError([rank for rank in missing_ranks if rank not in gave_up] or missing_ranks)
        return [pickle.loads(data) for data in payloads]

    def put(self, key: str, value: object) -> None:
        """Write this rank's value under `key` without waiting for other ranks."""
        put_value(default_store().set, f"{self.prefix}/{key}/{self.rank}", pickle.dumps(value))

    def delete(self, *keys: str) -> None:
        """Delete this rank's values under `keys`; the later pieces of large values remain."""
        for key in keys:
            with contextlib.suppress(Exception):  # not supported by every store
                default_store().delete_key(f"{self.prefix}/{key}/{self.rank}")

    def _gave_up_key(self, key: str, rank: int) -> str:
        return f"{self.prefix}/{key}/{rank}/gave-up"


def _has_key(store: Any, name: str) -> bool:
    try:
        return bool(store.check([name]))
    except Exception:  # the process of the store has exited
        return False


def default_store() -> Any:
    """Return the rendezvous store of the default process group (private to torch)."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def group_timeout(group: Any) -> float:
    """Return the timeout of `group` in seconds, or of the store if unknown."""
    import torch
    import torch.distributed as dist

    try:
        device = str(dist.get_backend_config(group)).split(",")[0].partition(":")[0]  # first device of the group
        process_group: Any = group or dist.group.WORLD
        return float(process_group._get_backend(torch.device(device)).options._timeout.total_seconds())
    except Exception:  # not every backend has options
        return float(default_store().timeout.total_seconds())
