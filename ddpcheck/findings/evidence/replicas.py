"""Evidence on the models of a script: how they are wrapped and split, and states that are loaded, evaluated or outside.

Models of which each rank has a part, and which ranks compute together, are those of tensor parallelism:
`torch.distributed.tensor.parallel.parallelize_module`. Judged in `judge.replicas`; gathered in `record.replicas`,
`record.rank.construction_recorder` and `record.optimizers.part_recorder`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, field

from ddpcheck.findings.evidence import Entry
from ddpcheck.findings.evidence.modules import ModuleDescription
from ddpcheck.findings.report import Location


class SizedVariable(Struct, frozen=True):
    """A variable of the script that counts: a number, or a container of so many items."""

    name: str  # with the attributes that lead to it ("data.classes")
    kind: str  # its class
    size: int  # the number, or how many items it has
    location: Location  # the line that its function has come to


class WrapperBegun(Entry, frozen=True):
    """The constructor of a `DistributedDataParallel` has been called, and has not communicated yet."""

    module: str  # the class of what it wraps
    ranks: tuple[int, ...]  # of its process group
    description: ModuleDescription  # of what it wraps, without what the wrapper is told to ignore
    options: Mapping[str, str] = field(default_factory=dict)  # of the wrapper, in words
    location: Location | None = None  # the line of the script
    # by name of a module, parameter or buffer, the line that registered it; of one that is registered at another line
    # than what holds it
    lines: Mapping[str, Location] = field(default_factory=dict)
    # the modules whose children stand as this process goes through a set of their names
    from_sets: tuple[str, ...] = ()
    sizes: tuple[SizedVariable, ...] = ()  # variables that may be what a size in the module was computed from


class ModelSplit(Entry, frozen=True):
    """Parameters of a model have been split among ranks for the first time."""

    ranks: tuple[int, ...]  # that compute the model together, in the order of their parts
    location: Location | None  # the line of the script that splits it


class PartStep(Entry, frozen=True):
    """An optimizer is about to step, in a process in which a model is split."""

    optimizer: int  # its number among those that have stepped
    count: int  # how often it has stepped before
    location: Location | None  # the line of the script
    made: Location | None = None  # the line that constructs it
    split: tuple[str, ...] = ()  # the parameters that it holds of which this rank has a part of its own
    unheld: tuple[str, ...] = ()  # the parameters that are split and that no optimizer holds
    # the norm of the gradient of each parameter, or of this rank's part of it
    norms: Mapping[str, float] = field(default_factory=dict)
    # fingerprints of the parameters that are not split, which ranks have alike
    values: Mapping[str, int] = field(default_factory=dict)
    gradients: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # sketches of their gradients
    # the parameters of which this rank has a shard, among ranks that compute other models
    sharded: tuple[str, ...] = ()
    random: int = 0  # a fingerprint of the state of torch's random numbers
    seeded: Location | None = None  # the line that has last seeded them
    norm_at: Location | None = None  # the line that takes a norm of gradients, in the functions that lead to the step
    # whether a module is said to be given a part of its input by each rank: of a sequence, say
    parts_given: bool = False


class RunningStatistic(Entry, frozen=True):
    """What the program holds outside of wrapped modules, when forward is called: a running mean, or a running scale."""

    wrapper: int  # the number of the wrapper
    forward: int  # how often its module had been called before
    name: str  # the variable
    values: tuple[float, ...]  # some of its elements
    scale: tuple[float, ...]  # by what these elements of the inputs are divided; 1 where that is not known
    # by how many equations it has been found that it has just moved towards the mean of the samples that this rank
    # gives to forward, and that these are normalised by it; 0 where it has not been found this time
    equations: int
    location: Location | None  # the line that updates it
    exchanged: int = 0  # how often it has been handed to a collective by now


class StateUsed(Entry, frozen=True):
    """A module with parameters like those of a wrapped one is called in evaluation, or without gradients."""

    step: int  # how often optimizers had stepped before
    name: str  # the variable in which the program holds it, else its class
    lines: tuple[str, ...]  # the lines of the program that call it, innermost first
    digest: int  # of the values of its parameters
    wrapped: bool  # whether it is a wrapped module itself
    loaded: bool  # whether a state has been loaded into it since the last optimizer step
    location: Location | None  # the line that loads it, else that assigns the variable
    # some running means of a BatchNorm layer, and as many running variances, where the script has them estimated again
    # after training, by `update_bn`, say
    statistics: tuple[float, ...] = ()
    estimated_at: Location | None = None  # the line that does so


class NothingLoaded(Entry, frozen=True):
    """A state was loaded with strict=False, and no other one since then, though no key of it was one of the module's.

    Attributes:
        name: The class of the module.
        location: The line that loads it.
        prefix: What the keys of one of the two begin with, which apart from that fit.
        of_state: Whether that is the state, and not the module.
        keys: Of the module.
    """

    name: str
    location: Location | None
    prefix: str
    of_state: bool
    keys: int


def digest_of_values(fingerprints: Iterable[int]) -> int:
    """One number for the fingerprints of the tensors of a module, the same in every process."""
    return hash(tuple(sorted(fingerprints)))
