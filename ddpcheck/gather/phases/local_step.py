"""A step of one rank by itself: the unwrapped module on its shard, averaged without DDP."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck.findings.errors import TargetError
from ddpcheck.findings.evidence.modules import ModuleDescription
from ddpcheck.findings.evidence.parameters import ParameterChange, PathEnd, StepEvidence, UnregisteredTensor
from ddpcheck.findings.evidence.steps import LocalStep, RandomDraws
from ddpcheck.findings.exception_origin import is_ours
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import Origins, assignment_of, record_origins
from ddpcheck.gather.autograd.autograd_graph import EngineProbe, named_parameters, unregistered_tensors, walk_graph
from ddpcheck.gather.autograd.gradient_paths import Explainer, function_returning_none
from ddpcheck.gather.autograd.zero_gradients import zero_ends
from ddpcheck.gather.collectives.allreduce import average_over_ranks
from ddpcheck.gather.collectives.collective_log import read_log, unlogged
from ddpcheck.gather.ddp.ddp_wrapper import broadcasts_buffers, changes_in_forward
from ddpcheck.gather.ddp.loop_events import counted_backwards
from ddpcheck.gather.phases.random_draws import Choices
from ddpcheck.gather.phases.session import RankState, rewound, seed_of, the_session
from ddpcheck.gather.phases.shards import blaming_empty_shards, samples_of
from ddpcheck.gather.phases.single_process import batch_fingerprint, make_batch, step_seed
from ddpcheck.gather.state.module_description import digest_of, fingerprint, fingerprints, layout_of
from ddpcheck.gather.state.sample_fingerprints import sample_fingerprints
from ddpcheck.gather.state.tensor_holders import Held, held_by_functions
from ddpcheck.gather.steps.gradient_distance import norm
from ddpcheck.gather.steps.training_step import (
    capture_attributes,
    capture_state,
    clear_gradients,
    compute_gradients,
    compute_loss,
    gradients_of,
    run_backward,
    run_optimizer,
    versions,
    visible_tensors,
)
from ddpcheck.recipe.pytree import to_device, tree_tensors
from ddpcheck.recipe.recipe import Recipe
from ddpcheck.worlds import rank as this_rank
from ddpcheck.worlds.compilation import is_asked_for


def begin_step(step: int, file: Path | None) -> None:
    """Bring the twin to the state in which the wrapper's forward will begin; rank 0 saves it to `file`."""
    session = the_session()
    this_rank.set_status(f"step {step}: beginning")
    trained = session.module if session.twin_optimizer is None else session.twin
    session.before = capture_state(trained, into=session.before)
    if session.world_size > 1 and broadcasts_buffers(session.wrapper):
        with unlogged():
            for name, _ in session.module.named_buffers():
                dist.broadcast(session.before.tensors[name], src=0, group=session.group)
    session.before.restore(session.twin)
    assert session.surroundings is not None
    session.started = session.surroundings.capture()
    if session.rank == 0 and file is not None:
        torch.save(session.before.tensors, file)


