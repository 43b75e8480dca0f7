"""What a rank writes never gets into a file of the script, whatever that does to descriptors that it does not know."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddpcheck.record.rank.environment import STACK_SIGNAL
from ddpcheck.run.live_ranks import LiveRanks
from ddpcheck.stream.entries import ProgramEnded, RankStarted, WatchingFailed
from ddpcheck.stream.log_file import LogFile, is_file_open
from ddpcheck.stream.rank_log import RankLog, read_logs
from tests.forked_run import run_forked

ROOT = Path(__file__).parents[2]
BEGIN = f"""
import faulthandler, os, signal, sys
from pathlib import Path
from ddpcheck.stream.entries import ProgramEnded, RankStarted
from ddpcheck.stream.rank_log import RankLog
folder = Path(sys.argv[1])
log = RankLog(folder, RankStarted(0, 1, "gloo"))
log.open_stack_file(lambda number: faulthandler.register({int(STACK_SIGNAL)}, file=number, all_threads=True))
def ours_open():
    links = {{name: f"/proc/self/fd/{{name}}" for name in os.listdir("/proc/self/fd")}}
    return [int(name) for name in links if os.path.lexists(links[name]) and "0-0-1-" in os.readlink(links[name])]
"""
CLOSES = {  # what the script does with descriptors, and how many files of its own it opens then
    "daemon": "os.closerange(3, 256); own = [open(folder / f'own{n}', 'wb', buffering=0) for n in range(40)]",
    "takes ours": """
mine = os.open(folder / 'own0', os.O_WRONLY | os.O_CREAT)
for number in ours_open():
    os.dup2(mine, number)
""",
    "standard": "os.closerange(0, 3); own = [open(folder / f'own{n}', 'wb', buffering=0) for n in range(3)]",
}


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.parametrize("how", CLOSES)
def test_a_script_that_closes_descriptors_gets_nothing_of_ours_into_its_files(how: str, tmp_path: Path) -> None:
    end = f"log.add(ProgramEnded())\nos.kill(os.getpid(), {int(STACK_SIGNAL)})"
    subprocess.run(
        [sys.executable, "-c", f"{BEGIN}\n{CLOSES[how]}\n{end}", str(tmp_path)],
        check=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    (rank,) = read_logs(tmp_path)
    assert rank.entries == [ProgramEnded()]
    assert "Current thread" in rank.stack
    own = list(tmp_path.glob("own*"))
    assert own and all(file.stat().st_size == 0 for file in own)


def test_the_numbers_of_the_scripts_descriptors_are_those_that_it_would_have(tmp_path: Path) -> None:
    before = os.open(tmp_path, os.O_RDONLY)
    os.close(before)
    file = LogFile(tmp_path / "file")
    after = os.open(tmp_path, os.O_RDONLY)
    os.close(after)
    assert after == before < file.hold()
    os.close(file.hold())


def test_a_log_that_cannot_be_written_ends_and_the_report_says_so(tmp_path: Path) -> None:
    log = RankLog(tmp_path, RankStarted(0, 1, "gloo"))
    os.close(log._file.hold())
    log.path.rename(tmp_path / "elsewhere")
    log.add(ProgramEnded())
    (tmp_path / "elsewhere").rename(log.path)
    log.add(ProgramEnded())  # what is missing before it is not known
    (rank,) = read_logs(tmp_path)
    assert rank.entries == [WatchingFailed("its log was lost: No such file or directory")]


def test_another_file_in_the_place_of_the_log_is_not_written(tmp_path: Path) -> None:
    file = LogFile(tmp_path / "file")
    os.close(file.hold())
    (tmp_path / "file").rename(tmp_path / "ours")
    (tmp_path / "file").write_text("of the script")
    with pytest.raises(FileNotFoundError):
        file.append(b"entry")
    assert (tmp_path / "file").read_text() == "of the script"


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_rank_that_does_not_hold_its_file_is_sent_no_signal(tmp_path: Path) -> None:
    program = (
        f"import signal, time; signal.signal({STACK_SIGNAL}, lambda *_: exit(1)); print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        try:
            stack = tmp_path / f"0-0-1-{process.pid}.stack"
            stack.touch()
            assert not is_file_open(stack, process.pid)
            assert LiveRanks(tmp_path).stacks({0: process.pid}) == {}
            assert process.poll() is None  # the handler would end it
        finally:
            process.kill()


def test_a_stack_goes_to_the_file_that_is_held(tmp_path: Path) -> None:
    told: list[int] = []
    file = LogFile(tmp_path / "file", told.append)
    with open(file.hold(), "ab", closefd=False) as stack:
        faulthandler.dump_traceback(stack)
    os.close(file.hold())
    assert file.hold() in told and len(told) == 2
    os.close(file.hold())
    assert "Current thread" in (tmp_path / "file").read_text()


SMALL = """
import os, resource, sys
import torch, torch.distributed as dist

if sys.argv[1] == "imports":
    class Refuses:
        def find_spec(self, name, path=None, target=None):
            if name.startswith("ddpcheck.record"):
                raise ImportError("no module that is not in the list")

    sys.meta_path.insert(0, Refuses())
    for name in [name for name in sys.modules if name.startswith("ddpcheck.record.rank.rank_watch")]:
        del sys.modules[name], sys.modules["ddpcheck.record.rank"].rank_watch
else:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
net(torch.ones(4, 3)).sum().backward()
dist.destroy_process_group()
print("done", flush=True)
os._exit(0)  # a forked rank now and then sticks at the end of the interpreter
"""


@pytest.mark.parametrize(("refused", "why"), [("room", "File too large"), ("imports", "no module that is not")])
def test_a_rank_that_cannot_be_watched_runs_as_under_torchrun(tmp_path: Path, refused: str, why: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SMALL)
    ended = run_forked(str(script), refused)
    assert ended.returncode == 0 and ended.stdout.count("done") == 2, ended.stderr
    assert "rank 0 is not watched: " in ended.stderr and why in ended.stderr
