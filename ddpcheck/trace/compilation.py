"""Functions compiled by torch.compile, by rank."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.evidence.loop import FunctionCompiled

CompilationsByRank = Sequence[Sequence[FunctionCompiled]]  # compilations of one function, by rank
