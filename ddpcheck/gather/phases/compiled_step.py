"""The wrapper's step as the recipe compiles it, beside the step as it is written (`ddpcheck.worlds.compilation`)."""

from __future__ import annotations

from ddpcheck.findings.evidence.steps import CompiledStep
from ddpcheck.gather.autograd.autograd_graph import named_parameters
from ddpcheck.gather.collectives.collective_log import unlogged
from ddpcheck.gather.phases.model_wrap import count_calls
from ddpcheck.gather.phases.rank_state import rank_state, replays_step
from ddpcheck.gather.state.module_description import fingerprint
from ddpcheck.gather.state.module_state import capture_state
from ddpcheck.gather.steps.gradient_distance import dense, difference, scales
from ddpcheck.gather.steps.training_step import clear_gradients, compute_loss
from ddpcheck.worlds import rank as this_rank
from ddpcheck.worlds.compilation import run_as_compiled

_TOLERANCE = 0.1  # of kernels that round in other places, at any depth and dtype; the smallest fault measured is 0.5


@replays_step
def compiled_step(step: int) -> CompiledStep:
    """Forward and backward through the compiled wrapper, from the state in which the step began.

    The optimizer does not step, and the module is afterwards what it is now. Hooks of ours are taken off meanwhile, and
    collectives are not logged: either would have another graph compiled than training compiles.
    """
    state = rank_state()
    model, data, module = state.training_model, state.step, state.module
    now = capture_state(module)
    data.before.restore(module)
    clear_gradients(module)
    for handle in model.counters:
        handle.remove()
    seed = state.seed_of(step)
    try:
        with unlogged(), run_as_compiled():
            loss = compute_loss(state.recipe, model.wrapped, data.batch, step=step, seed=seed, place="compiled DDP ")
            this_rank.set_status(f"step {step}: compiled DDP backward")
            loss.total.backward()
        found = {name: p.grad for name, p in named_parameters(module).items() if p.requires_grad}
        gradients = {name: None if gradient is None else dense(gradient) for name, gradient in found.items()}
    finally:
        count_calls(model)
        now.restore(module)
    averaged = {name: gradient for name, gradient in data.averaged.items() if gradient is not None}
    scale = scales(averaged)
    differences = tuple(
        difference(name, gradient, averaged.get(name), scale=scale.get(name, 0.0), tolerance=_TOLERANCE)
        for name, gradient in gradients.items()
        if gradient is not None or name in averaged
    )
    return CompiledStep(
        rank=state.rank,
        step=step,
        gradients={name: 0 if gradient is None else fingerprint(gradient) for name, gradient in gradients.items()},
        differences=differences,
        drew="torch" in loss.drew,
    )
