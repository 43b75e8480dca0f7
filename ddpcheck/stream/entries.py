"""The entries of the log that a watched rank leaves: what a watch would have exchanged with the other ranks.

Fields are only added, with a default, and kinds are only added: so that any version reads what it knows.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from ddpcheck.findings.evidence.changes import ModuleChanged
from ddpcheck.findings.evidence.compilation import FunctionCompiled
from ddpcheck.findings.evidence.construction import WrapperBegun
from ddpcheck.findings.evidence.draws import StepDraw
from ddpcheck.findings.evidence.evaluation import (
    EvaluationPass,
    GatheredTargets,
    MetricShown,
    ResultExchanged,
    RowsCompared,
    SumsReduced,
)
from ddpcheck.findings.evidence.gathers import GatheredConstant, OwnPartPutBack
from ddpcheck.findings.evidence.gradient_changes import GradientsChanged, GradientsTaken
from ddpcheck.findings.evidence.pace import GradientsLeft, PaceRun
from ddpcheck.findings.evidence.parts import ModelSplit, PartStep
from ddpcheck.findings.evidence.running_statistics import RunningStatistic
from ddpcheck.findings.evidence.script import (
    DerivedTable,
    Evaluated,
    FilesLeft,
    FileUsed,
    GradientsClipped,
    GradientsZeroed,
    Inputs,
    LoaderPass,
    LossDifferentiated,
    MetricUsed,
    OptimizerEnd,
    OptimizerStep,
    ReducedInPlace,
    StateHeld,
)
from ddpcheck.findings.evidence.state_uses import NothingLoaded, StateUsed
from ddpcheck.findings.figures import ModuleEntry
from ddpcheck.findings.report import Location
from ddpcheck.stream.rank_report import RankReport, ReplicaState, WatchContext

SCHEMA = 1

if TYPE_CHECKING:
    _Array = array[float]
else:
    _Array = array


class Sketch(_Array):
    """The numbers of a sketch (see `gather.steps.gradient_sketch`), of typecode "f": most of a log is made of them."""


class RankStarted(Struct, frozen=True):
    """A process has joined its default process group, and so is a rank.

    Attributes:
        rank: In that group.
        world_size: Of that group.
        backend: Of that group.
        restart: How often the launcher had restarted the ranks before.
        schema: The version of these entries.
    """

    rank: int
    world_size: int
    backend: str
    restart: int = 0
    schema: int = SCHEMA


class WrapperMade(Struct, frozen=True):
    """A `DistributedDataParallel` has been constructed.

    Attributes:
        module: The class of what it wraps.
        ranks: Of its process group.
        context: Of the watch on it.
        location: The line of the script that constructs it.
        by_library: Whether an installed package does, and not the script.
        classes: By path of a submodule ("" for the module itself), its classes of the user, each with file and name.
        modules: For a report: those of the first wrapper of rank 0.
    """

    module: str
    ranks: tuple[int, ...]
    context: WatchContext
    location: Location | None
    by_library: bool
    classes: Mapping[str, tuple[tuple[str, str], ...]]
    modules: tuple[ModuleEntry, ...] = ()


class StepsReported(Struct, frozen=True):
    """What a rank would report when the ranks exchange reports.

    Attributes:
        wrapper: The number of the wrapper.
        report: Of the rank.
        closing: Whether the watch ends with it.
        alone: Whether it shows a fault whatever the other ranks report.
        begun: Whether its step has only begun: what the step itself reports takes its place.
    """

    wrapper: int
    report: RankReport
    closing: bool = False
    alone: bool = False
    begun: bool = False


class ReplicaCaptured(Struct, frozen=True):
    """What a rank would compare with the others after the backward pass of a step.

    Attributes:
        wrapper: The number of the wrapper.
        step: How many had ended before.
        state: Of the replica.
        own: Of the rank's own gradients; empty where they were not kept. Of parts of them, which are reduced onto
            other ranks each, by "number of the shard/name".
        averaged: Of what the wrapper left in `.grad`.
        eps: The machine epsilon of each parameter's dtype, or what a communication hook loses, if that is more.
        hook: The name of the communication hook.
        own_hook: Whether it is none of torch's.
        shard: The number of the rank's shard of each parameter; negative where it has the whole of them.
        parts: The names of the parameters of which it is a part, whose elements are not all the same.
        values: Sketches of the parameters; only where something else than an optimizer's step has changed some.
    """

    wrapper: int
    step: int
    state: ReplicaState
    own: Mapping[str, Sketch] = field(default_factory=dict)
    averaged: Mapping[str, Sketch] = field(default_factory=dict)
    eps: Mapping[str, float] = field(default_factory=dict)
    hook: str = ""
    own_hook: bool = False
    shard: int = -1
    parts: tuple[str, ...] = ()
    values: Mapping[str, Sketch] = field(default_factory=dict)


class BuffersKept(Struct, frozen=True):
    """The buffers with which a rank goes on after a captured step: at its next forward pass, or when it is left.

    Attributes:
        wrapper: The number of the wrapper.
        step: That was captured.
        buffers: Their fingerprints, but for those of normalisation layers.
    """

    wrapper: int
    step: int
    buffers: Mapping[str, int]


class NotCompared(Struct, frozen=True):
    """Steps of a wrapper are not compared between ranks, although it would be their turn; `why`: in words."""

    wrapper: int
    why: str


class TrainedApart(Struct, frozen=True):
    """The ranks of a wrapper have trained apart, by a communication hook (post-local SGD), until it was left.

    Attributes:
        wrapper: Its number.
        step: How many had ended before.
        marks: Fingerprints of one parameter, before each forward pass since then in which it had changed, and at last.
        parameters: Those of all parameters at last.
        hook: The name of the communication hook.
    """

    wrapper: int
    step: int
    marks: tuple[int, ...]
    parameters: Mapping[str, int]
    hook: str = ""


class GroupUsed(Struct, frozen=True):
    """A process group has been used for the first time; its name, and the ranks in it."""

    name: str
    members: tuple[int, ...]


class CallersSeen(Struct, frozen=True):
    """Lines of the program have led to a collective for the first time.

    Attributes:
        number: Of them.
        lines: Innermost first.
        files: Of each of the lines.
    """

    number: int
    lines: tuple[str, ...]
    files: tuple[str, ...]


class ExitCalled(Struct, frozen=True):
    """The script has called `sys.exit`; the lines that led to it, innermost first."""

    lines: tuple[str, ...]


class RankRaised(Struct, frozen=True):
    """The script has ended in an exception on this rank; `reply` is as `worlds.failures.described` makes it."""

    reply: Mapping[str, Any]


class WatchingFailed(Struct, frozen=True):
    """An error, of ddpcheck's own or of writing the log, after which this rank is not watched any more."""

    error: str


