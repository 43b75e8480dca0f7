"""A training loop with a fault: on odd ranks the auxiliary head has nothing to say. `--checked` swaps the wrapper.

torchrun --standalone --nproc-per-node 2 examples/training_loop/train.py
torchrun --standalone --nproc-per-node 2 examples/training_loop/train.py --checked
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpcheck import CheckedDistributedDataParallel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 32)
        self.head = nn.Linear(32, 4)
        self.auxiliary = nn.Linear(32, 1)

    def forward(self, x: Tensor, *, marked: bool) -> Tensor:
        features = self.body(x).relu()
        out = self.head(features)
        if marked:  # only where the batch has marks
            out = out + self.auxiliary(features)
        return out


def train(*, checked: bool, healthy: bool, steps: int) -> list[float]:
    """Train for some steps; returns the losses of this rank."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = CheckedDistributedDataParallel(Net()) if checked else DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(8, 16, generator=generator)
        optimizer.zero_grad()
        loss = (model(x, marked=healthy or rank % 2 == 0) - x[:, :4]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checked", action="store_true", help="wrap in CheckedDistributedDataParallel")
    parser.add_argument("--healthy", action="store_true", help="without the fault")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    losses = train(checked=options.checked, healthy=options.healthy, steps=options.steps)
    print(f"rank {dist.get_rank()}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
