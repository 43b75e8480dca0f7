"""What a fresh world costs: wall and CPU time per test, children included, beside what people use today.

    python benchmarks/worlds.py [--quick]

Every row does the same work: W processes, a gloo group, one all_reduce, and an orderly end. The floor forks from
this very process, which has imported torch and nothing else, and checks nothing. Figures are medians; the ratios
are what to compare, for they hold on other machines.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # before torch: a process with threads must not fork
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ddpcheck.harness import World  # noqa: E402  # after the path
from ddpcheck.worlds.processes import server_pids  # noqa: E402

TICK = os.sysconf("SC_CLK_TCK")


def work() -> float:
    import torch
    import torch.distributed as dist

    tensor = torch.ones(8)
    dist.all_reduce(tensor)
    return float(tensor[0])


def join(rank: int, world_size: int, directory: str) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = FileStore(os.path.join(directory, "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def spawned(rank: int, world_size: int, directory: str) -> None:
    import torch.distributed as dist

    join(rank, world_size, directory)
    assert work() == world_size
    dist.destroy_process_group()


def with_world(world_size: int) -> None:
    with World(world_size) as world:
        assert world.run(work) == [world_size] * world_size


def with_spawn(world_size: int) -> None:
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as directory:
        spawn(spawned, (world_size, directory), nprocs=world_size)


def with_bare_fork(world_size: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        pids = []
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                join(rank, world_size, directory)
                work()
                os._exit(0)
            pids.append(pid)
        for pid in pids:
            assert os.waitpid(pid, 0)[1] == 0


def cpu() -> float:
    """CPU seconds of this process, the fork servers, and the children of all."""
    own = os.times()
    total = own.user + own.system + own.children_user + own.children_system
    for server in server_pids():
        children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
        for pid in (server, *children):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / TICK  # its own and that of its ended children
    return total


def measure(run: Callable[[int], object], world_size: int, times: int, batch: int) -> tuple[float, float]:
    """Return the median wall and the mean CPU milliseconds of one `run`; the kernel counts CPU in ticks of 10 ms."""
    run(world_size)
    walls = []
    start_cpu = cpu()
    for _ in range(times * batch):
        start = time.perf_counter()
        run(world_size)
        walls.append(time.perf_counter() - start)
    return statistics.median(walls) * 1e3, (cpu() - start_cpu) / (times * batch) * 1e3


def measure_open_world(world_size: int, times: int) -> tuple[float, float]:
    with World(world_size) as world:
        return measure(lambda _: world.run(work), world_size, times, 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    quick = parser.parse_args().quick
    start = time.perf_counter()
    with_world(2)
    first = time.perf_counter() - start
    start = time.perf_counter()
    import torch  # noqa: F401  # for the floor, and as a measure of the first world

    imported = time.perf_counter() - start
    rows = []
    for world_size in (2, 4):
        floor = measure(with_bare_fork, world_size, 5 if quick else 20, 4)
        rows.append(("bare os.fork, nothing checked", world_size, *floor))
        rows.append(("ddpcheck World, fresh", world_size, *measure(with_world, world_size, 5 if quick else 20, 4)))
        rows.append(("ddpcheck World, one more run", world_size, *measure_open_world(world_size, 5 if quick else 20)))
        rows.append(("torch.multiprocessing.spawn", world_size, *measure(with_spawn, world_size, 1 if quick else 5, 1)))
    print(f"{'one test':32}{'ranks':>6}{'wall ms':>10}{'CPU ms':>10}{'wall x floor':>14}{'CPU x floor':>13}")
    base = {world_size: (wall, spent) for name, world_size, wall, spent in rows if name.startswith("bare")}
    for name, world_size, wall, spent in rows:
        ratios = wall / base[world_size][0], spent / base[world_size][1]
        print(f"{name:32}{world_size:6}{wall:10.1f}{spent:10.1f}{ratios[0]:14.2f}{ratios[1]:13.2f}")
    print(
        f"first world of a session: {first:.2f} s, {first / imported:.2f} times an import of torch ({imported:.2f} s)"
    )


if __name__ == "__main__":
    main()
