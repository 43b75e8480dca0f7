"""Training step through the DDP wrapper, and a step through the compiled wrapper."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from msgspec import structs

from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.evidence.loop import FunctionCompiled
from ddpcheck.findings.evidence.steps import CompiledStep, DdpStepEvidence, LoopEvent, ShardedStep
from ddpcheck.findings.source_lines import code_of, defined_at, is_user_file
from ddpcheck.gather.autograd.autograd_graph import named_parameters, unregistered_state
from ddpcheck.gather.autograd.exchanges import is_rank_local, record_rank_local
from ddpcheck.gather.collectives.allreduce import rms_over_ranks
from ddpcheck.gather.collectives.collective_log import without_logging
from ddpcheck.gather.ddp.copied_optimizer import CopiedOptimizer
from ddpcheck.gather.ddp.ddp_wrapper import hook_error, uses_local_sgd
from ddpcheck.gather.ddp.loop_events import LoopEventRecorder, record_loop_events
from ddpcheck.gather.ddp.model_parts import is_partial, redistribute_like
from ddpcheck.gather.ddp.sharding import copy_local_tensors, mixed_precision, recorded_settings, shard_states
from ddpcheck.gather.phases.model_build import count_calls
from ddpcheck.gather.phases.rank_state import RankState, TrainingModel, rank_state, replays_step
from ddpcheck.gather.state.fingerprints import fingerprint, fingerprints, is_dtensor
from ddpcheck.gather.state.module_state import capture_state, copied_module
from ddpcheck.gather.steps import training_step
from ddpcheck.gather.steps.compilations import CompilationRecorder
from ddpcheck.gather.steps.gradient_distance import against_average, dense, difference, eps_of, norm, norms, scales
from ddpcheck.recipe.pytree import tree_map
from ddpcheck.worlds import rank as this_rank
from ddpcheck.worlds.compilation import stance

_Tensors = Mapping[str, torch.Tensor]

# Compiled kernels round differently; the smallest real bug measured is 0.5.
_COMPILED_TOLERANCE = 0.1


def ddp_step(step: int) -> DdpStepEvidence:
    """Run a step through the wrapper; compare its gradients with averaged local gradients."""
    state = rank_state()
    model, module = state.training_model, state.module
    precision = mixed_precision(module) if model.facts.sharded else None
    noise = _rounding_noise(step, precision)
    model.calls.clear()
    state.step.restore_external()
    this_rank.set_status(f"step {step}: zero_grad")
    training_step.run_optimizer(model.optimizer, "zero_grad")
    training_step.clear_gradients(module, *model.trainable.values())
    since = training_step.versions(module)
    is_local_sgd = uses_local_sgd(model.wrapper)
    with _record_events(model) as recorder:
        total, parts = _forward_and_backward(step, since)
        compared = [name for name in model.trainable if name not in parts]
        this_rank.set_status(f"step {step}: {model.facts.named} comparison")
        whole = state.full_tensors((n, p.grad) for n, p in model.trainable.items())
        gradients = {n: dense(g) for n, g in whole.items()}
        differences = _compare_with_averages([] if is_local_sgd else compared, gradients, precision, noise)
        hashes = {name: fingerprint(gradients[name]) if name in gradients else 0 for name in compared}
        before = state.full_tensors(model.named_parameters())
        computed_with = fingerprints((name, t) for name, t in before.items() if name not in parts)
        if model.is_split:
            before = {name: before[name].clone() for name in model.trainable}
            shard = copy_local_tensors(model.trainable.items())
            loaded = {} if step else shard_states(model.optimizer, model.trainable)
            with without_logging():
                shard_grads = copy_local_tensors(
                    (n, redistribute_like(model.trainable[n], model.trainable[n].grad)) for n in gradients
                )
        this_rank.set_status(f"step {step}: optimizer")
        training_step.run_optimizer(model.optimizer, "step")
    after = state.full_tensors(model.named_parameters())
    unregistered = fingerprints((name, t) for name, t in unregistered_state(module) if name not in model.parts)
    evidence = DdpStepEvidence(
        rank=state.rank,
        step=step,
        gradients=hashes,
        parameters=fingerprints((name, t) for name, t in after.items() if name not in parts),
        parameters_before_optimizer=computed_with,
        buffers=fingerprints(module.named_buffers()),
        state={name: value for name, value in unregistered.items() if name in model.unregistered},
        new_state={name: value for name, value in unregistered.items() if name not in model.unregistered},
        optimizer=_optimizer_state(state),
        against_local=differences,
        wrapper_calls=model.calls.get("wrapper", 0),
        inner_calls=model.calls.get("inner", 0),
        events=(*model.settings, *recorder.events, *([LoopEvent("apart")] if is_local_sgd else [])),
        parameters_after_backward=computed_with
        if model.is_split
        else {name: value for name, value in recorder.values.items() if name not in parts},
    )
    if model.is_split:
        return _sharded_step(evidence, total, loaded, whole=(before, gradients, after), shard=(shard, shard_grads))
    if state.large:
        for parameter in model.trainable.values():  # gradients that are views of a bucket own no memory
            if parameter.grad is not None and parameter.grad._base is None:
                parameter.grad = None
    return evidence


def _rounding_noise(step: int, precision: torch.dtype | None) -> dict[str, float]:
    """Measure gradient rounding errors (RMS over ranks) of mixed precision and tensor parallelism."""
    noise = {} if precision is None else _rounding_errors(step, precision)
    if rank_state().training_model.replica.splits_model:  # tensor parallelism sums in another order
        exactly = _rounding_errors(step, torch.float64)
        noise = {name: max(size, noise.get(name, 0.0)) for name, size in exactly.items()}
    return noise


def _forward_and_backward(step: int, since: dict[str, int]) -> tuple[float | None, set[str]]:
    """Run forward and backward through the wrapper.

    Returns the loss, or None if it is a `DTensor`, and the names of rank-local parameters (see `exchanges`).
    """
    state = rank_state()
    model = state.training_model
    loss = state.run_loss(step, f"{model.facts.named} ", model.wrapped)
    this_rank.set_status(f"step {step}: {model.facts.named} backward")
    if ignored := {id(p) for name, p in model.trainable.items() if name in model.facts.ignored}:
        record_rank_local([loss.total], lambda leaf: id(leaf) in ignored)
    parts = {name for name, p in model.trainable.items() if is_rank_local(p)}
    training_step.run_backward(loss.total, module=state.module, since=since)
    return None if is_dtensor(loss.total) else float(loss.total.detach()), parts


def _compare_with_averages(
    names: Sequence[str],
    gradients: Mapping[str, torch.Tensor],
    precision: torch.dtype | None,
    noise: Mapping[str, float],
) -> tuple[Difference, ...]:
    state = rank_state()
    model, data = state.training_model, state.step
    lossy = eps_of(precision) if precision is not None else hook_error(model.wrapper)
    rounds = lossy or model.is_split  # fully_shard sums gradients in another order
    floor = scales(data.averaged) if rounds else {}
    return tuple(
        against_average(
            name,
            gradients.get(name),
            data.averaged.get(name),
            world_size=state.world_size,
            scale=data.scale.get(name, 0.0),
            lossy=lossy,
            floor=floor.get(name, 0.0),
            noise=noise.get(name, 0.0),
        )
        for name in names
    )


def _sharded_step(
    evidence: DdpStepEvidence,
    loss: float | None,
    loaded: dict[str, float],
    *,
    whole: tuple[_Tensors, _Tensors, _Tensors],
    shard: tuple[_Tensors, _Tensors],
) -> ShardedStep:
    """Verify the update of a sharded optimizer by `CopiedOptimizer`s.

    `whole`: full parameters before the step, full gradients, and full parameters after the step. `shard`: this rank's
    shards of the parameters before the step, and of the gradients.
    """
    state = rank_state()
    model = state.training_model
    trouble = "the optimizer begins with a state" if any(": step" not in name for name in loaded) else ""
    model.copies = model.copies or tuple(CopiedOptimizer(state.recipe, t[0], trouble) for t in (whole, shard))
    whole_copy, shard_copy = model.copies
    step: Any = type(model.optimizer).step  # torch wraps `step`; `code_of` unwraps
    code = code_of(step)
    split: dict[str, Any] = {}
    if model.replica.splits_model:
        grads = {name: p.grad for name, p in model.trainable.items() if p.grad is not None and not is_partial(p.grad)}
        sizes = norms({name: dense(grad) for name, grad in grads.items()})  # after the optimizer step
        split = {"split": model.replica.split, "sharded": model.replica.sharded, "norms": sizes, "loss": loss}
    return ShardedStep(
        **structs.asdict(evidence),
        against_whole=whole_copy.differences(*whole),
        against_shard=shard_copy.differences(*shard, copy_local_tensors(model.trainable.items())),
        uncompared=whole_copy.trouble or shard_copy.trouble,
        updated_at=defined_at(step if code is not None and is_user_file(code.co_filename) else state.recipe.optimizer),
        loaded=loaded,
        **split,
    )


@contextlib.contextmanager
def _record_events(model: TrainingModel) -> Iterator[LoopEventRecorder]:
    """Record loop events in the block; under `fully_shard`, only calls that change settings."""
    if not model.facts.sharded:
        with record_loop_events(model.module, model.wrapper, model.optimizer) as recorder:
            yield recorder
        return
    recorder = LoopEventRecorder(model.module, model.optimizer)
    with recorded_settings() as recorder.events:
        yield recorder


@replays_step
def _rounding_errors(step: int, dtype: torch.dtype) -> dict[str, float]:
    """Measure rounding: repeat the local step in `dtype`, and compare gradients; {} on failure."""
    state = rank_state()
    module = copied_module(state.reference.module).to(dtype)
    batch = tree_map(
        lambda leaf: leaf.to(dtype) if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf, state.step.batch
    )
    errors = dict.fromkeys([*state.step.local, ""], 0.0)
    try:
        with without_logging():
            gradients, _ = state.gradients(step, module, batch, phase=f"in {dtype}, ")
        errors |= {name: norm(gradient - gradients.get(name, 0)) for name, gradient in state.step.local.items()}
    except Exception:
        errors[""] = 1.0  # no parameter has this name
    with without_logging():
        sizes = dict(zip(errors, rms_over_ranks([*errors.values()], state.device, state.group), strict=True))
    return {} if sizes.pop("") else sizes


def _optimizer_state(state: RankState) -> dict[str, int]:
    model = state.training_model
    names = {id(p): name for name, p in model.named_parameters()}
    hashes: dict[str, int] = {}
    tensors: dict[str, torch.Tensor] = {}
    for parameter, param_state in getattr(model.optimizer, "state", {}).items():
        for key, value in param_state.items() if isinstance(param_state, Mapping) else ():
            label = f"optimizer {names.get(id(parameter), '?')} {key}"
            if isinstance(value, torch.Tensor):
                part = model.parts.get(names.get(id(parameter), ""))
                full = part.to_dtensor(value) if part is not None and value.shape == parameter.shape else value
                tensors[label], hashes[label] = full, 0
            elif isinstance(value, int | float | bool):
                hashes[label] = hash(value)
    return hashes | {label: fingerprint(value) for label, value in state.full_tensors(tensors.items()).items()}


@replays_step
def compiled_step(step: int) -> CompiledStep:
    """Run forward and backward through the compiled wrapper from the step's initial state.

    See `worlds.compilation`. There is no optimizer step, and the module is restored afterwards. Meanwhile, ddpcheck
    removes its hooks and logs no collectives, since hooks and logging would change the compiled graph.
    """
    state = rank_state()
    model, data, module = state.training_model, state.step, state.module
    current = capture_state(module)
    data.before.restore(module)
    training_step.clear_gradients(module)
    for handle in model.counters:
        handle.remove()
    compilations: list[FunctionCompiled] = []
    try:
        with without_logging(), stance("default"), CompilationRecorder(compilations.append, lambda: True, lambda: step):
            loss = state.run_loss(step, "compiled DDP ", model.wrapped)
            this_rank.set_status(f"step {step}: compiled DDP backward")
            loss.total.backward()
        grads = {name: p.grad for name, p in named_parameters(module).items() if p.requires_grad}
        gradients = {name: None if gradient is None else dense(gradient) for name, gradient in grads.items()}
    finally:
        count_calls(model)
        current.restore(module)
    scale = scales(data.averaged)
    differences = tuple(
        difference(name, gradient, data.averaged.get(name), scale=scale.get(name, 0.0), tolerance=_COMPILED_TOLERANCE)
        for name, gradient in gradients.items()
        if gradient is not None or name in data.averaged
    )
    return CompiledStep(
        rank=state.rank,
        step=step,
        gradients={name: 0 if gradient is None else fingerprint(gradient) for name, gradient in gradients.items()},
        differences=differences,
        drew="torch" in loss.drew,
        compiled=tuple(compilations),
    )
