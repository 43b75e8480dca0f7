"""Evidence on the training loop of a script, as each rank saw it: what it changes, compiles, draws and gathers.

Judged in `judge.loop`, `judge.replicas.script_changes`, `judge.data.script_draws`, `judge.gradients.script_losses` and
`judge.gradients.script_alone`; gathered in `record.loop`, `record.optimizers`, `record.loss.gather_recorder`,
`record.data.draw_recorder`, `record.replicas.write_recorder` and `record.rank.line_recorder`.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from ddpcheck.findings.evidence import Entry
from ddpcheck.findings.report import Location

OF_A_COPY = -1  # of a wrapped module, as a variable holds it


class ModuleChanged(Entry, frozen=True):
    """A line of the script has changed, or may have changed, parameters or buffers of a wrapped module."""

    wrapper: int  # the number of the wrapper; `OF_A_COPY` for one, which `names` names
    # "values" (loaded, or set by a function that was applied), "written" (in place, or as `.data`, outside of an
    # optimizer's step), "buffer" (one has another value), "requires_grad", "parameters" (others are registered now),
    # "mode" (to evaluation), "scale" (what a reduction divides by), "hook" (for the reduction, by
    # `register_comm_hook`), "stepped" (by an optimizer while backward runs), "ignored" (`.data` of a
    # shard was assigned, which has left it as it was), "replaced" (a parameter was assigned in the place of a shard and
    # is none that `fully_shard` gathers), or "module" (likewise one with shards, by one without)
    what: str
    how: str  # the name of what was called, or assigned
    # of the parameters; empty where they are not known. Of the submodule, where its mode is changed
    names: tuple[str, ...]
    location: Location | None  # the line of the script
    forwards: int = 0  # how many forward passes of the wrapper had been before
    step: int = 0  # how many averaged backward passes had ended before


class ScheduleState(Struct, frozen=True):
    """The learning rate schedule of an optimizer."""

    made: Location | None  # the line that has constructed it
    steps: int = 0  # how often it has stepped
    location: Location | None = None  # the line that has stepped it first
    by_package: bool = False  # whether an installed package has, and not the script itself
    turns: int = 0  # how many of these steps were the first one after a backward pass or an optimizer's step
    # after which of them the rate has not changed any more, and after which it was the lowest
    ends: tuple[int, int] = (0, 0)
    # whether the loop around the steps has one for each rank by its source, and what constructs the schedule takes
    # nothing from the world size
    by_world: bool = False
    numbers: tuple[float, ...] = ()  # that it and its functions hold


class FunctionCompiled(Entry, frozen=True):
    """A function was compiled on a rank, or torch has given up to compile it."""

    function: str  # its qualified name; of the rest of a function after a graph break as torch calls it
    defined: Location  # where it is
    # the line that reads what has another value than before, where torch says it; else the line of the script that
    # calls the function
    location: Location | None = None
    step: int = 0  # how many steps of optimizers have ended
    seconds: float = 0.0  # that it took, without what is compiled in the first backward pass
    trains: bool = True  # whether the modules of wrappers train, and gradients are asked for
    # what no longer held of what had been compiled before, without its values: the same text for the same guard. Empty
    # the first time, and where torch does not say it
    guard: str = ""
    reason: str = ""  # the same as torch says it
    # whether a limit of recompilations was reached: the function runs as it is written from now on, but for what was
    # compiled before
    given_up: bool = False
    inputs: int = 0  # a fingerprint of the shapes and dtypes of the tensors that it is given
    # by name of an operation of which backward computes gradients, how many of it were compiled
    operations: Mapping[str, int] = field(default_factory=dict)


class StepDraw(Entry, frozen=True):
    """Numbers drawn by a generator between two optimizer steps, in one call or in what is not followed by calls."""

    step: int  # how often optimizers had stepped before
    generator: str  # a global one: "torch", "cuda", "python" or "numpy"; "" for one of the program's own
    kind: str  # "noise" for real numbers, "choice" for whole ones, "any" if the calls are not known
    count: int  # at least so many numbers; 0 if that is not known
    before: int  # a digest of the generator's state; of one of the program's own 0
    after: int  # the same, after the call
    in_forward: bool = False  # whether the forward pass of a wrapper makes the call
    location: Location | None = None  # the line of the script
    seeded: Location | None = None  # the line that has last seeded the generator, or restored its state
    restored_by: str = ""  # the function that has restored it there; empty if it was seeded


class GatheredConstant(Entry, frozen=True):
    """A loss multiplies by the gathered rows of all ranks as by a constant, the rank's own among them."""

    step: int  # how often optimizers had stepped before
    operation: str  # the collective, whose input carries a gradient
    location: Location | None  # the line of the script that calls it
    rows: int  # of all ranks
    names: tuple[str, ...] = ()  # the parameters that the loss has in no other way, so that they get no gradient of it


