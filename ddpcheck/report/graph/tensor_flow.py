"""Data flow between modules in a forward pass: who makes a tensor, who reads it, and where gradient is lost."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ddpcheck.findings.evidence.parameters import PathEnd
from ddpcheck.findings.exception_origin import passes_on
from ddpcheck.findings.source_lines import user_location
from ddpcheck.gather.autograd.autograd_graph import WALK_LIMIT
from ddpcheck.gather.autograd.gradient_paths import LEAVES_TORCH, TensorRecorder, cut_reason, function_name
from ddpcheck.recipe.pytree import tree_tensors

Place = tuple[str | None, int]
"""A module's path (`None`: the loss function) and the part of its forward, counted by the calls that lie between."""

INPUT: Place = ("input", -1)


@dataclass(slots=True)
class _Made:
    """The origin of a tensor.

    Attributes:
        place: Where; `None` for what a stop made of a leaf.
        stop: The stop that lies behind it, if one does.
        off: Whether it was made from what requires grad while autograd was off.
        after: The stops on its way since gradient was last recorded.
    """

    place: Place | None
    stop: int | None = None
    off: bool = False
    after: frozenset[int] = frozenset()


@dataclass(slots=True)
class Stop:
    """A place where a path ends, as it was met in the forward pass.

    Attributes:
        module: The module that was at work.
        sources: The places whose results end here.
        dead: What goes in, and requires grad (kept only when asked to).
        alive: What comes of it later, and requires grad again (kept only when asked to).
    """

    module: str | None
    sources: list[Place] = field(default_factory=list)
    dead: list[torch.Tensor] = field(default_factory=list)
    alive: list[torch.Tensor] = field(default_factory=list)


@dataclass(slots=True)
class _Frame:
    module: str | None
    registered: str = ""  # the innermost registered module around it
    part: int = 0


