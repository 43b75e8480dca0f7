"""CPU implementation of `nn.SyncBatchNorm`, to check GPU recipes without a GPU.

torch's forward refuses CPU tensors in a process group. This implementation computes the same statistics (mean and
biased variance over the samples of all ranks, unbiased variance for the running estimate) with differentiable
all-reduces; see https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.findings.tracebacks import forwards_calls


@forwards_calls
def _all_reduced(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    total = tensor.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    @forwards_calls
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _all_reduced(tensor, group)

    @staticmethod
    @forwards_calls
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_reduced(gradient, ctx.group), None


@forwards_calls
def _forward_on_cpu(module: nn.SyncBatchNorm, inputs: torch.Tensor) -> torch.Tensor:
    group = module.process_group or dist.group.WORLD
    sum_over_ranks: Callable[..., torch.Tensor] = _SumOverRanks.apply
    axes = [0, *range(2, inputs.dim())]
    shape = [1, -1] + [1] * (inputs.dim() - 2)
    values = inputs if inputs.dtype == torch.float64 else inputs.float()
    count = torch.full((1,), float(values.numel() // values.shape[1]), dtype=values.dtype)
    sums = sum_over_ranks(torch.cat([count, values.sum(axes)]), group)
    count, mean = sums[0], sums[1:] / sums[0]
    centred = values - mean.view(shape)
    variance = sum_over_ranks(centred.square().sum(axes), group) / count
    running_mean, running_var, tracked = module.running_mean, module.running_var, module.num_batches_tracked
    if module.training and running_mean is not None and running_var is not None and tracked is not None:
        tracked.add_(1)
        momentum = module.momentum if module.momentum is not None else 1.0 / float(tracked)
        with torch.no_grad():
            unbiased = variance * (count / (count - 1).clamp(min=1))
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    result = centred * torch.rsqrt(variance + module.eps).view(shape)
    if module.weight is not None:
        result = result * module.weight.view(shape) + module.bias.view(shape)
    return result.to(inputs.dtype)


@contextlib.contextmanager
def synchronised_on_cpu() -> Iterator[list[str]]:
    """Allow `nn.SyncBatchNorm` on CPU; yield a list, empty until such a layer runs."""
    ddp: Any = nn.parallel.DistributedDataParallel
    refuse = "_passing_sync_batchnorm_handle"  # private to torch; it only refuses SyncBatchNorm on CPU
    original, original_refuse = nn.SyncBatchNorm.forward, getattr(ddp, refuse, None)
    used: list[str] = []

    @forwards_calls
    def forward(self: nn.SyncBatchNorm, inputs: torch.Tensor) -> torch.Tensor:
        has_group = dist.is_available() and dist.is_initialized()
        uses_batch_statistics = self.training or (self.running_mean is None and self.running_var is None)
        if inputs.device.type != "cpu" or not has_group or not uses_batch_statistics:
            return original(self, inputs)
        self._check_input_dim(inputs)
        if not used:
            used.append(type(self).__name__)
        return _forward_on_cpu(self, inputs)

    @forwards_calls
    def check(self: Any, module: nn.Module) -> None:
        if self.device_type != "cpu" and original_refuse is not None:
            original_refuse(self, module)

    with mock.patch.object(nn.SyncBatchNorm, "forward", forward), mock.patch.object(ddp, refuse, check, create=True):
        yield used
