"""The lines that construct samplers and seed random numbers, as a process that `ddpcheck run` starts notes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM = """\
from ddpcheck.monitor.script.recording import arming
arming.wait_for_process_group()
import random
import numpy
import torch
from torch import manual_seed
from torch.utils.data import DataLoader, DistributedSampler, Subset, random_split
from ddpcheck.monitor.script.recording.constructions import made_at, seeded_at

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
print(*[made_at(one).line for one in things], *[seeded_at(name).line for name in ("torch", "python", "numpy")])
torch.manual_seed(1)
print(made_at([]), seeded_at("torch").line)
"""


def test_they_are_those_of_the_program_whatever_stands_between(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program)]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["25 22 22 27 27 24 24 24", "None 30"]
