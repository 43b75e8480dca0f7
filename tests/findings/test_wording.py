"""Ranks and steps in words."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpcheck.findings.wording import format_ranks, format_steps


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([1], "rank 1"),
        ([2, 0, 2], "ranks 0 and 2"),
        ([0, 1], "ranks 0 and 1"),
        (range(6), "ranks 0 to 5"),
        ([*range(8), 9], "ranks 0 to 7 and 9"),
        ([0, 2, 4, 6], "ranks 0, 2, 4 and 6"),
        (range(3, 1024, 8), "ranks 3 to 1019 in steps of 8"),
        ([n for n in range(16384) if n % 3], "ranks 1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16 and 10911 more"),
    ],
)
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert format_ranks(ranks) == words
    assert format_steps(ranks) == words.replace("rank", "step")


@given(st.sets(st.integers(0, 400), min_size=1))
def test_words_stand_for_all_ranks_and_are_short(ranks: set[int]) -> None:
    words = format_ranks(ranks)
    assert len(words) < 150
    stepped = re.fullmatch(r"ranks (\d+) to (\d+) in steps of (\d+)", words)
    if stepped:
        first, last, step = map(int, stepped.groups())
        assert ranks == set(range(first, last + 1, step))
        return
    more = re.search(r" and (\d+) more$", words)
    told = {
        number
        for part in re.findall(r"\d+ to \d+|\d+", words[: more.start()] if more else words)
        for number in range(int(part.split(" to ")[0]), int(part.split(" to ")[-1]) + 1)
    }
    assert told <= ranks and len(told) + int(more[1] if more else 0) == len(ranks)
    assert words.startswith("rank " if len(ranks) == 1 else "ranks ")
