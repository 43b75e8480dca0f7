"""Evidence: what ranks and reference runs tell, as plain data. Gathered with torch, judged and shown without it.

This module is light: it never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ddpcheck.findings.report import Location

# Before wrapping


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A parameter or buffer, without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    requires_grad: bool
    device: str


@dataclass(frozen=True, slots=True)
class ModuleDescription:
    """What one rank's module looks like.

    Attributes:
        parameters: In registration order, which is the order in which DDP pairs them.
        buffers: Likewise.
        ties: The names of each parameter that has several.
        modules: Name, class, options in the words of `extra_repr`, and training mode of each submodule.
        state: Name, shape and fingerprint of tensors that are held without being registered.
        uninitialised: Names of lazy parameters and buffers that have no shape yet.
    """

    parameters: tuple[TensorRecord, ...] = ()
    buffers: tuple[TensorRecord, ...] = ()
    ties: tuple[tuple[str, ...], ...] = ()
    modules: tuple[tuple[str, str, str, bool], ...] = ()
    state: tuple[tuple[str, tuple[int, ...], int], ...] = ()
    uninitialised: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Built:
    """What a rank says of its module before it is wrapped."""

    digest: str
    uninitialised: tuple[str, ...]
    trainable: int
    parameters: int


@dataclass(frozen=True, slots=True)
class Wrapped:
    """What a rank says after wrapping.

    Attributes:
        facts: What the wrapper was told.
        options: Of the wrapper, in words.
        optimizer: Of the optimizer, in words.
        parameters: Fingerprint of each parameter.
        buffers: Of each buffer.
        loss_location: The line that defines the loss.
        wrapper: Its class.
        broadcasts_buffers: Whether the wrapper broadcasts buffers before a forward.
        changed: What happened to parameters since DDP was constructed, in words.
        constructed: Fingerprint of each parameter when DDP had been constructed; empty for another wrapper.
        reshaped: Whether `wrap` has made another module of it, with parameters of other names or shapes.
        not_handed_over: Why the single process cannot have that module.
        strange: How many tensors the optimizer holds that are no parameters of the module.
        lacking: Parameters that require grad and that no group of the optimizer holds.
        hooks: What the recipe's `wrap` puts in the way of gradients.
    """

    facts: WrapperFacts
    options: Mapping[str, str]
    optimizer: Mapping[str, str]
    parameters: Mapping[str, int]
    buffers: Mapping[str, int]
    loss_location: Location | None
    wrapper: str
    broadcasts_buffers: bool
    changed: Mapping[str, str] = field(default_factory=dict)
    constructed: Mapping[str, int] = field(default_factory=dict)
    reshaped: bool = False
    not_handed_over: str = ""
    strange: int = 0
    lacking: tuple[str, ...] = ()
    hooks: tuple[GradientHook, ...] = ()


# The forward pass and the parameters


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
        region: The line that switched gradients off, where that is what cut the path.
    """

    cause: str
    reason: str = ""
    location: Location | None = None
    module: str = ""
    region: Location | None = None


GradientState = Literal["contributes", "zero", "missing", "lost"]
"""`missing`: backward does not reach the parameter. `lost`: it does, and no gradient arrived."""


@dataclass(frozen=True, slots=True)
class Unregistered:
    """A leaf that receives gradient and is no parameter of the module that was wrapped.

    `late`: it is one by now, but the forward pass made it, and DDP has not heard of it. `kind`: of what holds it, in
    words ("global variable"), where that is not the module.
    """

    name: str
    shape: tuple[int, ...]
    location: Location | None = None
    late: bool = False
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Changed:
    """What the forward pass has done to a parameter that DDP knows.

    Attributes:
        what: "replaced", "removed", "frozen", "unfrozen" or "cast or moved".
        location: The line that did it.
        by: The parameter that DDP knows, too, and that stands in its place now; empty for a new one.
    """

    what: str
    location: Location | None = None
    by: str = ""


