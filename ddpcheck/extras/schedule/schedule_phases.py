"""Rank phases that simulate one rank without the other ranks."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec
import torch

from ddpcheck.extras.schedule.simulated_group import combine as combine
from ddpcheck.extras.schedule.simulated_group import join_simulated
from ddpcheck.findings.evidence.endings import ScheduledCall, Simulated, SimulatedRank
from ddpcheck.gather.ddp.sync_batchnorm import synchronised_on_cpu
from ddpcheck.gather.phases.local_step import samples_of
from ddpcheck.gather.state.randomness import seed_everything, settle_device
from ddpcheck.gather.state.training_mode import into_training
from ddpcheck.gather.steps import training_step
from ddpcheck.recipe.recipe import Recipe
from ddpcheck.recipe.target import load_on_rank
from ddpcheck.worlds import rank as this_rank
from ddpcheck.worlds.compilation import run_as_written

_RANKS_OF_A_MACHINE = 8


def simulate(target: str | Recipe, seed: int, rank: int, world: Simulated) -> SimulatedRank:
    """Train as one rank without the other ranks, and save the collectives."""
    _set_environment(rank, world.world_size)
    run_as_written()
    calls, answers = join_simulated(rank, world.world_size, world.folder)
    with synchronised_on_cpu():
        recipe, device = load_on_rank(target), torch.device("cpu")
        settle_device(device)
        this_rank.set_status("building the model")
        seed_everything(training_step.model_seed(seed))
        module = recipe.build_model()
        into_training(module)
        this_rank.set_status("wrapping the model")
        wrapped = recipe.wrap_module(module, device)
        optimizer = recipe.build_optimizer(p for p in wrapped.parameters() if p.requires_grad)
        for step in range(world.steps):
            batch = training_step.make_batch(recipe, step, seed=seed, world_size=world.shards)
            shard = recipe.local_batch(batch, rank % world.shards, world.shards)
            training_step.run_optimizer(optimizer, "zero_grad")
            loss = training_step.compute_loss(
                recipe, wrapped, shard, step=step, seed=training_step.step_seed(seed, step, rank)
            )
            this_rank.set_status(f"step {step}: backward")
            training_step.run_backward(loss.total)
            this_rank.set_status(f"step {step}: optimizer")
            training_step.run_optimizer(optimizer, "step")
    answers.write()
    return SimulatedRank(rank, _write_schedule(calls, world.folder))


def count_shards(target: str | Recipe, seed: int, world_size: int) -> int:
    """Return the number of shards: `world_size`, or at most 2 for small batches."""
    recipe = load_on_rank(target)
    if recipe.shard is not None:
        return world_size
    size = samples_of(training_step.make_batch(recipe, 0, seed=seed, world_size=1))
    return world_size if size is None or size >= world_size else min(2, max(size, 1))


def _set_environment(rank: int, world_size: int) -> None:
    """Set the environment variables of a launcher, with 8 ranks per machine."""
    local_size = min(_RANKS_OF_A_MACHINE, world_size)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(local_size))
    os.environ.update(LOCAL_RANK=str(rank % local_size), GROUP_RANK=str(rank // local_size))


def _write_schedule(calls: list[ScheduledCall], folder: Path) -> str:
    """Write collectives to a file named by digest; return the digest."""
    data = msgspec.msgpack.encode(calls)
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    file = folder / f"schedule-{digest}"
    if not file.exists():
        part = folder / f"{digest}-{os.getpid()}.part"
        part.write_bytes(data)
        part.replace(file)
    return digest
