"""A quantile of the errors of each rank is averaged over the ranks, which is not the quantile of all errors.

torchrun --standalone --nproc-per-node 2 examples/scripts/quantile_of_ranks.py
ddpcheck run --check-parity --standalone --nproc-per-node 2 examples/scripts/quantile_of_ranks.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EXPECT = {"code": "DDP314", "subjects": ["shown"], "line": "quantile = errors.quantile(0.9)"}
OPTIONS = ["--check-parity"]
FIXED = "--fixed" in sys.argv


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).relu())
        return out


def samples(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.square().sum(1, keepdim=True))


def error_of_most(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    """The error that nine of ten samples do not exceed."""
    model.eval()
    with torch.no_grad():
        errors = torch.cat([(model(x) - y).abs().flatten() for x, y in loader])
    model.train()
    if FIXED:
        of_ranks = [torch.empty_like(errors) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, errors)
        errors = torch.cat(of_ranks)
    quantile = errors.quantile(0.9)
    dist.all_reduce(quantile)
    return float(quantile / dist.get_world_size())


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    training, validation = samples(128, 1), samples(64, 2)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(training)
    loader = DataLoader(training, batch_size=8, sampler=sampler)
    held_out = DataLoader(validation, batch_size=8, sampler=DistributedSampler(validation, shuffle=False))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
        error = error_of_most(model.module, held_out)
        if rank == 0:
            print(f"epoch {epoch}: 90 % of the errors are below {error:.4f}")
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
