"""Loops toward a zero loss: rounding of gradients that are subnormal in their dtype is no finding."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forked_run import run_forked

SCRIPT = """
import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

loop, scale = sys.argv[1], float(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(3)
dtype = torch.float16 if loop == "half" else torch.float32
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
wrapped = net if loop in ("flat", "shards") else nn.parallel.DistributedDataParallel(net)
if loop == "shards":
    from torch.distributed.fsdp import fully_shard

    fully_shard(net)
optimizer = torch.optim.SGD(net.parameters(), 0.05)
torch.manual_seed(11 + dist.get_rank())
for step in range(9):
    optimizer.zero_grad()
    for part in range(2):
        with wrapped.no_sync() if loop == "accumulate" and not part else contextlib.nullcontext():
            out = wrapped(torch.randn(5, 6, dtype=dtype))
            loss = functional.cross_entropy(out.float(), torch.randint(3, (5,)))
            (loss * scale / (2 if loop == "accumulate" else 1)).backward()
        if loop != "accumulate":
            break
    if loop == "flat":
        flat = torch.cat([p.grad.flatten() for p in net.parameters()])
        dist.all_reduce(flat)
        for p, mean in zip(net.parameters(), (flat / 2).split([p.numel() for p in net.parameters()])):
            p.grad.copy_(mean.view_as(p))
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
dist.destroy_process_group()
"""
LOOPS = ["ddp 1e-43", "accumulate 1e-41", "flat 1e-42", "shards 1e-43", "half 1e-6"]


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_gradients_below_the_smallest_normal_number_are_clean(tmp_path: Path, loop: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    ended = run_forked(str(script), *loop.split())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "clean: 2 ranks" in ended.stderr
