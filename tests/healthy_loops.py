"""Healthy loops that look like faults, one after the other in one script: `ddpcheck run` finds nothing in them.

ddpcheck run --standalone --nproc-per-node 2 tests/healthy_loops.py [NAME ...]
"""

import copy
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook, fp16_compress_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, SubsetRandomSampler, TensorDataset

dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()


def samples(count: int = 128) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 16, generator=torch.Generator().manual_seed(count))
    return x, x[:, :4].argmax(1)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


def own_batches(steps: int, size: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    """Samples of this rank's own."""
    x, y = samples()
    own = torch.Generator().manual_seed(100 + RANK)
    for _ in range(steps):
        index = torch.randint(0, len(x), (size,), generator=own)
        yield x[index], y[index]


def sgd(model: nn.Module, **options: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def wrapped(model: nn.Module | None = None, **options: float) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    model = DistributedDataParallel(model or net())
    return model, sgd(model, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()


@torch.no_grad()
def average(tensors: Iterable[Tensor | None]) -> None:
    for tensor in tensors:
        assert tensor is not None
        dist.all_reduce(tensor)
        tensor /= WORLD


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def take(model: nn.Module, loss: Tensor) -> None:
    """Gradients from `torch.autograd.grad`, of this rank."""
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient


# Data


def slices_of_a_global_batch() -> None:
    model, optimizer = wrapped()
    loader = DataLoader(TensorDataset(*samples()), batch_size=32, shuffle=True, generator=torch.Generator())
    for x, y in loader:
        part = slice(RANK * len(x) // WORLD, (RANK + 1) * len(x) // WORLD)
        train(model, optimizer, x[part], y[part])


class Parts(Sampler[list[int]]):
    """Global batches from the global generator, of which each rank takes its part."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(12):
            yield torch.randint(0, 128, (8 * WORLD,))[RANK::WORLD].tolist()


def parts_of_a_global_draw() -> None:
    model, optimizer = wrapped()
    torch.manual_seed(7)
    for x, y in DataLoader(TensorDataset(*samples()), batch_sampler=Parts()):
        train(model, optimizer, x, y)


class Shard(Dataset[tuple[int, Tensor, Tensor]]):
    """A file of each rank's own, read one by one."""

    classes = ("cat", "dog", "cow", "hen")

    def __init__(self) -> None:
        self.names = list(self.classes)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        x = torch.randn(16, generator=torch.Generator().manual_seed(1000 * RANK + index))
        return index, x, x[:4].argmax()


def shards() -> None:
    model, optimizer = wrapped()
    for _ in range(2):
        loader = DataLoader(Shard(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3))
        for _, x, y in loader:
            train(model, optimizer, x, y)


def chunks() -> None:
    model, optimizer = wrapped()
    for chunk in range(3):
        data = TensorDataset(samples()[0] + chunk, samples()[1])
        sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
        sampler.set_epoch(0)
        for x, y in DataLoader(data, batch_size=16, sampler=sampler):
            train(model, optimizer, x, y)


def drawn_by_each_rank() -> None:
    """Random data of each rank's own below a sampler, which may split them: there are as many more as are wanted."""
    model, optimizer = wrapped()
    torch.manual_seed(RANK)
    x = torch.randn(64, 16)
    data = TensorDataset(x, x[:, :4].argmax(1))
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            train(model, optimizer, x, y)


def noise_for_all_ranks() -> None:
    model, optimizer = wrapped()
    data, shared = TensorDataset(*samples()), torch.Generator().manual_seed(5)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    for x, y in DataLoader(data, batch_size=8, sampler=sampler):
        noise = torch.randn(WORLD * len(x), 16, generator=shared)
        train(model, optimizer, x + 0.1 * noise[RANK::WORLD], y)


def resumed_where_it_stopped() -> None:
    model, optimizer = wrapped()
    data = TensorDataset(*samples())
    for first_epoch, first, last in ((0, 0, 4), (1, 4, 2), (0, 3, 8)):  # stopped, resumed, and from an older state
        sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
        for epoch in range(first_epoch, 2):
            sampler.set_epoch(epoch)
            for number, (x, y) in enumerate(DataLoader(data, batch_size=8, sampler=sampler)):
                if epoch == 1 and number >= last + first:
                    break
                if epoch > first_epoch or number >= first:
                    train(model, optimizer, x, y)


class Digits(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.x, self.y = samples()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def held_out_by_a_sampler() -> None:
    model, optimizer = wrapped()
    training = SubsetRandomSampler(list(range(96))[RANK::WORLD], generator=torch.Generator().manual_seed(RANK))
    loader = DataLoader(Digits(), batch_size=8, sampler=training)
    for _ in range(2):
        for x, y in loader:
            train(model, optimizer, x, y)


class Factors(nn.Module):
    """It holds the ratings of its rank; forward takes the numbers of their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = samples()[0][RANK::WORLD]
        self.linear = nn.Linear(15, 1)

    def forward(self, index: Tensor) -> Tensor:
        rows = self.rows[index]
        return mse_loss(self.linear(rows[:, 1:]).squeeze(1), rows[:, 0])


def rows_by_number() -> None:
    torch.manual_seed(0)
    model, optimizer = wrapped(Factors())
    for index in torch.randperm(64).split(8):
        optimizer.zero_grad()
        model(index).backward()
        optimizer.step()


def a_ring_of_neighbours() -> None:
    peers = {"me": RANK, "other": (RANK + 1) % WORLD}
    order = {name: (number + RANK) % 4 for number, name in enumerate(["web", "code", "books", "maths"])}
    model, optimizer = wrapped()
    for step, (x, y) in enumerate(own_batches(6)):
        train(model, optimizer, x * (1 + order["web"] * step % 4), y)
        got = torch.zeros(1)
        work = dist.irecv(got, peers["other"])
        dist.send(torch.ones(1), peers["other"])
        assert work is not None
        work.wait()


# Gradients


def attacks() -> None:
    model, optimizer = wrapped()
    for x, y in own_batches(12):
        adversarial = x
        for _ in range(2):
            adversarial = adversarial.detach().requires_grad_(True)
            cross_entropy(model.module(adversarial), y).backward()
            assert adversarial.grad is not None
            adversarial = adversarial + 0.1 * adversarial.grad.sign()
            model.module.zero_grad()
        train(model, optimizer, adversarial.detach(), y)


def clipped_by_sample() -> None:
    model = net()
    parameters = list(model.parameters())
    optimizer = sgd(model)
    for x, y in own_batches(12, 3):
        totals = [torch.zeros_like(parameter) for parameter in parameters]
        for one, label in zip(x.split(1), y.split(1), strict=True):
            optimizer.zero_grad()
            cross_entropy(model(one), label).backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            for total, parameter in zip(totals, parameters, strict=True):
                assert parameter.grad is not None
                total += parameter.grad
        for total, parameter in zip(totals, parameters, strict=True):
            dist.all_reduce(total)
            parameter.grad = total / (3 * WORLD)
        optimizer.step()


def norms_before_averaging() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for x, y in own_batches(12):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        average(gradients(model))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


class Masters(torch.optim.Optimizer):
    """Steps on gradients that the loop has moved away from `.grad`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(list(model.parameters()), {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(0.1 * parameter.main_grad)


def moved_gradients() -> None:
    model = DistributedDataParallel(net())
    optimizer = Masters(model)
    for x, y in own_batches(12):
        cross_entropy(model(x), y).backward()
        for parameter in model.parameters():
            parameter.main_grad = parameter.grad  # type: ignore[attr-defined]
            parameter.grad = None
        optimizer.step()


def summed_by_a_hook() -> None:
    def summed(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0])

    model = DistributedDataParallel(net())
    model.register_comm_hook(None, summed)
    optimizer = sgd(model)
    for x, y in own_batches(12):
        number = torch.tensor(float(len(x) - RANK))
        dist.all_reduce(number)
        optimizer.zero_grad()
        used = slice(0, len(x) - RANK)
        (cross_entropy(model(x)[used], y[used], reduction="sum") / number).backward()
        optimizer.step()


def compressed_gradients() -> None:
    """Made up for in later steps; and to 16 bits, in which the gradient of a bias before a BatchNorm is nothing."""
    model, optimizer = wrapped()
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
    model.register_comm_hook(state, powerSGD_hook)
    for x, y in own_batches(24):
        train(model, optimizer, x, y)
    model, optimizer = wrapped(nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)))
    model.register_comm_hook(None, fp16_compress_hook)
    for x, y in own_batches(12):
        train(model, optimizer, x, y)


# Models of each rank's own, for a time


def local_steps() -> None:
    model = net()
    optimizer = sgd(model, momentum=0.9)
    batches = own_batches(24)
    for _ in range(4):
        for _ in range(6):
            train(model, optimizer, *next(batches))
        average(parameter.data for parameter in model.parameters())


def local_steps_by_a_hook() -> None:
    """As torch has them: the hook stops to average over all ranks, and the parameters are averaged after some steps."""
    model, optimizer = wrapped(momentum=0.9)
    own = dist.new_subgroups(group_size=1)[0]
    model.register_comm_hook(PostLocalSGDState(None, own, 6), fp16_compress_wrapper(post_localSGD_hook))
    averager = PeriodicModelAverager(period=4, warmup_steps=6)
    for x, y in own_batches(22):
        train(model, optimizer, x, y)
        averager.average_parameters(model.parameters())


def steps_of_taken_gradients() -> None:
    """Gradients from `torch.autograd.grad`, each rank's own; the parameters are averaged after some steps."""
    model, optimizer = wrapped()
    for number, (x, y) in enumerate(own_batches(20)):
        take(model, cross_entropy(model(x), y))
        optimizer.step()
        if number % 5 == 4:
            average(model.parameters())


def rounds_of_new_optimizers() -> None:
    model = net()
    for _ in range(3):
        optimizer = sgd(model)
        for x, y in own_batches(6):
            train(model, optimizer, x, y)
        average(parameter.data for parameter in model.parameters())


def inner_loops() -> None:
    model = net()
    outer = torch.optim.Adam(model.parameters(), lr=0.01)
    for x, y in own_batches(6):
        fast = copy.deepcopy(model)
        inner = sgd(fast)
        for _ in range(3):
            train(fast, inner, x, y)
        take(fast, cross_entropy(fast(x), y))
        for parameter, of_copy in zip(model.parameters(), fast.parameters(), strict=True):
            parameter.grad = of_copy.grad
        average(gradients(model))
        outer.step()


def inner_loops_beside_a_wrapper() -> None:
    model, optimizer = wrapped()
    for x, y in own_batches(18):
        copied = copy.deepcopy(model.module)
        inner = sgd(copied)
        train(copied, inner, x, y)
        named = dict(model.module.named_parameters())
        gradients = torch.autograd.grad(cross_entropy(model.module(x), y), list(named.values()))
        fast = {name: named[name] - 0.1 * g for name, g in zip(named, gradients, strict=True)}
        y = torch.func.functional_call(copied, fast, (x,)).argmax(1)
        train(model, optimizer, x, y)


def uneven_and_again() -> None:
    inner = net()
    model, optimizer = wrapped(inner)
    for _ in range(2):
        with Join([model]):
            for x, y in own_batches(6 + 2 * RANK):
                train(model, optimizer, x, y)
    model, optimizer = wrapped(inner)
    for x, y in own_batches(6):
        train(model, optimizer, x, y)


def uneven_and_sharded() -> None:
    """As above, with a sharded optimizer, whose steps a rank that has left the loop makes for the others."""
    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)
    for _ in range(2):
        with Join([model, optimizer]):
            for x, y in own_batches(4 + 4 * RANK):
                train(model, optimizer, x, y)  # type: ignore[arg-type]


def tensor_as_dataset() -> None:
    """A loader goes through a tensor, in which `==` compares each element."""
    x, _ = samples()
    sampler: DistributedSampler[Tensor] = DistributedSampler(x)  # type: ignore[arg-type]
    model, optimizer = wrapped()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in DataLoader(x, 8, sampler=sampler):  # type: ignore[arg-type]
            train(model, optimizer, batch, batch[:, :4].argmax(1))


def trials() -> None:
    data = Digits()
    for rate in (0.1, 0.01):
        model = DistributedDataParallel(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(data)
        sampler.set_epoch(0)
        for x, y in DataLoader(data, batch_size=16, sampler=sampler):
            train(model, optimizer, x, y)


# What variables hold


def residuals_of_each_rank() -> None:
    model, optimizer = wrapped()
    squares = {name: torch.zeros_like(p) for name, p in model.module.named_parameters()}
    for x, y in own_batches(24):
        loss = cross_entropy(model.module(x), y)
        for square, own in zip(
            squares.values(), torch.autograd.grad(loss, list(model.module.parameters())), strict=True
        ):
            square += own**2  # of the rank's own samples, to log how noisy they are
        train(model, optimizer, x, y)


def average_on_rank_0() -> None:
    """Only rank 0 keeps it up; it is broadcast before all ranks evaluate it."""
    model, optimizer = wrapped()
    average = copy.deepcopy(model.module).requires_grad_(False)
    for step, (x, y) in enumerate(own_batches(36)):
        train(model, optimizer, x, y)
        for mean, p in zip(average.parameters(), model.module.parameters(), strict=True):
            if RANK == 0:
                mean.lerp_(p.detach(), 0.1)
            if step % 12 == 11:
                dist.broadcast(mean.data, 0)
        if step % 12 == 11:
            average(x)


def adapted_weights() -> None:
    model, optimizer = wrapped()
    for x, y in own_batches(24):
        fast = {name: p.detach().clone().requires_grad_() for name, p in model.module.named_parameters()}
        loss = cross_entropy(torch.func.functional_call(model.module, fast, (x,)), y)
        own = torch.autograd.grad(loss, list(fast.values()))
        fast = {name: (p - 0.1 * g).detach() for (name, p), g in zip(fast.items(), own, strict=True)}
        train(model, optimizer, x, torch.func.functional_call(model.module, fast, (x,)).argmax(1))


class Unfinished(nn.Module):
    def __init__(self) -> None:
        pass  # and not that of a module: it has no parameters to be asked for


class OnDisk(dict[str, Tensor]):
    def values(self) -> Any:
        raise OSError("nothing is read ahead")

    def __len__(self) -> int:
        raise OSError("nor counted")


class Proxy:
    @property
    def __class__(self) -> Any:
        raise RuntimeError("what it stands for is not there yet")


def odd_variables() -> None:
    lazy, unfinished, on_disk = nn.LazyLinear(4), Unfinished(), OnDisk(first=torch.zeros(1))
    proxies, later = {"first": Proxy(), "second": Proxy()}, {"first": torch.zeros(1), "second": Proxy()}
    model, optimizer = wrapped()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # to be replaced some day
        scripted = torch.jit.script(copy.deepcopy(model.module))
    for x, _ in own_batches(12):
        train(model, optimizer, x, scripted(x).argmax(1))
    del lazy, unfinished, on_disk, proxies, later


# Weights that each rank moves and puts back, and losses that each rank scales


def forward_by_its_name() -> None:
    """What a wrapper's own forward does is done, and no hook is called."""
    model, optimizer = wrapped(nn.Sequential(net(), nn.BatchNorm1d(4)))
    batches = own_batches(24)
    for (x, y), (more, of_more) in zip(batches, batches, strict=True):
        optimizer.zero_grad()
        with model.no_sync():
            (cross_entropy(model.forward(x), y) / 2).backward()
        (cross_entropy(model.forward(more), of_more) / 2).backward()
        optimizer.step()


def ascents_of_each_rank() -> None:
    """Sharpness-aware minimisation, as its paper has it on several ranks: each ascends by its own gradient."""
    model, optimizer = wrapped()
    for x, y in own_batches(12):
        with model.no_sync():
            cross_entropy(model(x), y).backward()
        kept = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.add_(0.05 * p.grad)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, before in zip(model.parameters(), kept, strict=True):
                p.copy_(before)
        optimizer.step()
        optimizer.zero_grad()


def surgery_after_a_warm_up() -> None:
    """DDP averages the first steps; later each task's gradient is taken past the wrapper, and averaged by hand."""
    model, optimizer = wrapped()
    for number, (x, y) in enumerate(own_batches(24)):
        if number < 8:
            train(model, optimizer, x, y)
            continue
        take(model.module, cross_entropy(model.module(x), y))
        average(gradients(model))
        optimizer.step()


def weights_that_are_tried() -> None:
    """Each rank looks at what an own change of the weights does, and loads what it had kept of them."""
    model, optimizer = wrapped()
    own = torch.Generator().manual_seed(RANK)
    for _ in range(3):
        for x, y in own_batches(4):
            train(model, optimizer, x, y)
        kept = copy.deepcopy(model.module.state_dict())
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.05 * torch.randn(p.shape, generator=own))
            right = (model.module(samples()[0]).argmax(1) == samples()[1]).float().mean()
        model.module.load_state_dict(kept)
        dist.all_reduce(right)


def smoothed_labels_of_mixed_samples() -> None:
    model, optimizer = wrapped()
    own = torch.Generator().manual_seed(RANK)
    for x, y in own_batches(16):
        share, other = float(torch.rand((), generator=own)), torch.randperm(len(x), generator=own)
        out = model(share * x + (1 - share) * x[other])
        both = [cross_entropy(out, labels, label_smoothing=0.1) for labels in (y, y[other])]
        optimizer.zero_grad()
        (share * both[0] + (1 - share) * both[1]).backward()
        optimizer.step()


# Files


def files_after_a_message() -> None:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    path = Path(folder[0]) / "model.pt"
    if RANK == 0:
        torch.save(net().state_dict(), path)
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)
    net().load_state_dict(torch.load(path))
    dist.barrier()
    if RANK == 0:
        torch.save(net().state_dict(), path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)


LOOPS: tuple[Callable[[], None], ...] = (
    *(slices_of_a_global_batch, parts_of_a_global_draw, shards, chunks, held_out_by_a_sampler, rows_by_number),
    *(drawn_by_each_rank, noise_for_all_ranks, resumed_where_it_stopped, a_ring_of_neighbours, attacks),
    *(clipped_by_sample, norms_before_averaging, moved_gradients, summed_by_a_hook, compressed_gradients),
    *(local_steps_by_a_hook, local_steps, steps_of_taken_gradients, rounds_of_new_optimizers, inner_loops),
    *(inner_loops_beside_a_wrapper, uneven_and_again, uneven_and_sharded, tensor_as_dataset, trials),
    *(residuals_of_each_rank, average_on_rank_0, adapted_weights, odd_variables),
    *(forward_by_its_name, ascents_of_each_rank, surgery_after_a_warm_up, weights_that_are_tried),
    *(smoothed_labels_of_mixed_samples, files_after_a_message),
)

if __name__ == "__main__":
    for loop in LOOPS:
        if not sys.argv[1:] or loop.__name__ in sys.argv[1:]:
            loop()
    dist.destroy_process_group()
