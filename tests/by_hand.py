"""What scripts do themselves beside DDP: healthy loops that look like faults, and faults that they are the twins of.

ddpcheck run --standalone --nproc-per-node 2 tests/by_hand.py [healthy|faulty|NAME ...]

One after the other in one script: `ddpcheck run` finds nothing in the healthy ones, and of each of the others what
stands beside it.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
GENERATOR = torch.Generator().manual_seed(RANK)


def batch() -> tuple[Tensor, Tensor]:
    """Of this rank."""
    x = torch.randn(4, 8, generator=GENERATOR)
    return x, x.sum(1, keepdim=True)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def average(parameters: "list[nn.Parameter]") -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= WORLD


def train_some(model: nn.Module, parameters: "list[nn.Parameter]", *, averages: bool) -> None:
    """Train what DDP does not average: what has come after wrapping, or all under `no_sync`."""
    optimizer = torch.optim.SGD(parameters, 0.05)
    for _ in range(12):
        x, y = batch()
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        if averages:
            average(parameters)
        optimizer.step()


def an_adapter_that_is_added(*, averages: bool) -> None:
    body = net()
    model = DistributedDataParallel(body)
    body.requires_grad_(False)
    body.append(nn.Linear(1, 1))
    train_some(model, list(body[3].parameters()), averages=averages)


def a_layer_that_is_unfrozen(*, averages: bool) -> None:
    body = net()
    body[2].requires_grad_(False)
    model = DistributedDataParallel(body)
    body[0].requires_grad_(False)
    body[2].requires_grad_(True)
    train_some(model, list(body[2].parameters()), averages=averages)


def all_forwards_under_no_sync(*, averages: bool) -> None:
    """DDP averages nothing, and the script does or nobody does."""
    model = DistributedDataParallel(net())
    with model.no_sync():
        train_some(model, list(model.parameters()), averages=averages)


def files_of_all_ranks(*, empty: bool) -> None:
    """Every rank opens the same file to write it."""
    folder = Path(tempfile.gettempdir()) / f"by_hand_{os.environ['TORCHELASTIC_RUN_ID']}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as file:
        file.write("" if empty else "of all ranks")
    dist.barrier()
    if RANK == 0:
        shutil.rmtree(folder)


def running_totals(*, again: bool) -> None:
    """A sum over batches, and counts; some are reduced after each batch."""
    total, mean, last = torch.zeros(2), torch.zeros(1), torch.zeros(1)
    for number in range(8):
        own = torch.tensor([1.0 + 0.1 * number + RANK, 4.0])
        if again:
            total += own
            dist.all_reduce(total)
        else:
            dist.all_reduce(own)
            total += own
        mean += own[0]
        dist.all_reduce(mean)  # a mean over ranks and batches
        mean /= WORLD
        last.fill_(number * float(own[0]))
        dist.all_reduce(last)
        dist.all_reduce(torch.tensor(2.0**number))
    print(float(total[0]), float(mean), float(last))


HEALTHY: dict[str, Callable[[], None]] = {
    "adapter": lambda: an_adapter_that_is_added(averages=True),
    "unfrozen": lambda: a_layer_that_is_unfrozen(averages=True),
    "no_sync": lambda: all_forwards_under_no_sync(averages=True),
    "touched": lambda: files_of_all_ranks(empty=True),
    "totals": lambda: running_totals(again=False),
}
FAULTY: dict[str, Callable[[], None]] = {
    "local_adapter": lambda: an_adapter_that_is_added(averages=False),
    "local_unfrozen": lambda: a_layer_that_is_unfrozen(averages=False),
    "local": lambda: all_forwards_under_no_sync(averages=False),
    "written": lambda: files_of_all_ranks(empty=False),
    "again": lambda: running_totals(again=True),
}

if __name__ == "__main__":
    named = {"healthy": [*HEALTHY], "faulty": [*FAULTY]}
    for word in sys.argv[1:]:
        for name in named.get(word, [word]):
            (HEALTHY | FAULTY)[name]()
    dist.destroy_process_group()
