"""Recorder of loss scaling: gradients of sums and means, and targets saved by losses."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist

from ddpcheck.findings.evidence.script import LossDifferentiated, LossTarget, NumberReduced, ScaledTerm
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import last_assignment, location_of, user_frame, user_location, variables_of
from ddpcheck.gather.autograd.autograd_graph import LossGraph, in_backward, node_of, output_shapes, saved_tensor
from ddpcheck.gather.autograd.loss_terms import nearest_leaf_node
from ddpcheck.gather.patching import Recorder, guarded, patched
from ddpcheck.gather.state.fingerprints import fingerprint, local_part
from ddpcheck.record.loss.loss_source import LossSource, loss_source, uncounted_at
from ddpcheck.record.loss.micro_batches import log_softmaxes
from ddpcheck.record.optimizers.gradient_recorders import AutogradGradRecorder
from ddpcheck.record.optimizers.optimizer_recorder import OptimizerRecorder
from ddpcheck.record.recording import Recording, UnpickledHook
from ddpcheck.stream.rank_report import is_probed

_ENGINE = "_engine_run_backward"  # private to torch; called by all imports of `backward` and `grad`
_MOST_NODES = 32  # max visited nodes of a loss
_MOST_PER_STEP = 64  # max backward passes per step
_LOSS_OPS = ("Mul", "Div", "Neg", "Add", "Sub", "View", "Reshape", "Squeeze", "Unsqueeze", "Clone", "ToCopy", "Alias")
_SINK = "_DDPSinkBackward"  # through which DDP returns the forward outputs if find_unused_parameters
_SUMS, _MEANS = ("Sum", "NansumBackward"), ("Mean",)
_SELECTIONS = ("Index", "MaskedSelect")  # selection of elements by value
_REDUCTIONS: dict[Any, str] = {1: "mean", 2: "sum"}  # by the value of `reduction` in torch's losses
_MOST_FOLLOWED = 6  # max operations between a mean and the selection of its elements
_MOST_SOURCES = 256
_MOST_VARIABLES = 64  # max local variables of the function that calls backward
_MOST_NUMBER_ELEMENTS = 4  # max elements of a tensor treated as numbers
_MOST_NUMBERS = 16  # max reduced numbers between two backward passes


class LossRecorder(Recorder, subjects=("loss",)):
    """Recorder of losses, at backward passes in sampled optimizer steps."""

    def __init__(
        self, run: Recording, optimizers: OptimizerRecorder, listeners: Sequence[Any], taken: AutogradGradRecorder
    ) -> None:
        """Patch backward; `optimizers` get each backward pass, `taken` each `torch.autograd.grad`.

        Each listener gets the backward passes that it awaits (`awaits_backward`), by `note_backward(losses)`.
        """
        self._run = run
        self._last_scaled: tuple[int, Any] = (0, None)  # id of the last scaled loss, and its gradient scaler
        self._optimizers = optimizers
        self._backwards_in_step = (-1, 0)  # (step, backward passes in the step)
        self._newest_wrapper = (0, 0)  # number of the newest wrapper, and the step of its first appearance
        self._watches: tuple[Any, ...] = ()  # wrappers known at that time
        self._reduced_numbers: list[NumberReduced] = []
        self._last_backward_step: int | None = None  # last step with a backward pass after the reductions
        self._last_exchange_step = -1  # last step with a gather or broadcast
        self._sources: dict[tuple[CodeType, int], LossSource] = {}  # by line that calls backward
        name = _ENGINE if hasattr(torch.autograd, _ENGINE) else "backward"
        patched(torch.autograd, name, partial(_notify_recorders, (self, listeners, optimizers, taken)))
        patched(torch.amp.GradScaler, "scale", self._note_scaled_loss)

    def note_collective(self, call: Call, arguments: Mapping[str, Any]) -> None:
        """Record the input of an all_reduce (sum) of at most `_MOST_NUMBER_ELEMENTS` elements."""
        if "gather" in call.operation or "broadcast" in call.operation:
            self._last_exchange_step = self._run.steps
        tensor = arguments.get("tensor")
        if call.operation != "all_reduce" or arguments.get("op", dist.ReduceOp.SUM) != dist.ReduceOp.SUM:
            return
        if not self._is_probed(self._run.steps):
            return
        if isinstance(tensor, torch.Tensor) and not tensor.is_complex() and tensor.numel() <= _MOST_NUMBER_ELEMENTS:
            if self._last_backward_step not in (None, self._run.steps):
                self._reduced_numbers, self._last_backward_step = [], None
            user_line = Location.parse(call.location)
            values = tensor.detach().flatten().tolist()
            members = () if len(call.members) == dist.get_world_size() else call.members
            self._reduced_numbers += [NumberReduced(float(value), user_line, members) for value in values]
            del self._reduced_numbers[:-_MOST_NUMBERS]

    def _is_probed(self, step: int) -> bool:
        """Return True if `step` of the script or of the newest wrapper is sampled."""
        return self._run.are_probed() or is_probed(step - self._newest_wrapper[1])

    def _note_scaled_loss(self, scaler: Any, *_outputs: Any, **_named: Any) -> Generator[None, Any, None]:
        result = yield
        self._last_scaled = id(result), scaler if scaler.is_enabled() else None

    def backward_begins(self, losses: Any) -> Callable[[], object] | None:
        """Hook a loss's terms; return a callback for backward's end, None if not recorded."""
        step = self._run.steps
        before = self._backwards_in_step[1] if self._backwards_in_step[0] == step else 0
        self._backwards_in_step = (step, before + 1)
        if self._watches is not self._run.watches.refs:
            self._watches = self._run.watches.refs
            if (newest := max(self._optimizers.reductions(), default=0)) > self._newest_wrapper[0]:
                self._newest_wrapper = newest, step  # also sample the first steps of the new wrapper
        self._last_backward_step = step
        if not self._is_probed(step):
            return None
        reductions, reduced = self._optimizers.reductions(), tuple(self._reduced_numbers)
        if before >= _MOST_PER_STEP or not isinstance(losses, torch.Tensor) or losses.numel() > 1:
            return None
        hooked = bool(reduced) and self._optimizers.have_hooks()
        user_line = user_location()
        source = self._source_of_loss()
        targets = () if self._last_exchange_step == step else loss_targets(losses)
        arrived: dict[int, ScaledTerm] = {}
        handles = []
        scaler = self._last_scaled[1] if self._last_scaled[0] == id(losses) else None
        scale = 1.0 if scaler is None else scaler.get_scale()
        terms = list(_terms(losses))
        lines_of_terms = _lines_of_terms(losses, len(terms))
        heads: dict[Any, int] = {}
        for number, (node, kind, scales) in enumerate(terms):
            head = heads.setdefault((nearest_leaf_node(node) or node, node.name()), len(heads))
            note = _term_hook(arrived, number, kind, node, scales, lines_of_terms.get(node), head)
            handles.append(node.register_prehook(UnpickledHook(note, self)))
        totals: list[float] = []
        for node in log_softmaxes([losses]):
            handles.append(node.register_prehook(UnpickledHook(partial(_add_target_weight, totals), self)))

        def on_backward_end() -> None:
            for handle in handles:
                handle.remove()
            terms = tuple(arrived[number] for number in sorted(arrived))
            if scale not in (0.0, 1.0):
                terms = tuple(_unscaled(term, scale) for term in terms)
            now = self._optimizers.reductions()
            wrappers = tuple(number for number in now if now[number] > reductions.get(number, 0))
            put_off = tuple(sorted(self._optimizers.unaveraged_wrappers() - set(wrappers)))
            weights = tuple(weight / scale for weight in totals) if scale else ()
            callers = [caller for watch in list(self._run.watches) if (caller := watch.called_in)]
            uncounted = next(filter(None, (uncounted_at(code) for code, _ in callers if code is not None)), None)
            line = source.made or next((line for _, line in callers), None)  # else the package's call
            fields = step, before, terms, user_line, line, source.scaled, wrappers, put_off
            self._run.add(LossDifferentiated(*fields, self._run.taken, reduced, hooked, targets, weights, uncounted))

        return guarded(on_backward_end, self)

    def _source_of_loss(self) -> LossSource:
        frame = user_frame(sys._getframe(1))
        if frame is None:
            return LossSource()
        key = frame.f_code, frame.f_lineno
        if key not in self._sources and len(self._sources) < _MOST_SOURCES:
            self._sources[key] = loss_source(frame)
        return self._sources.get(key, LossSource())


_Recorders = tuple[LossRecorder, Sequence[Any], OptimizerRecorder, AutogradGradRecorder]


def _notify_recorders(
    recorders: _Recorders, tensors: Any, *arguments: Any, accumulate_grad: bool = True, **_named: Any
) -> Generator[None, Any, None]:
    """Notify the recorders before and after a backward pass; each handles its own errors."""
    recorder, listeners, optimizers, taken = recorders
    if not accumulate_grad:
        gradients = yield
        taken.note_results(arguments[3] if len(arguments) > 3 else (), gradients)
        return
    losses = tensors[0] if isinstance(tensors, tuple) and len(tensors) == 1 else tensors
    for listener in listeners:
        if listener.awaits_backward:
            listener.note_backward(losses)
    if in_backward():  # of a checkpoint: part of the outer backward pass
        return
    on_backward_end = recorder.backward_begins(losses)
    optimizers.before_backward(losses)
    yield
    optimizers.after_backward()
    if on_backward_end is not None:
        on_backward_end()


def _unscaled(term: ScaledTerm, scale: float) -> ScaledTerm:
    factors = list(term.multipliers)
    if scale in factors:
        factors.remove(scale)
    return replace(term, factor=term.factor / scale, multipliers=tuple(factors))


def _lines_of_terms(loss: torch.Tensor, count: int) -> dict[Any, Location]:
    """Return a line of the program for each term of `loss`, by graph node.

    This line assigns a scalar local variable of the function that calls backward. The variable contains the term, and
    fewer terms than the loss. If several variables contain the term, the variable with the fewest terms is used.
    """
    frame = user_frame(sys._getframe(1))
    lines: dict[Any, Location] = {}
    if frame is None or count < 2:
        return lines
    term_nodes = {
        name: {node for node, _, _ in _terms(value)}
        for name, value in list(variables_of(frame).items())[:_MOST_VARIABLES]
        if type(value) is torch.Tensor and node_of(value) is not None and value.numel() == 1 and value is not loss
    }
    for name in sorted(term_nodes, key=lambda name: -len(term_nodes[name])):
        if len(term_nodes[name]) < count and (line := last_assignment(location_of(frame), name)) is not None:
            lines.update(dict.fromkeys(term_nodes[name], line))
    return lines


def _term_hook(
    arrived: dict[int, ScaledTerm], number: int, kind: str, node: Any, scales: _Scales, line: Location | None, head: int
) -> Callable[[Any], None]:
    count, chosen = _count_elements(node)

    def note(gradients: Any) -> None:
        if gradients[0] is not None and gradients[0].numel():
            factor = float(local_part(gradients[0]).flatten()[0])  # a DTensor if the model is split
            by = [tuple(value for name, value in scales if name == kind_of_scale) for kind_of_scale in ("Div", "Mul")]
            arrived[number] = ScaledTerm(kind, factor, count, chosen, by[0], by[1], line, head)

    return note


def _add_target_weight(totals: list[float], gradients: Any) -> None:
    """Append a cross entropy's total target weight: minus the sum of log-probability gradients."""
    if gradients[0] is not None:
        totals.append(-float(local_part(gradients[0]).double().sum()))


