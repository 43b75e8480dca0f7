"""`ddpcheck run`: the script runs as under torchrun, and what is wrong with it is found."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ddpcheck import cli
from ddpcheck.cli.run import code_of_first
from ddpcheck.findings.evidence import Entry
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.wording import make_finding
from ddpcheck.run.ending import Ending, judge_ending
from ddpcheck.run.hang_watch import Hang
from ddpcheck.run.script_report import report_on_script
from ddpcheck.stream.entries import DDP_BACKWARD, ExitCalled, ProgramEnded, RankRaised, RankStarted
from ddpcheck.stream.rank_log import RankLog, RankTrace, read_logs
from ddpcheck.worlds.failures import exception_data
from tests.faultsuite.recorded_scripts import NOT_COMPARED
from tests.faultsuite.scripts_page import assert_expected, expected_of, options_of
from tests.forked_run import run_forked
from tests.run.scripts import BEGIN, END, run_script
from tests.tiers import first_of_each, one_of, share

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "scripts"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))
PROGRAM = str(ROOT / "tests" / "run_program.py")


DDPCHECK, TORCHRUN = ("ddpcheck", "run"), ("torch.distributed.run",)


def run(launcher: Sequence[str], *command: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Run it, once more where gloo has aborted a healthy process at its exit, as it now and then does."""
    with_root = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-m", *launcher, "--standalone", f"--nproc-per-node={ranks}", *command],
            env={**os.environ, "PYTHONPATH": with_root, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            cwd=ROOT,
            check=False,
        )
        if "terminate called without an active exception" not in ended.stderr:
            break
    return ended


# A healthy script

WITHOUT_NUMPY = """
net = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
data = TensorDataset(torch.randn(32, 4))
torch.manual_seed(RANK)
for (batch,) in DataLoader(data, batch_size=4, sampler=DistributedSampler(data), num_workers=1):
    optimizer.zero_grad()
    net(nn.functional.dropout(batch)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_healthy_script_gives_its_own_output_and_exit_code() -> None:
    watched, plain = (run(launcher, PROGRAM, "plain") for launcher in (DDPCHECK, TORCHRUN))
    assert sorted(watched.stdout.splitlines()) == sorted(plain.stdout.splitlines()), watched.stderr
    assert watched.returncode == 0
    assert watched.stderr.endswith("ddpcheck: clean: 2 ranks (gloo), Sequential (12 steps)\n")


@pytest.mark.slow
def test_a_script_is_watched_under_another_launcher_and_where_numpy_is_missing_which_torch_does_not_require(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('there is none')")
    (tmp_path / "train.py").write_text(BEGIN + WITHOUT_NUMPY + END)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    watched = run(TORCHRUN, "-m", "ddpcheck.monitor", str(tmp_path / "train.py"))
    assert watched.returncode == 0, watched.stderr
    assert watched.stderr.endswith("ddpcheck: clean: 2 ranks (gloo), Linear (4 steps)\n")


@pytest.mark.slow
def test_healthy_loops_that_look_like_faults_are_clean() -> None:
    """Under Join, post-local SGD and PowerSGD not every step is compared, which is told."""
    watched = run_forked(str(ROOT / "tests" / "healthy_loops.py"))
    assert watched.returncode == 0 and "no findings, but 3 of " in watched.stderr, watched.stderr
    assert "checks were not made: replicas, reducer, optimizers" in watched.stderr, watched.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "numbers"), [("healthy_evaluations.py", []), ("healthy_numbers.py", [*map(str, one_of(2, range(20)))])]
)
def test_healthy_evaluations_that_look_like_faults_have_no_findings(script: str, numbers: list[str]) -> None:
    """They also show numbers that are of no evaluation, or of one rank's training, which are not compared."""
    watched = run_forked(f"tests/{script}", *numbers)
    assert watched.returncode == 0 and "checks was not made: evaluation" in watched.stderr, watched.stderr
    assert "no findings, but 1 of " in watched.stderr, watched.stderr


