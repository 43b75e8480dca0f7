"""DDP516 rank-dependent-program-data: error

Data that the program derives (label map, split, vocabulary, order) differs between ranks.

Why: Class 3 on one rank is class 5 on another, or a validation sample on one rank is a training sample on another.
    Shapes agree, so no error is raised. Sets, directory listings and unseeded shuffles are the usual sources.
Fix: Sort the contents of sets and directories with sorted(), seed shuffles equally, number texts without hash()
    (zlib.crc32 is the same in every process), or compute the data on rank 0 and broadcast it.
Detected: If a rank's gradients differ from those of a single process on the same shard, `ddpcheck report` compares
    the program's variables. Numbers, texts, lists and dictionaries that differ between ranks are reported. `ddpcheck
    run` compares label maps, lists made from sets of texts, random splits of datasets, and the labels of samples. It
    reports samples that several ranks take because their datasets are ordered or split differently. It also reports
    samples whose values differ between ranks but stay the same in every epoch. Ranks that compute one model together
    (parallelize_module) should take the same samples. If these ranks take different samples, this is reported.
Ignore: If ranks should hold different data, for example a table of each rank's neighbours, or samples that each rank
    has augmented once.
Line: The line that assigns the table, or that splits the dataset; else the line that constructs the sampler or the
    loader. If only inputs of forward are compared: the call of forward. `ddpcheck report` names no line.
Checks: report parity; run data, evaluation; repro single-process
Repeats: ModelParts, Data
Example:
    labels = {name: number for number, name in enumerate(set(names))}   # right: enumerate(sorted(set(names)))
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from ddpcheck.findings import wording
from ddpcheck.findings.evidence.replicas import ModelSplit
from ddpcheck.findings.evidence.script import OF_A_LIST, DerivedTable, Inputs, LoaderPass
from ddpcheck.findings.evidence.steps import LocalStep
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import format_ranks, group_by_value, minority_ranks, new_finding, plural, plural_verb
from ddpcheck.rules.replicas.comparisons import program_data_finding
from ddpcheck.trace.check_context import SingleProcessFacts
from ddpcheck.trace.data import (
    FEWEST_ROWS,
    Loader,
    are_disjoint_shares,
    finding_on_loader,
    first_training_indices,
    values_by_index,
)
from ddpcheck.trace.model_parts import MIN_PART_STEPS
from ddpcheck.trace.replicas import common_values, differing_program_data, differing_values

MAX_CHANCE = 1e-6  # probability that labels match by chance
MAX_ROLES = 8  # keys of a table of ranks' roles; larger tables are e.g. words of a text
_DEVICE_PATTERN = r"(?i)\b(cuda|gpu|npu|xpu|mps|rank|node|host|worker)[:_ -]?\d"
_RANK_WORDS = {
    *("me", "my", "mine", "rank", "self", "own", "local", "other", "remote", "peer", "partner", "buddy"),
    *("neighbour", "neighbor", "next", "prev", "previous", "left", "right", "src", "dst", "send", "recv", "device"),
}


def judge_split(loader: Loader) -> list[Finding]:
    """DDP516: a random split drawn separately on each rank, with partly overlapping parts."""
    first = loader.first
    subsets = [set(p.subset) for p in first]
    if not all(subsets) or len({len(p.subset) for p in first}) > 1 or not loader.has_same_data:
        return []
    common = set.intersection(*subsets)
    if all(subset == common for subset in subsets) or not any(a & b for a in subsets for b in subsets if a is not b):
        return []
    count = len(subsets[0]) - len(common)
    return finding_on_loader(
        "DDP516",
        first[0],
        f"The ranks have split the dataset differently: {count} of the "
        f"{wording.plural(len(subsets[0]), 'sample')} of rank 0's part are not in the part of every other "
        "rank, so one rank trains on samples that another one holds "
        "out.",
        line=first[0].subset_at or first[0].location,
        ranks=wording.minority_ranks([tuple(sorted(subset)) for subset in subsets]) if len(subsets) > 2 else (),
        evidence=[f"rank {r} begins with samples {first_training_indices(p.subset)}" for r, p in enumerate(first)],
        fix="Draw the split from a generator with the same seed on every rank: "
        "random_split(dataset, lengths, generator=torch.Generator().manual_seed(0)).",
    )


def judge_differing_order(loader: Loader) -> list[Finding]:
    """DDP516: samples that several ranks take, because each rank orders the data differently."""
    first, shared = loader.first, loader.num_shared_rows
    if not shared or first[0].size < 0:
        return []
    differ = any((p.samples, p.digest) != (first[0].samples, first[0].digest) for p in first)
    return finding_on_loader(
        "DDP516",
        first[0],
        f"The ranks share {shared} of the {min(len(p.rows) for p in first)} samples that each takes from the loader in "
        "an epoch: each rank has built its part from a different order or split of the data.",
        line=first[0].subset_at,
        severity=Severity.WARNING,
        evidence=["the datasets of the ranks have different samples, or a different order"] * differ,
        fix="Sort the listed items, and shuffle or split with the same seed on every rank, before each rank takes its "
        "part.",
    )


def judge_labels(loader: Loader) -> list[Finding]:
    """DDP516: the same samples with different labels on different ranks."""
    labels = [_labels_by_row(loaders) for loaders in loader.passes]
    if len(labels) < 2 or not all(labels):
        return []
    common, diffs = common_values(labels), differing_values(labels)
    first, *other_labels = zip(*common.values(), strict=True) if common else [()]
    if len(common) < FEWEST_ROWS or 2 * len(diffs) < len(common) or len({*first}) < 2:
        return []
    for rank_labels in other_labels:  # labels of two ranks must correspond one to one
        if not len({*zip(first, rank_labels, strict=True)}) == len({*first}) == len({*rank_labels}):
            return []
    return finding_on_loader(
        "DDP516",
        loader.first[0],
        f"The same samples have different labels on different ranks: {len(diffs)} of {len(common)} that were compared.",
        line=loader.first[0].subset_at,
        evidence=["each label of one rank corresponds to one different label of the other"],
    )


def judge_differing_values(loader: Loader) -> list[Finding]:
    """DDP516: the same samples with values that differ between ranks, but not between epochs."""
    first, passes = loader.first, loader.passes
    rows = [values_by_index(loaders, labels=False) for loaders in passes]
    if len(first) < 2 or not all(rows) or any(p.draws for loaders in passes for p in loaders):
        return []
    contents = first[0].samples, first[0].state
    has_equal_samples = bool(first[0].samples) and all((p.samples, p.state) == contents for p in first)
    if not has_equal_samples and are_disjoint_shares(first):
        return []  # e.g. one label per rank
    for number, rank_rows in enumerate(rows):
        for other_rank, other_rows in enumerate(rows[:number]):
            common = sorted(rank_rows.keys() & other_rows.keys())
            mismatches = [position for position in common if rank_rows[position] != other_rows[position]]
            if len(common) < FEWEST_ROWS or 2 * len(mismatches) < len(common):
                continue
            if not has_equal_samples and not _have_equal_labels(passes[number], passes[other_rank], common):
                continue
            reason = "the datasets hold the same samples" if has_equal_samples else "these samples have the same labels"
            return finding_on_loader(
                "DDP516",
                first[0],
                "The same samples have different values on different ranks, the same ones in every epoch: "
                f"{len(mismatches)} of {len(common)} that ranks {other_rank} and {number} have both taken.",
                severity=Severity.WARNING,
                evidence=[f"on all ranks {reason}", "no random numbers are drawn for them"],
                fix="Make each sample in the same way on every rank: hash() of a text differs between processes unless "
                "PYTHONHASHSEED is set (zlib.crc32 does not), and so does the order of a set; take statistics of all "
                "of the data, or all_reduce their sums.",
            )
    return []


def _have_equal_labels(loaders: Sequence[LoaderPass], others: Sequence[LoaderPass], positions: Sequence[int]) -> bool:
    """Return True if two ranks' labels show that samples at `positions` are the same."""
    labels = values_by_index(loaders, labels=True), values_by_index(others, labels=True)
    pairs = [(labels[0][position], labels[1].get(position)) for position in positions if position in labels[0]]
    counts = Counter(label for label, _ in pairs)
    chance = sum((count / len(pairs)) ** 2 for count in counts.values())  # probability that one label matches at random
    in_order = sum(a != b for a, b in itertools.pairwise(label for label, _ in pairs)) < 2 * len(counts)
    return all(a == b for a, b in pairs) and bool(pairs) and not in_order and chance ** len(pairs) < MAX_CHANCE


