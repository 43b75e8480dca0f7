"""The lines that construct samplers and seed random numbers, as a process that `ddpcheck run` starts notes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """\
from ddpcheck.record.rank import arming
arming.wait_for_process_group()
import random
import numpy
import torch
from torch import manual_seed
from torch.utils.data import DataLoader, DistributedSampler, Subset, random_split
from ddpcheck.record.data.constructions import construction_line, seed_line

def set_seed(seed):
    random.seed(seed)
    numpy.random.seed(seed)
    manual_seed(seed)

class Own(DistributedSampler):
    def __init__(self, data):
        super().__init__(
            data, num_replicas=2, rank=0)

class Holder:
    def __init__(self, data):
        self.loader = DataLoader(data, sampler=Own(data))

set_seed(3)
part, rest = random_split(range(8), [6, 2])
held = Holder(part)
plain = DataLoader(rest, shuffle=True)
things = [part, held.loader, held.loader.sampler, plain, plain.sampler]
print(*[construction_line(obj).line for obj in things], *[seed_line(x).line for x in ("torch", "python", "numpy")])
torch.manual_seed(1)
print(construction_line([]), seed_line("torch").line)
"""


@pytest.mark.slow
def test_they_are_those_of_the_program_whatever_stands_between(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program)]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["25 22 22 27 27 24 24 24", "None 30"]


DRAWS = """\
import sys
from ddpcheck.record.rank import arming
arming.wait_for_process_group()
import random
import numpy
import torch
from torch.utils.data import TensorDataset
from ddpcheck.record.data.constructions import digest_before

rank = int(sys.argv[1])
def drawn():
    data = TensorDataset(torch.zeros(2))
    return str(digest_before(data))

print(drawn())  # nothing, from whatever state the process began with
torch.manual_seed(7 + rank)
numpy.random.seed(rank)
print(drawn())  # nothing yet
torch.manual_seed(0)
torch.randn(3)
print(drawn())  # the same
numpy.random.seed(1)
numpy.random.rand(2)
torch.manual_seed(5 + rank)
print(drawn())  # the same
torch.rand(1)
print(drawn())  # another
torch.manual_seed(3)
print(drawn())  # and that remains
"""


@pytest.mark.slow
def test_what_two_ranks_have_drawn_is_compared_whatever_they_have_seeded(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(DRAWS)
    ranks = []
    for rank in "01":
        command = [sys.executable, str(program), rank]
        done = subprocess.run(
            command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        ranks.append(done.stdout.split())
    assert [mine == theirs for mine, theirs in zip(*ranks, strict=True)] == [True] * 4 + [False] * 2
    assert len(set(ranks[0][:4])) == 3
