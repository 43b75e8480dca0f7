"""Local step of one rank: the unwrapped reference module, averaged without DDP."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpcheck.findings.errors import EmptyShardError, TargetError
from ddpcheck.findings.evidence import steps
from ddpcheck.findings.evidence.gradients import RandomNumbers
from ddpcheck.findings.evidence.modules import ModuleDescription
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import assignment_of
from ddpcheck.findings.tracebacks import is_own_bug
from ddpcheck.gather.autograd.autograd_graph import LossGraph, engine_answers, named_parameters, unregistered_tensors
from ddpcheck.gather.autograd.gradient_paths import function_returning_none
from ddpcheck.gather.autograd.unregistered_leaves import reachable_tensors, unregistered_leaves
from ddpcheck.gather.collectives.allreduce import averages_over_ranks, rms_over_ranks
from ddpcheck.gather.collectives.collective_log import read_log, without_logging
from ddpcheck.gather.ddp.ddp_wrapper import broadcasts_buffers, changes_in_forward
from ddpcheck.gather.ddp.loop_events import count_backwards
from ddpcheck.gather.phases.rank_state import RankState, ReferenceModule, StepData, rank_state, replays_step
from ddpcheck.gather.phases.repeated_step import random_choices
from ddpcheck.gather.state.fingerprints import digest_of, fingerprint, fingerprints
from ddpcheck.gather.state.module_description import Origins, layout_of, record_origins
from ddpcheck.gather.state.module_state import capture_state, copied_module
from ddpcheck.gather.state.tensor_file import TensorFile, save
from ddpcheck.gather.steps import training_step
from ddpcheck.recipe.pytree import batch_size, to_device, tree_tensors, upcast
from ddpcheck.recipe.recipe import error_summary
from ddpcheck.worlds import rank as this_rank
from ddpcheck.worlds.compilation import uses_compile


def begin_step(step: int, file: Path | None, *, shared: bool = True) -> None:
    """Capture the module state before the wrapper's forward; rank 0 writes `file`.

    If the model is large, the state is kept in a file: `file` for all ranks if `shared`, else a file per rank.
    """
    state = rank_state()
    this_rank.set_status(f"step {step}: beginning")
    model, reference = state.training_model, state.reference
    trained = state.module if reference.optimizer is None else reference.module
    last = state.step.before if hasattr(state, "step") else None
    own_file = state.own_file(file, shared=shared)
    is_split = model.is_split and trained is state.module
    before = capture_state(trained, into=last, parameters=not is_split and own_file is None)
    if is_split:
        parameters = state.full_tensors(model.named_parameters())
        before.tensors = {**before.tensors, **{name: tensor.clone() for name, tensor in parameters.items()}}
        for plain, changed in zip(before.plain, model.changed_attributes, strict=False):
            plain.update(changed)
    if state.world_size > 1 and broadcasts_buffers(model.wrapper):
        with without_logging():
            for name, _ in state.module.named_buffers():
                dist.broadcast(before.tensors[name], src=0, group=state.group)
    state.step = StepData(before)
    if file is not None and (state.rank == 0 or (own_file is not None and not shared)):
        save({**dict(trained.named_parameters()), **before.tensors}.items(), own_file or file)
    if own_file is not None:
        before.tensors = {name: before.tensors[name] for name, _ in trained.named_buffers()}
        before.file = own_file


def local_step(step: int) -> steps.LocalStep:
    """Run forward and backward of the reference module on this rank's shard."""
    state = rank_state()
    reference, data = state.reference, state.step
    module, parameters = reference.module, reference.trainable  # forward may replace parameters
    if data.before.file is not None:
        data.before.tensors = {**TensorFile(data.before.file), **data.before.tensors}
    state.rewind()
    reference.outputs.clear()
    training_step.clear_gradients(module, *parameters.values())
    since = training_step.versions(module)
    log = this_rank.current().directory, state.rank
    log_start = len(read_log(*log))
    lasting = reference.leaves | {id(t): t for _, _, t in reachable_tensors(module, state.recipe) if t.requires_grad}
    with blaming_empty_shards(step):
        batch = state.global_batch(step)
        whole = training_step.batch_fingerprint(batch)
        data.batch = to_device(state.shard_of(batch), state.device)
        # only now: the shard may have been drawn from a data loader
        data.restore_external = state.training_model.external_state.capture()
        with record_origins() as created, count_backwards() as backwards:
            loss = state.run_loss(step)
    _record_changes(reference, created)
    generator = fingerprint(torch.get_rng_state()) if "torch" in loss.drew else 0
    evidence, reached, visible = _graph_evidence(step, loss, lasting)
    value, drew, total = loss.value, loss.drew, loss.total
    del loss
    this_rank.set_status(f"step {step}: backward")
    reference.arrivals.clear()  # drop arrivals of backward passes inside the loss
    training_step.run_backward(total, module=module, since=since)
    data.keep(training_step.gradients_of(parameters))
    if infinite := [name for name, size in data.norms.items() if not math.isfinite(size)]:
        raise TargetError(f"the gradient of {infinite[0]} in step {step} is not finite, so it cannot be compared")
    states = _classify_parameters(state, reached)
    lost = [name for name, kind in states.items() if kind == "lost"]
    ends = {name: function_returning_none(LossGraph([total]), parameters[name]) for name in lost}
    del total
    data.after = capture_state(module, parameters=False)
    data.missing = [name for name, kind in states.items() if kind == "missing"]
    calls = read_log(*log)
    forward_calls = [call for call in calls[log_start:] if call.place.endswith("forward")]
    return steps.LocalStep(
        evidence=_add_backward_facts(evidence, states, ends, visible),
        loss=value,
        random=steps.RandomDraws(drew, generator),
        batch=whole,
        samples=sample_count(data.batch) or 0,
        calls=len(calls),
        norm=sum(size**2 for size in data.norms.values()) ** 0.5,
        forward_calls=tuple(dict.fromkeys(forward_calls)),
        buffers=fingerprints(module.named_buffers()),
        sample_fingerprints=training_step.sample_fingerprints(data.batch),
        global_sample_fingerprints=training_step.sample_fingerprints(batch) if state.rank == 0 else (),
        backwards=backwards[0] + 1,
        threads=torch.get_num_threads(),
        compiles=uses_compile(),
        layout=digest_of(layout_of(module)),
    )