def have_same_labels(passes: Sequence[Sequence[LoaderPass]]) -> bool:
    """Return True if samples common to all ranks have the same labels."""
    labels = [_labels_by_row(loaders) for loaders in passes]
    common = common_values(labels)
    has_several = len({row_labels[0] for row_labels in common.values()}) > 1
    return has_several and len(common) >= FEWEST_ROWS and not differing_values(labels)


def _labels_by_row(loaders: Sequence[LoaderPass]) -> dict[int, int]:
    """Return labels by fingerprint of a sample; {} if a sample has several labels."""
    labels: dict[int, int] = {}
    for loader in loaders:
        if len(loader.labels) == len(loader.rows):
            for row, label in zip(loader.rows, loader.labels, strict=True):
                if labels.setdefault(row, label) != label:
                    return {}
    return labels


def judge_tables(
    tables: Sequence[Sequence[DerivedTable]], passes: Sequence[Sequence[LoaderPass]] = ()
) -> list[Finding]:
    """DDP516: dictionaries that assign the same values to the same keys differently on ranks.

    Lists of the same texts in a different order are also reported, unless `passes` (over all loaders) show equal labels
    on all ranks. Returns at most one finding, because a script may keep a label map twice: inverted, or renamed.
    """
    alike = have_same_labels(passes)
    by_name = [{o.name: o for o in rank_tables if not (alike and o.name.endswith(OF_A_LIST))} for rank_tables in tables]
    values_by_name = {name: [table.values for table in shared] for name, shared in common_values(by_name).items()}
    names = [name for name, values in values_by_name.items() if _is_permuted(name, values)]
    if not names:
        return []
    values = values_by_name[names[0]]
    key = next(key for key in sorted(values[0]) if len({table[key] for table in values}) > 1)
    spelled = [tuple(table[key] for key in sorted(table)) for table in values]
    return new_finding(
        "DDP516",
        names,
        f"{names[0].removesuffix(OF_A_LIST)} has the same {len(values[0])} texts on every rank, in a different order."
        if names[0].endswith(OF_A_LIST)
        else f"{names[0]} has the same {len(values[0])} keys on every rank, with different values.",
        ranks=minority_ranks(spelled) if len(values) > 2 else (),
        location=by_name[0][names[0]].location,
        evidence=[f"{key}: {value}" for value in group_by_value([table[key] for table in values])],
    )


