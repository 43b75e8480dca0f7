"""What a rank does during a check: one function a phase, called by `ddpcheck.check` through `World.run`.

A phase gathers evidence and returns plain data; it judges nothing. What lasts from phase to phase is the `Session`.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpcheck import rank as this_rank
from ddpcheck.collectives import read_log, record_collectives, unlogged
from ddpcheck.compare import dense, difference, eps_of, norm
from ddpcheck.describe import describe, digest_of, fingerprint, fingerprints
from ddpcheck.errors import TargetError
from ddpcheck.evidence import (
    Built,
    DdpStepEvidence,
    Difference,
    LocalStep,
    ModuleDescription,
    PathEnd,
    StepEvidence,
    Unregistered,
    Wrapped,
    WrapperFacts,
)
from ddpcheck.findings import Location
from ddpcheck.graph import EngineProbe, Explainer, all_names, named_parameters, unregistered_tensors, walk_graph
from ddpcheck.launchers import average_over_ranks
from ddpcheck.locate import Origins, record_origins
from ddpcheck.nests import batch_size, iter_tensors, to_device
from ddpcheck.randomness import seed_everything
from ddpcheck.recipe import Recipe
from ddpcheck.reference import batch_fingerprint, make_batch, model_seed, step_seed
from ddpcheck.stepping import (
    Gradients,
    ModuleState,
    capture_state,
    clear_gradients,
    compute_gradients,
    compute_loss,
    differs_in_structure,
    gradients_of,
    hooked_parameters,
    visible_tensors,
)
from ddpcheck.syncbn import synchronised_on_cpu
from ddpcheck.target import load_target


@dataclass(slots=True)
class Session:
    """What one rank keeps during a check.

    Attributes:
        module: The module that is wrapped.
        twin: A second one, built alike and never wrapped, on which the Local steps run.
        wrapped: The wrapper around `module`.
        twin_optimizer: Set once the wrapper cannot be used any more; then the twin holds the state of training.
    """

    recipe: Recipe
    seed: int
    device: torch.device
    rank: int
    world_size: int
    group: Any
    module: nn.Module
    twin: nn.Module
    origins: Origins
    wrapped: nn.Module | None = None
    facts: WrapperFacts = field(default_factory=WrapperFacts)
    optimizer: torch.optim.Optimizer | None = None
    twin_optimizer: torch.optim.Optimizer | None = None
    batch: Any = None
    before: ModuleState | None = None
    local: Gradients = field(default_factory=dict)
    averaged: dict[str, torch.Tensor | None] = field(default_factory=dict)
    scale: dict[str, float] = field(default_factory=dict)
    arrivals: dict[str, int] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)
    leaves: dict[int, torch.Tensor] = field(default_factory=dict)
    own_state: frozenset[str] = frozenset()
    calls: dict[str, int] = field(default_factory=dict)
    syncbn: list[str] = field(default_factory=list)
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


def _session() -> Session:
    session: Session = this_rank.state["session"]
    return session


def build(target: str | Recipe, *, seed: int) -> Built:
    """Load the recipe and build the module twice, under the same seed."""
    context = this_rank.current()
    record_collectives(context.directory, context.rank)
    this_rank.set_place("loading the target")
    stack = contextlib.ExitStack()
    syncbn = stack.enter_context(synchronised_on_cpu()) if context.device == "cpu" else []
    recipe = load_target(target) if isinstance(target, str) else target
    device = torch.device(context.device)
    this_rank.set_place("building the model")
    seed_everything(model_seed(seed))
    with record_origins() as origins:
        module = recipe.build_model()
    seed_everything(model_seed(seed))
    twin = recipe.build_model()
    if twin is module or {id(p) for p in twin.parameters()} & {id(p) for p in module.parameters()}:
        twin = copy.deepcopy(module)  # model() hands out the same parameters every time
    session = Session(
        recipe=recipe,
        seed=seed,
        device=device,
        rank=context.rank,
        world_size=context.world_size,
        group=dist.new_group(timeout=datetime.timedelta(days=1)) if context.world_size > 1 else None,
        module=module.to(device),
        twin=twin.to(device),
        origins=origins,
        syncbn=syncbn,
        stack=stack,
    )
    this_rank.state["session"] = session
    description = describe(module)
    trainable = sum(p.requires_grad for p in module.parameters())
    return Built(digest_of(description), description.uninitialised, trainable, len(description.parameters))


def description() -> ModuleDescription:
    """The module of this rank, in full; asked for when the digests differ."""
    return describe(_session().module)


def option_digest() -> dict[str, str]:
    """The recipe's `ddp_kwargs`, in words."""
    return {key: _spelled_option(value) for key, value in _session().recipe.ddp_kwargs.items()}


