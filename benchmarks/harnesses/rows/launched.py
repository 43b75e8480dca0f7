"""`torchrun --nproc-per-node W` in each test."""

import subprocess
import sys
from pathlib import Path

import pytest
from work import RANKS, TESTS

PROGRAM = Path(__file__).with_name("launched_program.py")


@pytest.mark.parametrize("number", range(TESTS))
def test_world(number: int) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    subprocess.run([*torchrun, str(PROGRAM)], check=True)
