"""Evidence on two runs of a script, on several ranks and in a single process: what each did, step by step.

Judged in `judge.parity_comparison` and `judge.script_parity`; gathered in `record.parity`, in both runs alike.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from ddpcheck.findings.evidence import Entry
from ddpcheck.findings.report import Location

IN_TURN = "each step has world-size times as many micro-batches"
"""Why a single process stops that has to take the batches of the ranks one after the other."""


class PassTaken(Entry, frozen=True):
    """A pass over a loader has come to its end."""

    loader: str  # the line that constructs the loader, and the pass
    rows: int  # of all its batches
    chosen: int  # how many samples this process's own sampler says that it chooses; negative if it does not say
    trains: bool  # whether a backward pass has begun meanwhile
    batches: int = 0


class NotReplayed(Entry, frozen=True):
    """A line at which values entered the script that the single process could not be given."""

    line: str
    why: str


class ParityStep(Entry, frozen=True):
    """An optimizer is about to step."""

    optimizer: int  # the number of the optimizer, in the order of their first steps
    count: int  # how often it has stepped before
    location: Location | None  # the line of the script
    # the norm of each gradient, negative if there is none; of shards that other ranks have too, zero
    norms: tuple[float, ...] = ()
    values: tuple[float, ...] = ()  # the norm of each parameter
    gradient: tuple[float, ...] = ()  # a sketch of all gradients; empty if they are shards
    rates: tuple[float, ...] = ()  # the learning rate of each group
    losses: tuple[float, ...] = ()  # of the backward passes since the last step
    loss_at: Location | None = None  # the line that calls backward
    clip: tuple[float, float] | None = None  # the norm of the gradients before they were clipped, and the limit
    sharded: bool = False  # whether gradients are parts of a whole
    names: tuple[str, ...] = ()  # of the parameters; in the first step only
    backwards: int = 0  # of the whole run so far
    # sums over the rows that wrappers were given since the last step, of features of each, and their number
    samples: tuple[float, ...] = ()
    elements: tuple[int, ...] = ()  # of the parameters; in the first step only


class NumbersShown(Entry, frozen=True):
    """The script has printed, logged or tracked a text with numbers, or saved numbers."""

    how: str  # "printed", "logged", "written", "tracked" or "saved"
    location: Location | None
    text: str  # with "#" in the place of numbers
    numbers: tuple[str, ...]  # as they are shown
    steps: int  # optimizer steps so far
    evaluates: bool  # whether an evaluation has ended since the last backward pass
    during: bool = False  # whether a pass over a loader without backward is under way
    known: tuple[int, ...] = ()  # the places of numbers that the program had before the evaluation
    rates: tuple[int, ...] = ()  # the places of learning rates, which may be scaled by the world size


class TensorsSaved(Entry, frozen=True):
    """The script has saved tensors."""

    location: Location | None
    steps: int
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # of orders 2, 1, 4 and infinity, and that of the positive elements, which no order of the elements changes
    norms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


class TracedValue(Struct, frozen=True, array_like=True):
    """The numbers that a line of the program has given to a variable, or has returned."""

    path: str
    line: int
    function: str
    name: str
    numbers: tuple[float, ...]


class EvaluationTraced(Entry, frozen=True):
    """Values that functions of the program have computed in an evaluation, in order."""

    steps: int  # optimizer steps before
    values: tuple[TracedValue, ...]


class ParityEnded(Entry, frozen=True):
    """The recording of a run has ended, at the end of the script or before."""

    steps: int
    backwards: int
    why: str = ""  # in words, if that was before the end of the script
    full_at: int = 0  # the backward passes of which all samples were recorded, if not of all
    splits_statistics: bool = False  # whether statistics of a batch were those of the rows of each rank
    why_full: str = ""  # why no more samples were recorded, in words; empty if all were
    batch: int = 0  # the most samples of a batch, if loaders of the script have larger ones
    steps_schedules: bool = False  # whether accelerate steps schedules, once for each rank
    scaled: tuple[str, ...] = ()  # variables of the script that have the batch size of all ranks
