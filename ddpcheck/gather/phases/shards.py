"""Shards without samples, and what the ranks send when all of them have the same shard."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ddpcheck.findings.errors import EmptyShardError, TargetError
from ddpcheck.findings.evidence.collectives import Call, ReductionInput
from ddpcheck.findings.exception_origin import is_ours
from ddpcheck.gather.collectives.collective_log import replaced_by
from ddpcheck.gather.collectives.fake_collectives import answer_alone
from ddpcheck.gather.phases.rank_state import rank_state, replays_step
from ddpcheck.gather.steps.seeds import make_batch, step_seed
from ddpcheck.gather.steps.training_step import compute_loss
from ddpcheck.recipe.pytree import batch_size, to_device
from ddpcheck.worlds import rank as this_rank


@contextlib.contextmanager
def blaming_empty_shards(step: int) -> Iterator[None]:
    """An error in the block on a rank with an empty shard is reported as an empty shard.

    Raises:
        EmptyShardError: The shard of this rank has no samples, or there is none, and the block raised.
    """
    data = rank_state().step
    try:
        yield
    except Exception as error:
        if is_ours(error):
            raise
        if isinstance(error.__cause__, StopIteration):
            raise EmptyShardError(f"its loader has ended: {error}", step) from error
        if data.batch is not None and samples_of(data.batch) == 0:
            raise EmptyShardError(f"its shard is empty, and with it: {error}", step) from error
        raise


def samples_of(batch: Any) -> int | None:
    """How many samples a batch has, None where that cannot be told."""
    with contextlib.suppress(TargetError):
        return batch_size(batch)
    return None


REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
_MOST_VALUES = 1 << 14


@replays_step
def packed_payloads(step: int) -> tuple[ReductionInput, ...]:
    """Inputs of the reductions in the forward pass on rank 0's shard, with rank 0's random numbers.

    Nothing is communicated: each collective is taken for one of this rank alone, so that no rank can hang. What the
    ranks then send in one place differs only where the program itself depends on the rank.
    """
    state = rank_state()
    found: list[ReductionInput] = []

    def standing(operation: str, given: Mapping[str, Any], call: Call) -> Any:
        if operation in REDUCTIONS:
            found.append(ReductionInput(operation, call.location, _values(given)))
        return answer_alone(operation, given)

    try:
        batch = make_batch(state.recipe, step, seed=state.seed, world_size=state.world_size)
        shard = to_device(state.recipe.local_batch(batch, 0, state.world_size), state.device)
        with replaced_by(standing):
            seed, module = step_seed(state.seed, step, 0), state.reference.module
            compute_loss(state.recipe, module, shard, step=step, seed=seed, place="comparing what is sent, ")
    except (Exception, SystemExit):  # a program that needs true answers: what was sent until then can be compared
        pass
    finally:
        this_rank.set_collective("")
    return tuple(found)


def _values(given: Mapping[str, Any]) -> tuple[float, ...]:
    tensor = given.get("tensor", given.get("self", given.get("input")))
    if not isinstance(tensor, torch.Tensor) or tensor.is_complex() or not 1 < tensor.numel() <= _MOST_VALUES:
        return ()
    return tuple(tensor.detach().reshape(-1).double().tolist())
