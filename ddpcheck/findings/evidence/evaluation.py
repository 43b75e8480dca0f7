"""Evidence on how a script evaluates: what each rank's loops counted, what it exchanged, and what it showed.

Judged in `judge.evaluation.script_evaluation` and `judge.evaluation.script_order`; gathered in
`record.evaluation` and `record.loss.target_recorder`.

A *round* is the time from one backward pass to the next in which a loader was gone through to its end without any: an
evaluation, and what the program makes of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from ddpcheck.findings.evidence import Entry
from ddpcheck.findings.report import Location


class EvaluationPass(Entry, frozen=True):
    """A pass over a `DataLoader` to its end, without a backward pass or an optimizer step meanwhile."""

    round: int  # of the evaluations of this rank, counted from 0
    loader: int  # the number of the loader, and `number` of its pass, as in `LoaderPass`
    number: int  # counted from 0
    # what the program holds at the end and did not at the beginning, by function and variable: numbers, sums of lists,
    # and how many rows of two lists of labels are equal
    numbers: Mapping[str, float] = field(default_factory=dict)
    # by name, the labels of all samples that the dataset holds, in its order
    references: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    after: Mapping[str, Location] = field(default_factory=dict)  # by function, the line that follows the loop
    # likewise floating-point numbers; as many of each sample
    numbers_of: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    # by function and variable, square tables of counts that were filled meanwhile, row by row
    tables: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    # likewise a number or a label for each sample of the pass, in its order
    rows: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


class ResultExchanged(Entry, frozen=True):
    """What a rank has given to a collective during an evaluation or after it."""

    round: int  # in which
    operation: str  # the collective
    location: Location | None  # the line of the script
    during: bool  # whether a pass over a loader was under way
    numbers: tuple[float, ...] = ()  # what it is, where these are few numbers
    total: float | None = None  # the sum of all its elements, where these are whole numbers
    # labels, one for each row: whole numbers as they are, of rows of floating-point numbers the place of the highest.
    # Empty where it is something else
    rows: tuple[int, ...] = ()
    # the loader and the number of the pass that is under way, or has ended last
    evaluation: tuple[int, int] | None = None
    values: tuple[float, ...] = ()  # the rows themselves where they are floating-point numbers, row by row
    sums: bool = False  # whether it leaves the sum or the mean of what all ranks give, and nothing of one rank
    shown: int = 0  # how many `MetricShown` of its round were written before
    # by function on the stack, innermost first, the line that makes what it hands on
    lines: Mapping[str, Location] = field(default_factory=dict)


class SumsReduced(Entry, frozen=True):
    """Calls of all_reduce at one line, one after the other: no number is less than what the call before has left."""

    location: Location | None  # the line
    given: tuple[tuple[float, ...], ...]  # by call, the rank's own numbers
    left: tuple[tuple[float, ...], ...]  # by call, their sums over all ranks


class RowsCompared(Entry, frozen=True):
    """Two tensors of as many numbers as there are samples, or rows of them, have been compared number by number."""

    round: int  # after the gather of which evaluation
    location: Location | None  # the line of the script
    one: tuple[float, ...]  # the numbers, in their order
    other: tuple[float, ...]  # likewise


class ShownNumber(Struct, frozen=True):
    """A number that the program shows."""

    text: str  # as it is printed; "" where it is handed over as a number
    values: tuple[float, ...] = ()  # numbers that the program holds and that are printed like this; or that number


class MetricShown(Entry, frozen=True):
    """The program has shown numbers after an evaluation, given them to the other ranks, or decided by them."""

    round: int  # of the evaluation
    # "printed", "logged", "saved", "broadcast" to the other ranks, or "decides": they are in the condition of an `if`
    # around a `torch.save`
    how: str
    location: Location | None  # the line of the script
    numbers: tuple[ShownNumber, ...]  # in their order


class GatheredTargets(Entry, frozen=True):
    """A cross entropy whose classes are the rows that an all_gather has brought together."""

    step: int  # how often optimizers had stepped before
    location: Location | None  # the line of the script that gathers
    members: tuple[int, ...]  # the ranks of the group
    own: int  # the place of this rank's first row among the classes
    rows: int  # how many rows this rank has given
    classes: int  # how many classes there are
    targets: tuple[int, ...]  # of the cross entropy, as far as they are different ones
    loss: Location | None = None  # the line that calls the cross entropy, as far as source tells