@dataclass(frozen=True, slots=True)
class StepEvidence:
    """What one rank saw in one step.

    Attributes:
        rank: The rank.
        step: Counted from 0.
        states: By name, for every parameter that requires grad.
        ends: Why, for those that are missing or lost.
        unregistered: Leaves that receive gradient and are no parameters.
        arrivals: How often a gradient arrived, for parameters where that was more than once.
        invisible: Parameters that contribute, but that DDP cannot find from what `forward` returned.
        output_type: The class of what `forward` returned where DDP finds no tensor in it, else empty.
        reentrant: Whether a re-entrant checkpoint stood in the graph.
        changed: The parameters that this forward pass, or one before it, has changed.
    """

    rank: int
    step: int
    states: Mapping[str, GradientState]
    ends: Mapping[str, PathEnd] = field(default_factory=dict)
    unregistered: tuple[Unregistered, ...] = ()
    arrivals: Mapping[str, int] = field(default_factory=dict)
    invisible: tuple[str, ...] = ()
    output_type: str = ""
    reentrant: bool = False
    changed: Mapping[str, Changed] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WrapperFacts:
    """What the wrapper was told.

    Attributes:
        is_ddp: False for a wrapper that is no `DistributedDataParallel`.
        find_unused_parameters: The option of that name.
        static_graph: Likewise.
        ignored: Parameters that it was told to ignore.
        delayed: Parameters named in `delay_all_reduce_named_params`.
        comm_hook: Name of the communication hook, and its line where it is the user's; empty without one.
        sparse: Parameters whose gradient is sparse.
    """

    is_ddp: bool = True
    find_unused_parameters: bool = False
    static_graph: bool = False
    ignored: frozenset[str] = frozenset()
    delayed: frozenset[str] = frozenset()
    comm_hook: str = ""
    sparse: frozenset[str] = frozenset()

    @property
    def tolerates_unused(self) -> bool:
        """Whether a parameter that never takes part does not stop training."""
        return self.find_unused_parameters or self.static_graph


@dataclass(frozen=True, slots=True)
class Call:
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

    def __str__(self) -> str:
        return f"{self.operation}({self.payload}){f' at {self.location}' if self.location else ''}"


@dataclass(frozen=True, slots=True)
class LocalStep:
    """What one rank saw in its own step, without the reducer.

    Attributes:
        evidence: Of the parameters.
        loss: Its value; with random numbers silenced where the forward pass draws some and can do without.
        drew: The libraries from whose generators the forward pass drew random numbers.
        batch: Fingerprint of the global batch.
        samples: How many this rank has; 0 where that is not known.
        calls: Collectives since the start.
        norm: Of all gradients together.
        forward_calls: The collectives in the forward pass.
        buffers: Fingerprint of each buffer after the step.
        rows: Fingerprint of each sample of this rank; empty where they cannot be told apart.
        all_rows: Of each sample of the global batch, on rank 0.
        backwards: The user's own backward passes in the step, and the last one.
        generator: Fingerprint of the state in which the forward pass has left torch's global generator.
        threads: With how many of them torch has computed it.
        compiles: Whether the user's code has asked for `torch.compile` so far.
        layout: Digest of what DDP takes to be alike on all ranks: names, shapes, dtypes and `requires_grad`.
        choices: The random operations of the forward pass that choose among many, with their lines.
    """

    evidence: StepEvidence
    loss: float
    drew: frozenset[str]
    batch: tuple[int, ...]
    samples: int
    calls: int
    norm: float
    forward_calls: tuple[Call, ...]
    buffers: Mapping[str, int] = field(default_factory=dict)
    rows: tuple[int, ...] = ()
    all_rows: tuple[int, ...] = ()
    backwards: int = 1
    generator: int = 0
    threads: int = 1
    compiles: bool = False
    layout: str = ""
    choices: tuple[str, ...] = ()

    def explained(self, ends: Mapping[str, PathEnd]) -> LocalStep:
        """The same with the reasons why gradients are missing."""
        return replace(self, evidence=replace(self.evidence, ends={**self.evidence.ends, **ends}))


@dataclass(frozen=True, slots=True)
class Unexplained:
    """What a rank answers where it could not find out what would only have explained something.

    Attributes:
        said: What stood in the way.
        bug: The sentence that asks to report it, where it is a bug of ddpcheck; else empty.
        detail: The traceback.
    """

    said: str
    bug: str = ""
    detail: str = ""


# Gradients


@dataclass(frozen=True, slots=True)
class Difference:
    """How one gradient differs from its reference.

    Attributes:
        name: Of the parameter.
        error: Norm of the difference over the scale of the reference.
        tolerance: What `error` may be.
        ratio: The factor c for which c * reference is nearest; measured only beyond the tolerance.
        residual: What is left of `error` with that factor.
        elements: How many there are.
        beyond: How many of them differ by more than their share of the tolerance.
        worst_index: Of the element that differs most.
        worst_got: Its value.
        worst_want: Its value in the reference.
        distance: Norm of the difference.
        size: Norm of the reference.
    """

    name: str
    error: float
    tolerance: float
    ratio: float = 1.0
    residual: float = 0.0
    elements: int = 0
    beyond: int = 0
    worst_index: tuple[int, ...] = ()
    worst_got: float = 0.0
    worst_want: float = 0.0
    distance: float = 0.0
    size: float = 0.0

    @property
    def bad(self) -> bool:
        """Whether the error is larger than it may be."""
        return not self.error <= self.tolerance

    def tell(self) -> str:
        """One line for a person."""
        text = f"{self.name}: relative error {self.error:.2g}, allowed {self.tolerance:.2g}"
        if self.worst_index or self.beyond:
            where = f" at {self.worst_index}" if self.worst_index else ""
            text += f"; {self.beyond} of {self.elements} elements, worst{where}: "
            text += f"{self.worst_got:.4g}, should be {self.worst_want:.4g}"
        return text


