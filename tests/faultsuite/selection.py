"""Which faults `make test` runs: for each code the one that is found fastest, and more of a family that has too few."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.faultsuite.cases import ROOT, Case
from tests.tiers import first_of_each

PAGE = ROOT / "docs" / "faults.md"
OF_A_FAMILY = 3  # at least
_ROW = re.compile(r"^\| \[.*?\]\(\.\./examples/faults/(\S+)\.py\) .* \| ([\d.]+) \|$", re.MULTILINE)


def seconds_on_page() -> dict[str, float]:
    """How long the check of each fault took when `make faults` wrote the page."""
    return {name: float(seconds) for name, seconds in _ROW.findall(PAGE.read_text(encoding="utf-8"))}


def fastest_of_each_code(cases: Sequence[Case]) -> list[Case]:
    """The cases of `make test`; one that is not on the page yet counts as the fastest of its code."""
    seconds = seconds_on_page()
    by_speed = sorted(cases, key=lambda case: (seconds.get(str(case), 0.0), str(case)))
    chosen = first_of_each(by_speed, lambda case: [case.expected.code])
    for family in {case.family for case in cases}:
        of_it = [case for case in by_speed if case.family == family]
        few = OF_A_FAMILY - sum(case in chosen for case in of_it)
        chosen += [case for case in of_it if case not in chosen][: max(few, 0)]
    return chosen
