"""`ddp_world.run(...)`: the body of the test is in the parent."""

from typing import Any

import pytest
from work import RANKS, TESTS, work


@pytest.mark.parametrize("number", range(TESTS))
def test_world(ddp_world: Any, number: int) -> None:
    assert ddp_world.run(work) == [None] * RANKS
