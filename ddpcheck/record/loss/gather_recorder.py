"""Recorders of gathered features: use in the loss, and cross entropies over gathered rows."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddpcheck.findings.evidence.evaluation import GatheredTargets
from ddpcheck.findings.evidence.loop import GatheredConstant, OwnRowsReinserted
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import defined_at, relative_path, variables_of
from ddpcheck.gather.autograd import exchanges
from ddpcheck.gather.autograd.autograd_graph import LossGraph, node_of, output_shapes, saved_tensor
from ddpcheck.gather.ddp.ddp_wrapper import parameters_in_wrappers
from ddpcheck.gather.patching import Recorder
from ddpcheck.gather.steps.gradient_distance import sketch
from ddpcheck.record.recording import Recording, UnpickledHook, remove_hooks
from ddpcheck.record.source import program_numbers
from ddpcheck.record.source.source_scope import body_of, own_nodes

_MOST_NODES = 256  # max visited nodes of a loss
_MOST_GATHERED = 64  # max tensors per step
_JOINS = ("CatBackward", "StackBackward")
_MOST_ELEMENTS = 1 << 22  # max elements of a gathered tensor
_FEWEST_ROWS, _MOST_ROWS = 2, 8  # of the rank's own rows, searched in the loss
_FEWEST_ELEMENTS = 3  # min elements of a row that is identified by its direction
_MOST_CANDIDATES = 64  # candidate rows
_INPUTS = {"all_gather": "tensor", "all_gather_into_tensor": "input_tensor", "all_gather_single": "input_tensor"}
_SAVED = "_saved_"  # prefix of a node's tensors saved for backward
_PARALLEL = 1e-4  # max 1 - cosine of rows that differ in scale only
_DISTINCT = 1e-2  # min 1 - cosine of distinguishable rows


@dataclass(slots=True)
class _SampledGather:
    operation: str
    location: Location | None
    shape: tuple[int, int]
    rows: torch.Tensor  # sampled rows of the rank, normalized
    node: Any  # grad_fn of the gathered tensor


@dataclass(slots=True)
class _GatheredParts:
    count: int  # world size of the group
    group_rank: int
    shape: tuple[int, ...]  # shape of the gathered tensor
    operation: str = ""
    location: Location | None = None
    node: Any = None  # grad_fn of the rank's own part, if an autograd function gathers
    spans_world: bool = True  # True if gathered over all ranks, False if in a subgroup


class GatherRecorder(Recorder, subjects=("loss",), inner=("awaits_backward",)):
    """Recorder of how losses use gathered tensors, in sampled optimizer steps."""

    def __init__(self, run: Recording) -> None:
        self._run = run
        self._gathered: list[_SampledGather] = []
        self._parts: list[_GatheredParts] = []
        self._step = -1  # step of the gathered tensors

    def note_collective(self, call: Call, arguments: Mapping[str, Any]) -> None:
        step = self._run.steps
        if self._step != step:
            self._gathered, self._parts, self._step = [], [], step
        tensor = arguments.get(_INPUTS.get(call.operation, ""))
        if not self._run.are_probed() or not isinstance(tensor, torch.Tensor) or not tensor.dim():
            return
        count, location = len(call.members), Location.parse(call.location)
        node = node_of(tensor) if call.differentiable else None
        is_usable = tensor.is_floating_point() and (node is not None or not call.differentiable)
        if is_usable and len(self._parts) < _MOST_GATHERED:
            group_rank, shape = call.members.index(dist.get_rank()), (len(tensor) * count, *tensor.shape[1:])
            is_global = count == dist.get_world_size()
            self._parts.append(_GatheredParts(count, group_rank, shape, call.operation, location, node, is_global))
        if call.differentiable or tensor.dim() < 2 or node_of(tensor) is None or not tensor.is_floating_point():
            return
        if tensor.numel() <= _MOST_ELEMENTS and (rows := _distinct_rows(tensor)) is not None:
            shape = tensor.numel() // tensor.shape[-1] * count, tensor.shape[-1]
            self._gathered.append(_SampledGather(call.operation, location, shape, rows, node_of(tensor)))

    @property
    def awaits_backward(self) -> bool:
        return bool(self._parts or self._gathered or exchanges.functions)

    def note_backward(self, losses: Any) -> None:
        """Check how a loss uses gathered tensors; called when backward begins."""
        (gathered, self._gathered), (parts, self._parts) = (self._gathered, []), (self._parts, [])
        if exchanges.functions and self._run.are_probed():
            wrapped = parameters_in_wrappers()
            roots = [losses] if isinstance(losses, torch.Tensor) else losses
            exchanges.record_rank_local(roots, lambda leaf: id(leaf) not in wrapped)
        if not parts or self._step != self._run.steps or not isinstance(losses, torch.Tensor):
            return
        ends = {op.node for op in gathered}
        nodes = _nodes_between(losses, ends)
        joins = {node: joined for node in nodes if (joined := _find_put_back_parts(node, parts, ends)) is not None}
        for node, joined in itertools.islice(joins.items(), 1):
            origins = ends if joined.node is None else {*ends, joined.node}
            nodes_beside = _nodes_between(losses, origins | joins.keys())
            inputs = (child for node_beside in nodes_beside for child, _ in node_beside.next_functions)
            self._hook_gradients(node, joined, besides=any(child in origins for child in inputs))
        for op in gathered:
            views = [view for view in gathered if view.shape == op.shape]  # possibly concatenated
            shapes = [(op.shape[0] * count, op.shape[1]) for count in range(1, len(views) + 1)]
            constants = (constant for shape in shapes for constant in _constants(nodes, shape))
            if any(_contains_rows(constant, op.rows) for constant in constants):
                names = self._without_gradient(losses, ends)
                self._run.add(GatheredConstant(self._step, op.operation, op.location, op.shape[0], names))
                return

    def _without_gradient(self, loss: torch.Tensor, ends: set[Any]) -> tuple[str, ...]:
        """Return names of parameters that the loss reaches only through gathered tensors, without gradient."""
        gathered_only = {id(leaf) for leaf in LossGraph(ends).leaves} - {id(leaf) for leaf in LossGraph([loss]).leaves}
        numbered = [watch.numbered for watch in list(self._run.watches)]
        return tuple(name for names in numbered for key, name in names.items() if key in gathered_only)

    def _hook_gradients(self, node: Any, parts: _GatheredParts, *, besides: bool) -> None:
        """Hook `node`, which joins gathered tensors, to compare gradients before and after `node`.

        `besides`: True if this rank's tensor also reaches the loss without `node`.
        """
        function = getattr(type(node), "_forward_cls", None)
        source_line = parts.location if function is None else defined_at(function.backward)

        def keep_gradients(gradients: Any) -> None:
            captured.extend(None if grad is None else grad.detach().clone() for grad in gradients)

        def note_factor(input_grads: Any, _output_grads: Any) -> None:
            remove_hooks(handles)
            digest, factor = _passed_gradient(node, input_grads, captured, parts)
            digest = digest if parts.spans_world else ()
            inside = parts.node is not None
            if not inside or abs(factor - 1) < _PARALLEL:  # a backward that sums over ranks changes the factor
                self._run.add(
                    OwnRowsReinserted(self._step, parts.operation, source_line, digest, factor, inside, besides)
                )

        captured: list[torch.Tensor | None] = []  # copies: a custom backward may reduce in place
        handles = [node.register_prehook(UnpickledHook(keep_gradients, self))]
        handles.append(node.register_hook(UnpickledHook(note_factor, self)))


def _constants(nodes: Sequence[Any], shape: tuple[int, int]) -> Iterator[torch.Tensor]:
    """Yield saved tensors without grad of `nodes`, as matrices of `shape`.

    Autograd saves such a tensor as a factor of a product, for example. In leading (broadcast) dimensions, only index 0
    is used.
    """
    rows = shape[0]
    for node in nodes:
        sizes = {size for shape in output_shapes(node) for size in shape}  # cheap check before reading saved tensors
        for name in dir(node) if rows in sizes else ():
            tensor = saved_tensor(node, name.removeprefix(_SAVED)) if name.startswith(_SAVED) else None
            if tensor is not None and not tensor.requires_grad and tensor.is_floating_point():
                yield from _matrices_of(tensor, shape)


def _matrices_of(tensor: torch.Tensor, shape: tuple[int, int]) -> Iterator[torch.Tensor]:
    if tensor.dim() < 2 or tensor.numel() > _MOST_ELEMENTS * tensor.shape[0]:
        return
    matrix = tensor[(0,) * (tensor.dim() - 2)] if all(tensor.shape) else tensor.new_empty(0, 0)
    if tuple(matrix.shape) == shape:
        yield matrix
    if tuple(matrix.T.shape) == shape:
        yield matrix.T


def _distinct_rows(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a few normalized rows of `tensor` with clearly different directions, or None."""
    if tensor.shape[-1] < _FEWEST_ELEMENTS:
        return None
    rows = _normed(tensor.detach().reshape(-1, tensor.shape[-1])[:_MOST_CANDIDATES])
    close = (rows @ rows.T > 1 - _DISTINCT).tolist()
    chosen: list[int] = []
    for index in range(len(rows)):
        if len(chosen) < _MOST_ROWS and not any(close[index][picked] for picked in chosen):
            chosen.append(index)
    return rows[chosen] if len(chosen) >= _FEWEST_ROWS and bool(rows.isfinite().all()) else None


