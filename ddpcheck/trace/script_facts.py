"""Facts for the judges of `ddpcheck run`, combined from all ranks' logs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from ddpcheck.findings.evidence.modules import ShardedFacts
from ddpcheck.findings.evidence.replicas import ModelSplit, PartStep
from ddpcheck.findings.evidence.script import Inputs, LoaderPass, LossDifferentiated, OptimizerEnd, OptimizerStep
from ddpcheck.findings.program_blocks import ProgramSource
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.findings.wording import group_by
from ddpcheck.stream.entries import GroupUsed, PeerReceived, ReplicaCaptured, WatchingFailed, WrapperMade
from ddpcheck.stream.rank_log import RankTrace
from ddpcheck.trace.rank_params import RankParams
from ddpcheck.trace.replicas import aligned, differing_names
from ddpcheck.trace.unwrapped_params import all_gradients_agree, are_near, train_separately

_Kind = TypeVar("_Kind")

PartSteps = Sequence[PartStep]
"""States recorded before one optimizer step, one for each rank of a model-parallel group."""


@dataclass(frozen=True, slots=True)
class WrapperTrace:
    """A wrapper on the ranks of its process group."""

    number: int  # in construction order on each rank, from 0
    made: WrapperMade  # its construction on the first of `ranks`
    ranks: Sequence[RankTrace]  # ranks of the group whose logs are on this machine

    @property
    def missing(self) -> set[int]:
        """Ranks of the group whose logs are not on this machine."""
        return {*self.made.ranks} - {rank.started.rank for rank in self.ranks}

    @property
    def steps(self) -> int:
        """Number of steps completed on every rank."""
        return min(rank.counts[self.number][1] for rank in self.ranks)

    def events(self, kind: type[_Kind]) -> list[list[_Kind]]:
        """Return log entries of type `kind` about this wrapper, by rank of its group."""
        return [
            [e for e in entries_of(rank, kind) if getattr(e, "wrapper", None) == self.number] for rank in self.ranks
        ]

    @property
    def captured(self) -> dict[int, list[ReplicaCaptured]]:
        """Replicas recorded after backward passes, by step."""
        return group_by(itertools.chain.from_iterable(self.events(ReplicaCaptured)), lambda replica: replica.step)

    @property
    def compared(self) -> dict[int, list[ReplicaCaptured]]:
        """Replicas by step, only for steps that all ranks (`ranks`) recorded."""
        return {step: replicas for step, replicas in self.captured.items() if len(replicas) == len(self.ranks)}

    @property
    def sharded(self) -> list[ShardedFacts]:
        """Values before sharding and arguments of `fully_shard`, by rank; empty for DDP."""
        return list(filter(None, (rank.wrappers[self.number].context.sharded for rank in self.ranks)))

    @property
    def losses(self) -> list[list[LossDifferentiated]]:
        """All losses that each rank differentiates, including those of other wrappers."""
        return [entries_of(rank, LossDifferentiated) for rank in self.ranks]

    @property
    def loss_line(self) -> Location | None:
        """Line that computes the wrapper's loss, or if unknown, the line that calls backward."""
        losses = (loss for rank_losses in self.losses for loss in rank_losses if self.number in loss.wrappers)
        return next((line for loss in losses if (line := loss.computed_at or loss.location)), None)


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer of ranks that train together."""

    steps: Sequence[Sequence[OptimizerStep]]  # steps that every rank recorded; each is a sequence by rank
    ends: Sequence[OptimizerEnd]  # final states, from the ranks that recorded one


def entries_of(rank: RankTrace, kind: type[_Kind]) -> list[_Kind]:
    """Return a rank's log entries of type `kind`, in order."""
    return [*rank.entries_by_type.get(kind, ())]


