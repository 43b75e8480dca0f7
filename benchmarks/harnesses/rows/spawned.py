"""`torch.multiprocessing.spawn` in each test."""

from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from work import RANKS, TESTS, join, work


def rank(number: int, path: str) -> None:
    join(number, RANKS, path)
    work()
    dist.destroy_process_group()


@pytest.mark.parametrize("number", range(TESTS))
def test_world(tmp_path: Path, number: int) -> None:
    mp.spawn(rank, (str(tmp_path / "store"),), nprocs=RANKS)
