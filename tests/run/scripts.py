"""Scripts under `ddpcheck run`: what those of tests begin and end with, and what is known of one that has run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forked_run import ROOT, run_forked

BEGIN = """\
import contextlib, json, os, random, sys, threading, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

HOW = " ".join(sys.argv[1:])
dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
"""
END = "\ndist.destroy_process_group()\n"


@dataclass(frozen=True)
class ScriptRun:
    """How a script has ended, what it and `ddpcheck run` have printed, and the report."""

    code: int
    stdout: str
    stderr: str
    report: dict[str, Any]
    lines: list[str]

    @property
    def findings(self) -> list[dict[str, Any]]:
        findings: list[dict[str, Any]] = self.report["findings"]
        return findings

    @property
    def codes(self) -> list[str]:
        return [finding["code"] for finding in self.findings]

    @property
    def checks(self) -> dict[str, tuple[str, str]]:
        """By check line its status and its sentence."""
        return {check["name"]: (check["status"], check["detail"]) for check in self.report["checks"]}

    @property
    def places(self) -> list[str]:
        """The lines of the script at which its findings are."""
        return [self.lines[finding["location"]["line"] - 1] for finding in self.findings]


def run_script(
    folder: Path, script: str | Path, *arguments: str, options: tuple[str, ...] = (), ranks: int = 2, **variables: str
) -> ScriptRun:
    """Run a script, of which a text is put between `BEGIN` and `END`, on ranks of `run_forked`."""
    report, path = folder / "report.json", folder / "train.py"
    if isinstance(script, Path):
        path = script
    else:
        path.write_text(BEGIN + script + END, encoding="utf-8")
    command = (f"--check-output={report}", *options, str(path), *arguments)
    ended = run_forked(*command, ranks=ranks, cwd=ROOT if path is script else folder, **variables)
    assert report.exists(), ended.stderr
    made = json.loads(report.read_text(encoding="utf-8"))
    return ScriptRun(ended.returncode, ended.stdout, ended.stderr, made, path.read_text(encoding="utf-8").splitlines())
