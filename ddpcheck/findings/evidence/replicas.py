"""Evidence on the models of a script: wrapping, splits, and loaded or evaluated states.

Split models are split by tensor parallelism (`torch.distributed.tensor.parallel.parallelize_module`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, field

from ddpcheck.findings.evidence import Entry
from ddpcheck.findings.evidence.modules import ModuleDescription
from ddpcheck.findings.report import Location


class SizedVariable(Struct, frozen=True):
    """Integer or container of the script that may determine a size in the model."""

    name: str  # dotted name ("data.classes")
    kind: str  # class of the value
    size: int  # the number, or the number of items
    location: Location  # current line of the function with the variable


class WrapperBegun(Entry, frozen=True):
    """Start of a `DistributedDataParallel` constructor, before any communication."""

    module: str  # class of the wrapped module
    ranks: tuple[int, ...]  # of the process group
    description: ModuleDescription  # of the wrapped module, without parameters and buffers that the wrapper ignores
    options: Mapping[str, str] = field(default_factory=dict)  # of the wrapper, in words
    location: Location | None = None  # line of the script
    # registration line by name of module, parameter or buffer; omitted if equal to the parent's
    lines: Mapping[str, Location] = field(default_factory=dict)
    from_sets: tuple[str, ...] = ()  # modules whose children are ordered by iterating a set of names
    sizes: tuple[SizedVariable, ...] = ()  # variables that may determine a size in the module


class ModelSplit(Entry, frozen=True):
    """First split of parameters of a model across ranks."""

    ranks: tuple[int, ...]  # ranks of the model, in the order of parts
    location: Location | None  # line that splits the model


class PartStep(Entry, frozen=True):
    """State before an optimizer step, on a rank that has part of a model."""

    optimizer: int  # number among the optimizers that have stepped
    count: int  # earlier steps of the optimizer
    location: Location | None  # line of the script
    built_at: Location | None = None  # line that constructs the optimizer
    split: tuple[str, ...] = ()  # split parameters in the optimizer
    unoptimized: tuple[str, ...] = ()  # split parameters in no optimizer
    norms: Mapping[str, float] = field(default_factory=dict)  # gradient norm of each parameter, or of this rank's part
    values: Mapping[str, int] = field(default_factory=dict)  # fingerprints of replicated (not split) parameters
    gradients: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # gradient sketches of these parameters
    sharded: tuple[str, ...] = ()  # parameters with a shard on this rank, across ranks of other models
    random: int = 0  # fingerprint of the state of torch's generator
    seeded_at: Location | None = None  # line that last seeded torch's generator
    norm_at: Location | None = None  # line that takes a norm of gradients, in the functions that lead to the step
    splits_inputs: bool = False  # True if each rank gives a module a part of the input, such as a part of a sequence


class RunningStatistic(Entry, frozen=True):
    """Running mean or scale kept by the script, recorded at a forward call."""

    wrapper: int  # number of the wrapper
    forward: int  # earlier calls of the module
    name: str  # name of the variable
    values: tuple[float, ...]  # some elements
    scale: tuple[float, ...]  # divisors of these elements of the inputs; 1 if unknown
    # number of equations that show that the variable just moved towards the mean of this rank's samples, and normalises
    # the samples; 0 if not shown this time
    equations: int
    location: Location | None  # line that updates the variable
    collectives: int = 0  # number of collectives on the variable so far
    moves: int = 0  # changes of the variable since the last such call; 0 in older logs
    unexplained_moves: int = 0  # changes that were not towards the mean of the samples


class EvalCall(Entry, frozen=True):
    """Evaluation call of a wrapped module, or a module with the same parameter shapes."""

    step: int  # optimizer steps before
    name: str  # variable of the module, else its class
    lines: tuple[str, ...]  # program lines of the call, innermost first
    digest: int  # of the parameter values
    wrapped: bool  # True for the wrapped module itself
    loaded: bool  # True if a state was loaded since the last optimizer step
    location: Location | None  # line that loads the state, else that assigns the variable
    # some running means of a BatchNorm layer, and as many running variances, if estimated again after training (as by
    # `update_bn`)
    statistics: tuple[float, ...] = ()
    estimated_at: Location | None = None  # line of the new estimate


class NothingLoaded(Entry, frozen=True):
    """State dict loaded with strict=False although no key matched, and not reloaded since."""

    name: str  # class of the module
    location: Location | None  # line that loads the state
    prefix: str  # of the keys of either state or module; without the prefix, the keys match
    of_state: bool  # True if the keys of the state have the prefix, False if the keys of the module have
    keys: int  # number of keys of the module


def digest_of_values(fingerprints: Iterable[int]) -> int:
    """Combine the fingerprints of a module's tensors into one number, equal in every process."""
    return hash(tuple(sorted(fingerprints)))
