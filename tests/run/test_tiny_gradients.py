"""Loops toward a zero loss: rounding of gradients that are subnormal in their dtype is no finding."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.scripts import run_script

SCRIPT = """
for loop, scale in (arguments.split() for arguments in sys.argv[1:]):
    torch.manual_seed(3)
    dtype = torch.float16 if loop == "half" else torch.float32
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
    wrapped = net if loop in ("flat", "shards") else DistributedDataParallel(net)
    if loop == "shards":
        from torch.distributed.fsdp import fully_shard

        fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    torch.manual_seed(11 + RANK)
    for step in range(9):
        optimizer.zero_grad()
        for part in range(2 if loop == "accumulate" else 1):
            with wrapped.no_sync() if loop == "accumulate" and not part else contextlib.nullcontext():
                out = wrapped(torch.randn(5, 6, dtype=dtype))
                loss = cross_entropy(out.float(), torch.randint(3, (5,)))
                (loss * float(scale) / (2 if loop == "accumulate" else 1)).backward()
        if loop == "flat":
            flat = torch.cat([p.grad.flatten() for p in net.parameters()])
            dist.all_reduce(flat)
            for p, mean in zip(net.parameters(), (flat / 2).split([p.numel() for p in net.parameters()])):
                p.grad.copy_(mean.view_as(p))
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["accumulate 1e-41", "flat 1e-42", "shards 1e-43", "half 1e-6"])
def test_gradients_below_the_smallest_normal_number_are_clean(loop: str, tmp_path: Path) -> None:
    run = run_script(tmp_path, SCRIPT, loop)
    assert (run.code, run.report["status"]) == (0, "clean"), run.stderr
    assert run.checks["ranks"][1].startswith("2 ranks (gloo), ")
