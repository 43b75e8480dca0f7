"""Copies of models outside the wrappers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpcheck.findings.report import Location

WriteFacts = tuple[Location | None, list[str], tuple[int, ...]]


def values_differ(values: Sequence[Mapping[str, int]]) -> bool:
    """Return True if the same tensors have different values on some ranks."""
    return all(state.keys() == values[0].keys() for state in values) and any(state != values[0] for state in values)
