"""What this rank waits for in a point-to-point call: which other rank is to send to it, or to receive from it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ddpcheck.findings.evidence.endings import PeerWait
from ddpcheck.findings.source_lines import user_location
from ddpcheck.gather.collectives.collective_log import replace_functions
from ddpcheck.gather.patching import accompanied, patched

_STARTED = ("isend", "irecv")  # whose result is waited for


class PeerRecorder:
    """Hands `sink` what this rank begins to wait for, and `None` when it waits no more."""

    def __init__(self, sink: Callable[[PeerWait | None], object]) -> None:
        self._sink = sink
        self._works: WeakKeyDictionary[Any, PeerWait] = WeakKeyDictionary()
        self._waiting = False  # in a call that makes others
        replace_functions(("send", "recv", *_STARTED), self._accompanied)
        patched(distributed_c10d.Work, "wait", self._waits)

    def _accompanied(self, name: str, original: Any) -> Any:
        parameters = tuple(inspect.signature(original).parameters)

        def around(*arguments: Any, **named: Any) -> Generator[None, Any, None]:
            given = {**dict(zip(parameters, arguments, strict=False)), **named}
            wait = PeerWait(name, _peer_of(given), int(given.get("tag") or 0), str(user_location() or ""))
            if name in _STARTED:
                work = yield
                if work is not None:
                    self._works[work] = wait
            else:
                yield from self._during(wait)

        return accompanied(original, around)

    def _waits(self, work: Any, *_arguments: Any, **_named: Any) -> Generator[None, Any, None]:
        wait = self._works.get(work)
        if wait is None:
            yield
        else:
            yield from self._during(wait)

    def _during(self, wait: PeerWait) -> Generator[None, Any, None]:
        if self._waiting:
            yield
            return
        self._waiting = True
        self._sink(wait)
        try:
            yield
        finally:
            self._waiting = False
            self._sink(None)


def _peer_of(given: Mapping[str, Any]) -> int:
    """The rank in the whole job; -1 for a receive from whoever sends first."""
    peer = next((rank for key in ("dst", "src") if (rank := given.get(key)) is not None), None)
    if peer is not None:
        return int(peer)
    in_group = next((rank for key in ("group_dst", "group_src") if (rank := given.get(key)) is not None), None)
    group: Any = given.get("group") or dist.group.WORLD
    return -1 if in_group is None else dist.get_global_rank(group, int(in_group))
