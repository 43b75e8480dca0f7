"""Evidence on an unmodified script: data, optimizers and files, by rank."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from ddpcheck.findings.evidence import Entry
from ddpcheck.findings.evidence.loop import ScheduleState
from ddpcheck.findings.report import Location


class Restored(Struct, frozen=True):
    """Restored state of an optimizer."""

    # restored steps: from counters of the optimizer, from its steps when the state was taken, or from a number in the
    # file; 0 if unknown
    steps: int
    epochs: int  # restored epochs, from a number in the file
    location: Location | None  # line of the script


class LoaderPass(Entry, frozen=True):
    """Pass of a loop over a `DataLoader`, complete or not."""

    loader: int  # number of the loader, in order of first use on this rank
    number: int  # number of the pass over the loader, from 0
    location: Location | None  # line that begins the pass
    dataset: str = ""  # class of the dataset
    size: int = -1  # number of samples; negative if unknown
    digest: Mapping[str, int] = field(default_factory=dict)  # of plain data of the dataset, by attribute
    expected: int = -1  # number of batches according to the loader; negative if unknown
    batch_size: int = 1  # samples per batch; 1 if unknown
    sampler: str = ""  # class of the sampler
    shuffles: bool = False  # True if the sampler says so, or if a copy gives another order in another epoch
    replaces: bool = False  # True if the sampler says that samples are drawn with replacement
    has_epoch: bool = False  # True if the sampler has `set_epoch`
    batches: int = 0  # batches taken by the script
    skipped: int = 0  # batches consumed before a wrapper or an optimizer was used, except the last batch
    exhausted: bool = False  # True if all batches were taken
    trains: bool = False  # True if an optimizer stepped during the pass
    order: int = 0  # digest of all indices in order; 0 if the sampler gives none
    indices: tuple[int, ...] = ()  # first indices, in the dataset beneath all of torch's `Subset`
    subset: tuple[int, ...] = ()  # indices of a `Subset`; empty for another dataset
    # digests of the first samples by index, by place in a batch
    contents: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    # digests of states of random generators before and after the samples of a batch, if changed
    draws: Mapping[int, int] = field(default_factory=dict)
    worker_seed: int = -1  # base seed of workers; negative if no workers, or seeded in another way
    draws_from_list: bool = False  # True if the sampler draws from a list of indices of some samples
    wrappers: int = 0  # number of wrappers when the pass ended; `fully_shard` counts from the first forward pass on
    data: int = 0  # number of the dataset, in order of first use
    built_at: Location | None = None  # line that constructs the innermost sampler, or the loader if unknown
    subset_at: Location | None = None  # line that makes the `Subset`
    seeded_at: Location | None = None  # line that last seeded the generator of the samples
    # fingerprints of all samples in order, without labels; empty if too many, or not tensors on the CPU
    rows: tuple[int, ...] = ()
    labels: tuple[int, ...] = ()  # fingerprints of integer label tensors, one per sample, in the same order
    classes: tuple[int, ...] = ()  # integer labels, if each sample has exactly one
    base_rows: int = 0  # rows of the array of which the dataset has a part; -1 for file names or texts
    # fingerprints of the first samples, by attribute of the dataset
    samples: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    earlier_draws: int = 0  # digest of global random draws before the sampler was constructed; 0 if unknown
    replicas: int = 0  # number of ranks that torch's sampler splits the data between
    # digests of plain attributes of the dataset in this process when the pass begins
    state: Mapping[str, int] = field(default_factory=dict)
    persistent: bool = False  # True if workers persist between passes
    epoch: int = -1  # of the sampler; negative if unknown
    epoch_set_at: Location | None = None  # line that last set the epoch of the sampler
    restored: Restored | None = None  # optimizer state restored since the last training pass
    steps: int = 0  # optimizer steps during the pass
    workers: int = 0  # worker processes of the loader
    targets: tuple[float, ...] = ()  # floating-point labels, if each sample has exactly one
    dataset_draws: tuple[int, ...] = ()  # keys of `draws` that are states of generators of the dataset
    generator_at: Location | None = None  # line that assigns the first generator of the dataset
    restored_by: str = ""  # function that restored a generator state at `seeded`; "" if seeded
    holds_samples: bool = False  # True if some `samples` are whole samples: rows of many numbers, or existing files
    persistent_at: Location | None = None  # line that makes the workers persistent
    outdated: bool = False  # True if the samples of the dataset changed since persistent workers were started
    epochs_at: Location | None = None  # head of the loop that begins the pass
    total_size: int = 0  # `total_size` of the sampler, divided among the ranks
    num_samples: int = 0  # number of samples according to the sampler


class Inputs(Entry, frozen=True):
    """Inputs of a wrapper's forward in a step."""

    wrapper: int  # number of the wrapper
    step: int  # averaged backward passes before
    samples: tuple[int, ...]  # fingerprint of each sample, or one of all tensors if batch sizes differ
    location: Location | None  # line that calls forward
    parts: tuple[tuple[int, int], ...] = ()  # (fingerprint, number of elements) of each tensor
    noise: tuple[float, ...] = ()  # sketch of data added to samples of a loader; empty if none, or unknown


