"""Architectures from `transformers`: ddpcheck says of each what an oracle without ddpcheck finds out, and no more."""

from __future__ import annotations

import pytest
import torch

from tests.models.catalogue import CATALOGUE
from tests.models.comparing import disagreements, report_on
from tests.models.oracle import find_truth
from tests.tiers import first_of_each, needs, one_of

pytestmark = needs("transformers")  # which the architectures come from

# Every sixteenth one, and the first with each expectation; `make models` checks them all.
CHECKED = sorted({*one_of(16, sorted(CATALOGUE)), *first_of_each(CATALOGUE, lambda name: CATALOGUE[name].expected)})
IN_OTHER_WRAPS = one_of(
    2, [("clip", "sharded", 4), ("bart", "sharded", 2), ("squeezebert", "sharded", 2), ("t5", "compiled", 2)]
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.slow  # to import transformers alone takes seconds
@pytest.mark.parametrize("name", CHECKED)
def test_what_is_said_of_an_architecture_is_what_an_oracle_finds_out(name: str) -> None:
    for needed in CATALOGUE[name].needs:
        pytest.importorskip(needed)
    # What layers that are dropped by chance do takes more steps to show; `make models` takes three for all.
    report = report_on(name, steps=3 if "DDP104" in CATALOGUE[name].expected else 2)
    assert disagreements(name, report, find_truth(CATALOGUE[name])) == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "wrap", "world_size"), IN_OTHER_WRAPS)
def test_it_is_what_the_oracle_finds_out_in_another_wrap(name: str, wrap: str, world_size: int) -> None:
    report = report_on(name, world_size, steps=2, wrap=wrap)
    assert disagreements(name, report, find_truth(CATALOGUE[name], world_size), wrap) == []
