"""Hard samples have a larger weight, relative to the average weight of the batch: of the rank's own batch alone.

torchrun --standalone --nproc-per-node 2 examples/parity/hard_samples.py
ddpcheck run --standalone --nproc-per-node 2 --check-parity examples/parity/hard_samples.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FIXED = "--fixed" in sys.argv
Loader = DataLoader[tuple[Tensor, ...]]


def make_data(seed: int, count: int) -> TensorDataset:
    x = torch.rand(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, torch.sin(3 * x).sum(1))


def make_loader(data: TensorDataset, *, shuffle: bool) -> Loader:
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=shuffle))


def weigh(errors: Tensor) -> Tensor:
    weights = errors.detach().exp()
    average = weights.mean()
    if FIXED:
        dist.all_reduce(average, dist.ReduceOp.AVG)
    return (weights / average * errors).mean()


def evaluate(model: nn.Module, loader: Loader) -> float:
    model.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            total += torch.tensor([(model(x).squeeze(1) - y).square().sum(), len(y)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, test = make_loader(make_data(1, 128), shuffle=True), make_loader(make_data(2, 64), shuffle=False)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(4):
        model.train()
        train.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for x, y in train:
            optimizer.zero_grad()
            weigh((model(x).squeeze(1) - y).square()).backward()
            optimizer.step()
        error = evaluate(model, test)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: test error {error:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