LAYERS_BY_HAND = {("DDP503", "2.weight", "2.bias"), ("DDP503", "3.weight", "3.bias")}
FAULTS_BY_HAND = LAYERS_BY_HAND | {("DDP502", "no_sync"), ("DDP512", "lock"), ("DDP806", "all_reduce")}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "faults"), [("healthy", set()), ("faulty", FAULTS_BY_HAND)])
def test_what_scripts_do_by_hand(kind: str, faults: set[tuple[str, ...]], tmp_path: Path) -> None:
    findings = run_script(tmp_path, ROOT / "tests" / "by_hand.py", kind).findings
    assert {(finding["code"], *finding["subjects"]) for finding in findings} == faults


@pytest.mark.slow
def test_healthy_loops_of_shards_are_clean() -> None:
    watched = run_forked(str(ROOT / "tests" / "healthy_shards.py"))
    assert watched.returncode == 0 and "ddpcheck: clean: 2 ranks (gloo), " in watched.stderr, watched.stderr


@pytest.mark.slow
def test_what_a_hang_leaves_for_the_flight_recorder_gives_the_same_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    run_forked("--check-timeout=3", f"--check-flight-recorder={tmp_path}", "examples/scripts/uneven_batches.py")
    assert cli.main(["hang", str(tmp_path)]) == 4
    shown = capsys.readouterr()
    assert "DDP405 uneven-iterations" in shown.out and "examples/scripts/uneven_batches.py:37" in shown.out
    importlib.import_module("torch.distributed.flight_recorder.fr_trace").main([str(tmp_path)])
    assert not shown.err and "Traceback" not in capsys.readouterr().err


# Faults


STARTED_ANEW = ("heads_from_set", "labels_from_set")
"""Scripts on ranks that torchrun starts, which have hash seeds of their own."""