def _is_permuted(name: str, values: Sequence[Mapping[str, str]]) -> bool:
    """Return True if ranks assign the same values to the same keys differently."""
    keys = sorted(values[0])
    if any(sorted(table) != keys for table in values) or all(table == values[0] for table in values):
        return False
    counts = [Counter(table.values()) for table in values]
    if len(keys) < 2 or any(count != counts[0] for count in counts):
        return False
    return _identifies_keys(values[0]) and not _describes_ranks(name, values)


def _identifies_keys(table: Mapping[str, str]) -> bool:
    """Return True if the values identify keys: consecutive integers, or texts.

    Other values are measurements (class counts on two ranks), describe a rank (`True` on one rank), or are the keys
    themselves, in the order of each rank's own samples.
    """
    values = set(table.values())
    if not all(value.lstrip("-").isdecimal() for value in values):
        return all(value.startswith(("'", '"')) for value in values)
    numbers = {int(value) for value in values if not value.startswith("-")}
    first = min(numbers, default=0)
    follow = numbers == set(range(first, first + len(numbers)))
    least = max(2, len(table)) if len(values) == len(table) else 1  # counts of words start at 1
    return follow and first < least and values != set(table)


def _describes_ranks(name: str, values: Sequence[Mapping[str, str]]) -> bool:
    """Return True if a table describes ranks: ring neighbours, devices, rotations by rank."""
    texts = (name.rpartition(".")[2], *values[0])
    words = {word for text in texts for word in re.findall("[a-z]+", text.lower())}
    if len(values[0]) <= MAX_ROLES and not _RANK_WORDS.isdisjoint(words | {word.removesuffix("s") for word in words}):
        return True
    if all(re.search(_DEVICE_PATTERN, value) for value in values[0].values()):
        return True
    if len(values[0]) < 4 or not all(value.isdecimal() for value in values[0].values()):
        return False  # half of all permutations of 3 labels are rotations
    shifts = [{(int(table[key]) - int(values[0][key])) % len(table) for key in values[0]} for table in values]
    return all(len(shift) == 1 for shift in shifts)


def judge_batch_values(batches: Sequence[tuple[int, ...]], step: int) -> list[Finding]:
    """DDP516: ranks whose `batch(step)` consistently differs (`batches`: fingerprints by rank)."""
    ranks = minority_ranks(batches)
    return new_finding(
        "DDP516",
        (f"batch({step})",),
        f"batch({step}) returns a different global batch on {format_ranks(ranks)}, and the same one each time it is "
        "called, so the ranks do not train on parts of one batch.",
        ranks=ranks,
        evidence=["inputs that differ between ranks: the hash seed, on which the order of a set depends, and the rank"],
    )


