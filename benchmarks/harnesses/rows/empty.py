"""Tests that do nothing, in a file that imports torch as the others do: what pytest itself costs."""

import pytest
from work import TESTS


@pytest.mark.parametrize("number", range(TESTS))
def test_nothing(number: int) -> None:
    pass
