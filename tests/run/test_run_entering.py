"""How `ddpcheck run` gets into the processes of a script: it changes nothing that the script could see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddpcheck.record.rank.environment import RunOptions, environment_for, options_of_run
from tests.forked_run import run_forked
from tests.run.scripts import run_script
from tests.run.test_run import DDPCHECK, run

LOOK = """
import json, sys
print(json.dumps({
    "path": sys.path, "argv": sys.argv, "main": __name__, "finders": [str(type(f)) for f in sys.meta_path],
    "torch": "torch" in sys.modules, "custom": "sitecustomize" in sys.modules,
}))
"""


def seen(folder: Path, environ: dict[str, str], *options: str) -> dict[str, object]:
    script = folder / "look.py"
    script.write_text(LOOK)
    ended = subprocess.run(
        [sys.executable, *options, str(script), "--rate", "3"], env=environ, capture_output=True, text=True, check=True
    )
    assert not ended.stderr
    found: dict[str, object] = json.loads(ended.stdout)
    return found


def environ(**more: str) -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": root, **more}


def test_the_options_come_through_the_environment() -> None:
    options = RunOptions("/some/folder", every=3)
    assert options_of_run(environment_for(options, {})) == options
    assert options_of_run({}) is None


def test_a_process_sees_what_it_would_have_seen(tmp_path: Path) -> None:
    plain, watched = seen(tmp_path, environ()), seen(tmp_path, environment_for(RunOptions(str(tmp_path)), environ()))
    finders, theirs = watched.pop("finders"), plain.pop("finders")
    assert watched == plain
    assert isinstance(finders, list) and isinstance(theirs, list) and len(finders) == len(theirs) + 1


@pytest.mark.parametrize("fails", [False, True])
def test_the_sitecustomize_of_the_user_is_run(tmp_path: Path, fails: bool) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    mark = tmp_path / "mark"
    end = "raise RuntimeError('of the user')" if fails else ""
    (theirs / "sitecustomize.py").write_text(f"open({str(mark)!r}, 'w').close()\nname = __file__\n{end}")
    path = environ()["PYTHONPATH"] + os.pathsep + str(theirs)
    script = tmp_path / "script.py"
    script.write_text("import sitecustomize; print(sitecustomize.name)" if not fails else "print('goes on')")
    ended = subprocess.run(
        [sys.executable, str(script)],
        env=environment_for(RunOptions(str(tmp_path)), environ(PYTHONPATH=path)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert mark.exists()
    assert ended.stdout.strip() == ("goes on" if fails else str(theirs / "sitecustomize.py"))
    assert ("of the user" in ended.stderr) == fails  # as Python says it of a sitecustomize that fails


def test_the_ddpcheck_that_watches_is_the_one_that_reports(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import ddpcheck; print(ddpcheck.__file__)")
    other = tmp_path / "site" / "ddpcheck"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise SystemExit('another one')")
    watched = environment_for(RunOptions(str(tmp_path)), environ(PYTHONPATH=str(other.parent)))
    ended = subprocess.run([sys.executable, str(script)], env=watched, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == str(Path(__file__).parents[2] / "ddpcheck" / "__init__.py")


MEETING = """
import datetime, os, sys, time
import torch.distributed as dist
rank, how = int(os.environ["RANK"]), sys.argv[1]
if how == "elsewhere":
    dist.init_process_group("gloo", f"tcp://localhost:{int(os.environ['MASTER_PORT']) + 1}", rank=rank, world_size=2)
if how == "late" and rank:
    time.sleep(6)
if how in ("one", "own timeout") and rank:
    sys.exit()
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2) if how == "own timeout" else None)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("elsewhere", 4, "All ranks wait in init_process_group for a store at tcp://localhost:"),
        ("one", 4, "1 process waits in init_process_group, and the world size is 2: rank 1 is missing."),
        ("own timeout", 1, "the world size is 2: rank 1 is missing."),
        ("late", 0, ""),
    ],
)
def test_ranks_that_wait_in_vain_to_join_are_ended_and_told(tmp_path: Path, how: str, code: int, words: str) -> None:
    (tmp_path / "train.py").write_text(MEETING)
    command = ("--check-timeout=4", str(tmp_path / "train.py"), how)
    needs_agent = "is missing" in words  # which knows that a process has ended
    ended = run(DDPCHECK, *command) if needs_agent else run_forked(*command)
    assert ended.returncode == code and words in " ".join(ended.stderr.split()), ended.stderr
    assert ("DDP402 hang" in ended.stderr) == bool(code)


NAMED = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group()  # with a backend for each type of device
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(params=net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler(device="cpu")
for _ in range(3):
    optimizer.zero_grad(set_to_none=True)
    loss = net(torch.randn(8, 4)).square().mean()
    torch.autograd.backward(tensors=scaler.scale(outputs=loss))
    scaler.step(optimizer=optimizer)
    scaler.update()
torch.utils.swap_tensors(t1=torch.ones(2), t2=torch.ones(2))
torch.save(obj=optimizer.state_dict(), f=sys.argv[1] + str(dist.get_rank()))
torch.load(f=sys.argv[1] + str(dist.get_rank()))
dist.barrier()
dist.destroy_process_group()
"""


def test_functions_of_torch_are_called_with_the_names_of_their_arguments(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NAMED, encoding="utf-8")
    ended = run_forked("train.py", str(tmp_path / "saved"), cwd=tmp_path)
    assert ended.returncode == 0 and "ddpcheck: clean: 2 ranks (gloo" in ended.stderr + ended.stdout, ended.stderr


OWN_WATCH = """
from ddpcheck import CheckedDistributedDataParallel
model = CheckedDistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def test_a_model_that_the_script_watches_itself_is_not_said_to_be_clean(tmp_path: Path) -> None:
    status, detail = run_script(tmp_path, OWN_WATCH).checks["ranks"]
    assert status == "skipped" and "watches its model itself" in detail
