"""References to tensors that `torch.utils.swap_tensors` does not refuse, and that follow it."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from ddpcheck.gather.state.tensor_file import tensor_ref


def test_tensors_with_references_are_swapped_and_stay_known() -> None:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))
    refs = [tensor_ref(first), tensor_ref(first), tensor_ref(second)]
    torch.utils.swap_tensors(first, second)
    assert first.sum() == 2 and second.sum() == 0
    assert [one() for one in refs] == [first, first, second]
    assert refs[0]() is first


def test_a_weak_reference_of_somebody_else_is_refused_as_ever_and_ours_stays() -> None:
    first, second = torch.zeros(2), torch.ones(2)
    ours, theirs = tensor_ref(first), weakref.ref(second)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(first, second)
    assert ours() is first and theirs() is second
