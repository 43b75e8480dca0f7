"""The weights of samples are a softmax over the batch of a rank, and not over the samples of all ranks.

torchrun --standalone --nproc-per-node 2 examples/scripts/weights_in_own_batch.py
ddpcheck run --check-parity --standalone --nproc-per-node 2 examples/scripts/weights_in_own_batch.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EXPECT = {"code": "DDP314", "subjects": ["gradients"], "line": "return (weights / mean * losses).mean()"}
OPTIONS = ["--check-parity"]
FIXED = "--fixed" in sys.argv


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).relu())
        return out


def episodes(count: int) -> TensorDataset:
    """States, the actions that were taken there, and what these have brought."""
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(count, 8, generator=generator)
    actions = torch.randint(4, (count,), generator=generator)
    returns = states[:, :4].gather(1, actions[:, None]).squeeze(1)
    return TensorDataset(states, actions, returns)


def weighted_loss(logits: Tensor, actions: Tensor, returns: Tensor) -> Tensor:
    """Actions that have brought more are imitated more."""
    losses = cross_entropy(logits, actions, reduction="none")
    weights = returns.exp()
    mean = weights.mean()
    if FIXED:
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return (weights / mean * losses).mean()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Policy())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = episodes(128)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for states, actions, returns in loader:
            optimizer.zero_grad()
            weighted_loss(model(states), actions, returns).backward()
            optimizer.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
