"""The memory that ranks share with the fork server they come from."""

from __future__ import annotations

import gc
import os
import platform
import re
import sys
import time
from pathlib import Path

import pytest

from ddpcheck.harness import World
from ddpcheck.worlds import rank_setup
from ddpcheck.worlds.starting import shut_down

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

FEW = 20_000
"""Objects that a rank makes by itself; torch._dynamo alone are five times as many."""

COLLAPSES = tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= (6, 1)


def in_huge_pages(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return int(re.findall(r"AnonHugePages:\s+(\d+) kB", text)[0])


@pytest.mark.slow
def test_a_server_that_goes_on_importing_and_tidying_up_leaves_ranks_the_pages_that_they_share() -> None:
    last = rank_setup.DDP_MODULES[-1]

    def look() -> tuple[int, bool]:  # local, so that it travels by value
        return len(gc.get_objects()), last in sys.modules

    shut_down()
    with World(1) as kept:
        (server,) = kept.run(os.getppid)
        before, imported = in_huge_pages(server), False
        while not imported:
            with World(1) as world:
                ((objects, imported),) = world.run(look)
            assert objects < FEW, "garbage collection on a rank goes through what the server has imported"
        time.sleep(1)
        assert in_huge_pages(server) == before, "pages are moved while a rank holds the old ones"
    deadline = time.monotonic() + 60
    while COLLAPSES and in_huge_pages(server) == before:
        assert time.monotonic() < deadline, "pages are never moved"
        time.sleep(0.1)
