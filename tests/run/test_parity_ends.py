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
from collections.abc import Iterator, Sequence
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
from tests.tiers import one_of

GIVEN = argparse.Namespace(check_parity_batch=0, check_parity_steps=0, check_timeout=60.0)
NOT_COMPARED = "not compared with a single process: "
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


def test_what_a_single_process_has_to_hold_is_said_before(tmp_path: Path) -> None:
    said = ParityRuns(GIVEN, tmp_path, lambda *_: Ending()).begin(ranks(size=3))
    assert "which holds the batches of 3 ranks together (up to 18 samples), for 60 s at most" in said


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
import os, sys, time, resource
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
if how == "full" and not alone:
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
if how == "refuses":
    assert dist.get_world_size() > 1, "one rank has nobody to learn from"
weights = torch.arange(1.0, 701).reshape(700, 1) / 700
X = torch.randn(48, 700, generator=torch.Generator().manual_seed(1))
data = TensorDataset(X, X @ weights)
model = DistributedDataParallel(nn.Linear(700, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
sampler = DistributedSampler(data, seed=int(first_start))
torch.manual_seed(11 + dist.get_rank())
for step, (x, y) in enumerate(DataLoader(data, batch_size=4, sampler=sampler)):
    nn.functional.mse_loss(model(x + 0.1 * torch.randn_like(x)), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    if alone and step == 1:
        print("alone", flush=True)
        if how == "waits":
            while not os.path.exists("of-another-rank"):
                time.sleep(0.01)
        if how == "killed":
            os.kill(os.getpid(), 9)
    if first_start and step == 3:
        raise RuntimeError("the first start fails")
if dist.get_rank() == 0:
    print(f"rows of the last batch: {len(x)}")
dist.destroy_process_group()
"""


def ran(folder: Path, how: str, *options: str) -> tuple[subprocess.CompletedProcess[str], tuple[str, str]]:
    """How a run with ranks of `run_forked` has ended, with its check line on the single process."""
    (folder / "train.py").write_text(TRAINS)
    (temporary := folder / "temporary").mkdir()
    output = folder / "report.json"
    options = ("--check-parity", f"--check-output={output}", *options)
    done = run_forked(*options, "train.py", how, cwd=folder, TMPDIR=str(temporary))
    assert not [*temporary.glob(f"{FOLDER}*")] and "rows of the last batch" in done.stdout, done.stderr
    made = json.loads(output.read_text())
    assert made["findings"] == [] and made["checks"][0]["status"] == "passed"
    return done, next((check["status"], check["detail"]) for check in made["checks"] if check["name"] == "parity")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("refuses", "it ended with exit code 1: AssertionError: one rank has nobody to learn from at train.py:18"),
        ("killed", f"it was ended by signal 9{MORE_MEMORY}"),
        ("waits", "s, and was stopped at train.py:"),
    ],
)
def test_the_report_on_the_ranks_outlives_a_single_process(how: str, said: str, tmp_path: Path) -> None:
    done, (status, detail) = ran(tmp_path, how, "--check-timeout=2", "--debug")
    assert done.returncode == 0 and status == "skipped"
    assert detail.startswith(NOT_COMPARED) and said in detail
    assert ("alone" in done.stderr) == (how != "refuses")  # what a failed run has printed


@pytest.mark.slow
def test_a_full_disk_ends_the_recording_of_samples_and_not_the_training(tmp_path: Path) -> None:
    done, (status, detail) = ran(tmp_path, "full")
    assert done.returncode == 0 and status == "skipped"
    assert "gradients of 1 step equal those of a single process" in detail, detail
    assert detail.endswith("recorded for 1 backward pass only: their file could not be written: File too large")


@pytest.mark.exhaustive
def test_smaller_batches_are_those_of_both_runs(tmp_path: Path) -> None:
    done, (status, detail) = ran(tmp_path, "", "--check-parity-batch=3")
    assert "rows of the last batch: 3" in done.stdout and "(up to 6 samples)" in done.stderr
    assert status == "passed" and detail.startswith("gradients of 8 steps equal")
    assert detail.endswith("with batches of at most 3 samples (--check-parity-batch)")


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    """`ddpcheck run --check-parity` with ranks of torchrun, in a process group of its own."""
    (folder / "train.py").write_text(TRAINS)
    (folder / "temporary").mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "ddpcheck", "run", "--standalone", "--nproc-per-node=2", "--check-parity", *words],
        env={**os.environ, "TMPDIR": f"{folder}/temporary", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def processes_below(folder: Path) -> Iterator[int]:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"TMPDIR={folder}".encode() in (process / "environ").read_bytes():
                yield int(process.name)
        except OSError:  # it has ended
            pass


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", one_of(3, ["to the group", "to ddpcheck", "to end"]))
def test_an_interrupted_single_process_leaves_the_report(how: str, tmp_path: Path) -> None:
    process = started(tmp_path, "train.py", "waits")
    logs = f"temporary/{FOLDER}*/output/**/std*.log"
    while process.poll() is None and not any("alone" in path.read_text() for path in tmp_path.glob(logs)):
        time.sleep(0.1)
    number = signal.SIGTERM if how == "to end" else signal.SIGINT
    (os.killpg if how == "to the group" else os.kill)(process.pid, number)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert f"{NOT_COMPARED}it was interrupted" in " ".join(said.split()) and "no findings, but 1 of" in said
    assert [*processes_below(tmp_path)] == [] and not [*tmp_path.glob(f"temporary/{FOLDER}*")]


@pytest.mark.slow
def test_the_samples_of_a_module_are_those_of_the_last_start_and_its_record_can_be_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--max-restarts=1", "--check-format=text", "--check-record=run.gz")
    process = started(tmp_path, *options, "-m", "train", "restart")
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and "the first start fails" in printed, printed
    assert "gradients of 6 steps equal those of a single process" in " ".join(printed.split())
    assert cli.main(["render", str(tmp_path / "run.gz")]) == 0
    assert "no findings" in capsys.readouterr().out
