"""Tries what a release hands out: the wheel and the sdist of a folder, each in an empty environment.

`make dist` builds both into `dist` and then runs `python -m tests.distribution dist`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import ddpcheck

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
PATIENCE = 600.0
NET = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))
"""
SCRIPT = """
import torch
import torch.distributed as dist
from net import Net

dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.SGD(net.parameters(), 0.1)
torch.manual_seed(dist.get_rank())
for _ in range(4):
    optimizer.zero_grad()
    net(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""
TEST = """
import pytest
import torch.distributed as dist


@pytest.mark.ddp(world_size=2)
def test_two_ranks():
    assert dist.get_world_size() == 2
"""


def try_archive(archive: Path, place: Path) -> None:
    """Install `archive` into a new environment in `place`, and use each of its doors."""
    venv.create(place / "env", with_pip=True)
    programs = place / "env" / "bin"

    def run(program: str, *arguments: str, code: int = 0, says: str = "") -> None:
        command = [str(programs / program), *arguments]
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=PATIENCE)
        if done.returncode != code or says not in done.stdout + done.stderr:
            sys.exit(f"{archive.name}: {' '.join(command)}: {done.returncode}\n{done.stdout}\n{done.stderr}")

    def install(extras: str) -> None:
        run("python", "-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS), f"{archive}{extras}")

    (place / "net.py").write_text(NET)
    (place / "train.py").write_text(SCRIPT)
    (place / "test_ranks.py").write_text(TEST)
    install("")
    run("ddpcheck", "--version", says=ddpcheck.__version__)
    run("ddpcheck", "init", "net.py:Net", says="clean")
    run("ddpcheck", "report", "check_net.py", "--format", "html", "--output", "page.html")
    run("ddpcheck", "run", "--nproc-per-node", "2", "train.py", says="clean: 2 ranks")
    run("ddpcheck", "explain", "DDP101", says="unused-parameter")
    run("ddpcheck", "completion", "bash", code=2)
    install("[pytest,completion]")
    run("ddpcheck", "completion", "bash", says="complete")
    run("python", "-m", "pytest", "-q", "test_ranks.py", says="1 passed")


def main(folder: Path) -> None:
    archives = [
        *folder.glob(f"ddpcheck-{ddpcheck.__version__}-*.whl"),
        *folder.glob(f"ddpcheck-{ddpcheck.__version__}.tar.gz"),
    ]
    if len(archives) != 2:
        sys.exit(
            f"{folder} has {len(archives)} archives of version {ddpcheck.__version__}: a wheel and an sdist are needed"
        )
    for archive in archives:
        with tempfile.TemporaryDirectory() as place:
            try_archive(archive.resolve(), Path(place))
        print(f"{archive.name}: installs, and its commands work")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
