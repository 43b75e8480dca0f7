"""The faults that `make test` runs on ranks: the fastest of each code, and of the twins the fastest of each family.

`tests/rules/test_judges_on_evidence.py` runs the judges on recorded evidence of all of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.faultsuite.cases import ROOT, Case
from tests.tiers import first_of_each

PAGE = ROOT / "docs" / "faults.md"
_ROW = re.compile(r"^\| \[.*?\]\(\.\./examples/faults/(\S+)\.py\) .* \| ([\d.]+) \|$", re.MULTILINE)


def seconds_on_page() -> dict[str, float]:
    """How long the check of each fault took when `make faults` wrote the page."""
    return {name: float(seconds) for name, seconds in _ROW.findall(PAGE.read_text(encoding="utf-8"))}


def fastest_of_each_code(cases: Sequence[Case]) -> list[Case]:
    """One case of each code; one that is not on the page yet counts as the fastest."""
    return first_of_each(_by_speed(cases), lambda case: [case.expected.code])


def fastest_of_each_family(cases: Sequence[Case]) -> list[Case]:
    """One case of each family."""
    return first_of_each(_by_speed(cases), lambda case: [case.family])


def _by_speed(cases: Sequence[Case]) -> list[Case]:
    seconds = seconds_on_page()
    return sorted(cases, key=lambda case: (seconds.get(str(case), 0.0), str(case)))
