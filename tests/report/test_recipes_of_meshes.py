"""Recipes whose `wrap` splits the model by tensor parallelism, alone and beside data parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp

import ddpcheck
from ddpcheck.recipe.recipe import Recipe
from tests.reports import assert_healthy, contradictions, shown
from tests.tiers import one_of, share

if not hasattr(fsdp, "fully_shard"):
    pytest.skip("this torch has no fully_shard", allow_module_level=True)

from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from tests.mesh_loops import LENGTH, WORDS, Block, Net, Shifted, SplitBlock, grid, loss_of, sharded, split

Wrap = Callable[[Any, torch.device], nn.Module]


def rows(step: int) -> Tensor:
    return torch.randint(WORDS, (8, LENGTH + 1))


def under_ddp(**options: Any) -> Wrap:
    def wrap(module: Any, device: torch.device) -> nn.Module:
        mesh = grid(2)
        return DistributedDataParallel(split(module, mesh["tp"]), device_mesh=mesh["dp"], **options)

    return wrap


def under_fsdp(**options: Any) -> Wrap:
    def wrap(module: Any, device: torch.device) -> nn.Module:
        mesh = grid(2)
        return cast(nn.Module, sharded(split(module, mesh["tp"], **options), mesh["dp"]))

    return wrap


def split_only(tp: int = 4, **options: Any) -> Wrap:
    return lambda module, device: split(module, grid(tp)["tp"], **options)


def recipe(wrap: Wrap, **other: Any) -> Recipe:
    return Recipe(**{"model": Net, "batch": rows, "loss": loss_of, "wrap": wrap, **other})


HEALTHY: dict[str, Recipe] = {
    "ddp": recipe(under_ddp(), optimizer=torch.optim.AdamW),
    "fully_shard, of sequences": recipe(under_fsdp(sequence=True), optimizer=torch.optim.AdamW),
    "alone, of sequences": recipe(split_only(sequence=True), optimizer=torch.optim.AdamW),
}


@pytest.mark.parametrize("name", share(one_of(2, HEALTHY), []))
def test_a_healthy_model_is_clean_and_all_of_it_was_compared(name: str) -> None:
    report = ddpcheck.check(HEALTHY[name], world_size=4, steps=2)
    assert_healthy(report)
    count = len(list(HEALTHY[name].model().parameters()))
    for reference in ("local", "single-process"):
        assert len([entry for entry in report.parity if entry.reference == reference]) == 2 * count, shown(report)
    (reducer,) = (check.detail for check in report.checks if check.name == "reducer")
    assert f"{2 * count} parameters after a step on parts equal those after a step on whole parameters" in reducer
    (note,) = (note for note in report.world["notes"] if note.startswith("tensor parallelism: "))
    assert ("ranks 0 to 3" if name.startswith("alone") else "ranks 0 and 1, ranks 2 and 3") in note


@pytest.mark.slow
def test_parts_that_draw_other_random_numbers_than_the_whole_are_not_compared_and_no_fault() -> None:
    report = ddpcheck.check(recipe(under_fsdp(sequence=True), model=lambda: Net(drops=0.2)), world_size=4, steps=1)
    assert not report.findings and report.error is None, shown(report)
    status = {check.name: (check.status, check.detail) for check in report.checks}
    assert status["reducer"][0] == "skipped" and "random numbers" in status["reducer"][1]
    assert status["parity"][0] == "passed"


# Layers that are split by hand


def split_by_hand() -> nn.Module:
    torch.manual_seed(0)
    return SplitBlock(grid(2)["tp"]) if dist.is_initialized() else Block()


def test_of_layers_that_model_splits_by_hand_a_sentence_says_that_they_are_not_compared() -> None:
    by_hand = Recipe(
        model=split_by_hand,
        batch=lambda step: torch.randn(8, 16, generator=torch.Generator().manual_seed(step)),
        loss=lambda model, batch: (model(batch) - 1.0).square().mean(),
        shard=lambda batch, _rank, _world_size: batch,
        wrap=lambda module, _: module,
    )
    report = ddpcheck.check(by_hand, world_size=2, steps=1)
    assert not report.findings and report.error is None, shown(report)
    passed = [check.name for check in report.checks if check.status == "passed"]
    assert passed == ["model", "consistency", "parameters"], shown(report)
    assert any("model() splits layers over ranks 0 and 1 without DTensor" in note for note in report.world["notes"])


# Faults


def seeded_by_replica() -> nn.Module:
    return Shifted(seed=dist.get_rank() // 2 if dist.is_initialized() else 0)


def summed(model: Any, batch: Tensor) -> Tensor:
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")


def by_world(batch: Tensor, rank: int, world_size: int) -> Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else batch.chunk(4)[rank]


def parts_of_outputs(module: Any, device: torch.device) -> nn.Module:
    mesh = grid(2)
    parallelize_module(module, mesh["tp"], {"head": ColwiseParallel()})
    return DistributedDataParallel(module, device_mesh=mesh["dp"])


def squares(model: Any, batch: Tensor) -> Tensor:
    return cast(Tensor, model(batch[:, :-1]).square().mean())


FAULTS: dict[str, tuple[str, Recipe, Recipe]] = {  # with their twins
    "replicas start differently": (
        "DDP208",
        recipe(under_fsdp(), model=seeded_by_replica),
        recipe(under_fsdp(), model=Shifted),
    ),
    "nobody averages over the data dimension": ("DDP301", recipe(split_only(2)), HEALTHY["ddp"]),
    "norms are not in the plan": (
        "DDP301",
        recipe(under_fsdp(sequence=True, norms=False)),
        HEALTHY["fully_shard, of sequences"],
    ),
    "a sum": ("DDP305", recipe(under_ddp(), loss=summed), HEALTHY["ddp"]),
    "another batch on each rank of a model": (
        "DDP516",
        recipe(under_ddp(), shard=by_world),
        recipe(under_ddp(), shard=lambda batch, rank, world_size: batch.chunk(world_size)[rank]),
    ),
    "a loss of each part": ("DDP302", recipe(parts_of_outputs, loss=squares), recipe(under_ddp(), loss=squares)),
}


@pytest.mark.parametrize("name", share(dict.fromkeys(["a sum", *one_of(2, FAULTS)]), []))
def test_a_fault_is_told_by_its_rule(name: str) -> None:
    code, broken, _ = FAULTS[name]
    report = ddpcheck.check(broken, world_size=4, steps=1)
    assert report.error is None and [finding.code for finding in report.findings] == [code], shown(report)
    assert not contradictions(report), shown(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["replicas start differently", "another batch on each rank of a model"])
def test_the_twin_of_a_fault_that_is_no_other_healthy_model_is_clean(name: str) -> None:
    report = ddpcheck.check(FAULTS[name][2], world_size=4, steps=3)
    assert not report.findings and report.error is None, shown(report)
