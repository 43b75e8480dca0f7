"""Evidence on training steps with and without the wrapper: gradients and collectives."""

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
"""`missing`: backward does not reach the parameter. `lost`: backward reaches it, but no gradient arrives."""


@dataclass(frozen=True, slots=True)
class PathEnd:
    """Point at which a parameter's path to the loss ends, with the cause."""

    # `unused` (no operation reads the parameter), `unreachable` (no result reaches the loss), `cut` (the value of the
    # loss depends on the parameter, but the path left autograd), `lost` (backward returned None on the path), `zero`
    # (an operation on the path turns every gradient into zeros), or `unknown`
    cause: str
    # operation that cut the path ("detach()", "torch.no_grad()", "argmax(), which is not differentiable"), or the last
    # operation on the path
    reason: str = ""
    location: Location | None = None  # line of the operation; of `unused`, the branch that may skip the parameter
    module: str = ""  # module whose forward was running; "" at the top
    no_grad_location: Location | None = None  # line that disabled gradients, if the cause of the cut
    # operations from the parameter to the end of the path; only the first and last of a long path
    steps: tuple[PathStep, ...] = added((), compare=False)
    left_out: int = added(0, compare=False)  # number of operations missing in `steps`

    def path_of(self, parameter: str) -> ParameterPath | None:
        """Return the path from `parameter` to this end, or None if operations are unknown."""
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
        """Line to edit, if known."""
        return self.no_grad_location or self.location

    @property
    def at(self) -> str:
        """Line as text, such as " at train.py:3"; "" if unknown."""
        return f" at {self.location}" if self.location else ""


class UnregisteredTensor(Struct, frozen=True):
    """Leaf tensor with a gradient that is not a parameter of the wrapped module."""

    name: str  # path from the module, or name of a variable
    shape: tuple[int, ...]
    location: Location | None = None  # line that assigns the tensor
    created_in_forward: bool = False  # True if registered as a parameter by forward, after DDP was constructed
    kind: str = ""  # holder in words ("global variable"), if not the module


class ParameterChange(Struct, frozen=True):
    """Change that the forward pass makes to a parameter of DDP."""

    kind: str  # "replaced", "removed", "frozen", "unfrozen" or "cast or moved"
    location: Location | None = None  # line of the change
    replacement: str = ""  # other parameter of DDP that is registered instead; "" for a new parameter


class StepEvidence(Struct, frozen=True):
    """Parameters of one rank in one step, by contribution to the loss."""

    rank: int
    step: int  # counted from 0
    states: Mapping[str, GradientState]  # by name, for every parameter that requires grad
    path_ends: Mapping[str, PathEnd] = field(default_factory=dict)  # reasons, for missing and lost
    unregistered: tuple[UnregisteredTensor, ...] = ()  # leaves that receive a gradient and are not parameters
    arrivals: Mapping[str, int] = field(default_factory=dict)  # number of gradient arrivals, if more than one
    hidden_from_ddp: tuple[str, ...] = ()  # contributing parameters that DDP cannot find from the output of `forward`
    output_type: str = ""  # class of the output of `forward` if DDP finds no tensor there, else ""
    reentrant: bool = False  # True if the graph has a re-entrant checkpoint
    # parameters changed by this or an earlier forward pass
    changed: Mapping[str, ParameterChange] = field(default_factory=dict)


class Call(Struct, frozen=True):
    """Collective that one rank entered."""

    operation: str  # name in `torch.distributed`
    group: str  # name of the process group
    members: tuple[int, ...]  # ranks of the group
    # dtype and shape, the reduction if not a sum, the root if any; "" if ranks may differ
    payload: str = ""
    place: str = ""  # phase of the rank ("step 0: forward")
    location: str = ""  # line of user code, as "path:line"; may be empty
    elements: int = 0  # of the floating-point input; logged metrics usually have one element
    carries_gradient: bool = False  # True if an input tensor requires grad
    differentiable: bool = False  # True if called by a custom autograd Function, which has a backward
    callers: tuple[str, ...] = ()  # program lines of the stack, innermost first; empty if only `location` is known
    group_words: str = ""  # description of the group: "the process group of train.py:12"; "" if unknown
    thread: str = ""  # name of the calling thread; "" for the main thread

    def __str__(self) -> str:
        return f"{self.operation}({self.payload}){f' at {self.location}' if self.location else ''}"


