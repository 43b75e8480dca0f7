"""Evidence on two runs of a script: on several ranks and in one process."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from ddpcheck.findings.evidence import Entry
from ddpcheck.findings.report import Location

IN_TURN = "each step has world-size times as many micro-batches"
"""Reason to stop a single process that would have to take the batches of all ranks in turn."""


class ParityPass(Entry, frozen=True):
    """Completed pass over a data loader."""

    loader: str  # line that constructs the loader, and the pass
    rows: int  # of all batches
    num_samples: int  # samples per pass according to the sampler of this process; negative if unknown
    trains: bool  # True if a backward pass began during the pass
    batches: int = 0


class NotReplayed(Entry, frozen=True):
    """Script line that reads values that a rerun in a single process cannot reproduce."""

    line: str
    why: str


class ParityStep(Entry, frozen=True):
    """State before an optimizer step, to compare with a run in one process."""

    optimizer: int  # number of the optimizer, in order of first steps
    count: int  # earlier steps of the optimizer
    location: Location | None  # line of the script
    norms: tuple[float, ...] = ()  # norm of each gradient: negative if missing, zero for replicated shards
    values: tuple[float, ...] = ()  # norm of each parameter
    gradient: tuple[float, ...] = ()  # sketch of all gradients; empty for shards
    rates: tuple[float, ...] = ()  # learning rate of each group
    losses: tuple[float, ...] = ()  # of the backward passes since the last step
    loss_at: Location | None = None  # line that calls backward
    clip: tuple[float, float] | None = None  # (gradient norm before clipping, limit)
    sharded: bool = False  # True if gradients are shards
    names: tuple[str, ...] = ()  # of the parameters; in the first step only
    backwards: int = 0  # backward passes of the run so far
    # sums of features of each row in the inputs of wrappers since the last step, and the number of rows
    samples: tuple[float, ...] = ()
    elements: tuple[int, ...] = ()  # of the parameters; in the first step only


class NumbersShown(Entry, frozen=True):
    """Numbers that the script printed, logged, tracked or saved."""

    how: str  # "printed", "logged", "written", "tracked" or "saved"
    location: Location | None
    text: str  # with "#" in place of numbers
    numbers: tuple[str, ...]  # as shown
    steps: int  # optimizer steps so far
    evaluates: bool  # True if an evaluation ended since the last backward pass
    during: bool = False  # True during a pass over a loader without backward
    known: tuple[int, ...] = ()  # indices of numbers known before the evaluation
    rates: tuple[int, ...] = ()  # indices of learning rates, which may be scaled by the world size


class TensorsSaved(Entry, frozen=True):
    """Tensors that the script saved."""

    location: Location | None
    steps: int
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # of orders 2, 1, 4 and infinity, and of the positive elements: all independent of the order of elements
    norms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


class TracedValue(Struct, frozen=True, array_like=True):
    """Numbers that a line of the program assigned to a variable, or returned."""

    path: str
    line: int
    function: str
    name: str
    numbers: tuple[float, ...]


class EvaluationTraced(Entry, frozen=True):
    """Values computed by functions of the program in an evaluation, in order."""

    steps: int  # optimizer steps before
    values: tuple[TracedValue, ...]


class ParityEnded(Entry, frozen=True):
    """End of the recording that a single process replays; may precede the script's end."""

    steps: int
    backwards: int
    why: str = ""  # reason, if before the end of the script
    full_at: int = 0  # backward passes with all samples recorded, if not all passes
    splits_statistics: bool = False  # True if batch statistics were computed for the rows of each rank
    why_full: str = ""  # why no more samples were recorded; "" if all were recorded
    batch: int = 0  # maximum samples per batch, if loaders of the script have larger batches
    steps_schedules: bool = False  # True if accelerate steps schedules once per rank
    scaled_variables: tuple[str, ...] = ()  # variables of the script with the batch size of all ranks