def local_step(step: int) -> LocalStep:
    """Forward and backward of the unwrapped module on this rank's shard."""
    session = the_session()
    twin = session.twin
    parameters = session.known  # forward may put others in their place, of which DDP does not hear
    session.outputs.clear()
    session.quiet = False
    clear_gradients(twin)
    for parameter in parameters.values():  # also of those that the twin has no more
        parameter.grad = None
    since = versions(twin)
    log_start = len(read_log(this_rank.current().directory, session.rank))
    lasting = session.leaves | _trained(twin, session.recipe)
    with blaming_empty_shards(step):
        batch = make_batch(session.recipe, step, seed=session.seed, world_size=session.world_size)
        whole = batch_fingerprint(batch)
        session.batch = to_device(session.recipe.local_batch(batch, session.rank, session.world_size), session.device)
        with record_origins() as late, counted_backwards() as backwards:
            loss = compute_loss(session.recipe, twin, session.batch, step=step, seed=seed_of(session, step))
    _note_changes(session, late)
    generator = fingerprint(torch.get_rng_state()) if "torch" in loss.drew else 0
    walk = walk_graph([loss.total])
    probe = EngineProbe(loss.total, list(parameters.values()))
    visible, opaque = visible_tensors(session.outputs)
    seen = walk_graph(visible) if session.facts.tolerates_unused and session.outputs else None
    visible_ids = {id(leaf) for leaf in seen.leaves} if seen is not None and seen.complete else None
    session.outputs.clear()
    this_rank.set_status(f"step {step}: backward")
    session.arrivals.clear()  # of backward passes inside the loss
    run_backward(loss.total, module=twin, since=since)
    session.local = gradients_of(parameters)
    session.norms = {name: norm(gradient) for name, gradient in session.local.items()}
    for name, size in session.norms.items():
        if not math.isfinite(size):
            raise TargetError(f"the gradient of {name} in step {step} is not finite, so it cannot be compared")
    states = _states(session, parameters, probe)
    lost = [name for name, state in states.items() if state == "lost"]
    ends = {name: function_returning_none([loss.total.grad_fn], parameters[name]) for name in lost}
    value, drew = loss.value, loss.drew
    ignore = [*tree_tensors(loss.batch), *session.constants.values()]
    leaves = unregistered_leaves(walk.leaves, twin, ignore=ignore, before=lasting, recipe=session.recipe)
    del loss, visible, seen
    leaves = (*_located(leaves, session), *_late_parameters(session))
    session.leaves = {id(leaf): leaf for leaf in walk.leaves}
    names, complete = walk.node_names, walk.complete
    del walk
    own_buffers = fingerprints(twin.named_buffers())
    session.after = capture_attributes(twin, buffers=True)
    session.missing = [name for name, state in states.items() if state == "missing"]
    calls = read_log(this_rank.current().directory, session.rank)
    evidence = StepEvidence(
        rank=session.rank,
        step=step,
        states=states,
        path_ends=ends,
        unregistered=leaves,
        arrivals={name: count for name, count in session.arrivals.items() if count > 1},
        hidden_from_ddp=()
        if visible_ids is None or opaque
        else tuple(n for n, p in parameters.items() if states[n] != "missing" and id(p) not in visible_ids),
        output_type=opaque if visible_ids is not None and not visible_ids else "",
        reentrant=not complete or any("CheckpointFunctionBackward" in name for name in names),
        changed={n: c for n, c in session.changed.items() if c.kind != "unfrozen" or _has_gradient(twin, n)},
    )
    forward_calls = [call for call in calls[log_start:] if call.place.endswith("forward")]
    return LocalStep(
        evidence=evidence,
        loss=value,
        random=RandomDraws(drew, generator),
        batch=whole,
        samples=samples_of(session.batch) or 0,
        calls=len(calls),
        norm=sum(size**2 for size in session.norms.values()) ** 0.5,
        forward_calls=tuple(dict.fromkeys(forward_calls)),
        buffers=own_buffers,
        sample_fingerprints=sample_fingerprints(session.batch),
        global_sample_fingerprints=sample_fingerprints(batch) if session.rank == 0 else (),
        backwards=backwards[0] + 1,
        threads=torch.get_num_threads(),
        compiles=is_asked_for(),
        layout=digest_of(layout_of(twin)),
    )


def layout() -> ModuleDescription:
    """What the module looks like after the local step."""
    return layout_of(the_session().twin)


def _note_changes(session: RankState, made: Origins) -> None:
    """Keep what the forward pass has done to the parameters that DDP knows, and which new ones it has made."""
    found = changes_in_forward(session.seen, session.twin)
    now = named_parameters(session.twin)
    for name, (what, by) in found.items():
        after = now.get(name)
        where = made.of(after) if after is not None and not by else None
        session.changed.setdefault(name, ParameterChange(what, where or _line_of_change(session, made, name), by))
    session.changed = {name: change for name, change in session.changed.items() if name in found}
    known = {before.identity for before in session.seen.values()}
    late = {name: made.of(p) for name, p in now.items() if id(p) not in known and name not in found}
    session.late |= {name: where for name, where in late.items() if name not in session.late}


