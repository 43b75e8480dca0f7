"""`ddpcheck run`: the script runs as under torchrun, and what is wrong with it is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpcheck.cli.run import code_of_first
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.findings.wording import make_finding
from ddpcheck.gather.steps.gradient_distance import sketch
from ddpcheck.run.ending import Ending, judge_ending
from ddpcheck.run.hang_watch import Hang
from ddpcheck.run.script_report import report_on_script
from ddpcheck.stream.entries import DDP_BACKWARD, ExitCalled, ProgramEnded, RankRaised, RankStarted
from ddpcheck.stream.rank_log import RankLog, read_logs
from ddpcheck.worlds.failures import described
from tests.faultsuite.recorded_scripts import NOT_COMPARED
from tests.faultsuite.scripts_page import assert_expected, expected_of, options_of
from tests.forked_run import run_forked
from tests.tiers import first_of_each, one_of, share

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "scripts"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))
PROGRAM = str(ROOT / "tests" / "run_program.py")
ENDINGS = {"plain": 0, "workers": 0, "spawn": 0, "exit": 3, "raises": 1, "hard": 5, "terminated": 7}


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
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
data = TensorDataset(torch.randn(32, 4))
sampler = DistributedSampler(data)
torch.manual_seed(dist.get_rank())
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (batch,) in DataLoader(data, batch_size=4, sampler=sampler, num_workers=1):
        optimizer.zero_grad()
        net(torch.nn.functional.dropout(batch)).square().mean().backward()
        optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", one_of(8, ENDINGS))
def test_a_healthy_script_gives_its_own_output_and_exit_code(ending: str) -> None:
    ranks = 1 if ending == "spawn" else 2
    watched = run(DDPCHECK, PROGRAM, ending, ranks=ranks)
    plain = run(TORCHRUN, PROGRAM, ending, ranks=ranks)
    assert sorted(watched.stdout.splitlines()) == sorted(plain.stdout.splitlines()), watched.stderr
    assert watched.returncode == ENDINGS[ending]
    if ending in ("plain", "workers", "spawn"):
        assert watched.stderr.endswith("ddpcheck: clean: 2 ranks (gloo), Sequential (12 steps)\n")
    else:
        assert f"it exited with code {ENDINGS[ending]}" in watched.stderr
        assert "clean" not in watched.stderr
        assert ("DDP401" if ending == "raises" else "no findings") in watched.stderr
    if ending == "raises":  # torchrun's page says <N/A>
        assert "error_file: <N/A>" in plain.stderr and "error_file: <N/A>" not in watched.stderr
        assert "traceback : " in watched.stderr and "ValueError: of the script" in watched.stderr


@pytest.mark.slow
def test_a_script_is_watched_where_numpy_is_missing_which_torch_does_not_require(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('there is none')")
    (tmp_path / "train.py").write_text(WITHOUT_NUMPY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    watched = run(DDPCHECK, str(tmp_path / "train.py"))
    assert watched.returncode == 0, watched.stderr
    assert watched.stderr.endswith("ddpcheck: clean: 2 ranks (gloo), Linear (8 steps)\n")


@pytest.mark.slow
def test_a_script_that_torchrun_starts_anew_is_watched_anew() -> None:
    watched = run(DDPCHECK, "--max-restarts=1", PROGRAM, "restarted")
    plain = run(TORCHRUN, "--max-restarts=1", PROGRAM, "restarted")
    assert sorted(watched.stdout.splitlines()) == sorted(plain.stdout.splitlines()), watched.stderr
    assert watched.returncode == plain.returncode == 0
    assert watched.stderr.endswith("ddpcheck: clean: 2 ranks (gloo), Sequential (12 steps)\n")


@pytest.mark.slow
def test_healthy_loops_that_look_like_faults_are_clean() -> None:
    """Under Join, post-local SGD and PowerSGD not every step is compared, which is told."""
    watched = run_forked(str(ROOT / "tests" / "healthy_loops.py"))
    assert watched.returncode == 0 and "no findings, but 3 of " in watched.stderr, watched.stderr
    assert "checks were not made: replicas, reducer, optimizers" in watched.stderr, watched.stderr


@pytest.mark.slow
@pytest.mark.parametrize("script", ["healthy_evaluations.py", "healthy_numbers.py"])
def test_healthy_evaluations_that_look_like_faults_have_no_findings(script: str) -> None:
    """They also show numbers that are of no evaluation, or of one rank's training, which are not compared."""
    watched = run_forked(str(ROOT / "tests" / script))
    assert watched.returncode == 0 and "checks was not made: evaluation" in watched.stderr, watched.stderr
    assert "no findings, but 1 of " in watched.stderr, watched.stderr


