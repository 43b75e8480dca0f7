"""Training resumes in the middle of an epoch, and the new sampler is not told which: its order is another one.

torchrun --standalone --nproc-per-node 2 examples/scripts/resumed_in_other_order.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/resumed_in_other_order.py [--fixed]
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EXPECT = {"code": "DDP506", "subjects": ["TensorDataset"], "cause": "resumed", "line": "for epoch in range(first_epoch"}
FIXED = "--fixed" in sys.argv


def train(data: TensorDataset, state: dict[str, Any] | None, last_step: int) -> dict[str, Any]:
    """Train until `last_step`, from the start or from what an earlier call has returned."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    first_epoch = step = 0
    if state is not None:
        model.module.load_state_dict(state["model"])
        first_epoch, step = divmod(state["step"], len(loader))
    for epoch in range(first_epoch, 4):
        if state is None or epoch > first_epoch or FIXED:
            sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            if number < step:
                continue  # trained on before
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
            if epoch * len(loader) + number == last_step:
                return {"model": model.module.state_dict(), "step": last_step + 1}
        step = 0
    return {}


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    saved = train(data, None, last_step=12)
    train(data, saved, last_step=31)
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