def _contains_rows(constant: torch.Tensor, rows: torch.Tensor) -> bool:
    closest = (rows @ _normed(constant.detach()).T).nan_to_num(-1.0).amax(1)
    return bool((closest > 1 - _PARALLEL).all())


def _normed(rows: torch.Tensor) -> torch.Tensor:
    rows64 = rows.cpu().double()
    normed: torch.Tensor = rows64 / torch.linalg.vector_norm(rows64, dim=1, keepdim=True)
    return normed


def _find_put_back_parts(node: Any, parts: list[_GatheredParts], ends: set[Any]) -> _GatheredParts | None:
    """Return the gathered tensors that `node` joins with this rank's differentiable tensor, or None.

    Gathered tensors require no grad. A script may put this rank's differentiable tensor back among them.
    """
    following = [next_node for next_node, _ in node.next_functions]
    if isinstance(node, torch.autograd.function.BackwardCFunction):  # a custom autograd function of the program
        inside = next((part for part in parts if part.node is not None and part.node in following), None)
        return inside if ends.isdisjoint(following) else parts[0]
    parts = [part for part in parts if part.node is None]
    if node.name().startswith(_JOINS):
        present = [index for index, next_node in enumerate(following) if next_node is not None]
        return next((part for part in parts if len(following) == part.count and present == [part.group_rank]), None)
    into_constant = node.name().endswith("CopySlices") and following[0] is None
    return next((part for part in parts if into_constant and output_shapes(node)[:1] == (part.shape,)), None)