@pytest.mark.slow
@pytest.mark.parametrize("of", ["healthy", "faulty"])
def test_what_scripts_do_by_hand(of: str, tmp_path: Path) -> None:
    script, file = ROOT / "tests" / "by_hand.py", tmp_path / "report.json"
    run_forked("--check-output", str(file), str(script), of)
    found = json.loads(file.read_text(encoding="utf-8"))["findings"]
    told = {(one["code"], *one["subjects"]) for one in found}
    layers = {("DDP503", "2.weight", "2.bias"), ("DDP503", "3.weight", "3.bias")}
    others = {("DDP502", "no_sync"), ("DDP512", "lock"), ("DDP806", "all_reduce")}
    assert told == (layers | others if of == "faulty" else set())


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "loops"), one_of(2, [(2, []), (4, ["hybrid"])]))
def test_healthy_loops_of_shards_are_clean(ranks: int, loops: Sequence[str]) -> None:
    watched = run_forked(str(ROOT / "tests" / "healthy_shards.py"), *loops, ranks=ranks)
    assert watched.returncode == 0 and f"ddpcheck: clean: {ranks} ranks (gloo), " in watched.stderr, watched.stderr


_SHARDED = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
model = {wrapped}
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for _ in range(3):
    model(torch.ones(2, 4) + dist.get_rank()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
_WRAPPED = {
    True: 'fully_shard(model, mesh=init_device_mesh("cpu", (2,)))',
    False: "torch.nn.parallel.DistributedDataParallel(model)",
}


@pytest.mark.parametrize("shards", share([True, False], []))
def test_the_check_lines_say_what_is_compared_of_shards(shards: bool, tmp_path: Path) -> None:
    script, file = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(_SHARDED.format(wrapped=_WRAPPED[shards]), encoding="utf-8")
    ended = run_forked("--check-output", str(file), str(script))
    report = json.loads(file.read_text(encoding="utf-8"))
    checks = {check["name"]: (check["status"], check["detail"]) for check in report["checks"]}
    assert (ended.returncode, report["findings"]) == (0, [])
    assert checks["ranks"] == ("passed", "2 ranks (gloo), Linear (3 steps)")
    for name in ("parameters", "replicas", "reducer", "loop", "optimizers", "data"):
        assert checks[name][0] == "passed", checks
    assert ("state and gradients of 1 optimizer match" in checks["optimizers"][1]) is not shards
    assert ("values before fully_shard" in checks["replicas"][1]) is shards
    assert report["status"] == "clean"


@pytest.mark.slow
def test_a_script_is_watched_under_another_launcher() -> None:
    watched = run(TORCHRUN, "-m", "ddpcheck.monitor", PROGRAM, "plain")
    plain = run(TORCHRUN, PROGRAM, "plain")
    assert sorted(watched.stdout.splitlines()) == sorted(plain.stdout.splitlines()), watched.stderr
    assert (watched.returncode, watched.stderr.splitlines()[-1]) == (
        0,
        "ddpcheck: clean: 2 ranks (gloo), Sequential (12 steps)",
    )


@pytest.mark.exhaustive
def test_a_hang_under_another_launcher_is_ended_and_told() -> None:
    script = str(ROOT / "examples" / "scripts" / "uneven_batches.py")
    ended = run(TORCHRUN, "-m", "ddpcheck.monitor", "--check-timeout", "3", script)
    assert ended.returncode != 0
    assert "DDP405 uneven-iterations" in ended.stderr and "examples/scripts/uneven_batches.py:37" in ended.stderr


@pytest.mark.slow
def test_what_a_hang_leaves_for_the_flight_recorder_gives_the_same_verdict(tmp_path: Path) -> None:
    run_forked("--check-timeout=3", f"--check-flight-recorder={tmp_path}", "examples/scripts/uneven_batches.py")
    read = [sys.executable, "-m", "ddpcheck", "hang", str(tmp_path)]
    shown = subprocess.run(read, capture_output=True, text=True, check=False, cwd=ROOT, timeout=60)
    assert (shown.returncode, shown.stderr) == (4, "")
    assert "DDP405 uneven-iterations" in shown.stdout and "examples/scripts/uneven_batches.py:37" in shown.stdout
    analysis = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(tmp_path)]
    ended = subprocess.run(analysis, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr


# Faults


STARTED_ANEW = ("barrier_in_save", "heads_from_set", "labels_from_set")
"""Scripts on ranks that torchrun starts: one in `make test`, and those that need ranks with hash seeds of their own."""


def report_on(tmp_path: Path, script: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "report.json"
    own = [one for one in arguments if one == "--fixed"]
    options = [*options_of(FOLDER / f"{script}.py"), *arguments[: len(arguments) - len(own)]]
    command = ("--check-output", str(file), *options, f"examples/scripts/{script}.py", *own)
    ended = run(DDPCHECK, *command) if script in STARTED_ANEW else run_forked(*command)
    return ended.returncode, json.loads(file.read_text())


ONE_OF_EACH_CODE = first_of_each(SCRIPTS, lambda script: [expected_of(FOLDER / f"{script}.py")["code"]])
"""`make scripts` runs all scripts, and all of their twins."""


@pytest.mark.parametrize(
    "script", share(dict.fromkeys(["barrier_in_save", *one_of(10, ONE_OF_EACH_CODE)]), ["barrier_in_save"])
)
def test_the_fault_of_a_script_is_found(tmp_path: Path, script: str) -> None:
    code, report = report_on(tmp_path, script, "--check-timeout", "3")
    assert_expected(FOLDER / f"{script}.py", code, report)


@pytest.mark.slow
@pytest.mark.parametrize("script", one_of(20, SCRIPTS))
def test_its_fixed_twin_is_clean(tmp_path: Path, script: str) -> None:
    code, report = report_on(tmp_path, script, "--fixed")
    assert (code, report["findings"]) == (0, [])
    lacking = {check["name"] for check in report["checks"] if check["status"] != "passed"}
    assert lacking == NOT_COMPARED.get(f"examples/scripts/{script}.py", set()), report["checks"]


# Sketches and logs


@settings(deadline=None)  # the first call starts torch
@given(st.integers(0, 3000), st.integers(0, 99))
def test_a_sketch_is_linear_and_has_the_size_of_the_gradient(elements: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    one, other = torch.randn(2, elements, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(sketch(one) * 0.25 + sketch(other) * 0.75, sketch(one * 0.25 + other * 0.75))
    if elements >= 64:
        assert 0.5 < sketch(one).norm() / one.norm() < 2.0


def test_a_sketch_leaves_the_generator_of_the_script_alone() -> None:
    before = torch.get_rng_state()
    sketch(torch.ones(100))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_log_of_a_rank_that_was_killed_in_the_middle_of_a_write_is_read(tmp_path: Path) -> None:
    log = RankLog(tmp_path, RankStarted(1, 2, "gloo"))
    log.count(0, 3, 2)
    (file,) = tmp_path.glob("*.log")
    with file.open("ab") as more:
        more.write(b"\x80\x05\x95")
    (rank,) = read_logs(tmp_path)
    assert (rank.started.rank, rank.entries, rank.counts[0]) == (1, [], (3, 2))


def test_the_last_start_counts(tmp_path: Path) -> None:
    for restart in (0, 1):
        for rank in (0, 1):
            RankLog(tmp_path, RankStarted(rank, 2, "gloo", restart))
    assert [(one.started.rank, one.started.restart) for one in read_logs(tmp_path)] == [(0, 1), (1, 1)]


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--check-every", "-1", "is a number of steps, or 0 for never, not -1"),
        ("--check-timeout", "0", "is a number of seconds above 0, not 0"),
    ],
)
def test_what_cannot_be_is_one_sentence(option: str, value: str, words: str) -> None:
    ended = run(DDPCHECK, option, value, PROGRAM)
    assert (ended.returncode, ended.stderr) == (2, f"ddpcheck: error: {option} {words}\n")


# Endings, from logs


def rank_log(tmp_path: Path, rank: int, *calls: str) -> RankLog:
    log = RankLog(tmp_path, RankStarted(rank, 2, "gloo"))
    for operation in calls:
        log.add_call(Call(operation, "0", (0, 1), location=f"train.py:{len(operation)}"))
    return log


def stuck(tmp_path: Path, *stacks: str) -> list[str]:
    ending = Ending(4, hang=Hang(60.0, dict(enumerate(stacks))))
    return [finding.code for finding in judge_ending(read_logs(tmp_path), ending, [])]


IN_BARRIER = """Current thread 0x1 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 5356 in barrier
  File "/home/me/train.py", line 41 in main
"""


AT_WORK = """Current thread 0x1 (most recent call first):
  File "/home/me/data.py", line 7 in read
"""


def test_the_collectives_in_which_ranks_part_are_the_cause_of_a_hang(tmp_path: Path) -> None:
    many = ["all_reduce"] * 3000  # more than a ring keeps
    rank_log(tmp_path, 0, *many, "barrier")
    rank_log(tmp_path, 1, *many, "broadcast")
    assert stuck(tmp_path, IN_BARRIER, IN_BARRIER) == ["DDP403"]


def test_a_hang_leaves_the_collectives_of_the_ranks_in_the_report(tmp_path: Path) -> None:
    rank_log(tmp_path, 0, "all_reduce", "barrier")
    rank_log(tmp_path, 1, "all_reduce")
    ranks, ending = read_logs(tmp_path), Ending(4, hang=Hang(60.0, {0: IN_BARRIER, 1: AT_WORK}))
    (timeline,) = report_on_script("train.py", ending, ranks).timelines
    waits, works = timeline.ranks
    assert (waits.waiting, waits.waits_for, waits.at_end) == (True, (1,), "waits in barrier at train.py:41")
    assert (works.waiting, works.waits_for) == (False, ()) and "still" in works.at_end
    assert report_on_script("train.py", Ending(), ranks).timelines == ()


def test_ranks_that_wait_in_the_same_collective_hang_without_a_mismatch(tmp_path: Path) -> None:
    for rank in (0, 1):
        rank_log(tmp_path, rank, "all_reduce", "barrier")
    assert stuck(tmp_path, IN_BARRIER, IN_BARRIER) == ["DDP402"]


@pytest.mark.parametrize(("code", "found"), [("DDP104", []), ("DDP512", ["DDP403"])])
def test_a_hang_is_told_unless_a_finding_is_its_reason(tmp_path: Path, code: str, found: list[str]) -> None:
    rank_log(tmp_path, 0, "all_reduce", "barrier")
    rank_log(tmp_path, 1, "all_reduce", "broadcast")
    ending = Ending(4, hang=Hang(60.0, {0: IN_BARRIER, 1: IN_BARRIER}))
    known = [make_finding(code, ("a",), "It is so.")]
    assert [one.code for one in judge_ending(read_logs(tmp_path), ending, known)] == found


def test_a_rank_that_skips_a_backward_pass_is_the_cause_of_a_hang(tmp_path: Path) -> None:
    forwards = {0: (1, 2, 3), 1: (1, 3)}
    for rank, numbers in forwards.items():
        log = RankLog(tmp_path, RankStarted(rank, 2, "gloo"))
        for number in numbers:
            log.add_call(Call(DDP_BACKWARD, "0", (0, 1), place=f"forward pass {number}", location="train.py:9"))
        log.add_call(Call("barrier", "0", (0, 1)))
    ending = Ending(4, hang=Hang(60.0, dict.fromkeys(forwards, IN_BARRIER)))
    (finding,) = judge_ending(read_logs(tmp_path), ending, [])
    assert (finding.code, finding.ranks) == ("DDP508", (1,)) and "forward pass 2" in finding.message


def test_a_forward_pass_more_on_a_rank_is_no_skipped_backward_pass(tmp_path: Path) -> None:
    for rank, numbers in enumerate([(1, 2), (1, 3)]):  # rank 1 has evaluated in between
        log = RankLog(tmp_path, RankStarted(rank, 2, "gloo"))
        for number in numbers:
            log.add_call(Call(DDP_BACKWARD, "0", (0, 1), place=f"forward pass {number}"))
        log.add_call(Call(("barrier", "broadcast")[rank], "0", (0, 1)))
    assert stuck(tmp_path, IN_BARRIER, IN_BARRIER) == ["DDP403"]


@pytest.mark.parametrize(("more", "found"), [(("broadcast",), ["DDP403"]), ((), [])])
def test_a_broadcast_that_one_rank_makes_is_found_although_nothing_hangs(
    tmp_path: Path, more: tuple[str, ...], found: list[str]
) -> None:
    for rank, calls in enumerate([(*more, "broadcast", "barrier"), ("broadcast", "barrier")]):
        rank_log(tmp_path, rank, *calls).add(ProgramEnded())
    assert [one.code for one in judge_ending(read_logs(tmp_path), Ending(), [])] == found


@pytest.mark.parametrize(("calls", "found"), [("broadcast", ["DDP403"]), ("all_reduce", []), ("", [])])
def test_collectives_that_part_are_told_of_ranks_whose_ends_nobody_knows(
    tmp_path: Path, calls: str, found: list[str]
) -> None:
    rank_log(tmp_path, 0, "barrier", "all_reduce")  # both were ended by the process of the script that started them
    rank_log(tmp_path, 1, "barrier", *filter(None, [calls]))
    judged = judge_ending(read_logs(tmp_path), Ending(1), [])
    assert [one.code for one in judged] == found
    assert all("ranks 0 and 1 ended without a Python exception" in one.evidence for one in judged)


@pytest.mark.parametrize("codes", [{1: -6}, {0: -15, 1: -6}, {0: 1, 1: -6}])
def test_a_process_that_gloo_aborts_at_its_exit_is_told_as_that(tmp_path: Path, codes: dict[int, int]) -> None:
    for rank in (0, 1):
        rank_log(tmp_path, rank, "all_reduce").add(ProgramEnded())
    report = report_on_script("train.py", Ending(134, codes), read_logs(tmp_path))
    assert ("rank 1 ended by SIGABRT" in report.checks[0].detail) == (1 not in codes.values())
    assert report.checks[0].status == "error"


def test_an_interrupted_script_is_no_hang(tmp_path: Path) -> None:
    for rank, calls in enumerate([("all_reduce", "barrier"), ("all_reduce",)]):  # rank 1 is at work
        rank_log(tmp_path, rank, *calls).path.with_suffix(".stack").write_text(IN_BARRIER if not rank else AT_WORK)
    assert not judge_ending(read_logs(tmp_path), Ending(130, interrupted=True), [])


def test_the_exception_that_came_first_is_the_cause_and_the_lost_connection_is_not(tmp_path: Path) -> None:
    for rank, error in enumerate([RuntimeError("Connection closed by peer"), ValueError("of the script")]):
        rank_log(tmp_path, rank, "all_reduce").add(RankRaised(described(error, "", "")))
    (finding,) = judge_ending(read_logs(tmp_path), Ending(1, {0: 1, 1: 1}), [])
    assert (finding.code, finding.ranks) == ("DDP401", (1,)) and "ValueError: of the script" in finding.message


@pytest.mark.parametrize(("text", "found"), [("Connection closed by peer", "DDP404"), ("of the script", "DDP401")])
def test_a_rank_that_is_killed_is_the_cause_of_the_connection_that_another_one_loses(
    tmp_path: Path, text: str, found: str
) -> None:
    rank_log(tmp_path, 0, "all_reduce").add(RankRaised(described(RuntimeError(text), "", "")))
    rank_log(tmp_path, 1, "all_reduce")
    (finding,) = judge_ending(read_logs(tmp_path), Ending(1, {0: 1, 1: -9}), [])
    assert finding.code == found and finding.ranks == ((1,) if found == "DDP404" else (0,))
    assert not any("had finished" in line for line in finding.evidence)


@pytest.mark.parametrize(
    ("codes", "found"), [({0: 5, 1: 5}, []), ({1: -9}, ["DDP404"]), ({0: -15, 1: -11}, ["DDP404"])]
)
def test_a_rank_that_dies_is_a_finding_and_one_that_ends_itself_is_none(
    tmp_path: Path, codes: dict[int, int], found: list[str]
) -> None:
    for rank in (0, 1):
        rank_log(tmp_path, rank, "all_reduce")
    findings = judge_ending(read_logs(tmp_path), Ending(1, codes), [])
    assert [finding.code for finding in findings] == found
    assert all(finding.ranks == (1,) for finding in findings)


FAULT = """Fatal Python error: Aborted

Current thread 0x1 (most recent call first):
  File "{}", line 41 in {}
"""
SEGFAULT = FAULT.format("/x/train.py", "main").replace("Aborted", "Segmentation fault")
ENGINE = f"{os.path.dirname(torch.__file__)}/autograd/graph.py"


@pytest.mark.parametrize(
    ("code", "stack", "found"),
    [
        (-6, FAULT.format("/x/train.py", "main"), "DDP404"),
        (-6, FAULT.format(ENGINE, "_engine_run_backward"), "DDP403"),  # gloo, on what does not match
        (-6, FAULT.format("/x/train.py", "main").replace("Current thread", "Thread"), "DDP403"),  # or a thread of it
        (-11, f"Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n  File {SEGFAULT}", "DDP403"),
        (-11, SEGFAULT, "DDP404"),
        (-15, AT_WORK, "DDP404"),  # nothing else can have closed the connection
    ],
)
def test_a_rank_that_a_signal_ends_at_its_work_is_the_cause(tmp_path: Path, code: int, stack: str, found: str) -> None:
    fell = described(RuntimeError("Connection closed by peer"), "", "")
    rank_log(tmp_path, 0, "barrier", "all_reduce").add(RankRaised(fell))
    rank_log(tmp_path, 1, "barrier").path.with_suffix(".stack").write_text(stack)
    (finding,) = judge_ending(read_logs(tmp_path), Ending(1, {0: 1, 1: code}), [])
    assert finding.code == found and (found == "DDP403" or finding.ranks == (1,))
    assert (finding.location is not None and finding.location.line == 41) == (code != -15 and found == "DDP404")


def test_a_rank_that_torchrun_ends_is_no_cause(tmp_path: Path) -> None:
    rank_log(tmp_path, 0, "barrier").add(ProgramEnded())
    for rank, error in ((1, "Connection closed by peer"), (2, "")):
        log = RankLog(tmp_path, RankStarted(rank, 3, "gloo"))
        log.add_call(Call("barrier", "0", (0, 1, 2)))
        if error:
            log.add(RankRaised(described(RuntimeError(error), "", "")))
    ranks = [replace(rank, started=RankStarted(rank.started.rank, 3, "gloo")) for rank in read_logs(tmp_path)]
    assert all(one.ranks != (2,) for one in judge_ending(ranks, Ending(1, {1: 1, 2: -15}), []))


@pytest.mark.parametrize(
    ("error", "code", "rank"),
    [(RuntimeError("Connection closed by peer"), "DDP404", 1), (ValueError("of the script"), "DDP401", 0)],
)
def test_a_rank_that_the_script_has_started_and_that_is_killed(
    error: Exception, code: str, rank: int, tmp_path: Path
) -> None:
    rank_log(tmp_path, 0, "barrier", "all_reduce").add(RankRaised(described(error, "", "")))
    rank_log(tmp_path, 1, "barrier")
    (finding,) = judge_ending(read_logs(tmp_path), Ending(9), [])
    assert (finding.code, finding.ranks) == (code, (rank,))


@pytest.mark.parametrize(("codes", "found"), [({0: 1}, "calls os._exit"), ({0: 1, 1: 5}, "called os._exit")])
def test_a_rank_that_calls_os_exit_is_told_with_its_line(tmp_path: Path, codes: dict[int, int], found: str) -> None:
    fell = described(RuntimeError("Connection closed by peer"), "", "")
    rank_log(tmp_path, 0, "barrier", "all_reduce").add(RankRaised(fell))
    rank_log(tmp_path, 1, "barrier").add(ExitCalled(("train.py:99",), "os._exit"))
    (finding,) = judge_ending(read_logs(tmp_path), Ending(1, codes), [])
    assert (finding.code, finding.ranks, finding.location) == ("DDP404", (1,), Location("train.py", 99))
    assert found in finding.message


@pytest.mark.parametrize(("code", "found"), [(1, ["DDP401"]), (None, [])])
def test_an_exception_that_is_handled_where_the_script_exits_is_the_cause(
    tmp_path: Path, code: int | None, found: list[str]
) -> None:
    for rank, error in enumerate([RuntimeError("Connection closed by peer"), ValueError("of the script")]):
        log = rank_log(tmp_path, rank, "all_reduce")
        log.add(ExitCalled(("train.py:99",), handled={**described(error, "", ""), "exception": None}))
        log.add(ProgramEnded())
    codes = {} if code is None else {0: code, 1: code}
    judged = judge_ending(read_logs(tmp_path), Ending(code or 0, codes), [])
    assert [one.code for one in judged] == found
    assert all(one.ranks == (1,) and "ValueError: of the script" in one.message for one in judged)


def test_an_exception_that_wraps_another_one_hides_neither_the_cause_nor_the_rank(tmp_path: Path) -> None:
    def wrapped(error: Exception) -> BaseException:
        try:
            raise RuntimeError("training failed") from error
        except RuntimeError as raised:
            return raised

    for rank, error in enumerate([RuntimeError("Connection closed by peer"), ValueError("of the script")]):
        rank_log(tmp_path, rank, "all_reduce").add(RankRaised({**described(wrapped(error), "", ""), "exception": None}))
    (finding,) = judge_ending(read_logs(tmp_path), Ending(1, {0: 1, 1: 1}), [])
    assert (finding.code, finding.ranks) == ("DDP401", (1,))


def test_who_had_finished_is_looked_at_where_the_last_rank_only_lost_it(tmp_path: Path) -> None:
    fell = described(RuntimeError("Connection closed by peer"), "", "")
    rank_log(tmp_path, 0, "all_reduce").add(RankRaised(fell))
    rank_log(tmp_path, 1, "all_reduce").add(ProgramEnded())
    (finding,) = judge_ending(read_logs(tmp_path), Ending(1, {0: 1}), [])
    assert "waiting for a call of rank 1" in finding.what_to_do


def test_a_call_of_sys_exit_that_was_caught_ends_nothing(tmp_path: Path) -> None:
    rank_log(tmp_path, 0).add(ExitCalled(("train.py:99",)))
    (rank,) = read_logs(tmp_path)
    assert rank.exit is None


@pytest.mark.parametrize(
    ("ended", "called", "exit_of"),
    [
        (ProgramEnded("end"), "", None),
        (ProgramEnded("end"), "sys.exit", None),  # which was caught
        (ProgramEnded("call", "train.py:99"), "sys.exit", ("sys.exit", ("train.py:7", "train.py:99"))),
        (ProgramEnded("call", "train.py:98"), "sys.exit", ("SystemExit", ())),  # another one was caught before
        (ProgramEnded("raise", "train.py:99"), "", ("SystemExit", ("train.py:99",))),
        (ProgramEnded("end"), "os._exit", ("os._exit", ("train.py:7", "train.py:99"))),
    ],
)
def test_what_has_ended_a_rank(
    ended: ProgramEnded, called: str, exit_of: tuple[str, tuple[str, ...]] | None, tmp_path: Path
) -> None:
    log = rank_log(tmp_path, 0)
    if called:
        log.add(ExitCalled(("train.py:7", "train.py:99"), called))
    log.add(ended)
    (rank,) = read_logs(tmp_path)
    assert (rank.exit and (rank.exit.function, rank.exit.lines)) == exit_of


SYSTEM_EXITS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
def stop(step):
    if step == 2 and dist.get_rank() == 1:
        raise SystemExit(0)
for step in range(4):
    stop(step)
    dist.all_reduce(torch.ones(2))
"""


@pytest.mark.slow
def test_system_exit_in_a_function_that_one_rank_enters_is_told_with_its_line(tmp_path: Path) -> None:
    script, file = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(SYSTEM_EXITS, encoding="utf-8")
    run_forked("--check-output", str(file), str(script))
    (found,) = json.loads(file.read_text(encoding="utf-8"))["findings"]
    assert (found["code"], found["ranks"], found["location"]["line"]) == ("DDP404", [1], 6), found
    assert "raises SystemExit" in found["message"]


OWN_HOOK = """
import sys, torch.distributed as dist
dist.init_process_group("gloo")
sys.excepthook = lambda kind, error, trace: print("shown otherwise")
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("of the script")
dist.barrier()
"""


@pytest.mark.slow
def test_an_exception_is_told_where_the_script_has_a_hook_of_its_own(tmp_path: Path) -> None:
    script, file = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(OWN_HOOK, encoding="utf-8")
    ended = run_forked("--check-output", str(file), str(script))
    (found,) = json.loads(file.read_text(encoding="utf-8"))["findings"]
    assert (found["code"], found["ranks"], found["location"]["line"]) == ("DDP401", [1], 7), found
    assert "shown otherwise" in ended.stdout


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
