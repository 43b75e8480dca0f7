"""torchrun's agent in `ddpcheck run`: the script's exit code is its own, and no end of it loses the report."""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import get_args_parser

from ddpcheck.cli import main
from ddpcheck.cli.run import run_agent
from ddpcheck.record.rank import rank_watch, started_processes
from ddpcheck.record.rank.environment import RunOptions, environment_for
from ddpcheck.run.check_options import add_check_options, split_at_script
from ddpcheck.run.ending import Ending
from ddpcheck.run.script_report import report_on_script
from ddpcheck.stream.entries import RankStarted
from ddpcheck.stream.rank_log import RankLog, last_restart, read_logs

NO_GROUP = "no rank joined a process group"
GIVEN = argparse.Namespace(check_timeout=60.0, debug=False)

# What the script's options are


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("train.py --check-every=5 --no --log-dir", 0),
        ("--nproc-per-node 2 train.py 3", 2),
        ("--nproc 2 train.py", 2),  # torchrun takes abbreviations of its own
        ("-r3 -t 3 -m pkg.train --check", 4),
        ("--debug --no-python bash -c train.py", 2),
        ("--standalone -- --odd.py --check", 2),
        ("--check 5", 1),  # no option, and so without a value
        ("--standalone", 1),
    ],
)
def test_what_comes_after_the_script_is_the_scripts(words: str, options: int) -> None:
    parser = get_args_parser()
    add_check_options(parser)
    given = words.split()
    assert split_at_script(parser, given) == (given[:options], given[options:])


# A script that joins no process group