class PeerReceived(Struct, frozen=True):
    """The script has received a tensor or an object from one other rank, for the first time."""


class GroupDestroyed(Struct, frozen=True):
    """The script has destroyed its default process group."""


class ProgramEnded(Struct, frozen=True):
    """Python has come to the end of the program; no entry after a signal or `os._exit`."""


Entry = (
    RankStarted
    | WrapperBegun
    | WrapperMade
    | StepsReported
    | ReplicaCaptured
    | NotCompared
    | BuffersKept
    | TrainedApart
    | Inputs
    | Evaluated
    | LoaderPass
    | DerivedTable
    | StepDraw
    | GatheredConstant
    | OwnPartPutBack
    | OptimizerStep
    | OptimizerEnd
    | ModelSplit
    | PartStep
    | StateHeld
    | StateUsed
    | NothingLoaded
    | RunningStatistic
    | LossDifferentiated
    | MetricUsed
    | GradientsClipped
    | GradientsZeroed
    | ReducedInPlace
    | FileUsed
    | FilesLeft
    | ModuleChanged
    | GradientsChanged
    | EvaluationPass
    | ResultExchanged
    | MetricShown
    | RowsCompared
    | SumsReduced
    | GatheredTargets
    | GradientsLeft
    | GradientsTaken
    | PaceRun
    | FunctionCompiled
    | GroupUsed
    | CallersSeen
    | ExitCalled
    | RankRaised
    | WatchingFailed
    | PeerReceived
    | GroupDestroyed
    | ProgramEnded
)
