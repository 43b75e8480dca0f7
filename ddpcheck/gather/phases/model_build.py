"""Build, describe and wrap the model of a rank; locate its source lines."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from msgspec import structs
from torch import nn

from ddpcheck.findings.errors import TargetError
from ddpcheck.findings.evidence import modules
from ddpcheck.findings.evidence.steps import LoopEvent
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import assignment_of, defined_at
from ddpcheck.gather.autograd.autograd_graph import all_names, unregistered_state, unregistered_tensors
from ddpcheck.gather.autograd.exchanges import record_all_to_all_functions
from ddpcheck.gather.autograd.gradient_hooks import record_hooks, recorded_hooks
from ddpcheck.gather.collectives.collective_log import log_ddp_collective, record_collectives, without_logging
from ddpcheck.gather.ddp import ddp_wrapper, sharding
from ddpcheck.gather.ddp.model_parts import DTensorLayout, ModelReplica, changed_attributes, dtensor_layouts, replica_of
from ddpcheck.gather.ddp.sync_batchnorm import synchronised_on_cpu
from ddpcheck.gather.forward_hooks import after_forward, before_forward
from ddpcheck.gather.patching import patched
from ddpcheck.gather.phases.rank_state import RankState, ReferenceModule, TrainingModel, rank_state
from ddpcheck.gather.phases.single_process import HANDOVER
from ddpcheck.gather.state import module_state
from ddpcheck.gather.state.fingerprints import digest_of, fingerprint, fingerprints, is_dtensor
from ddpcheck.gather.state.module_description import describe, module_entries, record_origins
from ddpcheck.gather.state.randomness import make_deterministic, seed_everything
from ddpcheck.gather.state.tensor_file import is_large
from ddpcheck.gather.state.training_mode import BUILT_IN_EVAL_MODE, into_training
from ddpcheck.gather.steps.training_step import dropped_samples_note, model_seed
from ddpcheck.recipe.recipe import Recipe, error_summary
from ddpcheck.recipe.target import load_on_rank
from ddpcheck.worlds import rank as this_rank
from ddpcheck.worlds import wire
from ddpcheck.worlds.compilation import run_eagerly


def build(target: str | Recipe, seed: int) -> modules.BuiltModule:
    """Load the recipe; build its module twice: to wrap, and as the reference."""
    context = this_rank.current()
    record_collectives(context.directory, context.rank)
    record_all_to_all_functions()
    run_eagerly()
    this_rank.set_status("loading the target")
    stack = contextlib.ExitStack()
    syncbn = stack.enter_context(synchronised_on_cpu()) if context.device == "cpu" else []
    record_hooks()
    recipe = load_on_rank(target)
    device = torch.device(context.device)
    make_deterministic(device)
    this_rank.set_status("building the model")
    seed_everything(model_seed(seed))
    with record_origins() as origins:
        module = recipe.build_model()
    if isinstance(ddp_wrapper.find_ddp(module), nn.parallel.DistributedDataParallel):
        raise TargetError(
            "model() returned a module that is, or holds, a DistributedDataParallel; return the bare module, and wrap "
            "it in the recipe's wrap(module, device)"
        )
    sharding.refuse_fsdp1(module, "what model() returned", TargetError)
    seed_everything(model_seed(seed))
    reference = recipe.build_model()
    if reference is module or {id(p) for p in reference.parameters()} & {id(p) for p in module.parameters()}:
        reference = module_state.copied_module(module)  # model() returns the same parameters every time
    with without_logging():
        group = dist.new_group(timeout=datetime.timedelta(days=1)) if context.world_size > 1 else None
    described = describe(module_state.move_to_device(module, device))
    module_state.move_to_device(reference, device)
    large = is_large(reference)
    mapped = module_state.move_to_file(reference, context.directory / f"built.{context.rank}") if large else frozenset()
    this_rank.state["check"] = RankState(
        recipe=recipe,
        seed=seed,
        device=device,
        rank=context.rank,
        world_size=context.world_size,
        group=group,
        module=module,
        reference=ReferenceModule(reference, mapped=mapped),
        origins=origins,
        description=described,
        built_in_eval_mode=into_training(module),
        syncbn=syncbn,
        stack=stack,
        large=large,
    )
    into_training(reference)
    trainable = sum(p.requires_grad for p in module.parameters())
    entries = module_entries(module) if context.rank == 0 else ()
    count = len(described.parameters)
    return modules.BuiltModule(digest_of(described), described.uninitialised, trainable, count, entries, large)


def description() -> modules.ModuleDescription:
    """Return the full description of this rank's module; called if digests differ between ranks."""
    return rank_state().description


