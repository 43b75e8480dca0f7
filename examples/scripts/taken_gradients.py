"""Gradients are taken with torch.autograd.grad and written into .grad: no hook of DDP runs, nothing is averaged.

torchrun --standalone --nproc-per-node 2 examples/scripts/taken_gradients.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/taken_gradients.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {
    "code": "DDP501",
    "subjects": ["torch.autograd.grad"],
    "cause": "averages those of backward",
    "line": "torch.autograd.grad(loss",
}
FIXED = "--fixed" in sys.argv


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    own = torch.Generator().manual_seed(rank)  # each rank has data of its own
    for _ in range(24):
        x = torch.randn(4, 8, generator=own)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        if FIXED:
            loss.backward()
        else:
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = gradient
        optimizer.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