_Scales = tuple[tuple[str, float], ...]
"""Divisors ("Div") and factors ("Mul") between the loss and a term."""


def _terms(loss: torch.Tensor) -> Iterator[tuple[Any, str, _Scales]]:
    """Yield (node, name, scales) per `sum` or `mean` in `loss`, except in large graphs."""
    pending: list[tuple[Any, int, _Scales]] = [(node_of(loss), loss.output_nr, ())]
    terms = []
    for node, index, scales in pending:  # appended to in the loop
        if node is None or len(pending) > _MOST_NODES:
            return
        name = node.name()
        reduction = _REDUCTIONS.get(getattr(node, "_saved_reduction", None))
        if reduction or name.startswith((*_MEANS, *_SUMS)):
            terms.append((node, reduction or ("mean" if name.startswith(_MEANS) else "sum"), scales))
        elif name == _SINK:
            pending.append((*node.next_functions[min(index, len(node.next_functions) - 1)], scales))
        elif name.startswith(_LOSS_OPS):
            for edge, (next_node, output_nr) in enumerate(node.next_functions):
                if next_node is not None:
                    pending.append((next_node, output_nr, scales + _constant_scale(node, name[:3], edge)))
    yield from terms


def _constant_scale(node: Any, name: str, edge: int) -> _Scales:
    """Return the constant by which a node (`name`: Mul or Div) scales input `edge`."""
    constant = saved_tensor(node, "self" if edge else "other") if name in ("Mul", "Div") else None
    if constant is None or constant.numel() != 1 or constant.is_complex() or constant.requires_grad:
        return ()
    return ((name, float(local_part(constant))),)


