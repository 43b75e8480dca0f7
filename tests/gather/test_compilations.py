"""What is recorded of `torch.compile`, by names that are private to torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ddpcheck.findings.evidence.loop import FunctionCompiled
from ddpcheck.gather.steps import compilations
from ddpcheck.gather.steps.compilations import CompilationRecorder

SAYS_WHY_IT_FAILS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 7)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.body(x).relu()
        return scores + x.norm()


@pytest.fixture
def recorded() -> Iterator[list[FunctionCompiled]]:
    """What is recorded until the test ends; what torch has compiled before is forgotten."""
    from torch._dynamo import convert_frame, output_graph

    torch._dynamo.reset()
    kind: Any = output_graph.OutputGraph
    before = convert_frame._compile, kind.call_user_compiler
    entries: list[FunctionCompiled] = []
    with CompilationRecorder(entries.append, lambda: True, lambda: 3):
        yield entries
    assert (convert_frame._compile, kind.call_user_compiler) == before


def test_recompilations_come_with_their_guards_until_a_limit_is_reached(recorded: list[FunctionCompiled]) -> None:
    config: Any = torch._dynamo.config
    net = torch.compile(Net(), backend="eager", dynamic=False)
    with config.patch(**{"recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit": 3}):
        for number in (5, 6, 7, 8, 9, 5):
            net(torch.randn(number, 4))
    trained, given_up = recorded[:3], recorded[3:]
    assert {one.function for one in recorded} == {"Net.forward"}
    assert all({"relu", "add"} < {*one.operations} and {*one.operations.values()} == {1} for one in trained)
    assert trained[0].guard == "" and trained[1].guard == trained[2].guard
    assert trained[1].guard.endswith("size mismatch at index 0. expected")
    assert trained[1].reason == f"{trained[1].guard} 5, actual 6"
    assert len({one.inputs for one in trained}) == 3
    assert trained[0].location is not None and trained[0].location.path.endswith("test_compilations.py")
    assert [(one.hit_limit, one.guard) for one in given_up] == ([(True, trained[1].guard)] if SAYS_WHY_IT_FAILS else [])
    assert {(one.step, one.trains) for one in recorded} == {(3, True)}


@pytest.mark.skipif(not SAYS_WHY_IT_FAILS, reason="torch does not note it")
def test_the_reason_is_the_one_that_torch_itself_notes(recorded: list[FunctionCompiled]) -> None:
    utils: Any = torch._dynamo.utils
    net = torch.compile(Net(), backend="eager")
    for number in (5, 6):
        net(torch.randn(number, 4))
    assert [one.trains for one in recorded] == [True, True]
    with torch.no_grad():
        net(torch.randn(number, 4))
    assert (recorded[2].trains, recorded[2].operations) == (False, {})
    assert recorded[2].reason in utils.get_compilation_metrics()[-1].recompile_reason


def test_without_what_is_private_to_torch_a_reason_is_not_known(
    recorded: list[FunctionCompiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilations, "_UTILS", "torch._dynamo.none")
    net = torch.compile(Net(), backend="eager")
    for number in (5, 6):
        net(torch.randn(number, 4))
    assert [(one.guard, one.reason) for one in recorded] == [("", "")] * 2
