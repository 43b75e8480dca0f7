"""Plain data that the ranks of a watched loop exchange: reports of steps, micro-batches, states of replicas."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from msgspec import Struct, field
from msgspec.structs import force_setattr

from ddpcheck.findings.evidence.loop import FunctionCompiled
from ddpcheck.findings.evidence.modules import ModuleDescription, ShardedFacts, WrapperFacts
from ddpcheck.findings.evidence.steps import DdpStepEvidence, LoopEvent, PathEnd, StepEvidence
from ddpcheck.findings.wording import Names

_STEPS_KEPT = 64  # whose answers are: a dozen recorders ask in each step


@lru_cache(_STEPS_KEPT)
def is_probed(step: int) -> bool:
    """Whether a step is probed (`parameter_history.StepProbe`): 0 and the powers of two."""
    return step & (step - 1) == 0


_FIRST_SAMPLES = 128  # of a run, after which fewer are taken


@lru_cache(_STEPS_KEPT)
def is_sampled(step: int, every: int) -> bool:
    """Whether a step of a script is looked at: one that is probed, or each `every`; 0 for none of these.

    After 128 samples every second one is left out, and again whenever the number of steps has doubled: a log grows with
    its logarithm. Only the step decides, so that the samples of all ranks are of the same steps.
    """
    rarer = (step // (_FIRST_SAMPLES * every)).bit_length() if every else 0
    return is_probed(step) or (every > 0 and step % (every << rarer) == 0)


FIRST_SETTLED = 8


def is_settled(step: int) -> bool:
    """Whether enough steps have been seen to judge what find_unused_parameters and static_graph allow for."""
    return step in (FIRST_SETTLED, 128)


class MicroBatch(Struct, frozen=True):
    """One forward and backward, and the weight that its loss gives each target that it counts."""

    index: int  # of the optimizer step that it is accumulated for
    step: int  # how many synchronised backward passes came before
    head: str  # where it was measured: what forward returned may hold several
    position: int  # in the optimizer step, on this rank
    sequences: int  # how many sequences the targets are of, if they are
    counted: float  # the number of targets (tokens, pixels, samples) that count in the loss
    weight: float  # of each, up to a constant; 0 where they have not all the same, or the loss is no cross entropy
    rows: float  # the number of targets, with those that do not count


class RankReport(Struct, frozen=True):
    """The report of one rank on the steps since the ranks last exchanged reports."""

    # the rank, the step after which the ranks exchange reports, and what a probe of it has found: states other than
    # "contributes" ("zero" is in each probe, although parameters have moved in between), and so on
    probed: StepEvidence
    # by step, the parameters that did not contribute in it
    missing: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    never_used: tuple[str, ...] = ()  # parameters that have contributed in no step so far
    sometimes_missing: tuple[str, ...] = ()  # parameters that have been missing in some step so far
    ends: Mapping[str, PathEnd] = field(default_factory=dict)  # why parameters are missing
    # what has happened to parameters since they were wrapped, in a word
    changes: Mapping[str, str] = field(default_factory=dict)
    events: tuple[LoopEvent, ...] = ()  # of the loop, where they show a fault
    seconds: float = 0.0  # of a step, on average so far
    micro_batches: tuple[MicroBatch, ...] = ()  # of the last optimizer steps that were measured
    # the functions that were compiled so far, where it is time to compare them
    compiled: tuple[FunctionCompiled, ...] = ()

    @property
    def step(self) -> int:
        """After which the ranks exchange reports."""
        return self.probed.step


class ReplicaState(Struct, frozen=True):
    """Fingerprints of the replica on one rank, when the ranks compare them."""

    description: ModuleDescription  # of the module
    # gradients, parameters and buffers as fingerprints, and gradients against the ranks' own average
    values: DdpStepEvidence
    # fingerprints of the parameters when the wrapper had made them equal; empty where that is not known
    constructed: Mapping[str, int] = field(default_factory=dict)
    at_first_forward: Mapping[str, int] = field(default_factory=dict)  # likewise, before the first forward


class WatchContext(Struct, frozen=True):
    """The wrapper and its module as they are when the watch begins."""

    names: Names  # of the parameters, with their aliases
    wrapper: WrapperFacts  # the arguments of the wrapper
    world_size: int  # of its process group
    broadcasts_buffers: bool = False  # whether the wrapper broadcasts buffers before a forward
    wrapper_class: str = ""  # the name of the wrapper's class
    trainable: tuple[str, ...] = ()  # the parameters that it synchronises, in their order
    began_alike: bool = False  # whether parameters are known to have been the same on all ranks when it was constructed
    own_hook: bool = False  # whether the communication hook is none of torch's
    sharded: ShardedFacts | None = None  # `wrapper`, where `fully_shard` has sharded the module

    def __post_init__(self) -> None:
        if self.sharded is not None:  # as whose base class `wrapper` has been read from a log
            force_setattr(self, "wrapper", self.sharded)
