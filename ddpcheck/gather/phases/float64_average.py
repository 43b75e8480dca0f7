"""The ranks' averaged gradient in float64: tells a difference in the program from one that is rounding.

Asked for where the ranks communicate in forward (SyncBatchNorm, say), so that no process alone can compute their part.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch

from ddpcheck.gather.autograd.autograd_graph import named_parameters
from ddpcheck.gather.collectives.allreduce import average_over_ranks
from ddpcheck.gather.collectives.collective_log import unlogged
from ddpcheck.gather.phases.rank_state import rank_state, replays_step
from ddpcheck.gather.steps.seeds import step_seed
from ddpcheck.gather.steps.training_step import compute_gradients
from ddpcheck.recipe.pytree import upcast
from ddpcheck.recipe.recipe import summary


@replays_step
def average_exactly(step: int, file: Path) -> str:
    """The step under way again in float64, averaged over the ranks; rank 0 saves the result.

    Args:
        step: Counted from 0.
        file: Where to.

    Returns:
        Why that cannot be done (a model that insists on its dtype), empty where it can.
    """
    state = rank_state()
    quiet = state.step.without_random
    try:
        module = copy.deepcopy(state.reference.module).double()
        seed = step_seed(state.seed, step) if quiet else state.seed_of(step)
        with unlogged():
            gradients, _ = compute_gradients(
                state.recipe, module, upcast(state.step.batch), step=step, seed=seed, quiet=quiet, place="in float64, "
            )
            owners = {name: p for name, p in named_parameters(module).items() if p.requires_grad}
            local = [gradients.get(name) for name in owners]
            averaged = average_over_ranks(local, list(owners.values()), group=state.group)
    except Exception as error:
        return summary(error)
    if state.rank == 0:
        torch.save({name: value for name, value in zip(owners, averaged, strict=True) if value is not None}, file)
    return ""
