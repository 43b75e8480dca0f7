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
    """The script has restored the state of an optimizer."""

    # how many that has made, by its own counters, by what it was when the state was taken, or by a number in the file;
    # 0 where nothing says
    steps: int
    epochs: int  # how many epochs there had been, by a number in the file
    location: Location | None  # the line of the script


class LoaderPass(Entry, frozen=True):
    """One pass of a loop over a `DataLoader`, as far as the rank came."""

    loader: int  # the number of the loader, in the order in which this rank first used them
    number: int  # of the pass over this loader, counted from 0
    location: Location | None  # the line of the script that begins it
    dataset: str = ""  # the class of the dataset
    size: int = -1  # how many samples it has; negative where it does not say
    # of what the dataset holds, by attribute; empty where it holds nothing plain
    digest: Mapping[str, int] = field(default_factory=dict)
    expected: int = -1  # how many batches the loader says that it has; negative where it does not say
    batch_size: int = 1  # samples of a batch
    sampler: str = ""  # the class of the sampler
    shuffles: bool = False  # whether the sampler says so; or a copy of it gives another order in another epoch
    replaces: bool = False  # whether the sampler says that it draws with replacement
    has_epoch: bool = False  # whether the sampler has `set_epoch`
    batches: int = 0  # how many batches the script took
    skipped: int = 0  # of them, those that were gone before a wrapper or an optimizer was used, but for the last taken
    exhausted: bool = False  # whether it took all of them
    trains: bool = False  # whether an optimizer stepped meanwhile
    order: int = 0  # a digest of all indices in their order; 0 where the sampler gives none
    indices: tuple[int, ...] = ()  # the first indices, in the dataset beneath all of torch's `Subset`
    subset: tuple[int, ...] = ()  # the indices of a `Subset`; empty for another dataset
    # by place in a batch, digests of the first samples by index
    contents: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    # digests of the states of random generators before and after the samples of a batch, of those that changed
    draws: Mapping[int, int] = field(default_factory=dict)
    worker_seed: int = -1  # from which workers seed theirs; negative if there are none, or they seed in another way
    chooses: bool = False  # whether the sampler holds the indices of some of the samples, from which it draws
    wrappers: int = 0  # how many there had been when it ended: shards are known from their first forward pass on
    data: int = 0  # the number of the dataset, in the order in which they were first gone through
    made: Location | None = None  # the line that constructs the sampler beneath, or the loader where that is not known
    split: Location | None = None  # the line that makes the `Subset`
    seeded: Location | None = None  # the line that has last seeded the generator from which samples are made
    # fingerprints of all samples as they were taken, without labels; empty if too many, or no tensors on the CPU
    rows: tuple[int, ...] = ()
    # likewise of their labels, if they have some: tensors of one whole number for each sample
    labels: tuple[int, ...] = ()
    classes: tuple[int, ...] = ()  # these labels themselves, where each sample has just one
    whole: int = 0  # the rows of the array of which the dataset holds some; -1 where it holds names of files or texts
    # by what the dataset holds of its samples, fingerprints of the first of them
    samples: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # a digest of what the global random generators had given before it, or its sampler, was constructed; 0 where that
    # is not known
    drawn: int = 0
    replicas: int = 0  # between how many ranks the sampler splits, where it is torch's
    # digests of the plain attributes of the dataset, as this process has it when the pass begins
    state: Mapping[str, int] = field(default_factory=dict)
    persistent: bool = False  # whether workers stay from one pass to the next
    epoch: int = -1  # of the sampler; negative where it does not say
    told: Location | None = None  # the line that has last told it the epoch
    restored: Restored | None = None  # an optimizer was, and no pass has trained since
    steps: int = 0  # how often optimizers stepped meanwhile
    workers: int = 0  # processes of the loader that make its batches
    targets: tuple[float, ...] = ()  # likewise numbers, where each sample has just one that is floating-point
    held: tuple[int, ...] = ()  # the keys of `draws` that are states of generators which the dataset holds
    held_at: Location | None = None  # the line that assigns the first of these generators
    restored_by: str = ""  # the function that has restored a state of it at `seeded`; empty if it was seeded
    holds_samples: bool = False  # whether some of `samples` are these themselves: rows of many numbers, or files there
    stay_at: Location | None = None  # the line that has the workers stay, where they do
    outdated: bool = False  # whether the dataset makes other samples than when its workers, which stay, were started
    epochs_at: Location | None = None  # the head of the loop that begins the pass
    dealt: int = 0  # the `total_size` of the sampler, of which each rank takes its part
    part: int = 0  # how many samples the sampler says that it gives


