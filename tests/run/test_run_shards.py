"""`ddpcheck run` on the faults of tests/sharded_faults.py, each at its line, and on the same loops without them."""

from __future__ import annotations

import pytest
from torch.distributed import fsdp

from tests.tiers import one_of

if not hasattr(fsdp, "fully_shard"):
    pytest.skip("this torch has no fully_shard", allow_module_level=True)

from tests.faultsuite.shards_page import found_by_ddpcheck, line_of
from tests.sharded_faults import FAULTS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", one_of(4, FAULTS))
def test_a_fault_of_shards_is_told_at_its_line(name: str) -> None:
    expected = FAULTS[name]
    code, report = found_by_ddpcheck([name], expected.ranks)
    severity, _, _ = line_of(expected, report)
    assert bool(code) == (severity == "error")


@pytest.mark.parametrize("ranks", [2, 4])
def test_loops_of_shards_without_a_fault_have_no_finding(ranks: int) -> None:
    names = [name for name, one in FAULTS.items() if one.ranks == ranks]
    code, report = found_by_ddpcheck(names, ranks, "--fixed")
    assert (code, report["findings"]) == (0, [])
