"""A training whose temperature has no effect: it is set on the wrapper, and the module has its own."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(x)
        return logits / self.temperature


def train(batch_size: int = 8, *, on_wrapper: bool = True) -> None:
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 8, generator=generator), torch.randint(4, (64,), generator=generator))
    loader = DataLoader(data, batch_size, sampler=DistributedSampler(data))
    ddp = DistributedDataParallel(Net())
    if on_wrapper:
        ddp.temperature = 2.0
    else:
        ddp.module.temperature = 2.0
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for x, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), labels).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
