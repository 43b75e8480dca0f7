"""The generator's loss leaves gradients in the discriminator, whose step uses them.

torchrun --standalone --nproc-per-node 2 examples/scripts/left_by_generator.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/left_by_generator.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP520", "subjects": ["zero_grad"], "line": "judged.backward()"}
FIXED = "--fixed" in sys.argv


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).relu())
        return out


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    generator = DistributedDataParallel(Net(8))
    discriminator = DistributedDataParallel(Net(1))
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.01)
    of_discriminator = torch.optim.SGD(discriminator.parameters(), lr=0.01)
    torch.manual_seed(rank)  # each rank has data of its own
    for _ in range(24):
        real, made = torch.randn(4, 8), generator(torch.randn(4, 8))
        if FIXED:
            of_discriminator.zero_grad()
        judged = discriminator(made.detach()).square().mean() + (discriminator(real) - 1).square().mean()
        judged.backward()
        of_discriminator.step()
        of_generator.zero_grad()
        (discriminator(made) - 1).square().mean().backward()
        of_generator.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