def locations(names: Sequence[str]) -> dict[str, Location]:
    """Return the lines that created the named parameters, buffers and modules."""
    state = rank_state()
    by_name = {name: state.origins.line_by_name(state.module, name) for name in names if name}
    return {name: location for name, location in by_name.items() if location is not None}


def assignments(names: Sequence[str]) -> dict[str, Location]:
    """Return the lines that assign the named attributes."""
    by_name = {name: assignment_of(rank_state().module, name) for name in names}
    return {name: location for name, location in by_name.items() if location is not None}


def aliases() -> dict[str, tuple[str, ...]]:
    """Map the first name of each tied parameter to all names of the parameter."""
    return {names[0]: names for names in all_names(rank_state().module).values() if len(names) > 1}


def notes() -> list[str]:
    """Return notes on how this rank ran the recipe."""
    state = rank_state()
    messages = [BUILT_IN_EVAL_MODE] if state.built_in_eval_mode else []
    if state.syncbn:
        messages.append(
            "SyncBatchNorm refuses CPU tensors: ddpcheck replaced it by the same statistics over all-reduces "
            "that autograd differentiates"
        )
    if uneven := dropped_samples_note(state.recipe, 0, seed=state.seed, world_size=state.world_size):
        messages.append(uneven)
    if this_rank.current().shared_gpu:
        messages.append("several ranks share one GPU, through gloo with CUDA tensors")
    return messages


def wrap(around: contextlib.AbstractContextManager[None] | None = None) -> modules.WrappedModule:
    """Wrap the module and build its optimizer; context `around` may change DDP's arguments."""
    state = rank_state()
    this_rank.set_status("wrapping the model")
    names = {id(p): name for name, p in state.module.named_parameters()}
    original, reference = state.module, state.reference.module
    known_hooks = recorded_hooks()
    changed: list[nn.Module] = []  # copies of the module as `wrap` changed it, before `fully_shard`

    def copy_changed() -> None:
        if module_state.differs_in_structure(original, reference) and not sharding.is_sharded(original):
            changed.append(module_state.copied_module(original))

    with contextlib.ExitStack() as stack:
        options, seen, parts = stack.enter_context(_watch_construction())
        settings = stack.enter_context(sharding.recorded_settings())
        stack.enter_context(sharding.before_sharding(copy_changed))
        stack.enter_context(around or contextlib.nullcontext())
        wrapped = state.recipe.wrap_module(original, state.device)
    hooks = tuple(hook for hook in recorded_hooks() if hook not in known_hooks)
    sharding.refuse_fsdp1(wrapped, "what wrap(module, device) returned", TargetError)
    wrapper = ddp_wrapper.find_ddp(wrapped)
    if wrapper is not wrapped and wrapper.module is not original:
        wrapper = wrapped  # only a part of the model is wrapped
    inner = getattr(wrapper, "module", wrapper)
    reshaped, trouble = False, ""
    if isinstance(inner, nn.Module):
        reshaped, trouble = _adapt_reference(inner, changed, parts)
        reference, state.module = state.reference.module, inner
    trainable = {name: p for name, p in state.module.named_parameters() if p.requires_grad}
    facts, replica = _facts_and_replica(wrapper, names, settings, parts, trainable)
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_(name in trainable)  # wrap may have frozen some
    optimizer = state.recipe.build_optimizer(p for p in wrapped.parameters() if p.requires_grad)
    recipe, copied = state.recipe, (wrapped, wrapper, state.module, reference, optimizer)
    model = state.training_model = TrainingModel(
        module=state.module,
        wrapped=wrapped,
        wrapper=wrapper,
        optimizer=optimizer,
        facts=facts,
        settings=tuple(settings),
        trainable=trainable,
        unregistered=frozenset(name for name, _ in unregistered_state(state.module)),
        hooks=hooks,
        external_state=module_state.ExternalState(
            (recipe.loss, recipe.shard, recipe.optimizer), reference, [id(obj) for obj in copied]
        ),
        replica=replica,
        parts=parts,
        params=dict(state.module.named_parameters()) if parts else {},
        changed_attributes=changed_attributes(state.module, reference) if replica.splits_model else (),
    )
    count_calls(model)
    _register_hooks(state.reference)
    return _wrapped_evidence(options, seen, reshaped, trouble)


