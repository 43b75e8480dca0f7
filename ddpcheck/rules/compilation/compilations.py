"""Judges of compiled functions: recompilations and graphs."""

from __future__ import annotations

from ddpcheck.findings.wording import group_by
from ddpcheck.trace.compilation import CompilationsByRank


def trained_functions(compiled: CompilationsByRank) -> list[CompilationsByRank]:
    """Return the functions that every rank compiled for training."""
    trained = [[entry for entry in entries if entry.trains] for entries in compiled]
    by_rank = [group_by(entries, lambda entry: (entry.function, entry.defined)) for entries in trained]
    common = [key for key in (by_rank[0] if by_rank else ()) if all(key in groups for groups in by_rank)]
    return [[groups[key] for groups in by_rank] for key in common]
