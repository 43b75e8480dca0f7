"""DDP522: functions compiled differently, or unequally often, on some ranks (`torch.compile`).

Recompilation at different times is healthy: each rank learns dynamic sizes from its own batches and ends with the same
code. So is a function that one rank compiles, e.g. for evaluation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ddpcheck.findings.evidence.loop import FunctionCompiled
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import format_ranks, group_by, join_names, make_finding, minority_ranks

OfRanks = Sequence[Sequence[FunctionCompiled]]  # compilations of one function, by rank

_REST = re.compile(r".*torch_dynamo_resume_in_(?P<name>.+)_at_(?P<line>\d+)")
_AGAIN = 2  # failures of one guard: torch does not treat the size or the number as dynamic
_MOST_SHOWN = 3
_MOST_NAMES = 8  # of operations


def judge_compilations(compiled: OfRanks) -> list[Finding]:
    """Return findings on the compilations of ranks that train the same model."""
    return judge_recompilations(trained_functions(compiled)) + judge_graphs(compiled)


def trained_functions(compiled: OfRanks) -> list[OfRanks]:
    """Return the functions that every rank compiled for training."""
    trained = [[one for one in of_rank if one.trains] for of_rank in compiled]
    by_rank = [group_by(of_rank, lambda one: (one.function, one.defined)) for of_rank in trained]
    common = [key for key in (by_rank[0] if by_rank else ()) if all(key in known for known in by_rank)]
    return [[known[key] for known in by_rank] for key in common]


def judge_recompilations(functions: Iterable[OfRanks]) -> list[Finding]:
    """Detect functions that some ranks recompile repeatedly or give up compiling."""
    found = []
    for of_ranks in functions:
        given_up = {rank for rank, of_rank in enumerate(of_ranks) if any(one.given_up for one in of_rank)}
        for guard in dict.fromkeys(one.guard for of_rank in of_ranks for one in of_rank if one.guard):
            times = [sum(one.guard == guard for one in of_rank) for of_rank in of_ranks]
            again = {rank for rank, number in enumerate(times) if number >= _AGAIN}
            ranks = again & given_up if given_up else again if 0 in times else set()
            if ranks and len(given_up) < len(of_ranks):
                found.append(_recompiled(of_ranks, guard, sorted(ranks), gives_up=bool(given_up)))
                break
    return found


def _recompiled(of_ranks: OfRanks, guard: str, ranks: Sequence[int], *, gives_up: bool) -> Finding:
    again = [one for rank in ranks for one in of_ranks[rank] if one.guard == guard]
    numbers = {rank: sum(not one.given_up for one in of_rank) for rank, of_rank in enumerate(of_ranks)}
    others = [rank for rank in numbers if rank not in ranks]
    often, seldom = (_times(numbers, chosen) for chosen in (ranks, others))
    end = (
        "Torch then stops compiling it and runs it in eager mode: the others wait for this rank in each step."
        if gives_up
        else "The others wait for each compilation."
    )
    evidence = [
        f"rank {rank}: compiled {_times(numbers, [rank])}, in {sum(one.seconds for one in of_rank):.1f} s"
        for rank, of_rank in enumerate(of_ranks[:_MOST_SHOWN])
    ]
    evidence += [f"in step {one.step}: {one.reason}" for one in again[:_MOST_SHOWN]]
    return make_finding(
        "DDP522",
        (_named(again[0]),),
        f"{_named(again[0])} ({again[0].defined}) is compiled {often} on {format_ranks(ranks)}, and {seldom} on "
        f"{format_ranks(others)}. {end}",
        ranks=ranks,
        steps=sorted({one.step for one in again}),
        location=again[0].location or again[0].defined,
        evidence=evidence,
        fix="Pad batches to one shape on every rank, and drop a shorter last one (`drop_last=True`); or have code for "
        "any size compiled: `torch.compile(model, dynamic=True)`, or `torch._dynamo.mark_dynamic(x, dim)`."
        if "mismatch at index" in guard
        else "Change the value on every rank or on none, or keep it in a tensor: a Python value that a compiled "
        "function reads is a constant of its code, which is compiled again for each value.",
    )


def _times(numbers: Mapping[int, int], ranks: Sequence[int]) -> str:
    few, most = min(numbers[rank] for rank in ranks), max(numbers[rank] for rank in ranks)
    return f"{few} to {most} times" if few < most else "once" if most == 1 else f"{most} times"


def judge_graphs(compiled: OfRanks) -> list[Finding]:
    """Detect different operations between ranks in graphs for inputs of the same shapes.

    Skips functions with graph breaks: the parts may differ, e.g. if some ranks print.
    """
    found = []
    broken = {match["name"] for of_rank in compiled for match in _rests(of_rank)}
    for of_ranks in trained_functions(compiled):
        if of_ranks[0][0].function.rpartition(".")[2] in broken or _REST.match(of_ranks[0][0].function):
            continue
        for inputs in dict.fromkeys(one.inputs for one in of_ranks[0]):
            graphs = [[one.operations for one in of_rank if one.inputs == inputs] for of_rank in of_ranks]
            if all(of_rank and all(one == of_rank[0] for one in of_rank) for of_rank in graphs):
                graph_of = [of_rank[0] for of_rank in graphs]
                if all(graph_of) and any(one != graph_of[0] for one in graph_of):
                    found.append(_other_graphs(of_ranks[0][0], graph_of))
                    break
    return found


def _other_graphs(one: FunctionCompiled, graphs: Sequence[Mapping[str, int]]) -> Finding:
    ranks = minority_ranks([tuple(sorted(graph.items())) for graph in graphs])
    names = sorted({name for graph in graphs for name in graph})
    names = [name for name in names if len({graph.get(name, 0) for graph in graphs}) > 1]
    return make_finding(
        "DDP522",
        (_named(one),),
        f"For inputs of the same shapes, {_named(one)} ({one.defined}) is compiled to different operations on some "
        f"ranks: they have a different number of {join_names(names)}.",
        ranks=ranks,
        location=one.defined,
        evidence=[
            f"rank {rank}: {', '.join(f'{graph.get(name, 0)} {name}' for name in names[:_MOST_NAMES])}"
            for rank, graph in enumerate(graphs[:_MOST_SHOWN])
        ],
        fix="Take the same branch on every rank: the rank is a constant in a compiled function. Move code that only "
        "one rank needs out of it.",
    )


def _rests(of_rank: Sequence[FunctionCompiled]) -> Iterator[re.Match[str]]:
    return filter(None, (_REST.match(one.function) for one in of_rank))


def _named(one: FunctionCompiled) -> str:
    """Return the function name as in the source code."""
    rest = _REST.match(one.function)
    return f"{rest['name']} after line {rest['line']}" if rest else one.function
