"""Evidence: plain data from ranks and reference runs, gathered with torch and judged without.

Search for a type's name in `gather` (`report`) and `record` (`run`) for its source, and in `rules` for its judges.
"""

from __future__ import annotations

from msgspec import Struct


class Entry(Struct, frozen=True):
    """Base class of entries in the log of a watched rank, as in `stream.entries`."""
