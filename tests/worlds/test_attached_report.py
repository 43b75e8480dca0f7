"""`ddpcheck report` on ranks that a launcher has started: the same report, once, whatever becomes of a rank.

A launcher costs seconds, so one of them runs many commands, and each test here looks at what came of one.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from ddpcheck.cli.launched import ending, explain_exit
from ddpcheck.findings.errors import DDPCheckError, HangError, UsageError
from ddpcheck.findings.replace import replace
from ddpcheck.harness import start_world
from ddpcheck.worlds.launchers import store as loopback
from ddpcheck.worlds.launchers.detection import BY_HAND, LauncherEnv
from ddpcheck.worlds.launchers.leader import local_fields
from ddpcheck.worlds.launchers.rendezvous import Hello, gather, join
from ddpcheck.worlds.wire import ProcessContext
from tests.attached_program import run
from tests.launchers.commands import ROOT, clean_environment, command_of

pytest.importorskip("torch")
# By `make test-launchers`, which has the real launchers: each of them starts processes that import torch.
pytestmark = pytest.mark.launchers

HERE = "tests/attached_targets.py"
PROGRAM = ROOT / "tests" / "attached_program.py"
TARGETS: dict[str, tuple[int, str, list[int]]] = {  # the exit codes of their reports, and what those find
    "healthy": (0, "", []),
    "unused": (1, "DDP101", []),
    "raises_on_1": (3, "DDP401", [1]),
    "out_of_step": (4, "DDP403", [1]),
    "killed_on_1": (3, "DDP404", [1]),
    "exits_on_0": (3, "DDP404", [0]),
    "hangs_on_1": (4, "DDP402", [1]),
    "prints": (0, "", []),
    "no_recipe": (3, "", []),
}
COMMANDS: dict[str, list[str]] = {
    **{name: ["report", f"{HERE}:{name}", "--format", "json"] for name in TARGETS},
    "hangs_on_1": ["report", f"{HERE}:hangs_on_1", "--format", "json", "--timeout", "2"],
    "another world size": ["report", f"{HERE}:healthy", "--world-size", "3"],
    "no such option": ["report", f"{HERE}:healthy", "--frobnicate"],
}
MORE: dict[str, list[str]] = {
    "matrix": ["report", f"{HERE}:unused", "--matrix", "--steps", "1", "--world-size", "2", "--format", "json"],
    "graph": ["graph", f"{HERE}:unused", "--steps", "1"],
    "off": ["report", f"{HERE}:unused", "--steps", "1", "--launcher", "off", "--format", "json"],
}

SOME = {name: COMMANDS[name] for name in ("unused", "killed_on_1", "exits_on_0", "hangs_on_1", "no such option")}

Told = dict[str, list[tuple[int, str, str]]]


def start(command: Sequence[str], folder: Path, **more: str) -> subprocess.Popen[str]:
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=clean_environment(folder, **more), **streams, text=True)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Those that have been started with this folder for temporary files, and live."""
    running = [each for each in psutil.process_iter(["environ", "status"]) if each.info["status"] != "zombie"]
    return [each for each in running if (each.info["environ"] or {}).get("TMPDIR") == str(folder)]


def ended(processes: Sequence[subprocess.Popen[str]], folder: Path, timeout: float = 150) -> list[tuple[str, str]]:
    """What processes have printed, once nothing is left of them."""
    try:
        said = [process.communicate(timeout=timeout) for process in processes]
        deadline = time.monotonic() + 30
        while left := processes_of(folder):
            assert time.monotonic() < deadline, f"processes are left: {[each.cmdline() for each in left]}"
            time.sleep(0.05)
    finally:
        for each in processes_of(folder):
            each.kill()
    assert [path.name for path in folder.iterdir() if path.name.startswith("ddpcheck")] == []
    return said


def run_commands(launcher: str, folder: Path, commands: dict[str, list[str]]) -> Told:
    """What each rank was told by each command, in one launch."""
    (folder / "commands").write_text(json.dumps(list(commands.values())))
    process = start([*command_of(launcher), str(PROGRAM), str(folder)], folder)
    ((_, error),) = ended([process], folder)
    assert process.returncode == 0, error
    return read(folder, commands)