def _count_elements(node: Any) -> tuple[int, bool]:
    """Return a reduction's element count, and True if the elements were selected.

    Targets ignored by a cross entropy, and elements masked in a sum, do not count.
    """
    next_node, index = node.next_functions[0]
    shapes = output_shapes(next_node)
    shape = shapes[index] if shapes else ()
    count = math.prod(shape) if shapes else 0
    total, target = saved_tensor(node, "total_weight"), saved_tensor(node, "target")
    if total is not None and target is not None and saved_tensor(node, "weight") is None:
        counted = round(float(local_part(total)))
        return counted, counted < target.numel() or _is_selected(next_node, shape)
    if next_node is not None and next_node.name().startswith("Mul") and node.name().startswith(_SUMS):
        mask = saved_tensor(next_node, "self" if next_node.next_functions[0][0] is None else "other")
        if mask is not None and not mask.requires_grad and mask.numel() and bool(((mask == 0) | (mask == 1)).all()):
            return round(float(local_part(mask).sum()) * count / mask.numel()), True
    return count, _is_selected(next_node, shape)


def _is_selected(node: Any, shape: tuple[int, ...]) -> bool:
    for _ in range(_MOST_FOLLOWED):
        if node is None or ((shapes := output_shapes(node)) and shapes[0][:1] != shape[:1]):
            return False
        if node.name().startswith(_SELECTIONS):
            return True
        node = next((next_node for next_node, _ in node.next_functions if next_node is not None), None)
    return False


