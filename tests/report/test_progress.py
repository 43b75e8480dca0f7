"""What is shown while a check runs."""

from __future__ import annotations

import io

from ddpcheck.cli.output import Progress, wrapped
from ddpcheck.report.checking import check_worlds
from ddpcheck.report.checking.check_worlds import PhaseProgress


def test_a_phase_that_takes_long_names_the_ranks_that_it_waits_for(monkeypatch) -> None:
    shown: list[str] = []
    now = 100.0
    monkeypatch.setattr(check_worlds.time, "monotonic", lambda: now)
    progress = PhaseProgress(shown.append)
    progress(phase := "parameters, step 1 of 3: each rank alone")
    for seconds, running in ((1.0, {0, 1}), (2.5, {0, 1}), (2.9, {0, 1}), (3.1, {1}), (9.0, set())):
        now = 100.0 + seconds
        progress.wait_for(frozenset(running))
    progress("reducer, step 1 of 3")
    progress.wait_for(frozenset({1}))
    waits = [f"{phase}: 2 s, waiting for ranks 0 and 1", f"{phase}: 3 s, waiting for rank 1"]
    assert shown == [phase, *waits, "reducer, step 1 of 3"]


class Terminal(io.StringIO):
    encoding = "ascii"

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_one_line_and_a_log_none(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    terminal, log = Terminal(), io.StringIO()
    with Progress(terminal) as on_terminal, Progress(log) as in_log:
        on_terminal("step 1 of 3: " + "x" * 99)
        in_log("step 1 of 3")
    assert terminal.getvalue().startswith("step 1 of 3: xxx") and "\n" not in terminal.getvalue()
    assert len(terminal.getvalue().split("\r")[0]) == 39
    assert log.getvalue() == ""


def test_sentences_are_broken_at_words_where_there_is_a_width() -> None:
    text = "ddpcheck: error: a sentence with --an-option-that-is-long and more"
    assert wrapped(text, None) == text
    lines = wrapped(text, 30).splitlines()
    assert lines == ["ddpcheck: error: a sentence", "  with", "  --an-option-that-is-long and", "  more"]
    assert wrapped("one\ntwo", 30) == "one\ntwo"
