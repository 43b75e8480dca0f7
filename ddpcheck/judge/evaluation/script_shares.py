"""DDP802: an evaluation by one rank alone, of the share of the data that a sampler has cut out for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import counted, format_ranks, one_finding
from ddpcheck.judge.evaluation.evaluation_results import Evaluated, is_close, numbers_shown, shows


def judge_lone_share(
    by_rank: Sequence[Mapping[Any, Evaluated]], loaders: Sequence[Sequence[LoaderPass]]
) -> list[Finding]:
    """At most one finding; `by_rank` each evaluation, `loaders` every pass over a loader.

    The sampler splits the data between more ranks than there are that evaluate them, and what such a rank shows, or
    gives to the others, is the metric of its share.
    """
    for rank, theirs in enumerate(by_rank):
        for one in theirs.values():
            parts = one.loader.replicas
            ranks = [other for other, passes in enumerate(loaders) if any(_is_alike(one.loader, it) for it in passes)]
            if parts < 2 or len(ranks) >= parts or not 0 < one.samples < one.loader.size:
                continue
            for key, value in _metrics(one):
                if (what := _use_of(one, value)) is None:
                    continue
                return one_finding(
                    "DDP802",
                    (key.rpartition(".")[2] or key,),
                    f"{format_ranks(ranks).capitalize()} alone {'evaluates' if len(ranks) == 1 else 'evaluate'}, and "
                    f"the sampler splits the {one.loader.size} samples between {counted(parts, 'rank')}: rank {rank} "
                    f"has {value:.6g} of {one.samples} of them, and the others are on no rank.",
                    ranks=ranks,
                    location=one.loader.made or one.loader.location,
                    evidence=[f"it is {what}", f"the loop over the loader begins at {one.loader.location}"],
                    fix="Give a loader that one rank alone evaluates no DistributedSampler; or evaluate on every rank, "
                    "and all_reduce the sum and the count.",
                )
    return []


def _is_alike(one: LoaderPass, other: LoaderPass) -> bool:
    """Whether a pass is over a share of the same data, and trains on nothing."""
    return not other.trains and (other.dataset, other.size, other.replicas) == (one.dataset, one.size, one.replicas)


def _metrics(one: Evaluated) -> Iterator[tuple[str, float]]:
    """What may be made of what the loop has counted, for each sample or for each batch; no counter."""
    for key, count in one.held.numbers.items():
        for divisor in dict.fromkeys((one.samples, max(1, one.loader.batches), 1)):
            value = count / divisor
            if not is_close(value, round(value)):
                yield key, value


def _use_of(one: Evaluated, value: float) -> str | None:
    for shown, number in numbers_shown(one):
        if shows(number, value):
            return f"{'what decides' if shown.how == 'decides' else shown.how} at {shown.location}"
    return None
