"""Whole sessions with the debugger: `--pdb` and `breakpoint()` on ranks, talked to through standard input."""

from __future__ import annotations

import re
import subprocess
import threading
from pathlib import Path

import pytest

from tests import innerpytest

POST_MORTEM = """
import pytest
import torch.distributed as dist

@pytest.mark.ddp(timeout=4)
def test_marker(rank):
    secret = 40 + rank
    if rank == 1:
        assert secret == 0

def on_ranks():
    secret = 60 + dist.get_rank()
    if dist.get_rank() == 0:
        raise ValueError("no")

def test_fixture(ddp_world):
    ddp_world.run(on_ranks)

@pytest.mark.ddp
def test_all_ranks_fail(rank):
    secret = 70 + rank
    assert secret == 0

def test_in_the_parent(ddp_world):
    secret = ddp_world.run(int)
    assert secret == 1

@pytest.mark.ddp
def test_quits(rank):
    assert not "here"

def test_never_reached():
    pass
"""


SLOWLY = "import time; time.sleep(4.5)"  # longer than the timeout of the tests


def typed(process: subprocess.Popen[str], *words: str) -> str:
    """Type a line each time that there is a prompt, once it is there; returns all that was printed."""
    assert process.stdout is not None and process.stdin is not None
    lines = list(words)
    printed = ""
    watchdog = threading.Timer(100, process.kill)
    watchdog.start()
    while character := process.stdout.read(1):
        printed += character
        if lines and re.search(r"\((Pdb|rank \d+)\) $", printed):
            process.stdin.write(lines.pop(0) + "\n")
            process.stdin.flush()
    watchdog.cancel()
    assert not lines, printed
    return printed


@pytest.mark.slow
def test_a_failure_is_looked_at_where_it_happened(tmp_path: Path) -> None:
    innerpytest.write(tmp_path, test_post=POST_MORTEM)
    with innerpytest.start(tmp_path, "--pdb", stdin=subprocess.PIPE) as process:
        printed = typed(process, SLOWLY, *["p secret", "c"] * 4, "q")
    assert process.returncode == 2 and "Quitting debugger" in printed
    assert "= 5 failed in" in printed, printed
    assert "(rank 1) 41\n" in printed and "(rank 0) 60\n" in printed and "(Pdb) [0, 0]\n" in printed, printed
    assert re.search(r"\(rank 0\) 70\n|\(rank 1\) 71\n", printed)
    assert printed.count("entering PDB") == 1, "the parent's debugger is for what failed there"
    assert "\ndef on_ranks():\n        secret" not in printed and "    def on_ranks():\n        secret" in printed
    assert "test_never_reached" not in printed and "hang" not in printed


BREAKPOINTS = """
import os, time
import pytest

@pytest.mark.ddp(timeout=4)
def test_one(rank):
    import torch.distributed as dist
    secret = 40 + rank
    if rank == 1:
        breakpoint()
        secret = 0
    dist.barrier()
    time.sleep(0.7)  # so that time in the debugger would count, if it did

@pytest.mark.ddp(timeout=4)
def test_both(rank):
    import torch.distributed as dist
    secret = 50 + rank
    breakpoint()
    dist.barrier()

def on_ranks():
    import torch.distributed as dist
    secret = 60 + dist.get_rank()
    if dist.get_rank() == 0:
        import pdb; pdb.set_trace()
    return secret

def test_fixture(ddp_world):
    assert ddp_world.run(on_ranks) == [60, 61]

@pytest.mark.ddp(reuse="module")
@pytest.mark.parametrize("number", [1, 2])
def test_shared(rank, number):
    secret = 70 + rank
    if rank == 0:
        breakpoint()
"""


@pytest.mark.slow
def test_a_breakpoint_stops_on_its_rank_for_as_long_as_one_likes(tmp_path: Path) -> None:
    innerpytest.write(tmp_path, test_stop=BREAKPOINTS)
    with innerpytest.start(tmp_path, stdin=subprocess.PIPE) as process:
        printed = typed(process, *("p secret", SLOWLY, "n", "n", "p secret, rank", "c"), *("p secret", "c") * 4)
    assert process.returncode == 0 and "= 5 passed in" in printed, printed
    assert "(rank 1) 41\n" in printed and "(rank 1) (0, 1)\n" in printed
    assert re.search(r"\(rank 0\) 50\n|\(rank 1\) 51\n", printed)
    assert printed.count("(rank 0) 60\n") == 1 and printed.count("(rank 0) 70\n") == 2
