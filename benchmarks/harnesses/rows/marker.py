"""`@pytest.mark.ddp`: the body of the test runs on every rank."""

import pytest
from work import RANKS, TESTS, work


@pytest.mark.ddp(world_size=RANKS)
@pytest.mark.parametrize("number", range(TESTS))
def test_world(number: int) -> None:
    work()
