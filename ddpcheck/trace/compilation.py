"""Functions compiled by torch.compile, by rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from ddpcheck.findings.evidence.loop import FunctionCompiled
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import group_by, plural
from ddpcheck.trace.replicas import common_values
from ddpcheck.trace.script_facts import ScriptFacts
from ddpcheck.trace.view import View

CompilationsByRank = Sequence[Sequence[FunctionCompiled]]


def trained_functions(compiled: CompilationsByRank) -> list[CompilationsByRank]:
    """Return compilations, by rank, of each function that every rank compiled for training."""
    trained = [[entry for entry in entries if entry.trains] for entries in compiled]
    by_rank = [group_by(entries, lambda entry: (entry.function, entry.defined_at)) for entries in trained]
    return list(common_values(by_rank).values())


@dataclass(frozen=True, slots=True)
class Compilations(View):
    """Compilations of ranks that all train one replicated model."""

    checks = ("loop",)
    compiled: CompilationsByRank
    steps: int  # number of steps of the wrapper with the most steps

    @classmethod
    def from_facts(cls, facts: ScriptFacts) -> Self | None:
        whole = any(len(wrapper.made.ranks) == len(facts.ranks) for wrapper in facts.wrappers)
        return cls(facts.events(FunctionCompiled), facts.steps) if whole and not facts.model_groups else None

    @property
    def functions(self) -> list[CompilationsByRank]:
        """Compilations, by rank, of each function that every rank compiled for training."""
        return trained_functions(self.compiled)

    def compared(self, check: str, findings: Sequence[Finding]) -> Iterator[str]:
        if functions := self.functions:
            yield f"no compilation that depends on the rank, in {plural(len(functions), 'function')}"