class EvaluationInputs(Entry, frozen=True):
    """Inputs of a wrapper in one of the first 64 forward passes without gradients."""

    wrapper: int  # number of the wrapper
    step: int  # averaged backward passes before
    samples: tuple[int, ...]  # as `Inputs.samples`


OF_A_LIST = ".index()"  # suffix of the table name of a list


class DerivedTable(Entry, frozen=True):
    """Lookup table of the script (dictionary or list), which should agree across ranks.

    `values` has the items of a dictionary. For a list made from a set, `values` maps each string to its index.
    """

    name: str
    values: Mapping[str, str]
    location: Location | None


class OptimizerStep(Entry, frozen=True):
    """State of an optimizer and its parameters before a step."""

    optimizer: int  # number among the optimizers that have stepped on this rank
    count: int  # earlier steps of the optimizer
    # class and group options, without parameters (which differ if sharded)
    options: Mapping[str, str]
    location: Location | None  # line of the script
    ddp_params: tuple[str, ...] = ()  # wrapped parameters, with the number of the wrapper ("0/head.weight")
    reductions: int = -1  # averaged backward passes of the wrappers of `ddp_params`; negative if there are none
    averaged: bool = False  # True if backward ran since the last step, and every pass was averaged
    unaveraged: tuple[str, ...] = ()  # parameters in wrappers that averaged nothing since the last step
    norms: Mapping[str, float] = field(default_factory=dict)  # gradient norm of each wrapped parameter, by name
    states: Mapping[str, float] = field(default_factory=dict)  # norms of optimizer state, by parameter name and key
    local_params: Mapping[str, int] = field(default_factory=dict)  # fingerprints of parameters in no wrapper, by name
    # gradient sketches of parameters in no wrapper; empty without gradient
    gradients: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    marks: tuple[int, ...] = ()  # fingerprint of the smallest of `local_params` at each step since the last entry
    loose_params: tuple[str, ...] = ()  # parameters in no wrapper and no module
    collectives: int = 0  # earlier collectives of all ranks on this rank
    idle_params: tuple[str, ...] = ()  # parameters of the same wrappers in optimizers that have not stepped yet
    built_at: Location | None = None  # line that constructs the optimizer
    # line that decides the learning rate after construction: of the schedule, or the only line that assigns a rate
    rate: Location | None = None
    schedule: ScheduleState | None = None  # of the learning rate
    summed: tuple[str, ...] = ()  # parameters whose gradient is exactly the output of a summing all_reduce
    summed_at: Location | None = None  # line of that all_reduce, else of the last summing all_reduce since backward
    # sketches of some gradients in no wrapper, by name: after the last backward pass, and before clipping
    local: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    unclipped: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    left_out_at: tuple[Location, ...] = ()  # lines that may skip the step after backward: tests and early exits
    # line that all_reduces gradients after an earlier step used the gradients, before any other backward pass, or None
    late_sum_at: Location | None = None
    restored_at: Location | None = None  # line of the last `load_state_dict`
    # line that scales gradients by the number of ranks, in the functions that lead to the step
    rescaled_at: Location | None = None
    norm_at: Location | None = None  # line that takes a norm of gradient shards, in the functions that lead to the step
    shards: int = 0  # number of trained parameters that are shards (DTensor), with norms and state of a part
    # growth factor of the gradient norm of each shard since reduction, if known
    shard_scales: Mapping[str, float] = field(default_factory=dict)
    in_fsdp1: int = 0  # number of parameters in a `FullyShardedDataParallel`
    initial_rates: str = ""  # digest of the learning rates at construction; "" if unknown
    # norms of this rank's part of the state, and step counts, by name of the sharded parameter and key
    shard_states: Mapping[str, float] = field(default_factory=dict)
    changed_at: Location | None = None  # the only line that writes gradients between backward and the step, if unique
    # lines of the largest collective of all ranks: since the last backward pass, and before the first backward pass
    reduced_at: Location | None = None
    broadcast_at: Location | None = None
    scale: float = 0.0  # of the GradScaler that makes the step; 0 without GradScaler
    scale_at: Location | None = None  # line that loaded the scale
    # seed of torch's generator when the first parameter was made, if known, and the line that set the seed
    seed: int | None = None
    seeded_at: Location | None = None
    # without a wrapper: fingerprint of the input of each all_reduce of all ranks in the step, if the number of elements
    # equals the number of gradient elements
    allreduce_inputs: tuple[int, ...] = ()
    # parameters of this rank only (experts, tables) whose gradient was all_reduced over all ranks several times, and
    # the line of the last call
    own_reduced: tuple[str, ...] = ()
    own_reduced_at: Location | None = None


