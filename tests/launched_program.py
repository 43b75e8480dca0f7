"""What `test_launched` has a launcher start: one rank, which goes through scenarios and writes down what it is told.

`python launched_program.py FOLDER SCENARIO...`; each line of FOLDER/rankR is one answer, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from ddpcheck.findings.errors import RankError
from ddpcheck.testing.leases import LaunchedWorld
from ddpcheck.worlds import rank as ranks
from ddpcheck.worlds.launchers.detection import require
from ddpcheck.worlds.launchers.rank_group import RankGroup

FOLDER = Path(sys.argv[1])


def all_reduced(value: float) -> float:
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(tensor)
    return float(tensor.item())


def fail(how: str, who: int) -> str:
    """One rank fails, the others wait for it in a collective."""
    if ranks.current().rank == who:
        FAILURES[how]()
    all_reduced(0)
    return "fine"


def compare() -> None:
    assert sorted([2, 1]) == [1, 3], "not the same"


def skip() -> None:
    import pytest

    pytest.skip("no disk")


def sleep() -> None:
    ranks.set_status("step 3: loading")
    time.sleep(60)


def loop() -> None:
    while True:
        pass


def kill_host() -> None:
    psutil.Process().parents()[1].kill()  # the process of the launcher, which has started the fork server
    time.sleep(60)


FAILURES: dict[str, Callable[[], Any]] = {
    "raise": compare,
    "skip": skip,
    "exit": lambda: sys.exit(0),
    "sleep": sleep,
    "loop": loop,
    "os_exit_3": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill_host": kill_host,
}


def context_and_environment() -> list[Any]:
    mine = ranks.current()
    ranks.state["runs"] = ranks.state.get("runs", 0) + 1
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return [mine.rank, mine.world_size, mine.device, str(mine.directory), *map(os.environ.get, names)]


def save_attachment() -> None:
    ranks.save_attachment(b"of %d" % ranks.current().rank)


def big() -> bytes:
    return b"%d" % ranks.current().rank * (9 << 20)


def world_of(session: RankGroup, **options: Any) -> contextlib.closing[LaunchedWorld]:
    asked = {"world_size": session.world_size, **options}
    return contextlib.closing(LaunchedWorld(session, asked, lambda *_: None))


class Program:
    """The scenarios, each of which writes what it is told."""

    def __init__(self) -> None:
        self.session = RankGroup(require(), timeout=60)
        self.file = (FOLDER / f"rank{self.session.rank}").open("w", buffering=1)
        self.write("pid", os.getpid())

    def write(self, scenario: str, *said: Any) -> None:
        self.file.write(json.dumps([scenario, *said]) + "\n")

    def attempt(self, name: str, fn: Callable[..., Any], *args: Any, **options: Any) -> None:
        """One test: a run, and the end."""
        self.session.begin(name)
        started = time.monotonic()
        try:
            with world_of(self.session, **{"timeout": 20, **options}) as world:
                self.write(name, "returned", repr(world.run(fn, *args)))
        except Exception as error:
            failures = [(each.rank, each.kind, each.type) for each in getattr(error, "failures", ())]
            said = (type(error).__name__, str(error), time.monotonic() - started, failures)
            if any(kind == "died" for _, kind, _ in failures):
                time.sleep(0.5)  # torchrun tells the others to end in the meantime
            self.write(name, *said)
        self.end(name)

    def end(self, name: str) -> None:
        try:
            self.session.end(b"ended", timeout=20)
        except RankError as error:
            self.write(name + " end", str(error))

    # --- Scenarios -------------------------------------------------------------------------------------------------

    def works(self) -> None:
        self.attempt("all_reduced", all_reduced, 1.0)
        session = self.session
        session.begin("several runs")
        with world_of(session) as world:
            said = [world.run(context_and_environment) for _ in range(2)]
            self.write("context", said[0] == said[1], said[0], ranks.state, os.environ.get("GLOO_SOCKET_IFNAME"))
            world.run(save_attachment)
            self.write("attachment", [world.attachment(rank).decode() for rank in range(2)])
            self.write("big", [(len(data), data[:1].decode()) for data in world.run(big)])
        with world_of(session, world_size=1) as world:
            self.write("one of two", world.run(lambda: ranks.current().world_size))
        words = session.gather("a word", f"word {session.rank}".encode(), timeout=20)
        self.write("agree", [word.decode() for word in words])
        ends = session.end(f"end {session.rank}".encode(), timeout=20)
        self.write("end", [end.decode() for end in ends])
        for number in range(2):
            session.begin(f"next {number}")
            session.end(b"", timeout=20)
        self.write("files", sorted(map(str, FOLDER.glob("ddpcheck-*/rank*"))))

    def fails(self) -> None:
        for how in ("raise", "skip", "exit"):
            for who in range(2):
                self.attempt(f"{how} {who}", fail, how, who)
        for how, who in (("sleep", 0), ("loop", 1)):
            self.attempt(f"{how} {who}", fail, how, who, timeout=2)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[RankGroup]:
        self.session.begin(name)
        try:
            yield self.session
        except RankError as error:
            self.write(name, type(error).__name__, str(error))
        self.end(name)

    def out_of_step(self) -> None:
        with self.step("skipped run") as session:
            if session.rank == 0:
                with world_of(session, startup_timeout=20) as world:
                    world.run(all_reduced, 1.0)
        with self.step("other run") as session, world_of(session, timeout=10 + session.rank) as world:
            world.run(context_and_environment)
        with self.step("late") as session:
            while session.rank and "late" not in (FOLDER / "rank0").read_text():
                time.sleep(0.05)
            session.gather("a point", b"", timeout=0.2)
        self.attempt("in step again", all_reduced, 1.0)

    def dies(self, how: str, who: str) -> None:
        name = f"dies,{how},{who}"
        self.attempt(name, fail, how, int(who))
        self.attempt(f"after {name}", all_reduced, 1.0)

    def leaves(self) -> None:
        if self.session.rank == 1:
            self.session.leave("stopped after 1 failure")
            self.write("left")
        else:
            self.attempt("with one that left", all_reduced, 1.0)

    def reads_late(self) -> None:
        """Rank 1 asks the store slowly; rank 0 comes once rank 1 has seen that it is missing, and leaves at once."""
        session = self.session
        session.begin("the last one")
        if session.rank:
            ask = session.store._request

            def slowly(*arguments: Any) -> Any:
                answer = ask(*arguments)
                time.sleep(0.3)
                return answer

            session.store._request = slowly  # type: ignore[method-assign]
        else:
            while not session.store.has(f"gather/{session.epoch.number}/end/1"):
                time.sleep(0.01)
            time.sleep(1.0)
        self.end("the last one")

    def stopped(self) -> None:
        """Rank 0 waits in plain code for the launcher to end it."""
        try:
            if self.session.rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(20)
        except KeyboardInterrupt as error:
            self.write("stopped", str(error))
        self.attempt("after that", all_reduced, 1.0)


if __name__ == "__main__":
    program = Program()
    for scenario in sys.argv[2:]:
        name, *arguments = scenario.split(",")
        getattr(program, name)(*arguments)
    program.session.leave()
    program.write("over")