class ScriptFacts:
    """Logs of a script's ranks, and facts derived from the logs."""

    def __init__(
        self,
        ranks: Sequence[RankTrace],
        *,
        ended: bool,
        source: ProgramSource | None = None,
        rank_params: RankParams | None = None,
    ) -> None:
        self.ranks = ranks if rank_params is None else rank_params.without_matches(ranks)
        self.ended = ended
        self.source = source or ProgramSource()

    def events(self, kind: type[_Kind]) -> list[list[_Kind]]:
        """Return the log entries of type `kind`, by rank."""
        return [entries_of(rank, kind) for rank in self.ranks]

    @cached_property
    def world_size(self) -> int:
        """World size of the default process group; 0 if never initialized."""
        return max((rank.started.world_size for rank in self.ranks), default=0)

    @cached_property
    def remote_ranks(self) -> list[int]:
        """Ranks whose logs are not on this machine."""
        return sorted(set(range(self.world_size)) - {rank.started.rank for rank in self.ranks})

    @cached_property
    def unwatched(self) -> dict[str, str]:
        """Check lines that a failed recorder leaves unjudged, each mapped to the reason."""
        reasons: dict[str, str] = {}
        for rank in self.ranks:
            for entry in entries_of(rank, WatchingFailed):
                recorder = "" if entry.subjects else f"{entry.recorder}: "
                reason = f"{recorder}not watched from step {entry.step} on, on rank {rank.started.rank}: {entry.why}"
                if not entry.recorder:
                    reason = f"rank {rank.started.rank} was not watched to its end: {entry.error.splitlines()[-1]}"
                reasons |= {subject: reasons.get(subject, reason) for subject in entry.subjects or ("ranks",)}
        return reasons

    @property
    def can_compare(self) -> bool:
        """Check if there are several ranks, and all their logs are on this machine."""
        return len(self.ranks) > 1 and not self.remote_ranks

    @cached_property
    def passes(self) -> list[list[LoaderPass]]:
        """Passes over data loaders, by rank."""
        return [rank.passes for rank in self.ranks]

    # Wrappers

    @cached_property
    def wrappers(self) -> list[WrapperTrace]:
        """Wrappers of all ranks, in construction order."""
        groups: dict[tuple[int, tuple[int, ...]], list[RankTrace]] = {}
        for rank in self.ranks:
            for number, wrapper in enumerate(rank.wrappers):
                groups.setdefault((number, wrapper.ranks), []).append(rank)
        return [WrapperTrace(key[0], group[0].wrappers[key[0]], group) for key, group in sorted(groups.items())]

    @cached_property
    def steps(self) -> int:
        """Largest step count of any wrapper."""
        return max((wrapper.steps for wrapper in self.wrappers), default=0)

    @cached_property
    def model_groups(self) -> dict[tuple[int, ...], ModelSplit]:
        """Groups of ranks that share a model by tensor parallelism, with the split."""
        return by_group({rank.started.rank: entries_of(rank, ModelSplit) for rank in self.ranks})

    @cached_property
    def training_groups(self) -> list[list[RankTrace]]:
        """Data parallel groups: ranks that train together on different samples."""
        if models := self.model_groups or self.sample_groups:
            by_number = {rank.started.rank: rank for rank in self.ranks}
            return [[by_number[number] for number in group] for group in zip(*models, strict=False)]
        members = {wrapper.made.ranks for wrapper in self.wrappers}
        if not members and self.stages:
            members = {*zip(*self.stages, strict=False)}
        if not members or any(len(group) == len(self.ranks) for group in members):
            return [list(self.ranks)]
        return [[rank for rank in self.ranks if rank.started.rank in group] for group in sorted(members)]

    @cached_property
    def sample_groups(self) -> list[tuple[int, ...]]:
        """Groups of ranks that get the same samples on purpose, to split the computation."""
        trained = {rank.started.rank: [p for p in rank.passes if p.trains] for rank in self.ranks}
        data = {rank: (passes[0].indices, passes[0].rows) if passes else ((), ()) for rank, passes in trained.items()}
        parts = group_by(self.ranks, lambda rank: data[rank.started.rank])
        if any(not indices for indices, _ in parts) or len({*map(len, parts.values())}) != 1 or len(parts) == len(data):
            return []
        replicas = {passes[0].replicas for passes in trained.values()}
        shares = all(_share_on_purpose(group, replicas == {len(parts)} != {1}) for group in parts.values())
        return [tuple(rank.started.rank for rank in group) for group in parts.values()] if shares else []

    @cached_property
    def stages(self) -> list[tuple[int, ...]]:
        """Ranks of each model that is split into pipeline stages; empty without pipelines.

        Stages receive tensors from each other in training, and step with different gradients.
        """
        received = {
            rank.started.rank: {entry.peer for entry in entries_of(rank, PeerReceived) if entry.training}
            for rank in self.ranks
        }
        models = {rank: {rank} for rank in received}
        by_number = {rank.started.rank: rank for rank in self.ranks}
        for rank, peers in received.items():
            for peer in sorted(peers & received.keys()):
                if models[rank] is not models[peer] and not _share_gradient(by_number[rank], by_number[peer]):
                    models[rank] |= models[peer]
                    models |= dict.fromkeys(models[peer], models[rank])
        model_ranks = {tuple(sorted(model)) for model in models.values()}
        return sorted(model_ranks) if len(model_ranks) < len(received) else []

    @cached_property
    def moved(self) -> Mapping[str, bool]:
        """Map parameters with nonzero gradients to True if training changes them on rank 0."""
        values: dict[str, set[int]] = {}
        counts: Counter[str] = Counter()
        for replica in entries_of(self.ranks[0], ReplicaCaptured):
            evidence = replica.state.values
            for name, gradient in evidence.gradients.items():
                if gradient and any(replica.averaged.get(name, (1.0,))):
                    key = f"{replica.wrapper}/{name}"
                    values.setdefault(key, set()).add(evidence.parameters.get(name, 0))
                    counts[key] += 1
        return {name: len(seen) > 1 for name, seen in values.items() if counts[name] > 1}

    @cached_property
    def has_differing_parameters(self) -> bool:
        """Check if a wrapper's parameters differ between ranks in a recorded step."""
        return any(
            differing_names([replica.state.values.parameters for replica in replicas])
            for wrapper in self.wrappers
            for captured in self.captured(wrapper.number).values()
            for replicas in group_by(captured, lambda replica: replica.shard).values()
        )

    def captured(self, wrapper: int) -> dict[int, list[ReplicaCaptured]]:
        """Return the recorded replicas of a wrapper, by step."""
        replicas = itertools.chain.from_iterable(self.events(ReplicaCaptured))
        return group_by((replica for replica in replicas if replica.wrapper == wrapper), lambda replica: replica.step)

    # Optimizers

    @cached_property
    def optimizers(self) -> list[Optimizer]:
        """Optimizers, matched between ranks by parameters and by line of the first step."""
        return list(self._match_optimizers())

    def _match_optimizers(self) -> Iterator[Optimizer]:
        steps_by_key: dict[tuple[Any, ...], dict[int, list[OptimizerStep]]] = {}
        by_number = {rank.started.rank: rank for rank in self.ranks}
        for rank in self.ranks:
            counts: Counter[tuple[Any, ...]] = Counter()  # optimizers with the same key, such as one per round
            for first in first_steps(rank):
                named = (*first.ddp_params, *(name for name in first.local_params if "/" in name))
                wrapper_ids = {int(name.partition("/")[0]) for name in named}
                groups = {rank.wrappers[number].ranks for number in wrapper_ids}
                members = next(iter(groups)) if len(groups) == 1 else self._replicas_of(rank)
                steps = [step for step in entries_of(rank, OptimizerStep) if step.optimizer == first.optimizer]
                key = (members, first.location, tuple(sorted((*first.ddp_params, *first.local_params))))
                steps_by_key.setdefault((*key, counts[key]), {})[rank.started.rank] = steps
                counts[key] += 1
        for (members, *_), steps_by_rank in steps_by_key.items():
            if len(steps_by_rank) == len(members):
                ends = [
                    _with_reductions(end, steps[-1], by_number[number])
                    for number, steps in steps_by_rank.items()
                    for end in entries_of(by_number[number], OptimizerEnd)
                    if end.optimizer == steps[0].optimizer
                ]
                yield Optimizer(_steps_of_all_ranks(list(steps_by_rank.values())), ends)

    def _replicas_of(self, rank: RankTrace) -> tuple[int, ...]:
        """Return the ranks that train the same unwrapped parameters as `rank`, including itself."""
        groups = self.training_groups if self.stages and not self.wrappers and not self.model_groups else []
        members = (tuple(member.started.rank for member in group) for group in groups if rank in group)
        return next(members, tuple(range(rank.started.world_size)))

    def part_steps(self, group: Sequence[int]) -> list[Sequence[PartSteps]]:
        """Return, by optimizer, the steps of ranks that have parts of one model."""
        steps_by_rank = [entries_of(rank, PartStep) for rank in self.ranks if rank.started.rank in group]
        numbers = sorted({step.optimizer for step in steps_by_rank[0]})
        return [
            _steps_of_all_ranks([[step for step in steps if step.optimizer == number] for steps in steps_by_rank])
            for number in numbers
        ]

    @cached_property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps on the first rank, over all optimizers."""
        for rank in self.ranks[:1]:
            counts = {step.optimizer: step.count + 1 for step in entries_of(rank, OptimizerStep)}
            return sum((counts | {end.optimizer: end.count for end in entries_of(rank, OptimizerEnd)}).values())
        return 0

    @cached_property
    def shards(self) -> int:
        """Number of sharded parameters in the optimizer that has most; 0 without sharding."""
        return max((step.shards for rank in self.ranks for step in entries_of(rank, OptimizerStep)), default=0)

    @cached_property
    def in_fsdp1(self) -> bool:
        """Check if an optimizer holds parameters of a `FullyShardedDataParallel`."""
        return any(step.in_fsdp1 for rank in self.ranks for step in entries_of(rank, OptimizerStep))

    @property
    def why_unwatched(self) -> str:
        """Reason why some optimizer parameters are not compared, or ''."""
        if self.in_fsdp1:
            return (
                "parameters in a FullyShardedDataParallel (FSDP1) are not compared, nor their gradients and state; "
                "those of a model that torch.distributed.fsdp.fully_shard shards are"
            )
        if any(step.shards > len(step.ddp_params) for rank in self.ranks for step in entries_of(rank, OptimizerStep)):
            return "shards of parameters are not watched: their values, gradients and state are not compared"
        return ""

    @cached_property
    def trains_separate_models(self) -> bool:
        """Check if each rank trains a separate model, without any wrapper."""
        return not self.wrappers and not self.model_groups and train_separately([opt.steps for opt in self.optimizers])

    def averages_by_hand(self, wrapper: int) -> bool:
        """Check if the script averages gradients that the wrapper does not average.

        If so, gradients agree between ranks at each optimizer step. Steps whose gradients DDP has averaged are ignored,
        unless a communication hook of DDP leaves different gradients on ranks.
        """
        steps = [
            rank_steps
            for optimizer in self.optimizers
            for rank_steps in optimizer.steps
            if any(name.startswith(f"{wrapper}/") for name in rank_steps[0].norms)
        ]
        if not self.non_averaging_hook(wrapper):
            steps = [rank_steps for rank_steps in steps if not any(step.averaged for step in rank_steps)]
        return len(steps) > 1 and all(map(all_gradients_agree, steps))

    def non_averaging_hook(self, wrapper: int) -> str:
        """Return the communication hook that leaves different gradients on ranks, or ''."""
        hooked = [group for group in self.captured(wrapper).values() if group[0].hook]
        unequal = (group for group in hooked if differing_names([replica.state.values.gradients for replica in group]))
        return next((group[0].hook for group in unequal), "")


def _share_on_purpose(ranks: Sequence[RankTrace], dealt: bool) -> bool:
    """Check if ranks get equal samples on purpose; `dealt`: samplers give groups different samples."""
    group = tuple(rank.started.rank for rank in ranks)
    used = [use.members for rank in ranks for use in entries_of(rank, GroupUsed) if use.differentiated_at is not None]
    if group in used and len(group) < ranks[0].started.world_size:
        return True
    peers = {entry.peer for rank in ranks for entry in entries_of(rank, PeerReceived) if entry.training}
    inputs = [{(entry.wrapper, entry.step): entry.samples for entry in entries_of(rank, Inputs)} for rank in ranks]
    steps = aligned(inputs)
    in_parts = all(len({*samples}) == len(group) for samples in steps)
    return bool(steps) and in_parts and (dealt or group in used or not peers.isdisjoint(group))


def _share_gradient(rank: RankTrace, peer: RankTrace) -> bool:
    steps = {(step.optimizer, step.count): step.gradients for step in entries_of(peer, OptimizerStep)}
    pairs = ((step.gradients, steps.get((step.optimizer, step.count), {})) for step in entries_of(rank, OptimizerStep))
    return any(
        any(grads[name]) and are_near([grads[name], other_grads[name]])
        for grads, other_grads in pairs
        for name in grads.keys() & other_grads
    )


def steps_with_reductions(
    rank: RankTrace, steps: Sequence[OptimizerStep]
) -> Iterator[tuple[OptimizerStep, ReplicaCaptured]]:
    """Yield optimizer steps with the gradient reduction before each step, if it was recorded."""
    reduced = {(entry.wrapper, entry.step + 1): entry for entry in entries_of(rank, ReplicaCaptured) if entry.averaged}
    for step in steps:
        wrapper_ids = {name.partition("/")[0] for name in step.norms}
        replica = reduced.get((int(min(wrapper_ids)), step.reductions)) if len(wrapper_ids) == 1 else None
        if replica is not None:
            yield step, replica


def first_steps(rank: RankTrace) -> list[OptimizerStep]:
    """Return the first step of each optimizer on a rank."""
    return [step for step in entries_of(rank, OptimizerStep) if not step.count]


def _with_reductions(end: OptimizerEnd, last: OptimizerStep, rank: RankTrace) -> OptimizerEnd:
    """Add the number of gradient reductions to `end` if the number is unknown."""
    if end.reductions >= 0 or last.reductions < 0:
        return end
    wrapper_ids = {int(name.partition("/")[0]) for name in last.ddp_params}
    return replace(end, reductions=sum(rank.counts[number][1] for number in wrapper_ids))


_Step = TypeVar("_Step", OptimizerStep, PartStep)


def _steps_of_all_ranks(by_rank: Sequence[Sequence[_Step]]) -> list[list[_Step]]:
    return aligned([{step.count: step for step in steps} for steps in by_rank])


def by_group(splits: Mapping[int, Sequence[ModelSplit]]) -> dict[tuple[int, ...], ModelSplit]:
    """Map groups of ranks to their model split, if all members report the group."""
    groups: dict[tuple[int, ...], ModelSplit] = {}
    for rank_splits in splits.values():
        for split in rank_splits[:1]:
            if all(any(split.ranks == peer.ranks for peer in splits.get(rank, ())[:1]) for rank in split.ranks):
                groups.setdefault(split.ranks, split)
    return groups
