"""The operations from a parameter to where its path to the loss ends, as a finding has them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import ddpcheck
from ddpcheck.findings.evidence.steps import PathEnd
from ddpcheck.findings.figures import ModuleEntry, ParameterPath
from ddpcheck.findings.report import Finding
from ddpcheck.gather.autograd.gradient_paths import OperationPath
from ddpcheck.gather.state.module_description import module_entries


class Net(nn.Module):
    def __init__(self, cut: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.cut = cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.cut(self, x))
        return out


def findings_on(cut: Callable[[Net, torch.Tensor], torch.Tensor]) -> tuple[Finding, ...]:
    model, batch = Net(cut), torch.ones(2, 4)

    def forward() -> torch.Tensor:
        return model(batch).sum()

    return ddpcheck.detect_anomalous_params(forward(), model, replay=forward).findings


def path_of(cut: Callable[[Net, torch.Tensor], torch.Tensor]) -> ParameterPath:
    (path,) = {finding.path for finding in findings_on(cut)}
    assert path is not None and path.parameter in ("body.weight", "body.bias")
    return path


def without_gradient(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.relu(net.body(x))


def lost(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.body(x).tanh().exp()
    return x


def detached(net: Net, x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(net.body(x).relu()).detach() * 2 + 1


def in_place(net: Net, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(2, 4)
    out[:] = net.body(x).data
    return out.cos()


@pytest.mark.parametrize(
    ("cut", "end", "operations", "reason"),
    [
        (lost, "unreachable", ["linear()", "tanh()", "exp()"], ""),
        (detached, "cut", ["linear()", "relu()", "sigmoid()", "detach()"], "detach()"),
        (without_gradient, "cut", ["linear()"], "torch.no_grad()"),
        (in_place, "cut", ["linear()", ".data"], ".data"),
        (lambda _net, x: x, "unused", [], ""),
    ],
)
def test_a_path_goes_from_the_parameter_to_its_end(cut, end: str, operations: list[str], reason: str) -> None:
    path = path_of(cut)
    assert (path.end, [step.operation for step in path.steps], path.reason) == (end, operations, reason)
    assert all(step.location and step.location.path.endswith("test_parameter_paths.py") for step in path.steps)
    assert [step.module for step in path.steps[:1]] == (["body"] if operations else [])
    assert (path.begins_at is not None) == (reason == "torch.no_grad()")


@pytest.mark.parametrize("length", range(12))
def test_a_path_tells_all_its_operations_or_how_many_it_leaves_out(length: int) -> None:
    path = OperationPath()
    for number in range(length):
        path = path.extended(PathEnd("cut", str(number)))
    end = path.described(PathEnd("cut", "x"))
    numbers = [int(step.operation) for step in end.steps]
    assert len(numbers) + end.left_out == length and numbers == sorted(set(numbers))
    assert numbers[:4] == list(range(length))[:4] and numbers[-4:] == list(range(length))[-4:]
    assert end == PathEnd("cut", "x"), "how one came there is no part of where it ends"


def test_modules_are_described_with_their_own_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.LazyLinear(3))
    assert module_entries(model) == (
        ModuleEntry("", "Sequential"),
        ModuleEntry("0", "Linear", ("weight", "bias"), 10),
        ModuleEntry("1", "ReLU"),
        ModuleEntry("2", "LazyLinear", ("weight", "bias"), 0),
    )


def test_a_block_without_gradient_is_told_by_its_own_line_and_not_by_that_of_a_block_in_it() -> None:
    def nested(net: Net, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            with torch.no_grad():
                x = x * 2
            return net.body(x)

    (found,) = findings_on(nested)
    begins = nested.__code__.co_firstlineno + 1
    assert any(f"test_parameter_paths.py:{begins}" in line for line in found.evidence), found.evidence


@pytest.mark.ddp(world_size=2)
def test_what_ranks_gather_of_a_parameter_is_made_of_it() -> None:
    def gathered(has_grad: bool, net: Net, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(has_grad):
            own = net.body(x)
            parts = [torch.empty_like(own) for _ in range(2)]
            torch.distributed.all_gather(parts, own)
        return torch.cat(parts)

    for has_grad, words in ((False, ""), (True, "all_gather(), through which no gradient flows")):
        (finding,) = findings_on(partial(gathered, has_grad))
        assert finding.code == "DDP103" and words in finding.message
    wrapped = nn.parallel.DistributedDataParallel(Net(partial(gathered, False)))
    found = ddpcheck.detect_anomalous_params(wrapped(torch.ones(2, 4)).sum(), wrapped)
    assert found.missing == ("body.weight", "body.bias")
