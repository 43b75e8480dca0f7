"""Evidence on a script's training loop, by rank: changes, compilation, random draws, gathers."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from ddpcheck.findings.evidence import Entry
from ddpcheck.findings.report import Location

OF_A_COPY = -1  # `wrapper` of a copy of a wrapped module


class ModuleChanged(Entry, frozen=True):
    """Line of the script that may change parameters or buffers of a wrapped module."""

    wrapper: int  # number of the wrapper; `OF_A_COPY` for a copy, with the name in `names`
    # "values" (loaded, or set by an applied function), "written" (in place or as `.data`, outside an optimizer step),
    # "buffer" (changed value), "requires_grad", "parameters" (other parameters are registered), "mode" (to evaluation),
    # "scale" (divisor of a reduction), "hook" (`register_comm_hook`), "stepped" (by an optimizer during backward),
    # "ignored" (`.data` of a shard was assigned, without effect), "replaced" (a shard was replaced by a parameter that
    # `fully_shard` does not gather), or "module" (a module with shards was replaced by a module without)
    what: str
    how: str  # name of the call or the assigned attribute
    names: tuple[str, ...]  # of parameters, empty if unknown; for "mode", of the submodule
    location: Location | None  # line of the script
    forwards: int = 0  # forward passes of the wrapper before
    step: int = 0  # averaged backward passes before


class ScheduleState(Struct, frozen=True):
    """Learning rate schedule of an optimizer."""

    built_at: Location | None  # line that constructs the schedule
    steps: int = 0  # number of steps
    location: Location | None = None  # line of the first step
    by_package: bool = False  # True if an installed package steps the schedule, not the script
    turns: int = 0  # number of steps that were the first after a backward pass or optimizer step
    ends: tuple[int, int] = (0, 0)  # steps after which the rate is constant, and after which the rate is lowest
    # True if the source steps once per rank in a loop, and the schedule is constructed without the world size
    by_world: bool = False
    numbers: tuple[float, ...] = ()  # attributes of the schedule and its functions


class FunctionCompiled(Entry, frozen=True):
    """Compilation of a function on a rank, or torch's decision to stop compiling it."""

    function: str  # qualified name; after a graph break, torch's name for the rest of the function
    defined_at: Location  # line of the definition
    # line that reads the changed value, if torch reports the line; else the script line that calls the function
    location: Location | None = None
    step: int = 0  # optimizer steps before
    seconds: float = 0.0  # duration, without compilation in the first backward pass
    trains: bool = True  # True if wrapped modules are in training mode with gradients enabled
    # failed guard of earlier code, without values, so that equal guards have equal text. Empty the first time, or if
    # torch does not report a guard
    guard: str = ""
    reason: str = ""  # failed guard in torch's words
    # True if the recompile limit was reached: from now on the function runs eagerly, except in cases compiled before
    hit_limit: bool = False
    inputs: int = 0  # fingerprint of shapes and dtypes of the input tensors
    # number of compiled differentiable operations, by name
    operations: Mapping[str, int] = field(default_factory=dict)


class StepDraw(Entry, frozen=True):
    """Random numbers drawn after an optimizer step and before the next.

    An entry is for one call. If the calls are unknown, an entry is for all calls that use a generator.
    """

    step: int  # optimizer steps before
    generator: str  # global generator "torch", "cuda", "python" or "numpy"; "" for a generator of the program
    kind: str  # "noise" for real numbers, "choice" for whole numbers, "any" if the calls are unknown
    count: int  # lower bound of the number of draws; 0 if unknown
    before: int  # digest of the generator state before the call; 0 for a generator of the program
    after: int  # digest of the generator state after the call
    in_forward: bool = False  # True if called in the forward pass of a wrapper
    location: Location | None = None  # line of the script
    seeded_at: Location | None = None  # line that last seeded the generator, or restored the state
    restored_by: str = ""  # function that restored the state at `seeded`; "" if seeded


class GatheredConstant(Entry, frozen=True):
    """Loss that multiplies by gathered rows of all ranks, through which no gradient flows."""

    step: int  # optimizer steps before
    operation: str  # the collective, whose input carries a gradient
    location: Location | None  # line of the collective
    rows: int  # of all ranks
    names: tuple[str, ...] = ()  # parameters used only through the gathered rows, without gradient from the loss


class OwnRowsReinserted(Entry, frozen=True):
    """Loss on gathered features, of which only this rank's part carries a gradient.

    If every rank computes the whole loss, the gradients of these parts add up over the ranks.
    """

    step: int  # optimizer steps before
    operation: str = ""  # the collective
    location: Location | None = None  # line of the collective, or of `backward` if in a Function of the script
    # sketch of the gradient of the whole gathered tensor in backward; empty if unknown, if zero except for the own
    # part, or if gathered in a subgroup
    full_gradient: tuple[float, ...] = ()
    # gradient of the own features over the gradient of the own part of the gathered tensor; 0 if not a multiple
    factor: float = 0.0
    by_function: bool = False  # True if a Function of the script, with a `backward`, gathers
    uses_own_rows: bool = False  # True if the loss also uses the own features directly


