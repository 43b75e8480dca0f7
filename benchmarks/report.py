"""What `check` costs beside the work that it cannot avoid, on the same machine in the same run.

    python benchmarks/report.py [--quick]

The work that cannot be avoided: three steps through DDP on two ranks, three of the unwrapped module on each rank with
its gradients averaged, and three of the global batch in a single process, in float32 and in float64. Both sides start
their own ranks; the single process works beside the ranks on both sides.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from ddpcheck import Recipe, World, check
from ddpcheck.recipe.pytree import shard_batch

STEPS, RANKS = 3, 2


class Model(nn.Module):
    """A transformer encoder with a head."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(inputs))


def recipe(depth: int, width: int) -> Recipe:
    def batch(step: int) -> torch.Tensor:
        return torch.randn(16, 32, width, generator=torch.Generator().manual_seed(step))

    def loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return (model(inputs) - inputs).square().mean()

    return Recipe(model=lambda: Model(depth, width), batch=batch, loss=loss)


def on_ranks(what: Recipe) -> None:
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    bare = what.model()
    torch.manual_seed(0)
    wrapped = nn.parallel.DistributedDataParallel(what.model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    for step in range(STEPS):
        shard = shard_batch(what.batch(step), rank, world_size)
        bare.load_state_dict(wrapped.module.state_dict())
        bare.zero_grad()
        what.loss(bare, shard).backward()
        flat = torch.cat([p.grad.reshape(-1) for p in bare.parameters() if p.grad is not None])
        dist.all_reduce(flat)
        optimizer.zero_grad()
        what.loss(wrapped, shard).backward()
        optimizer.step()


def alone(what: Recipe) -> None:
    torch.manual_seed(0)
    single, double = what.model(), what.model().double()
    for step in range(STEPS):
        batch: Any = what.batch(step)
        for module, inputs in ((single, batch), (double, batch.double())):
            module.zero_grad()
            what.loss(module, inputs).backward()


def unavoidable(what: Recipe) -> float:
    begun = time.perf_counter()
    with World(RANKS) as world, World(1, process_group=False) as single:
        pending = single.start(alone, what, timeout=300)
        world.run(on_ranks, what, timeout=300)
        pending.result()
    return time.perf_counter() - begun


def checked(what: Recipe) -> float:
    begun = time.perf_counter()
    report = check(what, world_size=RANKS, steps=STEPS, timeout=300)
    seconds = time.perf_counter() - begun
    assert report.status == "clean", report.findings
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    runs = 2 if parser.parse_args().quick else 5
    print(f"{'model':<28} {'unavoidable s':>14} {'check s':>9} {'ratio':>7}   medians of {runs}")
    for depth, width in ((2, 64), (6, 256), (12, 384)):
        what = recipe(depth, width)
        count = sum(p.numel() for p in what.model().parameters())
        unavoidable(what)  # starts the fork server
        pairs = [(unavoidable(what), checked(what)) for _ in range(runs)]
        floor, total = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(ours / theirs for theirs, ours in pairs)
        name = f"{depth} layers, {count / 1e6:.1f} M weights"
        print(f"{name:<28} {floor:>14.2f} {total:>9.2f} {ratio:>7.2f}", flush=True)


if __name__ == "__main__":
    main()
