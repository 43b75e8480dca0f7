"""How `ddpcheck run` gets into the processes of a script: it changes nothing that the script could see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddpcheck.record.rank.environment import RunOptions, environment_for
from tests.forked_run import run_forked
from tests.run.scripts import run_script
from tests.run.test_run import DDPCHECK, ROOT, run

LOOK = """
import json, sys
print(json.dumps({
    "path": sys.path, "argv": sys.argv, "main": __name__, "finders": [str(type(f)) for f in sys.meta_path],
    "torch": "torch" in sys.modules, "custom": "sitecustomize" in sys.modules,
}))
"""


def seen(folder: Path, environ: dict[str, str], code: str, *arguments: str) -> str:
    """Return the output of a script in an environment."""
    script = folder / "look.py"
    script.write_text(code)
    ended = subprocess.run(
        [sys.executable, str(script), *arguments], env=environ, capture_output=True, text=True, check=True
    )
    assert not ended.stderr
    return ended.stdout.strip()


def environ(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def test_a_process_sees_what_it_would_have_seen(tmp_path: Path) -> None:
    watching = environment_for(RunOptions(str(tmp_path)), environ())
    plain, watched = (json.loads(seen(tmp_path, env, LOOK, "--rate", "3")) for env in (environ(), watching))
    assert len(watched.pop("finders")) == len(plain.pop("finders")) + 1
    assert watched == plain


@pytest.mark.parametrize("end", ["", "raise RuntimeError('of the user')"])
def test_the_sitecustomize_of_the_user_is_run(tmp_path: Path, end: str) -> None:
    (theirs := tmp_path / "theirs").mkdir()
    (theirs / "sitecustomize.py").write_text(f"print(__file__)\n{end}")
    path = os.pathsep.join([str(ROOT), str(theirs)])
    ended = subprocess.run(
        [sys.executable, "-c", "print('goes on')"],
        env=environment_for(RunOptions(str(tmp_path)), environ(PYTHONPATH=path)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.splitlines() == [str(theirs / "sitecustomize.py"), "goes on"]
    assert ("of the user" in ended.stderr) == bool(end)  # as Python says it of a sitecustomize that fails


def test_the_ddpcheck_that_watches_is_the_one_that_reports(tmp_path: Path) -> None:
    (theirs := tmp_path / "site" / "ddpcheck").mkdir(parents=True)
    (theirs / "__init__.py").write_text("raise SystemExit('another one')")
    watching = environment_for(RunOptions(str(tmp_path)), environ(PYTHONPATH=str(theirs.parent)))
    assert seen(tmp_path, watching, "import ddpcheck; print(ddpcheck.__file__)") == str(ROOT / "ddpcheck/__init__.py")


MEETING = """
import os, sys, time
import torch.distributed as dist
rank, how = int(os.environ["RANK"]), sys.argv[1]
if how == "elsewhere":
    dist.init_process_group("gloo", f"tcp://localhost:{int(os.environ['MASTER_PORT']) + 1}", rank=rank, world_size=2)
if how == "late" and rank:
    time.sleep(6)
if how == "missing" and rank:
    sys.exit()
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("elsewhere", 4, "All ranks wait in init_process_group for a store at tcp://localhost:"),
        ("missing", 4, "1 process waits in init_process_group, and the world size is 2: rank 1 is missing."),
        ("late", 0, ""),
    ],
)
def test_ranks_that_wait_in_vain_to_join_are_ended_and_told(tmp_path: Path, how: str, code: int, words: str) -> None:
    (tmp_path / "train.py").write_text(MEETING)
    command = ("--check-timeout=4", str(tmp_path / "train.py"), how)
    # The agent of torchrun knows that a process has ended.
    ended = run(DDPCHECK, *command) if how == "missing" else run_forked(*command)
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
