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
    """A variable of the script that counts: a number, or a container of so many items.

    Attributes:
        name: With the attributes that lead to it ("data.classes").
        kind: Its class.
        size: The number, or how many items it has.
        location: The line that its function has come to.
    """

    name: str
    kind: str
    size: int
    location: Location


class WrapperBegun(Entry, frozen=True):
    """The constructor of a `DistributedDataParallel` has been called, and has not communicated yet.

    Attributes:
        module: The class of what it wraps.
        ranks: Of its process group.
        description: Of what it wraps, without what the wrapper is told to ignore.
        options: Of the wrapper, in words.
        location: The line of the script.
        lines: By name of a module, parameter or buffer, the line that registered it; of one that is registered at
            another line than what holds it.
        from_sets: The modules whose children stand as this process goes through a set of their names.
        sizes: Variables that may be what a size in the module was computed from.
    """

    module: str
    ranks: tuple[int, ...]
    description: ModuleDescription
    options: Mapping[str, str] = field(default_factory=dict)
    location: Location | None = None
    lines: Mapping[str, Location] = field(default_factory=dict)
    from_sets: tuple[str, ...] = ()
    sizes: tuple[SizedVariable, ...] = ()


class ModelSplit(Entry, frozen=True):
    """Parameters of a model have been split among ranks for the first time.

    Attributes:
        ranks: That compute the model together, in the order of their parts.
        location: The line of the script that splits it.
    """

    ranks: tuple[int, ...]
    location: Location | None


class PartStep(Entry, frozen=True):
    """An optimizer is about to step, in a process in which a model is split.

    Attributes:
        optimizer: Its number among those that have stepped.
        count: How often it has stepped before.
        location: The line of the script.
        made: The line that constructs it.
        split: The parameters that it holds of which this rank has a part of its own.
        unheld: The parameters that are split and that no optimizer holds.
        norms: The norm of the gradient of each parameter, or of this rank's part of it.
        values: Fingerprints of the parameters that are not split, which ranks have alike.
        gradients: Sketches of their gradients.
        sharded: The parameters of which this rank has a shard, among ranks that compute other models.
        random: A fingerprint of the state of torch's random numbers.
        seeded: The line that has last seeded them.
        norm_at: The line that takes a norm of gradients, in the functions that lead to the step.
        parts_given: Whether a module is said to be given a part of its input by each rank: of a sequence, say.
    """

    optimizer: int
    count: int
    location: Location | None
    made: Location | None = None
    split: tuple[str, ...] = ()
    unheld: tuple[str, ...] = ()
    norms: Mapping[str, float] = field(default_factory=dict)
    values: Mapping[str, int] = field(default_factory=dict)
    gradients: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    sharded: tuple[str, ...] = ()
    random: int = 0
    seeded: Location | None = None
    norm_at: Location | None = None
    parts_given: bool = False


class RunningStatistic(Entry, frozen=True):
    """What the program holds outside of wrapped modules, when forward is called: a running mean, or a running scale.

    Attributes:
        wrapper: The number of the wrapper.
        forward: How often its module had been called before.
        name: The variable.
        values: Some of its elements.
        scale: By what these elements of the inputs are divided; 1 where that is not known.
        equations: By how many equations it has been found that it has just moved towards the mean of the samples that
            this rank gives to forward, and that these are normalised by it; 0 where it has not been found this time.
        location: The line that updates it.
        exchanged: How often it has been handed to a collective by now.
    """

    wrapper: int
    forward: int
    name: str
    values: tuple[float, ...]
    scale: tuple[float, ...]
    equations: int
    location: Location | None
    exchanged: int = 0


class StateUsed(Entry, frozen=True):
    """A module with parameters like those of a wrapped one is called in evaluation, or without gradients.

    Attributes:
        step: How often optimizers had stepped before.
        name: The variable in which the program holds it, else its class.
        lines: The lines of the program that call it, innermost first.
        digest: Of the values of its parameters.
        wrapped: Whether it is a wrapped module itself.
        loaded: Whether a state has been loaded into it since the last optimizer step.
        location: The line that loads it, else that assigns the variable.
        statistics: Some running means of a BatchNorm layer, and as many running variances, where the script has them
            estimated again after training, by `update_bn`, say.
        estimated_at: The line that does so.
    """

    step: int
    name: str
    lines: tuple[str, ...]
    digest: int
    wrapped: bool
    loaded: bool
    location: Location | None
    statistics: tuple[float, ...] = ()
    estimated_at: Location | None = None


class NothingLoaded(Entry, frozen=True):
    """A state was loaded with strict=False, and an optimizer steps, though no key of the state was one of the module's.

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
