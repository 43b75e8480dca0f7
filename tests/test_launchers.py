"""Averages over ranks that owe nothing to DDP, against the mean computed in one place."""

from typing import Any

import pytest

import ddpcheck
from ddpcheck.launchers import allreduce_grads, average_over_ranks, get_dist_info

torch = pytest.importorskip("torch")
nn = torch.nn

DTYPES = ["float32", "float64", "bfloat16", "float16", "complex64"]


def local_tensors(rank: int) -> list[Any]:
    """What a rank brings: several dtypes and layouts, and not the same ones missing on each rank."""
    generator = torch.Generator().manual_seed(rank)

    def made(*shape: int, dtype: Any = torch.float32) -> Any:
        return torch.randn(shape, generator=generator).to(dtype)

    tensors = [made(3, 2, dtype=getattr(torch, name)) for name in DTYPES]
    sparse = torch.sparse_coo_tensor([[0, 2, 2]], made(3, 2), (4, 2), check_invariants=True)
    return [
        *tensors,
        None if rank == 0 else made(5),
        made(5) if rank == 0 else None,
        None,
        sparse if rank == 1 else made(4, 2),
        made(2, 3, 4).transpose(0, 2),
        made(),
        None if rank != 1 else made(2, dtype=torch.bfloat16),
    ]


def templates() -> list[Any]:
    shapes = [(3, 2)] * len(DTYPES) + [(5,), (5,), (5,), (4, 2), (4, 3, 2), (), (2,)]
    dtypes = [*DTYPES, *["float32"] * 6, "bfloat16"]
    return [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]


@pytest.mark.ddp(world_size=[2, 3], reuse="module")
def test_the_average_is_the_mean_over_ranks_with_zeros_for_what_is_missing(rank: int, world_size: int) -> None:
    average = average_over_ranks(local_tensors(rank), templates())
    parts = [local_tensors(each) for each in range(world_size)]
    for index, (got, like) in enumerate(zip(average, templates(), strict=True)):
        there = [part[index] for part in parts]
        if all(tensor is None for tensor in there):
            assert got is None
            continue
        wide = torch.complex128 if like.is_complex() else torch.float64
        dense = [torch.zeros_like(like) if t is None else (t.to_dense() if t.is_sparse else t) for t in there]
        mean = torch.stack([tensor.to(wide) for tensor in dense]).mean(0)
        assert got.dtype == like.dtype and got.shape == like.shape and got.layout == torch.strided
        torch.testing.assert_close(got, mean.to(like.dtype))
    ddpcheck.assert_same_on_all_ranks(average)  # bit by bit


@pytest.mark.ddp(reuse="module")
def test_half_precision_is_summed_in_single_precision(rank: int) -> None:
    value = torch.full((4,), 60_000.0, dtype=torch.float16)
    small = torch.full((4,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    value, small = average_over_ranks([value, small], [value, small])
    assert value.tolist() == [60_000.0] * 4, "the sum is beyond float16"
    assert small.tolist() == torch.full((4,), 128.5, dtype=torch.bfloat16).tolist()


@pytest.mark.ddp(reuse="module")
def test_gradients_are_replaced_by_their_mean_and_only_where_there_are_any(rank: int) -> None:
    model = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(4)])
    model[3].requires_grad_(False)
    model[0].weight.grad = torch.full((1, 2), float(rank))
    if rank == 1:
        model[1].weight.grad = torch.full((1, 2), 8.0)
    allreduce_grads(model.parameters())
    gradients = [None if p.grad is None else p.grad.tolist() for p in model.parameters()]
    assert gradients == [[[0.5, 0.5]], [[4.0, 4.0]], None, None]


@pytest.mark.ddp(world_size=3, reuse="module")
def test_only_the_ranks_of_a_group_are_averaged(rank: int) -> None:
    group = torch.distributed.new_group([0, 2])
    if rank != 1:
        mean = average_over_ranks([torch.ones(1) * rank], [torch.ones(1)], group=group)
        assert get_dist_info(group) == (rank // 2, 2) and mean[0].item() == 1.0


def test_without_a_process_group_there_is_one_rank_and_nothing_to_average() -> None:
    assert get_dist_info() == (0, 1)
    weight = nn.Parameter(torch.ones(2))
    weight.grad = gradient = torch.full((2,), 3.0)
    allreduce_grads([weight])
    assert weight.grad is gradient
    (alone, missing) = average_over_ranks([gradient, None], [weight, weight])
    assert alone.tolist() == [3.0, 3.0] and missing is None
    assert average_over_ranks([], []) == []
