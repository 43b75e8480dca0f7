"""A multiprocessing pool in each test: how the tests of DeepSpeed do it, without their half second of sleep after each.

Source: class `DistributedExec` in tests/unit/common.py of https://github.com/deepspeedai/DeepSpeed.

As there: start method forkserver, a pool of W processes, one task a rank through `starmap_async` with a timeout,
rendezvous through a file, a barrier after it; at the end a second round of tasks, in which a barrier comes before the
group is destroyed, and the pool is closed and joined.
"""

from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from work import RANKS, TESTS, join, work

TIMEOUT = 600.0


def rank(number: int, path: str) -> None:
    join(number, RANKS, path)
    dist.barrier()
    work()


def leave() -> None:
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("number", range(TESTS))
def test_world(tmp_path: Path, number: int) -> None:
    mp.set_start_method("forkserver", force=True)
    pool = mp.Pool(processes=RANKS)
    try:
        pool.starmap_async(rank, [(each, str(tmp_path / "store")) for each in range(RANKS)]).get(TIMEOUT)
    finally:
        pool.starmap(leave, [()] * RANKS)
        pool.close()
        pool.join()