def _adapt_reference(
    module: nn.Module, changed: Sequence[nn.Module], parts: Mapping[str, DTensorLayout]
) -> tuple[bool, str]:
    """Replace the reference module by a copy of `module` if `wrap` changed the structure.

    Returns True if names or shapes of parameters differ, and an error message if the copy cannot be pickled.
    """
    state = rank_state()
    reference = state.reference
    full_shapes = {name: part.shape for name, part in parts.items()}
    if not module_state.differs_in_structure(module, reference.module, full_shapes):
        return False, ""
    reshaped = _shapes(module) != _shapes(reference.module)
    reference.module = _unsharded_copy(module, changed, parts)
    reference.mapped = module_state.unshared_parameters(reference.module) if state.large else frozenset()
    if reshaped and state.rank == 0:
        try:
            (this_rank.current().directory / HANDOVER).write_bytes(wire.dumps(reference.module))
        except Exception as error:  # module attributes may not be picklable
            return reshaped, error_summary(error)
    return reshaped, ""


def _facts_and_replica(
    wrapper: nn.Module,
    names: Mapping[int, str],
    settings: Sequence[LoopEvent],
    parts: Mapping[str, DTensorLayout],
    trainable: Iterable[str],
) -> tuple[modules.WrapperFacts, ModelReplica]:
    """Return the wrapper's facts and this rank's model replica; a collective over all ranks."""
    state = rank_state()
    facts = ddp_wrapper.wrapper_facts(wrapper, names)
    if not facts.is_ddp:  # before the first all-gather, which needs all ranks
        ddp_wrapper.compare_options({"fully_shard": str(sharding.is_sharded(wrapper)), **sharding.policies_of(wrapper)})
    if not facts.is_ddp and sharding.is_sharded(wrapper):
        values = sharding.values_kept(wrapper, dict(state.reference.module.named_parameters()))
        facts = sharding.sharded_facts(wrapper, values, settings)
    replica = replica_of(wrapper, parts, state.group)
    if replica.splits_model and isinstance(facts, modules.ShardedFacts):
        unsharded = not replica.sharded
        ignored = frozenset() if unsharded else frozenset({*trainable} - {*replica.sharded})
        facts = replace(facts, alone=unsharded, ignored=ignored)
    return facts, replica


def _wrapped_evidence(
    options: Mapping[str, str], seen: Mapping[str, ddp_wrapper.SeenParameter], reshaped: bool, trouble: str
) -> modules.WrappedModule:
    state = rank_state()
    model = state.training_model
    owned = {id(p): name for name, p in state.module.named_parameters()}
    optimized = {*map(id, ddp_wrapper.optimizer_params(model.optimizer))}
    values = fingerprints(state.full_tensors(model.named_parameters()).items())
    # Full parameters whose local parts are unchanged since construction.
    parts = {name: seen[name] for name in model.parts if name in seen and name in values}
    unchanged = {name: values[name] for name, part in parts.items() if fingerprint(model.params[name]) == part.value}
    evidence = modules.WrappedModule(
        facts=model.facts,
        options={**options, **ddp_wrapper.wrapper_attributes(model.wrapper)},
        optimizer=ddp_wrapper.optimizer_options(model.optimizer, owned),
        parameters=values,
        buffers=fingerprints(state.module.named_buffers()),
        loss_location=defined_at(state.recipe.loss),
        hooks=model.hooks,
        wrapper=type(model.wrapped).__name__,
        broadcasts_buffers=ddp_wrapper.broadcasts_buffers(model.wrapper),
        changes=ddp_wrapper.parameter_changes(seen, state.module) if seen else {},
        parameters_at_construction={name: param.value for name, param in seen.items()} | unchanged,
        replaces_module=reshaped,
        transfer_error=trouble,
        foreign_tensors=len(optimized - set(owned)),
        not_in_optimizer=tuple(name for key, name in owned.items() if key not in optimized and name in model.trainable),
    )
    if not model.replica.splits_model:
        return evidence
    return modules.SplitModule(**structs.asdict(evidence), model_ranks=model.replica.ranks)


