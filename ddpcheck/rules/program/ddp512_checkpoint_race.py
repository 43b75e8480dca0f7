"""DDP512 checkpoint-race: error, takes_severity, keeps_gradients, keeps_results

Several ranks write the same checkpoint, or one reads it before it is complete.

Why: Writers overwrite each other, and a reader finds half a file. Without map_location, every rank loads onto rank
    0's device. (PyTorch tutorial, 'Getting Started with Distributed Data Parallel', save and load checkpoints.)
Fix: Save on rank 0 only, barrier before others read, and load with map_location.
Detected: `ddpcheck run` records which rank writes and reads which file, and the collectives between these uses. Two
    uses by different ranks are reported if at least one of them writes, and no collective of all ranks is between
    them. The two uses need not overlap in this run. Files that torch.save does not write are covered only if Python
    opens them. Two uses of these files are not reported if a rank waits for a lock between them, or if the writer
    makes another file (a marker) after its write. A rank that loads onto the GPU of another rank, without
    map_location, is reported as a warning.
Ignore: If something other than a collective separates the two uses, such as a flag on disk. Or if each machine has
    its own disk.
Line: The line that writes the file, if several ranks write it; else the line that reads or loads it.
Checks: run files
Explains: DDP401 if of a cut file
Reports: NVIDIA/apex#886 karpathy/nanochat#336
Example:
    torch.save(ddp.state_dict(), path)       # by every rank; right: if rank == 0, and dist.barrier() after it
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from pathlib import PurePath

from ddpcheck.findings.evidence.script import FileUsed
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import format_ranks, new_finding, ranks_or_all
from ddpcheck.rules.registry import rule
from ddpcheck.trace.program import Program


@rule
def judge_files(program: Program) -> list[Finding]:
    """DDP512: files written by several ranks, or read while another rank writes.

    Returns at most one finding per line. Two uses of a file are ordered if a collective of all ranks is between them,
    or if the second rank has waited for another rank by other means. Otherwise both uses may happen at the same time,
    whatever their order in this run.
    """
    by_line: dict[Location | None, list[Finding]] = {}
    saved = {use.path for rank_uses in program.uses for use in rank_uses if use.by_torch}
    uses = [[use for use in rank_uses if use.by_torch or use.path not in saved] for rank_uses in program.uses]
    for rank, use, other_rank, other_use in _concurrent_uses(uses):
        line = use.location if other_use.writes else other_use.location
        is_ordered = other_use.has_waited or (other_use.writes and use.has_waited)
        if use.path in program.empty or line in by_line or is_ordered:
            continue
        if not (use.by_torch or other_use.writes) and _has_marker_file(use, other_use, uses[rank], uses[other_rank]):
            continue
        name = PurePath(use.path).name
        if other_use.writes:
            ranks = [r for r, rank_uses in enumerate(uses) if any(u.path == use.path and u.writes for u in rank_uses)]
            message = f"{format_ranks(ranks).capitalize()} write {name} at the same time: no collective separates them."
            written_at = ""
            fix = "Write it on rank 0 only, and let the others wait in a barrier before they read it."
        else:
            ranks = [other_rank]
            message = f"Rank {other_rank} reads {name} while rank {rank} may still write it: no collective is between "
            message += "the two."
            written_at = f"rank {rank} writes it at {use.location}"
            fix = "Call dist.barrier() on every rank after it is written and before the others read it."
        by_line[line] = new_finding(
            "DDP512",
            (name,),
            message,
            ranks=ranks_or_all(ranks, len(uses)),
            location=line,
            evidence=[written_at, f"the file is {use.path}"],
            severity=None if use.by_torch else Severity.WARNING,
            fix=fix,
        )
    return [finding for findings in by_line.values() for finding in findings] + _judge_devices(uses)


def _concurrent_uses(uses: Sequence[Sequence[FileUsed]]) -> Iterator[tuple[int, FileUsed, int, FileUsed]]:
    """Yield pairs of a write and another rank's use with no collective between them."""
    by_path: dict[str, dict[int, list[FileUsed]]] = {}
    for rank, rank_uses in enumerate(uses):
        for use in sorted(rank_uses, key=lambda use: use.began):
            by_path.setdefault(use.path, {}).setdefault(rank, []).append(use)
    for by_rank in by_path.values():
        ended = {rank: list(accumulate((use.ended for use in rank_uses), max)) for rank, rank_uses in by_rank.items()}
        writes = ((rank, use) for rank, rank_uses in by_rank.items() for use in rank_uses if use.writes)
        for (rank, use), (other_rank, other_uses) in product(writes, by_rank.items()):
            if other_rank != rank:
                first = bisect_left(ended[other_rank], use.began)
                near = other_uses[first : bisect_right(other_uses, use.ended, key=lambda other_use: other_use.began)]
                yield from ((rank, use, other_rank, other_use) for other_use in near if other_use.ended >= use.began)


def _has_marker_file(use: FileUsed, read: FileUsed, writers: Sequence[FileUsed], readers: Sequence[FileUsed]) -> bool:
    """Return True if the writer uses another file, perhaps a marker, before `read` ends.

    A reader may wait for the marker, whose existence says that the first file is complete.
    """
    paths = {entry.path for entry in readers}
    later = writers[max(number for number, entry in enumerate(writers) if entry is use) + 1 :]
    return any(entry.path not in paths and entry.began <= read.ended for entry in later)


def _judge_devices(uses: Sequence[Sequence[FileUsed]]) -> list[Finding]:
    """DDP512: tensors that a rank loaded onto the GPU of another rank."""
    for rank, rank_uses in enumerate(uses):
        for use in rank_uses:
            other_devices = [device for device in use.devices if device.startswith("cuda") and device != use.device]
            if other_devices and not use.writes and not use.maps_location and use.device.startswith("cuda"):
                name = PurePath(use.path).name
                return new_finding(
                    "DDP512",
                    (name,),
                    f"Rank {rank} loads {name} onto {other_devices[0]}, which belongs to another rank: there is no "
                    "map_location.",
                    ranks=(rank,),
                    location=use.location,
                    evidence=[f"the rank's own device is {use.device}"],
                    severity=Severity.WARNING,
                )
    return []
