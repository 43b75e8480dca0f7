"""Reports of steps, micro-batches and replica states, exchanged by ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from msgspec import Struct, field
from msgspec.structs import force_setattr

from ddpcheck.findings.evidence.loop import FunctionCompiled
from ddpcheck.findings.evidence.modules import ModuleDescription, ShardedFacts, WrapperFacts
from ddpcheck.findings.evidence.steps import DdpStepEvidence, LoopEvent, PathEnd, StepEvidence
from ddpcheck.findings.wording import Names

_STEPS_KEPT = 64  # cache size: a dozen recorders ask in each step


@lru_cache(_STEPS_KEPT)
def is_probed(step: int) -> bool:
    """Return True for 0 and powers of two: steps examined in detail (`StepProbe`)."""
    return step & (step - 1) == 0


_FIRST_SAMPLES = 128  # samples of a run before the rate is reduced


@lru_cache(_STEPS_KEPT)
def is_sampled(step: int, every: int) -> bool:
    """Return True for probed steps, and for each `every`-th step unless `every` is 0.

    After 128 sampled steps the interval doubles, and doubles again whenever the number of steps has doubled, so that a
    log grows logarithmically. The result depends on the arguments only, so that all ranks sample the same steps.
    """
    rarer = (step // (_FIRST_SAMPLES * every)).bit_length() if every else 0
    return is_probed(step) or (every > 0 and step % (every << rarer) == 0)


FIRST_SETTLED = 8


def is_settled(step: int) -> bool:
    """Return True at steps 8 and 128, when find_unused_parameters and static_graph are judged."""
    return step in (FIRST_SETTLED, 128)


class MicroBatch(Struct, frozen=True):
    """Forward and backward pass, with the weight of each target in the loss."""

    index: int  # optimizer step that accumulates this micro-batch
    step: int  # synchronized backward passes before
    head: str  # where the weight was measured; a forward output may have several heads
    position: int  # index in the optimizer step on this rank
    sequences: int  # number of sequences of the targets, or 0
    counted: float  # number of targets (tokens, pixels, samples) counted in the loss
    weight: float  # per target up to a constant; 0 if weights differ, or not a cross entropy
    rows: float  # number of targets, including ignored targets


class RankReport(Struct, frozen=True):
    """Report of a rank on a wrapper's steps since the rank's last report."""

    # rank, step of the exchange, and results of its probe: parameter states other than "contributes" ("zero": in each
    # probe so far, although parameters have changed in between), and so on
    probed: StepEvidence
    # parameters that did not contribute, by step
    missing: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    never_used: tuple[str, ...] = ()  # parameters that have not contributed in any step so far
    sometimes_missing: tuple[str, ...] = ()  # parameters that were missing in any step so far
    ends: Mapping[str, PathEnd] = field(default_factory=dict)  # why parameters are missing
    # changes to parameters since wrapping, in a word
    changes: Mapping[str, str] = field(default_factory=dict)
    events: tuple[LoopEvent, ...] = ()  # events of the loop, if they show a fault
    seconds: float = 0.0  # average seconds per step
    micro_batches: tuple[MicroBatch, ...] = ()  # micro-batches of the last measured optimizer steps
    # functions compiled so far, at steps where they are compared
    compiled: tuple[FunctionCompiled, ...] = ()

    @property
    def step(self) -> int:
        """Return the step after which the ranks exchange reports."""
        return self.probed.step


class ReplicaState(Struct, frozen=True):
    """Fingerprints of a rank's replica, for comparison between ranks."""

    description: ModuleDescription
    # fingerprints of gradients, parameters and buffers, and gradients against the ranks' own average
    values: DdpStepEvidence
    # fingerprints of the parameters after construction of the wrapper; empty if unknown
    constructed: Mapping[str, int] = field(default_factory=dict)
    at_first_forward: Mapping[str, int] = field(default_factory=dict)  # the same before the first forward


class WatchContext(Struct, frozen=True):
    """Facts on a wrapper and its module when recording of the steps begins."""

    names: Names  # parameter names, with aliases
    wrapper: WrapperFacts  # arguments of the wrapper
    world_size: int  # world size of the process group
    broadcasts_buffers: bool = False  # True if the wrapper broadcasts buffers before forward
    wrapper_class: str = ""  # class name of the wrapper
    trainable: tuple[str, ...] = ()  # synchronized parameters, in order
    began_alike: bool = False  # True if parameters are known to be equal on all ranks at construction
    own_hook: bool = False  # True if the communication hook is not torch's
    sharded: ShardedFacts | None = None  # the value of `wrapper` if `fully_shard` sharded the module

    def __post_init__(self) -> None:
        if self.sharded is not None:  # a log decodes `wrapper` as the base class
            force_setattr(self, "wrapper", self.sharded)
