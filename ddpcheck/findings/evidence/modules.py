"""Evidence on a rank's module before and after wrapping."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from msgspec import Struct, field

from ddpcheck.findings.figures import ModuleEntry
from ddpcheck.findings.from_json import added
from ddpcheck.findings.report import Location

MAY_DIFFER = frozenset({"module", "device_ids", "output_device"})
"""Arguments of the DDP constructor that belong to the rank."""

WHEN_NONE: Mapping[str, object] = {"broadcast_buffers": True, "forward_sync_buffers": True, "bucket_cap_mb": 25}
"""Values that DDP's constructor uses for None."""

_LOCAL = frozenset({"gradient_as_bucket_view", "batched_grad_copy", "check_reduction", "dim"})


def are_harmless_differences(differing: Iterable[str], options: Sequence[Mapping[str, str]]) -> bool:
    """Return True if training stays correct although wrapper options `differing` differ across ranks.

    Measured on torch 2.13 with gloo: options on the storage of gradients may differ. So may `bucket_cap_mb`, unless
    `find_unused_parameters` or `bucket_cap_mb_list` is set, since the first step has one bucket and rank 0 broadcasts
    the sizes of rebuilt buckets. `options` has one mapping per rank.
    """
    finds_unused = any(rank_options.get("find_unused_parameters") == "True" for rank_options in options)
    has_sizes = any(rank_options.get("bucket_cap_mb_list", "None") != "None" for rank_options in options)
    harmless = _LOCAL if finds_unused or has_sizes else _LOCAL | {"bucket_cap_mb"}
    return all(name in harmless or name.endswith(" order") for name in differing)


class TensorRecord(Struct, frozen=True):
    """Parameter or buffer, without values."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    requires_grad: bool
    device: str


class ModuleDescription(Struct, frozen=True):
    """Parameters, buffers and submodules of one rank's module."""

    parameters: tuple[TensorRecord, ...] = ()  # in registration order, by which DDP pairs parameters
    buffers: tuple[TensorRecord, ...] = ()  # in registration order
    ties: tuple[tuple[str, ...], ...] = ()  # names of each parameter with several names
    # name, class, options (`extra_repr`) and training mode of each submodule
    modules: tuple[tuple[str, str, str, bool], ...] = ()
    state: tuple[tuple[str, tuple[int, ...], int], ...] = ()  # name, shape and fingerprint of unregistered tensors
    uninitialised: tuple[str, ...] = ()  # names of lazy parameters and buffers without a shape


@dataclass(frozen=True, slots=True)
class BuiltModule:
    """Module of a rank before wrapping."""

    digest: str  # of the module description
    uninitialised: tuple[str, ...]  # names of lazy parameters
    trainable: int  # number of parameters that require grad
    parameters: int  # number of parameters
    modules: tuple[ModuleEntry, ...] = added(())  # for the report; from rank 0 only, truncated for a large model
    large: bool = added(False)  # True if copies of the module are kept in files


class WrapperFacts(Struct, frozen=True):
    """Constructor arguments of the wrapper that affect gradients, and related facts."""

    is_ddp: bool = True  # False for a wrapper that is no `DistributedDataParallel`
    find_unused_parameters: bool = False
    static_graph: bool = False
    ignored: frozenset[str] = frozenset()  # parameters that the wrapper ignores
    delayed: frozenset[str] = frozenset()  # parameters in `delay_all_reduce_named_params`
    comm_hook: str = ""  # name of the communication hook, with the line of a user's hook; "" if none
    sparse: frozenset[str] = frozenset()  # parameters with sparse gradients
    not_saved: frozenset[str] = frozenset()  # buffers that are not in the state dict
    sharded: ClassVar[bool] = False  # True if the module is sharded by `fully_shard`

    @property
    def tolerates_unused(self) -> bool:
        """True if the wrapper's options allow a parameter that is never used."""
        return self.find_unused_parameters or self.static_graph

    @property
    def named(self) -> str:
        """Name of the wrapper in messages, such as "DDP" or "fully_shard"."""
        return "DDP"

    @property
    def continues_unused(self) -> bool:
        """True if training continues although no rank uses a parameter in a step."""
        return self.tolerates_unused or self.sharded

    @property
    def tolerates_partial_use(self) -> bool:
        """True if training continues with a parameter that only some ranks use."""
        return self.find_unused_parameters


class ShardedFacts(WrapperFacts, frozen=True):
    """Facts on a sharded module; `ignored` has parameters that no `fully_shard` call manages."""

    reduces_unused: bool = False  # True if gradients that are missing on a rank are reduced as zeros
    # fingerprint of each whole parameter as built by this rank, for parameters whose shard was not changed since
    values_built: Mapping[str, int] = field(default_factory=dict)
    alone: bool = False  # True if split by `parallelize_module` without `fully_shard`
    policies: Mapping[str, str] = field(default_factory=dict)  # `mp_policy` in words, by module; of parts if different
    sharded: ClassVar[bool] = True

    @property
    def named(self) -> str:
        return "tensor parallelism" if self.alone else "fully_shard"

    @property
    def tolerates_partial_use(self) -> bool:
        return self.reduces_unused


class GradientHook(Struct, frozen=True):
    """User code that may change gradients during backward."""

    description: str
    location: Location | None = None

    def __str__(self) -> str:
        return f"{self.description}{f' at {self.location}' if self.location else ''}"


class WrappedModule(Struct, frozen=True):
    """Module of a rank after wrapping, with wrapper and optimizer."""

    facts: WrapperFacts  # on the wrapper
    options: Mapping[str, str]  # of the wrapper, in words
    optimizer: Mapping[str, str]  # of the optimizer, in words
    parameters: Mapping[str, int]  # fingerprint of each parameter
    buffers: Mapping[str, int]  # fingerprint of each buffer
    loss_location: Location | None  # line that defines the loss
    wrapper: str  # class of the wrapper
    broadcasts_buffers: bool  # True if the wrapper broadcasts buffers before forward
    changes: Mapping[str, str] = field(default_factory=dict)  # changes of parameters since DDP construction, in words
    # fingerprint of each parameter after DDP construction; empty for another wrapper
    parameters_at_construction: Mapping[str, int] = field(default_factory=dict)
    replaces_module: bool = False  # True if `wrap` returns a module with other parameter names or shapes
    transfer_error: str = ""  # why the module cannot be sent to the single process
    foreign_tensors: int = 0  # tensors in the optimizer that are not parameters of the module
    not_in_optimizer: tuple[str, ...] = ()  # parameters that require grad and are in no optimizer group
    hooks: tuple[GradientHook, ...] = ()  # hooks on gradients from the recipe's `wrap`

    @property
    def together(self) -> tuple[int, ...]:
        """Ranks that share a model with this rank by tensor parallelism; () if replicated."""
        return ()


class SplitModule(WrappedModule, frozen=True):
    """One rank's part of a module that tensor parallelism splits."""

    model_ranks: tuple[int, ...] = ()  # ranks that share the module

    @property
    def together(self) -> tuple[int, ...]:
        return self.model_ranks
