"""Healthy evaluations that look like faults, one after the other in one script: `ddpcheck run` finds nothing in them.

ddpcheck run --standalone --nproc-per-node 2 tests/healthy_evaluations.py [NAME ...]
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
Evaluation = Callable[[nn.Module, "DataLoader[tuple[Tensor, ...]]", TensorDataset], None]


def samples(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :4].argmax(1))


def net(outputs: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, outputs))


def tell(text: str) -> None:
    if RANK == 0:
        print(text)


def gathered(own: Tensor) -> Tensor:
    """Of all ranks, in the order of a `DistributedSampler`."""
    parts = [torch.empty_like(own) for _ in range(WORLD)]
    dist.all_gather(parts, own)
    return torch.stack(parts, 1).flatten()


def predicted(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        pairs = [(model(x).argmax(1), y) for x, y in loader]
    return torch.cat([p for p, _ in pairs]), torch.cat([y for _, y in pairs])


class Meter:
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float, count: int) -> None:
        self.total += value * count
        self.count += count

    @property
    def average(self) -> float:
        return self.total / self.count


def sums_and_counts(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], data: TensorDataset) -> None:
    sums = torch.zeros(3)
    with torch.no_grad():
        for x, y in loader:
            out = model(x)
            sums += torch.tensor([(out.argmax(1) == y).sum(), cross_entropy(out, y, reduction="sum"), len(y)])
    dist.all_reduce(sums)
    tell(f"accuracy {sums[0] / sums[2]:.4f}, loss {sums[1] / sums[2]:.4f}")


def cut_after_gathering(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], data: TensorDataset) -> None:
    own, labels = predicted(model, loader)
    equal = gathered(own)[: len(data)] == gathered(labels)[: len(data)]
    tell(f"accuracy {equal.double().mean():.4f}")


def cut_in_the_last_batch(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], data: TensorDataset) -> None:
    correct = total = seen = 0
    with torch.no_grad():
        for x, y in loader:
            equal = gathered(model(x).argmax(1)) == gathered(y)
            seen += len(equal)
            equal = equal[: len(data) - total]
            correct, total = correct + int(equal.sum()), total + len(equal)
    tell(f"accuracy {correct / total:.4f} of {total} and {seen - total}")


def a_batch_ahead(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], data: TensorDataset) -> None:
    batches = iter(loader)
    batch = next(batches, None)
    correct = total = 0
    while batch is not None:
        ahead = next(batches, None)  # the loader has ended before its last batch is at work
        with torch.no_grad():
            own = model(batch[0]).argmax(1)
        predictions, labels = (gathered(one)[: len(data) - total] for one in (own, batch[1]))
        correct, total, batch = correct + int((predictions == labels).sum()), total + len(labels), ahead
    tell(f"accuracy {correct / total:.4f}")


def without_those_that_repeat(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], data: TensorDataset) -> None:
    own, labels = predicted(model, loader)
    kept = torch.arange(len(own)) * WORLD + RANK < len(data)
    counts = torch.tensor([int((own == labels)[kept].sum()), int(kept.sum())])
    dist.all_reduce(counts)
    tell(f"accuracy {counts[0] / counts[1]:.4f}")


def in_the_order_of_the_dataset(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], data: TensorDataset) -> None:
    own, _ = predicted(model, loader)
    tell(f"accuracy {(gathered(own)[: len(data)] == data.tensors[1]).double().mean():.4f}")


def on_rank_0(model: nn.Module, _loader: DataLoader[tuple[Tensor, ...]], data: TensorDataset) -> None:
    if RANK == 0:
        own, labels = predicted(model, DataLoader(data, batch_size=16))
        print(f"accuracy {(own == labels).double().mean():.4f}")
    dist.barrier()


def all_of_it_on_each(model: nn.Module, _loader: DataLoader[tuple[Tensor, ...]], data: TensorDataset) -> None:
    own, labels = predicted(model, DataLoader(data, batch_size=16))
    tell(f"accuracy {(own == labels).double().mean():.4f}")


def told_by_each(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], data: TensorDataset) -> None:
    own, labels = predicted(model, loader)
    print(f"[{RANK}] accuracy {(own == labels).double().mean():.4f}")


def brought_together_later(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], data: TensorDataset) -> None:
    meter = Meter()
    with torch.no_grad():
        for x, y in loader:
            meter.update(float((model(x).argmax(1) == y).double().mean()), len(y))
    tell(f"so far {meter.average:.4f}")
    sums = torch.tensor([meter.total, meter.count], dtype=torch.float64)
    dist.barrier()
    dist.all_reduce(sums)
    meter.total, meter.count = float(sums[0]), int(sums[1])
    tell(f"accuracy {meter.average:.4f}")
    if RANK == 0 and meter.average > 0.1:
        torch.save({"accuracy": meter.average}, os.path.join(tempfile.mkdtemp(), "best.pt"))


class Rate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total, self.count = 0.0, 0

    def forward(self, value: float) -> float:
        self.total, self.count = self.total + value, self.count + 1
        return self.total / self.count


def summed_up_later(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], data: TensorDataset) -> None:
    rate, mean = Rate(), 0.0
    with torch.no_grad():
        for number, (x, y) in enumerate(loader, 1):
            last = float(cross_entropy(model(x), y)) if number == len(loader) else 0.0
            mean = rate(last)
    tell(f"so far {mean:.6f}")
    sums = torch.tensor([rate.count, rate.total], dtype=torch.float64)
    dist.all_reduce(sums)
    tell(f"loss {sums[1] / sums[0]:.6f}")


def seconds(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], data: TensorDataset) -> None:
    took, began = 0.0, time.perf_counter()
    batch_time = Meter()
    with torch.no_grad():
        for x, _ in loader:
            model(x)
            time.sleep(0.01 * (1 + RANK))
            batch_time.update(time.perf_counter() - began, 1)
            took = batch_time.average
    tell(f"{took:.6f} seconds a batch")


def averages_on_rank_0(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], data: TensorDataset) -> None:
    mean = 0.0
    with torch.no_grad():
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            dist.reduce(loss, 0)
            mean += float(loss) / WORLD / len(loader)
    tell(f"loss {mean:.5f}")


def gathered_with_their_labels(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], _data: TensorDataset) -> None:
    own, labels = predicted(model, loader)
    held: list[dict[str, list[int]]] = [{}] * WORLD
    dist.all_gather_object(held, {"own": own.tolist(), "labels": labels.tolist()})
    pairs = [pair for one in held for pair in zip(one["own"], one["labels"], strict=True)]
    tell(f"accuracy {round(sum(a == b for a, b in pairs) / len(pairs), 3)}")


def weighted_means(model: nn.Module, _loader: DataLoader[tuple[Tensor, ...]], data: TensorDataset) -> None:
    own = Subset(data, range(48) if RANK == 0 else range(48, len(data)))
    total = 0.0
    with torch.no_grad():
        for x, y in DataLoader(own, batch_size=8):
            total += float(cross_entropy(model(x), y, reduction="sum"))
    mean = torch.tensor(total / len(own) * len(own) / len(data), dtype=torch.float64)
    dist.all_reduce(mean)
    tell(f"loss {float(mean):.5f}")


def evaluate(size: int, evaluation: Evaluation, *, drop_last: bool = False) -> None:
    """Train, show the loss of rank 0's own batches, and evaluate after each epoch."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    training, validation = samples(64, 1), samples(size, 2)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(training)
    held_out: DistributedSampler[tuple[Tensor, ...]]
    held_out = DistributedSampler(validation, shuffle=False, drop_last=drop_last)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        running = 0.0
        for x, y in DataLoader(training, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            running += float(loss)
            tell(f"loss {float(loss):.4f}")
        tell(f"mean loss {running / 4:.4f}")
        evaluation(model.module, DataLoader(validation, batch_size=8, sampler=held_out), validation)


def contrast(kind: str) -> None:
    """Train on pairs of views, against the views of all ranks."""
    model = DistributedDataParallel(net(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    draws = torch.Generator().manual_seed(RANK)
    queue = normalize(torch.randn(32, 8, generator=torch.Generator().manual_seed(7)), dim=1)
    for _ in range(4):
        x = torch.randn(16, 8, generator=draws)
        first, second = normalize(model(torch.cat([x, x.flip(1)])), dim=1).chunk(2)
        parts = [torch.empty_like(second) for _ in range(WORLD)]
        dist.all_gather(parts, second.detach())
        parts[RANK] = second
        targets = torch.arange(len(x))
        if kind == "offset":
            parts = [*all_gather(second)]  # with the gradient of the losses of all ranks
            logits, targets = first @ torch.cat(parts).T, targets + RANK * len(x)
        elif kind == "own first":
            logits = first @ torch.cat([second, *(part for rank, part in enumerate(parts) if rank != RANK)]).T
        else:  # the positive first, then a queue, which is then filled with what was gathered
            logits = torch.cat([(first * second).sum(1, keepdim=True), first @ queue.T], 1)
            queue, targets = torch.cat(parts).detach(), torch.zeros_like(targets)
        optimizer.zero_grad()
        cross_entropy(logits / 0.1, targets).backward()
        optimizer.step()


LOOPS: dict[str, Callable[[], None]] = {
    "sums_and_counts": lambda: evaluate(64, sums_and_counts),
    "drop_last": lambda: evaluate(37, sums_and_counts, drop_last=True),
    "cut_after_gathering": lambda: evaluate(37, cut_after_gathering),
    "cut_in_the_last_batch": lambda: evaluate(37, cut_in_the_last_batch),
    "a_batch_ahead": lambda: evaluate(32, a_batch_ahead),
    "a_batch_ahead_cut": lambda: evaluate(19, a_batch_ahead),
    "without_those_that_repeat": lambda: evaluate(37, without_those_that_repeat),
    "in_the_order_of_the_dataset": lambda: evaluate(37, in_the_order_of_the_dataset),
    "on_rank_0": lambda: evaluate(37, on_rank_0),
    "all_of_it_on_each": lambda: evaluate(37, all_of_it_on_each),
    "told_by_each": lambda: evaluate(64, told_by_each),
    "brought_together_later": lambda: evaluate(64, brought_together_later),
    "summed_up_later": lambda: evaluate(64, summed_up_later),
    "seconds": lambda: evaluate(64, seconds),
    "averages_on_rank_0": lambda: evaluate(64, averages_on_rank_0),
    "gathered_with_their_labels": lambda: evaluate(64, gathered_with_their_labels),
    "weighted_means": lambda: evaluate(64, weighted_means),
    "offset": lambda: contrast("offset"),
    "own_first": lambda: contrast("own first"),
    "queue": lambda: contrast("queue"),
}

if __name__ == "__main__":
    for name, loop in LOOPS.items():
        if not sys.argv[1:] or name in sys.argv[1:]:
            loop()
    dist.destroy_process_group()
