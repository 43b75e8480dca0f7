"""DDP506 sampler-epoch: warning, keeps_results

The sampler's epoch never changes, so every epoch sees the same order.

Why: DistributedSampler seeds its shuffle with seed + epoch. Without set_epoch, the epoch stays 0. (PyTorch docs,
    DistributedSampler: call set_epoch before creating the iterator of each epoch.)
Fix: Call sampler.set_epoch(epoch) at the start of every epoch, on every rank.
Detected: `ddpcheck run` records the order of indices that each sampler gives. Four cases are reported. A sampler
    shuffles and gives the same order in each epoch. Persistent workers give the same samples again, although the
    program has changed an attribute of the dataset. A resumed epoch skips two or more batches that had not been
    trained on. Training continues from the state of an optimizer that has already seen the data, but the sampler is
    at epoch 0.
Ignore: If one order is intended, for example to compare two runs.
Line: The call of set_epoch; else the loop over the epochs. For persistent workers: the line that makes them
    persistent. Else the line that constructs the sampler or the loader.
Checks: run data
Reports: pytorch/pytorch#31771 kan-bayashi/ParallelWaveGAN#177 lucidrains/DALLE-pytorch#230
Example:
    for epoch in range(epochs):
        for x in loader:                     # right: loader.sampler.set_epoch(epoch) before this loop
            step(x)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import join_names, plural
from ddpcheck.trace.data import FEWEST_ROWS, Loader, finding_on_loader, first_training_indices


def judge_epoch_order(loader: Loader) -> list[Finding]:
    """DDP506: a shuffling sampler with the same order in every epoch."""
    first = loader.first[0]  # another model or dataset has its own epochs
    passes = [[p for p in loaders if (p.wrappers, p.data) == (first.wrappers, first.data)] for loaders in loader.passes]
    for loaders in passes:
        if not loaders:
            return []
        orders = [p.order for p in loaders if p.exhausted]
        if len({p.epoch for p in loaders if p.exhausted}) > 1:
            return []  # set_epoch was called; the sampler has few orders
        indices = list(loaders[0].indices)
        if (
            not any(p.shuffles for p in loaders)
            or indices == sorted(indices)
            or len(orders) < 2
            or not orders[0]
            or len(set(orders)) > 1
        ):
            return []
    epochs = min(sum(p.exhausted for p in loaders) for loaders in passes)
    return finding_on_loader(
        "DDP506",
        first,
        f"{first.sampler} shuffles, and all {epochs} epochs have the same order.",
        line=first.epoch_set_at or (first.epochs_at if first.has_epoch or first.epoch >= 0 else None),
        evidence=[f"every epoch begins with samples {first_training_indices(first.indices)} on rank 0"],
        fix=""
        if first.has_epoch
        else "Do not seed the generator of the loader again before each epoch."
        if first.epoch < 0
        else "Set the epoch of the sampler before each pass: its order is drawn from that.",
    )


def judge_stale_workers(loader: Loader) -> list[Finding]:
    """DDP506: persistent workers that repeat the first epoch's samples after the dataset changed."""
    changed: set[str] = set()
    for loaders in loader.passes:
        complete = [p for p in loaders if (p.exhausted or p.indices) and p.rows]
        first, *later = [dict(zip(p.indices or itertools.count(), p.rows, strict=False)) for p in complete] or [{}]
        repeats = [{key: row for key, row in rows.items() if key in first} for rows in later]
        if not later or any(len(rows) < FEWEST_ROWS or not rows.items() <= first.items() for rows in repeats):
            return []
        if len(set(first.values())) < FEWEST_ROWS or not any(p.outdated or p.size < 0 for p in complete):
            return []
        names = {name for p in complete[1:] for name in p.state if p.state[name] != complete[0].state.get(name)}
        if not names or not complete[0].persistent:
            return []
        changed |= names
    return finding_on_loader(
        "DDP506",
        loader.first[0],
        f"The program changes {join_names(sorted(changed))} of the dataset from epoch to epoch, but the persistent "
        "workers of the loader keep their first copy: every epoch has the samples of the first.",
        line=loader.first[0].persistent_at,
        evidence=["persistent_workers=True: workers are started once, and the dataset is copied to them then"],
        fix="Set persistent_workers=False, or keep the epoch in shared memory: a tensor after share_memory_().",
    )


