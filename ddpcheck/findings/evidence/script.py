"""Evidence on an unmodified script: its data, its optimizers and its files, as each rank saw them.

Judged in `judge.data`, `judge.loop`, `judge.gradients.script_losses` and `judge.replicas.script_states`; gathered in
`record.data`, `record.optimizers`, `record.loss`, `record.replicas.program_state` and `record.rank.file_recorder`.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from ddpcheck.findings.evidence import Entry
from ddpcheck.findings.evidence.loop import ScheduleState
from ddpcheck.findings.report import Location


class Restored(Struct, frozen=True):
    """The script has restored the state of an optimizer.

    Attributes:
        steps: How many that has made, by its own counters, by what it was when the state was taken, or by a number in
            the file; 0 where nothing says.
        epochs: How many epochs there had been, by a number in the file.
        location: The line of the script.
    """

    steps: int
    epochs: int
    location: Location | None


class LoaderPass(Entry, frozen=True):
    """One pass of a loop over a `DataLoader`, as far as the rank came.

    Attributes:
        loader: The number of the loader, in the order in which this rank first used them.
        number: Of the pass over this loader, counted from 0.
        location: The line of the script that begins it.
        dataset: The class of the dataset.
        size: How many samples it has; negative where it does not say.
        digest: Of what the dataset holds, by attribute; empty where it holds nothing plain.
        expected: How many batches the loader says that it has; negative where it does not say.
        batch_size: Samples of a batch.
        sampler: The class of the sampler.
        shuffles: Whether the sampler says that it gives another order in each pass; or gives another one in another
            epoch, where the pass before had the same order, so that a copy of it was asked.
        replaces: Whether the sampler says that it draws with replacement.
        has_epoch: Whether the sampler has `set_epoch`.
        batches: How many batches the script took.
        skipped: Of them, those that it took before a wrapper or an optimizer was used, but for the last of these.
        exhausted: Whether it took all of them.
        trains: Whether an optimizer stepped meanwhile.
        order: A digest of all indices in their order; 0 where the sampler gives none.
        indices: The first indices, in the dataset beneath all of torch's `Subset`.
        subset: The indices of a `Subset`; empty for another dataset.
        contents: By place in a batch, digests of the first samples by index.
        draws: Digests of the states of the random generators before and after the samples of a batch were made, in this
            process or in a worker, of those that changed.
        worker_seed: From which the workers of the loader seed theirs; negative where there are no workers, or they seed
            in a way of their own.
        chooses: Whether the sampler holds the indices of some of the samples, from which it draws.
        wrappers: How many wrappers there had been when it ended: shards are known from their first forward pass on.
        data: The number of the dataset, in the order in which they were first gone through.
        made: The line that constructs the sampler beneath, or the loader where that is not known.
        split: The line that makes the `Subset`.
        seeded: The line that has last seeded the generator from which samples are made.
        rows: Fingerprints of all samples in the order in which they were taken, without their labels; empty where
            they were too many, or no tensors on the CPU.
        labels: Likewise of their labels, if they have some: tensors of one whole number for each sample.
        classes: These labels themselves, where each sample has just one.
        held: The keys of `draws` that are states of generators which the dataset holds.
        held_at: The line that assigns the first of these generators.
        targets: Likewise numbers, where each sample has just one that is floating-point.
        whole: The rows of the array of which the dataset holds some; -1 where it holds names of files or texts.
        samples: By what the dataset holds of its samples, fingerprints of the first of them.
        drawn: A digest of what the global random generators had given before it, or its sampler, was constructed; 0
            where that is not known.
        replicas: Between how many ranks the sampler splits, where it is torch's.
        state: Digests of the plain attributes of the dataset, as this process has it when the pass begins.
        persistent: Whether workers stay from one pass to the next.
        epoch: Of the sampler; negative where it does not say.
        told: The line that has last told it the epoch.
        restored: An optimizer was, and no pass has trained since.
        steps: How often optimizers stepped meanwhile.
        workers: Processes of the loader that make its batches.
    """

    loader: int
    number: int
    location: Location | None
    dataset: str = ""
    size: int = -1
    digest: Mapping[str, int] = field(default_factory=dict)
    expected: int = -1
    batch_size: int = 1
    sampler: str = ""
    shuffles: bool = False
    replaces: bool = False
    has_epoch: bool = False
    batches: int = 0
    skipped: int = 0
    exhausted: bool = False
    trains: bool = False
    order: int = 0
    indices: tuple[int, ...] = ()
    subset: tuple[int, ...] = ()
    contents: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    draws: Mapping[int, int] = field(default_factory=dict)
    worker_seed: int = -1
    chooses: bool = False
    wrappers: int = 0
    data: int = 0
    made: Location | None = None
    split: Location | None = None
    seeded: Location | None = None
    rows: tuple[int, ...] = ()
    labels: tuple[int, ...] = ()
    classes: tuple[int, ...] = ()
    whole: int = 0
    samples: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    drawn: int = 0
    replicas: int = 0
    state: Mapping[str, int] = field(default_factory=dict)
    persistent: bool = False
    epoch: int = -1
    told: Location | None = None
    restored: Restored | None = None
    steps: int = 0
    workers: int = 0
    targets: tuple[float, ...] = ()
    held: tuple[int, ...] = ()
    held_at: Location | None = None


class Inputs(Entry, frozen=True):
    """What a wrapper's forward was given in a step.

    Attributes:
        wrapper: The number of the wrapper.
        step: How many averaged backward passes had ended before.
        samples: A fingerprint of each sample, or one of all tensors where they do not agree on the number of samples.
        location: The line of the script that calls forward.
        parts: Of each tensor, a fingerprint and the number of its elements.
        added: A sketch of what the script has added to samples of a loader; empty where that is nothing, or unknown.
    """

    wrapper: int
    step: int
    samples: tuple[int, ...]
    location: Location | None
    parts: tuple[tuple[int, int], ...] = ()
    added: tuple[float, ...] = ()


class Evaluated(Entry, frozen=True):
    """What a wrapper's forward was given without gradients, in one of its first passes of that kind.

    Attributes:
        wrapper: The number of the wrapper.
        step: How many averaged backward passes had ended before.
        samples: As `Inputs.samples`.
    """

    wrapper: int
    step: int
    samples: tuple[int, ...]


OF_A_LIST = ".index()"
"""Ends the name of the table of a list."""


class DerivedTable(Entry, frozen=True):
    """A dictionary of plain values that the script holds when an optimizer first steps; or a list put together of a
    set of texts, with the place of each.
    """

    name: str
    values: Mapping[str, str]
    location: Location | None


class OptimizerStep(Entry, frozen=True):
    """An optimizer is about to step.

    Attributes:
        optimizer: Its number among those that have stepped on this rank.
        count: How often it has stepped before.
        options: Its class and what its groups have been given, but for their parameters (a sharded one has its own).
        location: The line of the script.
        held: The parameters of wrappers that it holds, by number of the wrapper and name ("0/head.weight").
        reductions: Averaged backward passes so far of the wrappers whose parameters it holds; negative where it
            holds none of any wrapper.
        averaged: Whether there was one since it last stepped, and none that was not averaged.
        unaveraged: Its parameters in wrappers that have averaged nothing since then.
        norms: The norm of the gradient of each parameter in a wrapper, by name.
        states: The norms of its state, by name of the parameter and key.
        alone: The values of parameters in no wrapper, as fingerprints, by name.
        gradients: Sketches of their gradients; empty for one that has none.
        marks: Fingerprints of one of them, at each step since the last entry.
        unknown: Of them, those that no module has.
        collectives: How many collectives of all ranks this rank has come to before.
        idle: The parameters of its wrappers that optimizers hold which have not stepped yet.
        made: The line that has constructed it.
        rate: The line that decides its learning rate, but for the constructor: of its schedule, or the only one that
            assigns a rate.
        schedule: Of its learning rate.
        summed: The parameters whose gradient is just as an all_reduce has left it that sums.
        summed_at: The line of that all_reduce.
        left_out_at: The lines that may leave it out after the backward pass: tests around it, and early exits.
        late_sum_at: The line that has gradients all_reduced after an earlier step had used them, before any other
            backward pass; `None` where there was none.
        restored_at: The line that has last given it a state, by `load_state_dict`.
        rescaled_at: The line that scales gradients by the number of ranks, in the functions that lead to the step.
        norm_at: The line that takes a norm of the shards of gradients, likewise.
        changed_at: The one line that writes gradients between backward and the step, if there is just one.
        shards: How many parameters that it trains are shards of this rank (DTensor), with norms and state of a part.
        shard_scales: By what factor the gradient of each of them has grown since its reduction, as far as that is
            known, in its norm.
        in_fsdp1: How many of its parameters a `FullyShardedDataParallel` holds.
        made_with: A digest of the learning rates of its groups when it was constructed; empty where that was not seen.
        shard_states: Of parameters of which this rank has a part: the norms of that part of their state, and steps that
            were counted, by name of the parameter and key.
    """

    optimizer: int
    count: int
    options: Mapping[str, str]
    location: Location | None
    held: tuple[str, ...] = ()
    reductions: int = -1
    averaged: bool = False
    unaveraged: tuple[str, ...] = ()
    norms: Mapping[str, float] = field(default_factory=dict)
    states: Mapping[str, float] = field(default_factory=dict)
    alone: Mapping[str, int] = field(default_factory=dict)
    gradients: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    marks: tuple[int, ...] = ()
    unknown: tuple[str, ...] = ()
    collectives: int = 0
    idle: tuple[str, ...] = ()
    made: Location | None = None
    rate: Location | None = None
    schedule: ScheduleState | None = None
    summed: tuple[str, ...] = ()
    summed_at: Location | None = None
    left_out_at: tuple[Location, ...] = ()
    late_sum_at: Location | None = None
    restored_at: Location | None = None
    rescaled_at: Location | None = None
    norm_at: Location | None = None
    shards: int = 0
    shard_scales: Mapping[str, float] = field(default_factory=dict)
    in_fsdp1: int = 0
    made_with: str = ""
    shard_states: Mapping[str, float] = field(default_factory=dict)
    changed_at: Location | None = None


class OptimizerEnd(Entry, frozen=True):
    """How often an optimizer has stepped when the script ends, and `marks` as above."""

    optimizer: int
    count: int
    reductions: int
    marks: tuple[int, ...] = ()
    schedule: ScheduleState | None = None


class StateHeld(Entry, frozen=True):
    """A model that the program holds, and neither a wrapper nor an optimizer does, before an optimizer steps.

    Attributes:
        optimizer: The number of the optimizer.
        count: How often it has stepped before.
        name: The variable in which the program holds it.
        kind: Its class.
        values: Fingerprints, by name.
        copies: Whether these are the parameters of a copy of what is in a wrapper; else the buffers of a module through
            which backward comes.
        used: Whether its forward has been called.
        location: The line that assigns the variable.
        together: How often collectives have brought each of its tensors together.
        other: Whether these are the parameters of a module that is no copy, and that is called.
    """

    optimizer: int
    count: int
    name: str
    kind: str
    values: Mapping[str, int]
    copies: bool
    used: bool
    location: Location | None
    together: int = 0
    other: bool = False


class ScaledTerm(Struct, frozen=True):
    """A sum or a mean that a loss is put together from by arithmetic.

    Attributes:
        kind: "sum" or "mean".
        factor: The gradient that arrives at it in backward: by what the loss multiplies it.
        count: The number of its elements.
        chosen: Whether these are some of a tensor, chosen by an index or a mask.
        divisors: The numbers by which it is divided on the way to the loss.
        multipliers: Those by which it is multiplied.
        location: The line of a variable in which it is with fewer others than in the loss.
    """

    kind: str
    factor: float
    count: int
    chosen: bool = False
    divisors: tuple[float, ...] = ()
    multipliers: tuple[float, ...] = ()
    location: Location | None = None


class NumberReduced(Struct, frozen=True):
    """A number that a rank has given to an all_reduce over all ranks, which sums it.

    Attributes:
        value: The rank's own.
        location: The line of the call.
    """

    value: float
    location: Location | None


class LossDifferentiated(Entry, frozen=True):
    """A backward pass has come from a loss.

    Attributes:
        step: How often optimizers had stepped before.
        number: Of the backward pass in that step, counted from 0.
        terms: Of the loss.
        location: The line of the script that calls backward.
        made: The line that computes the loss, or reduces it to one number.
        scaled: The line that multiplies or divides it by the world size; `None` where none does.
        wrappers: The numbers of the wrappers that have averaged its gradients.
        put_off: Of those that have not, and are to average them with the gradients of a later one.
        batches: How many the script has taken from the loaders that it goes through; 0 without a loader.
        reduced: What all_reduce has been given in the step so far.
        hooked: Whether numbers are reduced, and hooks of the script, which may scale gradients, are on parameters.
    """

    step: int
    number: int
    terms: tuple[ScaledTerm, ...]
    location: Location | None
    made: Location | None = None
    scaled: Location | None = None
    wrappers: tuple[int, ...] = ()
    put_off: tuple[int, ...] = ()
    batches: int = 0
    reduced: tuple[NumberReduced, ...] = ()
    hooked: bool = False


class MetricUsed(Entry, frozen=True):
    """A learning rate schedule has been given a metric, or a callback decides by one.

    Attributes:
        schedule: The number of the schedule or the callback, in the order of first use.
        count: How many metrics it has had before.
        value: Of the metric.
        location: The line that hands it over, or logs it.
        optimizer: Of a schedule, the number of its optimizer.
        user: The class of what uses it.
        metric: Its name, where it has one.
    """

    schedule: int
    count: int
    value: float
    location: Location | None
    optimizer: int = -1
    user: str = "ReduceLROnPlateau"
    metric: str = ""


class GradientsClipped(Entry, frozen=True):
    """Gradients of a norm were clipped, for the `count`-th time, by a function; `step`: after so many steps.

    `limit` is what it was given, where it clips by the norm of all; 0.0 where that is not known. `of_parts`: ranks have
    parts of the model of their own, whose gradients the norm may be of.
    """

    count: int
    norm: float
    location: Location | None
    step: int = 0
    by: str = "clip_grad_norm_"
    limit: float = 0.0
    of_parts: bool = False


class GradientsZeroed(Entry, frozen=True):
    """Gradients that were not zero were zeroed at a line, so many times before each of several optimizer steps."""

    optimizer: int
    times: int
    location: Location | None


class ReducedInPlace(Entry, frozen=True):
    """Backward has come through a tensor that a collective had overwritten.

    Attributes:
        operation: The collective.
        location: The line of the script that calls it.
        elements: Of the tensor.
        factor: The gradient that came, where there is one element.
        gradient: Fingerprint of the gradient that came; 0 where the collective is no sum or average of all ranks.
        is_average: Whether it is an average.
    """

    operation: str
    location: Location | None
    elements: int
    factor: float | None = None
    gradient: int = 0
    is_average: bool = False


class FilesLeft(Entry, frozen=True):
    """By path of the files that the script has opened to write them, their bytes when it removed them, or ended."""

    sizes: Mapping[str, int]


class FileUsed(Entry, frozen=True):
    """The script has written or read a file.

    Attributes:
        path: Of the file.
        writes: Whether it was written.
        began: How many collectives of all ranks this rank had come to when it began.
        ended: And when it was done.
        location: The line of the script.
        devices: Of the tensors that were read, and whether a `map_location` was given.
        device: The current one of this rank.
        mapped: Whether `map_location` was given.
        waited: Whether the rank had waited for others since its last collective of all ranks: in a receive, in a
            collective of some of them, at the store.
        by_torch: Whether it is a file of `torch.save`; of others it is only known that they were opened: to be written,
            to be read soon after somebody had written them, or, with `waited`, to be there (a lock, a mark).
        shard: Of a file that has all shards of a model which this rank holds: the number of its shard, and of how many.
    """

    path: str
    writes: bool
    began: int
    ended: int
    location: Location | None
    devices: tuple[str, ...] = ()
    device: str = ""
    mapped: bool = False
    waited: bool = False
    by_torch: bool = True
    shard: tuple[int, int] | None = None
