"""Why gradients of a step are missing or zero: the step run again on the reference module."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ddpcheck.findings.errors import TargetError
from ddpcheck.findings.evidence.parameters import PathEnd
from ddpcheck.findings.exception_origin import is_ours
from ddpcheck.gather.autograd.autograd_graph import line_of, nearest_above, parents_behind, recorded_lines
from ddpcheck.gather.autograd.gradient_paths import Explainer
from ddpcheck.gather.collectives.collective_log import read_log
from ddpcheck.gather.phases.rank_state import RankState, rank_state, replays_step
from ddpcheck.gather.steps.training_step import clear_gradients, compute_gradients, run_backward, step_seed
from ddpcheck.worlds import rank as this_rank


@replays_step
def explain(step: int) -> dict[str, PathEnd]:
    """By parameter, why its gradient is missing on this rank.

    Every rank replays, also one that misses nothing, since a forward may communicate. Where it does, no rank runs it
    more often than the others, so that what only another value of a parameter could tell is not told.
    """
    state = rank_state()
    module = state.reference.module
    missing = {name: state.reference.trainable[name] for name in state.step.missing}
    communicates = bool(read_log(this_rank.current().directory, state.rank))
    explainer = Explainer(
        module,
        lambda: state.run_loss(step, "explaining, ").parts,
        state.rewind,
        once=communicates,
    )
    try:
        return explainer.explain(missing)
    except Exception as error:  # what the replay cannot tell, the missing gradient still does
        if is_ours(error):
            raise
        return {name: PathEnd("unknown") for name in missing}


@replays_step
def nonzero_when_perturbed(step: int, names: Sequence[str]) -> list[str]:
    """The parameters of `names` whose gradient is not zero once every parameter is moved a little."""
    state = rank_state()
    _perturb(state, step)
    module, batch, seed = state.reference.module, state.step.batch, state.seed_of(step)
    gradients, _ = compute_gradients(state.recipe, module, batch, step=step, seed=seed, place="looking again, ")
    return [name for name in names if name in gradients and bool(gradients[name].count_nonzero())]


@replays_step
def why_zero(step: int, names: Sequence[str]) -> dict[str, PathEnd]:
    """Where the gradients of `names` become zero, as far as that can be told; with every parameter moved a little."""
    state = rank_state()
    _perturb(state, step)
    parameters = {name: state.reference.trainable[name] for name in names}
    try:
        return zero_ends(lambda: state.run_loss(step, "looking again, ").total, parameters)
    except TargetError:  # such values are not good for this model
        return {}
    finally:
        clear_gradients(state.reference.module)


def _perturb(state: RankState, step: int) -> None:
    """Move every parameter of the reference module by a little, alike on all ranks."""
    generator = torch.Generator().manual_seed(step_seed(state.seed, step))
    with torch.no_grad():
        for parameter in state.reference.module.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                size = 0.02 + 0.1 * float(parameter.detach().abs().mean())
                moved = size * torch.randn(parameter.shape, generator=generator)
                parameter.add_(moved.to(parameter.device, parameter.dtype))


def zero_ends(forward: Callable[[], torch.Tensor], leaves: Mapping[str, torch.Tensor]) -> dict[str, PathEnd]:
    """The operations that turn the gradients of `leaves` into zeros: nonzero ones come to them, zeros leave.

    Args:
        forward: Computes the loss; run once, and backward through it.
        leaves: By name; those whose gradient was zero all the way from the loss are left out of the answer.
    """
    with recorded_lines():
        loss = forward()
    parents = parents_behind([loss.grad_fn])
    came: dict[Any, bool] = {}  # node -> whether anything but zeros came to it
    left: dict[Any, list[bool]] = {}  # node -> for each input, whether anything but zeros left

    def watch(node: Any) -> Any:
        def note(inputs: Any, outputs: Any) -> None:
            came[node] = any(map(_is_nonzero, outputs))
            left[node] = list(map(_is_nonzero, inputs))

        return node.register_hook(note)

    def turns_to_zero(node: Any, index: int) -> bool:
        return came.get(node, False) and not any(left[node][index : index + 1])

    hooks = [watch(node) for node in dict.fromkeys(node for edges in parents.values() for node, _ in edges)]
    run_backward(loss)
    ends = {}
    for name, leaf in leaves.items():
        node = next(nearest_above(leaf, parents, turns_to_zero), None)
        if node is not None:
            ends[name] = PathEnd("zero", operation_of(node.name()), line_of(node))
    for hook in hooks:
        hook.remove()
    return ends


def _is_nonzero(gradient: object) -> bool:
    return isinstance(gradient, torch.Tensor) and bool(gradient.count_nonzero())


def operation_of(node_name: str) -> str:
    """The operation whose backward a graph node is: "mul()" for "MulBackward0"."""
    name = re.sub(r"Backward\d*$", "", node_name)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower() + "()"
