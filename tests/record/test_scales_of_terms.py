"""The sums and means of a loss, and the numbers that it scales them by, as they stand in its graph."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from ddpcheck.gather.autograd.gradient_hooks import hooks_on
from ddpcheck.gather.autograd.loss_terms import rows_taken_from
from ddpcheck.record.loss.loss_recorder import _count, _lines_of_terms, _terms

X = torch.ones(4, requires_grad=True)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (X.sum() / 3, [("sum", [("Div", 3)])]),
        (X.sum() / torch.tensor([3.0]), [("sum", [("Div", 3)])]),
        (2 * (X.sum() / torch.tensor(3)) / 4, [("sum", [("Div", 4), ("Mul", 2), ("Div", 3)])]),
        (torch.tensor(5.0) * X.sum(), [("sum", [("Mul", 5)])]),
        (X.sum().mul_(7), [("sum", [("Mul", 7)])]),
        (X.mean() + 0.5 * X.square().sum(), [("mean", []), ("sum", [("Mul", 0.5)])]),
        (X.sum() * X.mean(), [("sum", []), ("mean", [])]),  # which no number scales
        (torch.nn.functional.mse_loss(X, X.detach(), reduction="sum") / 8, [("sum", [("Div", 8)])]),
    ],
)
def test_the_numbers_on_the_way_to_each_term(loss: Tensor, expected: list[tuple[str, list[tuple[str, float]]]]) -> None:
    found = [(kind, list(scales)) for _, kind, scales in _terms(loss.grad_fn)]
    assert found == expected


ROWS = torch.ones(6, 3, requires_grad=True)
TARGETS = torch.tensor([0, 1, -100, 1, -100, 2])
MASK = TARGETS >= 0


@pytest.mark.parametrize(
    ("loss", "count"),
    [
        (cross_entropy(ROWS[MASK], TARGETS[MASK]), (4, True)),
        (cross_entropy(ROWS, TARGETS), (4, True)),
        (cross_entropy(ROWS, TARGETS.clamp(min=0)), (6, False)),
        ((ROWS.exp()[MASK] - 1).norm(dim=1).mean(), (4, True)),
        (torch.nn.functional.linear(ROWS, torch.ones(2, 3)).square().mean(), (12, False)),
        (ROWS[MASK].sum(0).square().mean(), (3, False)),  # of features, not of what was chosen
    ],
)
def test_how_many_elements_a_mean_is_over_and_whether_they_were_chosen(loss: Tensor, count: tuple[int, bool]) -> None:
    ((node, _, _),) = _terms(loss.grad_fn)
    assert _count(node) == count


def test_which_terms_take_rows_of_one_tensor() -> None:
    logits = ROWS * 2
    by_sample = [cross_entropy(logits[n, None], TARGETS[n, None], reduction="sum") for n in range(2)]
    of_all = cross_entropy(logits, TARGETS) + torch.nn.functional.linear(logits, torch.ones(2, 3)).mean()
    nodes = [node for node, _, _ in _terms((sum(by_sample) / 2 + of_all).grad_fn)]
    taken = [rows_taken_from(node) for node in nodes]
    assert taken.count(None) == taken.count((logits.grad_fn, 0)) == 2


def test_the_lines_of_the_terms_of_a_loss() -> None:
    source = Path(__file__).read_text().splitlines()
    first = X.mean()
    total = X.square().sum()
    kept = total / 3
    both = first + kept
    terms = list(_terms(both.grad_fn))
    found = _lines_of_terms(both, len(terms))
    lines = [source[found[node].line - 1].strip() for node, _, _ in terms]
    assert lines == ["first = X.mean()", "kept = total / 3"]
    assert not _lines_of_terms(kept, 1)  # it is all of the loss


def test_they_make_the_gradient_that_arrives_at_a_term() -> None:
    x = torch.ones(4, requires_grad=True)
    (3 * x.sum() / 5 / torch.tensor(2.0)).backward()
    loss = 3 * x.sum() / 5 / torch.tensor(2.0)
    ((_, _, scales),) = _terms(loss.grad_fn)
    assert x.grad is not None
    factor = math.prod(value if name == "Mul" else 1 / value for name, value in scales)
    assert math.isclose(float(x.grad[0]), factor, rel_tol=1e-6)


def test_a_checkpoint_is_not_computed_again_to_know_them_and_what_is_overwritten_is_left_to_backward() -> None:
    forwards = []

    def scaled(x: Tensor) -> Tensor:
        forwards.append(1)
        return x.sum() / torch.tensor(5.0)

    loss = checkpoint(scaled, X, use_reentrant=False)
    assert [scales for _, _, scales in _terms(loss.grad_fn)] == [()] and len(forwards) == 1
    count = torch.tensor(4.0)
    overwritten = X.sum() / count
    count += 1
    assert [scales for _, _, scales in _terms(overwritten.grad_fn)] == [()]


def test_hooks_on_gradients_are_known() -> None:
    plain, hooked, after = (torch.ones(2, requires_grad=True) for _ in range(3))

    def double(gradient: Tensor) -> Tensor:
        return gradient * 2

    def look(leaf: Tensor) -> None:
        pass

    hooked.register_hook(double)
    after.register_post_accumulate_grad_hook(look)
    assert list(hooks_on([plain, hooked, after])) == [double, look] and not list(hooks_on([plain]))
