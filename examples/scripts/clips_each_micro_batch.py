"""Each micro-batch is clipped separately, before the gradients of the step are averaged.

torchrun --standalone --nproc-per-node 2 examples/scripts/clips_each_micro_batch.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/clips_each_micro_batch.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP310", "subjects": ["clip_grad_norm_"], "line": "clip_grad_norm_(model.parameters(), 0.5)"}
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
    for _ in range(12):
        for micro in range(4):
            model.require_backward_grad_sync = micro == 3
            x = torch.randn(4, 8)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean() / 4
            loss.backward()
            if not FIXED or micro == 3:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
