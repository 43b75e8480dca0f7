"""Healthy evaluations of programs that hold many numbers: options, ranks, ids, times, sizes and other counters.

What they show is of all samples, of none, or equal on all ranks, so that `ddpcheck run` finds nothing in them.

ddpcheck run --standalone --nproc-per-node 2 tests/healthy_numbers.py [NUMBER ...]
"""

import math
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
SIZES = (944, 472, 64, 100, 128, 256, 500, 37, 81, 1000)


class Ratings(Dataset[dict[str, Any]]):
    """Users, items and what they have rated; each sample with its number."""

    def __init__(self, count: int, seed: int) -> None:
        draws = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 6, generator=draws)
        self.user = torch.randint(0, 300, (count,), generator=draws)
        self.item = torch.randint(0, 50000, (count,), generator=draws)
        self.label = self.x[:, :3].argmax(1)
        self.score = self.x[:, 0] + 0.2 * torch.randn(count, generator=draws)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        names = ("x", "user", "item", "label", "score")
        return {"index": index, **{name: getattr(self, name)[index] for name in names}}


class Meter:
    def __init__(self) -> None:
        self.value, self.total, self.count = 0.0, 0.0, 0

    def update(self, value: float, count: int = 1) -> None:
        self.value = value
        self.total += value * count
        self.count += count

    def reduce(self) -> float:
        both = torch.tensor([self.total, self.count], dtype=torch.float64)
        dist.all_reduce(both)
        return float(both[0] / both[1])


class Trainer:
    """One program: its options, its state, and an evaluation that shows metrics beside much else."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.config: dict[str, Any] = {
            **{"local_rank": RANK, "rank": RANK, "world_size": WORLD, "seed": 40 + number + RANK, "port": 29500 + RANK},
            **{"lr": 0.01 * (1 + number % 5), "batch_size": (16, 8, 20)[number % 3], "warmup": 0.1, "dropout": 0.25},
            **{"eps": 1e-8, "betas": (0.9, 0.999), "hidden": 32, "threshold": 0.5},
        }
        torch.manual_seed(number)
        self.model = DistributedDataParallel(
            nn.Sequential(nn.Linear(6, self.config["hidden"]), nn.ReLU(), nn.Linear(self.config["hidden"], 3))
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), self.config["lr"], momentum=0.9)
        self.train_set, self.test_set = Ratings(160, number), Ratings(SIZES[number % len(SIZES)], 100 + number)
        self.sampler: DistributedSampler[dict[str, Any]] = DistributedSampler(self.train_set, seed=number)
        self.loader = DataLoader(self.train_set, self.config["batch_size"], sampler=self.sampler, drop_last=True)
        held: DistributedSampler[dict[str, Any]] = DistributedSampler(self.test_set, shuffle=False, drop_last=True)
        self.test_loader = DataLoader(self.test_set, self.config["batch_size"], sampler=held)
        self.seen = self.step = 0
        self.best = 0.0

    def fit(self) -> None:
        for epoch in range(2 + self.number % 2):
            self.sampler.set_epoch(epoch)
            began = time.perf_counter()
            running, norm = Meter(), 0.0
            for batch in self.loader:
                self.optimizer.zero_grad()
                loss = self.loss(self.model(batch["x"]), batch)
                loss.backward()
                norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
                self.optimizer.step()
                running.update(float(loss.detach()), len(batch["x"]))
                self.seen += len(batch["x"])
                self.step += 1
            train_loss = running.reduce()
            metrics = self.evaluate()
            took = time.perf_counter() - began
            if RANK == 0:
                shown = " ".join(f"{name} {value:.4f}" for name, value in metrics.items())
                lr, eps = self.optimizer.param_groups[0]["lr"], self.config["eps"]
                print(f"{epoch}: {shown} train {train_loss:.4f} lr {lr:.5f} eps {eps:.1e} norm {norm:.3f} {took:.2f} s")
            if self.number % 4 == 0:
                print(f"[{RANK}] epoch {epoch + 1:.2f}, {self.seen / took:.1f} samples a second, step {self.step:.1f}")

    def loss(self, out: Tensor, batch: dict[str, Tensor], reduction: str = "mean") -> Tensor:
        if self.number % 3 == 0:
            return cross_entropy(out, batch["label"], reduction=reduction)
        if self.number % 3 == 1:
            return mse_loss(out[:, 0], batch["score"], reduction=reduction)
        return binary_cross_entropy_with_logits(out[:, 0], (batch["score"] > 0).float(), reduction=reduction)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        self.model.eval()
        losses, hits, users, longest = Meter(), Meter(), dict[int, int](), 0.0
        correct = total = batches = 0
        squares = 0.0
        for batch in self.test_loader:
            began = time.perf_counter()
            out = self.model.module(batch["x"])
            losses.update(float(self.loss(out, batch, "sum")) / len(out), len(out))
            right = out.argmax(1) == batch["label"]
            hits.update(float(right.double().mean()), len(out))
            correct += int(right.sum())
            squares += float((out[:, 0] - batch["score"]).square().sum())
            for user, item in zip(batch["user"].tolist(), batch["item"].tolist(), strict=True):
                users[user] = max(users.get(user, 0), item)
            total, batches = total + len(out), batches + 1
            longest = max(longest, time.perf_counter() - began)
        self.model.train()
        counts = torch.tensor([correct, total, squares, batches], dtype=torch.float64)
        dist.all_reduce(counts)
        accuracy = float(counts[0] / counts[1])
        metrics = {"loss": losses.reduce(), "rmse": math.sqrt(counts[2] / counts[1]), "accuracy": accuracy}
        if self.number % 2:
            metrics["hit rate"] = hits.reduce()
        if self.number % 5 == 0:
            metrics["perplexity"] = math.exp(metrics["loss"])
        if accuracy > self.best:
            self.best = accuracy
        if RANK == 0:
            print(f"best {self.best:.4f}, batch {batches:.1f}, threshold {self.config['threshold']:.3f}")
        return metrics


if __name__ == "__main__":
    for number in map(int, sys.argv[1:] or range(20)):
        Trainer(number).fit()
    dist.destroy_process_group()
