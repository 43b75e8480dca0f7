"""One process by itself, a group of one: what one rank is, without a harness."""

import os
import tempfile

import torch.distributed as dist
from work import TESTS, join, work

with tempfile.TemporaryDirectory() as directory:
    for number in range(TESTS):
        join(0, 1, os.path.join(directory, str(number)))
        work()
        dist.destroy_process_group()
