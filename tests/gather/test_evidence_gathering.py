"""Samples by their rows, hooks by their lines, coupled samples by module and line, draws that end."""

import warnings
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from ddpcheck.gather.autograd.gradient_hooks import user_functions
from ddpcheck.gather.ddp.loop_events import LoopEventRecorder, count_backwards, record_loop_events
from ddpcheck.gather.state import randomness
from ddpcheck.gather.state.randomness import QuietRandomness
from ddpcheck.gather.steps import batch_coupling
from ddpcheck.gather.steps.batch_coupling import first_coupling
from ddpcheck.gather.steps.training_step import sample_fingerprints
from ddpcheck.stream.ledger import Ledger


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex64])
def test_any_change_in_a_row_shows(dtype: torch.dtype) -> None:
    batch = torch.arange(30).reshape(5, 6).to(dtype)
    changed = batch.clone()
    changed[3, 5] = 0
    before, after = sample_fingerprints(batch), sample_fingerprints(changed)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, True, False, True]


def test_samples_that_cannot_be_told_apart_have_none() -> None:
    assert sample_fingerprints((torch.zeros(3, 2), torch.zeros(4))) == ()
    assert sample_fingerprints(torch.zeros(0, 3)) == ()


class Mixing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


class Pyramid(nn.Module):
    """One layer sees tensors of several shapes; samples meet outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        narrow = self.act(x.repeat_interleave(2, 0)[:, :2])
        return self.act(x - x.mean(0)) + narrow[: len(x), :1]


def coupling(layer: nn.Module, finish: Any, start: Any = torch.clone) -> tuple[str | None, str]:
    net = nn.Sequential(nn.Linear(3, 3), layer)
    batch = torch.randn(8, 3)
    part = batch[:4]
    meeting = first_coupling(net, lambda: finish(net(start(batch))), lambda: finish(net(start(part))))
    return meeting.module, str(meeting.line).rpartition("/")[2] if meeting.line else ""


def test_the_first_place_at_which_samples_meet() -> None:
    line = Mixing.forward.__code__.co_firstlineno + 1
    assert coupling(Mixing(), torch.Tensor.mean) == ("1", f"test_evidence_gathering.py:{line}")
    assert coupling(nn.BatchNorm1d(3), torch.Tensor.mean) == ("1", "")
    assert coupling(nn.BatchNorm1d(3), torch.tanh) == ("1", "")  # a line after the module is not where they meet first
    assert coupling(nn.Tanh(), torch.Tensor.mean) == (None, "")
    module, at = coupling(nn.Tanh(), lambda out: (out @ out.T).exp().mean())
    assert module is None and at.startswith("test_evidence_gathering.py:")
    assert coupling(nn.Tanh(), torch.tanh, lambda x: torch.cat([x, -x])) == (None, ""), "two views in one batch"
    assert coupling(Pyramid(), torch.tanh)[0] == "1"


class Loop(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(100):
            x = x * 1.01
        return x


def test_each_turn_of_a_loop_is_looked_for_in_the_same_turn_of_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, depends = [], batch_coupling._lacks_rows
    monkeypatch.setattr(batch_coupling, "_lacks_rows", lambda *args: counted.append(1) or depends(*args))
    net, batch = Loop(), torch.randn(8, 4)
    assert first_coupling(net, lambda: net(batch), lambda: net(batch[:4])).line is None
    assert len(counted) < 150


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clamp(-1, 1)


def test_a_function_of_the_users_is_found_among_the_nodes_of_a_graph() -> None:
    (hook,) = user_functions({"ClippedBackward", "AddmmBackward0"})
    assert hook.location is not None and hook.location.path.endswith("test_evidence_gathering.py")
    assert user_functions({"AddmmBackward0"}) == ()


def test_rejection_sampling_ends_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(randomness, "_MOST_DRAWS", 100)
    with QuietRandomness():
        for _ in range(1_000):
            if torch.rand(()) < 0.1:
                break
        else:
            raise AssertionError("the loop never ended")


def kinds(recorder: LoopEventRecorder) -> list[str]:
    return [event.kind + (" lost" if event.discarded else "") for event in recorder.events]


def test_gradients_count_as_lost_only_where_nobody_has_used_them() -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with record_loop_events(net, net, optimizer) as recorder:
        net(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        net(torch.ones(3, 2)).sum().backward()
        net.zero_grad()
    assert kinds(recorder) == ["forward", "backward", "forward", "backward", "zero_grad lost", "step"]
    assert recorder.events[-2].location.rpartition("/")[2].startswith("test_evidence_gathering.py")


def test_gradients_for_an_input_and_a_rate_of_zero_are_no_loss() -> None:
    net = nn.Linear(2, 1)
    probe = torch.ones(3, 2, requires_grad=True)
    for inputs, rate, lost in ((probe, 0.1, 0), (probe.detach(), 0.0, 0), (probe.detach(), 0.1, 1)):
        with record_loop_events(net, net, torch.optim.SGD(net.parameters(), lr=rate)) as recorder:
            net(inputs).sum().backward()
            net.zero_grad()
        assert kinds(recorder) == ["forward", "backward", "zero_grad lost", "step"]
        assert len(Ledger(recorder.events).lost) == lost


def test_a_backward_inside_another_one_is_part_of_it() -> None:
    x = torch.ones(2, requires_grad=True)
    with count_backwards() as count, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.utils.checkpoint.checkpoint(lambda t: t.sin(), x, use_reentrant=True).sum().backward()
    assert count == [1]


def test_everything_is_put_back_after_a_step() -> None:
    before = (torch.autograd.backward, nn.Module.zero_grad, torch.optim.Optimizer.zero_grad)
    net = nn.Linear(2, 1)
    with pytest.raises(ZeroDivisionError), record_loop_events(net, net, torch.optim.SGD(net.parameters(), lr=0.1)):
        raise ZeroDivisionError
    assert (torch.autograd.backward, nn.Module.zero_grad, torch.optim.Optimizer.zero_grad) == before
