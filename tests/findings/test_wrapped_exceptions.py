"""An exception that torch has carried from a worker or a thread is told as it was raised there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ddpcheck.findings.errors import RankFailure
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.source_lines import relative_path
from ddpcheck.rules.collectives.diagnose import diagnose
from ddpcheck.trace.failures import FailureFacts
from ddpcheck.worlds.failures import exception_data, failure_of_exception

pytest.importorskip("torch")

from torch import _utils as wrapping

HERE = relative_path(__file__)


def reads() -> None:
    {}["label"]


def converts() -> None:
    try:
        reads()
    except KeyError as error:
        raise ValueError("no label:\nTraceback (most recent call last):\nof the user") from error


class NeedsTwo(Exception):
    """One that cannot be made of a message alone."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def needs_two() -> None:
    raise NeedsTwo("one", "two")


def carry(function: Callable[[], object]) -> None:
    try:
        function()
    except Exception:
        wrapper = wrapping.ExceptionWrapper(where="in DataLoader worker process 0")
    wrapper.reraise()


def judged(*failures: RankFailure) -> Finding:
    (finding,) = diagnose(FailureFacts(failures, [[], []]))
    return finding


def failure_of(function: Callable[[], object], rank: int = 1) -> RankFailure:
    with pytest.raises(Exception) as caught:
        function()
    return failure_of_exception(rank, exception_data(caught.value, "", ""))


@pytest.mark.parametrize(
    ("function", "message"),
    [(reads, "KeyError: 'label'"), (converts, "ValueError: no label:"), (needs_two, "NeedsTwo: ")],
)
def test_what_a_worker_has_raised(function: Callable[[], object], message: str) -> None:
    finding = judged(failure_of(lambda: carry(function)))
    assert finding.code == "DDP401" and message in finding.message and "Caught" not in finding.message
    assert finding.location is not None and finding.location.path == HERE
    code = function.__code__
    assert code.co_firstlineno < finding.location.line <= max(line for *_, line in code.co_lines() if line)
    assert f"raised in DataLoader worker process 0, for which {HERE}:" in finding.evidence[0]
    assert "KeyError: 'label'" in judged(failure_of(lambda: carry(lambda: carry(reads)))).message


def test_an_exception_of_the_rank_itself_that_looks_like_one() -> None:
    text = "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\nKeyError: 1"

    def raises() -> None:
        raise RuntimeError(text)

    failure = failure_of(raises)
    assert "RuntimeError: Caught KeyError" in failure.message and not failure.noticed


def test_advice_speaks_of_other_ranks_only_where_they_are_listed() -> None:
    first, second = failure_of(reads, 0), failure_of(reads, 1)
    finding = judged(first, second)
    assert finding.message.startswith("Every rank raised KeyError") and finding.what_to_do == "Fix the exception shown."
    assert finding.location == Location(HERE, reads.__code__.co_firstlineno + 1)
    waits = RankFailure(1, "stuck", "rank 1 waits in barrier", first.when + 1, collective="barrier")
    assert "ranks that are listed below it" in judged(first, waits).what_to_do
