"""Says what a check is doing: the check and the step under way, and after a while the ranks that it waits for.

This module is light: it never imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ddpcheck.findings.wording import format_ranks

QUIET = 2.0
"""Seconds of a phase in which nothing is said of its ranks."""


class PhaseProgress:
    """Hands words on a phase to whoever shows them."""

    def __init__(self, show: Callable[[str], None] | None) -> None:
        self._show = show or (lambda _words: None)
        self._words = self._told = ""
        self._begun = time.monotonic()

    def __call__(self, words: str) -> None:
        self._words = self._told = words
        self._begun = time.monotonic()
        self._show(words)

    def wait_for(self, running: frozenset[int]) -> None:
        """Say which ranks have not finished, and for how long that has been so."""
        seconds = time.monotonic() - self._begun
        if running and seconds >= QUIET:
            text = f"{self._words}: {int(seconds)} s, waiting for {format_ranks(running)}"
            if text != self._told:
                self._told = text
                self._show(text)
