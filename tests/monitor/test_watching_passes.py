"""Backward passes that DDP does not reduce, as `watch` sees them on real ranks."""

import contextlib

import pytest
import torch
from torch import nn

import ddpcheck
from tests.monitor.loops import Net, accumulate, batch, checked, codes, line_of, sgd, steps, train

pytestmark = pytest.mark.ddp(world_size=2, reuse="module", preload=["ddpcheck.monitor.wrapper"])

# Second backward passes


def test_a_second_backward_pass_without_a_forward_of_its_own_is_told():
    model, findings = checked()
    for _ in steps(model, 2):
        first, second = model(batch()), model(batch())
        first.sum().backward()
        second.sum().backward()
    assert codes(findings) == ["DDP509"]
    assert "second.sum().backward()" in line_of(findings[0])
    assert "the step runs forward, forward, backward, backward" in findings[0].evidence


@pytest.mark.parametrize("unused", [False, True])
def test_a_second_backward_pass_through_another_output_is_told_and_no_parameter_of_it(unused):
    model, findings = checked(find_unused_parameters=unused)
    for _ in steps(model, 1 if unused else 10):  # in the next step DDP raises
        out = model(batch(), "both")
        out["main"].sum().backward(retain_graph=True)
        out["spare"].sum().backward()
    assert codes(findings) == ["DDP509"]
    assert 'out["spare"].sum().backward()' in line_of(findings[0])


# Gradients that are not reduced


def no_sync_is_never_entered(model):
    for _ in range(4):
        model.no_sync()
        train(model, 1)


def no_sync_around_the_backward_pass_alone(model):
    for _ in range(3):
        loss = model(batch()).sum()
        with model.no_sync():
            loss.backward()


def one_step_under_no_sync(model):
    for step in range(6):
        with model.no_sync() if step == 3 else contextlib.nullcontext():
            train(model, 1, begin=step)


def the_inner_module_is_trained(model):
    train(model.module, 5)


def last_micro_batch_set_after_forward(model):
    accumulate(model, 3, synchronises=lambda i: i % 4 == 3, late=True)


def the_first_micro_batch_synchronises(model):
    accumulate(model, 3, synchronises=lambda i: i % 4 == 0)


def last_micro_batch_of_rank_1(model):
    for _ in steps(model, 3):
        model(batch()).sum().backward()
        if torch.distributed.get_rank():
            with model.no_sync():
                model(batch()).sum().backward()


# Finding, ranks, and what its line contains.
UNREDUCED = {
    no_sync_is_never_entered: ("DDP502", (), "model.no_sync()"),
    no_sync_around_the_backward_pass_alone: ("DDP502", (), "with model.no_sync():"),
    one_step_under_no_sync: ("DDP502", (), ""),
    the_inner_module_is_trained: ("DDP501", (), ""),
    last_micro_batch_set_after_forward: ("DDP502", (), "optimizer.step()"),
    the_first_micro_batch_synchronises: ("DDP502", (), "optimizer.step()"),
    last_micro_batch_of_rank_1: ("DDP502", (1,), ""),
}


def test_an_optimizer_that_only_gets_gradients_of_its_own_rank_is_told(rank):
    for loop, (code, ranks, line) in UNREDUCED.items():
        torch.manual_seed(rank)
        model, findings = checked()
        loop(model)
        assert [(finding.code, finding.ranks) for finding in findings] == [(code, ranks)], loop.__name__
        assert line in line_of(findings[0]), loop.__name__
        if loop.__name__.endswith(("forward", "synchronises")):
            assert findings[0].severity is ddpcheck.Severity.ERROR


@pytest.mark.slow
def test_an_unfinished_window_that_is_stepped_on_at_the_end_is_told_when_the_watch_is_closed():
    model, findings = nn.parallel.DistributedDataParallel(Net()), []
    with ddpcheck.watch(model, on_finding=findings.append):
        optimizer = sgd(model)
        accumulate(model, 2, synchronises=lambda i: i % 4 == 3, optimizer=optimizer)
        with model.no_sync():
            model(batch()).sum().backward()
        optimizer.step()
        assert findings == []
    assert codes(findings) == ["DDP502"]


def test_an_optimizer_whose_closure_runs_passes_that_are_not_synchronised_is_told():
    model, findings = checked()
    optimizer = sgd(model)

    def closure(synchronises):
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        with contextlib.nullcontext() if synchronises else model.no_sync():
            loss = model(batch()).square().mean()
            loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(lambda: closure(True))
    assert findings == []
    for _ in range(2):
        optimizer.step(lambda: closure(False))
    assert codes(findings) == ["DDP502"]
