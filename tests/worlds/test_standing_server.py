"""A fork server that stands still: starting ends in one sentence, and the next world has ranks."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpcheck.findings.errors import HangError, RankError
from ddpcheck.harness import World
from ddpcheck.worlds import starting

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The process of a server of this test alone, which finds modules in its folder."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(starting, "_servers", {})
    with World(1) as world:
        world.run(os.getpid)
    (pid,) = starting.server_pids()
    yield pid
    starting.shut_down()


def test_one_that_a_signal_has_stopped(server: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "_STOPPED", 0.5)
    os.kill(server, signal.SIGSTOP)
    with World(1) as world, pytest.raises(RankError, match=rf"process {server}\) was stopped by a signal"):
        world.run(os.getpid)
    assert not Path(f"/proc/{server}").exists()
    with World(1) as world:
        assert world.run(os.getpid)


def test_one_that_is_stopped_and_goes_on_is_waited_for(server: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "_STOPPED", 60.0)
    os.kill(server, signal.SIGSTOP)
    with World(1) as world:
        run = world.start(os.getpid)
        time.sleep(0.2)
        assert not run.done()
        os.kill(server, signal.SIGCONT)
        assert run.result()


def test_one_that_waits_in_an_import(server: int, tmp_path: Path) -> None:
    (tmp_path / "waits_for_ever.py").write_text("import time\ntime.sleep(1e6)\n")
    why = r"did not start within 3 s, since the fork server \(process \d+\) still imports waits_for_ever"
    with World(2, preload=["waits_for_ever"], startup_timeout=3.0) as world, pytest.raises(HangError, match=why):
        world.run(os.getpid)