def locations(names: Sequence[str]) -> dict[str, Location]:
    """The lines that made the parameters, buffers and modules called `names`."""
    session = _session()
    found = {name: session.origins.of_name(session.module, name) for name in names if name}
    return {name: where for name, where in found.items() if where is not None}


def aliases() -> dict[str, tuple[str, ...]]:
    """All names of the tied parameters, by the first."""
    return {names[0]: names for names in all_names(_session().module).values() if len(names) > 1}


_OPTIONS = (
    "bucket_bytes_cap",
    *(
        "find_unused_parameters",
        "broadcast_buffers",
        "static_graph",
        "gradient_as_bucket_view",
        "require_forward_param_sync",
    ),
    *("skip_all_reduce_unused_params",),
)


def wrap() -> Wrapped:
    """Wrap the module as the user does, and make the optimizers."""
    session = _session()
    this_rank.set_place("wrapping the model")
    names = {id(p): name for name, p in session.module.named_parameters()}
    original = session.module
    with _watch_construction() as seen:
        session.wrapped = session.recipe.wrap_module(session.module, session.device)
    inner = getattr(session.wrapped, "module", session.wrapped)
    is_ddp = isinstance(session.wrapped, nn.parallel.DistributedDataParallel)
    if isinstance(inner, nn.Module) and (inner is not original or differs_in_structure(inner, session.twin)):
        if differs_in_structure(inner, session.twin):
            session.twin = copy.deepcopy(inner)
        session.module = inner
    trainable = {name for name, p in session.module.named_parameters() if p.requires_grad}
    for name, parameter in session.twin.named_parameters():
        parameter.requires_grad_(name in trainable)  # wrap may have frozen some
    options = {name: str(getattr(session.wrapped, name)) for name in _OPTIONS if hasattr(session.wrapped, name)}
    ignored = frozenset(getattr(session.wrapped, "parameters_to_ignore", ()))
    session.facts = WrapperFacts(
        is_ddp=is_ddp,
        find_unused_parameters=bool(getattr(session.wrapped, "find_unused_parameters", False)),
        static_graph=bool(getattr(session.wrapped, "static_graph", False)),
        ignored=ignored & set(names.values()),
    )
    session.optimizer = session.recipe.build_optimizer(p for p in session.wrapped.parameters() if p.requires_grad)
    session.own_state = frozenset(name for name, _ in _plain_state(session.module))
    _count_calls(session)
    _watch_twin(session)
    return Wrapped(
        facts=session.facts,
        options=options,
        optimizer=_optimizer_options(session.optimizer),
        parameters=fingerprints(session.module.named_parameters()),
        buffers=fingerprints(session.module.named_buffers()),
        hooked=hooked_parameters(session.twin, ours=1),
        wrapper=type(session.wrapped).__name__,
        broadcasts_buffers=_broadcasts_buffers(session),
        changed=_changes(seen, session.module) if seen else {},
    )


