"""Judges of compiled functions: recompilations and graphs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from ddpcheck.findings.evidence.loop import FunctionCompiled
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import group_by
from ddpcheck.rules.compilation.ddp522_rank_dependent_compilation import graph_finding, recompilation_finding
from ddpcheck.trace.compilation import RESUME_FUNCTION, CompilationsByRank

_AGAIN = 2  # failures of one guard: torch does not treat the size or the number as dynamic


def judge_compilations(compiled: CompilationsByRank) -> list[Finding]:
    """Return findings on the compilations of ranks that train the same model."""
    return judge_recompilations(trained_functions(compiled)) + judge_graphs(compiled)


def trained_functions(compiled: CompilationsByRank) -> list[CompilationsByRank]:
    """Return the functions that every rank compiled for training."""
    trained = [[entry for entry in entries if entry.trains] for entries in compiled]
    by_rank = [group_by(entries, lambda entry: (entry.function, entry.defined)) for entries in trained]
    common = [key for key in (by_rank[0] if by_rank else ()) if all(key in groups for groups in by_rank)]
    return [[groups[key] for groups in by_rank] for key in common]


def judge_recompilations(functions: Iterable[CompilationsByRank]) -> list[Finding]:
    """Detect functions that some ranks recompile repeatedly or give up compiling."""
    findings = []
    for by_rank in functions:
        given_up = {rank for rank, entries in enumerate(by_rank) if any(entry.given_up for entry in entries)}
        for guard in dict.fromkeys(entry.guard for entries in by_rank for entry in entries if entry.guard):
            counts = [sum(entry.guard == guard for entry in entries) for entries in by_rank]
            repeated = {rank for rank, count in enumerate(counts) if count >= _AGAIN}
            ranks = repeated & given_up if given_up else repeated if 0 in counts else set()
            if ranks and len(given_up) < len(by_rank):
                findings.append(recompilation_finding(by_rank, guard, sorted(ranks), gives_up=bool(given_up)))
                break
    return findings


def judge_graphs(compiled: CompilationsByRank) -> list[Finding]:
    """Detect different operations between ranks in graphs for inputs of the same shapes.

    Skips functions with graph breaks: the parts may differ, e.g. if some ranks print.
    """
    findings = []
    broken = {match["name"] for entries in compiled for match in _rests(entries)}
    for by_rank in trained_functions(compiled):
        if by_rank[0][0].function.rpartition(".")[2] in broken or RESUME_FUNCTION.match(by_rank[0][0].function):
            continue
        for inputs in dict.fromkeys(entry.inputs for entry in by_rank[0]):
            graphs = [[entry.operations for entry in entries if entry.inputs == inputs] for entries in by_rank]
            if all(rank_graphs and all(graph == rank_graphs[0] for graph in rank_graphs) for rank_graphs in graphs):
                graph_by_rank = [rank_graphs[0] for rank_graphs in graphs]
                if all(graph_by_rank) and any(graph != graph_by_rank[0] for graph in graph_by_rank):
                    findings.append(graph_finding(by_rank[0][0], graph_by_rank))
                    break
    return findings


def _rests(entries: Sequence[FunctionCompiled]) -> Iterator[re.Match[str]]:
    return filter(None, (RESUME_FUNCTION.match(entry.function) for entry in entries))
