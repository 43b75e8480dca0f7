"""What `ddpcheck run` costs beside plain torchrun: the start of a script, and its steps; and how soon it ends a hang.

    python benchmarks/run.py [--pairs N] [--quick] [--write]

Both launchers start the same unmodified script, in turn; `--write` writes docs/benchmarks-run.md. The script counts the
processor time that its first rank takes for each step: waits for the other rank are not in it, of which ddpcheck makes
none. Other load makes a step longer and never shorter, so what counts of each step is the least of all runs, of which
the median is shown; and of a whole run the least, too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EVERY = 10  # as ddpcheck run has it, unless told otherwise
FIRST = 40  # steps, in which the ones that are sampled lie close to each other
STEPS = 200
QUICK_STEPS = 100  # so few that their time can be taken from that of the whole
FEW = 2  # steps that belong to the start
ATTEMPTS = 3  # gloo now and then aborts a healthy process at its exit, under plain torchrun too

SCRIPT = """
import json, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
depth, width, batch, steps, file = (*map(int, sys.argv[1:5]), sys.argv[5])
dist.init_process_group("gloo")
layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
torch.manual_seed(dist.get_rank())
seconds = []
for step in range(steps):
    x = torch.randn(batch, width)
    began = time.process_time()
    optimizer.zero_grad()
    (model(x) - x).square().mean().backward()
    optimizer.step()
    seconds.append(time.process_time() - began)
if dist.get_rank() == 0:
    with open(file, "w") as out:
        json.dump(seconds, out)
dist.destroy_process_group()
"""
HANG = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    with open(sys.argv[1], "w") as out:
        out.write(str(time.time()))
    dist.all_reduce(torch.ones(1))
else:
    dist.broadcast(torch.ones(1), src=0)
    dist.all_reduce(torch.ones(1))
"""
TIMEOUT = 5  # seconds
MODELS = {  # depth, width, batch, steps
    f"start, {FEW} steps of a small model": (2, 8, 4, FEW),
    "40 layers of 64": (40, 64, 32, STEPS),
    "6 layers of 1024": (6, 1024, 128, STEPS),
}
QUICK = {"40 layers of 64": (40, 64, 32, QUICK_STEPS)}
LAUNCHERS = {"torchrun": ["torch.distributed.run"], "ddpcheck run": ["ddpcheck", "run"]}
PARITY = {"40 layers of 64": (40, 64, 32, 400), "6 layers of 1024": (6, 1024, 128, 30)}  # about 5 s under torchrun


