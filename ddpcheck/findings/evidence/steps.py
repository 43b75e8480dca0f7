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
        location: The line of the user's code at which that happened.
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
    def at(self) -> str:
        """The line in words, where it is known."""
        return f" at {self.location}" if self.location else ""


class UnregisteredTensor(Struct, frozen=True):
    """A leaf that receives gradient and is no parameter of the module that was wrapped.

    Attributes:
        name: The path to it from the module, or the name of a variable.
        shape: Of the tensor.
        location: The line that assigns it.
        created_in_forward: It is a parameter of the module by now, but the forward pass made it, after DDP had looked.
        kind: Of what holds it, in words ("global variable"), where that is not the module.
    """

    name: str
    shape: tuple[int, ...]
    location: Location | None = None
    created_in_forward: bool = False
    kind: str = ""


class ParameterChange(Struct, frozen=True):
    """A change that the forward pass has made to a parameter that DDP knows.

    Attributes:
        kind: "replaced", "removed", "frozen", "unfrozen" or "cast or moved".
        location: The line that did it.
        replacement: The parameter that DDP knows, too, and that stands in its place now; empty for a new one.
    """

    kind: str
    location: Location | None = None
    replacement: str = ""


class StepEvidence(Struct, frozen=True):
    """One rank's parameters in one step: which of them contribute to the loss.

    Attributes:
        rank: The rank.
        step: Counted from 0.
        states: By name, for every parameter that requires grad.
        path_ends: Why, for those that are missing or lost.
        unregistered: Leaves that receive gradient and are no parameters.
        arrivals: How often a gradient arrived, for parameters where that was more than once.
        hidden_from_ddp: Parameters that contribute, but that DDP cannot find from what `forward` returned.
        output_type: The class of what `forward` returned where DDP finds no tensor in it, else empty.
        reentrant: Whether a re-entrant checkpoint stood in the graph.
        changed: The parameters that this forward pass, or one before it, has changed.
    """

    rank: int
    step: int
    states: Mapping[str, GradientState]
    path_ends: Mapping[str, PathEnd] = field(default_factory=dict)
    unregistered: tuple[UnregisteredTensor, ...] = ()
    arrivals: Mapping[str, int] = field(default_factory=dict)
    hidden_from_ddp: tuple[str, ...] = ()
    output_type: str = ""
    reentrant: bool = False
    changed: Mapping[str, ParameterChange] = field(default_factory=dict)


class Call(Struct, frozen=True):
    """One collective that one rank entered.

    Attributes:
        operation: Its name in `torch.distributed`.
        group: Name of the process group.
        members: The ranks of the group.
        payload: Dtype and shape, and the root where there is one; empty where ranks may differ.
        place: What the rank was doing ("step 0: forward").
        location: The line of the user's code, as "path:line"; may be empty.
        elements: Of the floating-point tensor that goes in; what is logged usually has one.
        carries_gradient: Whether a tensor that requires grad went in.
        differentiable: Whether it was called by a custom autograd Function, which has a backward for it.
        callers: The lines of the program that have led to it, innermost first; empty where only `location` is known.
    """

    operation: str
    group: str
    members: tuple[int, ...]
    payload: str = ""
    place: str = ""
    location: str = ""
    elements: int = 0
    carries_gradient: bool = False
    differentiable: bool = False
    callers: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.operation}({self.payload}){f' at {self.location}' if self.location else ''}"


class ReductionInput(Struct, frozen=True):
    """The input of one reduction when every rank had the same samples and random numbers.

    Attributes:
        operation: Its name.
        location: The line of the user's code, as "path:line"; may be empty.
        values: In memory order; empty where there were too many to compare.
    """

    operation: str
    location: str = ""
    values: tuple[float, ...] = ()


class RandomDraws(Struct, frozen=True):
    """Random numbers of one forward pass.

    Attributes:
        libraries: From whose generators it drew.
        generator_state: Fingerprint of the state in which it has left torch's global generator; 0 where it did not draw
            from that.
        choices: The operations that choose among many at random, with their lines.
    """

    libraries: frozenset[str] = frozenset()
    generator_state: int = 0
    choices: tuple[str, ...] = ()


