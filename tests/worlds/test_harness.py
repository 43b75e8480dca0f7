"""Worlds of real processes: results, messages on ranks that fail, and what remains afterwards."""

from __future__ import annotations

import importlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy
import psutil  # type: ignore[import-untyped]
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from ddpcheck.findings.errors import DDPCheckError, HangError, RankError, UsageError
from ddpcheck.harness import World, start_world
from ddpcheck.worlds import rank as ranks
from ddpcheck.worlds import rank_setup, starting, validation
from tests.tiers import share

ROOT = Path(__file__).resolve().parents[2]
FORK_OR_SPAWN = pytest.mark.parametrize("method", share(["fork", "spawn"], ["fork"]))
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def rank_number() -> int:
    return ranks.current().rank


def all_reduced(value: float) -> float:
    tensor = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(tensor)
    return float(tensor.item())


def assert_sorted(values: list[int], expected: list[int]) -> None:
    assert values == expected


def fails(world: World, fn: Any, *args: Any, **kwargs: Any) -> RankError:
    with pytest.raises(RankError) as caught:
        world.run(fn, *args, **kwargs)
    return caught.value


def fresh_failure(fn: Any, *args: Any, world_size: int = 2, **kwargs: Any) -> RankError:
    with World(world_size) as world:
        return fails(world, fn, *args, **kwargs)


def kinds(error: RankError) -> list[tuple[int, str]]:
    return [(failure.rank, failure.kind) for failure in error.failures]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Two ranks for tests that leave nothing behind."""
    with World(2, timeout=30) as world:
        yield world


# --- What comes back -----------------------------------------------------------------------------------------------


def test_results_come_back_in_order_of_rank_and_state_stays_in_its_world() -> None:
    def count(step: int) -> int:
        ranks.state["count"] = ranks.state.get("count", 0) + step
        total: int = ranks.state["count"]
        return total

    for size in (2, 8):
        with World(size) as world:
            assert world.run(rank_number) == list(range(size))
            assert [world.run(count, 2) for _ in range(3)] == [[2] * size, [4] * size, [6] * size]


def test_lambdas_closures_local_classes_and_tensors_travel(world: World) -> None:
    class Local(int):
        pass

    offset = 40
    results = world.run(lambda local: Local(local + offset), Local(1))
    assert [(type(local), local) for local in results] == [(Local, 41)] * 2
    tensors = world.run(lambda tensor: tensor * 2, torch.arange(100_000.0))
    assert all(torch.equal(tensor, torch.arange(100_000.0) * 2) for tensor in tensors)


def test_a_module_that_no_rank_can_import_travels_by_value(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "not_on_the_path.py"
    path.write_text("FACTOR = 3\ndef helper(x):\n    return x * FACTOR\ndef entry(x):\n    return helper(x) + 1\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        module = importlib.import_module("not_on_the_path")
    assert world.run(module.entry, 2) == [7, 7]


def test_each_rank_has_its_own_context_and_can_get_its_own_arguments(world: World) -> None:
    contexts = world.run(ranks.current)
    seen = [(c.rank, c.world_size, c.backend, c.device, c.shared_gpu, c.directory) for c in contexts]
    assert seen == [(rank, 2, "gloo", "cpu", False, world.directory) for rank in (0, 1)]
    with pytest.raises(DDPCheckError, match="outside a rank"):
        ranks.current()
    assert world.run_each(lambda a, b: a - b, [(5, 1), (7, 2)]) == [4, 5]
    with pytest.raises(UsageError, match="2 ranks, 1 tuples"):
        world.run_each(lambda a: a, [(1,)])


def test_worlds_work_in_threads() -> None:
    def work(value: float) -> list[float]:
        with World(2) as world:
            return world.run(all_reduced, value)

    with ThreadPoolExecutor() as threads:
        assert list(threads.map(work, [0.0, 10.0, 20.0])) == [[1.0, 1.0], [21.0, 21.0], [41.0, 41.0]]


def test_a_rank_finds_its_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def look() -> tuple[Any, ...]:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "HERE", "THERE", "TORCH_DISTRIBUTED_DEBUG")
        return (*(os.environ.get(name) for name in names), os.getcwd(), torch.get_num_threads())

    monkeypatch.setenv("HERE", "from the parent")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    monkeypatch.chdir(tmp_path)
    with World(2, env={"THERE": "for the ranks"}, threads=1) as world:
        assert world.run(look) == [
            (rank, "2", rank, "from the parent", "for the ranks", None, str(tmp_path), 1) for rank in ("0", "1")
        ]


def test_output_of_a_megabyte_does_not_block() -> None:
    def shout() -> None:
        print("x" * (1 << 20))
        print("the end", file=sys.stderr)

    with World(2, timeout=20) as world:
        world.run(shout)
        text = world.output(1)
        assert len(text) >= 1 << 20 and text.endswith("the end\n")
    assert world.output(1) == text
    with pytest.raises(DDPCheckError, match="closed"):
        world.run(shout)


def test_attachments_of_ranks_are_kept() -> None:
    def attach(*parts: bytes) -> None:
        for part in parts:
            ranks.save_attachment(part)
        if rank_number() == 1 and not parts[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    large = bytes(range(256)) * 4096
    with World(2) as world:
        assert [world.attachment(rank) for rank in range(2)] == [b"", b""]
        world.run_each(attach, [(large,), (b"first", b"last")])
        assert [world.attachment(rank) for rank in range(2)] == [large, b"last"]
        fails(world, attach, b"", b"of one that dies")
    assert world.attachment(1) == b"of one that dies"
    with pytest.raises(UsageError, match="no rank 3"):
        world.attachment(3)
    with pytest.raises(DDPCheckError, match="outside a rank"):
        attach(b"here")


def test_workers_of_xdist_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "cores", lambda: 16)
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)
    assert [validation.threads(size) for size in (1, 2, 3, 32)] == [16, 8, 5, 1]
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "4")
    assert [validation.threads(size) for size in (1, 2, 3, 32)] == [4, 2, 1, 1]


def test_random_numbers_differ_from_rank_to_rank_and_world_to_world() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.random()), float(torch.rand(()))

    drawn = []
    for _ in range(2):
        with World(2) as world:
            drawn += world.run(draw)
    assert all(len(set(numbers)) == 4 for numbers in zip(*drawn, strict=True))


# --- What is said when a rank fails --------------------------------------------------------------------------------


def test_an_exception_is_the_headline() -> None:
    def boom() -> None:
        ranks.set_status("step 0: backward")
        if rank_number() == 1:
            print("about to fail")
            raise ValueError("boom")
        all_reduced(0.0)

    with World(2) as world:
        error = fails(world, boom)
        with pytest.raises(DDPCheckError, match="has failed in an earlier run"):
            world.run(rank_number)
    assert world.failed
    assert str(error).startswith("rank 1 raised ValueError: boom (rank 0 was still waiting in all_reduce at ")
    assert kinds(error) == [(1, "raised"), (0, "stuck")]
    first, second = error.failures
    assert isinstance(first.exception, ValueError) and first.exception.args == ("boom",)
    assert first.place == second.place == "step 0: backward"
    assert first.output == "about to fail"
    assert 'raise ValueError("boom")' in first.traceback and "ddpcheck/worlds/rank.py" not in first.traceback
    assert "in boom" in second.stack and "rank.py" not in second.stack
    assert "boom" in error.detail and error.exit_code == 3


class Turn:
    """What a rank fails with: it is read once the time of that is known, and leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        self.path.touch()
        return f"turn {self.path.name}"


