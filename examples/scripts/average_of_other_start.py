"""An average of the weights is begun before wrapping, from weights of each rank's own.

torchrun --standalone --nproc-per-node 2 examples/scripts/average_of_other_start.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/average_of_other_start.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

EXPECT = {"code": "DDP306", "subjects": ["average"], "line": "average = AveragedModel"}
FIXED = "--fixed" in sys.argv


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).relu()) * self.scale
        return out


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = Net()  # of the rank's own weights, which the wrapper replaces by rank 0's
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(net)
    model = DistributedDataParallel(net)
    if FIXED:
        average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)  # each rank has data of its own
    for _ in range(24):
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        average.update_parameters(net)
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
