"""Everyday losses: what is normalised rightly is clean, and what is not is told by its cause, not as coupling."""

import pytest

import ddpcheck
from ddpcheck.findings.replace import replace
from ddpcheck.findings.rules import Severity
from tests.losses.table import ROWS, Convolutional, Row
from tests.reports import shown
from tests.tiers import one_of

# `make test` has every sixteenth of them.
SOME = [
    pytest.param(row, id=row.name, marks=[pytest.mark.slow] * (number % 8 > 0))
    for number, row in enumerate(one_of(2, ROWS))
]


def told(report: ddpcheck.Report) -> tuple[str, ...]:
    assert report.error is None, report.error
    return tuple(finding.code for finding in report.findings if finding.severity is not Severity.NOTE)


@pytest.mark.parametrize("row", SOME)
def test_a_loss_that_is_normalised_rightly_is_clean(row: Row) -> None:
    report = ddpcheck.check(row.right, steps=1)
    assert told(report) == row.of_the_right, shown(report)


@pytest.mark.parametrize("row", SOME)
def test_a_loss_that_is_not_is_told_by_its_cause(row: Row) -> None:
    wrong = replace(row.wrong, model=Convolutional) if row.name == "BatchNorm" else row.wrong
    report = ddpcheck.check(wrong, steps=1)
    assert told(report) == row.codes, shown(report)
