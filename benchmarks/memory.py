"""What `ddpcheck report` needs of memory: the peak of all its processes together, by model, process and phase.

    python benchmarks/memory.py [--millions 70 100] [--kinds large middle table] [--phases] [--write]

Counted is the proportional set size (PSS) of this process and all that it has started, from /proc/PID/smaps_rollup:
pages that several of them share count once. Pages that are mapped from a file are told apart: the kernel can drop them
and read them again. What the processes hold before they build the model is subtracted from figures a parameter.
`--phases` shows who holds how much when; `--write` writes docs/benchmarks-memory.md. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from ddpcheck import Recipe, check

ROOT = Path(__file__).resolve().parents[1]
RANKS, STEPS, SAMPLES = 2, 2, 8
AIM = 24
"""GiB for 1,000 million float32 parameters at 2 ranks; plain DDP itself needs 12 bytes a parameter and rank."""
_INTERVAL = 0.02  # seconds between samples
_REST = 3.0  # seconds in which fork servers move their memory into huge pages
_SLOTS = re.compile(r"(\S+)/rank(\d+)\.slots")


def large(parameters: int) -> nn.Module:
    """Four Linear layers, of a quarter of the parameters each."""
    width = round((parameters / 4) ** 0.5)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


def middle(parameters: int) -> nn.Module:
    """Linear layers of half a million parameters each."""
    return nn.Sequential(*(nn.Linear(725, 725) for _ in range(max(1, parameters // 525_000))))


class Table(nn.Module):
    """A table of rows with most of the parameters, and a small head."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.table = nn.Embedding(parameters // 256, 256)
        self.head = nn.Linear(256, 256)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = (inputs[:, :32].abs() * 1e6).long() % self.table.num_embeddings
        return self.head(self.table(rows)).mean(1)


KINDS: dict[str, Callable[[int], nn.Module]] = {"large": large, "middle": middle, "table": Table}
WORDS = {"large": "4 Linear layers", "middle": "Linear layers of 0.5 million", "table": "an Embedding"}


def recipe(kind: str, parameters: int) -> Recipe:
    def model() -> nn.Module:
        return KINDS[kind](parameters)

    with torch.device("meta"):
        width = next(m.in_features for m in model().modules() if isinstance(m, nn.Linear))

    def batch(step: int) -> torch.Tensor:
        return torch.randn(SAMPLES, width, generator=torch.Generator().manual_seed(step))

    def loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return model(inputs).square().mean()

    return Recipe(model=model, batch=batch, loss=loss)


# Samples


@dataclass
class Held:
    """What one process, or all of them together, hold, in bytes."""

    private: int = 0
    mapped: int = 0

    @property
    def total(self) -> int:
        return self.private + self.mapped


@dataclass
class Peak:
    """The most private memory that all processes held together, each of them then, and the most of both kinds."""

    private: int = 0
    total: int = 0
    processes: dict[str, Held] = field(default_factory=dict)