def judge_resumed(passes: Sequence[Sequence[LoaderPass]]) -> list[Finding]:
    """DDP506: an epoch that is resumed in a different order, after skipped batches."""
    resumed = [_find_resumed_pass(loaders) for loaders in passes]
    pairs = [pair for pair in resumed if pair is not None]
    if len(pairs) < len(passes) or len({loader.skipped for loader, _ in pairs}) != 1:
        return []
    loader, untrained = pairs[0]
    return finding_on_loader(
        "DDP506",
        loader,
        f"An epoch is resumed in a different order: of the samples of the first "
        f"{plural(loader.skipped, 'batch')}, which the loop skips, {untrained} had not been trained on. "
        "Others are trained on again.",
        line=loader.epoch_set_at or loader.epochs_at,
        evidence=["the previous pass began with samples that differ from the skipped ones"],
        fix="Before the loop that resumes, call set_epoch of the sampler with the epoch that is resumed; or restore "
        "the state of the generator from which the loader shuffles.",
    )


def _find_resumed_pass(loaders: Sequence[LoaderPass]) -> tuple[LoaderPass, int] | None:
    """Return the loader pass that resumes an epoch, and the number of lost samples."""
    trained = [loader for loader in loaders if loader.trains and not loader.replaces]
    for kind in dict.fromkeys((loader.dataset, loader.size) for loader in trained):
        epochs = [loader for loader in trained if (loader.dataset, loader.size) == kind]
        for index, loader in enumerate(epochs):
            if (untrained := _count_untrained(epochs[:index], loader, epochs[index + 1 : index + 2])) > 0:
                return loader, untrained
    return None


def _count_untrained(earlier: Sequence[LoaderPass], loader: LoaderPass, next_passes: Sequence[LoaderPass]) -> int:
    """Count lost samples, which `loader` skips and the previous pass did not train on."""
    count = loader.skipped * loader.batch_size
    passed = set(loader.indices[:count])
    # one more batch is no evidence: a prefetching loader takes the next batch early
    if not earlier or not earlier[-1].skipped + 1 < loader.skipped <= earlier[-1].batches or len(passed) < count:
        return 0
    if not all(p.indices for p in (*earlier, *next_passes)):
        return 0
    matching = [index for index, p in enumerate(earlier) if set(p.indices[:count]) <= passed]
    if matching:  # the previous or an earlier pass matches; after an earlier pass, the next passes must match, too
        next_pass = earlier[matching[-1] + 1 : matching[-1] + 2]
        if not next_pass or not next_passes or _begin_equally(next_pass[0], next_passes[0]):
            return 0
    return len(passed - set(earlier[-1].indices[:count]))


def _begin_equally(first: LoaderPass, second: LoaderPass) -> bool:
    size = min(len(first.indices), len(second.indices))
    return set(first.indices[:size]) == set(second.indices[:size])


def judge_restarted(passes: Sequence[Sequence[LoaderPass]]) -> list[Finding]:
    """DDP506: training that continues from a later epoch with the sampler at epoch 0."""
    first = [next((loader for loader in loaders if loader.trains and loader.restored), None) for loaders in passes]
    restarted = [p for p in first if p is not None and _is_shuffled(p) and p.has_epoch and p.epoch == 0]
    done = [loader for loader in restarted if _resumes_after_epoch(loader)]
    if len(restarted) < len(passes) or not done or (restored := done[0].restored) is None:
        return []
    loader = done[0]
    far = plural(restored.steps, "optimizer step") if restored.steps else plural(restored.epochs, "epoch")
    return finding_on_loader(
        "DDP506",
        loader,
        f"Training continues after {far}, and {loader.sampler} is at epoch 0 again: the epochs repeat the orders of "
        "the first ones.",
        line=loader.epoch_set_at or loader.epochs_at,
        evidence=[f"an optimizer was restored at {restored.location}"],
        fix="Continue to count epochs from that of the checkpoint, and call set_epoch with the number before each.",
    )


def _is_shuffled(loader: LoaderPass) -> bool:
    return loader.shuffles or (not loader.replaces and list(loader.indices) != sorted(loader.indices))


def _resumes_after_epoch(loader: LoaderPass) -> bool:
    """Return True if training before the checkpoint had covered the data at least once."""
    if loader.restored is None or not loader.restored.steps:
        return loader.restored is not None and loader.restored.epochs > 0 and not loader.skipped
    batches = loader.size // loader.replicas // loader.batch_size if loader.replicas else loader.expected
    worked = max(1, loader.batches - loader.skipped)
    return loader.restored.steps * worked >= (batches + (2 if loader.skipped else 0)) * loader.steps > 0
