"""Evidence on a rank's module: as it is built, and as it is wrapped.

Judged in `judge.replicas.descriptions` and `judge.replicas.descriptions`; gathered in
`gather.state.module_description` and `gather.ddp`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct, field

from ddpcheck.findings.figures import ModuleEntry
from ddpcheck.findings.from_json import added
from ddpcheck.findings.report import Location

MAY_DIFFER = frozenset({"module", "device_ids", "output_device"})
"""Arguments of the DDP constructor that belong to the rank."""

WHEN_NONE: Mapping[str, object] = {"broadcast_buffers": True, "forward_sync_buffers": True, "bucket_cap_mb": 25}
"""Values that DDP's constructor uses for None."""

_LOCAL = frozenset({"gradient_as_bucket_view", "batched_grad_copy", "check_reduction", "dim"})
_OF_BUCKETS = "bucket_cap_mb"


def are_harmless(differing: Iterable[str], options: Sequence[Mapping[str, str]]) -> bool:
    """Whether the ranks still compute the right gradients and updates although these options differ.

    Measured on torch 2.13 with gloo: ranks may store their gradients in different ways. Rank 0 sends its bucket sizes
    to all ranks when buckets are rebuilt after the first step, which is not done under `find_unused_parameters`; the
    first step has one bucket, unless `bucket_cap_mb_list` says otherwise.

    Args:
        differing: Names of options.
        options: All of them, one mapping a rank.
    """
    fixed_buckets = any(
        of_rank.get("find_unused_parameters") == "True" or of_rank.get("bucket_cap_mb_list", "None") != "None"
        for of_rank in options
    )
    return all(
        name in _LOCAL or name.endswith(" order") or (name == _OF_BUCKETS and not fixed_buckets) for name in differing
    )


class TensorRecord(Struct, frozen=True):
    """A parameter or buffer, without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    requires_grad: bool
    device: str


class ModuleDescription(Struct, frozen=True):
    """The parameters, buffers and submodules of one rank's module."""

    parameters: tuple[TensorRecord, ...] = ()  # in registration order, which is the order in which DDP pairs them
    buffers: tuple[TensorRecord, ...] = ()  # likewise
    ties: tuple[tuple[str, ...], ...] = ()  # the names of each parameter that has several
    # name, class, options in the words of `extra_repr`, and training mode of each submodule
    modules: tuple[tuple[str, str, str, bool], ...] = ()
    # name, shape and fingerprint of tensors that are held without being registered
    state: tuple[tuple[str, tuple[int, ...], int], ...] = ()
    uninitialised: tuple[str, ...] = ()  # names of lazy parameters and buffers that have no shape yet


@dataclass(frozen=True, slots=True)
class BuiltModule:
    """A rank's module before it is wrapped.

    Attributes:
        digest: Of its description.
        uninitialised: Names of lazy parameters.
        trainable: How many parameters require grad.
        parameters: How many there are.
        modules: For a report; of rank 0 only, which stands for all, and of a large model not all.
        large: Whether copies of it are kept in files.
    """

    digest: str
    uninitialised: tuple[str, ...]
    trainable: int
    parameters: int
    modules: tuple[ModuleEntry, ...] = added(())
    large: bool = added(False)


