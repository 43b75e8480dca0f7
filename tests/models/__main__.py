"""`python -m tests.models`: checks every architecture, holds each verdict against the oracle, writes docs/models.md.

Names as arguments check these and write nothing, in plain DDP or, with `--wrap WRAP`, in another wrap, on as many ranks
as `--world-size` says. Exit code 1 where ddpcheck and the oracle do not agree.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import itertools
import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ddpcheck.findings.report import Report
from ddpcheck.findings.rules import Severity
from tests.models.batches import SAMPLES
from tests.models.catalogue import CATALOGUE
from tests.models.comparing import disagreements, report_on
from tests.models.oracle import find_truth
from tests.models.wraps import COMPILED, WRAPS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@dataclass(frozen=True, eq=False)
class Run:
    """Which architectures are checked in which wrap, and what that is called on the page."""

    wrap: str
    world_size: int
    names: Iterable[str]
    title: str = ""

    def expected(self, name: str) -> Mapping[str, str]:
        """The codes that are true of an architecture here."""
        return CATALOGUE[name].expected_in(self.wrap, self.world_size)


PLAIN = Run("", 2, CATALOGUE)
OTHERS = (
    Run("sharded", 2, CATALOGUE, "`fully_shard`, on 2 ranks"),
    Run("sharded", 4, CATALOGUE, "`fully_shard`, on 4 ranks"),
    Run("compiled", 2, COMPILED["compiled"], "compiled with aot_eager, then DDP, on 2 ranks"),
    Run("inductor", 2, COMPILED["inductor"], "compiled with inductor, then DDP, on 2 ranks"),
)


HEAD = """\
<!-- Written by `make models`. -->
# Findings on {count} well-known architectures

Each is a class of transformers {transformers}, built from a tiny configuration with random weights, in train mode with
its own dropout, trained for 3 steps on 2 ranks with a global batch of {samples} samples and, where it has one, its own
loss. Unless stated, every rank has the same number of labels, so that a finding is about the architecture and not about
the batch.

**{good} are clean.** Under plain DDP {bad} raise, hang or train wrongly in this configuration (errors), and {some} have
warnings. Every verdict was checked against an oracle that shares no code with ddpcheck (`tests/models/oracle.py`):
plain autograd in one process, over several seeds, in float64 if the kernels support it.

## Findings

| architecture | finding | severity | what it is |
|---|---|---|---|
"""
MIDDLE = """
`ddpcheck explain CODE` has the fix for each. In general: build the model without the unused part (often by an option,
such as `add_pooling_layer=False`), freeze it, or pass `find_unused_parameters=True` if layers are skipped at random.

## All

| | clean | with findings |
|---|---|---|
"""
OTHER_WRAPS = """
## Under fully_shard and compiled

The same architectures, batches and oracle in other wraps, on {date}, with torch {torch} and transformers
{transformers}: `fully_shard` (FSDP2) on each layer of the `ModuleList` that holds the most parameters, then on the
whole model, with scalar parameters, which `fully_shard` refuses, as vectors of one element; and
`DistributedDataParallel(torch.compile(model))`, with the given backend.

| wrap | architectures | clean | same codes as plain DDP | other codes |
|---|---|---|---|---|
"""
UNLIKE = """
Of the compiled ones, {same} leave the same gradients compiled and uncompiled. Of {apart}, which draw other random
numbers when they are compiled, only the ranks are compared with each other.

A parameter that no rank uses (DDP101, DDP102) is an error under DDP, and a warning under `fully_shard`, which does
not raise. These architectures have different codes:

