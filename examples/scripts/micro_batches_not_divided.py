"""The losses of four micro-batches are added up, and not divided by four.

torchrun --standalone --nproc-per-node 2 examples/scripts/micro_batches_not_divided.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/micro_batches_not_divided.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP514", "subjects": ["loss"], "line": "loss = "}
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
    for turn in range(48):
        x = torch.randn(4, 8)
        model.require_backward_grad_sync = turn % 4 == 3
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        if FIXED:
            loss = loss / 4
        loss.backward()
        if turn % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
