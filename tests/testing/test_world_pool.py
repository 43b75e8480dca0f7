"""Worlds for a test run: prepared ahead without anyone noticing, used again where that is wished, ended in passing."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from ddpcheck.findings.errors import DDPCheckError, RankError, UsageError
from ddpcheck.harness import World
from ddpcheck.testing.world_pool import WorldPool
from ddpcheck.worlds import rank as ranks
from ddpcheck.worlds import starting


@pytest.fixture
def pool() -> Iterator[WorldPool]:
    pool = WorldPool()
    try:
        yield pool
    finally:
        pool.close()


def pids(world: World) -> list[int]:
    return world.run(os.getpid)


def summed() -> float:
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(tensor)
    return float(tensor.item())


def prepare(pool: WorldPool, ready: bool = False, **options: Any) -> World:
    """The spare that follows on a lease of one rank."""
    pool.release(pool.acquire(world_size=1, following=options))
    spare = spare_of(pool)
    assert spare is not None and (not ready or spare.wait_ready(60))
    return spare


def spare_of(pool: WorldPool) -> World | None:
    return next((worlds[0] for (owner, _), worlds in pool._idle.items() if owner is None and worlds), None)


def use(pool: WorldPool, **options: Any) -> list[int]:
    world = pool.acquire(**options)
    try:
        return pids(world)
    finally:
        pool.release(world)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- Fresh ranks ---------------------------------------------------------------------------------------------------


def test_the_next_world_is_there_before_it_is_asked_for(pool: WorldPool) -> None:
    first = pool.acquire(world_size=2, following={"world_size": 2})
    prepared, used = spare_of(pool), pids(first)
    pool.release(first)
    second = pool.acquire(world_size=2)
    assert second is prepared and not set(pids(second)) & set(used)
    assert second.run(summed) == [3.0, 3.0]


def surroundings() -> list[Any]:
    names = ("PYTEST_CURRENT_TEST", "NEW", "OLD", "OWN", "RANK")
    return [[os.environ.get(name) for name in names], os.getcwd(), sys.path[0], sys.argv[1:]]


def test_a_world_that_was_prepared_has_the_surroundings_of_its_lease(
    pool: WorldPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLD", "at first")
    prepared = prepare(pool, ready=True, world_size=2, env={"OWN": "at first"})
    monkeypatch.delenv("OLD")
    monkeypatch.setenv("NEW", "later")
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "the next one")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "argv", ["program", "--later"])
    world = pool.acquire(world_size=2, timeout=7.0, env={"OWN": "later"})
    assert world is prepared and world.timeout == 7.0
    for rank, seen in enumerate(world.run(surroundings)):
        environment = ["the next one", "later", None, "later", str(rank)]
        assert seen == [environment, str(tmp_path), str(tmp_path / "modules"), ["--later"]]


@pytest.mark.parametrize(
    ("name", "value", "in_environment"),
    [("GLOO_SOCKET_IFNAME", "lo", True), ("OMP_NUM_THREADS", "1", False)],
)
def test_a_variable_that_matters_at_the_start_wants_ranks_that_started_with_it(
    pool: WorldPool, monkeypatch: pytest.MonkeyPatch, name: str, value: str, in_environment: bool
) -> None:
    monkeypatch.delenv(name, raising=False)
    prepared = prepare(pool, world_size=1)
    if in_environment:
        monkeypatch.setenv(name, value)
    world = pool.acquire(world_size=1, env=None if in_environment else {name: value})
    assert world is not prepared
    assert world.run(os.getenv, name) == [value]


@pytest.mark.parametrize("options", [{"world_size": 3}, {"preload": ["json"]}, {"hash_seeds": True}], ids=str)
def test_a_world_of_another_kind_is_not_what_was_prepared(pool: WorldPool, options: dict[str, Any]) -> None:
    prepared = prepare(pool, world_size=2)
    world = pool.acquire(**{"world_size": 2, **options})
    assert world is not prepared
    assert len(pids(world)) == world.world_size


def test_a_prepared_world_whose_rank_has_died_is_not_handed_out(pool: WorldPool) -> None:
    prepared = prepare(pool, ready=True, world_size=2)
    victim = prepared._processes.ranks[1].pid
    assert victim is not None
    os.kill(victim, 9)
    wait_until(lambda: not prepared.usable)
    assert pool.acquire(world_size=2).run(summed) == [3.0, 3.0]


def test_a_spare_is_of_the_next_lease_alone(pool: WorldPool) -> None:
    prepared = prepare(pool, world_size=2)
    assert prepare(pool, world_size=2) is prepared, "it is still what is needed"
    assert prepare(pool, world_size=3).world_size == 3
    pool.release(pool.acquire(world_size=1, following={"world_size": -1}))
    assert spare_of(pool) is None, "the test that asks for it is told"
    assert prepared.closed or prepared._processes.exit_requested


def test_options_that_make_no_sense_are_refused_as_by_a_world(pool: WorldPool) -> None:
    for options in ({"world_size": 0}, {"world_size": True}, {"backend": ["gloo"]}, {"preload": 3}, {"timeout": -1}):
        with pytest.raises((UsageError, TypeError)) as expected:
            World(**options)
        for more in ({}, {"owner": "owner"}):
            with pytest.raises(type(expected.value)) as caught:
                pool.acquire(**{"world_size": 1, **more, **options})
            assert str(caught.value) == str(expected.value)
    with pytest.raises(TypeError, match="ranks"):
        pool.acquire(ranks=2)


# --- Shared ranks --------------------------------------------------------------------------------------------------


def test_shared_ranks_are_the_same_with_another_process_group(pool: WorldPool) -> None:
    def seen() -> tuple[int, bool]:
        import torch.distributed as dist

        groups = ranks.state.setdefault("groups", [])
        is_new = all(group is not dist.group.WORLD for group in groups)
        groups.append(dist.group.WORLD)
        return os.getpid(), is_new

    results = []
    for _ in range(3):
        world = pool.acquire(owner="module", world_size=2)
        results.append(world.run(seen))
        assert world.run(summed) == [3.0, 3.0]
        pool.release(world)
    assert results[0] == results[1] == results[2]
    assert all(is_new for result in results for _, is_new in result)


def test_shared_ranks_are_those_of_an_owner_and_two_leases_at_a_time_are_two_worlds(pool: WorldPool) -> None:
    worlds = [pool.acquire(owner="a", world_size=1) for _ in range(2)]
    first, second = map(pids, worlds)
    assert first != second
    for world in reversed(worlds):
        pool.release(world)
    assert use(pool, owner="a", world_size=1, timeout=5.0) in (first, second)
    assert use(pool, owner="b", world_size=1) not in (first, second)
    assert use(pool, owner="a", world_size=1, threads=3) not in (first, second)
    pool.end("a")
    assert use(pool, owner="a", world_size=1) not in (first, second)


@pytest.mark.parametrize("how", ["failed", "broken", "closed", "busy"])
def test_ranks_after_a_failure_are_fresh_ones(pool: WorldPool, how: str) -> None:
    world = pool.acquire(owner="module", world_size=2)
    before = pids(world)
    if how == "failed":
        with pytest.raises(RankError):
            world.run(lambda: 1 / 0)
    elif how == "closed":
        world.close()
    elif how == "busy":
        world.start(time.sleep, 60)
    pool.release(world, broken=how == "broken")
    world = pool.acquire(owner="module", world_size=2)
    assert not set(pids(world)) & set(before)
    assert world.run(summed) == [3.0, 3.0]


def break_group(how: str) -> None:
    import torch
    import torch.distributed as dist

    if how in ("pending", "dropped") and dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        ranks.state["work"] = work if how == "pending" else None
    elif how == "subgroups":
        ranks.state[len(ranks.state)] = dist.new_group([0, 1])
        dist.new_group([1])
    elif how == "module":
        module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        module(torch.ones(1, 2)).sum().backward()
        sys.modules["__main__"].kept = module  # type: ignore[attr-defined]
    elif how == "uneven" and dist.get_rank() == 1:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["pending", "module"])
def test_what_a_lease_leaves_of_its_group_is_gone_in_the_next(pool: WorldPool, how: str) -> None:
    for _ in range(3):
        world = pool.acquire(owner="module", world_size=2)
        assert world.run(summed) == [3.0, 3.0]
        world.run(break_group, how)
        pool.release(world)


def test_what_ranks_printed_and_left_is_that_of_the_lease(pool: WorldPool) -> None:
    def speak(text: str) -> None:
        print(text)
        ranks.save_attachment(text.encode())

    world = pool.acquire(owner="module", world_size=1)
    world.run(speak, "first")
    pool.release(world)
    assert (world.output(0), world.attachment(0)) == ("first\n", b"first")  # until the next lease
    world = pool.acquire(owner="module", world_size=1)
    assert (world.output(0), world.attachment(0)) == ("", b"")
    world.run(speak, "second")
    assert (world.output(0), world.attachment(0)) == ("second\n", b"second")


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
    processes = [psutil.Process(rank.pid) for rank in world._processes.ranks]

    def measure() -> list[tuple[int, int, int]]:
        return [(process.num_fds(), process.num_threads(), process.memory_info().rss) for process in processes]

    before = measure()
    assert cycle(32) is world
    for (files, threads, memory), (more_files, more_threads, more_memory) in zip(before, measure(), strict=True):
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
    servers = [len(os.listdir(f"/proc/{server}/fd")) for server in starting.server_pids()]
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
    # The server closes its ends once it has seen that ours are closed.
    wait_until(lambda: [len(os.listdir(f"/proc/{server}/fd")) for server in starting.server_pids()] == servers)
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
    wait_until(lambda: world.has_exited)
    assert not psutil.pid_exists(pid)
    pool.release(pool.acquire(world_size=1))
    assert world.closed and not world.directory.exists()
