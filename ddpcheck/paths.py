"""Where a parameter's path to the loss ends: a recorded replay of the forward pass.

It is only paid for when something is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils.weak import WeakIdKeyDictionary

from ddpcheck.evidence import PathEnd
from ddpcheck.findings import Location
from ddpcheck.locate import user_location

WALK_LIMIT = 20_000
"""Nodes that `walk_graph` looks at. Python objects for graph nodes live as long as the C++ graph, and freeing a chain
of 50,000 walked nodes recurses past the default stack of 8 MB and ends the process; 30,000 are fine (measured on
torch 2.13)."""


@dataclass(frozen=True, slots=True)
class _Event:
    reason: str
    location: Location | None
    module: str


_Taint = dict[int, "_Event | None"]  # parameter index -> the event that cut it, None while its path is whole


_LEAVES_TORCH = frozenset(
    {"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__", "__index__", "__complex__"}
)


_READS_NO_VALUE = frozenset(
    {"zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "randint_like", "full_like"}
    | {"new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "is_floating_point", "is_complex"}
)


def _tensors_in(nest: Any) -> Iterator[torch.Tensor]:
    pending = [nest]
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            pending.extend(reversed(value))
        elif isinstance(value, dict):
            pending.extend(reversed(list(value.values())))


class PathRecorder(TorchFunctionMode):
    """While active, follows what the `suspects` make through the forward pass, by value and not only by graph.

    It sees torch's Python functions (so `.data`, which no dispatcher sees, but not the inside of one function), and
    keeps for every tensor which suspects' values went into it and, where the path was cut on the way, where.
    """

    def __init__(self, module: nn.Module, suspects: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._index = {id(suspect): index for index, suspect in enumerate(suspects)}
        self._alive = list(suspects)
        self._module_names = {id(submodule): name for name, submodule in module.named_modules()}
        self._modules: list[str] = [""]
        self._taints: Any = WeakIdKeyDictionary()  # tensor -> (taint, whether it required grad then)
        self._written: dict[int, _Taint] = {}  # storage -> taint written in place through any view of it
        self._last_use: dict[int, _Event] = {}
        self._left_torch: dict[int, _Event] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> PathRecorder:
        from torch.nn.modules import module as hooks

        def enter(module: nn.Module, _inputs: Any) -> None:
            self._modules.append(self._module_names.get(id(module), self._modules[-1]))

        def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
            self._modules.pop()

        self._hooks = [
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave, always_call=True),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, value, trace)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = list(_tensors_in((args, kwargs)))
        before = self._merged(inputs)
        result = func(*args, **kwargs)
        if before:
            self._spread(func, args, kwargs, before, result)
        return result

    def _taint_of(self, tensor: torch.Tensor) -> _Taint:
        taint: _Taint = {}
        entry = self._taints.get(tensor)
        if entry is not None:
            known, required_grad = entry
            revived = not tensor.is_leaf and not required_grad  # the output of a custom Function
            taint = {index: None if revived else event for index, event in known.items()}
        for index, event in self._written.get(_storage_key(tensor), {}).items():
            taint.setdefault(index, event)
        if not tensor.requires_grad:
            generic = _Event("a path that autograd does not record", None, self._modules[-1])
            taint = {index: event or generic for index, event in taint.items()}
        own = self._index.get(id(tensor))
        if own is not None:
            taint[own] = None
        return taint

    def _merged(self, tensors: Iterable[torch.Tensor]) -> _Taint:
        merged: _Taint = {}
        for tensor in tensors:
            for index, event in self._taint_of(tensor).items():
                if index not in merged or event is None:
                    merged[index] = event
        return merged

    def _spread(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], before: _Taint, result: Any
    ) -> None:
        name = _function_name(func)
        if name in _READS_NO_VALUE:
            return
        outputs = list(_tensors_in(result))
        in_place = (
            name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_DUNDERS
        )
        written = [args[0]] if in_place and args and isinstance(args[0], torch.Tensor) else []
        written += list(_tensors_in(kwargs.get("out")))
        if not outputs and not written:
            if name in _LEAVES_TORCH:
                event = self._event(f"{name.strip('_')}(), which leaves torch")
                for index in before:
                    self._left_torch[index] = event
                    self._last_use[index] = event
            return
        event = self._event(f"{name.strip('_')}()" if name != "data" else ".data")
        for index in before:
            self._last_use[index] = event
        for output in (*outputs, *written):
            cut = None if output.requires_grad else self._event(_cut_reason(name, output))
            taint = {index: known if known is not None else cut for index, known in before.items()}
            self._taints[output] = (taint, output.requires_grad)
        for target in written:
            taint = dict(before)
            self._written.setdefault(_storage_key(target), {}).update(taint)

    def _event(self, reason: str) -> _Event:
        return _Event(reason, user_location(sys._getframe(2)), self._modules[-1])

    def explain(self, losses: Iterable[torch.Tensor], index: int, *, changes_loss: Callable[[int], bool]) -> PathEnd:
        """Why the suspect `index` does not contribute to `losses`, to be asked after the forward pass.

        Args:
            losses: What the forward pass returned as its loss or losses.
            index: Position among the suspects.
            changes_loss: Whether another value of that suspect changes the loss; asked only where values left torch.
        """
        use = self._last_use.get(index)
        if use is None:
            return PathEnd("unused")
        taint = self._merged(losses)
        cut = taint.get(index)
        if cut is None and index not in taint and index in self._left_torch and changes_loss(index):
            cut = self._left_torch[index]
        if cut is not None:
            return PathEnd("cut", cut.reason, cut.location, cut.module)
        return PathEnd("unreachable", use.reason, use.location, use.module)


_IN_PLACE_DUNDERS = frozenset(
    {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__ipow__", "__iand__", "__ior__", "__ixor__"}
)


def _storage_key(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse and wrapper tensors have none
        return id(tensor)


def _function_name(func: Callable[..., Any]) -> str:
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        resolved = resolve_name(func) or ""
        return resolved.split(".")[-2] if resolved.count(".") >= 2 else name
    return name


def _cut_reason(name: str, output: torch.Tensor) -> str:
    if name == "data":
        return ".data"
    if name in ("detach", "detach_"):
        return f"{name}()"
    if torch.is_inference_mode_enabled():
        return "torch.inference_mode()"
    if not torch.is_grad_enabled():
        return "torch.no_grad()"
    if not (output.is_floating_point() or output.is_complex()):
        return f"{name.strip('_')}(), which is not differentiable"
    return f"{name.strip('_')}(), which has no derivative"


@dataclass(slots=True)
class Explainer:
    """Replays a forward pass to say why parameters do not contribute.

    Attributes:
        module: The module whose parameters are in question.
        forward: Runs the forward pass and the loss afresh, under the same random numbers, and returns the losses.
        prepare: Puts the module into the state in which `forward` begins.
        once: Whether `forward` may run no more than once.
    """

    module: nn.Module
    forward: Callable[[], Sequence[torch.Tensor]]
    prepare: Callable[[], None] = lambda: None
    once: bool = False

    def explain(self, suspects: Mapping[str, torch.Tensor]) -> dict[str, PathEnd]:
        """Where the path of each of `suspects` (by name) ends."""
        tensors = list(suspects.values())
        self.prepare()
        with PathRecorder(self.module, tensors) as recorder:
            losses = list(self.forward())
        value = _values(losses)

        def changes_loss(index: int) -> bool:
            if self.once:
                return False
            tensor = tensors[index]
            self.prepare()
            saved = tensor.detach().clone()
            with torch.no_grad():
                tensor.add_(torch.ones_like(tensor) * 0.1 + 0.1 * tensor.abs())
            try:
                return _values(self.forward()) != value
            finally:
                with torch.no_grad():
                    tensor.copy_(saved)

        return {name: recorder.explain(losses, index, changes_loss=changes_loss) for index, name in enumerate(suspects)}


def _values(losses: Iterable[torch.Tensor]) -> list[float]:
    return [float(loss.detach().double().sum()) for loss in losses]
