"""What a rank waits for in point-to-point calls, on real ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpcheck.findings.evidence.endings import PeerWait
from ddpcheck.stream.entries import PeerReceived


@pytest.mark.ddp(world_size=2)
def test_what_a_rank_waits_for_is_known_from_the_call_to_its_end(rank: int) -> None:
    from ddpcheck.record.rank.work_recorder import PeerRecorder
    from ddpcheck.record.recording import Recording

    seen: list[PeerWait | None] = []
    entries: list[Any] = []
    log: Any = SimpleNamespace(wait_for=seen.append, add=entries.append, waited=False)
    PeerRecorder(Recording(entries.append, log=log))
    tensor, peer = torch.ones(2), 1 - rank
    if rank == 0:
        dist.send(tensor, peer, tag=3)
        dist.recv(tensor, group_src=peer)
    else:
        dist.recv(tensor, peer, tag=3)
        dist.send(tensor, group_dst=peer)
    blocking = [(one.operation, one.peer, one.tag) for one in seen[::2] if one is not None]
    first, second = ("send", "recv") if rank == 0 else ("recv", "send")
    assert blocking == [(first, peer, 3), (second, peer, 0)] and seen[1::2] == [None, None]
    seen.clear()
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, peer), dist.P2POp(dist.irecv, torch.ones(2), peer)])
    assert not seen
    for work in works:
        work.wait()
    assert [None if one is None else one.operation for one in seen] == ["isend", None, "irecv", None]
    assert all("test_peer_recorder.py" in one.location for one in seen if one is not None)
    assert entries == [PeerReceived(peer)] and log.waited  # told once, and that it has waited
