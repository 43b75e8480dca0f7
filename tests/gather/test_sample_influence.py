"""Whether the gradients of some samples change with what is computed for others: no ranks, one process."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpcheck.gather.steps.batch_coupling import FirstActivations, factors_for_part, gradients_changed, mask_of_part

SAMPLES = 8
Loss = Callable[[nn.Module, Tensor], Tensor]


def net(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), *more, nn.Tanh(), nn.Linear(6, 3)).double()


def batch(size: int = SAMPLES) -> Tensor:
    return torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)[:size]


def coupled(loss: Loss, model: nn.Module, *, large: bool = False) -> bool | None:
    def run(x: Tensor, factors: dict[int, Tensor] | None = None) -> FirstActivations:
        with FirstActivations(factors) as watch:
            total = loss(model, x)
        total.backward()
        return watch

    whole, part = run(batch()), run(batch(SAMPLES // 2))
    changes = factors_for_part(whole.values, part.values, large=large)
    after = run(batch(), {number: factor for number, (_, factor) in changes.items()})
    return gradients_changed(whole.gradients, after.gradients, changes)


def mean(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def by_count(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).square().sum(1) * (x[:, 0] > 0)).sum() / (x[:, 0] > 0).sum()


def two_views(model: nn.Module, x: Tensor) -> Tensor:
    one, two = model(torch.cat([x, x + 0.1])).chunk(2)
    return (one - two).square().mean()


def contrastive(model: nn.Module, x: Tensor) -> Tensor:
    one, two = F.normalize(model(x), dim=1), F.normalize(model(x + 0.1), dim=1)
    return F.cross_entropy(one @ two.T, torch.arange(len(x)))


def root(model: nn.Module, x: Tensor) -> Tensor:
    return mean(model, x).sqrt()


def routed(model: nn.Module, x: Tensor) -> Tensor:
    """Load balancing: the share of samples that choose an expert weighs the probability of it."""
    scores = model(x).softmax(1)
    share = F.one_hot(scores.argmax(1), scores.shape[1]).double().mean(0)
    return (share * scores.mean(0)).sum()


def slopes(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    return (slopes(model, x).norm(dim=1) - 1).square().mean()


def penalty_on_the_norm_of_all(model: nn.Module, x: Tensor) -> Tensor:
    return (slopes(model, x).norm() - 1).square()


@pytest.mark.parametrize("loss", [mean, by_count, two_views, penalty])
def test_a_sum_over_samples_is_not_coupled_whatever_it_is_divided_by(loss: Loss) -> None:
    assert coupled(loss, net()) is False
    assert coupled(loss, net(), large=True) is False


@pytest.mark.parametrize("loss", [contrastive, root, penalty_on_the_norm_of_all])
def test_a_loss_that_compares_samples_is_coupled(loss: Loss) -> None:
    assert coupled(loss, net()) is True


def test_batch_statistics_couple_samples_and_those_of_a_sample_do_not() -> None:
    assert coupled(mean, net(nn.BatchNorm1d(6).double())) is True
    assert coupled(mean, net(nn.LayerNorm(6).double())) is False
    assert coupled(mean, net(nn.BatchNorm1d(6).double().eval())) is False


def test_what_is_chosen_by_activations_shows_when_they_change_much() -> None:
    assert coupled(routed, net()) is False and coupled(routed, net(), large=True) is True


def hardest(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1).topk(len(x) * 3 // 4).values.mean()


def trimmed(model: nn.Module, x: Tensor) -> Tensor:
    losses = model(x).square().sum(1)
    return losses[losses <= losses.detach().quantile(0.75)].mean()


@pytest.mark.parametrize("loss", [hardest, trimmed])
def test_a_loss_of_the_samples_with_the_largest_or_smallest_losses_is_coupled(loss: Loss) -> None:
    assert coupled(loss, net(), large=True) is True


def test_nothing_is_said_where_samples_cannot_be_found_again() -> None:
    def shuffled(model: nn.Module, x: Tensor) -> Tensor:
        return mean(model, x[torch.randperm(len(x), generator=torch.Generator().manual_seed(len(x)))])

    def no_parameters_meet_data(_model: nn.Module, x: Tensor) -> Tensor:
        return x.sum().requires_grad_().square()

    assert coupled(shuffled, net()) is None
    assert coupled(no_parameters_meet_data, net()) is None


def test_rows_of_a_part_are_found_one_after_the_other_and_by_views() -> None:
    x = torch.randn(8, 3)
    assert mask_of_part(x, x[:2]).tolist() == [True, True] + [False] * 6
    views = torch.cat([x[:2], x[4:6]])
    assert mask_of_part(x, views).tolist() == [True, True, False, False] * 2
    assert mask_of_part(x, torch.randn(2, 3)) is None
    assert mask_of_part(x.T, x[:2].T) is None
