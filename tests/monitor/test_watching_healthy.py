"""Healthy programs of many kinds, on which `watch` may say nothing, on real ranks."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ddpcheck
from tests.monitor.loops import (
    Boxed,
    Keeping,
    Layers,
    Net,
    accumulate,
    batch,
    checked,
    sgd,
    silent,
    steps,
    towers,
    train,
)

pytestmark = pytest.mark.ddp(world_size=2, reuse="module", preload=["ddpcheck.monitor.wrapper"])


def options_of_ddp(wrap):
    train(wrap(gradient_as_bucket_view=True), 7)
    train(wrap(bucket_cap_mb=0.0001), 7)
    train(wrap(static_graph=True), 7)
    train(wrap(broadcast_buffers=False), 7)
    train(wrap(find_unused_parameters=True, gradient_as_bucket_view=True), 7)


def accumulation_under_no_sync(wrap):
    for _ in steps(model := wrap(), 5):
        with model.no_sync():
            model(batch()).sum().backward()
            model(batch(), "short").sum().backward()
        model(batch()).sum().backward()
    for _ in steps(model := wrap(find_unused_parameters=True), 10):
        with model.no_sync():
            model(batch(), "whole").square().mean().backward()
        model(batch(), "short").square().mean().backward()


def accumulation_that_ends_synchronised(wrap):
    accumulate(wrap(), 4, synchronises=lambda i: i % 4 == 3)
    model = wrap()
    optimizer = sgd(model)
    for index in range(30):  # epochs of ten batches: the last window of each has two, and ends synchronised
        is_last = index % 10 in (3, 7, 9)
        with contextlib.nullcontext() if is_last else model.no_sync():
            model(batch()).square().mean().backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=index > 20)
    for _ in range(3):  # what an unfinished window has left goes into the next reduction
        with model.no_sync():
            model(batch()).square().mean().backward()
        train(model, 1, optimizer=optimizer)
    for _ in steps(model := wrap(), 5):  # without no_sync
        for _ in range(3):
            model(batch()).sum().backward()


def passes_under_no_sync_that_no_step_uses(wrap):
    """Sharpness-aware minimisation, a measurement of gradients, and the other half of a GAN."""
    model, critic = wrap(), wrap(nn.Linear(2, 1))
    optimizer, optimizer_of_critic = sgd(model), sgd(critic)
    for _ in range(4):
        with model.no_sync():
            model(batch()).square().mean().backward()
        optimizer.zero_grad()
        optimizer_of_critic.zero_grad()
        critic(model(batch()).detach()).mean().backward()
        optimizer_of_critic.step()
        with critic.no_sync():
            critic(model(batch())).mean().backward()
        optimizer.step()
    critic.zero_grad()


def second_backward_passes_that_no_step_uses(wrap):
    model = wrap()
    optimizer = sgd(model)
    for _ in range(3):
        out, x = model(batch(), "both"), batch()
        torch.autograd.grad(out["main"].sum(), model.module.body.weight, retain_graph=True)
        (out["main"].sum() + out["spare"].sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        with model.no_sync():
            out = model(x, "both")
            out["main"].sum().backward(retain_graph=True)
            out["spare"].sum().backward()
        out = model(x, "both")
        (out["main"].sum() + out["spare"].sum()).backward(retain_graph=True)
        optimizer.zero_grad()
        out["main"].sum().backward()  # looked at
        optimizer.zero_grad()
        train(model, 1, optimizer=optimizer)


def inputs_that_forward_returns_and_that_get_gradients(wrap):
    for _ in steps(model := wrap(Layers("layer", lambda self, x: (self.layer(x), x))), 4):
        out, x = model(torch.randn(3, 4, requires_grad=True))
        (out.mean() + x.square().mean()).backward()


def a_backward_pass_for_each_loss_with_its_own_parameters(wrap):
    for retain in (False, True):
        for _ in steps(model := wrap(towers()), 6):
            losses = [out.square().sum() for out in model(batch())]
            losses[0].backward(retain_graph=retain)
            losses[1].backward()
    for _ in steps(model := wrap(), 5):  # two forward passes and one backward pass
        (model(batch()).sum() + model(batch()).square().sum()).backward()


def a_gan(wrap):
    generator, critic = wrap(nn.Linear(4, 4)), wrap(nn.Linear(4, 1))
    optimizer, optimizer_of_critic = sgd(generator), sgd(critic)
    for _ in range(5):
        optimizer_of_critic.zero_grad()
        sample = generator(batch())
        critic(batch()).mean().backward()
        critic(sample.detach()).mean().neg().backward()
        optimizer_of_critic.step()
        optimizer.zero_grad()
        critic.requires_grad_(False)
        critic(sample).mean().backward()
        critic.requires_grad_(True)
        optimizer.step()


def derivatives(wrap):
    for _ in steps(model := wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))), 5):
        x = torch.randn(3, 4, requires_grad=True)
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
    for _ in steps(model := wrap(), 4):
        loss = model(batch()).square().mean()
        (slope,) = torch.autograd.grad(loss, model.module.head.weight, create_graph=True)
        (loss + slope.square().mean()).backward()

    class Adapting(Net):
        def forward(self, x, way):
            loss = super().forward(x).square().mean()
            (slope,) = torch.autograd.grad(loss, self.head.weight, create_graph=True)
            return super().forward(x) + (self.head.weight - 0.1 * slope).sum()

    train(wrap(Adapting()), 5)


def checkpointed_layers(wrap):
    for reentrant in (True, False):

        def forward(self, x, reentrant=reentrant):
            return checkpoint(self.second, torch.relu(self.first(x)), use_reentrant=reentrant)

        train(wrap(Layers("first second", forward)), 6)

    def around_everything(self, x):
        return checkpoint(self.layer, x.requires_grad_(), use_reentrant=True)

    train(model := wrap(Layers("layer", around_everything)), 6)
    assert model.watch.step == 6


def autocast_and_a_grad_scaler(wrap):
    model, scaler = wrap(), torch.amp.GradScaler("cpu")
    optimizer = sgd(model)
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch()).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def validation_with_and_without_gradients(wrap):
    model = wrap()
    for step in range(4):
        train(model, 1, begin=step)
        model.eval()
        model(batch(), "short")
        with torch.no_grad():
            model(batch(), "short")
        model.train()


def sparse_and_tied_parameters(wrap):
    module = Layers("inner outer", lambda self, x: self.outer(self.inner(self.table(x))))
    module.table, module.outer.weight = nn.Embedding(10, 4, sparse=True), module.inner.weight
    for _ in steps(model := wrap(module), 5):
        model(torch.randint(10, (3,))).square().mean().backward()


def outputs_that_are_not_followed(wrap):
    train(wrap(Boxed()), 5, loss=lambda out: out.value.sum())
    train(model := wrap(Keeping()), 6, loss=lambda out: model.module.loss)
    assert model.watch.step == 6


def a_checkpoint_that_every_rank_loads(wrap):
    model = wrap()
    torch.manual_seed(0)
    model.load_state_dict(Net().state_dict())
    train(model, 4)


def wrapping_again_while_the_first_wrapper_lives(wrap):
    module = Net()
    for _ in range(3):
        train(wrap(module), 6)
    for _ in steps(part := wrap(module.head), 5):
        part(torch.randn(3, 8)).sum().backward()


HEALTHY = (
    *(options_of_ddp, accumulation_under_no_sync, accumulation_that_ends_synchronised, a_gan, derivatives),
    *(checkpointed_layers, autocast_and_a_grad_scaler, validation_with_and_without_gradients),
    sparse_and_tied_parameters,
)
RARE = (
    *(passes_under_no_sync_that_no_step_uses, second_backward_passes_that_no_step_uses),
    *(inputs_that_forward_returns_and_that_get_gradients, a_backward_pass_for_each_loss_with_its_own_parameters),
    *(outputs_that_are_not_followed, a_checkpoint_that_every_rank_loads),
    wrapping_again_while_the_first_wrapper_lives,
)


@pytest.mark.parametrize(
    "loops", [pytest.param(HEALTHY, id="often"), pytest.param(RARE, id="rare", marks=pytest.mark.slow)]
)
def test_healthy_loops_are_silent(loops):
    for loop in loops:
        with silent() as wrap:
            loop(wrap)


def test_uneven_inputs_under_join_are_silent(rank):
    model, findings = checked(check_consistency=2, check_parity_every=2)
    with model.join():
        for _ in steps(model, 3 + 2 * rank):
            model(batch()).sum().backward()
    assert findings == []
    for parameter in model.parameters():
        ddpcheck.assert_same_on_all_ranks(parameter)


def test_ddp_in_a_subgroup_of_the_ranks_is_silent(rank):
    own = [torch.distributed.new_group([member]) for member in range(2)][rank]
    model, findings = checked(process_group=own, check_parity_every=2, check_consistency=2)
    train(model, 5)
    assert findings == []


@pytest.mark.slow
def test_a_compiled_module_and_a_compiled_wrapper_are_silent_and_watched():
    with silent() as wrap:
        inner = wrap(torch.compile(Net(), backend="aot_eager"))
        train(inner, 3)
        outer = wrap()
        train(torch.compile(outer, backend="aot_eager"), 3)
    assert inner.watch.step == outer.watch.step == 3