def _graph_evidence(
    step: int, loss: training_step.Loss, lasting: Mapping[int, torch.Tensor]
) -> tuple[steps.StepEvidence, Sequence[bool], set[int] | None]:
    """Return the facts of the loss graph, before backward frees it.

    Also returns, for each parameter, True if the loss reaches the parameter; and the ids of the leaves that DDP finds
    from the module output (None if unknown).
    """
    state = rank_state()
    reference, facts = state.reference, state.training_model.facts
    graph = LossGraph([loss.total])
    reached, _ = engine_answers(loss.total, list(reference.trainable.values()))
    tensors, opaque = training_step.visible_tensors(reference.outputs, static_graph=facts.static_graph)
    output_graph = LossGraph(tensors) if facts.tolerates_unused and reference.outputs else None
    reference.outputs.clear()
    visible = (
        {id(leaf) for leaf in output_graph.leaves} if output_graph is not None and output_graph.is_complete else None
    )
    ignore = [*tree_tensors(loss.batch), *reference.constants.values()]
    leaves = unregistered_leaves(graph.leaves, reference.module, ignore=ignore, before=lasting, recipe=state.recipe)
    reference.leaves = {id(leaf): leaf for leaf in graph.leaves}
    evidence = steps.StepEvidence(
        rank=state.rank,
        step=step,
        states={},
        unregistered=_with_lines(leaves, state),
        output_type=opaque if visible is not None and not visible else "",
        reentrant=not graph.is_complete or graph.has_reentrant_checkpoint,
    )
    return evidence, reached, None if opaque else visible


