"""Forward and backward passes under DDP as rounds: what takes part in each reduction, and that each comes to its end.

A round begins with a forward after which DDP will average gradients, and ends when it has. At the start of a backward
pass the autograd engine is asked which parameters it will reach. Where some are missing, DDP would never finish: the
other ranks would wait in this backward pass, and this one would raise at its next forward. So what is missing is given
a gradient of zeros at the end of the backward pass, which the reducer takes for its own, and the round ends everywhere.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn

from ddpcheck.gather.autograd.autograd_graph import at_end_of_backward, gradient_node, walk_graph, will_be_reached
from ddpcheck.monitor.forward_snapshot import Snapshot
from ddpcheck.monitor.module_hooks import UnpickledHook
from ddpcheck.recipe.pytree import tree_leaves

_FORWARDS_KEPT = 2
_DEPTH = 3
_NOTHING: Set[int] = frozenset()


class Listener(Protocol):
    """Who is told of rounds."""

    def beginning(self, number: int) -> None:
        """A forward of a round is about to run, and no backward pass has."""

    def returned(self, number: int, output: Any) -> None:
        """A forward with gradients has returned `output`, in a round or under `no_sync`."""

    def passed(self, number: int, tensors: Sequence[torch.Tensor], output: Any) -> None:
        """A forward of the round has returned `output`, with these tensors in it."""

    def unsynchronised(self) -> None:
        """A forward is about to run after which DDP does not average."""

    def unreduced(self) -> None:
        """The backward pass of such a forward begins."""

    def starting(self, number: int) -> None:
        """The first gradient of a backward pass has arrived at what the forward returned."""

    def missing(self, number: int, names: Sequence[str]) -> None:
        """These parameters have no part in the round; zeros are about to be reduced in their place."""

    def unexpected(self, number: int, names: Sequence[str]) -> None:
        """Under `static_graph`, these take part although they had no part in the first round: DDP is about to raise."""

    def unpaired(self, number: int) -> None:
        """A backward pass has ended that follows no forward of its own."""

    def finished(self, number: int, absent: frozenset[str], lacking: frozenset[str]) -> None:
        """The gradients of the round are averaged, without those `absent`; DDP has waited for those `lacking`."""


class StepTracker:
    """The rounds of one wrapper on one rank.

    Attributes:
        number: Of the round that is under way or comes next, counted from 0.
        names: Of the parameters that the wrapper synchronises, in their order.
        parameters: These.
        snapshot: Of the last forward; `None` where it cannot be run again.
        unreduced: Indices of parameters whose `.grad` has what backward passes have added since the last reduction.
        asks_parameters: Whether backward passes are heard of from parameters too, which costs a hook on each of them.
    """

    def __init__(self, wrapper: nn.parallel.DistributedDataParallel, listener: Listener) -> None:
        ignored = set(getattr(wrapper, "parameters_to_ignore", ()))
        mine = {n: p for n, p in wrapper.module.named_parameters() if p.requires_grad and n not in ignored}
        self.number = 0
        self.names = list(mine)
        self.parameters = list(mine.values())
        self.snapshot: Snapshot | None = None
        self._listener = listener
        self._wrapper = ref(wrapper)  # which holds this by its hooks, and is freed when nobody else holds it
        self._nodes = [gradient_node(p) for p in self.parameters]
        self._sparse = _sparse_tables(wrapper.module)
        self._tolerant = bool(wrapper.find_unused_parameters)
        self.unreduced: set[int] = set()
        self._hook = UnpickledHook(self._on_gradient)
        self._hook_unreduced = UnpickledHook(self._on_unreduced)
        self._in_unreduced = False
        self._expected: Set[int] | None = None  # under static_graph, what took part in the first round
        self._everything: Set[int] = frozenset(range(len(self.names)))
        self._left = _NOTHING
        self._prepared = self._in_backward = self._bypassing = self._unqueued = False
        self._reaches_all = False
        self._roots: deque[list[Any]] = deque(maxlen=_FORWARDS_KEPT)
        self._arrived: set[int] = set()
        self._reached: list[bool] = []
        self._waiting: list[int] = []  # what a later backward pass may still bring
        self._handles: list[Any] = []
        self._temporary: list[Any] = []
        self._asked: list[Any] = []
        self.asks_parameters = False

    def attach(self) -> None:
        """Begin to look."""
        before, after = UnpickledHook(self._before_forward), UnpickledHook(self._after_forward)
        wrapper: Any = self._wrapper()
        self._handles = [
            wrapper.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            wrapper.register_forward_hook(after),
        ]

    def detach(self) -> None:
        """Leave the wrapper as it was."""
        for handle in (*self._handles, *self._temporary, *self._asked):
            handle.remove()
        self._handles, self._temporary, self._asked = [], [], []
        self._roots.clear()
        self.snapshot = None

    # Forward

    def _before_forward(self, wrapper: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self.settle()
        self._in_backward = self._in_unreduced = False  # also where the last backward pass has raised
        if not self._prepared:
            self._roots.clear()
        if torch.is_grad_enabled() and wrapper.require_backward_grad_sync:
            self._begin()
            self.snapshot = Snapshot.take(wrapper.module, arguments, named, thorough=self.number < 1)
        elif torch.is_grad_enabled():
            self._listener.unsynchronised()

    def _begin(self) -> None:
        if len(self._left) in (0, len(self._everything)):  # no backward pass has been part of the round yet
            self._left = self._everything
            self._listener.beginning(self.number)

    def _after_forward(self, wrapper: Any, _arguments: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._listener.returned(self.number, output)
            if wrapper.require_backward_grad_sync:
                self._expect(output)
            else:
                self._follow_unreduced(output)

    def expect(self, loss: Any) -> None:
        """Take `loss` for what a forward has returned: where a framework calls backward inside of it."""
        self.snapshot = None
        self._listener.returned(self.number, loss)
        if torch.is_grad_enabled() and getattr(self._wrapper(), "require_backward_grad_sync", False):
            self._begin()
            self._expect(loss)
        else:
            self._listener.unsynchronised()
            self._follow_unreduced(loss)

    def _expect(self, output: Any) -> None:
        tensors = differentiable_tensors(output)
        self._prepared = True
        self._follow_leaves(output)
        self._listener.passed(self.number, tensors, output)
        self._roots.append([tensor.grad_fn for tensor in tensors])
        for tensor in tensors:
            tensor.register_hook(self._hook)
        if not tensors or self.asks_parameters:
            self._ask_parameters()

    def _follow_unreduced(self, output: Any) -> None:
        """Hear of the backward pass of a forward after which DDP does not average."""
        for tensor in differentiable_tensors(output):
            tensor.register_hook(self._hook_unreduced)

    def _follow_leaves(self, output: Any) -> None:
        """Hear of a backward pass that ends in what forward has returned: a loss that was made for an empty batch."""
        leaves = [leaf for leaf in _leaves_that_require_grad(output) if not isinstance(leaf, nn.Parameter)]
        if leaves and (known := self.snapshot) is not None:
            given = {id(value) for value in tree_leaves((known.arguments, known.named))}
            for leaf in leaves:
                if id(leaf) not in given:
                    leaf.register_post_accumulate_grad_hook(UnpickledHook(self._on_leaf))

    def _ask_parameters(self) -> None:
        """Hear of the backward pass from the parameters: it does not come through what forward has returned."""
        for handle in self._asked:
            handle.remove()
        self._asked = [p.register_hook(self._hook) for p in self.parameters if p.requires_grad]

    def settle(self) -> None:
        """No further backward pass will come: an optimizer steps, or the next forward begins."""
        if self._unqueued:  # the end of the backward pass could not be heard
            self._unqueued = False
            self._at_end()
        if self._waiting:
            self._waiting = []
            if self._lacking():
                self._complete()
            else:
                self._finish()

    # Backward

    def _on_unreduced(self, _gradient: torch.Tensor) -> None:
        if self._in_backward or self._in_unreduced:
            return
        reached = will_be_reached(self._nodes)
        added = {index for index in self._everything if reached is None or reached[index]}
        if added:  # and not torch.autograd.grad
            self._in_unreduced = at_end_of_backward(UnpickledHook(self._after_unreduced))
            self.unreduced |= added
            self._listener.unreduced()

    def _after_unreduced(self) -> None:
        self._in_unreduced = False

    def _on_leaf(self, _leaf: torch.Tensor) -> None:
        if self._prepared:
            self._on_gradient(_leaf, is_grad=False)

    def _on_gradient(self, _gradient: torch.Tensor, *, is_grad: bool = True) -> None:
        if self._in_backward:
            return
        self._in_backward = True
        self._unqueued = not at_end_of_backward(UnpickledHook(self._at_end))
        self._reached = will_be_reached(self._nodes) or self._reached_by_walk()
        if self._expected is not None and self._is_static():
            late = [i for i in self._everything - self._expected if self._reached[i]]
            if late:
                self._listener.unexpected(self.number, [self.names[index] for index in sorted(late)])
        self._reaches_all = all(self._reached)
        if self._reaches_all:
            self._bypassing = False
            self._listener.starting(self.number)
            return
        self._reached = [
            reached or bool(parameter.requires_grad and self._has_moved(index))
            for index, (reached, parameter) in enumerate(zip(self._reached, self.parameters, strict=True))
        ]
        self._arrived.clear()
        self._bypassing = is_grad and not any(self._reached)  # torch.autograd.grad, or all in re-entrant checkpoints
        if not self._bypassing:
            self._listener.starting(self.number)
        for index, reached in enumerate(self._reached):
            if not reached and self.parameters[index].requires_grad:
                handle = self.parameters[index].register_post_accumulate_grad_hook(self._arrival_of(index))
                self._temporary.append(handle)
        self._waiting = [] if self._bypassing else sorted(self._may_still_come())

    def _reached_by_walk(self) -> list[bool]:
        walk = walk_graph_from([root for roots in self._roots for root in roots])
        leaves = {id(leaf) for leaf in walk}
        return [id(parameter) in leaves for parameter in self.parameters]

    def _has_moved(self, index: int) -> bool:
        """Whether backward reaches the parameter by another node than the one on which DDP waits (after a cast)."""
        node = gradient_node(self.parameters[index])
        if node is self._nodes[index]:
            return False
        reached = will_be_reached([node])
        return reached is not None and reached[0]

    def _arrival_of(self, index: int) -> Any:
        return lambda _parameter: self._arrived.add(index)

    def _may_still_come(self) -> set[int]:
        """What a later backward pass may bring: it hangs on an output that has no part in this one, by itself.

        Where such an output also hangs on a parameter that is reduced now, a later pass would come too late for it.
        """
        ours = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        found: set[int] = set()
        for roots in self._roots:
            used = will_be_reached(roots) or [True] * len(roots)
            if self.snapshot is not None and roots is self._roots[-1]:
                self.snapshot.used = tuple(index for index, yes in enumerate(used) if yes)
            for root, yes in zip(roots, used, strict=True):
                if not yes:
                    below = {ours[id(leaf)] for leaf in walk_graph_from([root]) if id(leaf) in ours}
                    if not any(self._reached[index] or index not in self._left for index in below):
                        found |= below
        return found

    def _at_end(self) -> None:
        self._in_backward = False
        self._roots.clear()
        for handle in (*self._temporary, *self._asked):
            handle.remove()
        self._temporary, self._asked = [], []
        if self._bypassing and not self._arrived:
            return
        if not self._prepared:
            self._listener.unpaired(self.number)
            return
        if self._reaches_all:  # the healthy step, at no cost for each parameter
            self._left, self._waiting = _NOTHING, []
        else:
            self._left -= {index for index, reached in enumerate(self._reached) if reached} | self._arrived
            self._waiting = [index for index in self._waiting if index in self._left]
        self._arrived.clear()
        if self._waiting:
            return
        if self._lacking():
            self._complete()
        else:
            self._after_reduction(2 if self._is_static() else 1)

    def _after_reduction(self, more: int) -> None:
        """DDP ends its reduction in a callback, under static_graph in one of a callback: come after it."""
        if not (more and at_end_of_backward(UnpickledHook(partial(self._after_reduction, more - 1)))):
            self._finish()

    def _is_static(self) -> bool:
        return bool(getattr(self._wrapper(), "static_graph", False))  # which can be set after wrapping

    def _lacking(self) -> Set[int]:
        """What DDP waits for, and will not get."""
        if self._tolerant:
            return _NOTHING
        if self._is_static():
            return self._left & self._expected if self._expected is not None else _NOTHING
        return self._left

    def _complete(self) -> None:
        lacking = sorted(self._lacking())
        self._listener.missing(self.number, [self.names[index] for index in lacking])
        parameters = [self.parameters[index] for index in lacking]
        with _thawed(parameters), torch.enable_grad():
            torch.autograd.backward(parameters, [self._zeros(parameter) for parameter in parameters])
        self._finish()

    def _zeros(self, parameter: torch.Tensor) -> torch.Tensor:
        if id(parameter) not in self._sparse:
            return torch.zeros_like(parameter)
        indices = torch.empty((1, 0), dtype=torch.long, device=parameter.device)
        return torch.sparse_coo_tensor(indices, parameter.detach()[:0], parameter.shape)

    def _finish(self) -> None:
        number, left, lacking = self.number, self._left, self._lacking()
        if self._expected is None:
            self._expected = self._everything - left
        self.number += 1
        self._left, self._prepared = _NOTHING, False
        self.unreduced.clear()
        self._listener.finished(number, self._names_of(left), self._names_of(lacking))

    def _names_of(self, indices: Iterable[int]) -> frozenset[str]:
        return frozenset(self.names[index] for index in indices)


def differentiable_tensors(output: Any) -> list[torch.Tensor]:
    """The tensors in what a forward returned through which a gradient can come; objects are looked into."""
    if isinstance(output, torch.Tensor):  # as a rule: no need to look into it
        return [] if output.grad_fn is None else [output]
    return [tensor for tensor in _tensors(output) if tensor.grad_fn is not None]


def _leaves_that_require_grad(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output] if output.requires_grad and output.grad_fn is None else []
    return [tensor for tensor in _tensors(output) if tensor.requires_grad and tensor.grad_fn is None]


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    pending = [(output, 0)]
    while pending:
        value, depth = pending.pop()
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                yield leaf
            elif depth < _DEPTH and not isinstance(leaf, nn.Module | type):
                with contextlib.suppress(Exception):  # no attributes, or an object that does not like to be asked
                    pending.append((list(vars(leaf).values()), depth + 1))


def walk_graph_from(nodes: Iterable[Any]) -> tuple[torch.Tensor, ...]:
    """The leaves behind graph nodes."""
    return walk_graph([], nodes=nodes).leaves


def _sparse_tables(module: nn.Module) -> set[int]:
    """The weights whose gradients are sparse, as DDP finds them."""
    return {
        id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
    }


@contextlib.contextmanager
def _thawed(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let those that were frozen after wrapping receive a gradient, and have none afterwards."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
            parameter.grad = None