class OptimizerEnd(Entry, frozen=True):
    """State of an optimizer at the end of the script, as in `OptimizerStep`."""

    optimizer: int
    count: int
    reductions: int
    marks: tuple[int, ...] = ()
    schedule: ScheduleState | None = None


class LocalModel(Entry, frozen=True):
    """State, before an optimizer step, of a model outside all wrappers and optimizers."""

    optimizer: int  # number of the optimizer
    count: int  # earlier steps of the optimizer
    name: str  # variable of the model
    kind: str  # class of the model
    values: Mapping[str, int]  # fingerprints, by name
    # True for parameters of a copy of a wrapped module, False for buffers of a module that backward passes through
    is_copy: bool
    is_called: bool  # True if forward was called
    location: Location | None  # line that assigns the variable
    syncs: int = 0  # number of times that collectives synchronised every tensor of the model
    is_independent: bool = False  # True for parameters of a module that is called and is no copy


class ScaledTerm(Struct, frozen=True):
    """Sum or mean from which a loss is computed by arithmetic."""

    kind: str  # "sum" or "mean"
    factor: float  # gradient of the term in backward, the factor in the loss
    count: int  # number of elements
    is_selected: bool = False  # True if the elements are selected from a tensor by an index or a mask
    divisors: tuple[float, ...] = ()  # divisors on the way to the loss
    multipliers: tuple[float, ...] = ()  # multipliers on the way to the loss
    location: Location | None = None  # line of a variable with the term and fewer other terms than the loss
    head: int | None = None  # terms with equal numbers are of one operation on one head, such as one per sample


class NumberReduced(Struct, frozen=True):
    """Number of a rank that an all_reduce sums."""

    value: float  # value of this rank
    location: Location | None  # line of the call
    members: tuple[int, ...] = ()  # ranks of the group; empty for all


class LossTarget(Struct, frozen=True):
    """Target of a loss function of torch."""

    digest: int  # fingerprint
    rows: int
    elements: int
    bits: float  # information in the order of the values; 0.0 if sorted, or in blocks of equal values