class ReductionInput(Struct, frozen=True):
    """Reduction input when every rank uses equal samples and seeds: ranks should agree."""

    operation: str  # name of the reduction
    location: str = ""  # line of user code, as "path:line"; may be empty
    values: tuple[float, ...] = ()  # in memory order; empty if too many to compare


class RandomDraws(Struct, frozen=True):
    """Random draws of one forward pass."""

    libraries: frozenset[str] = frozenset()  # libraries whose generators were used
    generator_state: int = 0  # fingerprint of torch's global generator after the pass; 0 if not used
    choices: tuple[str, ...] = ()  # operations that choose at random among many, with lines


class LocalStep(Struct, frozen=True):
    """Step of one rank on its shard of the batch, without the DDP wrapper."""

    evidence: StepEvidence  # of the parameters
    loss: float  # with random numbers silenced if the forward pass draws some and can run without
    random: RandomDraws  # of the forward pass
    batch: tuple[int, ...]  # fingerprint of the global batch
    samples: int  # number of samples of this rank; 0 if unknown
    calls: int  # collectives since the start
    norm: float  # of all gradients together
    forward_calls: tuple[Call, ...]  # collectives in the forward pass
    buffers: Mapping[str, int] = field(default_factory=dict)  # fingerprint of each buffer after the step
    sample_fingerprints: tuple[int, ...] = ()  # of each sample of this rank; empty if samples are not separable
    global_sample_fingerprints: tuple[int, ...] = ()  # of each sample of the global batch, on rank 0
    backwards: int = 1  # backward passes of the user in the step, plus the last one
    threads: int = 1  # number of torch threads
    compiles: bool = False  # True if user code has used `torch.compile` so far
    layout: str = ""  # digest of names, shapes, dtypes and `requires_grad`, which DDP assumes equal on all ranks

    def explained(self, ends: Mapping[str, PathEnd]) -> LocalStep:
        """Return a copy in which `ends` give reasons for missing gradients."""
        return replace(self, evidence=replace(self.evidence, path_ends={**self.evidence.path_ends, **ends}))


class NoExplanation(Struct, frozen=True):
    """Failure of a phase that only explains a fault; the check continues without it."""

    reason: str  # the error
    bug: str = ""  # request to report a bug of ddpcheck, else ""
    detail: str = ""  # traceback


SYNC_SETTING = "require_backward_grad_sync"
"""Attribute of a wrapper that decides, at a forward pass, if the next backward pass is averaged."""


class LoopEvent(Struct, frozen=True):
    """Call that the training loop makes in a step with the wrapper."""

    # "forward" (of the wrapper), "backward", "reduction" (ended), "no_sync" (called), "enter no_sync", "leave no_sync",
    # "zero_grad", "step" (of an optimizer, on gradients of the backward passes before) or "apart" (the communication
    # hook averages gradients over some ranks only). If a backward pass bypasses the wrapper: "forward inside" (of the
    # inner module) or "backward inside" (in the forward of the wrapper). Last: SYNC_SETTING, with the only line that
    # assigns the attribute
    kind: str
    location: str = ""  # line of user code, as "path:line"; "" if called by ddpcheck
    synchronises: bool = False  # of a forward: True if DDP averages the gradients of the next backward
    # of a `zero_grad`: parameters whose gradients are zeroed before use; empty if any gradient was used
    discarded: tuple[str, ...] = ()
    others: bool = False  # of a backward: True if leaves that are not parameters get gradients too
    resting: bool = False  # of a `zero_grad`: True if the learning rate of the whole optimizer is zero (warm-up)
    spares_unreduced: bool = False  # of a step: True if some gradients were not reduced, and none of them is used
    in_a_row: int = 0  # of a `zero_grad`: optimizer steps in a row before which gradients were discarded; 0 if unknown


