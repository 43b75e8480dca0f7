"""Where a parameter's path to the loss ends: a recorded replay of the forward pass.

It is only paid for when something is missing.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ddpcheck.findings.evidence.steps import PathEnd
from ddpcheck.findings.figures import PathStep
from ddpcheck.findings.program_blocks import omitted_at
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import defined_at, frames_from, user_location
from ddpcheck.findings.tracebacks import passes_on
from ddpcheck.gather.autograd.autograd_graph import functions_before
from ddpcheck.gather.collectives.collective_log import replace_functions
from ddpcheck.gather.patching import Patch, accompanied, patched
from ddpcheck.recipe.pytree import tree_tensors

_MOST_STEPS = 4  # at each end of a path


@dataclass(slots=True)
class OperationPath:
    """The operations from a suspect to a tensor: how many, the first and the last of them."""

    length: int = 0
    first: tuple[PathEnd, ...] = ()
    last: tuple[PathEnd, ...] = ()

    def to(self, use: PathEnd) -> OperationPath:
        """The path that goes on with `use`."""
        first = (*self.first, use) if self.length < _MOST_STEPS else self.first
        return OperationPath(self.length + 1, first, (*self.last, use)[-_MOST_STEPS:])

    def told_in(self, end: PathEnd) -> PathEnd:
        """`end` with these operations."""
        more = min(self.length - len(self.first), _MOST_STEPS)
        both = (*self.first, *self.last[len(self.last) - more :])
        steps = tuple(PathStep(one.reason, one.module, one.location) for one in both)
        return replace(end, steps=steps, left_out=self.length - len(steps))


_Taint = dict[int, PathEnd | None]  # parameter index -> what cut its path, None while that is whole


LEAVES_TORCH = frozenset(
    {"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__", "__index__", "__complex__"}
    | {"__format__"}
)
"""Functions that make a Python or numpy value of a tensor."""


_READS_NO_VALUE = frozenset(
    {"zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "randint_like", "full_like"}
    | {"new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "is_floating_point", "is_complex"}
)
"""Functions that ask their first tensor for its shape, dtype or device only."""

_NO_OPERATION = OperationPath()

_FILLS = {
    **{"all_gather": 0, "all_gather_into_tensor": 0, "all_gather_single": 0, "all_to_all": 0, "all_to_all_single": 0},
    **{"reduce_scatter": 0, "reduce_scatter_tensor": 0, "reduce_scatter_single": 0, "gather": 1},
}
"""Collectives that write what others are given into tensors of their own: the place of these among the arguments."""


class TensorRecorder(TorchFunctionMode):
    """While active, `_enter_module` and `_leave_module` are called around every forward of a module.

    What calls torch's Python functions is met in `__torch_function__`; what is known of a tensor is kept in `_known`
    for as long as the tensor lives.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: Any = WeakIdKeyDictionary()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        from torch.nn.modules import module as hooks

        for handle in (
            hooks.register_module_forward_pre_hook(self._enter_module),
            hooks.register_module_forward_hook(self._leave_module, always_call=True),
        ):
            self._stack.enter_context(handle)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stack.close()

    def _enter_module(self, module: nn.Module, _inputs: Any) -> None:
        raise NotImplementedError

    def _leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        raise NotImplementedError