def run(launcher: str, folder: Path, *arguments: object, options: Sequence[str] = ()) -> tuple[float, list[float]]:
    """Run the script; the wall time of the whole in seconds, and the processor time of each of its steps."""
    script, out = folder / "script.py", folder / "steps.json"
    script.write_text(SCRIPT)
    launch = [*LAUNCHERS[launcher], *options, "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, "-m", *launch, str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # as users have it: else each process compiles all of ddpcheck anew
    for _ in range(ATTEMPTS):
        began = time.perf_counter()
        ran = subprocess.run([*command, *map(str, arguments), str(out)], env=env, capture_output=True, text=True)
        if not ran.returncode:
            return time.perf_counter() - began, json.loads(out.read_text())
    raise SystemExit(f"{launcher} ended with exit code {ran.returncode}:\n{ran.stderr}")


def is_sampled(step: int) -> bool:
    """Whether ranks are compared, or parameters probed, after a step."""
    return step % EVERY == 0 or step & (step - 1) == 0


def measure(pairs: int, folder: Path, quick: bool) -> list[str]:
    """Rows of the table; of a quick run one, of a model of which one run tells all."""
    rows = []
    for name, (depth, width, batch, steps) in (QUICK if quick else MODELS).items():
        runs: dict[str, list[tuple[float, list[float]]]] = {launcher: [] for launcher in LAUNCHERS}
        for turn in range(pairs):
            for launcher in sorted(LAUNCHERS, reverse=bool(turn % 2)):
                runs[launcher].append(run(launcher, folder, depth, width, batch, steps))
        plain, watched = (min(wall - sum(took[FEW:]) for wall, took in runs[launcher]) for launcher in LAUNCHERS)
        start = f"{watched - plain:+.2f} s" if steps <= QUICK_STEPS else ""
        if steps == FEW:
            rows.append(f"| {name} | {plain:.2f} s | {start} | | |")
            continue
        least = {
            launcher: [min(of_one) for of_one in zip(*(of_steps for _, of_steps in runs[launcher]), strict=True)]
            for launcher in LAUNCHERS
        }
        between, sampled = [step for step in range(FIRST, steps) if not is_sampled(step)], range(FIRST, steps, EVERY)
        step, ours, probed = (
            statistics.median(least[launcher][step] for step in chosen)
            for launcher, chosen in (("torchrun", between), ("ddpcheck run", between), ("ddpcheck run", sampled))
        )
        ratios = f"{ours / step - 1:+.1%} | {probed / step:.2f} times"
        rows.append(f"| {name} | {step * 1e3:.2f} ms a step | {start} | {ratios} |")
        print(rows[-1], file=sys.stderr)
    return rows


def parity(pairs: int, folder: Path) -> list[str]:
    """Rows of the table of `--check-parity`: wall time of a script with it and without, in turn."""
    rows = []
    for name, arguments in PARITY.items():
        took: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(pairs):
            for compares in (bool(turn % 2), not turn % 2):
                options = ["--check-parity"] if compares else []
                took[compares].append(run("ddpcheck run", folder, *arguments, options=options)[0])
        plain, compared = (statistics.median(took[compares]) for compares in (False, True))
        rows.append(f"| {name}, {arguments[-1]} steps | {plain:.1f} s | {compared:.1f} s | {compared / plain:.2f} |")
        print(rows[-1], file=sys.stderr)
    return rows


def seconds_of_hang(folder: Path) -> float:
    """From the end of `--check-timeout` to the end of the command, after ranks have begun to wait for each other."""
    script, out = folder / "hang.py", folder / "began"
    script.write_text(HANG)
    command = [sys.executable, "-m", "ddpcheck", "run", f"--check-timeout={TIMEOUT}", "--standalone"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [*command, "--nproc-per-node=2", str(script), str(out)], env=env, capture_output=True, text=True
    )
    ended = time.time()
    if ran.returncode != 4 or "comes to all_reduce(float32 of shape (1,)) at hang.py:9" not in ran.stderr:
        raise SystemExit(f"the hang was not found: exit code {ran.returncode}\n{ran.stderr}")
    return ended - float(out.read_text()) - TIMEOUT


def _parity_verdict(rows: list[str]) -> tuple[str, ...]:
    return (
        "## With `--check-parity`",
        "",
        "A healthy script, whose gradients equal those of the single process: wall time of `ddpcheck run` without the",
        "option and with it, the median of all runs. The aim is 2.3 times, for a script of 5 s.",
        "",
        "| | without | with | times |",
        "|---|---|---|---|",
        *rows,
        "",
        "## A hang",
        "",
    )


def _of_hangs(seconds: list[float]) -> tuple[str, ...]:
    return (
        f"Two ranks that wait in different collectives, `--check-timeout {TIMEOUT}`: the report with the line is",
        f"there, and all processes have ended, {seconds[0]:.1f} to {seconds[-1]:.1f} s after it. The aim is 10 s.",
        "",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="runs of each launcher, in turn (default 5)")
    parser.add_argument("--quick", action="store_true", help="one run of one model, no hang: no figures to quote")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks-run.md")
    given = parser.parse_args()
    if given.quick and given.write:
        parser.error("--write is for a whole run: without --quick")
    pairs = 1 if given.quick else given.pairs
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(pairs, Path(folder), given.quick)
        compared = [] if given.quick else parity(pairs, Path(folder))
        hangs = [] if given.quick else sorted(seconds_of_hang(Path(folder)) for _ in range(pairs))
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"
    page = "\n".join(
        (
            "<!-- Written by `python benchmarks/run.py --write`. -->",
            "# Cost of `ddpcheck run` compared with torchrun",
            "",
            f"The same script, 2 ranks, gloo, one thread per rank; {machine}; {pairs} runs of each, in turn.",
            f"Start and end, with {FEW} steps: the minimum wall time of all runs. A step: processor time of one rank,",
            "the minimum of all runs, and the median of these.",
            "",
            "| | torchrun | start and end | between sampled steps | a sampled step |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"A step is sampled if its number is a multiple of {EVERY} (`--check-every`) or a power of two. Aims: at",
            "most 0.3 s more from start to end, 5 % between sampled steps, 3 times in a sampled one.",
            "",
            *(_parity_verdict(compared) if compared else ()),
            *(_of_hangs(hangs) if hangs else ()),
        )
    )
    print(page)
    if given.write:
        (ROOT / "docs" / "benchmarks-run.md").write_text(page)


if __name__ == "__main__":
    main()