class OwnPartPutBack(Entry, frozen=True):
    """A loss is made of what was gathered without gradient, and the rank's own part of it carries one.

    If each rank has the whole loss, each has its own part of the gradient, and these add up over the ranks.
    """

    step: int  # how often optimizers had stepped before
    operation: str = ""  # the collective
    # the line of the script that calls it, or of `backward` where a function of the script's is around it
    location: Location | None = None
    # a sketch of the gradient of all that was gathered, in backward; empty where that is not known, and where it is
    # zero but for the rank's own part, or a group has gathered it
    arrived: tuple[float, ...] = ()
    # by how much the gradient of the rank's own features is that of their part; 0 if it is no multiple
    factor: float = 0.0
    by_function: bool = False  # whether a function of the script's, with a `backward`, gathers
    besides: bool = False  # whether the loss takes the rank's own features by another way, too


class GradientsChanged(Entry, frozen=True):
    """Gradients were changed after a backward pass, and another one has added to them then."""

    wrapper: int  # the number of the wrapper
    step: int  # how often optimizers had stepped before
    by: str  # the function that clips, if one has been called; else ""
    factor: float  # the norm of all gradients of the wrapper after it, in parts of the norm before
    location: Location | None  # the line of the call, else that of the next backward pass
    put_off: bool  # whether they were this rank's own, and are to be reduced with those of a later backward pass


class HookedGradient(Struct, frozen=True):
    """What hooks have made of the gradient of a parameter."""

    # "scaled": times a factor; "masked": zeros in the place of some elements, a factor for the others; "limited": the
    # larger ones have the same size now; "" for another way, or an unknown one
    kind: str = ""
    number: float = 0.0  # the factor, or the limit
    zeros: int = 0  # a fingerprint of which elements were masked


class GradientsHooked(Entry, frozen=True):
    """Hooks of the program have had this rank's own gradients of a step before they were averaged."""

    wrapper: int  # the number of the wrapper
    step: int  # how many had ended before
    location: Location | None  # the line at which the first of the hooks is defined
    changed: Mapping[str, HookedGradient]  # by name of a parameter; those that are as they were are left out
    # by name of a module, by what its backward hooks have multiplied all elements of what comes through it
    factors: Mapping[str, float] = field(default_factory=dict)


class GradientsTaken(Entry, frozen=True):
    """The script has gradients of wrapped parameters from `torch.autograd.grad`, which no hook of DDP sees."""

    wrapper: int  # the number of the wrapper
    count: int  # how often it had been called for these before
    location: Location | None  # the line of the call
    reductions: int = 0  # how many averaged backward passes of the wrapper had ended
    put_off: bool = False  # whether the wrapper holds gradients of a backward pass that was not averaged
    # a sketch of each that it has given; empty at the end of the script
    gradients: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    parameters: Mapping[str, int] = field(default_factory=dict)  # fingerprints of parameters of the wrapper
    marks: tuple[int, ...] = ()  # fingerprints of a small one at each call since the last entry


class PaceRun(Entry, frozen=True):
    """From a reduction on, the same happens before each of them, until the next entry of the wrapper."""

    wrapper: int  # the number of the wrapper
    first: int  # the number of the reduction
    forwards: int  # forward passes of the wrapper in training mode, with gradients, since the one before
    batches: int  # that the script has taken from the loader that it goes through; 0 without a loader
    # the line of the script that leaves out the rest of a turn of the loop, if there is one only, else that of the
    # backward pass
    location: Location | None


class WrapperPace(Struct, frozen=True):
    """All reductions of a wrapper on one rank, and how many there were."""

    runs: tuple[PaceRun, ...]
    reductions: int

    def lengths(self) -> list[tuple[PaceRun, int]]:
        """Each run, with the number of its reductions."""
        ends = [*(run.first for run in self.runs[1:]), self.reductions]
        return [(run, end - run.first) for run, end in zip(self.runs, ends, strict=True)]


class GradientsLeft(Entry, frozen=True):
    """Step after step, an optimizer uses gradients that were there before another step, and were never zeroed."""

    optimizer: int  # its number
    # whether the optimizer itself had used them before; else another one has, the loss of which has left them
    own: bool
    made: Location | None  # the line of the backward pass that has left them
    added: Location | None  # the line of the one that has added to them
    location: Location | None  # the line of the step
    names: tuple[str, ...] = ()  # the parameters with these gradients, where those of others were zeroed


class WorkUsed(Entry, frozen=True):
    """The script has asked the handle of an asynchronous collective whether it is done, or waited for it."""

    location: Location  # the line that starts the collective


class WorkDropped(Entry, frozen=True):
    """The handle of an asynchronous collective is gone, and was never asked."""

    operation: str  # the collective
    location: Location  # the line that starts it
    of_gradients: bool  # whether it was given gradients of what an optimizer holds


class TensorOfWorkWritten(Entry, frozen=True):
    """A tensor was written between the start of an asynchronous collective on it and the wait for that."""

    operation: str  # the collective
    location: Location  # the line that starts it
    of_gradients: bool  # whether it was given gradients of what an optimizer holds
    waits_at: Location | None  # the line that waits for it
