"""Each rank averages the features of its samples by class, and rank 0 saves its averages as those of all samples.

torchrun --standalone --nproc-per-node 2 examples/scripts/prototypes_of_rank_0.py
ddpcheck run --check-parity --standalone --nproc-per-node 2 examples/scripts/prototypes_of_rank_0.py [--fixed]
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EXPECT = {"code": "DDP314", "subjects": ["saved"], "line": "torch.save("}
OPTIONS = ["--check-parity"]
FIXED = "--fixed" in sys.argv


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def samples(count: int) -> TensorDataset:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :4].argmax(1))


def features_by_class(net: Net, loader: DataLoader[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
    """Sums of the features of each class, and how many samples it has."""
    sums, counts = torch.zeros(4, 16), torch.zeros(4, 1)
    net.eval()
    with torch.no_grad():
        for x, y in loader:
            sums.index_add_(0, y, net.body(x))
            counts.index_add_(0, y, torch.ones(len(y), 1))
    return sums, counts


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = samples(128)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    sums, counts = features_by_class(net, loader)
    if FIXED:
        dist.all_reduce(sums)
        dist.all_reduce(counts)
    if rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            torch.save({"model": net.state_dict(), "prototypes": sums / counts}, f"{folder}/model.pt")
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
