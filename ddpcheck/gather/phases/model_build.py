"""The model of a rank: built twice, described, and the lines that made its parts."""

from __future__ import annotations

import contextlib
import copy
import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.findings.errors import TargetError
from ddpcheck.findings.evidence.modules import BuiltModule, ModuleDescription
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import assignment_of, record_origins
from ddpcheck.gather.autograd.autograd_graph import all_names
from ddpcheck.gather.autograd.gradient_hooks import record_hooks
from ddpcheck.gather.collectives.collective_log import record_collectives, unlogged
from ddpcheck.gather.ddp.ddp_wrapper import find_ddp
from ddpcheck.gather.ddp.sync_batchnorm import synchronised_on_cpu
from ddpcheck.gather.phases.rank_state import RankState, ReferenceModule, rank_state
from ddpcheck.gather.state.module_description import describe, digest_of
from ddpcheck.gather.state.randomness import seed_everything, settle_device
from ddpcheck.gather.state.training_mode import ARRIVED_EVALUATING, into_training
from ddpcheck.gather.steps.seeds import model_seed, uneven_batch
from ddpcheck.recipe.recipe import Recipe
from ddpcheck.recipe.target import load_on_rank
from ddpcheck.worlds import rank as this_rank
from ddpcheck.worlds.compilation import run_as_written


def build(target: str | Recipe, seed: int) -> BuiltModule:
    """Load the recipe and build the module twice, under the same seed."""
    context = this_rank.current()
    record_collectives(context.directory, context.rank)
    run_as_written()
    this_rank.set_status("loading the target")
    stack = contextlib.ExitStack()
    syncbn = stack.enter_context(synchronised_on_cpu()) if context.device == "cpu" else []
    record_hooks()
    recipe = load_on_rank(target)
    device = torch.device(context.device)
    settle_device(device)
    this_rank.set_status("building the model")
    seed_everything(model_seed(seed))
    with record_origins() as origins:
        module = recipe.build_model()
    if isinstance(find_ddp(module), nn.parallel.DistributedDataParallel):
        raise TargetError(
            "model() returned a module that is, or holds, a DistributedDataParallel; return the bare module, and wrap "
            "it in the recipe's wrap(module, device)"
        )
    seed_everything(model_seed(seed))
    reference = recipe.build_model()
    if reference is module or {id(p) for p in reference.parameters()} & {id(p) for p in module.parameters()}:
        reference = copy.deepcopy(module)  # model() hands out the same parameters every time
    with unlogged():
        group = dist.new_group(timeout=datetime.timedelta(days=1)) if context.world_size > 1 else None
    described = describe(module.to(device))
    this_rank.state["check"] = RankState(
        recipe=recipe,
        seed=seed,
        device=device,
        rank=context.rank,
        world_size=context.world_size,
        group=group,
        module=module,
        reference=ReferenceModule(reference.to(device)),
        origins=origins,
        description=described,
        arrived_evaluating=into_training(module),
        syncbn=syncbn,
        stack=stack,
    )
    into_training(reference)
    trainable = sum(p.requires_grad for p in module.parameters())
    return BuiltModule(digest_of(described), described.uninitialised, trainable, len(described.parameters))


def description() -> ModuleDescription:
    """The module of this rank as `model()` has returned it, in full; asked for when the digests differ."""
    return rank_state().description


def locations(names: Sequence[str]) -> dict[str, Location]:
    """The lines that made the parameters, buffers and modules called `names`."""
    state = rank_state()
    found = {name: state.origins.of_name(state.module, name) for name in names if name}
    return {name: where for name, where in found.items() if where is not None}


def assignments(names: Sequence[str]) -> dict[str, Location]:
    """The lines that assign the attributes called `names`."""
    found = {name: assignment_of(rank_state().module, name) for name in names}
    return {name: where for name, where in found.items() if where is not None}


def aliases() -> dict[str, tuple[str, ...]]:
    """All names of the tied parameters, by the first."""
    return {names[0]: names for names in all_names(rank_state().module).values() if len(names) > 1}


def notes() -> list[str]:
    """Sentences on how this rank ran the recipe."""
    state = rank_state()
    found = [ARRIVED_EVALUATING] if state.arrived_evaluating else []
    if state.syncbn:
        found.append(
            "SyncBatchNorm refuses CPU tensors: ddpcheck stood in for it with the same statistics, over all-reduces "
            "that autograd differentiates"
        )
    if uneven := uneven_batch(state.recipe, 0, seed=state.seed, world_size=state.world_size):
        found.append(uneven)
    if this_rank.current().shared_gpu:
        found.append("several ranks share one GPU, through gloo with CUDA tensors")
    return found