class GradientsChanged(Entry, frozen=True):
    """Possible change of accumulated gradients by the script, between two backward passes."""

    wrapper: int  # number of the wrapper
    step: int  # optimizer steps before
    by: str  # function that clips the gradients, or ""
    factor: float  # gradient norm of the wrapper after the change over the norm before
    location: Location | None  # line of the call, else of the next backward pass
    is_unreduced: bool  # True if the gradients were local, to be reduced in a later backward pass


class HookedGradient(Struct, frozen=True):
    """Change of the gradient of a parameter by hooks."""

    # "scaled" by a factor; "masked": some elements are zero, others scaled by a factor; "limited": large elements are
    # clipped; "" for other or unknown changes
    kind: str = ""
    number: float = 0.0  # factor or limit
    zeros: int = 0  # fingerprint of the mask


class GradientsHooked(Entry, frozen=True):
    """Change of a step's local gradients by hooks of the program, before averaging."""

    wrapper: int  # number of the wrapper
    step: int  # steps before
    location: Location | None  # line that defines the first hook
    changed: Mapping[str, HookedGradient]  # by parameter name, without unchanged gradients
    factors: Mapping[str, float] = field(default_factory=dict)  # factor of a module's backward hooks, by module name


class AutogradGradCalled(Entry, frozen=True):
    """Gradients of wrapped parameters from `torch.autograd.grad`, which bypasses DDP hooks."""

    wrapper: int  # number of the wrapper
    count: int  # earlier calls for the wrapper's parameters
    location: Location | None  # line of the call
    reductions: int = 0  # averaged backward passes of the wrapper before
    is_unreduced: bool = False  # True if the wrapper has gradients of a backward pass that was not averaged
    # sketch of each gradient; empty at the end of the script
    gradients: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    parameters: Mapping[str, int] = field(default_factory=dict)  # fingerprints of parameters of the wrapper
    marks: tuple[int, ...] = ()  # fingerprint of the smallest parameter at each call since the last entry


MAX_PACE_RUNS = 1024  # recorded per wrapper and rank; reached only without a regular pace


class PaceRun(Entry, frozen=True):
    """Series of gradient reductions with equal numbers of forward passes and batches per reduction."""

    wrapper: int  # number of the wrapper
    first: int  # number of the first reduction
    forwards: int  # forward passes of the wrapper in training mode, with gradients, per reduction
    batches: int  # batches taken from the current loader per reduction; 0 without a loader
    # the only line that skips the rest of a loop iteration, else the line of the backward pass
    location: Location | None


class WrapperPace(Struct, frozen=True):
    """Forward passes and batches per gradient reduction of a wrapper on one rank."""

    runs: tuple[PaceRun, ...]
    reductions: int

    def lengths(self) -> list[tuple[PaceRun, int]]:
        """Return each `PaceRun` with the number of gradient reductions in the series."""
        ends = [*(run.first for run in self.runs[1:]), self.reductions]
        return [(run, end - run.first) for run, end in zip(self.runs, ends, strict=True)]


class StaleGradients(Entry, frozen=True):
    """Optimizer step on gradients that were computed before an earlier step and not zeroed."""

    optimizer: int  # number of the optimizer
    own: bool  # True if the same optimizer used the gradients before; else left by the loss of another optimizer
    backward_at: Location | None  # line of the backward pass that left the gradients
    accumulated_at: Location | None  # line of the backward pass that added to the gradients
    location: Location | None  # line of the step
    names: tuple[str, ...] = ()  # parameters with stale gradients, if the gradients of others were zeroed
    in_a_row: int = 0  # steps in a row on stale gradients, with this one; 0 in older logs


class WorkAwaited(Entry, frozen=True):
    """Asynchronous collective whose handle was polled or waited on."""

    location: Location  # line that starts the collective


class WorkDropped(Entry, frozen=True):
    """Asynchronous collective whose handle was dropped, never polled or waited on."""

    operation: str  # the collective
    location: Location  # line that starts the collective
    of_gradients: bool  # True if the input has gradients of an optimizer's parameters


class PendingTensorWritten(Entry, frozen=True):
    """Tensor written between the start of its asynchronous collective and the wait."""

    operation: str  # the collective
    location: Location  # line that starts the collective
    of_gradients: bool  # True if the input has gradients of an optimizer's parameters
    waits_at: Location | None  # line that waits for the collective
