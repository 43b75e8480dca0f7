"""Worlds for a test run: prepared ahead without anyone noticing, used again where that is wished, ended in passing."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from ddpcheck.findings.errors import DDPCheckError, RankError, UsageError
from ddpcheck.harness import World
from ddpcheck.testing.world_pool import WorldPool
from ddpcheck.worlds.starting import server_pids
from tests.tiers import share


@pytest.fixture
def pool() -> Iterator[WorldPool]:
    one = WorldPool()
    try:
        yield one
    finally:
        one.close()


def pids(world: World) -> list[int]:
    return world.run(os.getpid)


def summed() -> float:
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(tensor)
    return float(tensor.item())


def variable(name: str) -> str | None:
    return os.environ.get(name)


def spare(pool: WorldPool) -> World | None:
    return next((worlds[0] for (owner, _), worlds in pool._idle.items() if owner is None and worlds), None)


def use(pool: WorldPool, **options: Any) -> list[int]:
    world = pool.acquire(**options)
    try:
        return pids(world)
    finally:
        pool.release(world)


# --- Fresh ranks ---------------------------------------------------------------------------------------------------


def test_the_next_world_is_there_before_it_is_asked_for(pool: WorldPool) -> None:
    first = pool.acquire(world_size=2, following={"world_size": 2})
    prepared = spare(pool)
    assert prepared is not None and prepared.wait_ready(60)
    used = pids(first)
    pool.release(first)
    second = pool.acquire(world_size=2)
    assert second is prepared
    assert not set(pids(second)) & set(used)
    assert second.run(summed) == [3.0, 3.0]


def test_no_state_travels_from_lease_to_lease(pool: WorldPool) -> None:
    def remember() -> bool:
        import builtins

        seen = hasattr(builtins, "ddpcheck_was_here")
        builtins.ddpcheck_was_here = True  # type: ignore[attr-defined]
        return seen

    for _ in range(4):
        world = pool.acquire(world_size=1, following={"world_size": 1})
        assert world.run(remember) == [False]
        pool.release(world)


def surroundings() -> dict[str, Any]:
    return {
        "environment": {name: os.environ.get(name) for name in ("PYTEST_CURRENT_TEST", "NEW", "OLD", "OWN", "RANK")},
        "cwd": os.getcwd(),
        "path": sys.path[0],
        "argv": sys.argv[1:],
    }


def test_a_world_that_was_prepared_has_the_surroundings_of_its_lease(
    pool: WorldPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLD", "at first")
    pool.release(pool.acquire(world_size=2, following={"world_size": 2, "env": {"OWN": "at first"}}))
    prepared = spare(pool)
    assert prepared is not None and prepared.wait_ready(60)
    monkeypatch.delenv("OLD")
    monkeypatch.setenv("NEW", "later")
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "the next one")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "argv", ["program", "--later"])
    world = pool.acquire(world_size=2, timeout=7.0, env={"OWN": "later"})
    assert world is prepared and world.timeout == 7.0
    for rank, found in enumerate(world.run(surroundings)):
        environment = {"PYTEST_CURRENT_TEST": "the next one", "NEW": "later", "OLD": None, "OWN": "later"}
        assert found == {
            "environment": {**environment, "RANK": str(rank)},
            "cwd": str(tmp_path),
            "path": str(tmp_path / "modules"),
            "argv": ["--later"],
        }


@pytest.mark.parametrize("name", ["GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "TORCH_SHOW_CPP_STACKTRACES", "PYTHONUTF8"])
@pytest.mark.parametrize("how", ["environment", "env"])
def test_a_variable_that_matters_at_the_start_wants_ranks_that_started_with_it(
    pool: WorldPool, monkeypatch: pytest.MonkeyPatch, name: str, how: str
) -> None:
    value = "lo" if name == "GLOO_SOCKET_IFNAME" else "1"
    monkeypatch.delenv(name, raising=False)
    pool.release(pool.acquire(world_size=1, following={"world_size": 1}))
    prepared = spare(pool)
    if how == "environment":
        monkeypatch.setenv(name, value)
    world = pool.acquire(world_size=1, env={name: value} if how == "env" else None)
    assert world is not prepared
    assert world.run(variable, name) == [value]


@pytest.mark.parametrize(
    "options",
    [
        {"world_size": 3},
        {"threads": 3},
        {"preload": ["json"]},
        {"hash_seeds": True},
        pytest.param({"start_method": "spawn"}, marks=pytest.mark.slow),
    ],
)
def test_a_world_of_another_kind_is_not_what_was_prepared(pool: WorldPool, options: dict[str, Any]) -> None:
    pool.release(pool.acquire(world_size=2, following={"world_size": 2}))
    prepared = spare(pool)
    other = pool.acquire(**{"world_size": 2, **options})
    assert other is not prepared
    assert len(pids(other)) == other.world_size


def test_a_prepared_world_whose_rank_has_died_is_not_handed_out(pool: WorldPool) -> None:
    pool.release(pool.acquire(world_size=2, following={"world_size": 2}))
    prepared = spare(pool)
    assert prepared is not None and prepared.wait_ready(60)
    victim = prepared._processes.ranks[1].pid
    assert victim is not None
    os.kill(victim, 9)
    psutil.wait_procs([psutil.Process(victim)] if psutil.pid_exists(victim) else [], timeout=30)
    deadline = time.monotonic() + 30
    while prepared.usable and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pool.acquire(world_size=2).run(summed) == [3.0, 3.0]


def test_a_spare_is_of_the_next_lease_alone(pool: WorldPool) -> None:
    pool.release(pool.acquire(world_size=1, following={"world_size": 2}))
    prepared = spare(pool)
    assert prepared is not None
    pool.release(pool.acquire(world_size=1, following={"world_size": 2}))
    assert spare(pool) is prepared, "it is still what is needed"
    pool.release(pool.acquire(world_size=1, following={"world_size": 3}))
    assert (other := spare(pool)) is not None and other.world_size == 3
    pool.release(pool.acquire(world_size=1, following={"world_size": -1}))
    assert spare(pool) is None, "the test that asks for it is told"
    assert prepared.closed or prepared._processes.exit_requested


def test_options_that_make_no_sense_are_refused_as_by_a_world(pool: WorldPool) -> None:
    for options in ({"world_size": 0}, {"backend": ["gloo"]}, {"env": {"A": 1}}, {"preload": 3}, {"world_size": "2"}):
        with pytest.raises((UsageError, TypeError)) as expected:
            World(**options)
        for lease in (pool.acquire, lambda **options: pool.acquire(owner="owner", **options)):
            with pytest.raises(type(expected.value)) as caught:
                lease(**options)
            assert str(caught.value) == str(expected.value)
    with pytest.raises(TypeError, match="ranks"):
        pool.acquire(ranks=2)
    pool.release(pool.acquire(world_size=1))
    with pytest.raises(UsageError, match="world_size"):
        pool.acquire(world_size=True)
    with pytest.raises(UsageError, match="timeout"):
        pool.acquire(world_size=1, timeout=-1)


# --- Shared ranks --------------------------------------------------------------------------------------------------


def test_shared_ranks_are_the_same_with_another_process_group(pool: WorldPool) -> None:
    def seen(key: str) -> tuple[int, str | None]:
        import torch.distributed as dist

        from ddpcheck.worlds import rank

        group, known = dist.group.WORLD, rank.state.get("group")
        rank.state["group"] = group
        globals().setdefault("ddpcheck_groups", []).append(group)
        return os.getpid(), None if known is None else "known"

    found = []
    for _ in range(3):
        world = pool.acquire(owner="module", world_size=2)
        found.append(world.run(seen, "x"))
        assert world.run(summed) == [3.0, 3.0]
        pool.release(world)
    assert found[0] == found[1] == found[2]
    assert all(known is None for each in found for _, known in each)


def test_shared_ranks_are_another_owners_own(pool: WorldPool) -> None:
    def of(owner: str, **options: Any) -> list[int]:
        world = pool.acquire(owner=owner, world_size=1, **options)
        try:
            return pids(world)
        finally:
            pool.release(world)

    a = of("a")
    assert of("b") != a and of("a", threads=3) != a and of("a", timeout=5.0) == a
    pool.end("a")
    assert of("a") != a


def test_two_leases_at_a_time_are_two_worlds(pool: WorldPool) -> None:
    one, two = (pool.acquire(owner="module", world_size=1) for _ in range(2))
    both = [pids(one), pids(two)]
    assert both[0] != both[1]
    pool.release(one)
    pool.release(two)
    assert pids(pool.acquire(owner="module", world_size=1)) in both


@pytest.mark.parametrize("how", ["failed", "broken", "closed", "ended", "busy"])
def test_ranks_after_a_failure_are_fresh_ones(pool: WorldPool, how: str) -> None:
    world = pool.acquire(owner="module", world_size=2)
    before = pids(world)
    if how == "failed":
        with pytest.raises(RankError):
            world.run(lambda: 1 / 0)
    elif how == "closed":
        world.close()
    elif how == "ended":
        pool.end("module")
    elif how == "busy":
        world.start(time.sleep, 60)
    pool.release(world, broken=how == "broken")
    world = pool.acquire(owner="module", world_size=2)
    assert not set(pids(world)) & set(before)
    assert world.run(summed) == [3.0, 3.0]


def break_group(how: str) -> None:
    import torch
    import torch.distributed as dist

    from ddpcheck.worlds import rank

    if how == "pending" and dist.get_rank() == 0:
        rank.state["work"] = dist.all_reduce(torch.ones(3), async_op=True)
    elif how == "dropped" and dist.get_rank() == 0:
        dist.all_reduce(torch.ones(3), async_op=True)
    elif how == "subgroups":
        for _ in range(3):
            rank.state[len(rank.state)] = dist.new_group([0, 1])
        dist.new_group([1])
    elif how == "module":
        module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        module(torch.ones(1, 2)).sum().backward()
        sys.modules["__main__"].kept = module  # type: ignore[attr-defined]
    elif how == "destroyed":
        dist.destroy_process_group()
    elif how == "uneven":
        if dist.get_rank() == 1:
            dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["pending", "dropped", "subgroups", "module", "destroyed", "uneven"])
def test_what_a_lease_leaves_of_its_group_is_gone_in_the_next(pool: WorldPool, how: str) -> None:
    for _ in range(3):
        world = pool.acquire(owner="module", world_size=2)
        assert world.run(summed) == [3.0, 3.0]
        world.run(break_group, how)
        pool.release(world)
    world = pool.acquire(owner="module", world_size=2)
    assert world.run(summed) == [3.0, 3.0]


def test_what_ranks_printed_and_left_is_that_of_the_lease(pool: WorldPool) -> None:
    def speak(text: str) -> None:
        from ddpcheck.worlds import rank

        print(text)
        rank.save_attachment(text.encode())

    world = pool.acquire(owner="module", world_size=1)
    world.run(speak, "first")
    pool.release(world)
    assert (world.output(0), world.attachment(0)) == ("first\n", b"first")  # until the next lease
    world = pool.acquire(owner="module", world_size=1)
    assert (world.output(0), world.attachment(0)) == ("", b"")
    world.run(speak, "second")
    assert (world.output(0), world.attachment(0)) == ("second\n", b"second")


def held(pid: int) -> tuple[int, int, int]:
    """Descriptors, threads and resident bytes of a process."""
    process = psutil.Process(pid)
    return process.num_fds(), process.num_threads(), process.memory_info().rss


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
def test_nothing_accumulates_over_renewals(pool: WorldPool) -> None:
    def cycle(count: int) -> World:
        for number in range(count):
            world = pool.acquire(owner="module", world_size=2)
            assert world.run(summed) == [3.0, 3.0]
            world.run(break_group, ["", "dropped", "subgroups", "uneven"][number % 4])
            pool.release(world)
        assert world.wait_ready(30)
        return world

    world = cycle(8)
    ranks = [rank.pid for rank in world._processes.ranks if rank.pid is not None]
    before = [held(pid) for pid in ranks]
    assert cycle(32) is world
    after = [held(pid) for pid in ranks]
    for (files, threads, memory), (more_files, more_threads, more_memory) in zip(before, after, strict=True):
        assert more_files <= files + 8 and more_threads <= threads + 4
        assert more_memory - memory < 4e6
    assert len([name for name in os.listdir(world.directory) if name.startswith("store")]) <= 3


# --- The end -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_everything_is_gone_after_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with World(1) as world:  # starts the fork server
        pids(world)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    servers = [len(os.listdir(f"/proc/{server}/fd")) for server in server_pids()]
    pool = WorldPool()
    seen = [use(pool, world_size=size, following={"world_size": 3 - size}) for size in (1, 2, 1, 2, 2, 2)]
    shared = pool.acquire(owner="module", world_size=2)
    seen.append(pids(shared))
    pool.release(shared)
    seen.append(pids(pool.acquire(owner="module", world_size=2)))
    seen.append(pids(pool.acquire(world_size=2)))
    pool.close()
    assert not [pid for each in seen for pid in each if psutil.pid_exists(pid)]
    assert os.listdir(tmp_path) == []
    deadline = time.monotonic() + 30  # the server closes its ends once it has seen that ours are closed
    while [len(os.listdir(f"/proc/{server}/fd")) for server in server_pids()] != servers:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert use(pool, world_size=1)  # and it can go on
    pool.close()


def test_giving_back_does_not_wait_and_the_ranks_end_all_the_same(pool: WorldPool) -> None:
    world = pool.acquire(world_size=1)
    (pid,) = pids(world)
    pool.release(world)
    assert not world.closed
    with pytest.raises(DDPCheckError, match="closed"):
        pids(world)
    deadline = time.monotonic() + 30
    while not world.gone and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not psutil.pid_exists(pid)
    pool.release(pool.acquire(world_size=1))
    assert world.closed and not world.directory.exists()


@pytest.mark.slow
@pytest.mark.parametrize("seconds", share([0.0, 0.5], [0.5]))
def test_nothing_is_left_when_the_process_is_killed(tmp_path: Path, seconds: float) -> None:
    script = (
        "import os, sys, time\nfrom ddpcheck.testing.world_pool import WorldPool\n"
        "from ddpcheck.worlds.starting import server_pids\n"
        "pool = WorldPool()\nworld = pool.acquire(world_size=2, following={'world_size': 2})\n"
        "pids = world.run(os.getpid)\npool.release(world)\n"
        f"print(*pids, *server_pids(), flush=True)\ntime.sleep({seconds})\nos.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True, timeout=300
    )
    left = [int(word) for word in done.stdout.split()]
    assert len(left) == 3
    deadline = time.monotonic() + 30
    while (any(map(psutil.pid_exists, left)) or os.listdir(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, left)) and os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_fork_of_the_process_has_worlds_of_its_own(pool: WorldPool) -> None:
    world = pool.acquire(owner="module", world_size=1)
    mine = pids(world)
    pool.release(world)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if pids(pool.acquire(owner="module", world_size=1)) != mine else 2
        finally:
            from ddpcheck.worlds import starting as processes

            processes.shut_down()
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert pids(pool.acquire(owner="module", world_size=1)) == mine