def read(folder: Path, commands: dict[str, list[str]]) -> Told:
    by_rank = [json.loads((folder / f"told{rank}").read_text()) for rank in range(2)]
    return {name: [tuple(rank[number]) for rank in by_rank] for number, name in enumerate(commands)}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return run_commands("torchrun", tmp_path_factory.mktemp("told"), {**COMMANDS, **MORE})


def report_of(text: str) -> dict[str, Any]:
    """A report without what differs from run to run, or between a launcher and none."""
    report: dict[str, Any] = json.loads(text)
    del report["timing"]
    report["world"].pop("launcher", None)
    for check in report["checks"]:
        del check["seconds"]
    return report


def plain(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, Any]]:
    """What `ddpcheck report` says of a target on ranks of its own."""
    monkeypatch.chdir(ROOT)
    for variable in os.environ.keys() - clean_environment(ROOT).keys():
        monkeypatch.delenv(variable)
    code, out, _ = run(COMMANDS[name])
    return code, report_of(out)


def assert_same(name: str, said: tuple[int, str, str], expected: tuple[int, dict[str, Any]]) -> None:
    report = report_of(said[1])
    for key, value in expected[1].items():
        assert (name, key, report[key]) == (name, key, value)
    assert (said[0], report.keys()) == (expected[0], expected[1].keys())


@pytest.mark.smoke
def test_torchrun_on_a_report_has_one_rank_print_it(tmp_path: Path) -> None:
    """The shortest way through what the tests below look at closely."""
    (code, out, _), of_rank_1 = run_commands("torchrun", tmp_path, {"unused": COMMANDS["unused"]})["unused"]
    assert (code, json.loads(out)["findings"][0]["code"], of_rank_1) == (1, "DDP101", (0, "", ""))


