"""Ranks and steps in words."""

from __future__ import annotations

import pytest

from ddpcheck.findings.wording import format_ranks, format_steps


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([1], "rank 1"),
        ([2, 0, 2], "ranks 0 and 2"),
        (range(6), "ranks 0 to 5"),
        ([0, 1, 2, 3, 9, 11], "ranks 0 to 3, 9 and 11"),
        ([0, 2, 4, 6], "ranks 0, 2, 4 and 6"),
        (range(3, 1024, 8), "ranks 3 to 1019 in steps of 8"),
        ([n for n in range(16384) if n % 3], "ranks 1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16 and 10911 more"),
    ],
)
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert format_ranks(ranks) == words
    assert format_steps(ranks) == words.replace("rank", "step")
