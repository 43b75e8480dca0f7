"""`ddpcheck run --check-parity`, if a run does not come to its end: a sentence, and the report on the ranks."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpcheck import cli
from ddpcheck.cli import run as command
from ddpcheck.findings.evidence.parity import ParityEnded, ParityPass, ParityStep
from ddpcheck.run.ending import Ending
from ddpcheck.run.hang_watch import Hang
from ddpcheck.run.parity_run import ParityRuns, SingleRun
from ddpcheck.stream.entries import RankRaised, RankStarted, WatchingFailed
from ddpcheck.stream.rank_log import FOLDER, RankLog, RankTrace
from ddpcheck.worlds.failures import exception_data
from tests.forked_run import ROOT, run_forked
from tests.run.test_run import DDPCHECK

GIVEN = argparse.Namespace(check_parity_batch=0, check_parity_steps=0, check_timeout=60.0)
MORE_MEMORY = (
    "; a global batch in one process needs more memory, and --check-parity-batch makes the batches of all runs smaller"
)
RAISED = {**exception_data(IndexError("no part\nof rank 1"), "", ""), "exception": None, "location": "a.py:3"}
STEP = ParityStep(0, 0, None, (1.0,), (1.0,), (), (0.1,), ())


def ranks(*, size: int = 2, full: str = "", full_at: int = 0) -> list[RankTrace]:
    entries = [ParityPass("a.py:1", 17, 20, True, 3), ParityPass("a.py:4", 5, 5, False, 1), STEP]
    end = ParityEnded(2, 2, full_at=full_at, why_full=full)
    return [RankTrace(RankStarted(rank, size, "gloo"), [*entries, end], []) for rank in range(size)]


@pytest.mark.parametrize(
    ("ending", "left", "nodes", "why"),
    [
        (Ending(), ranks(), 1, ""),
        (Ending(3, {0: 3}), ranks(), 1, "the run on ranks ended with exit code 3"),
        (Ending(130, interrupted=True), ranks(), 1, "the run on ranks was interrupted"),
        (Ending(4, hang=Hang(60, {})), ranks(), 1, "the ranks waited for each other"),
        (Ending(), ranks(), 2, "the ranks have run on 2 machines, and left their samples there"),
        (Ending(), ranks()[1:], 1, "not all ranks have left a log here"),
        (Ending(), ranks(size=1), 1, "it has run on one rank"),
        (Ending(), ranks(full="No space left on device"), 1, "samples are not recorded: No space left on device"),
        (Ending(), ranks(full="No space left on device", full_at=1), 1, ""),
    ],
)
def test_there_is_no_second_run_without_something_to_compare(
    ending: Ending, left: Sequence[RankTrace], nodes: int, why: str, tmp_path: Path
) -> None:
    assert ParityRuns(GIVEN, tmp_path, lambda *_: Ending()).why_not(left, ending, nodes) == why


class Script:
    """In the place of torchrun's agent: a process that prints, leaves a log, and ends in some way."""

    def __init__(self, ending: Ending, error: str = "", *entries: Any, joins: bool = True) -> None:
        self.ending, self.error, self.entries, self.joins = ending, error, entries, joins
        self.times = 0

    def __call__(self, given: argparse.Namespace, folder: Path, limit: float) -> Ending:
        self.times += 1
        (output := Path(given.log_dir, "0")).mkdir(parents=True)
        (output / "stdout.log").write_text("epoch 3\n")
        (output / "stderr.log").write_text(self.error)
        if self.joins:
            log = RankLog(folder, RankStarted(0, 1, "gloo"))
            for entry in self.entries:
                log.add(entry)
        return self.ending


DUMP = 'Current thread 0x01 (most recent call first):\n  File "/a.py", line 3 in f\n'
TRACE = """[rank0]: Traceback (most recent call last):
[rank0]:   File "a.py", line 3, in <module>
[rank0]: RuntimeError: 1 rank is not enough
[rank0]: (of 2)
[W1129 01:16:03 ProcessGroup.cpp:1] Warning: destroy_process_group() was not called
"""


