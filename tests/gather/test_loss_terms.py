"""The terms of a loss, found in its graph, and the gradient of each by itself."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpcheck.gather.autograd.autograd_graph import record_lines
from ddpcheck.gather.autograd.loss_terms import PairedTerms, backward_through_terms, split_loss


def parts(size: int = 6) -> tuple[nn.Parameter, Tensor, Tensor]:
    weight = nn.Parameter(torch.arange(1.0, 4.0))
    x = torch.randn(size, 3, generator=torch.Generator().manual_seed(size))
    return weight, (x * weight).square().mean(), (x * weight).exp().sum()


def operations(total: Tensor, *given: Tensor) -> list[str]:
    return [edge.operation for edge in split_loss(total, given or (total,))]


def test_sums_means_factors_and_stacks_are_looked_through() -> None:
    _, one, two = parts()
    for total in (one + two, one - 0.5 * two, (one + two) / 3, torch.stack([one, two]).mean(), -(two + one).reshape(1)):
        assert len(operations(total)) == 2, operations(total)
    weight, x = nn.Parameter(torch.ones(3)), torch.randn(6, 3)
    assert operations(((x * weight).square() * 0.1 + (x * weight).exp() / 7).sum()) == ["Pow", "Exp"]
    assert operations(one) == ["Pow"]
    assert operations((one + two).exp()) == ["Exp"] and operations(one * two) == ["Mul"]


def test_a_term_knows_its_part_and_the_line_that_made_it() -> None:
    with record_lines():
        _, one, two = parts()
    edges = split_loss(one + two, [one, two])
    assert [edge.part for edge in edges] == [0, 1]
    lines = [edge.location for edge in edges]
    assert all(line is not None and line.path.endswith("test_loss_terms.py") for line in lines)
    assert [edge.location for edge in split_loss(one.square(), [one])] == [None], "not recorded"


def test_the_gradients_of_the_terms_add_up_to_that_of_the_loss() -> None:
    weight, one, two = parts()
    total = (one + 0.3 * two) / 2
    edges = split_loss(total, [total])
    found = []
    for edge in edges:
        weight.grad = None
        backward_through_terms(total, edges, [edge])
        found.append(weight.grad.clone())
    expected = [torch.autograd.grad(term, weight, retain_graph=True)[0] for term in (one / 2, 0.15 * two)]
    for seen, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(seen, wanted)
    weight.grad = None
    total.backward()
    torch.testing.assert_close(sum(found), weight.grad)


def test_a_term_that_a_run_has_not_brings_no_gradient() -> None:
    weight, one, _ = parts()
    backward_through_terms(one, split_loss(one, [one]), [])
    assert weight.grad is None


def looped(size: int) -> Tensor:
    """One term for the batch, and one for each sample."""
    weight, one, _ = parts(size)
    for row in torch.randn(size, 3):
        one = one + F.softplus(row * weight).sum()
    return one


def test_terms_are_paired_by_line_and_what_runs_have_more_of_is_taken_together() -> None:
    with record_lines():
        runs = [split_loss(loss, [loss]) for loss in (looped(6), looped(3))]
    paired = PairedTerms(runs, most=16)
    assert len(paired) == 2
    assert [[len(term) for term in paired.sort(run)] for run in runs] == [[1, 6], [1, 3]]


def test_more_terms_than_can_be_kept_apart_are_one() -> None:
    with record_lines():
        runs = [split_loss(loss, [loss]) for loss in (looped(6), looped(6))]
    assert [len(PairedTerms(runs, most=most)) for most in (16, 3, 1)] == [7, 2, 1]