# --- The same report -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TARGETS)
def test_the_report_is_that_of_ranks_of_our_own(told: Told, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 4 (mmcv dist_utils): the harness attaches to a world that torchrun has started."""
    (code, out, _), of_rank_1 = told[name]
    assert_same(name, told[name][0], plain(name, monkeypatch))
    assert json.loads(out)["world"]["launcher"] == "torchrun"
    exit_code, rule, ranks = TARGETS[name]
    findings = [(finding["code"], finding["ranks"]) for finding in report_of(out)["findings"]]
    assert (code, findings) == (exit_code, [(rule, ranks)] if rule else [])
    assert of_rank_1 == (0, "", ""), "it prints nothing and leaves the exit code to rank 0"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("another world size", "--world-size 3, but torchrun has started 2 ranks; leave it out, or have torchrun"),
        ("no such option", "unrecognized arguments: --frobnicate"),
    ],
)
def test_what_cannot_be_is_refused_once_in_a_sentence(told: Told, name: str, words: str) -> None:
    (code, out, error), of_rank_1 = told[name]
    assert (code, out, of_rank_1) == (2, "", (0, "", ""))
    assert words in error and error.count("\n") == 1


def test_mpirun_passes_our_exit_code_on_and_prints_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start([*command_of("mpirun"), "-m", "ddpcheck", *COMMANDS["raises_on_1"]], tmp_path)
    ((out, error),) = ended([process], tmp_path)
    assert (process.returncode, report_of(out)) == plain("raises_on_1", monkeypatch)
    assert "ddpcheck" not in error and "Traceback" not in error


def test_everything_else_works_on_the_ranks_of_a_launcher(told: Told) -> None:
    code, out, _ = told["matrix"][0]
    rows = json.loads(out)["rows"]
    right = [row["arguments"] for row in rows if row["verdict"] == "right"]
    assert code == 1 and {"find_unused_parameters": True} in right
    assert told["graph"][0][0] == 0 and "left_over" in told["graph"][0][1]
    for code, out, _ in told["off"]:
        assert code == 1 and "launcher" not in json.loads(out)["world"], "each rank for itself"


def check_some(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SOME.keys() & TARGETS.keys():
        assert_same(name, told[name][0], plain(name, monkeypatch))
        assert told[name][1] == (0, "", "")


@pytest.mark.slow
def test_under_mpirun_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 4 (mmcv dist_utils): the harness attaches to a world that mpirun has started."""
    told = run_commands("mpirun", tmp_path, SOME)
    check_some(told, monkeypatch)
    assert told["no such option"][0][0] == 2 and told["no such option"][1] == (0, "", "")


# --- Several machines ------------------------------------------------------------------------------------------------

# Processes of another machine are not to be seen from here, nor are its files; its clock shows another time.
ELSEWHERE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--time", "--monotonic", "100000"]


@pytest.mark.slow
def test_ranks_on_several_machines_give_the_same_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("unshare") is None or subprocess.run([*ELSEWHERE, "true"], capture_output=True).returncode:
        pytest.skip("needs to be allowed to unshare")
    (tmp_path / "commands").write_text(json.dumps(list(SOME.values())))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    where["LOCAL_WORLD_SIZE"] = "1"
    own = [sys.executable, str(PROGRAM), str(tmp_path)]
    both = [start([*ELSEWHERE, *own], tmp_path, RANK="1", **where), start(own, tmp_path, RANK="0", **where)]
    ended(both, tmp_path)
    told = read(tmp_path, SOME)
    check_some(told, monkeypatch)
    assert told["no such option"][1] == told["no such option"][0], "by hand, each says what is wrong"


# --- Processes that are lost -----------------------------------------------------------------------------------------


class Hanging:
    """A report on a target that hangs on rank 1, once it does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = [*command_of("torchrun"), "-m", "ddpcheck", "report", f"{HERE}:hangs_on_1", "--timeout", "100"]
        self.launcher = start(command, folder)
        deadline = time.monotonic() + 90
        while not self._hangs():
            assert self.launcher.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)

    def _hangs(self) -> bool:
        return any(b"forward" in file.read_bytes() for file in self.folder.glob("ddpcheck-*/rank1.slots"))

    def of_rank(self, rank: int) -> psutil.Process:
        ours = [process for process in processes_of(self.folder) if process.ppid() == self.launcher.pid]
        return next(process for process in ours if process.environ().get("RANK") == str(rank))

    def ended(self) -> tuple[str, str]:
        ((out, error),) = ended([self.launcher], self.folder, timeout=60)
        return out, error


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Hanging]:
    yield Hanging(tmp_path)
    for each in processes_of(tmp_path):
        each.kill()


def test_nothing_stays_of_a_launcher_that_was_killed(hanging: Hanging) -> None:
    hanging.launcher.kill()
    assert hanging.ended()[0] == ""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_killed_is_a_finding_or_said_by_another(rank: int, hanging: Hanging) -> None:
    hanging.of_rank(rank).kill()
    out, error = hanging.ended()
    if rank == 0:
        assert out == "" and error.count("ddpcheck: error: rank 0 was lost before it could write the report") == 1
        return
    assert "DDP404" in out and "Rank 1 was lost: the process that the launcher had started for it has ended" in out
    assert out.count("report") == 1 and "ddpcheck: error" not in error and hanging.launcher.returncode != 0


@pytest.mark.slow
def test_a_launcher_that_is_told_to_end_ends_everything(hanging: Hanging) -> None:
    hanging.launcher.send_signal(signal.SIGTERM)
    out, _ = hanging.ended()
    assert "DDP" not in out and hanging.launcher.returncode != 0


# --- Meeting ---------------------------------------------------------------------------------------------------------

RANK_0 = LauncherEnv("torchrun", 0, 2, 0, 2, "a job of this test", "127.0.0.1", 1)
RANK_1 = replace(RANK_0, rank=1, local_rank=1)


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_ranks_that_do_not_come_are_named(own_folder: Path) -> None:
    with pytest.raises(HangError, match=r"Rank 1 of 2 did not show up within 0.2 s, although torchrun has started"):
        gather(RANK_0, 0.2)
    assert list(own_folder.iterdir()) == []
    with pytest.raises(DDPCheckError, match=r"Rank 1 waited 0.2 s for rank 0 to show up at .*--launcher off"):
        join(RANK_1, 0.2)


def test_a_file_that_was_left_behind_misleads_nobody_and_strangers_are_not_let_in(own_folder: Path) -> None:
    file = loopback.rendezvous_file("hosts torchrun a job of this test 127.0.0.1:1")
    with ThreadPoolExecutor() as pool:
        with socket.create_server(("127.0.0.1", 0)) as stranger:
            stale = stranger.getsockname()[1]
            loopback.publish(file, stale, "0" * 64)
            joining = pool.submit(join, RANK_1, 30.0)
            fooled, _ = stranger.accept()
            with fooled:
                fooled.sendall(b"f" * 32)  # it does not know the other half of the secret
        leading = pool.submit(gather, RANK_0, 30.0)
        sock, welcome = joining.result()
        _, ((theirs, hello, _),) = leading.result()
        assert hello.launch.rank == 1 and welcome.shared and not file.exists()
        sock.close()
        theirs.close()

        leading = pool.submit(gather, replace(RANK_0, world_size=3, local_world_size=3), 0.5)
        while not (port := loopback.look_up(file)[0]):
            time.sleep(0.01)
        with socket.create_connection(("127.0.0.1", port)) as intruder:
            intruder.sendall(b"e" * 32)
            assert intruder.recv(1) == b""
        with pytest.raises(HangError, match="Ranks 1 and 2 of 3"):
            leading.result()


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("machines", "visible", "expected"),
    [
        ("aa", [None, None], [(0, 2, (0, 2)), (1, 2, (1, 2))]),
        ("aa", ["0", "1"], [(0, 2, (0, 1)), (1, 2, (0, 1))]),
        ("aab", ["0", "0", "0"], [(0, 2, (0, 2)), (1, 2, (1, 2)), (0, 1, (0, 1))]),
    ],
)
def test_a_rank_is_told_with_whom_it_shares_a_machine_and_its_gpus(
    machines: str, visible: list[str | None], expected: list[tuple[int, int, tuple[int, int]]]
) -> None:
    hellos = []
    for rank, (machine, gpus) in enumerate(zip(machines, visible, strict=True)):
        environment = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
        around = ProcessContext(environment, frozenset(), "", (), ())
        local = machines[:rank].count(machine)
        launch = LauncherEnv("torchrun", rank, len(machines), local, None, "", "", 0)
        hellos.append(Hello(launch, machine, 1, "", "", around, 0.0))
    assert [tuple(place.values()) for place in local_fields(hellos)] == expected


@pytest.mark.smoke
def test_a_world_of_another_size_than_there_are_processes_is_refused() -> None:
    class Two:
        world_size, launcher, one_machine = 2, "torchrun", True
        settle = starter = None

    with pytest.raises(UsageError, match="world_size=3, but torchrun has started 2 ranks"):
        start_world(3, hosts=Two())


@pytest.mark.smoke
def test_torchrun_is_told_what_an_exit_code_means_unless_it_is_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    explain_exit(0, "nothing")
    assert not file.exists()
    explain_exit(4, "it hangs")
    failure: Any = ProcessFailure(local_rank=0, pid=1, exitcode=4, error_file=str(file))
    assert failure.message["extraInfo"]["py_callstack"] == "it hangs" and failure.timestamp > 0


@pytest.mark.smoke
def test_sigterm_leaves_time_to_say_what_has_happened() -> None:
    before = signal.getsignal(signal.SIGTERM)
    launch = LauncherEnv(BY_HAND, 0, 2, 0, None, "", "", 0)
    with ending(launch, 60.0):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
    assert signal.getsignal(signal.SIGTERM) == before
    begun = time.monotonic()
    with pytest.raises(SystemExit), ending(launch, 0.1):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    assert time.monotonic() - begun < 20
    signal.signal(signal.SIGTERM, before)