class LocalStep(Struct, frozen=True):
    """One rank's step on its shard, without the wrapper and its reducer.

    Attributes:
        evidence: Of the parameters.
        loss: Its value; with random numbers silenced where the forward pass draws some and can do without.
        random: What the forward pass drew.
        batch: Fingerprint of the global batch.
        samples: How many this rank has; 0 where that is not known.
        calls: Collectives since the start.
        norm: Of all gradients together.
        forward_calls: The collectives in the forward pass.
        buffers: Fingerprint of each buffer after the step.
        sample_fingerprints: Of each sample of this rank; empty where they cannot be told apart.
        global_sample_fingerprints: Of each sample of the global batch, on rank 0.
        backwards: The user's own backward passes in the step, and the last one.
        threads: With how many of them torch has computed it.
        compiles: Whether the user's code has asked for `torch.compile` so far.
        layout: Digest of what DDP takes to be alike on all ranks: names, shapes, dtypes and `requires_grad`.
    """

    evidence: StepEvidence
    loss: float
    random: RandomDraws
    batch: tuple[int, ...]
    samples: int
    calls: int
    norm: float
    forward_calls: tuple[Call, ...]
    buffers: Mapping[str, int] = field(default_factory=dict)
    sample_fingerprints: tuple[int, ...] = ()
    global_sample_fingerprints: tuple[int, ...] = ()
    backwards: int = 1
    threads: int = 1
    compiles: bool = False
    layout: str = ""

    def explained(self, ends: Mapping[str, PathEnd]) -> LocalStep:
        """The same with the reasons why gradients are missing."""
        return replace(self, evidence=replace(self.evidence, path_ends={**self.evidence.path_ends, **ends}))


class NoExplanation(Struct, frozen=True):
    """A rank's answer where an explanation could not be found; the check goes on without it.

    Attributes:
        reason: The error that stood in the way.
        bug: The sentence that asks to report it, where it is a bug of ddpcheck; else empty.
        detail: The traceback.
    """

    reason: str
    bug: str = ""
    detail: str = ""


SYNC_SETTING = "require_backward_grad_sync"
"""The attribute of a wrapper by which a forward pass decides whether the next backward pass is averaged."""


class LoopEvent(Struct, frozen=True):
    """One call of the training loop in a step under the wrapper.

    Attributes:
        kind: "forward" (of the wrapper), "backward", "reduction" (has ended), "no_sync" (called), "enter no_sync",
            "leave no_sync", "zero_grad", "step" (of an optimizer, on what the backward passes before it have left) or
            "apart" (gradients are averaged over a part of the ranks only, by the communication hook); a
            backward pass around the wrapper is "forward inside" (of the module in it, which is called) or "backward
            inside" (of the wrapper's forward). Last comes SYNC_SETTING, with the one line that assigns it.
        location: The line of the user's code, as "path:line"; empty where ddpcheck itself did it.
        synchronises: Of a forward: whether DDP will average the gradients of the next backward.
        discarded: Of a `zero_grad`: the parameters whose gradients go before anybody has used them; empty where not all
            that are there go so.
        others: Of a backward: whether leaves that are no parameters get gradients too.
        resting: Of a `zero_grad`: whether the rate of all that the optimizer holds is zero, as in a warm-up.
        spares_unreduced: Of a step: whether it uses nothing that was not reduced, although some was there.
    """

    kind: str
    location: str = ""
    synchronises: bool = False
    discarded: tuple[str, ...] = ()
    others: bool = False
    resting: bool = False
    spares_unreduced: bool = False


class SharedDraw(Struct, frozen=True):
    """A random tensor with a value for each sample, for which two ranks drew the same numbers."""

    operation: str
    module: str = ""
    location: Location | None = None
    fingerprint: int = 0


