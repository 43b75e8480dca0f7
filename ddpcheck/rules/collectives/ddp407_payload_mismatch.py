"""DDP407 payload-mismatch: error, keeps_gradients, keeps_results

Ranks put the same number of elements into a collective, packed in another order.

Why: The backend sees flat memory of equal size and dtype. So nothing is raised, and unrelated numbers are added up.
Fix: Pack in one order on every rank: sort the names before flattening, and send missing entries as zeros.
Detected: `ddpcheck report` repeats the step with the same samples on every rank. DDP407 is reported if the ranks then
    put the same numbers into a reduction, but in a different order.
Ignore: Never.
Line: The reduction, on a rank of the minority.
Checks: report parameters; repro packing
Example:
    flat = torch.cat([losses[name] for name in losses])   # the order of insertion differs by rank
    dist.all_reduce(flat)                    # right: for name in sorted(losses)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ddpcheck.findings.evidence.steps import ReductionInput
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import format_ranks, minority_ranks, new_finding, plural_verb


def judge_packing(sent: Sequence[Sequence[ReductionInput]]) -> list[Finding]:
    """DDP407: reduced tensors with the same values in a different order on some ranks.

    `sent`: reduction inputs of each rank, for the same samples. If operations differ, later inputs are not compared.
    """
    findings: dict[str, list[Finding]] = {}
    for number, calls in enumerate(zip(*sent, strict=False)):
        if len({call.operation for call in calls}) > 1:
            break
        values = [call.values for call in calls]
        if not _is_reordered(values):
            continue
        ranks = minority_ranks(values)
        usual = next(rank_values for rank, rank_values in enumerate(values) if rank not in ranks)
        differing, call = values[ranks[0]], calls[ranks[0]]
        index = next(index for index, value in enumerate(differing) if value != usual[index])
        findings.setdefault(
            call.location or str(number),
            new_finding(
                "DDP407",
                (call.operation,),
                f"{format_ranks(ranks).capitalize()} {plural_verb('packs', 'pack', ranks)} the elements for "
                f"{call.operation}{f' at {call.location}' if call.location else ''} in a different order from the "
                "rest.",
                ranks=ranks,
                location=Location.parse(call.location),
                evidence=(
                    "given the same samples and random numbers, every rank sends the same "
                    f"{len(usual)} numbers, but {format_ranks(ranks)} in a different order",
                    f"element {index}: {usual[index]:.6g}; on {format_ranks(ranks[:1])}: {differing[index]:.6g}, "
                    f"which is element {usual.index(differing[index])} elsewhere",
                ),
            ),
        )
    return list(itertools.chain.from_iterable(findings.values()))


def _is_reordered(values: Sequence[tuple[float, ...]]) -> bool:
    """Return True if ranks order the same values differently; False if fill values moved."""
    if len(set(values)) == 1 or len({tuple(sorted(rank_values)) for rank_values in values}) > 1:
        return False
    moved = [value for column in zip(*values, strict=True) if len(set(column)) > 1 for value in column]
    # 0, 1 and extreme values may be the initial fill of per-rank slots
    return all(value not in (0.0, 1.0, -1.0) and 1e-6 < abs(value) < 1e6 for value in moved)