@pytest.mark.parametrize(
    ("script", "why", "times"),
    [
        (Script(Ending(), "", STEP), "", 1),
        (Script(Ending(130, interrupted=True)), "it was interrupted", 1),
        (Script(Ending(1, {0: 1}), TRACE), "it ended with exit code 1: RuntimeError: 1 rank is not enough", 2),
        (Script(Ending(2, {0: 2}), "usage: a.py\na.py: error: no --part\n", joins=False),
         "it ended with exit code 2: a.py: error: no --part", 1),
        (Script(Ending(5, {0: 5})), "it ended with exit code 5: epoch 3", 2),
        (Script(Ending(1, {0: 1}), TRACE, RankRaised(RAISED)),
         "it ended with exit code 1: IndexError: no part at a.py:3", 2),
        (Script(Ending(1, {0: 1}), TRACE.replace("1 rank is not enough", "CUDA out of memory")),
         f"it ended with exit code 1: RuntimeError: CUDA out of memory{MORE_MEMORY}", 2),
        (Script(Ending(137, {0: -9})), f"it was ended by signal 9{MORE_MEMORY}", 1),
        (Script(Ending(139, {0: -11})), "it was ended by signal 11", 1),
        (Script(Ending(4, hang=Hang(5, {0: DUMP}))), "it made no progress for 5 s, and was stopped at a.py:3", 1),
        (Script(Ending(4, hang=Hang(60, {}))), "it has not ended within 60 s, and was stopped", 1),
        (Script(Ending(), joins=False), "no optimizer has stepped in it: the script may start its own processes", 1),
        (Script(Ending(), "", WatchingFailed("", "Samples", ("parity",), 0, "KeyError: 3")),
         "Samples of ddpcheck has failed in it: KeyError: 3", 1),
    ],
)  # fmt: skip
def test_the_end_of_a_single_process_is_a_sentence(
    script: Script, why: str, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runs = ParityRuns(GIVEN, tmp_path, script)
    runs.begin(ranks())
    environment = dict(os.environ)
    made = runs.run(ranks())
    assert made.why_not == why and script.times == times
    assert made.output == f"epoch 3\n{script.error}" and os.environ == environment
    assert not [*tmp_path.glob(f"{FOLDER}*")]


class Runs:
    """In the place of `ParityRuns`: a single process that differs, and further runs that end in some way."""

    def __init__(self, *others: SingleRun) -> None:
        self.rest = [SINGLE, *others]

    def begin(self, _ranks: Any) -> str:
        return "begins"

    def why_not(self, *_given: Any) -> str:
        return ""

    def run(self, _ranks: Any, **_how: Any) -> SingleRun:
        if (run := self.rest.pop(0)) is KEY:
            raise KeyboardInterrupt
        return run


def alone(norm: float, size: int = 1, rank: int = 0) -> RankTrace:
    step = ParityStep(
        0, 0, None, (norm,), (1.0,), (), (0.1,), (), samples=(4 / size, 8 / size), names=("w",), elements=(1,)
    )
    return RankTrace(RankStarted(rank, size, "gloo"), [step, ParityEnded(1, 1)], [])


NOISE = "it differs, perhaps only by noise, but the run that measures noise has failed: "
SINGLE, KEY = SingleRun([alone(1.0)]), SingleRun()
FAILED = SingleRun(why_not="it ended with exit code 1", has_raised=True)
LATE = SingleRun(why_not="it has not ended within 60 s, and was stopped")


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ([SINGLE, FAILED], ""),
        ([FAILED], f"{NOISE}{FAILED.why_not}"),
        ([SINGLE, LATE], f"{NOISE}{LATE.why_not}"),
        ([KEY], "it was interrupted"),
        ([SINGLE, KEY], "it was interrupted"),
    ],
)
def test_without_a_measure_of_noise_nothing_is_said_to_differ(
    others: list[SingleRun], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "read_logs", lambda _folder: [alone(2.0, 2, rank) for rank in (0, 1)])
    before = signal.getsignal(signal.SIGTERM)
    singles = command.run_single(Runs(*others), tmp_path, Ending(), 1, debug=False)  # type: ignore[arg-type]
    assert singles[0].why_not == why and len(singles) == (1 if why else 3)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_between_two_runs_is_an_interruption(tmp_path: Path) -> None:
    class Ends(Runs):
        def why_not(self, *_given: Any) -> str:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
            return ""

    (made,) = command.run_single(Ends(), tmp_path, Ending(), 1, debug=False)  # type: ignore[arg-type]
    assert made.why_not == "it was interrupted"


def test_a_folder_that_has_no_place_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    script = Script(Ending())
    made = ParityRuns(GIVEN, tmp_path, script).run(ranks())
    assert made.why_not == f"its folder in {tmp_path}/none cannot be written: No such file or directory"
    assert not script.times


# Processes

TRAINS = """
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

how, alone = sys.argv[1], "DDPCHECK_PARITY" in os.environ
first_start = how == "restart" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and not alone
torch.manual_seed(7 + first_start)
# gloo may connect to a rank of an earlier start by what that has left in torchrun's store.
place = f"file://{os.getcwd()}/met-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{alone}"
world = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
dist.init_process_group("gloo", init_method=place if how == "restart" else None, **world)
X = torch.randn(48, 7, generator=torch.Generator().manual_seed(1))
data = TensorDataset(X, X.sum(1, keepdim=True))
model = DistributedDataParallel(nn.Linear(7, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
sampler = DistributedSampler(data, seed=int(first_start))
torch.manual_seed(11 + dist.get_rank())
for step, (x, y) in enumerate(DataLoader(data, batch_size=4, sampler=sampler)):
    nn.functional.mse_loss(model(x + 0.1 * torch.randn_like(x)), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    if alone and step == 1 and how == "waits":
        print("alone", flush=True)
        time.sleep(600)
    if first_start and step == 3:
        raise RuntimeError("the first start fails")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_report_on_the_ranks_outlives_a_single_process(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    (temporary := tmp_path / "temporary").mkdir()
    options = ("--check-parity", "--check-output=report.json", "--check-timeout=2", "--debug")
    ended = run_forked(*options, "train.py", "waits", cwd=tmp_path, TMPDIR=str(temporary))
    assert ended.returncode == 0 and "alone" in ended.stderr and not [*temporary.glob(f"{FOLDER}*")]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["findings"] == []
    (detail,) = (check["detail"] for check in report["checks"] if check["status"] == "skipped")
    assert detail.startswith("not compared with a single process: ") and "s, and was stopped at train.py:" in detail


@pytest.mark.slow
def test_the_samples_of_a_module_are_those_of_the_last_start_and_its_record_can_be_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    options = ("--check-parity", "--max-restarts=1", "--check-format=text", "--check-record=run.gz")
    ended = subprocess.run(
        [sys.executable, "-m", *DDPCHECK, "--standalone", "--nproc-per-node=2", *options, "-m", "train", "restart"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=300,
        check=True,
    )
    assert "the first start fails" in ended.stderr
    assert "gradients of 6 steps equal those of a single process" in " ".join(f"{ended.stdout} {ended.stderr}".split())
    assert cli.main(["render", str(tmp_path / "run.gz")]) == 0
    assert "no findings" in capsys.readouterr().out
