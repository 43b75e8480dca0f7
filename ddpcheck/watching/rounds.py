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

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddpcheck.errors import FindingsError
from ddpcheck.graph import at_end_of_backward, gradient_node, walk_graph, will_be_reached
from ddpcheck.nests import iter_leaves
from ddpcheck.watching.snapshot import Snapshot

_FORWARDS_KEPT = 2
_DEPTH = 3
_NOTHING: Set[int] = frozenset()


class Listener(Protocol):
    """Who is told of rounds."""

    def beginning(self, number: int) -> None:
        """A forward of a round is about to run, and no backward pass has."""

    def passed(self, number: int, tensors: Sequence[torch.Tensor], output: Any) -> None:
        """A forward of the round has returned `output`, with these tensors in it."""

    def unsynchronised(self) -> None:
        """A forward is about to run after which DDP does not average."""

    def starting(self, number: int) -> None:
        """The first gradient of a backward pass has arrived at what the forward returned."""

    def missing(self, number: int, names: Sequence[str]) -> None:
        """These parameters have no part in the round; zeros are about to be reduced in their place."""

    def unpaired(self, number: int) -> None:
        """A backward pass has ended that follows no forward of its own."""

    def finished(self, number: int, absent: frozenset[str]) -> None:
        """The gradients of the round are averaged, without those `absent`."""


