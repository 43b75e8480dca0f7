"""Repeat a local step to measure determinism, random draws and communicated values.

Also explains missing and zero gradients of the reference module.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddpcheck.findings.errors import TargetError
from ddpcheck.findings.evidence.gradients import Difference, RepeatedStep
from ddpcheck.findings.evidence.steps import Call, PathEnd, ReductionInput, SharedDraw
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import is_user_file, user_location
from ddpcheck.findings.tracebacks import forwards_calls, is_own_bug
from ddpcheck.gather.autograd import autograd_graph
from ddpcheck.gather.autograd.autograd_graph import line_of, named_parameters
from ddpcheck.gather.autograd.gradient_hooks import recorded_hooks, user_functions
from ddpcheck.gather.autograd.gradient_paths import Explainer
from ddpcheck.gather.collectives.collective_log import read_log, replace_collectives
from ddpcheck.gather.collectives.fake_collectives import answer_locally
from ddpcheck.gather.ddp.loop_events import route_backward
from ddpcheck.gather.patching import CALLER, patched
from ddpcheck.gather.phases.rank_state import RankState, rank_state, replays_step
from ddpcheck.gather.state.fingerprints import fingerprint
from ddpcheck.gather.state.tensor_file import kept_in_file
from ddpcheck.gather.steps import training_step
from ddpcheck.gather.steps.batch_coupling import watched_modules
from ddpcheck.gather.steps.gradient_distance import difference, eps_of, norm
from ddpcheck.recipe.pytree import to_device, tree_tensors
from ddpcheck.worlds import rank as this_rank

_FACTOR = 2.0  # power of two: linear operations scale exactly
_TOLERANCE_IN_EPS = 1e3  # tolerance in units of machine eps


@replays_step
def repeat_step(step: int) -> RepeatedStep:
    """Find gradients that are not reproducible, or not linear in the loss gradient.

    Repeats the local step with the same seed: twice unchanged, and once with the loss gradient doubled.
    """
    state = rank_state()
    gradients, node_names, _ = _run_scaled(state, step, 1.0)
    first: Mapping[str, torch.Tensor]
    if state.large:
        first = kept_in_file(gradients.items(), this_rank.current().directory / f"repeated.{state.rank}")
    else:
        first = {name: gradient.clone() for name, gradient in gradients.items()}
    del gradients
    differences = _differences(first, _run_scaled(state, step, 1.0)[0])
    doubled, _, feeds_others = _run_scaled(state, step, _FACTOR)
    nonlinear = [item.name for item in _differences(first, doubled, _FACTOR) if item.bad]
    return RepeatedStep(
        differences=differences,
        nonlinear=() if feeds_others else tuple(nonlinear),
        hooks=(*recorded_hooks(), *user_functions(node_names)),
    )


def _run_scaled(state: RankState, step: int, factor: float) -> tuple[training_step.Gradients, frozenset[str], bool]:
    """Run the local step with the gradient of the loss multiplied by `factor`.

    Returns the gradients, the node names of the graph, and True if backward reaches leaves that are not parameters.
    """
    module = state.reference.module
    state.rewind()
    state.step.restore_external()
    training_step.clear_gradients(module)
    node_names, feeds_others = frozenset[str](), False
    param_ids = {id(p) for p in module.parameters()}

    @forwards_calls
    def scaled_backward(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal node_names, feeds_others
        arguments = {"grad_tensors": None, **kwargs, **dict(zip(_ROOT_ARGUMENTS, args, strict=False))}
        roots, started = arguments["tensors"], arguments["grad_tensors"]
        roots = [roots] if isinstance(roots, torch.Tensor) else list(roots)
        started = [started] if isinstance(started, torch.Tensor) else list(started or [None] * len(roots))
        graph = autograd_graph.LossGraph(roots)
        node_names |= graph.node_names
        feeds_others |= any(id(leaf) not in param_ids for leaf in graph.leaves)
        del graph
        started = [factor * (torch.ones_like(t) if g is None else g) for t, g in zip(roots, started, strict=True)]
        return original(roots, started, *args[2:], **{k: v for k, v in kwargs.items() if k not in _ROOT_ARGUMENTS})

    with route_backward(scaled_backward):
        training_step.run_backward(state.run_loss(step, "repeating, ").total)
    return training_step.gradients_of(named_parameters(module)), node_names, feeds_others


_ROOT_ARGUMENTS = ("tensors", "grad_tensors")


def _differences(
    first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor], factor: float = 1.0
) -> tuple[Difference, ...]:
    differences = []
    for name, gradient in first.items():
        repeated, tolerance = second.get(name), _TOLERANCE_IN_EPS * eps_of(gradient.dtype)
        if repeated is not None and factor != 1.0:
            repeated = repeated / factor
        differences.append(difference(name, repeated, gradient, scale=norm(gradient), tolerance=tolerance))
    return tuple(differences)


# Random numbers drawn by a forward pass


class _DrawRecorder(TorchDispatchMode):
    """Mode that passes name and result of operations that draw random numbers to `sink`."""

    def __init__(self, sink: Callable[[str, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sink = sink

    @forwards_calls
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._sink(func.overloadpacket.__name__, result)
        return result


@contextlib.contextmanager
def random_choices(samples: int) -> Iterator[dict[str, None]]:
    """Yield a dict whose keys name random choices in the block: "torch.randperm at a.py:3".

    A random choice is a draw of a permutation or of indices, except one index, or one index for each of `samples`.
    """
    choices: dict[str, None] = {}

    def record(name: str, drawn: Any) -> None:
        indices = name in ("randint", "multinomial") and drawn.dim() == 1 and len(drawn) not in (1, samples)
        if indices or name == "randperm":
            location = user_location()
            choices[f"torch.{name}{f' at {location}' if location else ''}"] = None

    with _DrawRecorder(record):
        yield choices


@replays_step
def draws(step: int) -> list[SharedDraw]:
    """Return the per-sample random tensors that forward draws on this rank, e.g. dropout masks."""
    state = rank_state()
    samples = next((len(t) for t in tree_tensors(state.step.batch) if t.dim()), 0)
    entries: list[SharedDraw] = []
    running = [""]  # stack of module names

    def record(name: str, result: Any) -> None:
        drawn = [t for t in tree_tensors(result) if t.dim() and t.shape[0] == samples]
        if drawn:  # dropout returns its mask last
            entries.append(SharedDraw(name, running[-1], seeded[-1], fingerprint(drawn[-1])))

    modules = watched_modules(
        state.reference.module, lambda name, _inputs: running.append(name), lambda _name, _output: running.pop()
    )
    with modules, _seeding_lines() as seeded, _DrawRecorder(record):
        state.run_loss(step, "drawing, ")
    return entries


@contextlib.contextmanager
def _seeding_lines() -> Iterator[list[Location | None]]:
    """Record, in the block, user lines that call `torch.manual_seed`, after an initial None."""
    lines: list[Location | None] = [None]

    def record_line(*_args: Any, **_kwargs: Any) -> None:
        caller = sys._getframe(CALLER)
        if is_user_file(caller.f_code.co_filename):
            lines.append(user_location(caller))

    with patched(torch, "manual_seed", record_line):
        yield lines


# Values that ranks communicate when given the same shard


REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
_MOST_VALUES = 1 << 14


@replays_step
def packed_payloads(step: int) -> tuple[ReductionInput, ...]:
    """Return the inputs of reductions in forward if all ranks run rank 0's shard.

    With equal samples and seeds, all ranks must reduce equal tensors. If a program packs values in an order that
    differs between ranks, the inputs differ. No rank can hang, since `answer_locally` replaces each collective.
    """
    state, module = rank_state(), rank_state().reference.module
    payloads: list[ReductionInput] = []

    def answer(operation: str, kwargs: Mapping[str, Any], call: Call) -> Any:
        if operation in REDUCTIONS:
            payloads.append(ReductionInput(operation, call.location, _reduced_values(kwargs)))
        return answer_locally(operation, kwargs)

    try:
        shard = state.recipe.local_batch(state.global_batch(step), 0, state.training_model.replica.size)
        shard, seed = to_device(shard, state.device), training_step.step_seed(state.seed, step, 0)
        with replace_collectives(answer):
            phase = "comparing what is sent, "
            training_step.compute_loss(state.recipe, module, shard, step=step, seed=seed, phase=phase)
    except (Exception, SystemExit):  # the program needs real results; compare the calls until then
        pass
    finally:
        this_rank.set_collective("")
    return tuple(payloads)


def _reduced_values(kwargs: Mapping[str, Any]) -> tuple[float, ...]:
    tensor = kwargs.get("tensor", kwargs.get("self", kwargs.get("input")))
    if not isinstance(tensor, torch.Tensor) or tensor.is_complex() or not 1 < tensor.numel() <= _MOST_VALUES:
        return ()
    return tuple(tensor.detach().reshape(-1).double().tolist())


@replays_step
def explain(step: int) -> dict[str, PathEnd]:
    """Return, for each parameter without gradient on this rank, why the gradient is missing.

    Every rank replays, even without missing gradients, because forward may communicate. If forward communicates, each
    rank replays only once, and causes that need a changed parameter value stay undetected.
    """
    state = rank_state()
    module = state.reference.module
    missing = {name: state.reference.trainable[name] for name in state.step.missing}
    communicates = bool(read_log(this_rank.current().directory, state.rank))
    explainer = Explainer(
        module, lambda: state.run_loss(step, "explaining, ").parts, state.rewind, runs_once=communicates
    )
    try:
        return explainer.explain(missing)
    except Exception as error:  # the missing gradient is still reported
        if is_own_bug(error):
            raise
        return {name: PathEnd("unknown") for name in missing}


@replays_step
def nonzero_when_perturbed(step: int, names: Sequence[str]) -> list[str]:
    """Return the `names` whose gradient is nonzero after perturbing every parameter."""
    state = rank_state()
    _perturb_reference(state, step)
    gradients, _ = state.gradients(step, state.reference.module, state.step.batch, phase="looking again, ")
    return [name for name in names if name in gradients and bool(gradients[name].count_nonzero())]


@replays_step
def why_zero(step: int, names: Sequence[str]) -> dict[str, PathEnd]:
    """Perturb every parameter; return operations that turn gradients of `names` to zero."""
    state = rank_state()
    _perturb_reference(state, step)
    parameters = {name: state.reference.trainable[name] for name in names}
    try:
        return zero_ends(lambda: state.run_loss(step, "looking again, ").total, parameters)
    except TargetError:  # the model rejects the perturbed values
        return {}
    finally:
        training_step.clear_gradients(state.reference.module)


def _perturb_reference(state: RankState, step: int) -> None:
    file = this_rank.current().directory / f"moved.{state.rank}"
    perturb(state.reference.module, training_step.step_seed(state.seed, step), state.reference.mapped, file)


def perturb(module: nn.Module, seed: int, mapped: Collection[str], file: Path) -> None:
    """Perturb every parameter slightly; move parameters in `mapped` to memory mapped from `file`."""
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(module.named_parameters())

    def perturbed() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in parameters.items():
            if parameter.requires_grad and parameter.is_floating_point():
                size = 0.02 + 0.1 * float(parameter.detach().abs().mean())
                change = torch.randn(parameter.shape, generator=generator).mul_(size)
                yield name, change.to(parameter.device, parameter.dtype).add_(parameter)

    with torch.no_grad():
        for name, value in kept_in_file(perturbed(), file, keep=True).items() if mapped else perturbed():
            if name in mapped:
                parameters[name].data = value
            else:
                parameters[name].copy_(value)


def zero_ends(forward: Callable[[], torch.Tensor], leaves: Mapping[str, torch.Tensor]) -> dict[str, PathEnd]:
    """Run forward and backward; return the operations that turn gradients of `leaves` to zero.

    Leaves are omitted if no operation on the path from the loss receives a nonzero gradient.
    """
    with autograd_graph.record_lines():
        loss = forward()
    graph = autograd_graph.LossGraph([loss])
    received: dict[Any, bool] = {}  # node -> True if it received a nonzero gradient
    passed: dict[Any, list[bool]] = {}  # node -> for each input, True if a nonzero gradient left

    def record_flow(node: Any, inputs: Any, outputs: Any) -> None:
        received[node] = any(map(_is_nonzero, outputs))
        passed[node] = list(map(_is_nonzero, inputs))

    def turns_to_zero(node: Any, index: int) -> bool:
        return received.get(node, False) and not any(passed[node][index : index + 1])

    with contextlib.ExitStack() as stack:
        for node in (node for node in graph.nodes if node.next_functions):
            stack.enter_context(node.register_hook(partial(record_flow, node)))
        training_step.run_backward(loss)
    ends = {}
    for name, leaf in leaves.items():
        node = next(graph.nearest(leaf, turns_to_zero), None)
        if node is not None:
            ends[name] = PathEnd("zero", operation_of(node.name()), line_of(node))
    return ends


def _is_nonzero(gradient: object) -> bool:
    return isinstance(gradient, torch.Tensor) and bool(gradient.count_nonzero())


def operation_of(node_name: str) -> str:
    """Return the operation of a backward node: "mul()" for "MulBackward0"."""
    name = re.sub(r"Backward\d*$", "", node_name)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower() + "()"
