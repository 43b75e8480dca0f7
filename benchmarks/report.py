"""What a report costs beside the work that it cannot avoid, on the same machine in the same run.

    python benchmarks/report.py [--runs N] [--quick] [--write]

The work that cannot be avoided: three steps through DDP on two ranks, three of the unwrapped module on each rank with
its gradients averaged, and three of the global batch in a single process, in float32 and in float64. Both sides start
their own ranks; the single process works beside the ranks on both sides. `--write` writes docs/benchmarks-report.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from ddpcheck import Recipe, World, check, detect_anomalous_params
from ddpcheck.recipe.pytree import shard_batch

ROOT = Path(__file__).resolve().parents[1]
STEPS, RANKS = 3, 2
NODES = 10_000, 100_000, 1_000_000
MODELS = (2, 64), (6, 256), (12, 384)  # depth and width of transformers
FIVE_LINES = """
import torch
model = lambda: torch.nn.Linear(2, 1)
loss = lambda model, batch: model(batch).mean()
batch = lambda step: torch.ones(4, 2)
"""
PAGE = """\
<!-- Written by `python benchmarks/report.py --write`. -->
# Cost of `ddpcheck report`

{machine}; {ranks} ranks, gloo, {steps} steps.
Both sides of a row ran in turn, {runs} times each: medians, and the smallest and the largest ratio. Compare the
ratios: seconds are those of one machine.

## Compared with the unavoidable work

The unavoidable work is the steps through DDP, those of the unwrapped module on each rank with averaged gradients, and
those of the global batch in a single process, in float32 and in float64. Both sides start their own ranks.

| model | the work | `check` | ratio |
|---|---:|---:|---:|
{models}

The aim is at most {aim}.

## From a cold start

| model | `python -c "import torch"` | `ddpcheck report` | ratio |
|---|---:|---:|---:|
{start}

The aim is at most {aim}.

## A graph of many nodes

`detect_anomalous_params`, before the backward pass, of a loss at the end of a chain of operations.

| nodes | `loss.backward()` | `detect_anomalous_params` | ratio |
|---:|---:|---:|---:|
{graphs}

The aim is milliseconds for a million nodes.
"""
AIM = 1.3


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


def process(*arguments: str) -> float:
    begun = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments], check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    return time.perf_counter() - begun


class Chain(nn.Module):
    """A parameter, and one that is not used, before a chain of additions."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self, nodes: int) -> torch.Tensor:
        value: torch.Tensor = self.used
        for _ in range(nodes):
            value = value + 1
        return value.sum()


def graph(nodes: int) -> tuple[float, float]:
    """Seconds of the backward pass, and of the answer before it."""
    chain = Chain()
    loss = chain(nodes)
    begun = time.perf_counter()
    found = detect_anomalous_params(loss, chain)
    answered = time.perf_counter()
    assert found.missing == ("unused",), found
    loss.backward()
    return time.perf_counter() - answered, answered - begun


def row(name: str, runs: int, pair: Callable[[], tuple[float, float]]) -> str:
    """One row: `pair` measures the alternative, then ddpcheck."""
    pairs = [pair() for _ in range(runs)]
    theirs, ours = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratios = sorted(ours / theirs for theirs, ours in pairs)
    digits = 2 if theirs > 0.1 else 4
    line = (
        f"| {name} | {theirs:.{digits}f} s | {ours:.{digits}f} s | "
        f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
    )
    print(line, file=sys.stderr, flush=True)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="of each side, in turn (default 5)")
    parser.add_argument("--quick", action="store_true", help="one run of the middle sizes: no figures to quote")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks-report.md")
    given = parser.parse_args()
    if given.quick and given.write:
        parser.error("--write is for a whole run: without --quick")
    runs, sizes = (1, slice(1, 2)) if given.quick else (given.runs, slice(None))
    unavoidable(recipe(*MODELS[0]))  # starts the fork server
    models = []
    for depth, width in MODELS[sizes]:
        what = recipe(depth, width)
        count = sum(p.numel() for p in what.model().parameters())
        name = f"transformer, {depth} layers, {count / 1e6:.1f} M weights"
        models.append(row(name, runs, lambda what=what: (unavoidable(what), checked(what))))  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "five_lines.py"
        file.write_text(FIVE_LINES, encoding="utf-8")
        ours = "-m", "ddpcheck", "report", str(file)
        start = row("five lines", runs, lambda: (process("-c", "import torch"), process(*ours)))
    graphs = [row(f"{nodes:,}", runs, lambda nodes=nodes: graph(nodes)) for nodes in NODES[sizes]]  # type: ignore[misc]
    page = PAGE.format(
        machine=f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, torch {torch.__version__}",
        ranks=RANKS,
        steps=STEPS,
        runs=runs,
        aim=AIM,
        models="\n".join(models),
        start=start,
        graphs="\n".join(graphs),
    )
    print(page)
    if given.write:
        (ROOT / "docs" / "benchmarks-report.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