class Inputs(Entry, frozen=True):
    """What a wrapper's forward was given in a step."""

    wrapper: int  # the number of the wrapper
    step: int  # how many averaged backward passes had ended before
    # a fingerprint of each sample, or one of all tensors where they do not agree on the number of samples
    samples: tuple[int, ...]
    location: Location | None  # the line of the script that calls forward
    parts: tuple[tuple[int, int], ...] = ()  # of each tensor, a fingerprint and the number of its elements
    # a sketch of what the script has added to samples of a loader; empty where that is nothing, or unknown
    added: tuple[float, ...] = ()


class Evaluated(Entry, frozen=True):
    """What a wrapper's forward was given without gradients, in one of its first passes of that kind."""

    wrapper: int  # the number of the wrapper
    step: int  # how many averaged backward passes had ended before
    samples: tuple[int, ...]  # as `Inputs.samples`


OF_A_LIST = ".index()"  # ends the name of the table of a list


class DerivedTable(Entry, frozen=True):
    """A dictionary of plain values that the script holds when an optimizer first steps; or a list put together of a
    set of texts, with the place of each.
    """

    name: str
    values: Mapping[str, str]
    location: Location | None


class OptimizerStep(Entry, frozen=True):
    """An optimizer is about to step."""

    optimizer: int  # its number among those that have stepped on this rank
    count: int  # how often it has stepped before
    # its class and what its groups have been given, but for their parameters (a sharded one has its own)
    options: Mapping[str, str]
    location: Location | None  # the line of the script
    # the parameters of wrappers that it holds, by number of the wrapper and name ("0/head.weight")
    held: tuple[str, ...] = ()
    # averaged backward passes so far of the wrappers whose parameters it holds; negative where it holds none of any
    # wrapper
    reductions: int = -1
    averaged: bool = False  # whether there was one since it last stepped, and none that was not averaged
    unaveraged: tuple[str, ...] = ()  # its parameters in wrappers that have averaged nothing since then
    # the norm of the gradient of each parameter in a wrapper, by name
    norms: Mapping[str, float] = field(default_factory=dict)
    # the norms of its state, by name of the parameter and key
    states: Mapping[str, float] = field(default_factory=dict)
    # the values of parameters in no wrapper, as fingerprints, by name
    alone: Mapping[str, int] = field(default_factory=dict)
    # sketches of their gradients; empty for one that has none
    gradients: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    marks: tuple[int, ...] = ()  # fingerprints of one of them, at each step since the last entry
    unknown: tuple[str, ...] = ()  # of them, those that no module has
    collectives: int = 0  # how many collectives of all ranks this rank has come to before
    idle: tuple[str, ...] = ()  # the parameters of its wrappers that optimizers hold which have not stepped yet
    made: Location | None = None  # the line that has constructed it
    # the line that decides its learning rate, but for the constructor: of its schedule, or the only one that assigns a
    # rate
    rate: Location | None = None
    schedule: ScheduleState | None = None  # of its learning rate
    summed: tuple[str, ...] = ()  # the parameters whose gradient is just as an all_reduce has left it that sums
    summed_at: Location | None = None  # the line of that all_reduce, else of the last one that sums since backward
    # sketches of some gradients in no wrapper, by name: as the last backward pass has left them, and before a clip
    local: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    unclipped: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    # the lines that may leave it out after the backward pass: tests around it, and early exits
    left_out_at: tuple[Location, ...] = ()
    # the line that has gradients all_reduced after an earlier step had used them, before any other backward pass;
    # `None` where there was none
    late_sum_at: Location | None = None
    restored_at: Location | None = None  # the line that has last given it a state, by `load_state_dict`
    # the line that scales gradients by the number of ranks, in the functions that lead to the step
    rescaled_at: Location | None = None
    norm_at: Location | None = None  # the line that takes a norm of the shards of gradients, likewise
    # how many parameters that it trains are shards of this rank (DTensor), with norms and state of a part
    shards: int = 0
    # by what factor the gradient of each of them has grown since its reduction, as far as that is known, in its norm
    shard_scales: Mapping[str, float] = field(default_factory=dict)
    in_fsdp1: int = 0  # how many of its parameters a `FullyShardedDataParallel` holds
    # a digest of the learning rates of its groups when it was constructed; empty where that was not seen
    made_with: str = ""
    # of parameters of which this rank has a part: the norms of that part of their state, and steps that were counted,
    # by name of the parameter and key
    shard_states: Mapping[str, float] = field(default_factory=dict)
    # the one line that writes gradients between backward and the step, if there is just one
    changed_at: Location | None = None
    # the line of the largest collective of all ranks since the last backward pass, and before the first one
    reduced_at: Location | None = None
    broadcast_at: Location | None = None
    scale: float = 0.0  # of the GradScaler that makes the step; 0 without one
    scale_at: Location | None = None  # the line that has loaded it
    # the seed of torch's generator when the first parameter was made, if that is known, and the line that has set it
    seed: int | None = None
    seeded: Location | None = None
    # without a wrapper, fingerprints of what was given to each all_reduce of all ranks in this step, if it is as many
    # elements as its gradients have
    given: tuple[int, ...] = ()
    # the parameters that this rank has for itself (experts, tables) of which an all_reduce of all ranks was given the
    # gradient several times so far, and the line of the last of these calls
    parts_reduced: tuple[str, ...] = ()
    parts_reduced_at: Location | None = None


