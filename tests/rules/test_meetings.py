"""DDP402 of processes that wait in `init_process_group`, from what each says of itself."""

from __future__ import annotations

import pytest

from ddpcheck.findings.evidence.endings import Joining
from ddpcheck.findings.replace import replace
from ddpcheck.rules.collectives.ddp401_rank_raised import explain_by_rendezvous
from ddpcheck.rules.collectives.ddp402_hang import judge_rendezvous
from ddpcheck.trace.failures import FailureFacts

AT = "node:29500"


def waits(rank: int, world_size: int = 2, address: str = AT, agent: str = "") -> Joining:
    return Joining(100 + rank, rank, world_size, address, "train.py:7", agent)


@pytest.mark.parametrize(
    ("waiting", "ranks", "words"),
    [
        ([waits(0, 3), waits(1, 3), waits(2, 3, "node:29501")], (2,), "different addresses: node:29500 on ranks 0 and"),
        ([waits(0), waits(1, address="node:29501")], (), "node:29500 on rank 0, node:29501 on rank 1"),
        ([waits(0), waits(1, 4)], (), "different world sizes: 2 on rank 0, 4 on rank 1"),
        ([waits(0), waits(0)], (0,), "2 processes say in init_process_group that they are rank 0, and none is rank 1"),
        ([waits(0, 4), waits(1, 4)], (), "2 processes wait in init_process_group, and the world size is 4: ranks 2 an"),
        (
            [waits(0, agent=AT), waits(1, agent=AT)],
            (),
            "All 2 ranks wait in init_process_group, and do not meet at node",
        ),
        ([waits(0)], (), "1 process waits in init_process_group, and the world size is 2: rank 1 is missing"),
        (
            [waits(0, address="tcp://node:7", agent=AT), waits(1, address="tcp://node:7", agent=AT)],
            (),
            "a store at tcp://node:7, but no rank starts one there: under torchrun, ranks use the store of its agent, "
            "at node:29500",
        ),
    ],
)
def test_why_those_that_wait_do_not_meet(waiting: list[Joining], ranks: tuple[int, ...], words: str) -> None:
    (finding,) = judge_rendezvous(waiting, 60.0)
    assert (finding.code, finding.ranks, str(finding.location)) == ("DDP402", ranks, "train.py:7")
    assert words in finding.message and finding.fix


def test_nobody_who_waits_is_no_finding() -> None:
    assert judge_rendezvous([], 60.0) == []


TIMED_OUT = "DistStoreError: wait timeout after 5000ms"


@pytest.mark.parametrize(
    ("error", "started", "code", "words"),
    [
        (TIMED_OUT, 2, "DDP402", "the world size is 2: rank 1 is missing."),
        (TIMED_OUT, 0, "DDP401", "Rank 0 raised DistStoreError: wait timeout after 5000ms, in init_process_group."),
        ("ValueError: no backend glo", 2, "DDP401", "Rank 0 raised ValueError: no backend glo, in init_process_group."),
    ],
)
def test_what_is_raised_in_init_process_group(error: str, started: int, code: str, words: str) -> None:
    (finding,) = explain_by_rendezvous(FailureFacts(joining=[replace(waits(0), error=error, started=started)]))
    assert (finding.code, str(finding.location)) == (code, "train.py:7") and finding.message.endswith(words)
    assert explain_by_rendezvous(FailureFacts(joining=[waits(0)])) == explain_by_rendezvous(FailureFacts()) == []