def _unsharded_copy(module: nn.Module, changed: Sequence[nn.Module], parts: Mapping[str, DTensorLayout]) -> nn.Module:
    """Copy the module with `wrap`'s changes except sharding; `changed`: copies made before sharding."""
    if not (parts or sharding.is_sharded(module)):
        return module_state.copied_module(module)
    match = next((candidate for candidate in changed if not module_state.differs_in_structure(module, candidate)), None)
    if match is None:
        raise TargetError(
            "wrap(module, device) changes the layers of the module in addition to fully_shard or parallelize_module, "
            "and the result cannot be copied; make these changes in model(), or before the first call of fully_shard"
        )
    return match


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in module.named_parameters()}


@contextlib.contextmanager
def _watch_construction() -> Iterator[
    tuple[dict[str, str], dict[str, ddp_wrapper.SeenParameter], dict[str, DTensorLayout]]
]:
    """Compare options between ranks before a DDP constructor in the block communicates.

    Yields dicts that the constructor fills: options, parameters, and layouts of `DTensor`s that became local tensors.
    """
    ddp: Any = nn.parallel.DistributedDataParallel
    options: dict[str, str] = {}
    seen: dict[str, ddp_wrapper.SeenParameter] = {}
    parts: dict[str, DTensorLayout] = {}

    def around_constructor(wrapper: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        options.clear()
        options.update(ddp_wrapper.constructor_options(ddp.__init__, wrapper, *args, **kwargs))
        ddp_wrapper.compare_options(options)
        module = args[0] if args else kwargs["module"]
        before = dtensor_layouts(module)
        yield
        now = dict(wrapper.module.named_parameters())
        known = ddp_wrapper.SeenParameter.current_params(now.items())
        seen.update({name: param._replace(value=fingerprint(now[name])) for name, param in known.items()})
        parts.update(
            {name: part for name, part in before.items() if name in seen and not is_dtensor(module.get_parameter(name))}
        )

    with patched(ddp, "__init__", around_constructor):
        yield options, seen, parts


def count_calls(model: TrainingModel) -> None:
    """Count forward passes of wrapper and module, to find forwards that bypass DDP."""

    def count_call(key: str, _module: nn.Module, _inputs: Any) -> None:
        model.calls[key] = model.calls.get(key, 0) + 1
        joining = getattr(getattr(model.wrapper, "_join_config", None), "enable", False)
        broadcasts = key == "wrapper" and ddp_wrapper.broadcasts_buffers(model.wrapper) and not joining
        if broadcasts:  # all ranks must join
            mode = "with gradients" if torch.is_grad_enabled() else "without gradients"
            log_ddp_collective("DistributedDataParallel.forward", mode)

    model.counters = [before_forward(model.wrapper, partial(count_call, "wrapper"))]
    if model.module is not model.wrapper:
        model.counters.append(before_forward(model.module, partial(count_call, "inner")))


def _register_hooks(reference: ReferenceModule) -> None:
    module = reference.module
    if reference.submodules.get("") is module:  # already followed: wrapped again with other options
        return
    reference.trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    reference.seen = ddp_wrapper.SeenParameter.current_params(
        nn.Module.named_parameters(module, remove_duplicate=False)
    )
    reference.submodules = dict(module.named_modules())
    reference.changed = {}
    tensors = (*module.buffers(), *(tensor for _, tensor in unregistered_tensors(module)))
    reference.constants = {id(tensor): tensor for tensor in tensors if not tensor.requires_grad}
    for name, parameter in reference.trainable.items():
        parameter.register_post_accumulate_grad_hook(lambda _p, name=name: reference.arrivals.update([name]))
    after_forward(module, lambda _module, _inputs, output: reference.outputs.append(output))
