"""DDP305 and 514: weights of targets in an optimizer step.

The gradient of an optimizer step should be that of a mean over all targets (such as tokens). If each micro-batch or
rank divides by its own number of targets, and the numbers differ, the result is a mean of means: a target weighs more
if its micro-batch or rank has fewer targets. (huggingface/transformers#34191 fixed this in one trainer.)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.wording import group_by, make_finding
from ddpcheck.judge.gradients.script_losses import severity_of_weights
from ddpcheck.stream.rank_report import MicroBatch

_SAME = 0.02  # relative rounding error of half precision
_SIMILAR = 0.15  # relative difference between the loss's own count and ours
_NEARLY = 0.05  # smallest relevant relative error of a weight
_OFTEN = 3  # consecutive steps that rule out chance
_Step = Sequence[tuple[MicroBatch, ...]]  # one head in one optimizer step, by rank


def judge_normalisation(ranks: Sequence[Sequence[MicroBatch]]) -> list[Finding]:
    """Report unequal weights of targets (DDP305, DDP514).

    One step is enough if weights are inversely proportional to target counts, and some targets are ignored. If the loss
    seems to count differently, or only batch sizes differ (as in the last batch of an epoch), `_OFTEN` steps have to
    agree. All ranks have to measure the same optimizer steps.
    """
    for head in dict.fromkeys(item.head for item in ranks[0]):
        repeated: list[_Unequal] = []
        for index in sorted({item.index for item in ranks[0] if item.head == head}):
            step = [tuple(item for item in items if (item.index, item.head) == (index, head)) for items in ranks]
            unequal = _unequal(step)
            if unequal is not None and unequal.exact and not _differs_by_size(step):
                return [unequal.finding(severity_of_targets(ranks, head))]
            repeated = [] if unequal is None else [*repeated, unequal]
            if len(repeated) == _OFTEN:
                return [last.finding(severity_of_targets(ranks, head)) for last in repeated[-1:]]
    return []


def severity_of_targets(ranks: Sequence[Sequence[MicroBatch]], head: str | None = None) -> Severity:
    """Return the severity of unequal target weights between ranks, over all steps."""
    steps: dict[tuple[int, str], dict[int, list[MicroBatch]]] = {}
    for rank, items in enumerate(ranks):
        for item in dict.fromkeys(items):
            if item.counted and item.weight and head in (None, item.head):
                steps.setdefault((item.index, item.head), {}).setdefault(rank, []).append(item)
    weights = [
        [sum(b.weight * b.counted for b in batches) / sum(b.counted for b in batches) for batches in by_rank.values()]
        for by_rank in steps.values()
        if len(by_rank) == len(ranks)
    ]
    return severity_of_weights(weights)


@dataclass(frozen=True, slots=True)
class _Unequal:
    """A step whose target weights differ because target counts differ."""

    code: str
    step: _Step
    factor: float  # largest weight / smallest weight
    exact: bool

    def finding(self, severity: Severity) -> Finding:
        numbers = [
            f"rank {rank}: {', '.join(f'{item.counted:.0f}' for item in items)}" for rank, items in enumerate(self.step)
        ]
        first = min(item.step for items in self.step for item in items)
        return make_finding(
            self.code,
            ("loss",),
            _MESSAGES[self.code],
            steps=(first,),
            evidence=(
                f"targets (such as tokens) by micro-batch: {'; '.join(numbers)}",
                f"a target counts up to {self.factor:.3g} times as much as another",
            ),
            fix="Sum the loss over the targets of a micro-batch, divide by their number in all micro-batches of all "
            "ranks that make the step, and multiply by the number of ranks, over which DDP averages. (In transformers: "
            "by num_items_in_batch, in a compute_loss_func or in the model, with average_tokens_across_devices.)",
            severity=severity if self.code == "DDP305" else None,
        )


_MESSAGES = {
    "DDP514": (
        "The loss of each micro-batch is divided by its own number of targets, and the numbers differ, so the "
        "accumulated gradient is a mean of means and not that of all targets of the step."
    ),
    "DDP305": (
        "The loss of each rank is divided by its own number of targets, and the numbers differ, so the average over "
        "ranks is a mean of means and not that of all targets of the step."
    ),
}


def _unequal(step: _Step) -> _Unequal | None:
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
                faults.append(_Unequal(code, step, max(weights) / min(weights), exact=gap <= _SAME))
    return max(faults, key=lambda fault: fault.exact, default=None)


def _gap(values: Iterable[float]) -> float:
    """Return the relative spread (max - min) / min."""
    values = list(values)
    return max(values) / min(values) - 1


def _differs_by_size(step: _Step) -> bool:
    """Check if only batch sizes differ: no target is ignored or padding."""
    return _gap(item.counted / item.rows for items in step for item in items if item.counted) <= _SAME / 100