def report_on(tmp_path: Path, script: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    file, path = tmp_path / "report.json", f"examples/scripts/{script}.py"
    command = ("--check-timeout=3", f"--check-output={file}", *options_of(ROOT / path), path, *arguments)
    ended = run(DDPCHECK, *command) if script in STARTED_ANEW else run_forked(*command)
    return ended.returncode, json.loads(file.read_text())


ONE_OF_EACH_CODE = first_of_each(SCRIPTS, lambda script: [expected_of(FOLDER / f"{script}.py")["code"]])
"""`make scripts` runs all scripts, and all of their twins."""


ALWAYS = ("labels_from_set", "own_normaliser")


@pytest.mark.parametrize("script", share(dict.fromkeys([*ALWAYS, *one_of(10, ONE_OF_EACH_CODE)]), ALWAYS[:1]))
def test_the_fault_of_a_script_is_found(tmp_path: Path, script: str) -> None:
    code, report = report_on(tmp_path, script)
    assert_expected(FOLDER / f"{script}.py", code, report)


@pytest.mark.slow
@pytest.mark.parametrize("script", one_of(20, SCRIPTS))
def test_its_fixed_twin_is_clean(tmp_path: Path, script: str) -> None:
    code, report = report_on(tmp_path, script, "--fixed")
    assert (code, report["findings"]) == (0, [])
    lacking = {check["name"] for check in report["checks"] if check["status"] != "passed"}
    assert lacking == NOT_COMPARED.get(f"examples/scripts/{script}.py", set()), report["checks"]


# Logs


def test_the_log_of_a_rank_that_was_killed_in_the_middle_of_a_write_is_read(tmp_path: Path) -> None:
    log = RankLog(tmp_path, RankStarted(1, 2, "gloo"))
    log.count(0, 3, 2)
    (file,) = tmp_path.glob("*.log")
    with file.open("ab") as more:
        more.write(b"\x80\x05\x95")
    (rank,) = read_logs(tmp_path)
    assert (rank.started.rank, rank.entries, rank.counts[0]) == (1, [], (3, 2))


# Endings, from logs


IN_BARRIER = """Current thread 0x1 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 5356 in barrier
  File "/home/me/train.py", line 41 in main
"""
AT_WORK = """Current thread 0x1 (most recent call first):
  File "/home/me/data.py", line 7 in read
"""
FAULT = """Fatal Python error: Aborted

Current thread 0x1 (most recent call first):
  File "{}", line 41 in {}
"""
ABORTED = FAULT.format("/x/train.py", "main")
IN_ENGINE = FAULT.format(f"{os.path.dirname(torch.__file__)}/autograd/graph.py", "_engine_run_backward")
OF_THREAD = ABORTED.replace("Current thread", "Thread")
CUT_OFF = f"Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n  File {ABORTED}"


def description(error: BaseException, **changes: None) -> Any:
    return {**exception_data(error, "", ""), **changes}


def wrapped(error: Exception) -> BaseException:
    try:
        raise RuntimeError("training failed") from error
    except RuntimeError as raised:
        return raised


CLOSED, OF_SCRIPT = RuntimeError("Connection closed by peer"), ValueError("of the script")
LOST, RAISED, ENDED = RankRaised(description(CLOSED)), RankRaised(description(OF_SCRIPT)), ProgramEnded()
WRAPPED = [RankRaised(description(wrapped(error), exception=None)) for error in (CLOSED, OF_SCRIPT)]
HANDLED = [ExitCalled(("train.py:99",), handled=description(error, exception=None)) for error in (CLOSED, OF_SCRIPT)]
EXITS = ExitCalled(("train.py:99",), "os._exit")
HANG = Ending(4, hang=Hang(60.0, {0: IN_BARRIER, 1: IN_BARRIER}))
OF_TWO, IN_ALL = Call("all_reduce", "1", (0, 1)), Hang(60.0, dict.fromkeys(range(3), IN_BARRIER))
MANY = ["all_reduce"] * 3000  # more than a ring keeps


class Stack(NamedTuple):
    text: str


def passes(*numbers: int) -> list[Call]:
    return [Call(DDP_BACKWARD, "0", (0, 1), place=f"forward pass {n}", location="train.py:9") for n in numbers]


def logs(folder: Path, *ranks: Sequence[str | Call | Entry | Stack]) -> list[RankTrace]:
    """Write the logs of ranks: calls in the order given, other entries, and what is on the stack."""
    for rank, items in enumerate(ranks):
        log = RankLog(folder, RankStarted(rank, len(ranks), "gloo"))
        for item in items:
            if isinstance(item, Stack):
                log.path.with_suffix(".stack").write_text(item.text)
            elif isinstance(item, str):
                log.add_call(Call(item, "0", tuple(range(len(ranks))), location=f"train.py:{len(item)}"))
            elif isinstance(item, Call):
                log.add_call(item)
            else:
                log.add(item)
    return read_logs(folder)


CALLS = ["barrier", "all_reduce"]


@pytest.mark.parametrize(
    ("ranks", "ending", "expected", "words"),
    [
        # Hangs
        ([[*MANY, "barrier"], [*MANY, "broadcast"]], HANG, "DDP403", ""),
        ([["all_reduce", "barrier"]] * 2, HANG, "DDP402", ""),
        ([[OF_TWO, "barrier"], [OF_TWO, "barrier"], ["barrier"]], Ending(4, hang=IN_ALL), "DDP402", ""),
        ([[*passes(1, 2, 3), "barrier"], [*passes(1, 3), "barrier"]], HANG, "DDP508 1", "forward pass 2"),
        ([[*passes(1, 2), "barrier"], [*passes(1, 3), "broadcast"]], HANG, "DDP403", ""),  # rank 1 has evaluated
        ([[*CALLS, Stack(IN_BARRIER)], ["barrier", Stack(AT_WORK)]], Ending(130, interrupted=True), "", ""),
        # Ends of which no exit code tells
        ([["broadcast", "broadcast", "barrier", ENDED], ["broadcast", "barrier", ENDED]], Ending(), "DDP403", ""),
        ([["broadcast", "barrier", ENDED]] * 2, Ending(), "", ""),
        ([CALLS, ["barrier", "broadcast"]], Ending(1), "DDP403", "ranks 0 and 1 ended without a Python exception"),
        ([CALLS, ["barrier"]], Ending(1), "", ""),
        ([[*CALLS, LOST], ["barrier"]], Ending(9), "DDP404 1", ""),  # the script has started it, and it was killed
        ([[*CALLS, RAISED], ["barrier"]], Ending(9), "DDP401 0", ""),
        # Exceptions
        ([[LOST], [RAISED]], Ending(1, {0: 1, 1: 1}), "DDP401 1", "ValueError: of the script"),
        ([[WRAPPED[0]], [WRAPPED[1]]], Ending(1, {0: 1, 1: 1}), "DDP401 1", ""),
        ([[HANDLED[0], ENDED], [HANDLED[1], ENDED]], Ending(1, {0: 1, 1: 1}), "DDP401 1", "ValueError: of the script"),
        ([[HANDLED[0], ENDED], [HANDLED[1], ENDED]], Ending(), "", ""),
        ([["all_reduce", LOST], ["all_reduce", ENDED]], Ending(1, {0: 1}), "DDP401 0", "waiting for a call of rank 1"),
        # Signals and exit codes
        ([["all_reduce", RAISED], ["all_reduce"]], Ending(1, {0: 1, 1: -9}), "DDP401 0", ""),
        ([["all_reduce"]] * 2, Ending(1, {0: 5, 1: 5}), "", ""),
        ([["all_reduce"]] * 2, Ending(1, {1: -9}), "DDP404 1", ""),
        ([[*CALLS, LOST], ["barrier", EXITS]], Ending(1, {0: 1}), "DDP404 1", "Rank 1 calls os._exit"),
        ([[*CALLS, LOST], ["barrier", EXITS]], Ending(1, {0: 1, 1: 5}), "DDP404 1", "called os._exit"),
        # What is on the stack of a rank that a signal has ended
        ([[*CALLS, LOST], ["barrier", Stack(ABORTED)]], Ending(1, {0: 1, 1: -6}), "DDP404 1", "at train.py:41"),
        ([[*CALLS, LOST], ["barrier", Stack(IN_ENGINE)]], Ending(1, {0: 1, 1: -6}), "DDP403", ""),  # gloo aborts there
        ([[*CALLS, LOST], ["barrier", Stack(OF_THREAD)]], Ending(1, {0: 1, 1: -6}), "DDP403", ""),
        ([[*CALLS, LOST], ["barrier", Stack(CUT_OFF)]], Ending(1, {0: 1, 1: -11}), "DDP403", ""),
        ([[*CALLS, LOST], ["barrier", Stack(AT_WORK)]], Ending(1, {0: 1, 1: -15}), "DDP404 1", "at None"),
    ],
)
def test_the_cause_of_an_ending(
    ranks: list[list[str | Call | Entry | Stack]], ending: Ending, expected: str, words: str, tmp_path: Path
) -> None:
    findings = judge_ending(logs(tmp_path, *ranks), ending, [])
    names = [" ".join(map(str, (finding.code, *finding.ranks))) for finding in findings]
    assert len(names) == bool(expected) and all(name.startswith(expected) for name in names), names
    for finding in findings:
        evidence = "; ".join(finding.evidence)
        assert words in f"at {finding.location}: {finding.message} {evidence} {finding.what_to_do}"
        assert finding.code != "DDP404" or "had finished" not in evidence


def test_a_hang_leaves_the_collectives_of_the_ranks_in_the_report(tmp_path: Path) -> None:
    ranks = logs(tmp_path, ["all_reduce", "barrier"], ["all_reduce"])
    ending = Ending(4, hang=Hang(60.0, {0: IN_BARRIER, 1: AT_WORK}))
    (timeline,) = report_on_script("train.py", ending, ranks).timelines
    waits, works = timeline.ranks
    assert (waits.waiting, waits.waits_for, waits.at_end) == (True, (1,), "waits in barrier at train.py:41")
    assert (works.waiting, works.waits_for) == (False, ()) and "still" in works.at_end
    assert report_on_script("train.py", Ending(), ranks).timelines == ()


@pytest.mark.parametrize(("code", "codes"), [("DDP104", []), ("DDP512", ["DDP403"])])
def test_a_hang_is_told_unless_a_finding_is_its_reason(tmp_path: Path, code: str, codes: list[str]) -> None:
    ranks = logs(tmp_path, ["all_reduce", "barrier"], ["all_reduce", "broadcast"])
    findings = judge_ending(ranks, HANG, [make_finding(code, ("a",), "It is so.")])
    assert [finding.code for finding in findings] == codes


@pytest.mark.parametrize("codes", [{1: -6}, {0: -15, 1: -6}, {0: 1, 1: -6}])
def test_a_process_that_gloo_aborts_at_its_exit_is_told_as_that(tmp_path: Path, codes: dict[int, int]) -> None:
    report = report_on_script("train.py", Ending(134, codes), logs(tmp_path, *[["all_reduce", ENDED]] * 2))
    assert ("rank 1 ended by SIGABRT" in report.checks[0].detail) == (1 not in codes.values())
    assert report.checks[0].status == "error"


def test_a_rank_that_torchrun_ends_is_no_cause(tmp_path: Path) -> None:
    ranks = logs(tmp_path, ["barrier", ENDED], ["barrier", LOST], ["barrier"])
    assert all(finding.ranks != (2,) for finding in judge_ending(ranks, Ending(1, {1: 1, 2: -15}), []))


AT_99 = ("train.py:7", "train.py:99")


@pytest.mark.parametrize(
    ("end", "called", "exit_of"),
    [
        (None, "sys.exit", None),  # which was caught
        (ProgramEnded("end"), "", None),
        (ProgramEnded("end"), "sys.exit", None),
        (ProgramEnded("call", "train.py:99"), "sys.exit", ("sys.exit", AT_99)),
        (ProgramEnded("call", "train.py:98"), "sys.exit", ("SystemExit", ())),  # another one was caught before
        (ProgramEnded("raise", "train.py:99"), "", ("SystemExit", ("train.py:99",))),
        (ProgramEnded("end"), "os._exit", ("os._exit", AT_99)),
    ],
)
def test_what_has_ended_a_rank(
    end: ProgramEnded | None, called: str, exit_of: tuple[str, tuple[str, ...]] | None, tmp_path: Path
) -> None:
    (rank,) = logs(tmp_path, [entry for entry in (called and ExitCalled(AT_99, called), end) if entry])
    assert (rank.exit_call and (rank.exit_call.function, rank.exit_call.lines)) == exit_of


OWN_HOOK = """
sys.excepthook = lambda kind, error, trace: print("shown otherwise")
dist.barrier()
if RANK == 1:
    raise ValueError("of the script")  # here
dist.barrier()
"""


@pytest.mark.slow
def test_an_exception_is_told_where_the_script_has_a_hook_of_its_own(tmp_path: Path) -> None:
    ended = run_script(tmp_path, OWN_HOOK)
    (finding,) = ended.findings
    assert (finding["code"], finding["ranks"]) == ("DDP401", [1]) and ended.places[0].endswith("# here"), finding
    assert "ValueError: of the script" in finding["message"] and "shown otherwise" in ended.stdout


class Failed(NamedTuple):
    pid: int
    exitcode: int
    message: object
    timestamp: int = 7


@pytest.mark.parametrize(
    ("of_lost", "of_other", "expected"),
    [
        (-15, Failed(1, -11, "Signal 11 received"), 139),  # the agent ended who had lost it
        (1, Failed(1, -9, "Signal 9 received", 8), 137),
        (-15, Failed(1, 3, "To enable traceback see"), 3),
        (1, Failed(1, 1, {"message": "ValueError: of the script"}), 1),
        (-15, Failed(1, -15, "Signal 15 received"), 1),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed_first(of_lost: int, of_other: Failed, expected: int) -> None:
    lost = Failed(0, of_lost, {"message": "RuntimeError: Connection closed by peer"})
    assert code_of_first({0: lost, 1: of_other}) == expected