class Sampler(threading.Thread):
    """Samples this process and its descendants until it is stopped; `phase` is set by the check's progress."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.phase = "starting"
        self.peaks: dict[str, Peak] = defaultdict(Peak)
        self._stop_asked = threading.Event()
        self._names: dict[int, str] = {}

    def run(self) -> None:
        while not self._stop_asked.wait(_INTERVAL):
            phase = self.phase
            found = {pid: _held(pid) for pid in descendants(os.getpid())}
            peak, private = self.peaks[phase], sum(one.private for one in found.values())
            peak.total = max(peak.total, sum(one.total for one in found.values()))
            if private > peak.private:
                peak.private, peak.processes = private, {self._called(pid): one for pid, one in found.items()}

    def stop(self) -> None:
        self._stop_asked.set()
        self.join()

    def _called(self, pid: int) -> str:
        if pid == os.getpid():
            return "this process"
        known = self._names.get(pid)
        if known is None:
            try:
                found = _SLOTS.search(Path(f"/proc/{pid}/maps").read_text())
            except OSError:
                found = None
            if found is None:
                return f"fork server {pid}"
            ranks = len(list(Path(found[1]).glob("rank*.slots")))
            known = self._names[pid] = f"rank {found[2]}" if ranks > 1 else "single process"
        return known


def descendants(root: int) -> Iterator[int]:
    """A process and all that descend from it."""
    yield root
    children: list[int] = []
    for task in Path(f"/proc/{root}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # which have ended
            children += map(int, task.read_text().split())
    for child in children:
        yield from descendants(child)


def _held(pid: int) -> Held:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return Held()
    kib = {key: int(value) for key, value in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    mapped = kib.get("Pss_File", 0) << 10
    return Held((kib.get("Pss", 0) << 10) - mapped, mapped)


# Measuring


@dataclass
class Figures:
    """The memory of one check."""

    kind: str
    parameters: int
    seconds: float
    peaks: dict[str, Peak]

    @property
    def private(self) -> int:
        return max(peak.private for peak in self.peaks.values())

    @property
    def total(self) -> int:
        return max(peak.total for peak in self.peaks.values())

    def per_parameter(self, base: Figures) -> tuple[float, float]:
        """Bytes of private memory a parameter, and of all, beyond those of a check of a small model."""
        more = self.private - base.private, self.total - base.total
        return more[0] / self.parameters, more[1] / self.parameters


def small() -> Figures:
    """What a check needs whatever the model: that of a small one, once the fork servers are there and idle."""
    measure(recipe("middle", 10))
    time.sleep(_REST)
    return measure(recipe("middle", 10))


def measure(what: Recipe, kind: str = "middle") -> Figures:
    """Check a recipe, which must be clean."""
    sampler = Sampler()

    def progress(words: str) -> None:
        sampler.phase = re.sub(r"(?<=, )step \d+ of \d+: |: \d+ s, waiting.*", "", words)

    sampler.start()
    begun = time.perf_counter()
    report = check(what, world_size=RANKS, steps=STEPS, timeout=600, progress=progress)
    seconds = time.perf_counter() - begun
    sampler.stop()
    assert report.status == "clean", (report.findings, report.error)
    with torch.device("meta"):
        count = sum(p.numel() for p in what.model().parameters())
    return Figures(kind, count, seconds, dict(sampler.peaks))


def show_phases(figures: Figures) -> None:
    print(f"{WORDS[figures.kind]}, {figures.parameters / 1e6:.0f} million: private + mapped bytes a parameter")
    for phase, peak in figures.peaks.items():
        each = (
            f"{name} {one.private / figures.parameters:.1f} + {one.mapped / figures.parameters:.1f}"
            for name, one in sorted(peak.processes.items())
        )
        print(f"    {phase:<48} {peak.private / figures.parameters:>6.1f}: {', '.join(each)}", flush=True)


def row(figures: Figures, base: Figures) -> str:
    private, total = figures.per_parameter(base)
    return (
        f"| {WORDS[figures.kind]} | {figures.parameters / 1e6:.0f} | {figures.private / 2**20:,.0f} | {private:.1f} | "
        f"{total:.1f} | {(base.private + private * 1e9) / 2**30:.1f} |"
    )


PAGE = """\
<!-- Written by `python benchmarks/memory.py --write`. -->
# Memory of `ddpcheck report`

The peak of all processes of a check together: {ranks} ranks, gloo, {steps} steps, float32, SGD; {machine}.
A page that several processes share counts once. Private memory must be available. In addition there are pages of files
in the temporary directory (`TMPDIR`); if it is on a disk, the kernel can drop them and read them again. Bytes per
parameter exclude the memory for the check of a small model.

| model | million parameters | private MiB | private bytes per parameter | with files | GiB at 1,000 million |
|---|---:|---:|---:|---:|---:|
{rows}

The aim is {aim} GiB of private memory for 1,000 million parameters. The last column extrapolates a row to that
size, which was not run. Plain DDP itself needs 24 bytes per parameter on 2 ranks: parameters, gradients and buckets. As
in training, the optimizer's state and the activations are added to this.
"""


def page(rows: list[str]) -> str:
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, torch {torch.__version__}"
    return PAGE.format(ranks=RANKS, steps=STEPS, machine=machine, rows="\n".join(rows), aim=AIM)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, nargs="+", default=[70, 100], help="of parameters")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of models")
    parser.add_argument("--phases", action="store_true", help="show who holds how much, by phase")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks-memory.md")
    given = parser.parse_args()
    base, rows = small(), []
    for kind in given.kinds:
        for millions in given.millions:
            figures = measure(recipe(kind, int(millions * 1e6)), kind)
            rows.append(row(figures, base))
            print(rows[-1], f"{figures.seconds:.0f} s", flush=True)
            if given.phases:
                show_phases(figures)
    if given.write:
        (ROOT / "docs" / "benchmarks-memory.md").write_text(page(rows))


if __name__ == "__main__":
    main()
