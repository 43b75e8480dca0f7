"""`ddpcheck.watch` on models that `fully_shard` has sharded, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

import ddpcheck
from ddpcheck.findings.report import Finding

if not hasattr(fsdp, "fully_shard"):
    pytest.skip("this torch has no fully_shard", allow_module_level=True)

ON_RANKS = pytest.mark.ddp(world_size=2, timeout=60, reuse="module")


class Net(nn.Module):
    def __init__(self, *, extra: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(8, 9)
        self.extra = nn.Linear(9, 1) if extra else None
        self.head = nn.Linear(9, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).relu())
        return out


def sharded(model: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    model = model or Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model.get_submodule("body"), model):
        fsdp.fully_shard(part, mesh=mesh)
    return model


def train(
    model: nn.Module, steps: int, *, wrapped: nn.Module | None = None, after: Callable[[int], object] = lambda _: None
) -> list[Finding]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(dist.get_rank())
    findings: list[Finding] = []
    with ddpcheck.watch(wrapped or model, check_consistency_every=1, on_finding=findings.append) as watch:
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            after(step)
    assert watch.step == steps or findings
    return findings


@ON_RANKS
def test_a_healthy_loop_of_shards_has_all_its_steps_and_no_finding() -> None:
    for inside in (False, True):
        model = sharded()
        assert train(model, 5, wrapped=nn.Sequential(model) if inside else None) == []


@ON_RANKS
def test_one_part_that_is_never_reduced_is_told_unless_it_is_frozen() -> None:
    for frozen in (True, False):
        model = Net()
        model.body.requires_grad_(not frozen)
        model = sharded(model)
        model.get_submodule("body").set_requires_gradient_sync(False)
        findings = train(model, 20)
        assert [finding.code for finding in findings] == ([] if frozen else ["DDP502"])
        assert all("of its module" in finding.message for finding in findings)


@ON_RANKS
def test_gradients_that_no_step_has_are_told_with_the_line_that_switched_the_reduction_off() -> None:
    def loop(model: Any, steps: int) -> list[Finding]:
        optimizer, findings = torch.optim.SGD(model.parameters(), lr=0.05), list[Finding]()
        with ddpcheck.watch(model, on_finding=findings.append):
            for step in range(steps):
                model.set_requires_gradient_sync(step == 0)
                model(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
        return findings

    assert loop(sharded(), 6) == []  # one step was reduced: the loop may reduce again
    model = sharded()
    model.set_requires_gradient_sync = lambda _on: nn.Module  # what is switched in the loop has no effect
    fsdp.FSDPModule.set_requires_gradient_sync(model, False)
    (finding,) = loop(model, 4)
    assert (finding.code, finding.subjects) == ("DDP502", ("set_requires_gradient_sync",))
    assert finding.location is not None and finding.location.path.endswith("test_watching_shards.py")


@ON_RANKS
def test_a_parameter_that_no_rank_uses_is_told_when_enough_steps_have_been_seen() -> None:
    (finding,) = train(sharded(Net(extra=True)), 10)
    assert (finding.code, finding.subjects) == ("DDP102", ("extra.weight", "extra.bias"))
    assert finding.severity is ddpcheck.Severity.WARNING


@ON_RANKS
def test_a_buffer_that_comes_to_differ_is_told_and_one_that_is_averaged_is_not() -> None:
    model = sharded()
    assert train(model, 4, after=lambda step: model.seen.fill_(step)) == []
    (finding,) = train(sharded_again := sharded(), 4, after=lambda _: sharded_again.seen.add_(dist.get_rank()))
    assert (finding.code, finding.subjects) == ("DDP214", ("seen",))


class Even(Net):
    """Of which two ranks have shards of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 10), nn.Linear(10, 2)


@ON_RANKS
def test_an_assignment_to_the_data_of_shards_is_told_at_its_line() -> None:
    def decay_in_place(_step: int) -> None:
        for p in model.parameters():
            p.data.mul_(0.9)

    def decay(_step: int) -> None:
        for p in model.parameters():
            p.data = p.data * 0.9

    assert train(model := sharded(Even()), 3, after=decay_in_place) == []
    (finding,) = train(model := sharded(Even()), 3, after=decay)
    assert (finding.code, len(finding.subjects)) == ("DDP503", 4)
    assert finding.location is not None and "test_watching_shards" in finding.location.path
    assert "data" not in vars(type(next(model.parameters())))


@ON_RANKS
def test_the_same_shard_on_every_rank_is_told_and_different_ones_are_not() -> None:
    for same in (True, False):
        model = sharded(Even())
        torch.manual_seed(0 if same else dist.get_rank())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().copy_(torch.randn(parameter.to_local().shape))
        findings = train(model, 3)
        assert [finding.code for finding in findings] == (["DDP521"] if same else [])
        assert all(each.severity is ddpcheck.Severity.ERROR and len(each.subjects) == 3 for each in findings)


@ON_RANKS
def test_a_part_that_no_group_holds_is_told() -> None:
    for grouped in (False, True):
        torch.manual_seed(0)
        model = Net()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        ignored = set[nn.Parameter]() if grouped else set(model.head.parameters())
        findings = train(fsdp.fully_shard(model, mesh=mesh, ignored_params=ignored), 3)
        assert {finding.code for finding in findings} == (set() if grouped else {"DDP111"}), findings


@pytest.mark.ddp(world_size=1, timeout=60)
def test_what_cannot_be_watched_is_told() -> None:
    with pytest.raises(ddpcheck.UsageError, match="under fully_shard each rank has only a shard"):
        ddpcheck.watch(sharded(), check_parity_every=1)
    with pytest.raises(ddpcheck.UsageError, match=r"or one that fully_shard has sharded; there is none for Net$"):
        ddpcheck.watch(Net())
    with pytest.raises(ddpcheck.UsageError, match="there is 2 of them for Sequential"):
        ddpcheck.watch(nn.Sequential(sharded(), sharded()))


@pytest.mark.ddp(world_size=2, timeout=60)
def test_what_torch_keeps_to_itself_is_asked_of_the_parameters(monkeypatch: Any) -> None:
    from ddpcheck.gather.ddp.ddp_wrapper import group_of, ranks_of
    from ddpcheck.gather.ddp.sharding import parameter_groups, reduces_gradients, shard_number, split_of

    model = sharded()
    groups, known = parameter_groups(model), (ranks_of(model), group_of(model))
    assert known == ((0, 1), None) and len(groups) == 2 and reduces_gradients(groups)
    model.body.set_requires_gradient_sync(False)
    assert not reduces_gradients(groups)
    assert {(split_of(p), shard_number(p)) for p in model.parameters()} == {((2, 0), dist.get_rank())}
    monkeypatch.delattr(fsdp.FSDPModule, "_get_fsdp_state")
    assert (ranks_of(model), group_of(model)) == known
    assert parameter_groups(model) == [] and reduces_gradients([])
