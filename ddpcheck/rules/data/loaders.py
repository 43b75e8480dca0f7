"""Judges of the passes over data loaders: split, overlap, order and rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ddpcheck.findings import wording
from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.evidence.steps import LocalStep
from ddpcheck.findings.report import Finding, Location
from ddpcheck.rules.data.ddp505_duplicate_data import (
    judge_later_overlap,
    judge_overlap,
    judge_repeated_samples,
    judge_workers,
)
from ddpcheck.rules.data.ddp506_sampler_epoch import (
    judge_epoch_order,
    judge_restarted,
    judge_resumed,
    judge_stale_workers,
)
from ddpcheck.rules.data.ddp510_shared_augmentation_seed import judge_shared_draws
from ddpcheck.rules.data.ddp516_rank_dependent_program_data import judge_labels, judge_other_values, judge_split
from ddpcheck.rules.data.ddp519_samples_left_out import judge_left_out, judge_samples_on_no_rank, judge_sharded_twice
from ddpcheck.trace.data import judge_rows, load_the_same_data


def judge_loaders(passes: Sequence[Sequence[LoaderPass]], ranks: Sequence[int] = ()) -> list[Finding]:
    """Judge every data loader; `passes` by training rank, in order of start."""
    findings = judge_resumed(passes) or judge_restarted(passes) if len(passes) > 1 else []
    lone = all(len({loader.loader for loader in loaders if loader.trains}) == 1 for loaders in passes)
    by_key = [_trained_on(loaders, by_line=not lone) for loaders in passes]
    for key in by_key[0] if by_key else ():
        matched = [groups[key] for groups in by_key if key in groups]
        if len(matched) == len(passes):
            same_data = load_the_same_data([loaders[0] for loaders in matched])
            of_samples = judge_split(matched) or judge_overlap(matched, ranks) or judge_later_overlap(matched)
            of_samples = of_samples or judge_left_out(matched) or judge_other_values(matched)
            of_samples = of_samples or judge_sharded_twice(matched)
            of_samples = of_samples or judge_rows(matched, same_data=same_data)
            findings += of_samples or judge_workers(matched) or judge_labels(matched)
            findings += judge_epoch_order(matched) or judge_stale_workers(matched)
            findings += judge_shared_draws(matched, same_data=same_data)
    return findings


def judge_samples(local: Sequence[LocalStep], *, gradients_differ: bool) -> list[Finding]:
    """Judge the samples of a step (DDP505, else DDP519, which has the same shards as cause).

    `gradients_differ`: the average over ranks is not the gradient of the global batch.
    """
    if len(local) < 2 or not local[0].global_sample_fingerprints or not all(item.sample_fingerprints for item in local):
        return []
    repeated = judge_repeated_samples(local, gradients_differ=gradients_differ)
    return repeated or judge_samples_on_no_rank(local, gradients_differ=gradients_differ)


def _trained_on(
    passes: Sequence[LoaderPass], *, by_line: bool
) -> dict[tuple[Location | None, str, int], list[LoaderPass]]:
    """Group the training passes by loop line, dataset and number of occurrence.

    Loader numbers do not match between ranks if only one rank validates; lines do not if only one rank shows progress.
    """
    by_loader = wording.group_by((loader for loader in passes if loader.trains), lambda loader: loader.loader)
    counts: Counter[tuple[Location | None, str]] = Counter()
    groups = {}
    for loaders in by_loader.values():
        key = loaders[0].location if by_line else None, loaders[0].dataset
        groups[*key, counts[key]] = loaders
        counts[key] += 1
    return groups