def _passed_gradient(
    node: Any, input_grads: Any, output_grads: Sequence[torch.Tensor | None], parts: _GatheredParts
) -> tuple[tuple[float, ...], float]:
    """Return (sketch of the gradients of all ranks' parts, scale of this rank's gradient).

    The sketch is `()` if the gradients of other ranks' parts are zero or unknown. The scale is the factor by which
    `node` multiplies the gradient of this rank's part, and 0 if `node` changes the direction of the gradient.
    """
    pairs = zip(input_grads, node.next_functions, strict=True)
    own_grad = next((grad.detach().flatten() for grad, (to, _) in pairs if to is not None and grad is not None), None)
    arrived = [grad.detach().flatten() for grad in output_grads if grad is not None]
    if own_grad is None or not arrived:
        return (), 0.0
    if len(output_grads) == parts.count > 1:
        part_grads = [torch.zeros_like(own_grad) if grad is None else grad.detach().flatten() for grad in output_grads]
    else:
        part_grads = list(arrived[0].chunk(parts.count))
    if any(grad.shape != own_grad.shape for grad in part_grads):
        return (), 0.0
    factor = float(own_grad.norm() / part_grads[parts.group_rank].norm().clamp_min(1e-30))
    factor = factor if torch.allclose(own_grad, part_grads[parts.group_rank] * factor, rtol=_PARALLEL) else 0.0
    lost = any(bool(grad.any()) for index, grad in enumerate(part_grads) if index != parts.group_rank)
    return tuple(sketch(torch.cat(part_grads)).tolist()) if lost else (), factor


def _nodes_between(loss: torch.Tensor, ends: set[Any]) -> list[Any]:
    graph = LossGraph([loss], limit=_MOST_NODES, is_end=ends.__contains__)
    return [node for node in graph.nodes if node not in ends]


_MOST_TARGET_NODES = 64
_MOST_TARGETS = 4  # max tensors since the last backward pass
_LEAST_COSINE = 0.99  # min cosine of a row before and after the gather (may be normalized, scaled or rounded)
_INPUT_NAMES = ("tensor", "input_tensor", "self", "input")
_PRODUCT_TENSORS = ("mat2", "self", "other", "x1", "x2")  # saved tensors of matrix products and distances
_KEEPS_COLUMNS = (
    *("LogSoftmax", "Mul", "Div", "Add", "Sub", "MaskedFill", "Clone", "ToCopy", "Where", "Alias", "Neg", "Squeeze"),
    *("View", "UnsafeView", "Reshape", "Permute", "Unsqueeze", "T", "Transpose"),  # of an einsum, or transposed
    *("Sum", "Expand", "Pow", "Sqrt", "Exp"),  # of a cosine similarity, or of distances
)


