"""Every rank writes the metrics to the same file.

torchrun --standalone --nproc-per-node 2 examples/scripts/metrics_by_all.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/metrics_by_all.py [--fixed]
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP512", "subjects": ["metrics.json"], "line": "metrics.open("}
FIXED = "--fixed" in sys.argv


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).relu())
        return out


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)  # each rank has data of its own
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    metrics = Path(folder[0]) / "metrics.json"
    losses = []
    for _ in range(24):
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if rank == 0 or not FIXED:
        with metrics.open("w") as file:
            json.dump(losses, file)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