class WrapperFacts(Struct, frozen=True):
    """The arguments of the wrapper's constructor that decide what it does with gradients."""

    is_ddp: bool = True  # False for a wrapper that is no `DistributedDataParallel`
    find_unused_parameters: bool = False  # the option of that name
    static_graph: bool = False  # likewise
    ignored: frozenset[str] = frozenset()  # parameters that it was told to ignore
    delayed: frozenset[str] = frozenset()  # parameters named in `delay_all_reduce_named_params`
    comm_hook: str = ""  # name of the communication hook, and its line where it is the user's; empty without one
    sparse: frozenset[str] = frozenset()  # parameters whose gradient is sparse
    not_saved: frozenset[str] = frozenset()  # buffers that a state dict leaves out

    @property
    def tolerates_unused(self) -> bool:
        """Whether a parameter that never takes part does not stop training."""
        return self.find_unused_parameters or self.static_graph

    @property
    def named(self) -> str:
        """What synchronises gradients, in a word."""
        return "DDP"

    @property
    def sharded(self) -> bool:
        """Whether `fully_shard` has sharded the module."""
        return False

    @property
    def goes_on_without(self) -> bool:
        """Whether training goes on without a parameter that no rank uses: then only all steps tell whether any does."""
        return self.tolerates_unused or self.sharded

    @property
    def tolerates_absence(self) -> bool:
        """Whether a parameter may be unused on some ranks alone."""
        return self.find_unused_parameters


class ShardedFacts(WrapperFacts, frozen=True):
    """What `fully_shard` has made of a module, in the place of a wrapper; `ignored` are in none of its groups."""

    reduces_unused: bool = False  # whether it reduces zeros in the place of gradients that are missing on a rank
    # fingerprint of each parameter as this rank has built it, of which the rank still holds its shard
    values_built: Mapping[str, int] = field(default_factory=dict)
    alone: bool = False  # whether `parallelize_module` has split it, and no `fully_shard`
    # the `mp_policy` that it was given, in words, by what it is of; of parts, if it is another one there
    policies: Mapping[str, str] = field(default_factory=dict)

    @property
    def named(self) -> str:
        """What synchronises gradients, in a word."""
        return "tensor parallelism" if self.alone else "fully_shard"

    @property
    def sharded(self) -> bool:
        """Whether `fully_shard` has sharded the module."""
        return True

    @property
    def tolerates_absence(self) -> bool:
        """Whether a parameter may be unused on some ranks alone."""
        return self.reduces_unused


class GradientHook(Struct, frozen=True):
    """A place in the user's code at which gradients may be changed on their way."""

    description: str
    location: Location | None = None

    def __str__(self) -> str:
        return f"{self.description}{f' at {self.location}' if self.location else ''}"


class WrappedModule(Struct, frozen=True):
    """A rank's module after wrapping, with its wrapper and its optimizer."""

    facts: WrapperFacts  # on the wrapper
    options: Mapping[str, str]  # of the wrapper, in words
    optimizer: Mapping[str, str]  # of the optimizer, in words
    parameters: Mapping[str, int]  # fingerprint of each parameter
    buffers: Mapping[str, int]  # of each buffer
    loss_location: Location | None  # the line that defines the loss
    wrapper: str  # its class
    broadcasts_buffers: bool  # whether the wrapper broadcasts buffers before a forward
    # what happened to parameters since DDP was constructed, in words
    changes: Mapping[str, str] = field(default_factory=dict)
    # fingerprint of each parameter when DDP had been constructed; empty for another wrapper
    parameters_at_construction: Mapping[str, int] = field(default_factory=dict)
    # whether `wrap` has made another module of it, with parameters of other names or shapes
    replaces_module: bool = False
    transfer_error: str = ""  # why the single process cannot have that module
    foreign_tensors: int = 0  # how many tensors the optimizer holds that are no parameters of the module
    not_in_optimizer: tuple[str, ...] = ()  # parameters that require grad and that no group of the optimizer holds
    hooks: tuple[GradientHook, ...] = ()  # what the recipe's `wrap` puts in the way of gradients

    @property
    def together(self) -> tuple[int, ...]:
        """The ranks that compute one model with this rank (tensor parallelism); none where each has its own."""
        return ()


class SplitModule(WrappedModule, frozen=True):
    """A rank's part of a module that tensor parallelism splits."""

    model_ranks: tuple[int, ...] = ()  # those that compute it together

    @property
    def together(self) -> tuple[int, ...]:
        """The ranks that compute one model with this rank."""
        return self.model_ranks
