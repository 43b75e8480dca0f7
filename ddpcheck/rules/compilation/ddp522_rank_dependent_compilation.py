"""DDP522 rank-dependent-compilation: warning, keeps_gradients, keeps_results

On some ranks only, torch.compile compiles a function repeatedly, or to different operations.

Why: One rank may compile for a tenth of a second or for minutes. Meanwhile, all others wait in the reduction of
    gradients. After 8 recompilations (torch._dynamo.config.recompile_limit), torch gives up. That rank then runs the
    function without compilation, slower than the others. If the code itself depends on the rank, the ranks train
    different models. (PyTorch docs, torch.compile, Recompilation.)
Fix: Pad batches to one shape, or compile for any size: torch.compile(dynamic=True) or torch._dynamo.mark_dynamic.
    Make Python values and branches in forward the same on every rank.
Detected: ddpcheck records what each rank compiles in training, and which guard (condition for reusing compiled code)
    failed. `ddpcheck run`, `ddpcheck.watch` and the compiled steps of `ddpcheck report` do this. Three cases are
    reported. The same guard fails at least twice on one rank and never on another. Only some ranks reach the
    recompile limit. For inputs of the same shapes, a function always compiles to different operations on different
    ranks. Functions with graph breaks are not compared for the third case.
Ignore: If the recompilations end soon: this rank has already met all its shapes, and the others will meet theirs
    later.
Line: The line that reads the value that changes; else the line that defines or calls the function.
Checks: report reducer; run loop
Example:
    model = DistributedDataParallel(torch.compile(net, dynamic=False))
    for tokens in loader:                    # lengths that vary on one rank
        model(tokens).backward()             # right: torch.compile(net), which compiles for any length at the second
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ddpcheck.findings.evidence.loop import FunctionCompiled
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import format_ranks, join_names, make_finding, minority_ranks
from ddpcheck.rules.registry import rule
from ddpcheck.trace.compilation import Compilations, CompilationsByRank, trained_functions

MIN_FAILURES = 2  # failures of one guard: torch does not treat the size or the number as dynamic
MIN_STEPS = 4  # steps until a difference between graphs is taken for a lasting one
MAX_EVIDENCE = 3  # ranks and failures that a finding lists
MAX_OPERATIONS = 8  # operations that a finding lists by rank
RESUME_FUNCTION = re.compile(r".*torch_dynamo_resume_in_(?P<name>.+)_at_(?P<line>\d+)")


@rule
def judge_script(compilations: Compilations) -> list[Finding]:
    """DDP522: functions that only some ranks recompile, or that ranks compile to different graphs."""
    graphs = judge_graphs(compilations.compiled) if compilations.steps >= MIN_STEPS else []
    return judge_recompilations(compilations.functions) + graphs


def judge_compilations(compiled: CompilationsByRank) -> list[Finding]:
    """Return findings on the compilations of ranks that train the same model."""
    return judge_recompilations(trained_functions(compiled)) + judge_graphs(compiled)


def judge_recompilations(functions: Iterable[CompilationsByRank]) -> list[Finding]:
    """Detect functions that some ranks recompile repeatedly or give up compiling."""
    findings = []
    for by_rank in functions:
        given_up = {rank for rank, entries in enumerate(by_rank) if any(entry.hit_limit for entry in entries)}
        for guard in dict.fromkeys(entry.guard for entries in by_rank for entry in entries if entry.guard):
            counts = [sum(entry.guard == guard for entry in entries) for entries in by_rank]
            repeated = {rank for rank, count in enumerate(counts) if count >= MIN_FAILURES}
            ranks = repeated & given_up if given_up else repeated if 0 in counts else set()
            if ranks and len(given_up) < len(by_rank):
                findings.append(recompilation_finding(by_rank, guard, sorted(ranks), gives_up=bool(given_up)))
                break
    return findings


def judge_graphs(compiled: CompilationsByRank) -> list[Finding]:
    """Detect functions that ranks compile to different operations for inputs of equal shapes.

    Functions with graph breaks are skipped: the parts between breaks may differ, e.g. if some ranks print.
    """
    resumed = (RESUME_FUNCTION.match(entry.function) for entries in compiled for entry in entries)
    broken = {match["name"] for match in resumed if match}
    findings = []
    for by_rank in trained_functions(compiled):
        name = by_rank[0][0].function
        if name.rpartition(".")[2] in broken or RESUME_FUNCTION.match(name):
            continue
        for inputs in dict.fromkeys(entry.inputs for entry in by_rank[0]):
            graphs = [[entry.operations for entry in entries if entry.inputs == inputs] for entries in by_rank]
            if not all(rank_graphs and all(graph == rank_graphs[0] for graph in rank_graphs) for rank_graphs in graphs):
                continue
            graph_by_rank = [rank_graphs[0] for rank_graphs in graphs]
            if all(graph_by_rank) and any(graph != graph_by_rank[0] for graph in graph_by_rank):
                findings.append(graph_finding(by_rank[0][0], graph_by_rank))
                break
    return findings


def recompilation_finding(by_rank: CompilationsByRank, guard: str, ranks: Sequence[int], *, gives_up: bool) -> Finding:
    failures = [entry for rank in ranks for entry in by_rank[rank] if entry.guard == guard]
    counts = {rank: sum(not entry.hit_limit for entry in entries) for rank, entries in enumerate(by_rank)}
    others = [rank for rank in counts if rank not in ranks]
    name, times, other_times = _func_name(failures[0]), _times_in_words(counts, ranks), _times_in_words(counts, others)
    end = "The others wait for each compilation."
    if gives_up:
        end = "Torch then stops compiling it and runs it in eager mode: the others wait for this rank in each step."
    evidence = [
        f"rank {rank}: compiled {_times_in_words(counts, [rank])}, in {sum(entry.seconds for entry in entries):.1f} s"
        for rank, entries in enumerate(by_rank[:MAX_EVIDENCE])
    ]
    evidence += [f"in step {entry.step}: {entry.reason}" for entry in failures[:MAX_EVIDENCE]]
    return make_finding(
        "DDP522",
        (name,),
        f"{name} ({failures[0].defined_at}) is compiled {times} on {format_ranks(ranks)}, and {other_times} on "
        f"{format_ranks(others)}. {end}",
        ranks=ranks,
        steps=sorted({entry.step for entry in failures}),
        location=failures[0].location or failures[0].defined_at,
        evidence=evidence,
        fix="Pad batches to one shape on every rank, and drop a shorter last one (`drop_last=True`); or have code for "
        "any size compiled: `torch.compile(model, dynamic=True)`, or `torch._dynamo.mark_dynamic(x, dim)`."
        if "mismatch at index" in guard
        else "Change the value on every rank or on none, or keep it in a tensor: a Python value that a compiled "
        "function reads is a constant of its code, which is compiled again for each value.",
    )


def _times_in_words(counts: Mapping[int, int], ranks: Sequence[int]) -> str:
    fewest, most = min(counts[rank] for rank in ranks), max(counts[rank] for rank in ranks)
    return f"{fewest} to {most} times" if fewest < most else "once" if most == 1 else f"{most} times"


def graph_finding(entry: FunctionCompiled, graphs: Sequence[Mapping[str, int]]) -> Finding:
    ranks = minority_ranks([tuple(sorted(graph.items())) for graph in graphs])
    names = sorted({name for graph in graphs for name in graph})
    names = [name for name in names if len({graph.get(name, 0) for graph in graphs}) > 1]
    return make_finding(
        "DDP522",
        (_func_name(entry),),
        f"For inputs of the same shapes, {_func_name(entry)} ({entry.defined_at}) is compiled to different operations "
        f"on some ranks: they have a different number of {join_names(names)}.",
        ranks=ranks,
        location=entry.defined_at,
        tags=("of graphs",),
        evidence=[
            f"rank {rank}: {', '.join(f'{graph.get(name, 0)} {name}' for name in names[:MAX_OPERATIONS])}"
            for rank, graph in enumerate(graphs[:MAX_EVIDENCE])
        ],
        fix="Take the same branch on every rank: the rank is a constant in a compiled function. Move code that only "
        "one rank needs out of it.",
    )


def _func_name(entry: FunctionCompiled) -> str:
    """Return a function's name in the source: "forward", or "forward after line 12"."""
    match = RESUME_FUNCTION.match(entry.function)
    return f"{match['name']} after line {match['line']}" if match else entry.function
