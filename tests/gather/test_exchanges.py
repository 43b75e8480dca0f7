"""Parameters that a loss has only through an exchange between ranks: parts of a model of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

from ddpcheck.gather.autograd.exchanges import is_rank_local, record_all_to_all_functions, record_rank_local


class Swap(torch.autograd.Function):
    """As scripts write them, under whatever name."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class SwapWithoutContext(torch.autograd.Function):
    """As torch's documentation writes them since 2.0."""

    @staticmethod
    def forward(rows: Tensor) -> Tensor:
        return Swap.forward(None, rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Twice(Swap):
    """Exchanges nothing."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return 2 * rows


def by_function(rows: Tensor) -> Tensor:
    answers: Tensor = Swap.apply(rows)
    return answers


def without_context(rows: Tensor) -> Tensor:
    answers: Tensor = SwapWithoutContext.apply(rows)
    return answers


def by_operator(rows: Tensor) -> Tensor:
    if not hasattr(functional, "all_to_all_single_autograd"):
        pytest.skip("this torch has no differentiable functional all_to_all")
    answers: Tensor = functional.all_to_all_single_autograd(rows, None, None, dist.group.WORLD)
    return answers


@pytest.mark.ddp(world_size=1, reuse="module")
@pytest.mark.parametrize("exchange", [by_function, without_context, by_operator])
def test_what_is_in_the_loss_through_an_exchange_alone_is_a_part(exchange: Callable[[Tensor], Tensor]) -> None:
    record_all_to_all_functions()
    body, expert, head, other = (nn.Linear(4, 4) for _ in range(4))
    hidden = body(torch.ones(2, 4))
    loss = head(hidden + exchange(expert(exchange(hidden))) + Twice.apply(other(hidden))).sum()
    record_rank_local([loss], lambda leaf: leaf is not expert.bias)
    parts = {n: is_rank_local(p) for n, p in nn.ModuleList([body, expert, head, other]).named_parameters()}
    assert [name for name, found in parts.items() if found] == ["1.weight"]
