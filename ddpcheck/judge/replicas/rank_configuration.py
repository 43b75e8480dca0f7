"""DDP216, 221, 223, 503, 516: options of wrapper and optimizer, and data of the program, that differ between ranks."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence

from ddpcheck.findings.ddp_options import are_harmless
from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.wording import (
    format_ranks,
    group_by,
    join_names,
    minority_of_any,
    minority_ranks,
    one_finding,
    plural_verb,
    told_by_rank,
    unless_all,
)
from ddpcheck.judge.judge_context import SingleProcessFacts
from ddpcheck.judge.replicas.descriptions import differing_values


def judge_options(code: str, options: Sequence[Mapping[str, str]], what: str) -> list[Finding]:
    """One finding when `options` (of the wrapper: DDP221, of the optimizer: DDP223) are not the same on every rank."""
    names = sorted(set(itertools.chain.from_iterable(options)))
    values = {name: [of_rank.get(name, "(not set)") for of_rank in options] for name in names}
    differing = [name for name in names if len(set(values[name])) > 1]
    if not differing:
        return []
    if "class" in differing:
        differing = ["class"]  # another class has other options, too
    others = {f"{name.removesuffix(' parameters')} order" for name in differing if name.endswith(" parameters")}
    differing = [name for name in differing if name not in others]  # the order differs because the parameters do
    harmless = are_harmless(differing, options)
    return one_finding(
        code,
        differing,
        f"{what} is not the same on every rank: {', '.join(differing)}.",
        ranks=minority_of_any(values[name] for name in differing),
        evidence=told_by_rank({name: _differences(name, values[name]) for name in differing}),
        severity=Severity.WARNING if harmless else None,
    )


def _differences(name: str, values: Sequence[str]) -> list[str]:
    """`values`; of long lists of parameters only the names that not all ranks have, or the first place that differs."""
    if not name.endswith((" parameters", " order")):
        return list(values)
    lists = [value.split(", ") for value in values]
    if name.endswith(" order"):
        place = next((i for i, at in enumerate(zip(*lists, strict=False)) if len(set(at)) > 1), 0)
        return [f"number {place} is {names[place]}" for names in lists]
    common = set.intersection(*map(set, lists))
    return [
        join_names([n for n in names if n not in common] or ["none that the others lack"], most=6) for names in lists
    ]


def judge_program_data(facts: SingleProcessFacts) -> list[Finding]:
    """DDP216 and 516: plain values that differ between ranks whose gradients are not those of their shards.

    A value that the steps have changed is state, and not data.
    """
    data = facts.known.program_data
    values = differing_values(data) if data else {}
    differing = [name for name in values if not _is_the_rank(values[name])]
    if not differing:
        return []
    away = (
        f"the ranks compute gradients that are up to {facts.largest_error:.2g} (relative) away from those of the "
        "global batch"
    )
    code = "DDP516"
    message = f"{join_names(differing)} {plural_verb('is', 'are', differing)} not the same on every rank, and {away}."
    if state := [name for name in differing if name in facts.known.changed_data]:
        code, differing, it = "DDP216", state, plural_verb("it", "them", state)
        message = (
            f"{join_names(state)} {plural_verb('changes', 'change', state)} in the steps, not alike on every rank, "
            f"and nothing synchronises {it}: {away}."
        )
    return facts.one_finding(
        code,
        message,
        *told_by_rank({name: _around_difference(values[name]) for name in differing}),
        subjects=differing,
        severity=Severity.ERROR,
        ranks=minority_of_any(values[name] for name in differing),
    )


def judge_batches(batches: Sequence[tuple[int, ...]], step: int) -> list[Finding]:
    """DDP516: ranks that make another global batch than the others each time (fingerprints of its tensors by rank)."""
    ranks = minority_ranks(batches)
    return one_finding(
        "DDP516",
        (f"batch({step})",),
        f"batch({step}) makes another global batch on {format_ranks(ranks)}, and the same one each time it is "
        "called, so the ranks do not train on parts of one batch.",
        ranks=ranks,
        evidence=["what ranks do not share: the hash seed, on which the order of a set depends, and their number"],
    )


def judge_programs(facts: SingleProcessFacts) -> list[Finding]:
    """DDP516: ranks that compute another loss on their shard than a process does that is no rank.

    A warning where `find_unused_parameters` allows for parameters that take part on some ranks only, as someone sets it
    who knows that the ranks do different things.
    """
    losses, alone = facts.known.local.losses, facts.analysis.shard_losses
    if len(losses) != len(alone):
        return []
    ranks = [r for r, (a, b) in enumerate(zip(losses, alone, strict=True)) if not math.isclose(a, b, rel_tol=1e-3)]
    if not ranks or len(ranks) == len(losses):
        return []
    rank = ranks[0]
    return facts.one_finding(
        "DDP516",
        f"On {format_ranks(ranks)} the model or the loss computes something else from the same samples than a "
        "single process does, and than the other ranks do from theirs.",
        f"the loss on the shard of rank {rank} is {losses[rank]:.4g} there, and {alone[rank]:.4g} without it",
        ranks=ranks,
        severity=Severity.WARNING if facts.known.wrapper.find_unused_parameters else None,
    )


def _is_the_rank(values: Sequence[str]) -> bool:
    """Whether each value is its rank, or a word with it ("cuda:1"), which a program may well know."""
    spelled_out = {re.sub(rf"(?<!\d){rank}(?!\d)", "#", value) for rank, value in enumerate(values)}
    return len(spelled_out) == 1 and all(re.fullmatch(r"\d+|'.*'", value) for value in values)


_LONGEST_VALUE = 120


def _around_difference(values: Sequence[str]) -> list[str]:
    """`values`; of long ones only the part around the first difference."""
    if max(map(len, values)) <= _LONGEST_VALUE:
        return list(values)
    place = next((i for i, at in enumerate(zip(*values, strict=False)) if len(set(at)) > 1), min(map(len, values)))
    start = max(place - _LONGEST_VALUE // 3, 0)
    return [f"{'...' if start else ''}{value[start : start + _LONGEST_VALUE]}..." for value in values]


def judge_changes(changes: Sequence[Mapping[str, str]], *, sharded: bool = False) -> list[Finding]:
    """DDP503: what happened to parameters since the wrapper's construction ("frozen", "added"), by name and rank."""
    found = dict.fromkeys((name, what) for of_rank in changes for name, what in of_rank.items())
    if not found:
        return []
    by_what = {what: [name for name, _ in of] for what, of in group_by(found, lambda change: change[1]).items()}
    ranks = tuple(rank for rank, of_rank in enumerate(changes) if of_rank)
    changed = [f"{join_names(names)} {plural_verb('was', 'were', names)} {what}" for what, names in by_what.items()]
    still = "after wrapping; the reducer still has the old ones"
    if sharded:
        still = "after fully_shard, whose groups still gather the old ones"
    return one_finding(
        "DDP503",
        list(dict.fromkeys(name for names in by_what.values() for name in names)),
        f"{join_names(changed)} {still}.",
        ranks=unless_all(ranks, len(changes)),
    )
