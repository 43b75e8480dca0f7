"""DDP305 and 514: the weights of targets in an optimizer step.

The gradient that the optimizer gets ought to be that of a mean over all targets (tokens, say) of the step. Where each
micro-batch, or each rank, divides by its own number of targets, and these differ, it is a mean of means: a target
counts the more the fewer there are beside it. (huggingface/transformers#34191 mended this in one trainer.)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from ddpcheck.findings.report import Finding, Severity
from ddpcheck.findings.wording import group_by, make_finding
from ddpcheck.judge.gradients.script_losses import severity_of_weights
from ddpcheck.stream.rank_report import MicroBatch

_SAME = 0.02  # what rounding to half precision may do
_SIMILAR = 0.15  # how far a loss's own count may be from ours
_NEARLY = 0.05  # how far a weight may be off for anyone to care
_OFTEN = 3  # steps after which what could be chance in one of them is none
_Step = Sequence[tuple[MicroBatch, ...]]  # one head in one optimizer step, by rank


def judge_normalisation(ranks: Sequence[Sequence[MicroBatch]]) -> list[Finding]:
    """Findings on the weights of targets (DDP305, DDP514).

    A step is enough evidence where the weights are in inverse proportion to numbers of targets, and some targets do not
    count. Where the loss seems to count a little differently, or where batches only have other sizes, as the last one
    of an epoch may, several steps have to say the same. All ranks have measured the optimizer steps.
    """
    for head in dict.fromkeys(item.head for item in ranks[0]):
        often: list[_Unequal] = []
        for index in sorted({item.index for item in ranks[0] if item.head == head}):
            step = [tuple(item for item in items if (item.index, item.head) == (index, head)) for items in ranks]
            unequal = _unequal(step)
            if unequal is not None and unequal.exact and not _by_size_alone(step):
                return [unequal.finding(severity_of_targets(ranks, head))]
            often = [] if unequal is None else [*often, unequal]
            if len(often) == _OFTEN:
                return [unequal.finding(severity_of_targets(ranks, head)) for unequal in often[-1:]]
    return []


def severity_of_targets(ranks: Sequence[Sequence[MicroBatch]], head: str | None = None) -> Severity:
    """How severe it is that a target counts more on one rank than on another, in all steps that were measured."""
    steps: dict[tuple[int, str], dict[int, list[MicroBatch]]] = {}
    for rank, items in enumerate(ranks):
        for item in dict.fromkeys(items):
            if item.counted and item.weight and head in (None, item.head):
                steps.setdefault((item.index, item.head), {}).setdefault(rank, []).append(item)
    weights = [
        [sum(one.weight * one.counted for one in of) / sum(one.counted for one in of) for of in by_rank.values()]
        for by_rank in steps.values()
        if len(by_rank) == len(ranks)
    ]
    return severity_of_weights(weights)


@dataclass(frozen=True, slots=True)
class _Unequal:
    """A step whose targets have unequal weights, of which the number of targets is the reason."""

    code: str
    step: _Step
    factor: float  # of the largest weight to the smallest
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
    """The fault, if it is one: weights that differ, each times the number of targets that it belongs to alike."""
    everything = [(rank, item) for rank, items in enumerate(step) for item in items if item.counted]
    weights = [item.weight for _, item in everything]
    if len({rank for rank, _ in everything}) < len(step) or min(weights) <= 0:
        return None
    right = sum(item.weight * item.counted for _, item in everything) / sum(item.counted for _, item in everything)
    if max(abs(weight / right - 1) for weight in weights) < _NEARLY:
        return None
    ways: list[tuple[str, Callable[[tuple[int, MicroBatch]], Hashable]]] = [
        ("DDP305", lambda one: one[0]),
        ("DDP514", lambda one: (one[0], one[1].position)),
        ("DDP514", lambda one: one[1].position),
    ]
    found = []
    for code, group_of in ways:
        groups = [[item for _, item in group] for group in group_by(everything, group_of).values()]
        if max(_gap(item.weight for item in group) for group in groups) > _SAME:
            continue
        for more in (0, 1):  # in a sequence: a loss may count the first token, which nothing predicts
            sums = [sum(item.counted + more * item.sequences for item in group) for group in groups]
            gap = _gap(group[0].weight * total for group, total in zip(groups, sums, strict=True))
            if gap <= max(_SAME, min(_SIMILAR, _gap(weights) / 3)):
                found.append(_Unequal(code, step, max(weights) / min(weights), exact=gap <= _SAME))
    return max(found, key=lambda unequal: unequal.exact, default=None)


def _gap(values: Iterable[float]) -> float:
    """The distance of the largest from the smallest, in parts of the smallest."""
    values = list(values)
    return max(values) / min(values) - 1


def _by_size_alone(step: _Step) -> bool:
    """Whether nothing is left out or padded: batches have other sizes, as the last one of an epoch may have."""
    return _gap(item.counted / item.rows for items in step for item in items if item.counted) <= _SAME / 100
