"""Recipes whose `wrap` calls `fully_shard`: what is compared, and what is found, on real ranks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ddpcheck
from ddpcheck.findings.report import Finding, Report
from ddpcheck.findings.source_lines import defined_at
from ddpcheck.gather.ddp.sharding import gathered, mixed_precision
from ddpcheck.recipe.recipe import Recipe
from tests.reports import assert_healthy, contradictions, only, shown
from tests.tiers import share

if not hasattr(fsdp, "fully_shard"):
    pytest.skip("this torch has no fully_shard", allow_module_level=True)

Wrap = Callable[[nn.Module, torch.device], nn.Module]


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def replicas() -> DeviceMesh:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


def whole(mesh: Callable[[], DeviceMesh] = line, **options: Any) -> Wrap:
    def wrap(module: nn.Module, device: torch.device) -> nn.Module:
        return cast(nn.Module, fsdp.fully_shard(module, mesh=mesh(), **options))

    return wrap


def by_layer(mesh: Callable[[], DeviceMesh] = line, **options: Any) -> Wrap:
    def wrap(module: nn.Module, device: torch.device) -> nn.Module:
        for layer in [part for part in module.children() if not isinstance(part, nn.Embedding)]:
            if next(layer.parameters(), None) is not None:
                fsdp.fully_shard(layer, mesh=mesh(), **options)
        return whole(mesh, **options)(module, device)

    return wrap


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 17), nn.Tanh(), nn.Linear(17, 3))


def rows(step: int) -> tuple[Tensor, Tensor]:
    return torch.randn(24, 8), torch.randint(0, 3, (24,))


def entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(23, 12)
        self.block = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True)
        self.output = nn.Linear(12, 23, bias=False)
        self.output.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.output(self.block(self.table(tokens))))


def block_and_whole(mesh: Callable[[], DeviceMesh] = line, **options: Any) -> Wrap:
    def wrap(module: nn.Module, device: torch.device) -> nn.Module:
        fsdp.fully_shard(module.block, mesh=mesh(), **options)
        return whole(mesh, **options)(module, device)

    return wrap


def tokens(step: int) -> Tensor:
    return torch.randint(0, 23, (24, 6))


def next_token(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def recipe(wrap: Wrap, **other: Any) -> Recipe:
    return Recipe(**{"model": mlp, "batch": rows, "loss": entropy, "wrap": wrap, **other})


LANGUAGE: dict[str, Any] = {"model": Tied, "batch": tokens, "loss": next_token}
HALF = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
HEALTHY = {
    "by layer, gathered twice": recipe(by_layer(reshard_after_forward=True), optimizer=torch.optim.AdamW),
    "frozen": recipe(by_layer(), model=lambda: nn.Sequential(nn.Linear(8, 17).requires_grad_(False), nn.Linear(17, 3))),
    "tied": recipe(block_and_whole(), **LANGUAGE, optimizer=torch.optim.AdamW),
    "mixed precision": recipe(block_and_whole(mp_policy=HALF), **LANGUAGE),
}
IN_MAKE_TEST = ("tied",)


@pytest.mark.parametrize("name", share(HEALTHY, IN_MAKE_TEST))
def test_a_healthy_model_is_clean_and_all_of_it_was_compared(name: str) -> None:
    report = ddpcheck.check(HEALTHY[name], steps=2)
    assert_healthy(report)
    trained = sum(p.requires_grad for p in HEALTHY[name].model().parameters())
    for reference in ("local", "single-process"):
        compared = [entry for entry in report.parity if entry.reference == reference and entry.reference_norm]
        assert len(compared) == 2 * trained, shown(report)
    details = {check.name: check.detail for check in report.checks}
    assert "each other" not in details["reducer"] and "gathered from its shards" in details["reducer"]
    assert any("under fully_shard these are not compared" in note for note in report.world["notes"])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [line, replicas])
def test_a_healthy_model_is_clean_on_four_ranks(mesh: Callable[[], DeviceMesh]) -> None:
    assert_healthy(
        ddpcheck.check(recipe(block_and_whole(mesh), **LANGUAGE, optimizer=torch.optim.AdamW), world_size=4, steps=2)
    )


# Faults


class ByRank(nn.Module):
    """A layer that the first `ranks` of them use."""

    def __init__(self, ranks: int = 1) -> None:
        super().__init__()
        self.first, self.second, self.ranks = nn.Linear(8, 3), nn.Linear(8, 3), ranks

    def forward(self, x: Tensor) -> Tensor:
        rank = dist.get_rank() if dist.is_initialized() else 0
        found: Tensor = self.first(x)
        return found + self.second(x) if rank < self.ranks else found


def seeded_by_rank() -> nn.Module:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return mlp()


def handed_out(module: nn.Module, device: torch.device) -> nn.Module:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    values = {name: value.clone() for name, value in module.state_dict().items()}
    sharded = whole()(module, device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(sharded, values if dist.get_rank() == 0 else {}, options=options)
    return sharded


def switched(*values: bool, name: str = "set_requires_gradient_sync", wrap: Wrap | None = None) -> Wrap:
    def call(module: nn.Module, device: torch.device) -> nn.Module:
        sharded = (wrap or whole())(module, device)
        for value in values:
            getattr(sharded, name)(value)
        return sharded

    return call


def divided(factor: float) -> Wrap:
    def wrap(module: nn.Module, device: torch.device) -> nn.Module:
        sharded: Any = whole()(module, device)
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(factor * dist.get_world_size())
        return module

    return wrap


def first_layer_only(module: nn.Module, device: torch.device) -> nn.Module:
    fsdp.fully_shard(next(module.children()), mesh=line())
    return module


class Clipped(torch.optim.SGD):
    """Divides by the norm of the gradients: of the whole ones, of this rank's shards, or of all shards by hand."""

    def __init__(self, parameters: Any, norm_of: str = "whole") -> None:
        super().__init__(parameters, lr=0.1)
        self.norm_of = norm_of

    def step(self, closure: Any = None) -> None:
        gradients: list[Any] = [p.grad for group in self.param_groups for p in group["params"]]
        local = [g.to_local() if self.norm_of != "whole" and hasattr(g, "to_local") else g for g in gradients]
        size: Any = torch.stack([g.norm() for g in local]).norm()
        size = size.full_tensor() if hasattr(size, "full_tensor") else size
        if self.norm_of == "reduced":
            square = size.square()
            dist.all_reduce(square)
            size = square.sqrt()
        for gradient in gradients:
            gradient.div_(float(size))
        super().step()