class FlowRecorder(TensorRecorder):
    """While active, follows every tensor from the module that made it to those that read it.

    It is given the identities of the modules that are registered, and the tensors of the batch (`inputs`).

    Attributes:
        places: What was called in each place, in order of execution.
        flows: Which place reads what another made: "gradient", "values", or "off" where autograd was switched off.
        reads: The places that read each leaf that requires grad, by identity.
        leaves: Those leaves.
        stops: What was met of the `ends` it was given, by their index.
        stop_edges: From a stop to the places that read what comes out of it.
        calls: How often each module's forward ran.
        owners: By identity, each node of the autograd graph, and the module in which it was made (filled only while
            `keeps`); while a node is kept, nothing else gets its identity.
        ends: Where paths are known to end.
        names: Paths of modules by identity, also of those that are held without being registered.
        keeps: Whether tensors are kept and their nodes looked at; ends when there are too many to be looked at.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        registered: Collection[int],
        inputs: Iterable[torch.Tensor],
        ends: Sequence[PathEnd] = (),
        *,
        keep: bool = False,
    ) -> None:
        super().__init__()
        self.places: dict[Place, Counter[str]] = {}
        self.flows: dict[tuple[Place, Place], set[str]] = {}
        self.reads: dict[int, dict[Place, None]] = {}
        self.leaves: dict[int, torch.Tensor] = {}
        self.stops: dict[int, Stop] = {}
        self.stop_edges: dict[tuple[int, Place], None] = {}
        self.calls: Counter[str] = Counter()
        self.owners: dict[int, tuple[Any, str | None]] = {}
        self.keeps = keep
        self.names = names
        self._registered = registered
        self._known.update({tensor: _Made(INPUT) for tensor in inputs})
        self.ends = list(ends)
        self._frames = [_Frame(None)]
        self._revived: dict[Place, None] = {}

    # Modules

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, value, trace)
        pending = list(self._revived)
        while pending:
            place = pending.pop()
            for (source, target), kinds in self.flows.items():
                if target == place and "off" in kinds and "gradient" not in kinds:
                    kinds.add("gradient")
                    pending.append(source)

    def _enter_module(self, module: nn.Module, _inputs: Any) -> None:
        around = self._frames[-1]
        name = self.names.get(id(module))
        if name is None:  # what it computes counts as done by the module around it
            self._frames.append(around)
            return
        self.calls[name] += 1
        self._frames.append(_Frame(name, name if id(module) in self._registered else around.registered))

    def _leave_module(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        frame = self._frames.pop()
        unseen = [t for t in tree_tensors(output) if t not in self._known and id(t) not in self.leaves]
        if unseen:  # made by what no Python function shows, as in a scripted module
            place = (frame.module, frame.part)
            self.places.setdefault(place, Counter())
            self._read(place, list(tree_tensors((args, kwargs))), None)
            for tensor in unseen:
                self._known[tensor] = _Made(place)
        self._frames[-1].part += id(module) in self.names

    # Functions

    @passes_on
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = list(tree_tensors((args, kwargs)))
        required = [tensor.requires_grad for tensor in inputs]
        result = func(*args, **kwargs)
        if inputs:
            self._record(function_name(func), args, kwargs, inputs, required, result)
        return result

    def _record(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: Any,
        inputs: list[torch.Tensor],
        required: list[bool],
        result: Any,
    ) -> None:
        outputs = list(tree_tensors(result))
        if name == "__setitem__" and isinstance(args[0], torch.Tensor):
            outputs.append(args[0])
        outputs += tree_tensors(kwargs.get("out"))
        if not outputs and name not in LEAVES_TORCH:
            return
        frame = self._frames[-1]
        place = (frame.module, frame.part)
        lost = any(required) and not any(output.requires_grad for output in outputs)
        stop = self._stop_here(name, lost, outputs)
        cut = stop if stop is not None and self.ends[stop].cause == "cut" else None
        before = [self._known.get(tensor) for tensor in inputs]
        after = frozenset(s for made in before if made is not None for s in made.after)
        if stop is not None:
            met = self.stops.setdefault(stop, Stop(frame.module))
            if self.ends[stop].cause == "unreachable":
                met.sources, met.dead = [place], [t for t in outputs if self.keeps and t.requires_grad]
            else:
                after |= {stop}
                if self.keeps:
                    met.dead += [t for t, grad in zip(inputs, required, strict=True) if grad]
        if cut is not None and self.ends[cut].reason.startswith((f"{name.strip('_')}()", f".{name}")):
            met.sources += [made.place for made in before if made is not None and made.place not in (None, INPUT)]
            for output in outputs:  # the stop stands for the operation
                self._known[output] = _Made(None, stop=cut, after=after)
            frame.part += 1
            return
        if not outputs:
            return
        self.places.setdefault(place, Counter())[name.strip("_")] += 1
        self._read(place, inputs, stop)
        off = not torch.is_grad_enabled() and (any(required) or any(made is not None and made.off for made in before))
        for output in outputs:
            grad = output.requires_grad
            self._known[output] = _Made(place, None if grad else cut, off, frozenset() if grad else after)
            in_place = name.endswith("_") and (not name.endswith("__") or name.startswith("__i"))  # no __getitem__
            if output._is_view() and output._base is not None and in_place:
                self._known[output._base] = self._known[output]
            if self.keeps and output.grad_fn is not None:
                self.owners.setdefault(id(output.grad_fn), (output.grad_fn, frame.module))
                self.keeps = len(self.owners) < WALK_LIMIT
                for index in after:
                    self.stops[index].alive.append(output)
        frame.part += cut is not None

    def _read(self, place: Place, tensors: Iterable[torch.Tensor], stop: int | None) -> None:
        for tensor in tensors:
            made = self._known.get(tensor)
            if tensor.is_leaf and tensor.requires_grad:
                self.leaves[id(tensor)] = tensor
                self.reads.setdefault(id(tensor), {})[place] = None
            if made is None:
                continue
            if self.keeps and made.place is not None and tensor.grad_fn is not None:
                # of a custom Function, whose call is not seen
                self.owners.setdefault(id(tensor.grad_fn), (tensor.grad_fn, made.place[0]))
            if made.stop is not None and made.stop != stop:
                self.stops[made.stop].sources += [] if made.place is None else [made.place]
                self.stop_edges[made.stop, place] = None
            elif made.place is not None and made.place != place:
                kind = "gradient" if tensor.requires_grad else "off" if made.off else "values"
                self.flows.setdefault((made.place, place), set()).add(kind)
            if made.off and made.place is not None and tensor.requires_grad:
                self._revived[made.place] = None  # what a custom Function returned was made while autograd was off

    def maker_of(self, tensor: torch.Tensor) -> Place | None:
        """The place that made `tensor`, as far as it was seen."""
        made = self._known.get(tensor)
        return made.place if made is not None else None

    def _stop_here(self, name: str, lost: bool, outputs: Sequence[torch.Tensor]) -> int | None:
        ending = any(end.cause == "unreachable" and end.reason == f"{name.strip('_')}()" for end in self.ends)
        if not self.ends or not (lost or outputs == [] or ending):
            return None
        where, module = user_location(sys._getframe(2)), self._frames[-1].registered
        reason = f"{name.strip('_')}()" if outputs else f"{name.strip('_')}(), which leaves torch"
        if outputs and lost:
            reason = cut_reason(name, outputs[0])
        found = [(end.location, end.module, end.reason) for end in self.ends]
        return found.index((where, module, reason)) if where and (where, module, reason) in found else None