@dataclass(frozen=True, slots=True)
class LoopEvent:
    """One thing that happened in a step under the wrapper.

    Attributes:
        kind: "forward" (of the wrapper), "backward", "no_sync" (called), "enter no_sync", "leave no_sync",
            "zero_grad" or "step" (of an optimizer, on what the backward passes before it have left).
        location: The line of the user's code, as "path:line"; empty where ddpcheck itself did it.
        synchronises: Of a forward: whether DDP will average the gradients of the next backward.
        lost: Of a `zero_grad`: the parameters whose gradients go before anybody has used them.
    """

    kind: str
    location: str = ""
    synchronises: bool = False
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GradientHook:
    """A place in the user's code at which gradients may be changed on their way."""

    what: str
    location: Location | None = None

    def __str__(self) -> str:
        return f"{self.what}{f' at {self.location}' if self.location else ''}"


@dataclass(frozen=True, slots=True)
class Repeated:
    """What a rank found when it ran a step again.

    Attributes:
        differences: From itself, run a second time.
        nonlinear: Parameters whose gradient does not double with the loss: something on its way changes it.
        hooks: What the user's code has put in its way.
    """

    differences: tuple[Difference, ...] = ()
    nonlinear: tuple[str, ...] = ()
    hooks: tuple[GradientHook, ...] = ()


@dataclass(frozen=True, slots=True)
class SharedDraw:
    """A random tensor with a value for each sample, for which two ranks drew the same numbers."""

    operation: str
    module: str = ""
    location: Location | None = None
    fingerprint: int = 0


@dataclass(frozen=True, slots=True)
class DdpStepEvidence:
    """What one rank saw in one step under the wrapper.

    Attributes:
        rank: The rank.
        step: Counted from 0.
        gradients: Fingerprint of each gradient after backward.
        parameters: Of each parameter after the optimizer's step.
        computed_with: Of each parameter before it, after backward.
        buffers: Of each buffer after the step.
        state: Of each unregistered tensor that was there before the first step.
        late_state: Of each that a step has made.
        optimizer: Of each tensor or number in the optimizer's state.
        against_local: Differences from the average of the ranks' own gradients.
        wrapper_calls: How often the wrapper's forward ran.
        inner_calls: How often the wrapped module's forward ran.
        events: What the loop did, in order.
        before: Fingerprint of each parameter when the last backward pass had ended, before the optimizer's step.
    """

    rank: int
    step: int
    gradients: Mapping[str, int] = field(default_factory=dict)
    parameters: Mapping[str, int] = field(default_factory=dict)
    computed_with: Mapping[str, int] = field(default_factory=dict)
    buffers: Mapping[str, int] = field(default_factory=dict)
    state: Mapping[str, int] = field(default_factory=dict)
    late_state: Mapping[str, int] = field(default_factory=dict)
    optimizer: Mapping[str, int] = field(default_factory=dict)
    against_local: tuple[Difference, ...] = ()
    wrapper_calls: int = 1
    inner_calls: int = 1
    events: tuple[LoopEvent, ...] = ()
    before: Mapping[str, int] = field(default_factory=dict)


LOOSEST_FIT = 0.05
"""A pattern explains a difference when it leaves less than this share of it (and the rest is rounding)."""