class DdpStepEvidence(Struct, frozen=True):
    """One rank's step under the wrapper.

    Attributes:
        rank: The rank.
        step: Counted from 0.
        gradients: Fingerprint of each gradient after backward.
        parameters: Fingerprint of each parameter after the optimizer's step.
        parameters_before_optimizer: Of each parameter that the module has after backward, before the optimizer's step.
        parameters_after_backward: Of each parameter that DDP knows, when the last backward pass had ended.
        buffers: Fingerprint of each buffer after the step.
        state: Of each unregistered tensor that was there before the first step.
        new_state: Of each unregistered tensor that a step has made.
        optimizer: Of each tensor or number in the optimizer's state.
        against_local: Differences from the average of the ranks' own gradients.
        wrapper_calls: How often the wrapper's forward ran.
        inner_calls: How often the wrapped module's forward ran.
        events: What the loop did, in order.
    """

    rank: int
    step: int
    gradients: Mapping[str, int] = field(default_factory=dict)
    parameters: Mapping[str, int] = field(default_factory=dict)
    parameters_before_optimizer: Mapping[str, int] = field(default_factory=dict)
    buffers: Mapping[str, int] = field(default_factory=dict)
    state: Mapping[str, int] = field(default_factory=dict)
    new_state: Mapping[str, int] = field(default_factory=dict)
    optimizer: Mapping[str, int] = field(default_factory=dict)
    against_local: tuple[Difference, ...] = ()
    wrapper_calls: int = 1
    inner_calls: int = 1
    events: tuple[LoopEvent, ...] = ()
    parameters_after_backward: Mapping[str, int] = field(default_factory=dict)

    @property
    def apart(self) -> bool:
        """Whether the communication hook averages over a part of the ranks only (post-local SGD)."""
        return any(event.kind == "apart" for event in self.events)


class ShardedStep(DdpStepEvidence, frozen=True):
    """One rank's step under `fully_shard` or tensor parallelism, where it has parts of parameters.

    Attributes:
        against_whole: Differences of parameters, gathered after the step, from those that the optimizer leaves of whole
            parameters and gradients; in proportion to its update.
        against_shard: Differences of this rank's shards from those that it leaves of them as if they were the whole.
        uncompared: Why there are none; empty where there are.
        updated_at: The line that defines the optimizer's step, if the program does; else the recipe's optimizer.
        split: The parameters that tensor parallelism splits.
        sharded: Those of which ranks that compute other models have shards.
        norms: Under tensor parallelism, of this rank's part of each gradient as the optimizer has left it.
        loss: Likewise, the loss that this rank has computed; `None` where it is no plain number.
        loaded: Before the first step, the norms of the state that the optimizer already has of this rank's parts, and
            the steps that were counted for them.
    """

    against_whole: tuple[Difference, ...] = ()
    against_shard: tuple[Difference, ...] = ()
    uncompared: str = ""
    updated_at: Location | None = None
    split: tuple[str, ...] = ()
    sharded: tuple[str, ...] = ()
    norms: Mapping[str, float] = field(default_factory=dict)
    loss: float | None = None
    loaded: Mapping[str, float] = field(default_factory=dict)

    @property
    def updated_alone(self) -> frozenset[str]:
        """The parameters of which the step has updated this rank's shard as if there were nothing else."""
        return frozenset(one.name for one in self.against_shard if not one.bad)


class CompiledStep(Struct, frozen=True):
    """One rank's step under the wrapper with `torch.compile` as the recipe asks for it.

    Attributes:
        rank: The rank.
        step: Counted from 0.
        gradients: Fingerprint of each gradient after backward.
        differences: From the average of the ranks' own gradients without compilation.
        drew: Whether random numbers were drawn: compiled code draws others.
        compiled: The functions that were compiled for it.
    """

    rank: int
    step: int
    gradients: Mapping[str, int] = field(default_factory=dict)
    differences: tuple[Difference, ...] = ()
    drew: bool = False
    compiled: tuple[FunctionCompiled, ...] = ()
