"""Evidence on evaluation in a script: counts of each rank, exchanged results, shown numbers.

A *round* is the time between two backward passes in which a data loader was exhausted: an evaluation, and the use of
the results.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from ddpcheck.findings.evidence import Entry
from ddpcheck.findings.report import Location


class EvaluationPass(Entry, frozen=True):
    """Full pass over a `DataLoader` without a backward pass or optimizer step."""

    round: int  # evaluation round of this rank, from 0
    loader: int  # number of the loader, as in `LoaderPass`
    number: int  # number of the pass over the loader, from 0
    # values that the pass added, by function and variable: numbers, sums of lists, and the number of equal rows of two
    # lists of labels
    numbers: Mapping[str, float] = field(default_factory=dict)
    # labels of all samples of the dataset, in dataset order, by name
    references: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    after: Mapping[str, Location] = field(default_factory=dict)  # line after the loop, by function
    # floating-point numbers of all samples of the dataset, equally many per sample, by name
    numbers_of: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    # square tables of counts that were filled during the pass, row by row, by function and variable
    tables: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    # number or label of each sample of the pass, in order, by function and variable
    rows: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


class ResultExchanged(Entry, frozen=True):
    """Input of a collective during or after an evaluation, such as a metric."""

    round: int  # evaluation round
    operation: str  # the collective
    location: Location | None  # line of the script
    during: bool  # True during a pass over a loader
    numbers: tuple[float, ...] = ()  # the input, if only a few numbers
    total: float | None = None  # sum of all elements, if whole numbers
    # label of each row: whole numbers unchanged, argmax of rows of floating-point numbers; else empty
    rows: tuple[int, ...] = ()
    evaluation: tuple[int, int] | None = None  # (loader, number) of the current or last pass
    values: tuple[float, ...] = ()  # floating-point rows, row by row
    sums: bool = False  # True if the output is only the sum or mean over all ranks
    shown: int = 0  # number of earlier `MetricShown` in the round
    # line that makes the input, by function on the stack, innermost first
    lines: Mapping[str, Location] = field(default_factory=dict)


class SumsReduced(Entry, frozen=True):
    """Series of all_reduces at one line, with each input at least the previous output.

    In such a series, the inputs may contain sums that were reduced before.
    """

    location: Location | None  # line of the calls
    inputs: tuple[tuple[float, ...], ...]  # numbers of this rank, by call
    outputs: tuple[tuple[float, ...], ...]  # sums over all ranks, by call


class RowsCompared(Entry, frozen=True):
    """Elementwise comparison of per-sample tensors after a gather, such as predictions and labels."""

    round: int  # evaluation round of the preceding gather
    location: Location | None  # line of the script
    first: tuple[float, ...]  # numbers of the first tensor, in order
    second: tuple[float, ...]  # numbers of the second tensor, in order


class ShownNumber(Struct, frozen=True):
    """Number that the program prints, logs, saves, broadcasts or tests in a condition."""

    text: str  # as printed; "" if passed as a number
    values: tuple[float, ...] = ()  # variables that print as `text`; or the number that was passed


class MetricShown(Entry, frozen=True):
    """Numbers that the program prints, saves, broadcasts or tests in a condition after evaluation."""

    round: int  # of the evaluation
    # "printed", "logged", "saved", "broadcast", or "decides" (in the condition of an `if` around a `torch.save`)
    how: str
    location: Location | None  # line of the script
    numbers: tuple[ShownNumber, ...]  # in order


class GatheredTargets(Entry, frozen=True):
    """Cross entropy in which each row of an all_gather is a class (contrastive loss)."""

    step: int  # optimizer steps before
    location: Location | None  # line of the all_gather
    members: tuple[int, ...]  # ranks of the group
    own: int  # index of this rank's first row among the classes
    rows: int  # number of rows of this rank
    classes: int  # number of classes
    targets: tuple[int, ...]  # distinct targets of the cross entropy
    loss: Location | None = None  # line of the cross entropy, if found in the source
