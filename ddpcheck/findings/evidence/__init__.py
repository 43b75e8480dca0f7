"""Evidence: plain data from ranks and reference runs, gathered with torch and judged without."""

from __future__ import annotations

from msgspec import Struct


class Entry(Struct, frozen=True):
    """Base class of evidence and `stream.entries` in the log of a watched rank."""