class TargetRecorder(Recorder, subjects=("evaluation",)):
    """Recorder of contrastive losses: cross entropies in which gathered rows are the classes."""

    def __init__(self, run: Recording) -> None:
        self._run = run
        self._gathered: list[tuple[torch.Tensor, Call, Location | None]] = []
        self.awaits_backward = False

    def note_collective(self, call: Call, arguments: Mapping[str, Any]) -> None:
        if "all_gather" not in call.operation or not self._run.are_probed() or len(call.members) < 2:
            return
        tensor = next((arguments[name] for name in _INPUT_NAMES if isinstance(arguments.get(name), torch.Tensor)), None)
        if tensor is not None and tensor.is_floating_point() and tensor.dim() == 2 and tensor.numel() <= _MOST_ELEMENTS:
            self._gathered = [*self._gathered, (tensor.detach(), call, _line_of_cross_entropy())][-_MOST_TARGETS:]
            self.awaits_backward = True

    def note_backward(self, loss: Any) -> None:
        """Record the gathered tensors whose rows are classes of a cross entropy in `loss`."""
        gathered, self._gathered, self.awaits_backward = self._gathered, [], False
        if not gathered or not isinstance(loss, torch.Tensor) or node_of(loss) is None:
            return
        last: GatheredTargets | None = None
        for targets, columns in _cross_entropies(loss):
            for tensor, call, line in gathered:
                column = _first_column_of(tensor, columns)
                if column is None or columns.shape[1] < 2 * len(tensor):
                    continue
                different = tuple(targets.unique().tolist())
                if len(different) <= 2 * len(tensor):  # two views at most; more targets mean a loss of all rows
                    location, classes = Location.parse(call.location), columns.shape[1]
                    step, rows = self._run.steps, len(tensor)
                    entry = GatheredTargets(step, location, call.members, column, rows, classes, different, line)
                    if entry != last:
                        self._run.add(entry)
                    last = entry


def _line_of_cross_entropy() -> Location | None:
    """Return the line that will call cross entropy in a function on the stack."""
    for frame in program_numbers.program_frames():
        body, names = body_of(frame.f_code), {**frame.f_globals, **variables_of(frame)}
        calls = (node for node in own_nodes(body) if isinstance(node, ast.Call)) if body is not None else ()
        lines = [call.lineno for call in calls if call.lineno > frame.f_lineno and _is_cross_entropy(call.func, names)]
        if lines:
            return Location(relative_path(frame.f_code.co_filename), min(lines))
    return None


def _is_cross_entropy(function: ast.expr, variables: Mapping[str, Any]) -> bool:
    name, *attributes = ast.unparse(function).split(".")
    value = variables.get(name)
    for attribute in attributes:
        members = getattr(value, "__dict__", None) or {}
        value = members.get(attribute, members.get("_modules", {}).get(attribute))
    return [name, *attributes][-1] == "cross_entropy" or isinstance(value, torch.nn.CrossEntropyLoss)


def _cross_entropies(loss: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (targets, `matrix`) of each cross entropy whose logits are `features @ matrix`."""
    graph = LossGraph([loss], limit=_MOST_TARGET_NODES, is_end=lambda node: node.name().startswith("NllLoss"))
    for node in graph.ends:
        targets = saved_tensor(node, "target")
        probability_nodes = [next_node for next_node, _ in node.next_functions if next_node is not None]
        is_soft = len(probability_nodes) == 1 and probability_nodes[0].name().startswith("LogSoftmax")
        classes = saved_tensor(probability_nodes[0], "result") if is_soft else None
        if targets is None or targets.dim() != 1 or classes is None:
            continue
        logits_graph = LossGraph(
            probability_nodes, limit=_MOST_TARGET_NODES, is_end=lambda node: not node.name().startswith(_KEEPS_COLUMNS)
        )
        for saved in (saved_tensor(product, name) for product in logits_graph.nodes for name in _PRODUCT_TENSORS):
            matrix = saved[0] if saved is not None and saved.dim() == 3 else saved
            if matrix is not None and matrix.dim() == 2 and classes.shape[-1] in matrix.shape:
                columns = matrix if matrix.shape[1] == classes.shape[-1] else matrix.T
                yield targets.detach(), columns.detach()


def _first_column_of(rows: torch.Tensor, columns: torch.Tensor) -> int | None:
    """Return the index of the first of consecutive columns that equal `rows`, or None."""
    count, width = rows.shape
    if columns.shape[0] != width or columns.shape[1] < count or count < 2:
        return None
    cosines = torch.nn.functional.normalize(rows.float(), dim=1)
    cosines = cosines @ torch.nn.functional.normalize(columns.float(), dim=0)
    best = cosines.argmax(1)
    first = int(best[0])
    in_order = best == torch.arange(first, first + count, device=best.device)
    is_close = cosines.gather(1, best[:, None]) > _LEAST_COSINE
    copies = (cosines > 1 - 1e-6).sum()  # copies of the same rows elsewhere
    return first if bool(in_order.all()) and bool(is_close.all()) and int(copies) <= count else None
