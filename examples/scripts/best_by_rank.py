"""Each rank keeps the weights that were best on its own samples: those of another step.

torchrun --standalone --nproc-per-node 2 examples/scripts/best_by_rank.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/best_by_rank.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP306", "subjects": ["best"], "line": "best: dict"}
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
    lowest = float("inf")
    best: dict[str, Tensor] = {}
    for _ in range(24):
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        loss = loss.detach()
        if FIXED:
            dist.all_reduce(loss)
        if float(loss) < lowest:
            lowest = float(loss)
            best = {name: value.clone() for name, value in model.module.state_dict().items()}
    model.module.load_state_dict(best)
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