class OptimizerEnd(Entry, frozen=True):
    """How often an optimizer has stepped when the script ends, and `marks` as above."""

    optimizer: int
    count: int
    reductions: int
    marks: tuple[int, ...] = ()
    schedule: ScheduleState | None = None


class StateHeld(Entry, frozen=True):
    """A model that the program holds, and neither a wrapper nor an optimizer does, before an optimizer steps."""

    optimizer: int  # the number of the optimizer
    count: int  # how often it has stepped before
    name: str  # the variable in which the program holds it
    kind: str  # its class
    values: Mapping[str, int]  # fingerprints, by name
    # whether these are the parameters of a copy of what is in a wrapper; else the buffers of a module through which
    # backward comes
    copies: bool
    used: bool  # whether its forward has been called
    location: Location | None  # the line that assigns the variable
    together: int = 0  # how often collectives have brought each of its tensors together
    other: bool = False  # whether these are the parameters of a module that is no copy, and that is called


class ScaledTerm(Struct, frozen=True):
    """A sum or a mean that a loss is put together from by arithmetic."""

    kind: str  # "sum" or "mean"
    factor: float  # the gradient that arrives at it in backward: by what the loss multiplies it
    count: int  # the number of its elements
    chosen: bool = False  # whether these are some of a tensor, chosen by an index or a mask
    divisors: tuple[float, ...] = ()  # the numbers by which it is divided on the way to the loss
    multipliers: tuple[float, ...] = ()  # those by which it is multiplied
    location: Location | None = None  # the line of a variable in which it is with fewer others than in the loss
    # terms with the same number are of one operation on what one head gives: of a sample each, say
    head: int | None = None