SCRIPT = """
import os, signal, sys
how = sys.argv[1]
print("at work", flush=True)
if how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "interrupted":
    os.kill(os.getppid(), signal.SIGINT)
    signal.pause()
os._exit(int(sys.argv[2])) if how == "--check" else sys.exit(int(sys.argv[2]))
"""
EXITED = "the script ended with exit code {} before a rank joined a process group"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "last"),
    [
        ("script.py --check 9 --checkpoint-dir x", 9, EXITED),
        ("script.py killed", 137, "the script was ended by signal 9 before a rank joined a process group"),
        ("script.py interrupted", 130, NO_GROUP),
        ("-m script exit 3 --check", 3, EXITED),
        ("--no-python sh script.sh", 5, EXITED),
        ("--no-python no-such-program", 1, NO_GROUP),
    ],
)
def test_a_script_that_joins_no_process_group_has_its_own_exit_code(
    words: str, code: int, last: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "script.sh").write_text("exit 5")
    ended = subprocess.run(
        [sys.executable, "-m", "ddpcheck", "run", "--nproc-per-node=1", *words.split()],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith(f"ddpcheck: {last.format(code)}"), ended.stderr
    assert ended.stdout == ("" if "--no-python" in words else "at work\n")


def test_a_file_that_is_not_there_is_told_before_a_rank_is_started(capsys: Any) -> None:
    assert main(["run", "--standalone", "nothere.py", "--epochs", "3"]) == 2
    assert capsys.readouterr().err == "ddpcheck: error: no such file: nothere.py\n"


@pytest.fixture
def environment_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run in this process set variables that are as before after the test."""
    for name in ("PYTHONPATH", "_DDPCHECK_RUN", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


@pytest.mark.usefixtures("environment_of_a_run")
@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--nproc-per-node 0", "--nproc-per-node is a number of ranks from 1 on, or auto, cpu or gpu, not '0'"),
        ("--nproc-per-node foo", "--nproc-per-node is a number of ranks from 1 on, or auto, cpu or gpu, not 'foo'"),
        ("--nnodes 2:1", "--nnodes is a number of machines from 1 on, or MIN:MAX, not '2:1'"),
        ("--max-restarts=-2", "--max-restarts is a number from 0 on, not -2"),
        ("--redirects=9", "torchrun refuses an option: 9 does not match"),
        ("--check-every -1", "--check-every is a number of steps, or 0 for never, not -1"),
        ("--check-timeout 0", "--check-timeout is a number of seconds above 0, not 0"),
    ],
)
def test_a_wrong_option_is_wrong_usage(option: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *option.split(), __file__]) == 2
    assert capsys.readouterr().err.startswith(f"ddpcheck: error: {sentence}")


@pytest.mark.parametrize("ending", [Ending(), Ending(2), Ending(130, interrupted=True), Ending(1, {0: 1, 1: -9})])
def test_there_is_a_report_without_ranks(ending: Ending) -> None:
    report = report_on_script("train.py", ending, [])
    said = "the script ended with exit code 1 before" if ending.exit_codes else NO_GROUP
    assert report.findings == () and report.checks[-1].detail.startswith(said)
    assert len(report.checks) == 1 + bool(ending.exit_code)


def test_a_report_on_an_earlier_start_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RankLog(tmp_path, RankStarted(0, 1, "gloo"))
    for name, value in environment_for(RunOptions(str(tmp_path)), {"TORCHELASTIC_RUN_ID": "7"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.delenv("_DDPCHECK_STARTED", raising=False)
    started_processes.mark_first_process()
    ending = Ending(1, restart=last_restart(tmp_path))
    report = report_on_script("train.py", ending, read_logs(tmp_path))
    note, _ = report.world["notes"]  # and that there is one rank
    assert note.startswith("torchrun has started the ranks 2 times: this is the report on start 1")


# An agent that fails


def failure(error_file: Path, rank: int = 0) -> ProcessFailure:
    return ProcessFailure(local_rank=rank, pid=1, exitcode=3 + rank, error_file=str(error_file))


WHOLE = {"message": "of the script", "extraInfo": {"py_callstack": "Traceback of the script", "timestamp": "7"}}


@pytest.mark.parametrize(
    "content", ['{"message": {"mess', '{"message": {}}', "[]", "\xff", json.dumps({"message": WHOLE})]
)
def test_an_error_file_is_read_if_it_was_finished(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "error.json"
    file.write_text(content, "latin-1")

    def run(_: Any) -> None:
        raise ChildFailedError("train.py", {rank: failure(file, rank) for rank in (0, 1)})

    assert run_agent(run, GIVEN, tmp_path) == Ending(3, {0: 3, 1: 4})
    assert ("Traceback of the script" in capsys.readouterr().err) == ("of the script" in content)


def test_an_error_of_the_agent_leaves_the_report_and_the_signals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGHUP)

    def run(_: Any) -> None:
        signal.signal(signal.SIGHUP, lambda *_: None)  # as the agent does
        raise json.JSONDecodeError("Expecting value", "", 0)

    assert run_agent(run, GIVEN, tmp_path) == Ending(1)
    assert "the agent of torchrun has stopped: json.decoder.JSONDecodeError: Expecting value" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGHUP) is before


def test_an_error_file_is_never_there_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    replace = os.replace

    def at_the_end(source: str, target: str) -> None:
        assert not path.exists() and json.loads(Path(source).read_text())["message"]["message"] == "of the script"
        replace(source, target)

    monkeypatch.setattr(os, "replace", at_the_end)
    rank_watch._write_torchrun_error("of the script", "Traceback")
    assert [file.name for file in tmp_path.iterdir()] == ["error.json"]


# What cannot be written


@pytest.mark.usefixtures("environment_of_a_run")
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it")
@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ("--check-output /dev/full --check-format json", 2, "error: cannot write /dev/full: No space left on device"),
        ("--check-flight-recorder dumps", 0, "error: cannot write to dumps: No space left on device"),
    ],
)
def test_what_cannot_be_written_loses_no_report(
    options: str, code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("ddpcheck.cli.run.run_agent", lambda *_: Ending())
    monkeypatch.setattr("ddpcheck.cli.run.write_flight_records", fails)
    monkeypatch.chdir(tmp_path)
    assert main(["run", *options.split(), __file__]) == code
    printed = " ".join(capsys.readouterr().err.split())
    assert words in printed and NO_GROUP in printed


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it")
def test_standard_error_that_cannot_be_written_is_no_error() -> None:
    code = "from ddpcheck.cli.output import say; say('clean')"
    with open("/dev/full", "w", encoding="utf-8") as full:
        ended = subprocess.run([sys.executable, "-c", code], stderr=full, check=False, timeout=60)
    assert ended.returncode == 0
    closed = subprocess.run([sys.executable, "-c", f"import sys; sys.stderr = None; {code}"], capture_output=True)
    assert (closed.returncode, closed.stdout) == (0, b"")


# An error of ours


@pytest.mark.usefixtures("environment_of_a_run")
@pytest.mark.parametrize(("ending", "code"), [(Ending(7), 7), (Ending(), 2)])
def test_an_error_of_ours_leaves_the_exit_code_of_the_script(
    ending: Ending, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("of ours")

    monkeypatch.setattr("ddpcheck.cli.run.run_agent", lambda *_: ending)
    monkeypatch.setattr("ddpcheck.run.script_report.report_on_script", fails)
    assert main(["run", __file__]) == code
    assert "RuntimeError: of ours; this is a bug in ddpcheck" in capsys.readouterr().err