def _line_of_change(session: RankState, made: Origins, name: str) -> Location | None:
    """The line that has put something else under a part of `name`, or taken it away."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        holder = session.holders.get(".".join(parts[:place]))
        if holder is not None and (where := made.of_place(holder, part)) is not None:
            return where
    return None


def _has_gradient(module: nn.Module, name: str) -> bool:
    parameter = named_parameters(module).get(name)
    return parameter is not None and parameter.grad is not None


def batch_again(step: int) -> tuple[int, ...]:
    """The fingerprints of the global batch of `step`, made once more."""
    session = the_session()
    return batch_fingerprint(make_batch(session.recipe, step, seed=session.seed, world_size=session.world_size))


def _states(session: RankState, parameters: Mapping[str, nn.Parameter], probe: EngineProbe) -> dict[str, Any]:
    states: dict[str, Any] = {}
    for index, name in enumerate(parameters):
        if name in session.local:
            empty = session.local[name].numel() == 0
            states[name] = "contributes" if empty or session.norms[name] != 0.0 else "zero"
        elif probe.reached is not None and probe.reached[index]:
            consumed = len(getattr(parameters[name], "_post_accumulate_grad_hooks", None) or ()) > 1
            states[name] = "contributes" if consumed else "lost"  # a hook of the user's may have taken it
        else:
            states[name] = "missing"
    return states


def _located(leaves: Iterable[UnregisteredTensor], session: RankState) -> tuple[UnregisteredTensor, ...]:
    """`leaves` with the lines that made them, or else those that assign the attribute or variable that holds them."""
    held = {name: session.origins.of(tensor) for name, tensor in unregistered_tensors(session.module)}
    return tuple(
        replace(
            leaf,
            location=held.get(leaf.name) or assignment_of(session.module, leaf.name, beside=session.recipe.loss),
        )
        for leaf in leaves
    )


def _late_parameters(session: RankState) -> tuple[UnregisteredTensor, ...]:
    """Parameters that forward has made, as far as they have received gradient."""
    now = named_parameters(session.twin)
    return tuple(
        UnregisteredTensor(name, tuple(now[name].shape), where, created_in_forward=True)
        for name, where in session.late.items()
        if name in now and now[name].grad is not None
    )


@rewound
def explain(step: int) -> dict[str, PathEnd]:
    """Replay the forward pass of the step to say why gradients are missing on this rank.

    Every rank replays, also one that misses nothing, since a forward may communicate. Where it does, no rank runs it
    more often than the others, so that what only another value of a parameter could tell is not told.
    """
    session = the_session()
    assert session.before is not None
    before = session.before
    missing = {name: session.known[name] for name in session.missing}
    communicates = bool(read_log(this_rank.current().directory, session.rank))

    def forward() -> list[torch.Tensor]:
        seed = seed_of(session, step)
        return compute_loss(
            session.recipe, session.twin, session.batch, step=step, seed=seed, place="explaining, "
        ).parts

    explainer = Explainer(session.twin, forward, lambda: before.restore(session.twin), once=communicates)
    try:
        return explainer.explain(missing)
    except Exception as error:  # what the replay cannot tell, the missing gradient still does
        if is_ours(error):
            raise
        return {name: PathEnd("unknown") for name in missing}
    finally:
        before.restore(session.twin)
        session.outputs.clear()


def unregistered_leaves(
    leaves: Iterable[torch.Tensor],
    module: nn.Module,
    *,
    ignore: Sequence[torch.Tensor] = (),
    before: Mapping[int, torch.Tensor] | None = None,
    recipe: Recipe | None = None,
) -> tuple[UnregisteredTensor, ...]:
    """The leaves that receive gradient without being parameters of `module`, by name where they have one.

    A tensor that a forward pass makes for itself (the input of a gradient penalty, say) is none of them, wherever it is
    kept: it must be among those that were there `before` the forward pass. Where they are not known, what the module
    holds is taken to last, and so is an `nn.Parameter`.
    """
    known = {id(p) for p in module.parameters()} | {id(tensor) for tensor in ignore}
    strange = [leaf for leaf in leaves if id(leaf) not in known and leaf.requires_grad]
    if not strange:
        return ()
    names = {id(tensor): (name, kind) for name, kind, tensor in _held(module, recipe)}
    if before is None:
        before = {id(leaf): leaf for leaf in strange if isinstance(leaf, nn.Parameter)}
        before |= {id(tensor): tensor for _, tensor in unregistered_tensors(module)}
    found = []
    for leaf in strange:
        if id(leaf) in before:
            name, kind = names.get(id(leaf), (f"a tensor of shape {tuple(leaf.shape)}", ""))
            found.append(UnregisteredTensor(name, tuple(leaf.shape), kind=kind))
    return tuple(sorted(found, key=lambda item: item.name))


def _held(module: nn.Module, recipe: Recipe | None) -> list[Held]:
    """The tensors that are no parameters of `module`, where somebody holds them; the module's own names come last."""
    own = [*module.named_buffers(), *unregistered_tensors(module)]
    return [*held_by_functions(getattr(recipe, "loss", None), module), *((name, "", tensor) for name, tensor in own)]


