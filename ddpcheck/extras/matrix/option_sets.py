"""Combinations of DDP options worth trying, and why others make no difference.

Pure functions of the ranks' facts on the model and the installed torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.evidence.modules import SplitModule
from ddpcheck.findings.report import Finding
from ddpcheck.report.matrix.option_sets import DEFAULTS, DDPOptions
from ddpcheck.rules.parameters.ddp104_rank_dependent_parameter import judge_skipped_reductions

VARIED = (
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "broadcast_buffers",
    "forward_sync_buffers",
    "bucket_cap_mb",
    "bucket_cap_mb_list",
    "batched_grad_copy",
    "skip_all_reduce_unused_params",
)
"""`DistributedDataParallel` arguments that the matrix varies; others stay as in the recipe."""

COMPRESSION_HOOKS = ("fp16_compress_hook", "bf16_compress_hook")
"""Hooks of torch.distributed.algorithms.ddp_comm_hooks.default_hooks whose rounding error is measured."""


BACKEND = "aot_eager"
"""`torch.compile` backend without inductor, which needs a C++ compiler and is much slower."""
MICRO_BATCHES = 2
FIND_UNUSED = DDPOptions({"find_unused_parameters": True})
STATIC_GRAPH = DDPOptions({"static_graph": True})


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a model that decide which options can make a difference."""

    known: tuple[str, ...] = VARIED  # arguments of `VARIED` in the installed torch
    # `DistributedDataParallel` arguments of the recipe among `VARIED`; None if it makes no wrapper, or several
    own: Mapping[str, Any] | None = field(default_factory=dict)
    own_hook: str = ""  # communication hook registered by the recipe; empty for none
    gradient_bytes: int = 0  # size of all gradients
    bits: int = 32  # bits of the widest gradient's real or imaginary part
    buffers: int = 0  # number of buffers that DDP could broadcast
    nccl: bool = False  # True for a process group with nccl
    buffers_differ: bool = False  # True if ranks build buffers with different values
    shards: bool = False  # True if `fully_shard` can replace the wrapper
    # missing parameters by (step, rank)
    absent: Mapping[tuple[int, int], frozenset[str]] = field(default_factory=dict)


class VariantFacts(msgspec.Struct, frozen=True):
    """Facts that say if a rank can run compiled and micro-batched steps."""

    not_compiled: str = ""  # why the module cannot or need not be compiled; empty if it can
    not_split: str = ""  # why the batch cannot be split; empty if it can
    differences: tuple[Difference, ...] = ()  # gradients of the micro-batches compared with the whole batch


class VariantStep(msgspec.Struct, frozen=True):
    """Compiled or micro-batched step of one rank, compared with the plain step."""

    gradients: Mapping[str, int]  # fingerprints of `.grad` by parameter name
    differences: tuple[Difference, ...] = ()  # gradient differences from the plain step
    drew: bool = False  # True if random numbers were drawn
    graphs: int = -1  # graphs compiled for the step; -1 if none expected, or unknown in this torch


class WrappedRow(SplitModule, frozen=True):
    """Facts of one rank's module, wrapped with the options of a matrix row."""

    model: ModelFacts = msgspec.field(default_factory=ModelFacts)  # facts known to this rank
    # options that the recipe's `wrap` overrides after the constructor
    set_by_wrap: Mapping[str, Any] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OptionSet:
    """Combination of DDP options, and the reason if the matrix skips this combination."""

    options: DDPOptions  # the combination
    skip_reason: str = ""  # why the options make no difference; empty if they can
    unsafe: Sequence[Finding] = ()  # why DDP may hang, so that the options are not run


def first_option_sets(facts: ModelFacts) -> list[DDPOptions]:
    """Return the base option sets: defaults, find_unused_parameters, static_graph."""
    return [options for options in (DEFAULTS, FIND_UNUSED, STATIC_GRAPH) if set(options.arguments) <= set(facts.known)]


def further_option_sets(facts: ModelFacts, base: DDPOptions, graphs: Sequence[DDPOptions]) -> list[OptionSet]:
    """Return option sets to try after the base option sets of `first_option_sets`.

    Each option set is `base` plus other options, or a set of `graphs` plus gradient_as_bucket_view. `graphs` has the
    base option sets, apart from the defaults, that gave correct results.
    """
    option_sets = [OptionSet(graph.plus(gradient_as_bucket_view=True)) for graph in (base, *graphs)]
    if not {"forward_sync_buffers", "broadcast_buffers"} & set(base.arguments):
        no_buffers = "" if facts.buffers else "the model has no buffers"
        text = "all ranks build the same buffers, so it has the effect of forward_sync_buffers"
        redundant = text if "forward_sync_buffers" in facts.known and not facts.buffers_differ else ""
        option_sets.append(OptionSet(base.plus(forward_sync_buffers=False), no_buffers))
        option_sets.append(OptionSet(base.plus(broadcast_buffers=False), no_buffers or redundant))
    size = facts.gradient_bytes
    size_text = f"{size} bytes" if size < 1024 else f"{size / 1024:.0f} KiB"
    small = "" if size > 1 << 20 else f"all gradients ({size_text}) fit into one bucket of 1 MiB"
    option_sets += [OptionSet(base.plus(bucket_cap_mb=cap), small) for cap in (1, 100)]
    option_sets.append(OptionSet(base.plus(bucket_cap_mb_list=[1, 5, 25]), small))
    option_sets.append(OptionSet(base.plus(batched_grad_copy=True)))
    unneeded = (
        "" if any(facts.absent.values()) else "every parameter contributes in every step, so there is nothing to skip"
    )
    skipping = base.plus(find_unused_parameters=True, skip_all_reduce_unused_params=True)
    option_sets.append(OptionSet(skipping, unneeded, judge_skipped_reductions(facts.absent)))
    option_sets += [OptionSet(base.plus(hook=hook), _why_no_hook(facts, hook)) for hook in COMPRESSION_HOOKS]
    seen = {*map(str, first_option_sets(facts))}
    by_title: dict[str, OptionSet] = {}
    for option_set in option_sets:
        if set(option_set.options.arguments) <= set(facts.known) and str(option_set.options) not in seen:
            by_title.setdefault(str(option_set.options), option_set)
    return list(by_title.values())


def _why_no_hook(facts: ModelFacts, hook: str) -> str:
    if facts.own_hook:
        return f"the recipe registers a hook ({facts.own_hook}), and DDP takes only one"
    if facts.bits <= 16:
        return "the gradients already have no more than 16 bits"
    if hook.startswith("bf16") and not facts.nccl:
        return "torch supports this hook only with nccl, and this process group has a different backend"
    return ""