def even() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def with_state(*, of_one_rank: bool) -> Callable[[Any], torch.optim.Optimizer]:
    """An optimizer of shards that begins with momentum: as of a file of one rank, or of each rank's own."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        every = list(parameters)
        optimizer = torch.optim.SGD(every, lr=0.05, momentum=0.9)
        rank = dist.get_rank() if dist.is_initialized() and not of_one_rank else 0
        drawn = torch.Generator().manual_seed(rank)
        momentum = [torch.empty_like(p) for p in every]
        for value in momentum:
            own = getattr(value, "to_local", lambda value=value: value)()
            own.detach().copy_(0.01 * torch.randn(own.shape, generator=drawn))
        state = {number: {"momentum_buffer": value} for number, value in enumerate(momentum)}
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        return optimizer

    return make


FAULTS: dict[str, tuple[str, Recipe, Recipe]] = {
    "a state of one rank": (
        "DDP521",
        recipe(whole(), model=even, optimizer=with_state(of_one_rank=True)),
        recipe(whole(), model=even, optimizer=with_state(of_one_rank=False)),
    ),
    "unused on rank 1": ("DDP104", recipe(whole(), model=ByRank), recipe(whole(), model=lambda: ByRank(ranks=9))),
    "seeded by rank": ("DDP208", recipe(whole(), model=seeded_by_rank), recipe(handed_out, model=seeded_by_rank)),
    "switched off": ("DDP502", recipe(switched(False)), recipe(switched(False, True))),
    "divided": ("DDP303", recipe(divided(2.0)), recipe(divided(1.0))),
    "norm of a shard": (
        "DDP306",
        recipe(whole(), optimizer=partial(Clipped, norm_of="shard")),
        recipe(whole(), optimizer=Clipped),
    ),
    "in no group": ("DDP111", recipe(first_layer_only), recipe(by_layer())),
}
SOON = ("norm of a shard", "unused on rank 1")


def the_error(report: Report) -> Finding:
    assert contradictions(report) == [], shown(report)
    assert report.error is None, shown(report)
    return only([finding for finding in report.findings if finding.severity.value == "error"])


@pytest.mark.parametrize("name", share(FAULTS, SOON))
def test_a_fault_is_told_by_its_own_rule_and_its_twin_is_clean(name: str) -> None:
    code, broken, healthy = FAULTS[name]
    report = ddpcheck.check(broken, steps=2)
    finding = the_error(report)
    assert finding.code == code
    if name == "unused on rank 1":  # ranks would reduce different gradients: nothing is run under the wrapper
        (reducer,) = (check for check in report.checks if check.name == "reducer")
        assert (reducer.status, finding.ranks) == ("skipped", (1,)) and "not run from step 0 on" in reducer.detail
    assert code != "DDP306" or finding.location == defined_at(Clipped.step)
    if code == "DDP303":
        assert finding.location is not None and "set_gradient_divide_factor is called there" in finding.evidence
        assert "set_gradient_divide_factor(" in Path(__file__).read_text().splitlines()[finding.location.line - 1]
    assert "find_unused_parameters" not in f"{finding.message}{finding.fix}{finding.evidence}"
    assert_healthy(ddpcheck.check(healthy, steps=2))


def sharded_on_rank_0(module: nn.Module, device: torch.device) -> nn.Module:
    mesh = line()
    return whole(lambda: mesh)(module, device) if dist.get_rank() == 0 else module


def test_a_module_that_is_sharded_on_some_ranks_only_is_told_before_anything_is_gathered() -> None:
    assert the_error(ddpcheck.check(recipe(sharded_on_rank_0), steps=1, timeout=10)).code == "DDP221"


@pytest.mark.slow
def test_replicas_of_shards_that_are_not_reduced() -> None:
    wrap = switched(False, name="set_requires_all_reduce", wrap=by_layer(replicas))
    assert the_error(ddpcheck.check(recipe(wrap), world_size=4, steps=2)).code == "DDP502"


@pytest.mark.slow
@pytest.mark.parametrize("norm_of", ["whole", "reduced"])
def test_parameters_after_a_step_are_compared_where_the_optimizer_does_not_communicate(norm_of: str) -> None:
    report = ddpcheck.check(recipe(whole(), optimizer=partial(Clipped, norm_of=norm_of)), steps=2)
    assert_healthy(report)
    detail = next(check.detail for check in report.checks if check.name == "reducer")
    by_hand = norm_of == "reduced"
    assert ("8 parameters after a step on shards equal those after a step on whole parameters" in detail) is not by_hand
    assert ("parameters after a step are not compared: the optimizer communicates" in report.world["notes"]) is by_hand


def test_a_parameter_that_no_rank_uses_is_a_warning_and_the_others_are_compared() -> None:
    report = ddpcheck.check(recipe(whole(), model=lambda: ByRank(ranks=0)), steps=2)
    assert [(finding.code, finding.severity.value) for finding in report.findings] == [("DDP101", "warning")]
    assert {check.name: check.status for check in report.checks}["reducer"] == "passed", shown(report)


# What `wrap` does beside


def grown_after(module: nn.Module, device: torch.device) -> nn.Module:
    sharded = whole()(module, device)
    sharded.extra = nn.Linear(2, 2)
    return sharded


@pytest.mark.slow
def test_layers_that_wrap_replaces_before_sharding_are_in_the_reference_too() -> None:
    def converted(module: nn.Module, device: torch.device) -> nn.Module:
        return by_layer()(nn.SyncBatchNorm.convert_sync_batchnorm(module), device)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))

    report = ddpcheck.check(recipe(converted, model=model), steps=2)
    assert_healthy(report)
    assert any("SyncBatchNorm" in note for note in report.world["notes"])


def test_layers_that_wrap_adds_after_sharding_are_refused_in_a_sentence() -> None:
    report = ddpcheck.check(recipe(grown_after), steps=1)
    assert report.error is not None and report.exit_code() == 3
    assert "changes the layers of the module in addition to fully_shard" in report.error.message


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replicate", "replicate_with_fsdp"])
def test_replicate_is_compared_as_a_wrapper(kind: str) -> None:
    module = pytest.importorskip(f"torch.distributed._composable.{kind}")

    def wrap(model: nn.Module, device: torch.device) -> nn.Module:
        options = {} if kind == "replicate" else {"mesh": line()}
        return cast(nn.Module, module.replicate(model, **options))

    assert_healthy(ddpcheck.check(recipe(wrap), steps=2))


@pytest.mark.ddp(world_size=2, timeout=60)
def test_the_policy_of_mixed_precision_is_read_and_where_it_cannot_be_counts_as_bfloat16(monkeypatch: Any) -> None:
    half, reduced = (fsdp.MixedPrecisionPolicy(**{name: torch.float16}) for name in ("param_dtype", "reduce_dtype"))
    plain = fsdp.fully_shard(mlp(), mesh=line())
    found = [mixed_precision(fsdp.fully_shard(mlp(), mesh=line(), mp_policy=policy)) for policy in (half, reduced)]
    assert found == [torch.float16, torch.float16]
    assert mixed_precision(plain) is None and mixed_precision(mlp()) is None
    monkeypatch.delattr(fsdp.FSDPModule, "_get_fsdp_state")
    assert mixed_precision(plain) is torch.bfloat16 and mixed_precision(mlp()) is None


@pytest.mark.ddp(world_size=2, timeout=60)
def test_a_shard_that_another_rank_lacks_is_left_out_by_all_ranks() -> None:
    module = fsdp.fully_shard(mlp(), mesh=line())
    parameters = {name: p if name != "0.bias" or dist.get_rank() else None for name, p in module.named_parameters()}
    whole = gathered([*parameters.items(), ("plain", torch.ones(2))], None)
    assert sorted(whole) == ["0.weight", "2.bias", "2.weight", "plain"]
    assert whole["0.weight"].shape == (17, 8) and type(whole["0.weight"]) is torch.Tensor