@contextlib.contextmanager
def _watch_construction() -> Iterator[dict[str, tuple[int, bool]]]:
    """Note what the parameters were when the DDP constructor had seen them: identity and requires_grad, by name."""
    ddp: Any = nn.parallel.DistributedDataParallel
    original = ddp.__init__
    seen: dict[str, tuple[int, bool]] = {}

    @functools.wraps(original)
    def constructor(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        seen.update({name: (id(p), p.requires_grad) for name, p in self.module.named_parameters()})

    ddp.__init__ = constructor
    try:
        yield seen
    finally:
        ddp.__init__ = original


def _changes(seen: Mapping[str, tuple[int, bool]], module: nn.Module) -> dict[str, str]:
    now = {name: (id(p), p.requires_grad) for name, p in module.named_parameters()}
    changed = {}
    for name in dict.fromkeys((*seen, *now)):
        before, after = seen.get(name), now.get(name)
        if before is None or after is None:
            changed[name] = "added" if before is None else "removed"
        elif before[0] != after[0]:
            changed[name] = "replaced"
        elif before[1] != after[1]:
            changed[name] = "unfrozen" if after[1] else "frozen"
    return changed


def _broadcasts_buffers(session: Session) -> bool:
    will = getattr(session.wrapped, "will_sync_module_buffers", None)
    has_buffers = next(session.module.buffers(), None) is not None
    return bool(getattr(session.wrapped, "broadcast_buffers", False)) and has_buffers and will is not None


def _optimizer_options(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    found = {"class": type(optimizer).__name__, "groups": str(len(optimizer.param_groups))}
    for index, group in enumerate(optimizer.param_groups):
        found[f"group {index} parameters"] = str(len(group["params"]))
        found.update({f"group {index} {key}": _spelled_option(v) for key, v in group.items() if key != "params"})
    return found


def _spelled_option(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor {fingerprint(value):x}"
    if isinstance(value, int | float | str | bool | type(None) | tuple | list | dict | torch.dtype):
        return repr(value)
    return type(value).__name__


def _plain_state(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name, tensor in unregistered_tensors(module) if not tensor.requires_grad]


def _count_calls(session: Session) -> None:
    def counter(key: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any) -> None:
            session.calls[key] = session.calls.get(key, 0) + 1

        return hook

    assert session.wrapped is not None
    session.wrapped.register_forward_pre_hook(counter("wrapper"))
    if session.module is not session.wrapped:
        session.module.register_forward_pre_hook(counter("inner"))


def _watch_twin(session: Session) -> None:
    """Count the gradients that arrive at each of the twin's parameters, and keep what its forward returns."""
    for name, parameter in session.twin.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_arrival(session, name))
    session.twin.register_forward_hook(lambda _module, _inputs, output: session.outputs.append(output))


def _arrival(session: Session, name: str) -> Any:
    def hook(_parameter: torch.Tensor) -> None:
        session.arrivals[name] = session.arrivals.get(name, 0) + 1

    return hook


# Local: the unwrapped module on this rank's shard


def local_step(step: int) -> LocalStep:
    """Forward and backward of the unwrapped module on this rank's shard."""
    session = _session()
    batch = make_batch(session.recipe, step, seed=session.seed)
    whole = batch_fingerprint(batch)
    session.batch = to_device(session.recipe.local_batch(batch, session.rank, session.world_size), session.device)
    _begin_step(session)
    twin = session.twin
    parameters = {name: p for name, p in named_parameters(twin).items() if p.requires_grad}
    session.outputs.clear()
    session.arrivals.clear()
    clear_gradients(twin)
    log_start = len(read_log(this_rank.current().directory, session.rank))
    loss = compute_loss(session.recipe, twin, session.batch, step=step, seed=_seed(session, step))
    walk = walk_graph([loss.total])
    probe = EngineProbe(loss.total, list(parameters.values()))
    visible, opaque = visible_tensors(session.outputs)
    seen = walk_graph(visible) if session.facts.tolerates_unused and session.outputs else None
    visible_ids = {id(leaf) for leaf in seen.leaves} if seen is not None and seen.complete else None
    session.outputs.clear()
    this_rank.set_place(f"step {step}: backward")
    loss.total.backward()
    value, drew = loss.value, loss.drew
    del loss, visible, seen
    session.local = gradients_of(twin)
    states = _states(session, parameters, probe)
    leaves = unregistered_leaves(
        walk.leaves, twin, ignore=[*iter_tensors(session.batch)], before=session.leaves, recipe=session.recipe
    )
    session.leaves = {id(leaf): leaf for leaf in walk.leaves}
    names, complete = walk.node_names, walk.complete
    del walk
    own_buffers = fingerprints(twin.named_buffers())
    missing = {name: p for name, p in parameters.items() if states[name] == "missing"}
    calls = read_log(this_rank.current().directory, session.rank)
    evidence = StepEvidence(
        rank=session.rank,
        step=step,
        states=states,
        ends=_explain(session, missing, step) if missing else {},
        unregistered=tuple(leaves),
        arrivals={name: count for name, count in session.arrivals.items() if count > 1},
        invisible=()
        if visible_ids is None or opaque
        else tuple(n for n, p in parameters.items() if states[n] != "missing" and id(p) not in visible_ids),
        output_type=opaque if visible_ids is not None and not visible_ids else "",
        reentrant=not complete or any("CheckpointFunctionBackward" in name for name in names),
    )
    forward_calls = [call for call in calls[log_start:] if call.place.endswith("forward")]
    return LocalStep(
        evidence=evidence,
        loss=value,
        drew=drew,
        batch=whole,
        samples=_samples(session.batch),
        calls=len(calls),
        norm=sum(norm(gradient) ** 2 for gradient in session.local.values()) ** 0.5,
        blind_calls=tuple(dict.fromkeys(call for call in forward_calls if not call.differentiable)),
        buffers=own_buffers,
    )


def _samples(batch: Any) -> int:
    with contextlib.suppress(TargetError):
        return batch_size(batch)
    return 0


def _seed(session: Session, step: int) -> int:
    return step_seed(session.seed, step, session.rank)


def _begin_step(session: Session) -> None:
    """Bring the twin to the state in which the wrapper's forward will begin."""
    session.before = capture_state(session.module if session.twin_optimizer is None else session.twin)
    if session.world_size > 1 and _broadcasts_buffers(session):
        with unlogged():
            for name, _ in session.module.named_buffers():
                dist.broadcast(session.before.tensors[name], src=0, group=session.group)
    session.before.restore(session.twin)


def _states(session: Session, parameters: Mapping[str, nn.Parameter], probe: EngineProbe) -> dict[str, Any]:
    states: dict[str, Any] = {}
    for index, name in enumerate(parameters):
        gradient = session.local.get(name)
        if gradient is not None:
            states[name] = "contributes" if bool(gradient.count_nonzero()) else "zero"
        elif probe.reached is not None and probe.reached[index]:
            consumed = len(getattr(parameters[name], "_post_accumulate_grad_hooks", None) or ()) > 1
            states[name] = "contributes" if consumed else "lost"  # a hook of the user's may have taken it
        else:
            states[name] = "missing"
    return states


def _explain(session: Session, missing: Mapping[str, nn.Parameter], step: int) -> dict[str, PathEnd]:
    """Replay the forward pass to find out why, where that needs no other rank to join in."""
    assert session.before is not None
    before = session.before

    def forward() -> list[torch.Tensor]:
        loss = compute_loss(
            session.recipe, session.twin, session.batch, step=step, seed=_seed(session, step), place="explaining, "
        )
        return loss.parts

    try:
        with _alone():
            return Explainer(session.twin, forward, lambda: before.restore(session.twin)).explain(missing)
    except Exception:  # what the replay cannot tell, the missing gradient still does
        return {name: PathEnd("unreachable", "the forward pass") for name in missing}
    finally:
        before.restore(session.twin)
        session.outputs.clear()


@contextlib.contextmanager
def _alone() -> Any:
    """While a rank replays by itself, a collective must not wait for the others: it returns what is there."""
    from torch.distributed import distributed_c10d

    names = (
        "all_reduce",
        "broadcast",
        "reduce",
        "barrier",
        "all_gather",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
    )
    saved = {name: getattr(distributed_c10d, name) for name in names if hasattr(distributed_c10d, name)}

    def stand_in(name: str) -> Any:
        def collective(*args: Any, **kwargs: Any) -> None:
            first, second = (*args, None, None)[:2]
            if name == "all_gather" and isinstance(second, torch.Tensor):
                for output in first:
                    output.copy_(second)
            elif name == "all_gather_into_tensor" and isinstance(second, torch.Tensor):
                first.copy_(torch.cat([second] * (first.numel() // max(second.numel(), 1))).reshape(first.shape))
            elif name == "reduce_scatter_tensor" and isinstance(second, torch.Tensor):
                first.copy_(second.reshape(-1)[: first.numel()].reshape(first.shape))

        return collective

    for name in saved:
        setattr(distributed_c10d, name, stand_in(name))
        setattr(dist, name, stand_in(name))
    try:
        yield
    finally:
        for name, original in saved.items():
            setattr(distributed_c10d, name, original)
            setattr(dist, name, original)


def unregistered_leaves(
    leaves: Iterable[torch.Tensor],
    module: nn.Module,
    *,
    ignore: Sequence[torch.Tensor] = (),
    before: Mapping[int, torch.Tensor] | None = None,
    recipe: Recipe | None = None,
) -> tuple[Unregistered, ...]:
    """The leaves that receive gradient without being parameters of `module`, by name where they have one.

    A tensor that a forward pass makes for itself (the input of a gradient penalty, say) is none of them: it must be an
    `nn.Parameter`, be held by the module, or have been there in the step before.
    """
    known = {id(p) for p in module.parameters()} | {id(tensor) for tensor in ignore}
    strange = [leaf for leaf in leaves if id(leaf) not in known and leaf.requires_grad]
    if not strange:
        return ()
    names = {id(tensor): name for name, tensor in unregistered_tensors(module)}
    for name, tensor in _held_by_functions(recipe):
        names.setdefault(id(tensor), name)
    found = []
    for leaf in strange:
        lasting = isinstance(leaf, nn.Parameter) or id(leaf) in names or id(leaf) in (before or {})
        if lasting:
            name = names.get(id(leaf), f"a tensor of shape {tuple(leaf.shape)}")
            found.append(Unregistered(name, tuple(leaf.shape)))
    return tuple(sorted(found, key=lambda item: item.name))


def _held_by_functions(recipe: Recipe | None) -> Iterable[tuple[str, torch.Tensor]]:
    """Tensors and modules that the recipe's loss finds among its globals or in its closure."""
    function = getattr(recipe, "loss", None)
    code = getattr(function, "__code__", None)
    if function is None or code is None:
        return
    cells = zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False)
    held = {name: cell.cell_contents for name, cell in cells}
    held.update({name: function.__globals__[name] for name in code.co_names if name in function.__globals__})
    for name, value in held.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, nn.Module):
            yield from ((f"{name}.{inner}", p) for inner, p in value.named_parameters())


def average(step: int, directory: Path | None) -> None:
    """Average the local gradients over the ranks by an all-reduce of our own; rank 0 saves the result."""
    session = _session()
    this_rank.set_place(f"step {step}: averaging local gradients")
    owners = {name: p for name, p in named_parameters(session.twin).items() if p.requires_grad}
    local = [session.local.get(name) for name in owners]
    with unlogged():
        averaged = average_over_ranks(local, list(owners.values()), group=session.group)
        sizes = torch.tensor([0.0 if g is None else norm(g) ** 2 for g in local], dtype=torch.float64)
        sizes = sizes.to(session.device)
        if session.world_size > 1:
            dist.all_reduce(sizes, group=session.group)
    session.averaged = dict(zip(owners, averaged, strict=True))
    session.scale = dict(zip(owners, (sizes / session.world_size).sqrt().tolist(), strict=True))
    if session.rank == 0 and directory is not None:
        torch.save({k: v for k, v in session.averaged.items() if v is not None}, directory / f"averaged-{step}.pt")


def save_state(step: int, directory: Path) -> None:
    """Rank 0 saves the state in which the step begins."""
    session = _session()
    if session.rank == 0 and session.before is not None:
        torch.save(session.before.tensors, directory / f"state-{step}.pt")


def quiet_step(step: int) -> None:
    """The local step again with every random operation silenced, for the comparison with the global batch."""
    session = _session()
    assert session.before is not None
    session.before.restore(session.twin)
    session.local, _ = compute_gradients(
        session.recipe, session.twin, session.batch, step=step, seed=step_seed(session.seed, step), quiet=True
    )
    session.before.restore(session.twin)


def repeat_step(step: int) -> tuple[Difference, ...]:
    """The local step once more, from the same state and seed: how far it is from itself."""
    session = _session()
    assert session.before is not None
    runs: list[Gradients] = []
    for _ in range(2):
        session.before.restore(session.twin)
        gradients, _loss = compute_gradients(
            session.recipe, session.twin, session.batch, step=step, seed=_seed(session, step), place="repeating, "
        )
        runs.append(gradients)
    session.before.restore(session.twin)
    first, second = runs
    return tuple(
        difference(name, second.get(name), gradient, scale=norm(gradient), tolerance=1e3 * eps_of(gradient.dtype))
        for name, gradient in first.items()
    )


def wake(names: Sequence[str], step: int) -> list[str]:
    """Those of `names` whose gradient is not zero when every parameter is moved a little."""
    session = _session()
    assert session.before is not None
    session.before.restore(session.twin)
    generator = torch.Generator().manual_seed(step_seed(session.seed, step))
    with torch.no_grad():
        for parameter in session.twin.parameters():
            if parameter.is_floating_point():
                size = 0.02 + 0.1 * float(parameter.detach().abs().mean())
                moved = size * torch.randn(parameter.shape, generator=generator)
                parameter.add_(moved.to(parameter.device, parameter.dtype))
    gradients, _ = compute_gradients(
        session.recipe, session.twin, session.batch, step=step, seed=_seed(session, step), place="looking again, "
    )
    session.before.restore(session.twin)
    return [name for name in names if name in gradients and bool(gradients[name].count_nonzero())]


def local_update(step: int) -> None:
    """Where the wrapper cannot be used: step the twin with the averaged gradients instead."""
    session = _session()
    this_rank.set_place(f"step {step}: optimizer")
    assert session.before is not None
    if session.twin_optimizer is None:
        session.twin_optimizer = session.recipe.build_optimizer(p for p in session.twin.parameters() if p.requires_grad)
    for name, parameter in named_parameters(session.twin).items():
        gradient = session.averaged.get(name)
        parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
    session.twin_optimizer.step()
    clear_gradients(session.twin)


# DDP: the wrapper and its reducer


def ddp_step(step: int) -> DdpStepEvidence:
    """Forward, backward and optimizer step through the wrapper, compared with the averaged local gradients."""
    session = _session()
    assert session.wrapped is not None and session.optimizer is not None
    session.calls.clear()
    session.optimizer.zero_grad(set_to_none=True)
    clear_gradients(session.module)
    loss = compute_loss(
        session.recipe, session.wrapped, session.batch, step=step, seed=_seed(session, step), place="DDP "
    )
    this_rank.set_place(f"step {step}: DDP backward")
    loss.total.backward()
    del loss
    this_rank.set_place(f"step {step}: DDP comparison")
    owners = {name: p for name, p in named_parameters(session.module).items() if p.requires_grad}
    differences = tuple(
        _against_local(session, name, None if p.grad is None else dense(p.grad)) for name, p in owners.items()
    )
    gradients = {name: 0 if p.grad is None else fingerprint(dense(p.grad)) for name, p in owners.items()}
    this_rank.set_place(f"step {step}: optimizer")
    session.optimizer.step()
    return DdpStepEvidence(
        rank=session.rank,
        step=step,
        gradients=gradients,
        parameters=fingerprints(session.module.named_parameters()),
        buffers=fingerprints(session.module.named_buffers()),
        state={name: fingerprint(tensor) for name, tensor in _plain_state(session.module) if name in session.own_state},
        optimizer=_optimizer_state(session),
        against_local=differences,
        wrapper_calls=session.calls.get("wrapper", 0),
        inner_calls=session.calls.get("inner", 0),
    )


_LOSSY_HOOKS = {"fp16_compress_hook": torch.float16, "bf16_compress_hook": torch.bfloat16}


def _against_local(session: Session, name: str, got: torch.Tensor | None) -> Difference:
    want = session.averaged.get(name)
    if got is None and want is None:
        return Difference(name, 0.0, 0.0)
    if got is None and want is not None and not bool(want.count_nonzero()):
        return Difference(name, 0.0, 0.0)
    if want is None and got is not None:
        want = torch.zeros_like(got)  # under find_unused_parameters, what no rank used may come back as zeros
    assert want is not None
    precision = max((eps_of(want.dtype), *_hook_precisions(session)))
    tolerance = (8 + session.world_size) * precision
    return difference(name, got, want, scale=session.scale.get(name) or norm(want), tolerance=tolerance)


def _hook_precisions(session: Session) -> list[float]:
    """Machine eps of what communication hooks compress to; 1 for those that lose more on purpose (PowerSGD)."""
    found = []
    for hook, _state in getattr(session.wrapped, "_comm_hooks", ()):
        module, name = getattr(hook, "__module__", ""), getattr(hook, "__name__", "")
        if module.startswith("torch.distributed.algorithms.ddp_comm_hooks"):
            lossy = any(word in f"{module}.{name}" for word in ("powerSGD", "quantization", "post_localSGD"))
            compressed = next((dtype for key, dtype in _LOSSY_HOOKS.items() if name.startswith(key)), None)
            found.append(0.1 if lossy else eps_of(compressed) if compressed is not None else 0.0)
    return found


def _optimizer_state(session: Session) -> dict[str, int]:
    assert session.optimizer is not None
    names = {id(p): name for name, p in session.module.named_parameters()}
    found: dict[str, int] = {}
    for parameter, state in session.optimizer.state.items():
        for key, value in state.items() if isinstance(state, Mapping) else ():
            label = f"optimizer {names.get(id(parameter), '?')} {key}"
            if isinstance(value, torch.Tensor):
                found[label] = fingerprint(value)
            elif isinstance(value, int | float | bool):
                found[label] = hash(value)
    return found


def notes() -> list[str]:
    """Sentences on how this rank ran the recipe."""
    session = _session()
    found = []
    if session.syncbn:
        found.append(
            "SyncBatchNorm refuses CPU tensors: ddpcheck stood in for it with the same statistics, over all-reduces "
            "that autograd differentiates"
        )
    if this_rank.current().shared_gpu:
        found.append("several ranks share one GPU, through gloo with CUDA tensors")
    return found