| architecture | plain DDP, 2 ranks | where | codes there | what it is |
|---|---|---|---|---|
"""
FOOT = """
To check one of them, in a clone with transformers installed:
`ddpcheck report tests.models.catalogue:bert_bare --preload transformers.modeling_utils`; with `fully_shard`, or
compiled: `bert_bare__sharded`, `bert_bare__compiled`. `make models` checks all of them and writes this page.
"""


def main(arguments: list[str]) -> int:
    """Check, compare, write."""
    parser = argparse.ArgumentParser(prog="python -m tests.models")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--wrap", choices=WRAPS, default="")
    parser.add_argument("--world-size", type=int, default=2)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if asked.names:
        return 1 if check_all(Run(asked.wrap, asked.world_size, asked.names))[1] else 0
    done = {run: check_all(run) for run in (PLAIN, *OTHERS)}
    if any(failed for _, failed in done.values()):
        return 1
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page({run: reports for run, (reports, _) in done.items()}), encoding="utf-8")
    print(f"written: {PAGE.relative_to(PAGE.parents[1])}")
    return 0


def check_all(run: Run) -> tuple[dict[str, Report], int]:
    """The reports on the architectures of `run`, and on how many of them ddpcheck and the oracle do not agree."""
    reports: dict[str, Report] = {}
    failed = 0
    for name in run.names:
        begun = time.perf_counter()
        reports[name] = report_on(name, run.world_size, wrap=run.wrap)
        wrong = disagreements(name, reports[name], find_truth(CATALOGUE[name], run.world_size), run.wrap)
        failed += bool(wrong)
        print(f"{name:20} {time.perf_counter() - begun:5.1f} s  {'; '.join(wrong) or 'as the oracle says'}", flush=True)
    where = f"{run.wrap or 'plain DDP'}, {run.world_size} ranks"
    print(f"{where}: {len(reports)} architectures, {failed} on which ddpcheck and the oracle do not agree")
    return reports, failed


def page(runs: Mapping[Run, Mapping[str, Report]]) -> str:
    """The whole of docs/models.md."""
    reports = runs[PLAIN]
    clean = [name for name, report in reports.items() if not report.findings]
    errors = [name for name, report in reports.items() if report.at_or_above(Severity.ERROR)]
    some = len(reports) - len(clean) - len(errors)
    counts = {"count": len(reports), "good": len(clean), "bad": len(errors), "some": some, "samples": SAMPLES}
    lines = HEAD.format(**counts, transformers=importlib.metadata.version("transformers")).splitlines()
    for name, report in reports.items():
        entry = CATALOGUE[name]
        for code, why in entry.expected.items():
            codes = ("DDP104", "DDP105") if code == "DDP104" else (code,)
            found = [finding for finding in report.findings if finding.code in codes]
            lines.append(f"| {entry.title} | {code} | {found[0].severity.value} | {why} |")
    lines += MIDDLE.splitlines()
    by_family = itertools.groupby(reports, key=lambda name: CATALOGUE[name].family)
    for family, members in by_family:
        of_family = list(members)
        good = "; ".join(CATALOGUE[name].title for name in of_family if name in clean)
        bad = "; ".join(CATALOGUE[name].title for name in of_family if name not in clean)
        lines.append(f"| {family} | {good} | {bad} |")
    lines += [*in_other_wraps({run: runs[run] for run in OTHERS}), *FOOT.splitlines()]
    return "\n".join(lines) + "\n"


def in_other_wraps(runs: Mapping[Run, Mapping[str, Report]]) -> list[str]:
    """The section on the same architectures in other wraps."""
    versions = {"date": datetime.date.today(), "torch": torch.__version__.partition("+")[0]}
    lines = OTHER_WRAPS.format(**versions, transformers=importlib.metadata.version("transformers")).splitlines()
    for run, reports in runs.items():
        same = sum(run.expected(name) == CATALOGUE[name].expected for name in reports)
        clean = sum(not report.findings for report in reports.values())
        lines.append(f"| {run.title} | {len(reports)} | {clean} | {same} | {len(reports) - same} |")
    compiled = [report for run, reports in runs.items() if run.names is not CATALOGUE for report in reports.values()]
    same = sum(any("leaves the same gradients" in note for note in report.world["notes"]) for report in compiled)
    lines += UNLIKE.format(same=same, apart=len(compiled) - same).splitlines()
    for entry in CATALOGUE.values():
        under = ", ".join(entry.expected) or "clean"
        for key, codes in entry.unlike.items():
            where = key.replace("sharded", "`fully_shard`") + (" ranks" if " on " in key else "")
            lines += [f"| {entry.title} | {under} | {where} | {code} | {why} |" for code, why in codes.items()]
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