class NumberReduced(Struct, frozen=True):
    """A number that a rank has given to an all_reduce, which sums it."""

    value: float  # the rank's own
    location: Location | None  # the line of the call
    members: tuple[int, ...] = ()  # the ranks over which it sums; empty for all


class LossTarget(Struct, frozen=True):
    """What one of torch's losses has as its target."""

    digest: int  # a fingerprint
    rows: int
    elements: int
    bits: float  # how much the order of its values says; 0.0 where they are sorted, or in blocks of equal ones


class LossDifferentiated(Entry, frozen=True):
    """A backward pass has come from a loss."""

    step: int  # how often optimizers had stepped before
    number: int  # of the backward pass in that step, counted from 0
    terms: tuple[ScaledTerm, ...]  # of the loss
    location: Location | None  # the line of the script that calls backward
    made: Location | None = None  # the line that computes the loss, or reduces it to one number
    scaled: Location | None = None  # the line that multiplies or divides it by the world size; `None` where none does
    wrappers: tuple[int, ...] = ()  # the numbers of the wrappers that have averaged its gradients
    put_off: tuple[int, ...] = ()  # of those that have not, and are to average them with the gradients of a later one
    batches: int = 0  # how many the script has taken from the loaders that it goes through; 0 without a loader
    reduced: tuple[NumberReduced, ...] = ()  # what all_reduce has been given in the step so far
    # whether numbers are reduced, and hooks of the script, which may scale gradients, are on parameters
    hooked: bool = False
    targets: tuple[LossTarget, ...] = ()  # none where ranks have gathered or broadcast something for the step
    # of each cross entropy, what its targets weigh together, where each counts as one: smoothed and mixed labels, too
    weighed: tuple[float, ...] = ()
    # the function that calls the model, if a trainer gives it the number of items of the step, and it reads it nowhere
    uncounted: Location | None = None


class MetricUsed(Entry, frozen=True):
    """A learning rate schedule has been given a metric, or a callback decides by one."""

    schedule: int  # the number of the schedule or the callback, in the order of first use
    count: int  # how many metrics it has had before
    value: float  # of the metric
    location: Location | None  # the line that hands it over, or logs it
    optimizer: int = -1  # of a schedule, the number of its optimizer
    user: str = "ReduceLROnPlateau"  # the class of what uses it
    metric: str = ""  # its name, where it has one


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
    """Backward has come through a tensor that a collective had overwritten."""

    operation: str  # the collective
    location: Location | None  # the line of the script that calls it
    elements: int  # of the tensor
    factor: float | None = None  # the gradient that came, where there is one element
    gradient: int = 0  # fingerprint of the gradient that came; 0 where the collective is no sum or average of all ranks
    is_average: bool = False  # whether it is an average


class FilesLeft(Entry, frozen=True):
    """By path of the files that the script has opened to write them, their bytes when it removed them, or ended."""

    sizes: Mapping[str, int]


class FileUsed(Entry, frozen=True):
    """The script has written or read a file."""

    path: str  # of the file
    writes: bool  # whether it was written
    began: int  # how many collectives of all ranks this rank had come to when it began
    ended: int  # and when it was done
    location: Location | None  # the line of the script
    devices: tuple[str, ...] = ()  # of the tensors that were read, and whether a `map_location` was given
    device: str = ""  # the current one of this rank
    mapped: bool = False  # whether `map_location` was given
    # whether the rank had waited for others since its last collective of all ranks: in a receive, in a collective of
    # some of them, at the store
    waited: bool = False
    # whether it is a file of `torch.save`; of others it is only known that they were opened: to be written, to be read
    # soon after somebody had written them, or, with `waited`, to be there (a lock, a mark)
    by_torch: bool = True
    # of a file that has all shards of a model which this rank holds: the number of its shard, and of how many
    shard: tuple[int, int] | None = None
