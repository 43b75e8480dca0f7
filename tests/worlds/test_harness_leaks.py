"""Many worlds in a row, good and bad ones, leave nothing: no process, descriptor, file or thread."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from ddpcheck.findings.errors import RankError
from ddpcheck.harness import World, start_world
from ddpcheck.worlds.starting import server_pids, shut_down

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")


@pytest.mark.slow
def test_worlds_in_a_row_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_step(fail: bool) -> float:  # local, so that it travels by value: ranks need not import this module
        import torch
        import torch.distributed as dist

        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        if fail and dist.get_rank() == 1:
            os._exit(1)
        return float(tensor.item())

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shut_down()
    with start_world(2, hash_seeds=True, ahead=True) as world:  # starts the fork servers; waits for what they import
        world.run(one_step, False)
    gc.collect()
    servers = server_pids()
    assert len(servers) == 2

    def count() -> tuple[object, ...]:
        descriptors = [len(os.listdir(f"/proc/{pid}/fd")) for pid in ("self", *servers)]
        children = {child.pid for child in psutil.Process().children(recursive=True)}
        return descriptors, children, sorted(os.listdir(tmp_path))

    before, threads, memory = count(), threading.active_count(), psutil.Process().memory_info().rss
    for number in range(40):
        with start_world(2, hash_seeds=bool(number % 2)) as world:
            if number % 20 == 7:
                with pytest.raises(RankError):
                    world.run(one_step, True)
            elif number % 20 != 13:  # some are closed before they have started
                assert world.run(one_step, False) == [2.0, 2.0]
    gc.collect()
    time.sleep(0.05)
    assert count() == before
    assert threading.active_count() == threads
    assert psutil.Process().memory_info().rss - memory < 20e6
    for server in servers:
        assert len(os.listdir(f"/proc/{server}/task")) == 1, "a fork server must stay single-threaded"


def test_a_forgotten_world_is_closed() -> None:
    world = World(1)
    pid = world.run(os.getpid)[0]
    directory = world.directory
    del world
    gc.collect()
    assert not psutil.pid_exists(pid) and not directory.exists()
