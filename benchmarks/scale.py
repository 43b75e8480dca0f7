"""How ddpcheck's cost grows with the number of ranks: real worlds, simulated ranks, and judges on what ranks have said.

    python benchmarks/scale.py [--schedule 64 1024] [--write]

`--write` writes docs/benchmarks-scale.md. Linux only: worlds of 64 ranks are forked.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck import World, check_consistency, check_schedule
from ddpcheck.findings.evidence.endings import ScheduledCall
from ddpcheck.findings.evidence.modules import ModuleDescription, TensorRecord
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.report import Finding, Report
from ddpcheck.render import renderer_for
from ddpcheck.rules.collectives.first_divergence import judge_schedules
from ddpcheck.rules.replicas.descriptions import judge_descriptions

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "examples" / "many_ranks" / "first_machine.py"
WORLDS, SIMULATED = (2, 8, 64), (64, 1024, 16384)
REPEATS, PARAMETERS, CALLS = 3, 1000, 100


def seconds_of(function: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median wall time."""
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        function()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The slope of a line through the logarithms: 1 where twice as many ranks take twice as long."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in seconds]
    return statistics.linear_regression(x, y).slope


# Real ranks


def reduce_once() -> None:
    dist.all_reduce(torch.ones(1))


def live_once(world_size: int) -> None:
    """Start a world, have it communicate once, and end it."""
    with World(world_size, timeout=120, startup_timeout=300) as world:
        world.run(reduce_once)


def compare_once() -> tuple[float, float, float]:
    """Seconds to compare a module of many parameters over the store, by `all_gather_object`, and at a barrier."""
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(PARAMETERS // 2)))
    laid_out = [(name, p.shape, p.dtype, p.stride()) for name, p in module.named_parameters()]
    everyone: list[object] = [None] * dist.get_world_size()
    ways = (lambda: check_consistency(module), lambda: dist.all_gather_object(everyone, laid_out), dist.barrier)
    found = []
    for way in ways:
        dist.barrier()
        found.append(seconds_of(way))
    return found[0], found[1], found[2]


def consistency(world_size: int) -> tuple[float, float, float]:
    with World(world_size, timeout=240, startup_timeout=300) as world:
        return tuple(max(times) for times in zip(*world.run(compare_once), strict=True))  # type: ignore[return-value]


# What ranks have said


def descriptions(ranks: int) -> list[Finding]:
    """Modules of 100 parameters, of which one has other strides on every eighth rank and another shape on one."""

    def module(**odd: object) -> ModuleDescription:
        plain = {"shape": (4, 4), "dtype": "float32", "stride": (4, 1), "requires_grad": True, "device": "cpu"}
        named = ((f"layers.{n}.weight", odd if n == 5 else {}) for n in range(100))
        return ModuleDescription(tuple(TensorRecord(name, **{**plain, **more}) for name, more in named))  # type: ignore[arg-type]

    usual, turned, larger = module(), module(stride=(1, 4)), module(shape=(5, 4))
    return judge_descriptions([turned if r % 8 == 3 else larger if r == 17 else usual for r in range(ranks)])


def collectives(ranks: int) -> list[Finding]:
    """Lists of 100 collectives, of which every eighth rank has another one in the middle."""
    members = tuple(range(ranks))
    calls = [
        ScheduledCall(Call("all_reduce", "world", members, f"float32 of shape ({n},)"), True) for n in range(CALLS)
    ]
    other = [*calls[:50], ScheduledCall(Call("broadcast", "world", members), True), *calls[51:]]
    return judge_schedules({"usual": calls, "other": other}, ["usual" if r % 8 else "other" for r in members])


def schedule(ranks: int) -> Report:
    return check_schedule(str(RECIPE), world_size=ranks)


PAGE = """\
<!-- Written by `python benchmarks/scale.py --write`. -->
# How the cost grows with the ranks

{machine}. Medians of {repeats} runs. An exponent of 1
means that twice as many ranks take twice as long: the cost per rank is constant.

## Real ranks, gloo

| ranks | start, one all-reduce, end | a rank | `check_consistency` | `all_gather_object` of the same | a barrier |
|---:|---:|---:|---:|---:|---:|
{worlds}

`check_consistency` compares {parameters:,} parameters over the store; the alternative by hand is a gather of
the names, shapes, dtypes and strides of all. Exponents: {world_exponent:.2f} for a world,
{consistency_exponent:.2f} for `check_consistency`, {gather_exponent:.2f} for `all_gather_object`.

## Evidence of many ranks, judged in one process

| ranks | modules of 100 parameters | a rank | lists of {calls} collectives | a rank | text of the report | HTML page |
|---:|---:|---:|---:|---:|---:|---:|
{judged}

Ranks that agree are one line of a report, regardless of their number. Exponents: {module_exponent:.2f} for modules,
{call_exponent:.2f} for collectives.

## Simulated ranks

| `ddpcheck report {recipe} --schedule` | seconds | a rank |
|---:|---:|---:|
{scheduled}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", type=int, nargs="+", default=[64, 1024], metavar="RANKS")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks-scale.md")
    given = parser.parse_args()
    live_once(2)  # the server that ranks are forked from has imported torch then
    worlds = {size: seconds_of(lambda size=size: live_once(size)) for size in WORLDS}  # type: ignore[misc]
    compared = {size: consistency(size) for size in WORLDS}
    modules = {size: seconds_of(lambda size=size: descriptions(size)) for size in SIMULATED}  # type: ignore[misc]
    calls = {size: seconds_of(lambda size=size: collectives(size)) for size in SIMULATED}  # type: ignore[misc]
    reports = {
        size: Report("train.py", findings=(*descriptions(size), *collectives(size)), world={"world_size": size})
        for size in SIMULATED
    }
    scheduled = {size: seconds_of(lambda size=size: schedule(size), 1) for size in given.schedule}  # type: ignore[misc]
    text, html = renderer_for("text"), renderer_for("html")
    page = PAGE.format(
        machine=f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, torch {torch.__version__}",
        repeats=REPEATS,
        parameters=PARAMETERS,
        calls=CALLS,
        recipe=RECIPE.relative_to(ROOT).as_posix(),
        worlds="\n".join(
            f"| {size} | {worlds[size]:.2f} s | {worlds[size] / size * 1e3:.0f} ms | {ours * 1e3:.1f} ms | "
            f"{gather * 1e3:.1f} ms | {barrier * 1e3:.1f} ms |"
            for size, (ours, gather, barrier) in compared.items()
        ),
        world_exponent=exponent(WORLDS, list(worlds.values())),
        consistency_exponent=exponent(WORLDS, [ours for ours, _, _ in compared.values()]),
        gather_exponent=exponent(WORLDS, [gather for _, gather, _ in compared.values()]),
        judged="\n".join(
            f"| {size:,} | {modules[size] * 1e3:,.0f} ms | {modules[size] / size * 1e6:.0f} us | "
            f"{calls[size] * 1e3:,.0f} ms | {calls[size] / size * 1e6:.1f} us | {len(text.render(reports[size])):,} "
            f"characters | {len(html.render(reports[size])) // 1024:,} KiB |"
            for size in SIMULATED
        ),
        module_exponent=exponent(SIMULATED, list(modules.values())),
        call_exponent=exponent(SIMULATED, list(calls.values())),
        scheduled="\n".join(
            f"| {size:,} | {seconds:.0f} | {seconds / size * 1e3:.0f} ms |" for size, seconds in scheduled.items()
        ),
    )
    print(page)
    if given.write:
        (ROOT / "docs" / "benchmarks-scale.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
