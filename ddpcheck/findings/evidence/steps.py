"""Evidence on whole training steps, alone and under the wrapper: each parameter's part in the loss, and collectives.

Judged in `judge.parameters`, `judge.gradients.reducer`, `judge.replicas.replica_state`, `judge.loop.training_loop` and
`judge.endings.collective_order`; gathered in `gather.phases`, `gather.autograd` and `gather.collectives`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct, field

from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.evidence.loop import FunctionCompiled
from ddpcheck.findings.figures import ParameterPath, PathStep
from ddpcheck.findings.from_json import added
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location

GradientState = Literal["contributes", "zero", "missing", "lost"]
"""`missing`: backward does not reach the parameter. `lost`: it does, and no gradient arrived."""


@dataclass(frozen=True, slots=True)
class PathEnd:
    """Why a parameter does not contribute to the loss.

    Attributes:
        cause: `unused` (no operation reads it), `unreachable` (what it made does not reach the loss), `cut` (the
            loss's value depends on it, and something took the path out of autograd), `lost` (backward returned None
            on the way to it), `zero` (an operation on the way turns every gradient into zeros), or `unknown`.
        reason: What cut the path ("detach()", "torch.no_grad()", "argmax(), which is not differentiable"), or the last
            operation on it.
        location: The line of the user's code at which that happened; of `unused`, the branch that may leave it out.
        module: The module whose forward was running there, empty at the top.
        no_grad_location: The line that switched gradients off, where that is what cut the path.
        steps: The operations from the parameter to there, the last of them the one that cut the path, or the last on
            it; where there are many, the first and the last. Not compared: it is how one came there.
        left_out: How many operations are not among them.
    """

    cause: str
    reason: str = ""
    location: Location | None = None
    module: str = ""
    no_grad_location: Location | None = None
    steps: tuple[PathStep, ...] = added((), compare=False)
    left_out: int = added(0, compare=False)

    def path_of(self, parameter: str) -> ParameterPath | None:
        """What a report draws of it; None where the operations are not known."""
        if self.cause == "unused":
            return ParameterPath(parameter, "unused")
        if self.cause == "cut" and self.steps:
            begins_at = self.no_grad_location if self.no_grad_location != self.location else None
            return ParameterPath(parameter, "cut", self.steps, self.left_out, self.reason, begins_at)
        if self.cause == "unreachable" and self.steps:
            return ParameterPath(parameter, "unreachable", self.steps, self.left_out)
        if self.cause in ("zero", "lost") and self.reason:
            end: Literal["zero", "lost"] = "zero" if self.cause == "zero" else "lost"
            return ParameterPath(parameter, end, (PathStep(self.reason, self.module, self.location),))
        return None

    @property
    def edit_at(self) -> Location | None:
        """The line to edit, if it is known."""
        return self.no_grad_location or self.location

    @property
    def at(self) -> str:
        """The line in words, where it is known."""
        return f" at {self.location}" if self.location else ""


class UnregisteredTensor(Struct, frozen=True):
    """A leaf that receives gradient and is no parameter of the module that was wrapped."""

    name: str  # the path to it from the module, or the name of a variable
    shape: tuple[int, ...]  # of the tensor
    location: Location | None = None  # the line that assigns it
    # it is a parameter of the module by now, but the forward pass made it, after DDP had looked
    created_in_forward: bool = False
    kind: str = ""  # of what holds it, in words ("global variable"), where that is not the module


class ParameterChange(Struct, frozen=True):
    """A change that the forward pass has made to a parameter that DDP knows."""

    kind: str  # "replaced", "removed", "frozen", "unfrozen" or "cast or moved"
    location: Location | None = None  # the line that did it
    replacement: str = ""  # the parameter that DDP knows, too, and that stands in its place now; empty for a new one


class StepEvidence(Struct, frozen=True):
    """One rank's parameters in one step: which of them contribute to the loss."""

    rank: int
    step: int  # counted from 0
    states: Mapping[str, GradientState]  # by name, for every parameter that requires grad
    path_ends: Mapping[str, PathEnd] = field(default_factory=dict)  # why, for those that are missing or lost
    unregistered: tuple[UnregisteredTensor, ...] = ()  # leaves that receive gradient and are no parameters
    # how often a gradient arrived, for parameters where that was more than once
    arrivals: Mapping[str, int] = field(default_factory=dict)
    # parameters that contribute, but that DDP cannot find from what `forward` returned
    hidden_from_ddp: tuple[str, ...] = ()
    output_type: str = ""  # the class of what `forward` returned where DDP finds no tensor in it, else empty
    reentrant: bool = False  # whether a re-entrant checkpoint stood in the graph
    # the parameters that this forward pass, or one before it, has changed
    changed: Mapping[str, ParameterChange] = field(default_factory=dict)