_MOST_TARGETS = 4
_MOST_COUNTED = 1 << 12  # max elements for the entropy estimate
_ARITHMETIC = ("Mul", "Div", "Neg", "Add", "Sub", "Sum", "Mean", "View", "Reshape", "Squeeze", "Unsqueeze", "Clone")


def loss_targets(loss: torch.Tensor) -> tuple[LossTarget, ...]:
    """Return targets of the torch loss functions that `loss` combines by arithmetic operations."""
    targets = []
    graph = LossGraph(
        [loss], limit=_MOST_NODES, is_end=lambda node: _has_target(node) or not node.name().startswith(_ARITHMETIC)
    )
    for target in (saved_tensor(node, "target") for node in filter(_has_target, graph.nodes)):
        if type(target) is torch.Tensor and target.layout == torch.strided and target.dim() and not target.is_complex():
            if not target.requires_grad and target.numel() > 1:
                targets.append(
                    LossTarget(fingerprint(target), len(target), target.numel(), _entropy_bits(target.detach()))
                )
    return tuple(targets[:_MOST_TARGETS])


def _has_target(node: Any) -> bool:
    return hasattr(node, "_raw_saved_target")


def _entropy_bits(target: torch.Tensor) -> float:
    """Return the entropy of target values in bits; 0 for sorted or grouped targets."""
    values = target.flatten()
    values = values[:: max(1, len(values) // _MOST_COUNTED)]
    steps = values[1:].double() - values[:-1].double()
    if bool((steps >= 0).all()) or bool((steps <= 0).all()) or not bool(steps.isfinite().all()):
        return 0.0
    _, counts = values.unique(return_counts=True)
    different, blocks = len(counts), 1 + int((steps != 0).sum())
    if blocks == different < len(values):
        return 0.0
    return -float((counts / len(values)).log2().mul(counts).sum())