def test_the_first_failure_by_time_comes_first(tmp_path: Path) -> None:
    def fail_in_turn() -> None:
        turn = (rank_number() + 1) % 3
        while turn and not (tmp_path / str(turn - 1)).exists():
            time.sleep(0.001)
        raise RuntimeError(Turn(tmp_path / str(turn)))

    error = fresh_failure(fail_in_turn, world_size=3)
    assert [failure.rank for failure in error.failures] == [2, 0, 1]
    assert str(error).startswith("rank 2 raised RuntimeError: turn 0 (")


@FORK_OR_SPAWN
def test_an_assertion_in_a_test_module_says_what_differs(method: Literal["fork", "spawn"]) -> None:
    """Seed 1 (DistributedDataParallel): fork after CUDA initialisation is unsafe; workers start by spawn there."""
    with World(1, start_method=method, process_group=False) as world:
        assert world.start_method == method
        error = fails(world, assert_sorted, [1, 2], [1, 3])
    assert str(error) == "rank 0 raised AssertionError: assert [1, 2] == [1, 3]"
    assert error.first is not None and error.first.type == "AssertionError"
    assert "At index 1 diff: 2 != 3" in error.first.traceback


@pytest.mark.parametrize(
    ("end", "kind", "exit_code", "words"),
    [
        (lambda: sys.exit(0), "exited", None, "rank 1 called exit(0)"),
        (lambda: os._exit(3), "died", 3, "rank 1 ended with exit code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "died", -signal.SIGKILL, "rank 1 was killed by SIGKILL"),
    ],
)
def test_a_rank_that_ends_in_a_run_is_the_headline(
    end: Callable[[], None], kind: str, exit_code: int | None, words: str
) -> None:
    def vanish() -> float:
        if rank_number() == 1:
            end()
        return all_reduced(0.0)

    error = fresh_failure(vanish)
    assert error.first is not None and not isinstance(error, HangError)
    assert (error.first.rank, error.first.kind) == (1, kind) and exit_code in (None, error.first.exit_code)
    assert words in str(error) and ("memory" in str(error)) == ("SIGKILL" in words)
    assert {failure.kind for failure in error.failures[1:]} <= {"fell", "stuck"}


def test_an_exit_is_noticed_where_no_other_rank_waits_for_it() -> None:
    def vanish() -> None:
        all_reduced(0.0)  # so that they start together
        if rank_number() == 1:
            time.sleep(0.7)  # rank 0 has finished, also where it waits for a core
            os._exit(0)

    with start_world(2, hash_seeds=True) as world:  # rank 1 is of the second server
        error = fails(world, vanish)
    assert not isinstance(error, HangError) and kinds(error) == [(1, "died")]


def test_what_cpp_said_about_an_abort_is_shown() -> None:
    def mismatch() -> None:
        dist.all_reduce(torch.ones(4 if dist.get_rank() == 0 else 400))

    error = fresh_failure(mismatch, timeout=5)
    assert error.first is not None
    if error.first.kind == "died":  # gloo aborts the process that gets more bytes than it expects
        assert "was killed by SIGABRT: " in error.first.message and "enforce fail" in error.first.message
        assert error.first.location.startswith("tests/worlds/test_harness.py:") and "in mismatch" in error.first.stack
    assert len(str(error)) < 500


def test_a_hang_in_a_collective_shows_stacks_and_places() -> None:
    def wait_forever_on_rank_0() -> None:
        ranks.set_status(f"step {rank_number()}: backward")
        dist.all_reduce(torch.zeros(3)) if rank_number() == 0 else time.sleep(60)

    with World(2) as world:
        world.run(rank_number)  # imports this module there, which takes its time on a busy machine
        start = time.monotonic()
        error = fails(world, wait_forever_on_rank_0, timeout=1)
    assert 1 < time.monotonic() - start < 50, "the ranks are not waited for"
    assert isinstance(error, HangError) and error.exit_code == 4
    assert "ranks 0 and 1 did not finish within 1 s: rank 0 waits in all_reduce at " in str(error)
    waiting, sleeping = sorted(error.failures, key=lambda failure: failure.rank)
    assert waiting.kind == sleeping.kind == "stuck"
    assert waiting.collective.startswith("all_reduce at ") and "test_harness.py:" in waiting.collective
    assert waiting.place == "step 0: backward" and sleeping.place == "step 1: backward"
    assert waiting.stack.splitlines()[-1].endswith("in wait_forever_on_rank_0")
    assert "wait_forever_on_rank_0" in sleeping.stack and not sleeping.collective


@pytest.mark.slow
def test_ranks_that_say_where_they_are_have_as_long_for_each_part_of_their_work() -> None:
    def work(sleeper: int) -> int:
        for part in range(5):
            ranks.set_status(f"part {part}")
            time.sleep(0.5)
        if rank_number() == sleeper:
            time.sleep(60)
        return 5

    with World(2, timeout=2) as world:
        world.run(rank_number, timeout=30)
        assert world.run(work, -1) == [5, 5], "after more than the timeout"
        assert "rank 1 made no progress for 2 s" in str(fails(world, work, 1))


def test_a_watch_ends_a_run() -> None:
    seen: list[tuple[frozenset[int], frozenset[int]]] = []

    def watch(world: World, finished: frozenset[int], running: frozenset[int]) -> str | None:
        seen.append((finished, running))
        return "rank 1 will never come" if finished else None

    with start_world(2, watch=watch) as world, pytest.raises(HangError, match=r"^rank 1 will never come"):
        world.run_each(time.sleep, [(0,), (60,)])
    assert seen[-1] == (frozenset({0}), frozenset({1}))


# --- A rank that never comes ---------------------------------------------------------------------------------------


def side_by_side(fn: Callable[[str], None], ways: list[str], world_size: int = 2) -> dict[str, BaseException | None]:
    """What comes of `fn(way)`, each in a world of its own, all at the same time."""
    with ExitStack() as stack:
        pending = {way: stack.enter_context(World(world_size, timeout=100)).start(fn, way) for way in ways}
        while not all(run.done() for run in pending.values()):
            time.sleep(0.05)
        return {way: run._error for way, run in pending.items()}


SKIPPED: dict[str, Callable[[Any, Any], Any]] = {
    "all_reduce": lambda dist, output: dist.all_reduce(output.detach()),
    "recv": lambda dist, output: dist.recv(output.detach(), src=1),
    "new_group": lambda dist, output: dist.new_group(),
    "backward": lambda dist, output: output.sum().backward(),
}


def skip_on_rank_1(collective: str) -> None:
    module = torch.nn.Linear(2, 2)
    if collective == "backward":
        module = torch.nn.parallel.DistributedDataParallel(module)
    if dist.get_rank() == 0:
        SKIPPED[collective](dist, module(torch.ones(1, 2)))


@pytest.mark.slow
@on_linux
def test_a_collective_that_a_finished_rank_has_skipped_ends_the_run_at_once() -> None:
    for way, error in side_by_side(skip_on_rank_1, list(SKIPPED)).items():
        assert isinstance(error, HangError), way
        assert str(error).startswith(
            "rank 0 waits in a collective, and rank 1 has finished without it, or joined it with a different shape: "
            "rank 0 "
        )
        assert {failure.kind for failure in error.failures} == {"stuck"} and list(error.results) == [1]


class SlowToSend:
    def __reduce__(self) -> Any:
        time.sleep(5)
        return str, ()


def take_time(way: str) -> None:
    rank = dist.get_rank()
    if way == "rank that others wait for":
        group = dist.new_group([0, 2])
        if rank == 2:
            time.sleep(5)
        if rank != 1:
            dist.barrier(group)
    elif way == "timers that free both":
        threading.Timer(5, dist.send, (torch.ones(1), 1 - rank)).start()
        dist.recv(torch.zeros(1), 1 - rank)
    elif way == "thread of a finished rank":
        threading.Timer(5, all_reduced, (0.0,)).start() if rank == 1 else all_reduced(0.0)
    elif rank == 1:
        return
    elif way == "child":
        subprocess.run(["sleep", "5"], check=True)
    elif way == "compute":
        end = time.monotonic() + 5
        while time.monotonic() < end:
            torch.ones(64, 64) @ torch.ones(64, 64)
    elif way == "pickling in a collective":
        dist.all_gather_object([None] * 1, SlowToSend(), group=dist.new_group([0], use_local_synchronization=True))
    elif way == "hook in a backward pass":
        tensor = torch.ones(2, requires_grad=True)
        tensor.register_hook(lambda gradient: time.sleep(5))
        tensor.sum().backward()


TAKING_TIME = ["child", "compute", "pickling in a collective", "hook in a backward pass"]
TAKING_TIME += ["thread of a finished rank", "timers that free both"]


@pytest.mark.slow
@on_linux
@pytest.mark.parametrize(("ways", "world_size"), [(TAKING_TIME, 2), (["rank that others wait for"], 3)], ids=str)
def test_a_rank_that_takes_its_time_is_waited_for(ways: list[str], world_size: int) -> None:
    assert side_by_side(take_time, ways, world_size) == dict.fromkeys(ways)


def test_what_cannot_be_sent_is_named(world: World) -> None:
    def fail() -> None:
        error = ValueError("broken")
        vars(error)["lock"] = threading.Lock()
        raise error

    with pytest.raises(UsageError, match=r"Argument 1 of World.run, a lock, cannot be sent to the ranks"):
        world.run(lambda a, b: None, 1, threading.Lock())
    with pytest.raises(UsageError, match=r"Argument 'lock' of World.run"):
        world.run(lambda lock: None, lock=threading.Lock())
    assert world.run(rank_number) == [0, 1]
    assert "returned a lock that cannot be pickled" in str(fresh_failure(lambda: threading.Lock()))
    assert "ValueError: broken" in str(fresh_failure(fail, world_size=1))


def test_a_rank_that_dies_between_runs_is_noticed() -> None:
    def die_later() -> int:
        threading.Timer(0.5, os._exit, (7,)).start()
        return os.getpid()

    with World(1) as world:
        wait_for_end(world.run(die_later))
        assert "exit code 7" in str(fails(world, rank_number))


def test_a_start_that_takes_too_long_is_a_hang() -> None:
    """Of so many ranks that none is quick enough, however late it is looked at."""
    with World(8, startup_timeout=0.001) as world, pytest.raises(HangError, match=r"did not start within 0\.001 s"):
        world.run(rank_number)


@pytest.mark.parametrize(
    "arguments, message",
    [
        *(({"world_size": size}, "world_size") for size in (0, True, 100_000)),
        ({"backend": "carrier pigeon"}, "backend must be 'gloo' or 'nccl', got 'carrier pigeon'"),
        ({"backend": ["gloo"]}, "backend"),
        ({"backend": "nccl"}, "GPUs only"),
        *(({"timeout": seconds}, "timeout") for seconds in (0, float("nan"), "30")),
        ({"process_group": False}, "world_size=1"),
        ({"threads": 0}, "threads"),
        ({"env": {"A": 1}}, "env"),
        *(({"preload": names}, "preload must") for names in ("torch", ["a b"], [3])),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        World(**arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused_in_a_sentence() -> None:
    with World(2, device="cuda") as world, pytest.raises(UsageError, match="no GPU"):
        world.run(rank_number)


# --- What is left over ---------------------------------------------------------------------------------------------


def alive(pids: list[int]) -> list[int]:
    running = {each.pid for each in psutil.process_iter(["status"]) if each.info["status"] != psutil.STATUS_ZOMBIE}
    return [pid for pid in pids if pid in running]


def wait_for_end(pids: list[int], directory: str = "") -> None:
    """Wait until processes and folder are gone; processes that the tests start would live longer by themselves."""
    deadline = time.monotonic() + 30
    while alive(pids) or os.path.exists(directory):
        assert time.monotonic() < deadline, (alive(pids), os.path.exists(directory))
        time.sleep(0.02)


PARENT = """
    import multiprocessing, os, signal, sys, time
    from ddpcheck.harness import start_world

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs in the background
    from ddpcheck.worlds.starting import server_pids

    def linger():
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        return os.getpid(), child.pid

    if __name__ == "__main__":
        world = start_world(2, start_method=sys.argv[1], hash_seeds=True)
        pids = [pid for pair in world.run(linger) for pid in pair]
        print(*pids, *server_pids(), world.directory, flush=True)
        world.run(time.sleep, 600, timeout=600)
"""
ENDS = [("fork", signal.SIGKILL), ("fork", signal.SIGINT), ("fork", signal.SIGTERM), ("spawn", signal.SIGKILL)]


@pytest.mark.parametrize("end", share(ENDS, ENDS[:1]), ids=lambda end: f"{end[0]}-{end[1].name}")
def test_nothing_outlives_the_parent(tmp_path: Path, end: tuple[str, signal.Signals]) -> None:
    method, number = end
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), rank_setup.NO_PRELOAD: "1"}
    command = [sys.executable, str(script), method]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as parent:
        assert parent.stdout is not None
        *words, directory = parent.stdout.readline().split()
        pids = [int(word) for word in words]
        assert len(alive(pids)) == len(pids) and os.path.exists(directory)
        time.sleep(0.2)
        parent.send_signal(number)
        wait_for_end(pids, directory)
        parent.communicate(timeout=30)
    assert parent.returncode == -number


def test_loader_workers_do_not_survive_their_rank() -> None:
    def start_workers() -> list[int]:
        data = TensorDataset(torch.arange(8.0))
        loader = DataLoader(data, batch_size=2, num_workers=2, persistent_workers=True)
        ranks.state["iterator"] = iterator = iter(loader)
        next(iterator)
        return [child.pid for child in psutil.Process().children()]

    with World(2) as world:
        workers = [pid for pids in world.run(start_workers) for pid in pids]
        assert len(alive(workers)) == 4
    wait_for_end(workers)


# --- Seeds of hashes, and the servers that give them ----------------------------------------------------------------


@FORK_OR_SPAWN
def test_ranks_may_have_hash_seeds_of_their_own_as_under_a_launcher(
    method: Literal["fork", "spawn"], monkeypatch: pytest.MonkeyPatch
) -> None:
    def order() -> list[str]:
        return list({f"layer{number}" for number in range(20)})

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with start_world(4 if method == "fork" else 2, start_method=method, hash_seeds=True) as world:
        even, odd, *more = world.run(order)
        assert even != odd and more in ([even, odd], [])
        assert world.run(rank_number) == list(range(world.world_size))
    with World(2, start_method=method) as world:
        assert world.run(order) == [even, even]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_fork_server_that_was_killed_is_replaced(victim: int) -> None:
    with start_world(2, hash_seeds=True) as world:
        world.run(rank_number)
        servers = starting.server_pids()
        os.kill(servers[victim], signal.SIGKILL)
        assert "fork server has died" in str(fails(world, time.sleep, 30))
    with start_world(2, hash_seeds=True) as world:
        assert world.run(rank_number) == [0, 1]
    assert servers[victim] not in starting.server_pids() and servers[1 - victim] in starting.server_pids()
