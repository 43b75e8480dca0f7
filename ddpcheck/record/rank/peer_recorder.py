"""Record point-to-point calls: the peer waited for, and the ranks received from."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ddpcheck.findings.evidence.endings import PeerWait
from ddpcheck.findings.source_lines import user_location
from ddpcheck.gather.collectives.collective_log import replace_functions
from ddpcheck.gather.patching import Recorder, accompanied, patched
from ddpcheck.record.recording import Recording
from ddpcheck.stream.entries import PeerReceived

_STARTED = ("isend", "irecv")  # return a `Work` to wait for
_RECEIVES = ("recv", "irecv")


class PeerRecorder(Recorder, subjects=("collectives",)):
    """Recorder of point-to-point waits and of the ranks received from."""

    def __init__(self, run: Recording) -> None:
        self._run = run
        self._log = run.log
        self._received: set[PeerReceived] = set()
        self._works: WeakKeyDictionary[Any, PeerWait] = WeakKeyDictionary()
        self._waiting = False  # inside a recorded wait: nested waits are not recorded
        replace_functions(("send", "recv", *_STARTED), self._accompanied)
        patched(distributed_c10d.Work, "wait", self._waits)

    def _accompanied(self, name: str, original: Any) -> Any:
        parameters = tuple(inspect.signature(original).parameters)

        def around(*arguments: Any, **named: Any) -> Generator[None, Any, None]:
            bound = {**dict(zip(parameters, arguments, strict=False)), **named}
            wait = PeerWait(name, _peer_of(bound), int(bound.get("tag") or 0), str(user_location() or ""))
            if name in _RECEIVES:
                self._receives(PeerReceived(wait.peer, self._run.steps > 0))
            if name in _STARTED:
                work = yield
                if work is not None:
                    self._works[work] = wait
            else:
                yield from self._during(wait)
            self._log.waited |= name in _RECEIVES

        return accompanied(original, around)

    def _receives(self, one: PeerReceived) -> None:
        if one not in self._received:
            self._received.add(one)
            self._log.add(one)

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
        self._log.wait_for(wait)
        try:
            yield
        finally:
            self._waiting = False
            self._log.wait_for(None)


def _peer_of(given: Mapping[str, Any]) -> int:
    """Return the global rank of the peer; -1 for a receive from any rank."""
    peer = next((rank for key in ("dst", "src") if (rank := given.get(key)) is not None), None)
    if peer is not None:
        return int(peer)
    group_rank = next((rank for key in ("group_dst", "group_src") if (rank := given.get(key)) is not None), None)
    group: Any = given.get("group") or dist.group.WORLD
    return -1 if group_rank is None else dist.get_global_rank(group, int(group_rank))
