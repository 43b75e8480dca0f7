"""The targets of torch's losses, and how much their order says, on real losses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ddpcheck.record.loss.loss_recorder import loss_targets

CLASSES = torch.tensor([3, 0, 2, 0, 1, 3])
VALUES = torch.tensor([0.3, -1.0, 2.0, 0.1, 5.0, -2.0])


def output(*shape: int) -> Tensor:
    return torch.zeros(shape, requires_grad=True) * 1.0


@pytest.mark.parametrize(
    ("loss", "rows"),
    [
        (lambda: functional.cross_entropy(output(6, 4), CLASSES), [6]),
        (lambda: functional.cross_entropy(output(6, 4), CLASSES, label_smoothing=0.1), [6]),
        (lambda: functional.cross_entropy(output(6, 4), CLASSES, reduction="none").sum() / 6, [6]),
        (lambda: functional.nll_loss(output(2, 4, 3), CLASSES.view(2, 3)), [2]),
        (lambda: functional.mse_loss(output(6), VALUES), [6]),
        (lambda: functional.binary_cross_entropy_with_logits(output(6), VALUES.sigmoid()), [6]),
        (
            lambda: (
                0.5 * functional.mse_loss(output(6), VALUES)
                + functional.smooth_l1_loss(output(3, 2), VALUES.view(3, 2))
            ),
            [6, 3],
        ),
        (lambda: functional.mse_loss(output(6), output(6)), []),  # two views
        (lambda: (output(6) - VALUES).square().mean(), []),  # not kept as such
        (lambda: output(6).sum(), []),
    ],
)
def test_targets_of_losses(loss: Callable[[], Tensor], rows: list[int]) -> None:
    found = loss_targets(loss())
    assert sorted({one.rows for one in found}, reverse=True) == rows
    assert all(one.bits > 0 and one.elements == 6 for one in found)


@pytest.mark.parametrize(
    ("classes", "says"),
    [
        ([3, 0, 2, 0, 1, 3], True),
        ([3, 7, 1, 9, 4, 2], True),
        ([0, 1, 2, 3, 4, 5], False),
        ([1, 1, 1, 1, 1, 1], False),
        ([3, 3, 0, 0, 2, 2], False),  # in blocks: a sampler of classes
    ],
)
def test_what_the_order_of_classes_says(classes: list[int], says: bool) -> None:
    (one,) = loss_targets(functional.cross_entropy(output(6, 10), torch.tensor(classes)))
    assert bool(one.bits) is says


def test_equal_targets_have_one_digest() -> None:
    one, same, other = (
        loss_targets(functional.cross_entropy(output(6, 4), classes))[0].digest
        for classes in (CLASSES, CLASSES.clone(), CLASSES.flip(0))
    )
    assert one == same != other