def judge_shard_losses(facts: SingleProcessFacts) -> list[Finding]:
    """DDP516: ranks that compute a different loss on their shard than a single process.

    The finding is a warning under `find_unused_parameters`: ranks may use different parameters on purpose.
    """
    losses, expected = facts.known.local.losses, facts.analysis.shard_losses
    if len(losses) != len(expected):
        return []
    ranks = [r for r, (a, b) in enumerate(zip(losses, expected, strict=True)) if not math.isclose(a, b, rel_tol=1e-3)]
    if not ranks or len(ranks) == len(losses):
        return []
    rank = ranks[0]
    return facts.new_finding(
        "DDP516",
        f"On {format_ranks(ranks)} the model or the loss gives a different result from that of a single process on the "
        "same samples; on the other ranks it does not.",
        f"the loss on the shard of rank {rank} is {losses[rank]:.4g} there, and {expected[rank]:.4g} without it",
        ranks=ranks,
        severity=Severity.WARNING if facts.known.wrapper.find_unused_parameters else None,
    )


def judge_model_batches(
    passes: Sequence[Sequence[LoaderPass]],
    inputs: Sequence[Sequence[Inputs]],
    ranks: Sequence[int],
    split: ModelSplit,
    others: Sequence[Sequence[LoaderPass]] = (),
) -> list[Finding]:
    """DDP516: ranks that compute one model together, but get different samples."""
    first = [next((loader for loader in loaders if loader.trains and loader.indices), None) for loaders in passes]
    trained = [loader for loader in first if loader is not None]
    size = min((len(loader.indices) for loader in trained), default=0)
    differs = len(trained) == len(passes) and len({tuple(loader.indices[:size]) for loader in trained}) > 1
    location: Location | None
    if differs:
        loader = trained[0]
        subject, location = loader.dataset, loader.built_at or loader.location
        evidence = [
            f"rank {rank} begins with samples {', '.join(map(str, loader.indices[:6]))} ..."
            for rank, loader in zip(ranks, trained, strict=True)
        ]
        taken = [tuple(loader.indices[:size]) for loader in trained]
        if any(tuple(loader.indices[:size]) in taken for loaders in others for loader in loaders if loader.trains):
            evidence.append("a rank of another replica takes the same samples as one of these ranks")
    else:
        steps = [calls for calls in zip(*inputs, strict=False) if len({call.step for call in calls}) == 1]
        mismatches = [calls for calls in steps if len({call.samples for call in calls}) > 1]
        if len(mismatches) < MIN_PART_STEPS or len(mismatches) < len(steps):
            return []
        subject, location = "forward", mismatches[0][0].location
        evidence = [f"in all {len(mismatches)} steps that were compared"]
    return new_finding(
        "DDP516",
        (subject,),
        f"{format_ranks(ranks).capitalize()} compute one model together (tensor parallelism), and are given different "
        "samples: the model combines parts that were computed from different batches.",
        ranks=ranks,
        location=location,
        evidence=[*evidence, f"the model is split at {split.location}" if split.location else ""],
        fix="Give the sampler the size of the data dimension of the mesh and this rank's place in it: "
        'DistributedSampler(data, num_replicas=mesh["dp"].size(), rank=mesh["dp"].get_local_rank()); and seed by '
        "that place the generator that draws batches.",
    )


def judge_shards(local: Sequence[LocalStep], models: Sequence[tuple[int, ...]]) -> list[Finding]:
    """DDP516: a recipe's `shard` returns different samples on ranks of one model."""
    groups = [ranks for ranks in models if len({local[rank].sample_fingerprints for rank in ranks}) > 1]
    if not groups:
        return []
    ranks = tuple(sorted(rank for of_model in groups for rank in of_model))
    return new_finding(
        "DDP516",
        ("shard",),
        f"{format_ranks(groups[0]).capitalize()} compute one model together (tensor parallelism), and shard gives them "
        "different samples: the model combines parts that were computed from different batches.",
        ranks=ranks,
        steps=(local[0].evidence.step,),
        evidence=[f"so it is in {plural(len(groups), 'group')} of ranks"] if len(groups) > 1 else [],
        fix="Split the batch by the arguments of shard, which are a rank's place in the data dimension of the mesh and "
        "the size of that, and not by the rank in the world.",
    )


def judge_program_data(facts: SingleProcessFacts) -> list[Finding]:
    """DDP516: program variables that differ between ranks (DDP216 if the steps change them)."""
    values = differing_program_data(facts.known.program_data)
    difference = f"{plural_verb('is', 'are', [*values])} not the same on every rank, and"
    return program_data_finding("DDP516", facts, values, difference) if values else []
