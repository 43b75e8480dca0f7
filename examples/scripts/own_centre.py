"""The criterion keeps a running centre of the outputs of the model, on each rank of only its samples.

torchrun --standalone --nproc-per-node 2 examples/scripts/own_centre.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/own_centre.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP214", "subjects": ["criterion.centre"], "line": "self.centre.lerp_(mean, 0.1)"}
FIXED = "--fixed" in sys.argv


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).relu())
        return out


class Centred(nn.Module):
    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(1))

    def forward(self, out: Tensor, wanted: Tensor) -> Tensor:
        loss = (out - self.centre - wanted).square().mean()
        mean = out.detach().mean(0)
        if FIXED:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        self.centre.lerp_(mean, 0.1)
        return loss


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    criterion = Centred()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)  # each rank has data of its own
    for _ in range(24):
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        criterion(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