class StaysBehind:
    """A method as a hook that stays behind when the module it hangs on is pickled or copied."""

    def __init__(self, method: Any) -> None:
        self.method = method

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            _not_compiled(self.method, args, kwargs)
        else:  # to ask costs less than to go through what the compiler leaves alone
            _plainly(self.method, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing_hook, ()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _not_compiled(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Call `method`; the compiler of a wrapper leaves the call as it is, and compiles what is before and after it."""
    _plainly(method, *args, **kwargs)


def _plainly(method: Any, *args: Any, **kwargs: Any) -> None:
    """Call `method`; what it has found is raised without the frames in which it was found."""
    try:
        method(*args, **kwargs)
    except FindingsError as error:
        raise error.with_traceback(None) from None


def is_ours(hook: object) -> bool:
    """Whether a hook of a module was put there to follow its rounds."""
    return isinstance(hook, StaysBehind)


def _nothing_hook() -> Any:
    return _nothing


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


class Rounds:
    """The rounds of one wrapper on one rank.

    Attributes:
        number: Of the round that is under way or comes next, counted from 0.
        names: Of the parameters that the wrapper synchronises, in their order.
        parameters: These.
        snapshot: Of the last forward; `None` where it cannot be run again.
    """

    def __init__(self, wrapper: nn.parallel.DistributedDataParallel, listener: Listener) -> None:
        ignored = set(getattr(wrapper, "parameters_to_ignore", ()))
        mine = {n: p for n, p in wrapper.module.named_parameters() if p.requires_grad and n not in ignored}
        self.number = 0
        self.names = list(mine)
        self.parameters = list(mine.values())
        self.snapshot: Snapshot | None = None
        self._listener = listener
        self._wrapper = wrapper
        self._nodes = [gradient_node(p) for p in self.parameters]
        self._sparse = _sparse_tables(wrapper.module)
        self._tolerant = bool(wrapper.find_unused_parameters)
        self._hook = StaysBehind(self._on_gradient)
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
        self._commit_handle: Any = None

    @property
    def under_way(self) -> bool:
        """Whether backward passes of the round have been, and may still come."""
        return bool(self._waiting) or self._unqueued

    def attach(self) -> None:
        """Begin to look."""
        before, after = StaysBehind(self._before_forward), StaysBehind(self._after_forward)
        self._handles = [
            self._wrapper.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            self._wrapper.register_forward_hook(after),
        ]

    def detach(self) -> None:
        """Leave the wrapper as it was."""
        for handle in (*self._handles, *self._temporary, self._commit_handle):
            if handle is not None:
                handle.remove()
        self._handles, self._temporary, self._commit_handle = [], [], None
        self._roots.clear()
        self.snapshot = None

    # Forward

    def _before_forward(self, wrapper: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if self._waiting or self._unqueued:
            self._commit()
        self._in_backward = False  # also where the last backward pass has raised
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
        if torch.is_grad_enabled() and wrapper.require_backward_grad_sync:
            self._expect(output)

    def expect(self, loss: Any) -> None:
        """Take `loss` for what a forward has returned: where a framework calls backward inside of it."""
        self._begin()
        self.snapshot = None
        self._expect(loss)

    def _expect(self, output: Any) -> None:
        tensors = differentiable_tensors(output)
        self._prepared = True
        self._listener.passed(self.number, tensors, output)
        self._roots.append([tensor.grad_fn for tensor in tensors])
        for tensor in tensors:
            tensor.register_hook(self._hook)

    # Backward

    def _on_gradient(self, _gradient: torch.Tensor) -> None:
        if self._in_backward:
            return
        self._in_backward = True
        self._unqueued = not at_end_of_backward(partial(_plainly, self._at_end))
        if self._unqueued:
            self._await_commit()
        self._reached = will_be_reached(self._nodes) or self._reached_by_walk()
        self._reaches_all = all(self._reached)
        if self._reaches_all:
            self._bypassing = False
            self._listener.starting(self.number)
            return
        self._reached = [
            reached or bool(parameter.requires_grad and self._has_moved(index))
            for index, (reached, parameter) in enumerate(zip(self._reached, self.parameters, strict=True))
        ]
        self._bypassing = not any(self._reached)  # torch.autograd.grad, of something else than parameters
        if self._bypassing:
            return
        self._listener.starting(self.number)
        self._arrived.clear()
        for index, reached in enumerate(self._reached):
            if not reached and self.parameters[index].requires_grad:
                handle = self.parameters[index].register_post_accumulate_grad_hook(self._arrival_of(index))
                self._temporary.append(handle)
        self._waiting = sorted(self._may_still_come())

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
        for handle in self._temporary:
            handle.remove()
        self._temporary = []
        if self._bypassing:
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
            self._await_commit()
        elif self._lacking():
            self._complete()
        else:
            self._after_reduction(2 if self._is_static() else 1)

    def _after_reduction(self, more: int) -> None:
        """DDP ends its reduction in a callback, under static_graph in one of a callback: come after it."""
        if not (more and at_end_of_backward(partial(_plainly, self._after_reduction, more - 1))):
            self._finish()

    def _await_commit(self) -> None:
        if self._commit_handle is None:
            self._commit_handle = register_optimizer_step_pre_hook(StaysBehind(self._commit))

    def _is_static(self) -> bool:
        return bool(getattr(self._wrapper, "static_graph", False))  # which can be set after wrapping

    def _lacking(self) -> Set[int]:
        """What DDP waits for, and will not get."""
        if self._tolerant:
            return _NOTHING
        if self._is_static():
            return self._left & self._expected if self._expected is not None else _NOTHING
        return self._left

    def _commit(self, *_optimizer: Any) -> None:
        """No further backward pass will come: an optimizer steps, or the next forward begins."""
        if self._commit_handle is not None:
            self._commit_handle.remove()
            self._commit_handle = None
        if self._unqueued:  # the end of the backward pass could not be heard
            self._unqueued = False
            self._at_end()
        if self._waiting:
            self._waiting = []
            if self._lacking():
                self._complete()
            else:
                self._finish()

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
        number, left = self.number, self._left
        if self._expected is None:
            self._expected = self._everything - left
        self.number += 1
        self._left, self._prepared = _NOTHING, False
        self._listener.finished(number, frozenset(self.names[index] for index in left))


def differentiable_tensors(output: Any) -> list[torch.Tensor]:
    """The tensors in what a forward returned through which a gradient can come; objects are looked into."""
    if isinstance(output, torch.Tensor):  # as a rule: no need to look into it
        return [] if output.grad_fn is None else [output]
    found: list[torch.Tensor] = []
    pending = [(output, 0)]
    while pending:
        value, depth = pending.pop()
        for leaf in iter_leaves(value):
            if isinstance(leaf, torch.Tensor):
                if leaf.grad_fn is not None:
                    found.append(leaf)
            elif depth < _DEPTH and not isinstance(leaf, nn.Module | type):
                with contextlib.suppress(Exception):  # no attributes, or an object that does not like to be asked
                    pending.append((list(vars(leaf).values()), depth + 1))
    return found


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
