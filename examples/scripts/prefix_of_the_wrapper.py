"""A run resumes from the state of the wrapper, which it loads into the bare module with strict=False: no key fits.

torchrun --standalone --nproc-per-node 2 examples/scripts/prefix_of_the_wrapper.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/prefix_of_the_wrapper.py [--fixed]
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP523", "subjects": ["Sequential"], "ranks": [], "line": "load_state_dict(state, strict=False)"}
FIXED = "--fixed" in sys.argv


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    state = DistributedDataParallel(build()).state_dict()  # of the run before, whose keys begin with "module."
    model = DistributedDataParallel(build())
    target: nn.Module = model if FIXED else model.module
    target.load_state_dict(state, strict=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    torch.manual_seed(rank)  # each rank has data of its own
    for _ in range(8):
        x = torch.randn(16, 8)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
    print(f"rank {rank}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
