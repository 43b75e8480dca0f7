"""Whether all targets of an optimizer step have the same weight in it: a pure function, from micro-batches to findings.

The gradient that the optimizer gets ought to be that of a mean over all targets (tokens, say) of the step. Where each
micro-batch, or each rank, divides by its own number of targets, and these differ, it is a mean of means: a target
counts the more the fewer there are beside it. (huggingface/transformers#34191 mended this in one trainer.)

This module is light: it never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from ddpcheck.findings import Finding
from ddpcheck.watching.account import MicroBatch
from ddpcheck.wording import make_finding

_SAME = 0.02  # what rounding to half precision may do
_NEARLY = 0.05  # how far a weight may be off for anyone to care
_OFTEN = 3  # steps in which batches of other sizes are no smaller last batch any more
_Step = Sequence[tuple[MicroBatch, ...]]  # one head in one optimizer step, by rank


def judge_normalisation(ranks: Sequence[Sequence[MicroBatch]]) -> list[Finding]:
    """Findings on the weights of targets (DDP305, DDP514).

    Args:
        ranks: The micro-batches of each, in optimizer steps that they all have looked at.
    """
    found: list[Finding] = []
    by_size: dict[str, list[_Unequal]] = {}
    heads = dict.fromkeys(item.head for item in ranks[0])
    for head in heads:
        for index in sorted({item.index for item in ranks[0] if item.head == head}):
            step = [tuple(item for item in told if (item.index, item.head) == (index, head)) for told in ranks]
            unequal = _unequal(step)
            if unequal is None:
                by_size[head] = []
            elif _by_size_alone(step):
                by_size.setdefault(head, []).append(unequal)
            else:
                found.append(unequal.finding())
        if len(by_size.get(head, ())) >= _OFTEN:
            found.append(by_size[head][-1].finding())
    return found[:1]


@dataclass(frozen=True, slots=True)
class _Unequal:
    """A step whose targets have unequal weights, of which the number of targets is the reason."""

    code: str
    step: _Step
    factor: float  # of the largest weight to the smallest

    def finding(self) -> Finding:
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
                f"targets (tokens, say) that count, by micro-batch: {'; '.join(numbers)}",
                f"one where there are fewest weighs {self.factor:.3g} times as much as one where there are most",
            ),
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
    """The fault, where it is proven: weights that differ, each times the number of targets that it belongs to alike."""
    counting = [tuple(item for item in items if item.counted) for items in step]
    everything = [(rank, item) for rank, items in enumerate(counting) for item in items]
    if not all(counting) or any(item.weight <= 0 for _, item in everything):
        return None
    if _alike(item.weight for _, item in everything):
        return None
    ways: list[tuple[str, Callable[[int, MicroBatch], Hashable]]] = [
        ("DDP305", lambda rank, _: rank),
        ("DDP514", lambda rank, item: (rank, item.position)),
        ("DDP514", lambda _, item: item.position),
    ]
    for code, group_of in ways:
        groups: dict[Hashable, list[MicroBatch]] = {}
        for rank, item in everything:
            groups.setdefault(group_of(rank, item), []).append(item)
        inside = all(_alike(item.weight for item in group) for group in groups.values())
        totals = [group[0].weight * sum(item.counted for item in group) for group in groups.values()]
        if inside and _alike(totals):
            whole = sum(item.weight * item.counted for _, item in everything)
            right = whole / sum(item.counted for _, item in everything)
            weights = [item.weight for _, item in everything]
            if max(abs(weight / right - 1) for weight in weights) < _NEARLY:
                return None
            return _Unequal(code, step, max(weights) / min(weights))
    return None


def _alike(values: Iterable[float]) -> bool:
    values = list(values)
    return max(values) <= min(values) * (1 + _SAME)


def _by_size_alone(step: _Step) -> bool:
    """Whether nothing is left out or padded: batches have other sizes, as the last one of an epoch may have."""
    return _alike(item.counted / item.rows for items in step for item in items if item.counted)
