"""The sums and means of a loss, and the numbers that it scales them by, as they stand in its graph."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from ddpcheck.gather.autograd.gradient_hooks import hooks_on
from ddpcheck.gather.autograd.loss_terms import nearest_leaf_node
from ddpcheck.record.loss.loss_recorder import _count_elements, _lines_of_terms, _terms

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
    found = [(kind, list(scales)) for _, kind, scales in _terms(loss)]
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
        ((ROWS.square().sum(1) * MASK).sum() / MASK.sum(), (4, True)),
        ((ROWS.square() * MASK[:, None].float()).sum(), (12, True)),
        ((ROWS.square() * TARGETS[:, None]).sum(), (18, False)),  # weights that are no mask
    ],
)
def test_how_many_elements_a_mean_is_over_and_whether_they_were_chosen(loss: Tensor, count: tuple[int, bool]) -> None:
    ((node, _, _),) = _terms(loss)
    assert _count_elements(node) == count


def test_terms_of_one_head() -> None:
    body, head, other = (torch.nn.Linear(3, 3) for _ in range(3))
    features = body(ROWS)
    logits = head(features)
    of_rows = [cross_entropy(logits[n, None], TARGETS[n, None]) for n in range(2)]
    by_row = [cross_entropy(head(features[n]), TARGETS[n]) for n in range(2)]  # of a sample, which is put in by itself
    terms = [*of_rows, *by_row, other(features).mean()]
    heads = [nearest_leaf_node(term.grad_fn) for term in terms]
    assert heads[0] is not None and heads[:4] == heads[:1] * 4 and heads[4] not in heads[:4]
    deep = X
    for _ in range(100):
        deep = deep.exp()
    assert nearest_leaf_node(deep.grad_fn) is None


class Masked(torch.nn.Linear):
    """Makes its loss itself, beside what it gives."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        given = super().forward(x)
        return given, given.square().sum() / 2


def test_the_terms_of_a_loss_that_ddp_hands_on() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        _, loss = torch.nn.parallel.DistributedDataParallel(Masked(3, 1), find_unused_parameters=True)(ROWS)
        assert loss.grad_fn.name() == "_DDPSinkBackward"
        assert [(kind, scales) for _, kind, scales in _terms(3 * loss)] == [("sum", (("Mul", 3.0), ("Div", 2.0)))]
    finally:
        dist.destroy_process_group()


def test_the_lines_of_the_terms_of_a_loss() -> None:
    source = Path(__file__).read_text().splitlines()
    first = X.mean()
    total = X.square().sum()
    kept = total / 3
    both = first + kept
    terms = list(_terms(both))
    found = _lines_of_terms(both, len(terms))
    lines = [source[found[node].line - 1].strip() for node, _, _ in terms]
    assert lines == ["first = X.mean()", "kept = total / 3"]
    assert not _lines_of_terms(kept, 1)  # it is all of the loss


def test_they_make_the_gradient_that_arrives_at_a_term() -> None:
    x = torch.ones(4, requires_grad=True)
    (3 * x.sum() / 5 / torch.tensor(2.0)).backward()
    loss = 3 * x.sum() / 5 / torch.tensor(2.0)
    ((_, _, scales),) = _terms(loss)
    assert x.grad is not None
    factor = math.prod(value if name == "Mul" else 1 / value for name, value in scales)
    assert math.isclose(float(x.grad[0]), factor, rel_tol=1e-6)


def test_a_checkpoint_is_not_computed_again_to_know_them_and_what_is_overwritten_is_left_to_backward() -> None:
    forwards = []

    def scaled(x: Tensor) -> Tensor:
        forwards.append(1)
        return x.sum() / torch.tensor(5.0)

    loss = checkpoint(scaled, X, use_reentrant=False)
    assert [scales for _, _, scales in _terms(loss)] == [()] and len(forwards) == 1
    count = torch.tensor(4.0)
    overwritten = X.sum() / count
    count += 1
    assert [scales for _, _, scales in _terms(overwritten)] == [()]


def test_hooks_on_gradients_are_known() -> None:
    plain, hooked, after = (torch.ones(2, requires_grad=True) for _ in range(3))

    def double(gradient: Tensor) -> Tensor:
        return gradient * 2

    def look(leaf: Tensor) -> None:
        pass

    hooked.register_hook(double)
    after.register_post_accumulate_grad_hook(look)
    assert list(hooks_on([plain, hooked, after])) == [double, look] and not list(hooks_on([plain]))
