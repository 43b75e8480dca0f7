"""Judges of losses that are normalised by counts of targets."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import group_by
from ddpcheck.rules.loss.ddp305_loss_normalisation import UnequalTargets, severity_of_targets
from ddpcheck.stream.rank_report import MicroBatch
from ddpcheck.trace.losses import MicroBatches

_SAME = 0.02  # relative rounding error of half precision


_SIMILAR = 0.15  # relative difference between the loss's own count and ours


_NEARLY = 0.05  # smallest relevant relative error of a weight


_OFTEN = 3  # consecutive steps that rule out chance


def judge_normalisation(ranks: Sequence[Sequence[MicroBatch]]) -> list[Finding]:
    """Report unequal weights of targets (DDP305, DDP514).

    One step is enough if weights are inversely proportional to target counts, and some targets are ignored. If the loss
    seems to count differently, or only batch sizes differ (as in the last batch of an epoch), `_OFTEN` steps have to
    agree. All ranks have to measure the same optimizer steps.
    """
    for head in dict.fromkeys(item.head for item in ranks[0]):
        repeated: list[UnequalTargets] = []
        for index in sorted({item.index for item in ranks[0] if item.head == head}):
            step = [tuple(item for item in items if (item.index, item.head) == (index, head)) for items in ranks]
            unequal = _unequal(step)
            if unequal is not None and unequal.exact and not _differs_by_size(step):
                return [unequal.finding(severity_of_targets(ranks, head))]
            repeated = [] if unequal is None else [*repeated, unequal]
            if len(repeated) == _OFTEN:
                return [last.finding(severity_of_targets(ranks, head)) for last in repeated[-1:]]
    return []


def _unequal(step: MicroBatches) -> UnequalTargets | None:
    """Return the fault of a step if weights are inversely proportional to counts."""
    counted = [(rank, item) for rank, items in enumerate(step) for item in items if item.counted]
    weights = [item.weight for _, item in counted]
    if len({rank for rank, _ in counted}) < len(step) or min(weights) <= 0:
        return None
    mean = sum(item.weight * item.counted for _, item in counted) / sum(item.counted for _, item in counted)
    if max(abs(weight / mean - 1) for weight in weights) < _NEARLY:
        return None
    groupings: list[tuple[str, Callable[[tuple[int, MicroBatch]], Hashable]]] = [
        ("DDP305", lambda pair: pair[0]),
        ("DDP514", lambda pair: (pair[0], pair[1].position)),
        ("DDP514", lambda pair: pair[1].position),
    ]
    faults = []
    for code, group_of in groupings:
        groups = [[item for _, item in group] for group in group_by(counted, group_of).values()]
        if max(_gap(item.weight for item in group) for group in groups) > _SAME:
            continue
        for extra in (0, 1):  # a loss may count the first token of a sequence, which is never predicted
            sums = [sum(item.counted + extra * item.sequences for item in group) for group in groups]
            gap = _gap(group[0].weight * total for group, total in zip(groups, sums, strict=True))
            if gap <= max(_SAME, min(_SIMILAR, _gap(weights) / 3)):
                faults.append(UnequalTargets(code, step, max(weights) / min(weights), exact=gap <= _SAME))
    return max(faults, key=lambda fault: fault.exact, default=None)


def _gap(values: Iterable[float]) -> float:
    """Return the relative spread (max - min) / min."""
    values = list(values)
    return max(values) / min(values) - 1


def _differs_by_size(step: MicroBatches) -> bool:
    """Check if only batch sizes differ: no target is ignored or padding."""
    return _gap(item.counted / item.rows for items in step for item in items if item.counted) <= _SAME / 100