def _add_backward_facts(
    evidence: steps.StepEvidence,
    states: Mapping[str, steps.GradientState],
    ends: Mapping[str, steps.PathEnd],
    visible: Collection[int] | None,
) -> steps.StepEvidence:
    reference = rank_state().reference
    shapes = {n: tuple(p.shape) for n, p in named_parameters(reference.module).items() if p.grad is not None}
    created = {name: line for name, line in reference.created.items() if name in shapes}
    used = [name for name, kind in states.items() if kind != "missing"]
    return replace(
        evidence,
        states=states,
        path_ends=ends,
        unregistered=(
            *evidence.unregistered,
            *(steps.UnregisteredTensor(n, shapes[n], line, created_in_forward=True) for n, line in created.items()),
        ),
        arrivals={name: count for name, count in reference.arrivals.items() if count > 1},
        hidden_from_ddp=tuple(n for n in used if visible is not None and id(reference.trainable[n]) not in visible),
        changed={n: c for n, c in reference.changed.items() if c.kind != "unfrozen" or n in shapes},
    )


@contextlib.contextmanager
def blaming_empty_shards(step: int) -> Iterator[None]:
    """Convert errors in the block to `EmptyShardError` if the shard or loader is empty."""
    data = rank_state().step
    try:
        yield
    except Exception as error:
        if is_own_bug(error):
            raise
        if isinstance(error.__cause__, StopIteration):
            raise EmptyShardError(f"its loader has ended: {error}", step) from error
        if data.batch is not None and sample_count(data.batch) == 0:
            raise EmptyShardError(f"its shard is empty, and with it: {error}", step) from error
        raise


def sample_count(batch: Any) -> int | None:
    """Return the number of samples of a batch, or None if unknown."""
    with contextlib.suppress(TargetError):
        return batch_size(batch)
    return None


def layout() -> ModuleDescription:
    """Describe the reference module's current parameters and buffers, to compare layouts between ranks."""
    return layout_of(rank_state().reference.module)


def _record_changes(reference: ReferenceModule, origins: Origins) -> None:
    """Record which of DDP's parameters forward changed, and which new parameters forward created."""
    changes = changes_in_forward(reference.seen, reference.module)
    now = named_parameters(reference.module)
    for name, (kind, source) in changes.items():
        after = now.get(name)
        location = origins.value_line(after) if after is not None and not source else None
        reference.changed.setdefault(
            name, steps.ParameterChange(kind, location or _line_of_change(reference, origins, name), source)
        )
    reference.changed = {name: change for name, change in reference.changed.items() if name in changes}
    known = {before.identity for before in reference.seen.values()}
    created = {name: origins.value_line(p) for name, p in now.items() if id(p) not in known and name not in changes}
    reference.created |= {name: location for name, location in created.items() if name not in reference.created}


def _line_of_change(reference: ReferenceModule, origins: Origins, name: str) -> Location | None:
    parts = name.split(".")
    parents = [reference.submodules.get(".".join(parts[:index])) for index in range(len(parts))]
    lines = (
        origins.attribute_line(parent, part) for parent, part in zip(parents, parts, strict=True) if parent is not None
    )
    return next(filter(None, lines), None)


def batch_again(step: int) -> tuple[int, ...]:
    """Build the global batch again; return its fingerprints, equal if the batch is reproducible."""
    return training_step.batch_fingerprint(rank_state().global_batch(step))


def _classify_parameters(state: RankState, reached: Sequence[bool]) -> dict[str, Any]:
    """Classify each parameter: "contributes", "zero", "lost" (a Function returned None) or "missing"."""
    states: dict[str, Any] = {}
    for (name, parameter), is_reached in zip(state.reference.trainable.items(), reached, strict=True):
        if name in state.step.local:
            empty = state.step.local[name].numel() == 0
            states[name] = "contributes" if empty or state.step.norms[name] != 0.0 else "zero"
        elif is_reached:
            consumed = len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ()) > 1
            states[name] = "contributes" if consumed else "lost"  # a user hook may have consumed the gradient
        else:
            states[name] = "missing"
    return states


