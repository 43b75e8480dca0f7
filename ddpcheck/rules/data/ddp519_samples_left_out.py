"""DDP519 samples-left-out: warning

Samples of the global batch are on no rank.

Why: Samples that are in no shard are not trained on. If a remainder is cut off, the batch shrinks by up to world size
    - 1 samples. If the batch is split by fixed sizes, the same samples are lost in every step. (PyTorch docs,
    DistributedSampler, drop_last.)
Fix: Split by rank and world size so that the shards cover the batch, or choose a batch that divides evenly.
Detected: ddpcheck compares the samples of all shards with the batch, and the indices of all samplers with the
    dataset. For a loader, up to one batch per rank, or up to 5 % of the dataset, may be missing. Samples that another
    epoch takes are not reported. They are reported, however, if every pass takes at most half of the samples that its
    DistributedSampler gives to the rank. A framework has then split the samples a second time. Also reported: a
    sampler that splits by rank, although each rank's dataset already holds different samples.
Ignore: If samples are held out on purpose.
Line: The line that constructs the sampler or the loader. `ddpcheck report` names no line.
Checks: report parity; run data; repro shards
Explains: DDP303 DDP304 DDP305 DDP312
Example:
    def shard(batch, rank, world_size):
        return batch[5 * rank : 5 * rank + 5]   # of 12 samples two are left; right: return batch[rank::world_size]
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.evidence.steps import LocalStep
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import new_finding
from ddpcheck.trace.data import (
    FEWEST_ROWS,
    Loader,
    are_disjoint,
    describe_unused_samples,
    finding_on_loader,
    has_distinct_rows,
    is_complete_pass,
    is_one_share,
    values_by_index,
)

MAX_LEFT_OUT = 0.05  # smaller fractions of unused samples may be rounding at the end


def judge_unused_samples(loader: Loader) -> list[Finding]:
    """DDP519: samples that no rank takes in any epoch."""
    epochs = [epoch for epoch in zip(*loader.passes, strict=False) if all(p.indices for p in epoch)]
    first, size = loader.first, loader.first[0].size
    split_twice = all(_takes_at_most_half(p) for epoch in epochs for p in epoch)
    if len(epochs) < 2 or size < 1 or not (split_twice or loader.has_same_data):
        return []
    if any(p.subset or p.draws_from_list or p.size != size for p in first):  # the other samples are a held-out set
        return []
    if any(not is_complete_pass(p) or p.replaces for epoch in epochs for p in epoch):
        return []
    seen = {frozenset(index for p in epoch for index in p.indices) for epoch in epochs}
    missing = size - max(map(len, seen))
    least = max(MAX_LEFT_OUT * size, max(p.batch_size for p in first) * len(first))
    if missing <= least or (len(seen) > 1 and not split_twice):
        return []
    p = first[0]
    return finding_on_loader(
        "DDP519",
        p,
        f"{missing} of the {size} samples of the dataset are on no rank in {'each' if split_twice else 'any'} of "
        f"{len(epochs)} epochs.",
        evidence=[
            f"{p.sampler} gives each rank {p.num_samples} samples, and the rank takes only {len(p.indices)} of them: "
            "they are split a second time"
            if split_twice
            else f"each rank takes {len(p.indices)} samples, by {p.sampler}"
        ],
        fix="Give the sampler the world size and the rank of the process group, and split the data once only.",
    )


def _takes_at_most_half(p: LoaderPass) -> bool:
    return p.replicas > 1 and 2 * max(len(p.indices), p.batches * p.batch_size) <= p.num_samples + p.batch_size


def judge_sharded_twice(loader: Loader) -> list[Finding]:
    """DDP519: a distributed sampler over datasets that are already split by rank."""
    first = loader.first
    if len(first) < 2 or any(p.replaces or p.draws_from_list or not p.indices for p in first):
        return []
    if not _split_same_positions(first) or not _are_disjoint_parts(loader.passes):
        return []
    size = len(first[0].subset) or first[0].size
    return finding_on_loader(
        "DDP519",
        first[0],
        f"The data are split twice: each rank's dataset already is a separate part, and the sampler takes "
        f"{-(-size // len(first))} of its {size} samples in an epoch. The remaining samples are on no rank.",
        evidence=[f"{first[0].sampler} splits the indices of the dataset between {len(first)} ranks"],
        fix="Split once: leave out the split by rank, or keep the parts, and shuffle each with a RandomSampler.",
    )


def _taken_positions(loader: LoaderPass) -> set[int]:
    """Return the positions of the sampler's samples in the `Subset`, else in the dataset."""
    if not loader.subset:
        return set(loader.indices)
    positions = {index: number for number, index in enumerate(loader.subset)}
    return {positions.get(index, -1) for index in loader.indices}


def _split_same_positions(first: Sequence[LoaderPass]) -> bool:
    if all(loader.replicas == len(first) for loader in first):
        return True
    taken = [_taken_positions(loader) for loader in first]
    sizes = {len(loader.subset) or loader.size for loader in first}
    if len(sizes) > 1 or not all(taken) or any(not loader.exhausted for loader in first):
        return False
    (size,), union = sizes, set.union(*taken)
    is_split = max(map(len, taken)) <= -(-size // len(first)) and sum(map(len, taken)) - len(union) <= len(first)
    return is_split and len(union) >= size - first[0].batch_size * 2


def _are_disjoint_parts(passes: Sequence[Sequence[LoaderPass]]) -> bool:
    first = [loaders[0] for loaders in passes]
    if all(loader.subset for loader in first):
        return are_disjoint([loader.subset for loader in first])
    if any(loader.subset for loader in first) or not all(has_distinct_rows(loader) for loader in first):
        return False
    names = set.intersection(*(set(loader.samples) for loader in first))
    disjoint = bool(names) and all(are_disjoint([loader.samples[name] for loader in first]) for name in names)
    of_whole = all(loader.base_rows and (loader.base_rows < 0 or is_one_share(loader, len(first))) for loader in first)
    drawn_alike = first[0].earlier_draws and len({loader.earlier_draws for loader in first}) == 1
    return (
        bool(of_whole or drawn_alike)
        and are_disjoint([p.rows for p in first])
        and (disjoint or _positions_differ(passes))
    )


def _positions_differ(passes: Sequence[Sequence[LoaderPass]]) -> bool:
    """Return True if a dataset position holds a different sample on each rank."""
    by_rank = [(values_by_index(loaders, labels=False), values_by_index(loaders, labels=True)) for loaders in passes]
    for (rows, labels), (other_rows, other_labels) in itertools.combinations(by_rank, 2):
        common = rows.keys() & other_rows.keys()
        if len(common) < FEWEST_ROWS or any(rows[i] == other_rows[i] for i in common):
            return False
        named = [(other_labels[i], labels.get(i)) for i in common & other_labels.keys()]
        if len(set(named)) > 1 and all(a == b for a, b in named):
            return False  # ranks transform the same samples differently
    return True


def judge_samples_on_no_rank(local: Sequence[LocalStep], *, gradients_differ: bool) -> list[Finding]:
    """DDP519: samples of a step's global batch that no rank has."""
    left_out = describe_unused_samples(local)
    if not left_out or not gradients_differ:
        return []
    return new_finding(
        "DDP519",
        ("shard",),
        f"The shards leave samples out: {left_out} in step {local[0].evidence.step}.",
        evidence=[f"samples a rank: {', '.join(str(len(item.sample_fingerprints)) for item in local)}"],
    )