class Call(Struct, frozen=True):
    """One collective that one rank entered."""

    operation: str  # its name in `torch.distributed`
    group: str  # name of the process group
    members: tuple[int, ...]  # the ranks of the group
    # dtype and shape, what is computed where that is no sum, the root where there is one; empty where ranks may differ
    payload: str = ""
    place: str = ""  # what the rank was doing ("step 0: forward")
    location: str = ""  # the line of the user's code, as "path:line"; may be empty
    elements: int = 0  # of the floating-point tensor that goes in; what is logged usually has one
    carries_gradient: bool = False  # whether a tensor that requires grad went in
    differentiable: bool = False  # whether it was called by a custom autograd Function, which has a backward for it
    # the lines of the program that have led to it, innermost first; empty where only `location` is known
    callers: tuple[str, ...] = ()
    group_words: str = ""  # which group that is, to a reader: "the process group of train.py:12"; "" where not known
    thread: str = ""  # the name of the thread that called it; "" for the main thread

    def __str__(self) -> str:
        return f"{self.operation}({self.payload}){f' at {self.location}' if self.location else ''}"


class ReductionInput(Struct, frozen=True):
    """The input of one reduction when every rank had the same samples and random numbers."""

    operation: str  # its name
    location: str = ""  # the line of the user's code, as "path:line"; may be empty
    values: tuple[float, ...] = ()  # in memory order; empty where there were too many to compare


class RandomDraws(Struct, frozen=True):
    """Random numbers of one forward pass."""

    libraries: frozenset[str] = frozenset()  # from whose generators it drew
    # fingerprint of the state in which it has left torch's global generator; 0 where it did not draw from that
    generator_state: int = 0
    choices: tuple[str, ...] = ()  # the operations that choose among many at random, with their lines


class LocalStep(Struct, frozen=True):
    """One rank's step on its shard, without the wrapper and its reducer."""

    evidence: StepEvidence  # of the parameters
    loss: float  # its value; with random numbers silenced where the forward pass draws some and can do without
    random: RandomDraws  # what the forward pass drew
    batch: tuple[int, ...]  # fingerprint of the global batch
    samples: int  # how many this rank has; 0 where that is not known
    calls: int  # collectives since the start
    norm: float  # of all gradients together
    forward_calls: tuple[Call, ...]  # the collectives in the forward pass
    buffers: Mapping[str, int] = field(default_factory=dict)  # fingerprint of each buffer after the step
    sample_fingerprints: tuple[int, ...] = ()  # of each sample of this rank; empty where they cannot be told apart
    global_sample_fingerprints: tuple[int, ...] = ()  # of each sample of the global batch, on rank 0
    backwards: int = 1  # the user's own backward passes in the step, and the last one
    threads: int = 1  # with how many of them torch has computed it
    compiles: bool = False  # whether the user's code has asked for `torch.compile` so far
    layout: str = ""  # digest of what DDP takes to be alike on all ranks: names, shapes, dtypes and `requires_grad`

    def explained(self, ends: Mapping[str, PathEnd]) -> LocalStep:
        """The same with the reasons why gradients are missing."""
        return replace(self, evidence=replace(self.evidence, path_ends={**self.evidence.path_ends, **ends}))


class NoExplanation(Struct, frozen=True):
    """A rank's answer where an explanation could not be found; the check goes on without it."""

    reason: str  # the error that stood in the way
    bug: str = ""  # the sentence that asks to report it, where it is a bug of ddpcheck; else empty
    detail: str = ""  # the traceback


SYNC_SETTING = "require_backward_grad_sync"
"""The attribute of a wrapper by which a forward pass decides whether the next backward pass is averaged."""