class LossDifferentiated(Entry, frozen=True):
    """Backward pass of a loss."""

    step: int  # optimizer steps before
    number: int  # number of the backward pass in the step, from 0
    terms: tuple[ScaledTerm, ...]  # of the loss
    location: Location | None  # line that calls backward
    computed_at: Location | None = None  # line that computes the loss, or reduces the loss to one number
    scaled_at: Location | None = None  # line that multiplies or divides the loss by the world size, or None
    wrappers: tuple[int, ...] = ()  # numbers of the wrappers that averaged the gradients
    late_wrappers: tuple[int, ...] = ()  # numbers of the wrappers that average the gradients in a later backward pass
    batches: int = 0  # batches taken from the current loaders; 0 without a loader
    allreduce_inputs: tuple[NumberReduced, ...] = ()  # inputs of all_reduce in the step so far
    has_hooks: bool = False  # True if numbers are reduced and parameters have hooks of the script, which may scale
    targets: tuple[LossTarget, ...] = ()  # empty if ranks gathered or broadcast something for the step
    # total weight of the targets of each cross entropy, with weight 1 per target, even for smoothed or mixed labels
    target_weights: tuple[float, ...] = ()
    # function that calls the model and ignores the number of items of the step passed by a trainer
    uncounted_at: Location | None = None


class MetricUsed(Entry, frozen=True):
    """Metric passed to a learning rate schedule, or used by a callback."""

    schedule: int  # number of the schedule or callback, in order of first use
    count: int  # number of earlier metrics
    value: float  # of the metric
    location: Location | None  # line that passes or logs the metric
    optimizer: int = -1  # number of the optimizer of a schedule
    user: str = "ReduceLROnPlateau"  # class of the schedule or callback
    metric: str = ""  # name of the metric, if any


class GradientsClipped(Entry, frozen=True):
    """Call that clips gradients by function `by`, such as `clip_grad_norm_`.

    `count` and `step` count earlier clipping calls and optimizer steps. `norm` is measured before clipping. `limit` is
    the maximum norm, 0.0 if unknown. `of_parts` is True if ranks have parts of the model: `norm` may cover one part.
    """

    count: int
    norm: float
    location: Location | None
    step: int = 0
    by: str = "clip_grad_norm_"
    limit: float = 0.0
    of_parts: bool = False


class GradientsZeroed(Entry, frozen=True):
    """Line that zeroes nonzero gradients several times per step, as in the previous step."""

    optimizer: int
    times: int
    location: Location | None
    in_a_row: int = 0  # earlier steps in a row with the same zeroing; 0 in older logs


class ReducedInPlace(Entry, frozen=True):
    """Backward pass through a tensor that a collective had overwritten."""

    operation: str  # the collective
    location: Location | None  # line of the collective
    elements: int  # of the tensor
    factor: float | None = None  # incoming gradient, if one element
    gradient: int = 0  # fingerprint of the incoming gradient; 0 if the collective is no sum or average over all ranks
    is_average: bool = False  # True for an average


class FileSizes(Entry, frozen=True):
    """Size in bytes of each written file, when removed or at the script's end."""

    sizes: Mapping[str, int]


class FileUsed(Entry, frozen=True):
    """File that the script wrote or read."""

    path: str  # of the file
    writes: bool  # True if written
    began: int  # collectives of all ranks on this rank before the access
    ended: int  # collectives of all ranks on this rank when the access was done
    location: Location | None  # line of the script
    devices: tuple[str, ...] = ()  # of the tensors that were read
    device: str = ""  # current device of this rank
    maps_location: bool = False  # True if `map_location` was passed
    # True if the rank waited for others since the last collective of all ranks: in a receive, in a collective of a
    # subgroup, at the store
    has_waited: bool = False
    # True for a file of `torch.save`. Other files are recorded if opened for writing, for reading soon after a write,
    # or, with `waited`, to test for existence (a lock, a mark)
    by_torch: bool = True
    # (number of the shard, number of shards) of a file with all of this rank's shards of a model
    shard: tuple[int, int] | None = None