def _trained(module: nn.Module, recipe: Recipe) -> dict[int, torch.Tensor]:
    """Those of them that require grad."""
    return {id(tensor): tensor for _, _, tensor in _held(module, recipe) if tensor.requires_grad}


def average(step: int, file: Path | None) -> None:
    """Average the local gradients over the ranks by an all-reduce of our own; rank 0 saves the result."""
    session = the_session()
    this_rank.set_status(f"step {step}: averaging local gradients")
    owners = session.known
    local = [session.local.get(name) for name in owners]
    with unlogged():
        averaged = average_over_ranks(local, list(owners.values()), group=session.group)
        sizes = torch.tensor([session.norms.get(name, 0.0) ** 2 for name in owners], dtype=torch.float64)
        sizes = sizes.to(session.device)
        if session.world_size > 1:
            dist.all_reduce(sizes, group=session.group)
    session.averaged = dict(zip(owners, averaged, strict=True))
    session.scale = dict(zip(owners, (sizes / session.world_size).sqrt().tolist(), strict=True))
    if session.rank == 0 and file is not None:
        torch.save({k: v for k, v in session.averaged.items() if v is not None}, file)


@rewound
def quiet_step(step: int) -> tuple[float, tuple[str, ...]] | str:
    """The local step again with every random operation silenced, for the comparison with the global batch.

    Returns:
        The loss and what chose among many at random, or why that cannot be done: it may be another thing without its
        random numbers.
    """
    session = the_session()
    assert session.before is not None
    session.before.restore(session.twin)
    try:
        with Choices(samples_of(session.batch) or 0) as choices:
            session.local, loss = compute_gradients(
                session.recipe, session.twin, session.batch, step=step, seed=step_seed(session.seed, step), quiet=True
            )
    except TargetError as error:
        return str(error)
    finally:
        session.before.restore(session.twin)
    session.norms = {name: norm(gradient) for name, gradient in session.local.items()}
    session.quiet = True
    return loss.value, tuple(choices.found)


def wake(names: Sequence[str], step: int) -> list[str]:
    """Those of `names` whose gradient is not zero when every parameter is moved a little."""
    session = the_session()
    _move_a_little(session, step)
    gradients, _ = compute_gradients(
        session.recipe, session.twin, session.batch, step=step, seed=seed_of(session, step), place="looking again, "
    )
    _restore(session)
    return [name for name in names if name in gradients and bool(gradients[name].count_nonzero())]


def why_zero(names: Sequence[str], step: int) -> dict[str, PathEnd]:
    """Where the gradients of `names` become zero, as far as that can be told; with every parameter moved a little."""
    session = the_session()
    _move_a_little(session, step)

    def forward() -> torch.Tensor:
        seed = seed_of(session, step)
        return compute_loss(
            session.recipe, session.twin, session.batch, step=step, seed=seed, place="looking again, "
        ).total

    try:
        return zero_ends(forward, {name: session.known[name] for name in names})
    except TargetError:  # such values are not good for this model
        return {}
    finally:
        clear_gradients(session.twin)
        _restore(session)


def _move_a_little(session: RankState, step: int) -> None:
    _restore(session)
    generator = torch.Generator().manual_seed(step_seed(session.seed, step))
    with torch.no_grad():
        for parameter in session.twin.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                size = 0.02 + 0.1 * float(parameter.detach().abs().mean())
                moved = size * torch.randn(parameter.shape, generator=generator)
                parameter.add_(moved.to(parameter.device, parameter.dtype))


def _restore(session: RankState) -> None:
    assert session.before is not None
    session.before.restore(session.twin)


def local_update(step: int) -> None:
    """Where the wrapper cannot be used: step the twin with the averaged gradients instead."""
    session = the_session()
    this_rank.set_status(f"step {step}: optimizer")
    assert session.before is not None and session.after is not None
    session.after.restore(session.twin)
    if session.twin_optimizer is None:
        session.twin_optimizer = session.recipe.build_optimizer(p for p in session.twin.parameters() if p.requires_grad)
    for name, parameter in named_parameters(session.twin).items():
        gradient = session.averaged.get(name)
        parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
    run_optimizer(session.twin_optimizer, "step")
    clear_gradients(session.twin)
