"""Bytes from every rank to every rank over the rendezvous store: where a collective might hang, this has a deadline.

This module is light: it imports torch only on a rank that exchanges something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta


class SilentRanksError(Exception):
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

    def gather(self, key: str, data: bytes) -> list[bytes]:
        """What each rank handed in under `key`, in the order of `ranks`.

        Raises:
            SilentRanksError: A rank handed in nothing before the deadline.
        """
        from torch.distributed import distributed_c10d

        store = distributed_c10d._get_default_store()
        store.set(f"{self.prefix}/{key}/{self.rank}", data)  # type: ignore[arg-type]  # bytes are taken as they are
        found: list[bytes] = []
        silent: list[int] = []
        for rank in self.ranks:
            name = f"{self.prefix}/{key}/{rank}"
            try:
                store.wait([name], timedelta(seconds=self.timeout if not silent else 0.01))
                found.append(store.get(name))
            except Exception:  # the stores raise classes of their own on a timeout
                silent.append(rank)
        if silent:
            raise SilentRanksError(silent)
        return found
