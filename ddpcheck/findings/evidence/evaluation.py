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
    """A pass over a `DataLoader` to its end, without a backward pass or an optimizer step meanwhile.

    Attributes:
        round: Of the evaluations of this rank, counted from 0.
        loader: The number of the loader, and `number` of its pass, as in `LoaderPass`.
        number: Counted from 0.
        numbers: What the program holds at the end and did not at the beginning, by function and variable: numbers,
            sums of lists, and how many rows of two lists of labels are equal.
        references: By name, the labels of all samples that the dataset holds, in its order.
        numbers_of: Likewise floating-point numbers; as many of each sample.
        after: By function, the line that follows the loop.
    """

    round: int
    loader: int
    number: int
    numbers: Mapping[str, float] = field(default_factory=dict)
    references: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    after: Mapping[str, Location] = field(default_factory=dict)
    numbers_of: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


class ResultExchanged(Entry, frozen=True):
    """What a rank has given to a collective during an evaluation or after it.

    Attributes:
        round: In which.
        operation: The collective.
        location: The line of the script.
        during: Whether a pass over a loader was under way.
        numbers: What it is, where these are few numbers.
        total: The sum of all its elements, where these are whole numbers.
        rows: Labels, one for each row: whole numbers as they are, of rows of floating-point numbers the place of the
            highest. Empty where it is something else.
        evaluation: The loader and the number of the pass that is under way, or has ended last.
        values: The rows themselves where they are floating-point numbers, row by row.
    """

    round: int
    operation: str
    location: Location | None
    during: bool
    numbers: tuple[float, ...] = ()
    total: float | None = None
    rows: tuple[int, ...] = ()
    evaluation: tuple[int, int] | None = None
    values: tuple[float, ...] = ()


class SumsReduced(Entry, frozen=True):
    """Calls of all_reduce at one line, one after the other: no number is less than what the call before has left.

    Attributes:
        location: The line.
        given: By call, the rank's own numbers.
        left: By call, their sums over all ranks.
    """

    location: Location | None
    given: tuple[tuple[float, ...], ...]
    left: tuple[tuple[float, ...], ...]


class RowsCompared(Entry, frozen=True):
    """Two tensors of as many numbers as there are samples, or rows of them, have been compared number by number.

    Attributes:
        round: After the gather of which evaluation.
        location: The line of the script.
        one: The numbers, in their order.
        other: Likewise.
    """

    round: int
    location: Location | None
    one: tuple[float, ...]
    other: tuple[float, ...]


class ShownNumber(Struct, frozen=True):
    """A number that the program shows.

    Attributes:
        text: As it is printed; "" where it is handed over as a number.
        values: Numbers that the program holds and that are printed like this; or that number.
    """

    text: str
    values: tuple[float, ...] = ()


class MetricShown(Entry, frozen=True):
    """The program has printed, logged or saved numbers after an evaluation, or saved a file because of them.

    Attributes:
        round: Of the evaluation.
        how: "printed", "logged", "saved", or "decides": they are in the condition of an `if` around a `torch.save`.
        location: The line of the script.
        numbers: In their order.
    """

    round: int
    how: str
    location: Location | None
    numbers: tuple[ShownNumber, ...]


class GatheredTargets(Entry, frozen=True):
    """A cross entropy whose classes are the rows that an all_gather has brought together.

    Attributes:
        step: How often optimizers had stepped before.
        location: The line of the script that gathers.
        members: The ranks of the group.
        own: The place of this rank's first row among the classes.
        rows: How many rows this rank has given.
        classes: How many classes there are.
        targets: Of the cross entropy, as far as they are different ones.
    """

    step: int
    location: Location | None
    members: tuple[int, ...]
    own: int
    rows: int
    classes: int
    targets: tuple[int, ...]