@dataclass(frozen=True, slots=True)
class LossTerm:
    """One term of the loss, on the global batch and on the shards one by one.

    Its errors are relative to the gradient of the whole loss, every parameter measured by its own scale.

    Attributes:
        name: Of the tensor that the recipe's loss returned ("loss['penalty']"), where there are several.
        location: The line that computes the term, where it is known.
        error: How far the shards' gradients, as the ranks weigh them, are from the global batch's.
        weights: Of the shards, for which the sum of their gradients is nearest to the global batch's.
        residual: What they leave of `error`.
        rank_weights: Of the shards in the ranks' average; empty where the ranks take the mean, or that is not known.
        ratio: The factor that this term's gradient has in the ranks' average, all terms taken together.
        summed: Whether it doubles when every sample is in the batch twice.
        count: What it is divided by, where that is found in the batch ("batch['labels'] != -100").
        counts: Its value on each rank.
        coupled: Whether its gradient for some samples depends on what the model computes for others; None where that
            could not be tried.
    """

    name: str = ""
    location: Location | None = None
    error: float = 0.0
    weights: tuple[float, ...] = ()
    residual: float = 0.0
    rank_weights: tuple[float, ...] = ()
    ratio: float = 1.0
    summed: bool = False
    count: str = ""
    counts: tuple[float, ...] = ()
    coupled: bool | None = None

    @property
    def is_sum(self) -> bool:
        """Whether the gradients of the shards add up to the global batch's."""
        return bool(self.weights) and all(math.isclose(weight, 1.0, rel_tol=1e-3) for weight in self.weights)

    @property
    def is_normalised(self) -> bool:
        """Whether it is a sum, or a mean over some count: then the weights of the shards are their shares of it."""
        fits = self.residual <= max(LOOSEST_FIT * self.error, 1e-9)
        return fits and (self.is_sum or bool(self.count) or math.isclose(sum(self.weights), 1.0, rel_tol=1e-2))


@dataclass(frozen=True, slots=True)
class CompiledStep:
    """What one rank saw in one step under the wrapper as the recipe compiles it; all else is run as it is written.

    Attributes:
        rank: The rank.
        step: Counted from 0.
        gradients: Fingerprint of each gradient after backward.
        differences: From the average of the ranks' own gradients without compilation.
        drew: Whether random numbers were drawn: compiled code draws others.
    """

    rank: int
    step: int
    gradients: Mapping[str, int] = field(default_factory=dict)
    differences: tuple[Difference, ...] = ()
    drew: bool = False


@dataclass(frozen=True, slots=True)
class ShardAnalysis:
    """What the single process says of the shards, one by one, asked for only when the global batch differs.

    Without `terms` the shards could not be run, and only what is called global is known.

    Attributes:
        terms: Of the loss, in order.
        terms_residual: What the terms' `ratio` leave of the difference between the ranks' average and the global
            batch's gradient, relative.
        frozen: Modules whose batch statistics were fixed while the terms were looked at, since they couple all samples.
        world_ratio: Factor between the ranks' average gradient and the mean of the shards' gradients.
        world_residual: What that factor leaves, relative.
        world_rounding: What the shards' gradients lose to rounding in the module's own dtype, relative.
        global_ratio: Factor between the ranks' average gradient and the global batch's.
        global_residual: What that factor leaves, relative.
        rank_weights: For which the weighted sum of the shards' gradients is nearest to the ranks' average.
        rank_residual: What that leaves, relative.
        shard_losses: The loss on each shard.
        global_loss: The loss on the global batch.
        module: The first module whose output for a sample depends on the other samples; empty for the model itself.
        module_class: Its class; empty if there is none.
        line: The line of the user's code at which samples first meet, where there is one.
        scaled: Whether what that line gives is only scaled by the other samples, as by their number.
        rounded: The gradients that differ from the global batch's by rounding alone.
        trouble: Why the shards could not be run one by one, or why that could not be explained further.
    """

    terms: tuple[LossTerm, ...] = ()
    terms_residual: float = 1.0
    frozen: tuple[str, ...] = ()
    world_ratio: float = 1.0
    world_residual: float = 1.0
    world_rounding: float = 0.0
    global_ratio: float = 1.0
    global_residual: float = 1.0
    rank_weights: tuple[float, ...] = ()
    rank_residual: float = 1.0
    shard_losses: tuple[float, ...] = ()
    global_loss: float = 0.0
    module: str = ""
    module_class: str = ""
    line: Location | None = None
    scaled: bool = False
    rounded: tuple[str, ...] = ()
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class SingleStep:
    """What one step of the single process says.

    Attributes:
        loss: Of the global batch.
        norm: Of all gradients together.
        batch: Fingerprint of the batch.
        again: Fingerprint of the batch made a second time (first step only).
        draws: Whether the forward pass draws random numbers.
        double_trouble: Why there is no float64 run, empty when there is one.
        backwards: The user's own backward passes in the step, and the last one.
    """

    loss: float
    norm: float
    batch: tuple[int, ...]
    again: tuple[int, ...]
    draws: bool
    double_trouble: str
    backwards: int = 1


# What may differ between ranks without DDP noticing


@dataclass(frozen=True, slots=True)
class Packed:
    """What went into one reduction when every rank had the same samples and random numbers.

    Attributes:
        operation: Its name.
        location: The line of the user's code, as "path:line"; may be empty.
        values: In memory order; empty where there were too many to compare.
    """

    operation: str
    location: str = ""
    values: tuple[float, ...] = ()
