"""The work that is the same in every row: a gloo group of W ranks, one all_reduce that is checked, an orderly end."""

import os
import time

import torch
import torch.distributed as dist

RANKS = int(os.environ["HARNESS_RANKS"])
TESTS = int(os.environ["HARNESS_TESTS"])
HOLD = float(os.environ["HARNESS_HOLD"])  # seconds that ranks stay, so that memory can be read while all are there


def work() -> None:
    tensor = torch.ones(8)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(dist.get_world_size())] * 8
    time.sleep(HOLD)


def join(rank: int, world_size: int, path: str) -> None:
    """Initialise the process group through a file, as a harness without a launcher does."""
    dist.init_process_group("gloo", store=dist.FileStore(path, world_size), rank=rank, world_size=world_size)
