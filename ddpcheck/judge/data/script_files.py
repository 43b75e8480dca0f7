"""DDP512 and 521: files written or read at the same time; shards of some ranks only."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, product
from pathlib import PurePath

from ddpcheck.findings.evidence.script import FileUsed
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import format_ranks, group_by_value, one_finding, plural_verb, unless_all


def judge_files(uses: Sequence[Sequence[FileUsed]], empty: Collection[str] = ()) -> list[Finding]:
    """DDP512: files written by several ranks, or read while another rank writes.

    At most one finding per line; `uses` by rank in order of time, `empty`: files without content. Two uses are ordered
    only if a collective of all ranks is between them, since it makes the first rank wait; otherwise both may happen at
    the same time, whatever the order in this run, unless the second rank waited for another rank in a different way.
    """
    found: dict[Location | None, list[Finding]] = {}
    saved = {use.path for of_rank in uses for use in of_rank if use.by_torch}
    uses = [[use for use in of_rank if use.by_torch or use.path not in saved] for of_rank in uses]
    for rank, use, other_rank, other in _at_the_same_time(uses):
        line = use.location if other.writes else other.location
        if use.path in empty or line in found or other.waited or (other.writes and use.waited):
            continue
        if not (use.by_torch or other.writes) and _is_followed(use, other, uses[rank], uses[other_rank]):
            continue
        name = PurePath(use.path).name
        if other.writes:
            ranks = [r for r, of_rank in enumerate(uses) if any(u.path == use.path and u.writes for u in of_rank)]
            message = f"{format_ranks(ranks).capitalize()} write {name} at the same time: no collective separates them."
            written_at = ""
            fix = "Write it on rank 0 only, and let the others wait in a barrier before they read it."
        else:
            ranks = [other_rank]
            message = f"Rank {other_rank} reads {name} while rank {rank} may still write it: no collective is between "
            message += "the two."
            written_at = f"rank {rank} writes it at {use.location}"
            fix = "Call dist.barrier() on every rank after it is written and before the others read it."
        found[line] = one_finding(
            "DDP512",
            (name,),
            message,
            ranks=unless_all(ranks, len(uses)),
            location=line,
            evidence=[written_at, f"the file is {use.path}"],
            severity=None if use.by_torch else Severity.WARNING,
            fix=fix,
        )
    return [finding for findings in found.values() for finding in findings] + _judge_devices(uses)


def told_by_files(findings: Iterable[Finding], uses: Sequence[Sequence[FileUsed]]) -> list[Finding]:
    """Add to findings on diverged state that the ranks loaded different files.

    Only if no `torch.load` line reads the same file on all ranks: a program with a file per rank (random states,
    shards) loads the rest from a common file.
    """
    loads = [{use.location: use for use in reversed(of_rank) if use.by_torch and not use.writes} for of_rank in uses]
    common = set.intersection(*map(set, loads)) if loads else set()
    read = [[of_rank[line] for of_rank in loads] for line in loads[0] if line in common] if loads else []
    if not read or any(len({use.path for use in of_ranks}) == 1 for of_ranks in read):
        return list(findings)
    of_ranks = min(read, key=lambda one: one[0].began)
    names = group_by_value(["/".join(PurePath(use.path).parts[-2:]) for use in of_ranks])
    said = f"The ranks do not load the same file ({'; '.join(names)})."
    told = []
    for one in findings:
        if one.code in ("DDP405", "DDP508"):
            one = replace(one, evidence=(*one.evidence, f"torch.load is called at {of_ranks[0].location}. {said}"))
        elif (one.code in ("DDP306", "DDP515") and one.steps == (0,)) or one.code == "DDP208":
            fix = "Load the same file on every rank: let rank 0 choose it, and broadcast its name."
            one = replace(one, message=f"{said} {one.message}", fix=fix).relocated(of_ranks[0].location)
        told.append(one)
    return told


def judge_shards_saved(uses: Sequence[Sequence[FileUsed]]) -> list[Finding]:
    """DDP521: a checkpoint with the shards of some ranks only; `uses` by rank."""
    saved = {rank: [one for one in of_rank if one.shard is not None] for rank, of_rank in enumerate(uses)}
    every = [one for of_rank in saved.values() for one in of_rank]
    numbers = {one.shard[0] for one in every if one.shard is not None}
    parts = max((one.shard[1] for one in every if one.shard is not None), default=0)
    if not every or len(numbers) == parts:
        return []
    ranks = [rank for rank, of_rank in saved.items() if of_rank]
    first = every[0]
    return one_finding(
        "DDP521",
        (PurePath(first.path).name,),
        f"{format_ranks(ranks).capitalize()} {plural_verb('saves', 'save', ranks)} its own shard of each parameter, "
        f"and no other rank saves its own: {len(numbers)} of {parts} parts of the model "
        f"{plural_verb('is', 'are', [*numbers])} in a file.",
        ranks=ranks,
        location=first.location,
        evidence=[f"the file is {first.path}"],
    )


def _at_the_same_time(uses: Sequence[Sequence[FileUsed]]) -> Iterator[tuple[int, FileUsed, int, FileUsed]]:
    """Yield each write with every unordered use by another rank."""
    by_path: dict[str, dict[int, list[FileUsed]]] = {}
    for rank, of_rank in enumerate(uses):
        for use in sorted(of_rank, key=lambda use: use.began):
            by_path.setdefault(use.path, {}).setdefault(rank, []).append(use)
    for of_path in by_path.values():
        ended = {rank: list(accumulate((use.ended for use in theirs), max)) for rank, theirs in of_path.items()}
        writes = ((rank, use) for rank, theirs in of_path.items() for use in theirs if use.writes)
        for (rank, use), (other_rank, others) in product(writes, of_path.items()):
            if other_rank != rank:
                first = bisect_left(ended[other_rank], use.began)
                near = others[first : bisect_right(others, use.ended, key=lambda other: other.began)]
                yield from ((rank, use, other_rank, other) for other in near if other.ended >= use.began)


def _is_followed(use: FileUsed, read: FileUsed, writers: Sequence[FileUsed], readers: Sequence[FileUsed]) -> bool:
    """Return True if the writer makes another file next, as a marker.

    A reader may wait for the marker, whose existence says that the first file is complete.
    """
    paths = {one.path for one in readers}
    later = writers[max(number for number, one in enumerate(writers) if one is use) + 1 :]
    return any(one.path not in paths and one.began <= read.ended for one in later)


def _judge_devices(uses: Sequence[Sequence[FileUsed]]) -> list[Finding]:
    """DDP512: tensors that a rank loaded onto the GPU of another rank."""
    for rank, of_rank in enumerate(uses):
        for use in of_rank:
            elsewhere = [device for device in use.devices if device.startswith("cuda") and device != use.device]
            if elsewhere and not use.writes and not use.mapped and use.device.startswith("cuda"):
                name = PurePath(use.path).name
                return one_finding(
                    "DDP512",
                    (name,),
                    f"Rank {rank} loads {name} onto {elsewhere[0]}, which belongs to another rank: there is no "
                    "map_location.",
                    ranks=(rank,),
                    location=use.location,
                    evidence=[f"the rank's own device is {use.device}"],
                    severity=Severity.WARNING,
                )
    return []
