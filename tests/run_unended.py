"""A healthy script that does not end: rank 0 meets, each time, the deadlock of torch that others meet now and then.

The last reference to the process group is the reducer's. It is freed while Python has the GIL, and joins a thread of
gloo's that waits for the GIL, to free its last work. So that the thread does so in time, rank 0 keeps the GIL until
rank 1 has joined the last collective.
"""

from __future__ import annotations

import ctypes
import functools
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class Trigger:
    """Something with a weak reference."""


def main() -> None:
    store, rank, world_size = next(iter(dist.rendezvous("env://")))

    def join(name: str) -> None:  # in a part of the store of its own: torch would find the addresses of the first group
        dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=world_size)

    join("first")
    nn.parallel.DistributedDataParallel(nn.Linear(4, 1))  # torch never frees the group of the first one
    dist.destroy_process_group()
    join("second")
    torch.manual_seed(rank)
    net: Any = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(12):
        optimizer.zero_grad()
        net(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
    if rank == 1:
        time.sleep(1.0)
    dist.all_reduce(torch.ones(1), async_op=rank == 0)
    dist.destroy_process_group()
    if rank == 0:
        sleep: Any = ctypes.PyDLL(None).usleep  # without giving the GIL up
        sleep.argtypes = [ctypes.c_uint, ctypes.py_object]
        trigger = Trigger()
        kept = weakref.ref(trigger, functools.partial(sleep, 2_000_000))
        reducer = vars(net).pop("reducer")
        del vars(net)["logger"], vars(net)["process_group"]
        freed = [reducer, trigger]  # the last one first, with no Python code between the two
        del reducer, trigger
        print("last line", flush=True)
        del freed
        print(f"it has ended, {kept}", flush=True)


main()