class PathRecorder(TensorRecorder):
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
        self.called: set[nn.Module] = set()
        # `_known`: taint of a tensor, and whether it required grad then
        self._written: dict[int, _Taint] = {}  # storage -> taint written in place through any view of it
        self._paths: Any = WeakIdKeyDictionary()  # tensor -> by suspect, how its value came there
        self._last_paths: dict[int, OperationPath] = {}  # to the last use
        self._cut_paths: dict[tuple[int, PathEnd], OperationPath] = {}
        self._left_torch: dict[int, PathEnd] = {}
        self._region: Location | None = None  # where gradients were switched off last

    def __enter__(self) -> Self:
        self._stack.enter_context(_after(nn.Parameter, "__new__", self._on_parameter))
        self._stack.enter_context(_after(torch.inference_mode, "__enter__", lambda *_: self._note_region()))
        self._stack.enter_context(replace_functions(_FILLS, self._noticed))
        self._stack.enter_context(_after(torch, "normal", self._on_normal))
        return super().__enter__()

    def _enter_module(self, module: nn.Module, _inputs: Any) -> None:
        self.called.add(module)
        self._modules.append(self._module_names.get(id(module), self._modules[-1]))

    def _leave_module(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        self._modules.pop()

    def _note_region(self) -> None:
        self._region = user_location(sys._getframe(1))

    def _on_parameter(self, made: Any, _kind: Any, data: Any = None, *_more: Any, **_named: Any) -> None:
        """`nn.Parameter(tensor)` shares the tensor's memory and has no past; no mode is told of it."""
        before = self._taint_of(data) if isinstance(data, torch.Tensor) else {}
        if before and made is not data:
            use = self._event("nn.Parameter()")
            self._follow([made], before, self._go_on([data], before, use), self._event("nn.Parameter(), a new leaf"))

    def _on_normal(self, drawn: Any, *args: Any, **kwargs: Any) -> None:
        """`torch.normal`, of which no mode is told either: `torch.distributions` draws with it."""
        inputs = list(tree_tensors((args, kwargs)))
        if before := self._merged(inputs):
            self._spread(torch.normal, args, kwargs, before, inputs, drawn)

    def _noticed(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """A collective, which no mode is told of: what it fills is made of what it is given."""
        parameters = list(inspect.signature(original).parameters)

        def told(_result: Any, *args: Any, **kwargs: Any) -> None:
            given = dict(zip(parameters, args, strict=False)) | kwargs
            filled = list(tree_tensors(given.pop(parameters[_FILLS[name]], None)))
            inputs = list(tree_tensors(list(given.values())))
            if before := self._merged(inputs):
                use = self._event(f"{name}()")
                cut = self._event(f"{name}(), through which no gradient flows")
                self._follow(filled, before, self._go_on(inputs, before, use), cut)
                for output in filled:
                    self._written.setdefault(_storage_key(output), {}).update(self._known[output][0])

        made: Callable[..., Any] = accompanied(original, _afterwards(told))
        return made

    @passes_on
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch._C._set_grad_enabled and not args[0] and torch.is_grad_enabled():  # and not a block in a block
            self._note_region()
        value_of = args[1:] if function_name(func) in _READS_NO_VALUE else args
        inputs = list(tree_tensors((value_of, kwargs)))
        before = self._merged(inputs)
        result = func(*args, **kwargs)
        if before:
            self._spread(func, args, kwargs, before, inputs, result)
        return result

    def _taint_of(self, tensor: torch.Tensor) -> _Taint:
        taint: _Taint = {}
        entry = self._known.get(tensor)
        if entry is not None:
            known, required_grad = entry
            revived = not tensor.is_leaf and not required_grad  # the output of a custom Function
            taint = {index: None if revived else event for index, event in known.items()}
        for index, event in self._written.get(_storage_key(tensor), {}).items():
            taint.setdefault(index, event)
        if not tensor.requires_grad:
            generic = PathEnd("cut", "a path that autograd does not record", None, self._modules[-1])
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
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: _Taint,
        inputs: Sequence[torch.Tensor],
        result: Any,
    ) -> None:
        name = function_name(func)
        outputs = list(tree_tensors(result))
        in_place = (
            name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_DUNDERS
        )
        written = [args[0]] if in_place and args and isinstance(args[0], torch.Tensor) else []
        written += list(tree_tensors(kwargs.get("out")))
        if not outputs and not written:
            if name in LEAVES_TORCH:
                event = self._event(f"{name.strip('_')}(), which leaves torch")
                self._left_torch |= dict.fromkeys(before, event)
                self._go_on(inputs, before, event)
            return
        event = self._event(f"{name.strip('_')}()" if name != "data" else ".data")
        paths = self._go_on(inputs, before, event)
        given = {id(tensor) for tensor in tree_tensors((args, kwargs))}
        for output in (*outputs, *written):
            whole = output.requires_grad and (not output.is_leaf or id(output) in given)
            own = before
            if len(outputs) > 1 and (seen := [one for one in inputs if _storage_key(one) == _storage_key(output)]):
                own = self._merged(seen)  # a view of one of the inputs (`broadcast_tensors`) is made of that one alone
            self._follow([output], own, paths, None if whole else self._event(cut_reason(name, output)))
        for target in written:
            self._written.setdefault(_storage_key(target), {}).update(before)

    def _go_on(self, inputs: Sequence[torch.Tensor], before: _Taint, use: PathEnd) -> dict[int, OperationPath]:
        """Note that `use` reads `inputs`, with the taint `before`; returns the paths that end with it."""
        known: dict[int, OperationPath] = {}
        for tensor in reversed(inputs):
            known |= self._paths.get(tensor) or {}
            if (own := self._index.get(id(tensor))) is not None:
                known[own] = _NO_OPERATION
        longer: dict[int, OperationPath] = {}  # by identity: what many suspects have in common is made once
        paths = {}
        for index in before:  # what has no path is a view of what was written in place
            here = known.get(index) or self._last_paths.get(index, _NO_OPERATION)
            paths[index] = longer.get(id(here)) or longer.setdefault(id(here), here.to(use))
        self._last_paths |= paths
        return paths

    def _follow(
        self, outputs: Iterable[torch.Tensor], before: _Taint, paths: dict[int, OperationPath], cut: PathEnd | None
    ) -> None:
        """Note that `outputs` were made of values with the taint `before`, on `paths`, which `cut` ends, if it does."""
        for output in outputs:
            taint = {index: known if known is not None else cut for index, known in before.items()}
            self._known[output] = (taint, output.requires_grad)
            self._paths[output] = paths
        if cut is not None:
            for index, known in before.items():
                if known is None:
                    self._cut_paths.setdefault((index, cut), paths[index])

    def _event(self, reason: str) -> PathEnd:
        region = self._region if reason in (_NO_GRAD, _INFERENCE) else None
        return PathEnd("cut", reason, user_location(sys._getframe(2)), self._modules[-1], region)

    def explain(self, losses: Iterable[torch.Tensor]) -> dict[int, PathEnd]:
        """Why each suspect does not contribute to `losses`, to be asked after the forward pass."""
        taint = self._merged(losses)
        ends = {}
        for index in self._index.values():
            path, cut = self._last_paths.get(index), taint.get(index)
            if path is None:
                ends[index] = PathEnd("unused")
            elif cut is not None:
                path = self._cut_paths.get((index, cut), _NO_OPERATION)
                ends[index] = path.told_in(cut)
            else:
                ends[index] = path.told_in(replace(path.last[-1], cause="unreachable"))
        return ends

    def escape(self, index: int) -> PathEnd:
        """Where the value of a suspect was last seen that reaches the loss on a path that cannot be followed."""
        use = self._last_paths[index].last[-1]
        return self._left_torch.get(index) or replace(use, reason=f"what follows {use.reason}")


def _afterwards(told: Callable[..., None]) -> Callable[..., Generator[None, Any, None]]:
    def around(*args: Any, **kwargs: Any) -> Generator[None, Any, None]:
        result = yield
        told(result, *args, **kwargs)

    return around


def _after(owner: Any, method: str, told: Callable[..., None]) -> Patch:
    """While the block runs, tell `told` the result and the arguments of each call of a method of `owner`."""
    return patched(owner, method, _afterwards(told))


_NO_GRAD = "torch.no_grad()"
_INFERENCE = "torch.inference_mode()"
_CHECKPOINT = "a re-entrant checkpoint of which no input requires grad"


def _in_reentrant_checkpoint() -> bool:
    forwards = (frame for frame in frames_from(sys._getframe(1)) if frame.f_code.co_name == "forward")
    return any(frame.f_globals.get("__name__") == "torch.utils.checkpoint" for frame in forwards)


_IN_PLACE_DUNDERS = frozenset(
    {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__ipow__", "__iand__", "__ior__", "__ixor__"}
)


def _storage_key(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse and wrapper tensors have none
        return id(tensor)


def function_name(func: Callable[..., Any]) -> str:
    """The name of a function as a `TorchFunctionMode` meets it; of a property, that of the property."""
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        held = getattr(func, "__self__", None)  # the descriptor: one of C has a name, a `property` a function with one
        return getattr(getattr(held, "fget", held), "__name__", name)
    return name


def cut_reason(name: str, output: torch.Tensor) -> str:
    """Why `output`, just made by the function `name` of what requires grad, is not connected to it by autograd."""
    if name == "data":
        return ".data"
    if name in ("detach", "detach_"):
        return f"{name}()"
    if torch.is_inference_mode_enabled():
        return _INFERENCE
    if not torch.is_grad_enabled():
        return _CHECKPOINT if _in_reentrant_checkpoint() else _NO_GRAD
    if output.requires_grad:
        return f"{name.strip('_')}(), a new leaf"
    if not (output.is_floating_point() or output.is_complex()):
        return f"{name.strip('_')}(), which is not differentiable"
    return f"{name.strip('_')}(), which has no derivative"


COMPILED_CODE = "the code compiled by torch.compile"
_COMPILED = "torch._functorch._aot_autograd"  # private to torch: the Function of a compiled graph is of a module in it


def function_returning_none(roots: Iterable[Any], parameter: torch.Tensor) -> PathEnd:
    """The custom Function that gave None for the gradient of `parameter`, or those that may have been it."""
    functions = functions_before(roots, parameter)
    if functions and all(function.__module__.startswith(_COMPILED) for function in functions):
        return PathEnd("lost", COMPILED_CODE)
    where = defined_at(functions[0].backward) if len(functions) == 1 else None
    return PathEnd("lost", " or ".join(f"{function.__qualname__}.backward()" for function in functions), where)


@dataclass(slots=True)
class Explainer:
    """Replays a forward pass to say why parameters do not contribute."""

    module: nn.Module  # whose parameters are in question
    forward: Callable[[], Sequence[torch.Tensor]]  # the forward pass and the loss afresh, under the same random numbers
    prepare: Callable[[], None] = lambda: None  # puts the module into the state in which `forward` begins
    once: bool = False  # whether `forward` may run no more than once

    def explain(self, suspects: Mapping[str, torch.Tensor]) -> dict[str, PathEnd]:
        """Where the path of each of `suspects` (by name) ends."""
        tensors = list(suspects.values())
        self.prepare()
        with PathRecorder(self.module, tensors) as recorder:
            losses = list(self.forward())
        ends = recorder.explain(losses)
        modules = self.module.named_modules(remove_duplicate=False)
        called = {name: module for name, module in modules if module in recorder.called}
        for index, name in enumerate(suspects):
            if ends[index].cause == "unused":
                ends[index] = replace(ends[index], location=omitted_at(name, called))
        if not self.once:
            ends |= {index: recorder.escape(index) for index in self._on_hidden_ways(tensors, ends, _values(losses))}
        return {name: ends[index] for index, name in enumerate(suspects)}

    def _on_hidden_ways(
        self, tensors: Sequence[torch.Tensor], ends: Mapping[int, PathEnd], value: Sequence[float]
    ) -> Iterator[int]:
        """Parameters that reach nothing, and whose value changes the loss: through numpy, a file, shared memory.

        What has the same last use is asked about together, and all at once first: mostly there is no such way.
        """
        together: dict[PathEnd, list[int]] = {}
        for index, end in ends.items():
            if end.cause == "unreachable":
                together.setdefault(end, []).append(index)
        everyone = [index for group in together.values() for index in group]
        if not everyone or self._changes_loss([], value):  # a forward that is not even equal to itself tells nothing
            return
        if self._changes_loss([tensors[index] for index in everyone], value):
            for group in together.values():
                if len(together) == 1 or self._changes_loss([tensors[index] for index in group], value):
                    yield from group

    def _changes_loss(self, tensors: Sequence[torch.Tensor], value: Sequence[float]) -> bool:
        self.prepare()
        saved = [tensor.detach().clone() for tensor in tensors]
        with torch.no_grad():
            for tensor in tensors:  # by `data`: for autograd, which may need it in a backward pass, it stays the same
                tensor.data.add_(torch.ones_like(tensor) * 0.1 + 0.1 * tensor.abs())
        try:
            return _values(self.forward()) != list(value)
        except Exception:  # the user's code may well refuse such values
            return False
        finally:
            with torch.no_grad():
                for tensor, before in zip(tensors, saved, strict=True):
                    tensor.data.copy_(before)


def _values(losses: Iterable[torch.Tensor]) -> list[float]:
    return [float(loss.detach().double().sum()) for loss in losses]
