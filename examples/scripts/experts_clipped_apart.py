"""Each rank has a rank-local expert, and clips by the norm of its gradients: the ranks scale gradients differently.

torchrun --standalone --nproc-per-node 2 examples/scripts/experts_clipped_apart.py
ddpcheck run --standalone --nproc-per-node 2 examples/scripts/experts_clipped_apart.py [--fixed]
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXPECT = {"code": "DDP301", "subjects": ["router.weight", "head.weight", "head.bias"], "line": "clip_grad_norm_"}
FIXED = "--fixed" in sys.argv
LIMIT = 0.1


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        received = torch.empty_like(gradient)
        dist.all_to_all_single(received, gradient.contiguous())
        return received


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, dist.get_world_size(), bias=False)
        self.head = nn.Linear(8, 1)
        torch.manual_seed(1 + dist.get_rank())  # one of as many experts as there are ranks
        self.expert = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(1).T.unsqueeze(2)  # (experts, samples, 1)
        for_experts = x.expand(dist.get_world_size(), *x.shape).contiguous()
        answers = Exchange.apply(self.expert(Exchange.apply(for_experts)))
        out: Tensor = self.head((weights * answers).sum(0))
        return out


def clip(model: Mixture) -> None:
    if not FIXED:
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        return
    experts = [p.grad for p in model.expert.parameters() if p.grad is not None]
    shared = [p.grad for p in (*model.router.parameters(), *model.head.parameters()) if p.grad is not None]
    of_experts = torch.stack([g.square().sum() for g in experts]).sum()
    dist.all_reduce(of_experts)  # of all ranks
    norm = (of_experts + torch.stack([g.square().sum() for g in shared]).sum()).sqrt()
    for gradient in (*experts, *shared):
        gradient.mul_((LIMIT / norm).clamp(max=1.0))


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Mixture()
    names = [f"expert.{name}" for name, _ in model.expert.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    wrapper = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())  # each rank has data of its own
    for _ in range(24):
        x = torch.randn(16, 8)
        loss = nn.functional.mse_loss(wrapper(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.expert.parameters():
            assert parameter.grad is not None
            parameter.grad /= dist.get_world_size()  # what the losses of all ranks have added up
        clip(model)
        optimizer.step()
    print(f"rank {dist.get_rank()}: trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