def _with_lines(leaves: Iterable[steps.UnregisteredTensor], state: RankState) -> tuple[steps.UnregisteredTensor, ...]:
    lines = {name: state.origins.value_line(tensor) for name, tensor in unregistered_tensors(state.module)}
    loss = state.recipe.loss
    return tuple(
        replace(leaf, location=lines.get(leaf.name) or assignment_of(state.module, leaf.name, beside=loss))
        for leaf in leaves
    )


def average(step: int, file: Path | None, *, shared: bool = True) -> None:
    """All-reduce the local gradients without DDP; rank 0 saves the average.

    If the model is large, the average is kept in a file: `file` for all ranks if `shared`, else a file per rank.
    """
    state = rank_state()
    data, parameters = state.step, state.reference.trainable
    this_rank.set_status(f"step {step}: averaging local gradients")
    own_file = state.own_file(file, shared=shared)
    consume = not state.training_model.is_split  # split models still need `local` in `_rounding_errors`
    local = [data.local.get(name) for name in parameters]
    data.local = {} if consume else data.local
    training_step.clear_gradients(state.reference.module, *parameters.values())
    names = list(parameters)

    def iterate_means() -> Iterator[tuple[str, torch.Tensor]]:
        means = averages_over_ranks(local, list(parameters.values()), group=state.group, consume=consume)
        for index, mean in means:
            local[index] = None
            yield names[index], mean

    with without_logging():
        if own_file is None:
            data.averages = dict(iterate_means())
        elif state.rank == 0 or not shared:
            save(iterate_means(), own_file)
        else:
            deque(iterate_means(), maxlen=0)
        sizes = rms_over_ranks([data.norms.get(name, 0.0) for name in parameters], state.device, state.group)
    data.averages_file = own_file
    data.scale = dict(zip(parameters, sizes, strict=True))
    if state.rank == 0 and file is not None and own_file is None:
        save(data.averages.items(), file)


@replays_step
def comparable_step(step: int, numbers: RandomNumbers) -> tuple[float, tuple[str, ...]] | str:
    """Repeat the local step with random numbers that the single process used too.

    If `numbers` is "by sample" or "constant", a sample has the same numbers in a shard and in the global batch. Returns
    the loss and the operations that drew random indices, or the error message of a failed step.
    """
    state = rank_state()
    data = state.step
    try:
        with random_choices(sample_count(data.batch) or 0) as choices:
            gradients, loss = state.gradients(step, state.reference.module, data.batch, numbers=numbers)
    except TargetError as error:
        return str(error)
    data.keep(gradients)
    data.numbers = numbers
    return loss.value, tuple(choices)


def local_update(step: int) -> None:
    """Update the reference module with averaged gradients, if the wrapper cannot be used."""
    state = rank_state()
    reference, data = state.reference, state.step
    this_rank.set_status(f"step {step}: optimizer")
    assert data.after is not None
    data.after.restore(reference.module)
    if reference.optimizer is None:
        trainable = (p for p in reference.module.parameters() if p.requires_grad)
        reference.optimizer = state.recipe.build_optimizer(trainable)
    for name, parameter in named_parameters(reference.module).items():
        gradient = data.averaged.get(name)
        parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
    training_step.run_optimizer(reference.optimizer, "step")
    training_step.clear_gradients(reference.module)


@replays_step
def average_exactly(step: int, file: Path) -> str:
    """Repeat the step in float64; rank 0 saves the averaged gradients in `file`.

    Returns an error message or ''. In float64, differences by rounding vanish, and mismatches remain. Ranks repeat the
    step if forward communicates (e.g. SyncBatchNorm), since a single process cannot repeat such a forward.
    """
    state = rank_state()
    try:
        module = copied_module(state.reference.module).double()
        with without_logging():
            batch = upcast(state.step.batch)
            gradients, _ = state.gradients(step, module, batch, numbers=state.step.numbers, phase="in float64, ")
            owners = {name: p for name, p in named_parameters(module).items() if p.requires_grad}
            local = [gradients.get(name) for name in owners]
            averaged = dict(averages_over_ranks(local, list(owners.values()), group=state.group))
    except Exception as error:
        return error_summary(error)
    if state.rank == 0:
        names = list(owners)
        save(((names[index], value) for index, value in averaged.items()), file)
    return ""
