"""Evidence: plain data from ranks and reference runs, one module a subject. Gathered with torch, judged without."""

from __future__ import annotations

from msgspec import Struct


class Entry(Struct, frozen=True):
    """What a watched rank writes into its log: evidence as it is, and the entries of `stream.entries`."""
