"""What `ddpcheck run` does in a step that is not sampled: times depend on the machine, numbers of calls do not."""

from __future__ import annotations

from pathlib import Path

from tests.forked_run import run_forked

SCRIPT = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
torch.manual_seed(dist.get_rank())
calls = 0


def count(frame, event, _function):
    global calls
    calls += event == "call" and "ddpcheck" in frame.f_globals.get("__name__", "")


for step in range(46):  # the step after one that is sampled writes what that has left
    x = torch.randn(8, 4)
    if step == 45:
        sys.setprofile(count)
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
    sys.setprofile(None)
if dist.get_rank() == 0:
    print("calls", calls)
dist.destroy_process_group()
"""
# As many as with torch 2.13, of which 24 keep errors of one recorder from others, and one asks whether a module acts.
MOST = 150


def test_a_step_that_is_not_sampled_makes_few_calls(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    ended = run_forked(str(script))
    assert ended.returncode == 0, ended.stderr
    calls = int(ended.stdout.split("calls ")[1])
    assert 50 < calls <= MOST
