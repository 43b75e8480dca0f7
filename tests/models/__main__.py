"""`python -m tests.models`: checks every architecture, holds each verdict against the oracle, writes docs/models.md.

Names as arguments check these and write nothing. Exit code 1 where ddpcheck and the oracle do not agree.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import sys
import time
from pathlib import Path

import torch

from ddpcheck.findings.report import Report
from ddpcheck.findings.severity import Severity
from tests.models.batches import SAMPLES
from tests.models.catalogue import CATALOGUE
from tests.models.comparing import disagreements, report_on
from tests.models.oracle import find_truth

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


HEAD = """\
<!-- Written by `make models`. -->
# What ddpcheck says of {count} well-known architectures

Each is a class of transformers {transformers}, built from a tiny configuration with random weights, in train mode with
its own dropout, trained for 3 steps on 2 ranks with a global batch of {samples} samples and, where it has one, its own
loss. Labels have the same count on every rank where nothing else is said, so that a finding says something about the
architecture and not about the batch.

**{good} are clean.** Under plain DDP {bad} raise, hang or train wrongly as they are built here (errors), and {some} do
something else that one may want to know (warnings). Every verdict was held against an oracle that shares no code with
ddpcheck (`tests/models/oracle.py`): plain autograd in one process, over several seeds, in float64 where the kernels
have it.

## Findings

| architecture | finding | severity | what it is |
|---|---|---|---|
"""
MIDDLE = """
What to do about each: `ddpcheck explain CODE`. In general: build the model without the part that is not used (often an
option, such as `add_pooling_layer=False`), freeze it, or pass `find_unused_parameters=True` where layers are skipped by
chance.

## All

| | clean | with findings |
|---|---|---|
"""
FOOT = """
One of them, in a clone with transformers installed:
`ddpcheck report tests.models.catalogue:bert_bare --preload transformers.modeling_utils`. All of them, and this page:
`make models`.
"""


def main(names: list[str]) -> int:
    """Check, compare, write."""
    torch.set_num_threads(1)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    reports: dict[str, Report] = {}
    wrong: dict[str, list[str]] = {}
    for name in names or CATALOGUE:
        begun = time.perf_counter()
        reports[name] = report_on(name)
        wrong[name] = disagreements(name, reports[name], find_truth(CATALOGUE[name]))
        verdict = "; ".join(wrong[name]) or "as the oracle says"
        print(f"{name:20} {time.perf_counter() - begun:5.1f} s  {verdict}", flush=True)
    failed = [name for name, found in wrong.items() if found]
    print(f"{len(reports)} architectures, {len(failed)} on which ddpcheck and the oracle do not agree")
    if not names and not failed:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(reports), encoding="utf-8")
        print(f"written: {PAGE.relative_to(PAGE.parents[1])}")
    return 1 if failed else 0


def page(reports: dict[str, Report]) -> str:
    """The whole of docs/models.md."""
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
    lines += FOOT.splitlines()
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
