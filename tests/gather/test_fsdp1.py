"""A `FullyShardedDataParallel` (FSDP1) is compared by no door, and each says so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import ddpcheck
from ddpcheck.gather.ddp.sharding import count_in_fsdp1
from tests.tiers import share

KINDS: dict[str, dict[str, Any]] = {
    "one parameter for all": {"use_orig_params": False},
    "those of the model": {"use_orig_params": True},
    "in full on each rank": {"use_orig_params": True, "sharding_strategy": ShardingStrategy.NO_SHARD},
}


def fsdp1(module: nn.Module, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)


def all_in_fsdp1(module: nn.Module) -> bool:
    return count_in_fsdp1(module.parameters()) == len([*module.parameters()]) > 0


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 17), nn.Linear(17, 4))


@pytest.mark.ddp(world_size=2, timeout=60)
@pytest.mark.filterwarnings("ignore:The `NO_SHARD`")
def test_no_door_to_ranks_compares_one() -> None:
    for options in KINDS.values():
        module, outside = fsdp1(net(), **options), net()
        assert all_in_fsdp1(module) and not count_in_fsdp1(outside.parameters())
        out = module(torch.randn(4, 8)).sum()
        assert all_in_fsdp1(module)  # the same ones, whichever part of them is there
        doors: list[Callable[[nn.Module], object]] = [
            ddpcheck.watch,
            ddpcheck.check_consistency,
            ddpcheck.CheckedDistributedDataParallel,
            lambda model, loss=out: ddpcheck.detect_anomalous_params(loss, model),
        ]
        for door in doors:
            for one in (module, nn.ModuleList([module])):
                with pytest.raises(ddpcheck.UsageError, match=r"\(FSDP1\), which ddpcheck does not compare; shard the"):
                    door(one)
    assert ddpcheck.check_consistency(outside) == []


def entropy(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch), batch[:, :4].argmax(1))


@pytest.mark.parametrize("made", share(["by wrap", "by model"], ["by model"]))
def test_a_recipe_of_one_is_refused_in_one_sentence(made: str) -> None:
    recipe = ddpcheck.Recipe(
        model=net if made == "by wrap" else lambda: fsdp1(net()),
        batch=lambda _step: torch.randn(8, 8),
        loss=entropy,
        wrap=(lambda module, _device: fsdp1(module)) if made == "by wrap" else None,
    )
    report = ddpcheck.check(recipe, world_size=2, steps=1)
    assert report.findings == () and report.error is not None
    assert "(FSDP1), which ddpcheck does not compare; shard the model" in report.error.message
    assert "bug" not in report.error.message and report.exit_code() == 3