class LoopEvent(Struct, frozen=True):
    """One call of the training loop in a step under the wrapper."""

    # "forward" (of the wrapper), "backward", "reduction" (has ended), "no_sync" (called), "enter no_sync", "leave
    # no_sync", "zero_grad", "step" (of an optimizer, on what the backward passes before it have left) or "apart"
    # (gradients are averaged over a part of the ranks only, by the communication hook); a backward pass around the
    # wrapper is "forward inside" (of the module in it, which is called) or "backward inside" (of the wrapper's
    # forward). Last comes SYNC_SETTING, with the one line that assigns it
    kind: str
    location: str = ""  # the line of the user's code, as "path:line"; empty where ddpcheck itself did it
    synchronises: bool = False  # of a forward: whether DDP will average the gradients of the next backward
    # of a `zero_grad`: the parameters whose gradients go before anybody has used them; empty where not all that are
    # there go so
    discarded: tuple[str, ...] = ()
    others: bool = False  # of a backward: whether leaves that are no parameters get gradients too
    resting: bool = False  # of a `zero_grad`: whether the rate of all that the optimizer holds is zero, as in a warm-up
    spares_unreduced: bool = False  # of a step: whether it uses nothing that was not reduced, although some was there


class SharedDraw(Struct, frozen=True):
    """A random tensor with a value for each sample, for which two ranks drew the same numbers."""

    operation: str
    module: str = ""
    location: Location | None = None
    fingerprint: int = 0


class DdpStepEvidence(Struct, frozen=True):
    """One rank's step under the wrapper."""

    rank: int
    step: int  # counted from 0
    gradients: Mapping[str, int] = field(default_factory=dict)  # fingerprint of each gradient after backward
    # fingerprint of each parameter after the optimizer's step
    parameters: Mapping[str, int] = field(default_factory=dict)
    # of each parameter that the module has after backward, before the optimizer's step
    parameters_before_optimizer: Mapping[str, int] = field(default_factory=dict)
    buffers: Mapping[str, int] = field(default_factory=dict)  # fingerprint of each buffer after the step
    # of each unregistered tensor that was there before the first step
    state: Mapping[str, int] = field(default_factory=dict)
    new_state: Mapping[str, int] = field(default_factory=dict)  # of each unregistered tensor that a step has made
    optimizer: Mapping[str, int] = field(default_factory=dict)  # of each tensor or number in the optimizer's state
    against_local: tuple[Difference, ...] = ()  # differences from the average of the ranks' own gradients
    wrapper_calls: int = 1  # how often the wrapper's forward ran
    inner_calls: int = 1  # how often the wrapped module's forward ran
    events: tuple[LoopEvent, ...] = ()  # what the loop did, in order
    # of each parameter that DDP knows, when the last backward pass had ended
    parameters_after_backward: Mapping[str, int] = field(default_factory=dict)

    @property
    def apart(self) -> bool:
        """Whether the communication hook averages over a part of the ranks only (post-local SGD)."""
        return any(event.kind == "apart" for event in self.events)


class ShardedStep(DdpStepEvidence, frozen=True):
    """One rank's step under `fully_shard` or tensor parallelism, where it has parts of parameters."""

    # differences of parameters, gathered after the step, from those that the optimizer leaves of whole parameters and
    # gradients; in proportion to its update
    against_whole: tuple[Difference, ...] = ()
    # differences of this rank's shards from those that it leaves of them as if they were the whole
    against_shard: tuple[Difference, ...] = ()
    uncompared: str = ""  # why there are none; empty where there are
    # the line that defines the optimizer's step, if the program does; else the recipe's optimizer
    updated_at: Location | None = None
    split: tuple[str, ...] = ()  # the parameters that tensor parallelism splits
    sharded: tuple[str, ...] = ()  # those of which ranks that compute other models have shards
    # under tensor parallelism, of this rank's part of each gradient as the optimizer has left it
    norms: Mapping[str, float] = field(default_factory=dict)
    loss: float | None = None  # likewise, the loss that this rank has computed; `None` where it is no plain number
    # before the first step, the norms of the state that the optimizer already has of this rank's parts, and the steps
    # that were counted for them
    loaded: Mapping[str, float] = field(default_factory=dict)

    @property
    def updated_alone(self) -> frozenset[str]:
        """The parameters of which the step has updated this rank's shard as if there were nothing else."""
        return frozenset(one.name for one in self.against_shard if not one.bad)


class CompiledStep(Struct, frozen=True):
    """One rank's step under the wrapper with `torch.compile` as the recipe asks for it."""

    rank: int
    step: int  # counted from 0
    gradients: Mapping[str, int] = field(default_factory=dict)  # fingerprint of each gradient after backward
    differences: tuple[Difference, ...] = ()  # from the average of the ranks' own gradients without compilation
    drew: bool = False  # whether random numbers were drawn: compiled code draws others
    compiled: tuple[FunctionCompiled, ...] = ()  # the functions that were compiled for it