class SharedDraw(Struct, frozen=True):
    """Per-sample random tensor drawn in forward; ranks with the same seed draw equal tensors."""

    operation: str
    module: str = ""
    location: Location | None = None
    fingerprint: int = 0


class DdpStepEvidence(Struct, frozen=True):
    """Step of one rank under the wrapper."""

    rank: int
    step: int  # counted from 0
    gradients: Mapping[str, int] = field(default_factory=dict)  # fingerprint of each gradient after backward
    parameters: Mapping[str, int] = field(default_factory=dict)  # fingerprint of each parameter after the step
    # fingerprint of each parameter of the module after backward, before the optimizer step
    parameters_before_optimizer: Mapping[str, int] = field(default_factory=dict)
    buffers: Mapping[str, int] = field(default_factory=dict)  # fingerprint of each buffer after the step
    # fingerprint of each unregistered tensor that existed before the first step
    state: Mapping[str, int] = field(default_factory=dict)
    new_state: Mapping[str, int] = field(default_factory=dict)  # of each unregistered tensor created by a step
    optimizer: Mapping[str, int] = field(default_factory=dict)  # of each tensor or number in the optimizer state
    against_local: tuple[Difference, ...] = ()  # differences from the average of the ranks' own gradients
    wrapper_calls: int = 1  # forward passes of the wrapper
    inner_calls: int = 1  # forward passes of the wrapped module
    events: tuple[LoopEvent, ...] = ()  # calls of the loop, in order
    # fingerprint of each parameter of DDP after the last backward pass
    parameters_after_backward: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_local_sgd(self) -> bool:
        """True if the communication hook averages over some ranks only (post-local SGD)."""
        return any(event.kind == "apart" for event in self.events)


class ShardedStep(DdpStepEvidence, frozen=True):
    """Step of one rank under `fully_shard` or tensor parallelism."""

    # differences of the gathered parameters from an optimizer step on whole parameters and gradients, relative to the
    # update
    against_whole: tuple[Difference, ...] = ()
    # differences of this rank's shards from an optimizer step that treats each shard as a whole parameter
    against_shard: tuple[Difference, ...] = ()
    uncompared: str = ""  # why there are no differences, else ""
    updated_at: Location | None = None  # line of the optimizer's step if in the program, else of the recipe's optimizer
    split: tuple[str, ...] = ()  # parameters that tensor parallelism splits
    sharded: tuple[str, ...] = ()  # parameters sharded across ranks of other models
    # under tensor parallelism: norm of this rank's part of each gradient after the optimizer step
    norms: Mapping[str, float] = field(default_factory=dict)
    loss: float | None = None  # under tensor parallelism: loss of this rank; `None` if no plain number
    # before the first step: norms of existing optimizer state of this rank's parts, and step counts
    loaded: Mapping[str, float] = field(default_factory=dict)

    @property
    def updated_per_shard(self) -> frozenset[str]:
        """Parameters whose shard the optimizer updated as if the shard were the whole parameter."""
        return frozenset(difference.name for difference in self.against_shard if not difference.bad)


class CompiledStep(Struct, frozen=True):
    """Step of one rank under the wrapper with the `torch.compile` of the recipe."""

    rank: int
    step: int  # counted from 0
    gradients: Mapping[str, int] = field(default_factory=dict)  # fingerprint of each gradient after backward
    differences: tuple[Difference, ...] = ()  # from the average of the ranks' own gradients without compilation
    drew: bool = False  # True if random numbers were drawn, which differ in compiled code
    compiled: tuple[FunctionCompiled, ...] = ()  # functions compiled for the step
