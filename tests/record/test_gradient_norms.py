"""The norm of all gradients, by which clips and other changes between backward passes are recorded."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from ddpcheck.record.optimizers.gradient_recorders import _total_norm


def with_gradient(values: list[complex], dtype: torch.dtype) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(values), dtype=dtype))
    parameter.grad = torch.tensor(values, dtype=dtype)
    return parameter


def test_it_is_that_of_complex_and_real_parameters_together_without_a_warning():
    several = [
        with_gradient([3 + 4j, 0], torch.complex64),
        with_gradient([12.0], torch.float16),
        with_gradient([0.0], torch.float64),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        norm = _total_norm([*several, nn.Parameter(torch.zeros(1))])
    assert norm is not None and float(norm) == pytest.approx(13.0)


def test_it_is_not_known_without_gradients():
    assert _total_norm([nn.Parameter(torch.zeros(1))]) is None
