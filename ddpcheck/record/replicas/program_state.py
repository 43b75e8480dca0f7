"""Find state in the variables of a script: model copies, criteria, and called models."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.loss import _Loss

from ddpcheck.findings.evidence.script import LocalModel
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import (
    file_of_class,
    file_of_module,
    frames_from,
    is_user_file,
    last_assignment,
    location_of,
    variables_of,
)
from ddpcheck.gather.autograd.autograd_graph import node_of
from ddpcheck.gather.forward_hooks import OutsideOfCompiledCode, after_forward
from ddpcheck.gather.patching import Recorder
from ddpcheck.gather.state.fingerprints import fingerprints, is_dtensor, storage_address
from ddpcheck.gather.state.tensor_file import tensor_ref
from ddpcheck.recipe.pytree import tree_tensors
from ddpcheck.record.rank.wrapper_recorder import WrapperRecorder
from ddpcheck.record.recording import Recording, UnpickledHook
from ddpcheck.record.replicas.module_uses import UseRecorder
from ddpcheck.record.replicas.replica_recorder import batch_statistics
from ddpcheck.record.source.source_scope import writing_line

_MOST_OBJECTS = 4096  # objects reached from program variables
_MOST_NESTED, _MOST_HELD = 2, 16  # depth of nested containers searched for models, and items per container
_MOST_SYNCHRONIZED = 1 << 16  # max tensors whose collectives are counted
_MOST_RECORDS = 3  # max records per called module that is not a copy
_MOST_OF_A_PARAMETER = 8  # tensors in the state of a module, with buffers, per parameter
_MOST_NUMBERS, _LEAST_COSINE = 4096, 0.5  # compared elements of the largest parameter, and minimum cosine, for a copy
_FEWEST_NUMBERS = 64  # elements of a part's largest parameter, for a copy of the part
_SIMILAR_NORM = 0.7  # norm ratio; an average of two initializations is_lasting above, although the cosine may not


# Models


class StateRecorder(Recorder, subjects=("replicas",)):
    """Recorder of models in program variables that affect training, but are not trained.

    Records copies of a wrapped module or submodule (an EMA, a teacher, a target network, the best state), as modules or
    containers of parameters; criteria with buffers (a center or a queue); and other called modules (a frozen teacher).
    """

    def __init__(
        self, run: Recording, uses: UseRecorder, copied: Callable[[str, Iterable[torch.Tensor]], object]
    ) -> None:
        self._run = run
        self._uses = uses
        self._copy_found = copied  # receives the copies that are found
        self._kinds: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # "training", "evaluation", "" (no call)
        self._first_tensors: dict[str, Callable[[], Any]] = {}  # first tensor, by path of a list or dictionary
        self._synchronized: Counter[int] = Counter()  # number of collectives, by memory address of a tensor
        self._first_records: dict[str, tuple[int, LocalModel]] = {}  # first record of a copy not seen again, by path
        self._lasting_paths: set[str] = set()  # paths of containers whose first tensor stayed in the next step
        self._record_counts: Counter[str] = Counter()  # by path of a called module (no copy, no criterion)

    def record_models(self, optimizer: int, count: int, optimizer_params: Iterable[torch.Tensor]) -> None:
        """Record models in variables before step number `count`; `optimizer_params`: parameters of all optimizers."""
        steps = {*map(id, optimizer_params)}
        watched = [(watch, dict(watch.module_parameters())) for watch in self._run.watches]
        # a teacher may be wrapped for its buffers while frozen: no step of its own is compared
        watched = [(w, named) for w, named in watched if any(p.requires_grad or id(p) in steps for p in named.values())]
        wrapped: list[Mapping[str, torch.Tensor]] = []
        for watch, named in watched:
            if watch.parameters and not watch.is_sharded:
                wrapped += [watch.parameters, named] if len(named) > len(watch.parameters) else [watch.parameters]
        wrapped.sort(key=len, reverse=True)  # a module may contain another: largest first
        trained = steps | {id(p) for params in wrapped for p in params.values()}
        trained.update(id(p) for _, named in watched for p in named.values())
        seen: set[int] = set()
        parts = functools.cache(lambda: _submodule_parameters(watch for watch, _ in watched))
        self._uses.follow_wrapped()
        for path, value, location in program_variables(depth=2, nested=_MOST_NESTED) if wrapped else ():
            if id(value) in seen or not issubclass(type(value), nn.Module | dict | list):
                continue
            if isinstance(value, nn.Module) and not _accepts_hooks(value, trained):
                continue
            seen.add(id(value))
            state, is_lasting = self._copied_parameters(path, value, wrapped, parts)
            if any(node_of(tensor) is not None for tensor in state.values()):
                continue  # differentiated in an inner loop
            if state and not is_lasting:
                self._first_records[path] = id(value), self._state_entry(optimizer, count, path, value, state, location)
                state = {}
            copies = bool(state)
            if not state and isinstance(value, nn.Module):
                state = self._criterion_buffers(value) or self._constant_parameters(path, value)
            if state and not any(id(tensor) in trained for tensor in state.values()):
                if copies:
                    self._copy_found(path, state.values())
                    seen_as, first = self._first_records.pop(path, (0, None))
                    if first is not None and seen_as == id(value):  # now known to be lasting
                        self._run.add(first)
                if copies and isinstance(value, nn.Module):
                    self._uses.follow(value, path, line_of_variable(path, location))
                self._run.add(self._state_entry(optimizer, count, path, value, state, location, copies=copies))

    def _state_entry(
        self,
        optimizer: int,
        count: int,
        path: str,
        value: Any,
        state: Mapping[str, torch.Tensor],
        where: Location,
        *,
        copies: bool = True,
    ) -> LocalModel:
        used = isinstance(value, nn.Module) and bool(self._called_modules(value))
        values = fingerprints((name, tensor.detach()) for name, tensor in state.items())
        together = min(self._synchronized[storage_address(tensor)] for tensor in state.values())
        kind, line = type(value).__name__, line_of_variable(path, where)
        if not copies:
            line = next((location for name in state if (location := writing_line(value, name)) is not None), line)
        is_other = not copies and any(isinstance(tensor, nn.Parameter) for tensor in state.values())
        return LocalModel(optimizer, count, path, kind, values, copies, used, line, together, is_other)

    def count_synchronized(self, tensor: Any) -> None:
        """Count a collective that made a tensor equal on all ranks."""
        if type(tensor) in (torch.Tensor, nn.Parameter) and len(self._synchronized) < _MOST_SYNCHRONIZED:
            self._synchronized[storage_address(tensor)] += 1

    def _copied_parameters(
        self,
        path: str,
        value: Any,
        wrapped: Sequence[Mapping[str, torch.Tensor]],
        parts: Callable[[], Sequence[Mapping[str, torch.Tensor]]],
    ) -> tuple[Mapping[str, torch.Tensor], bool]:
        """Return (parameters, True if seen before) if `value` copies a wrapped module or submodule.

        A copy seen once may be temporary: weights of an inner loop, or gradients or weights created in each step.
        """
        if isinstance(value, nn.Module):
            tensors = _parameters(value)
            if not tensors or not (_shapes(tensors) in map(_shapes, wrapped) or _matches_submodule(tensors, parts())):
                return {}, False
            is_lasting = value in self._kinds
            self._recorded_use(value)
            return tensors, is_lasting
        count = dict.__len__(value) if isinstance(value, dict) else list.__len__(value)
        small = count <= _MOST_OF_A_PARAMETER * max(map(len, wrapped))
        items = list(_items(value)) if small and "grad" not in path else []
        if not items or not all(issubclass(type(item), torch.Tensor) for item in items):
            return {}, False
        first = items[0]
        last_ref, self._first_tensors[path] = self._first_tensors.get(path), tensor_ref(first)
        is_lasting = last_ref is not None and last_ref() is first
        if is_lasting:
            self._lasting_paths.add(path)
        is_lasting = is_lasting if isinstance(value, list) else path in self._lasting_paths or "." in path
        tensors, by_name = _by_name(value), isinstance(value, dict)
        for params in wrapped:
            if matched := _matching(params, tensors, by_name=by_name):
                return (matched if _may_be_weights(matched, params) else {}), is_lasting
        for params in parts():
            if (matched := _matching(params, tensors, by_name=by_name)) and _have_similar_directions(matched, params):
                return matched, is_lasting
        return {}, False

    def _criterion_buffers(self, module: nn.Module) -> Mapping[str, torch.Tensor]:
        """Return buffers of a torch loss or user's module that is used in training."""
        if not is_user_file(file_of_class(type(module))) and type(module).__module__ != _Loss.__module__:
            return {}
        statistics = batch_statistics(dict(module.named_modules()))
        buffers = {n: b for n, b in module.named_buffers() if b.is_floating_point() and n not in statistics}
        return buffers if buffers and self._recorded_use(module) == "training" else {}

    def _constant_parameters(self, path: str, module: nn.Module) -> Mapping[str, torch.Tensor]:
        """Return parameters of an untrained module that runs forward; {} after `_MOST_RECORDS` records."""
        tensors = _parameters(module)
        if not tensors or any(map(is_dtensor, tensors.values())):
            return {}
        tensors = {f"{name}{n}": p for name, part in self._called_modules(module) for n, p in _parameters(part).items()}
        self._record_counts[path] += bool(tensors)
        return tensors if self._record_counts[path] <= _MOST_RECORDS else {}

    def _recorded_use(self, module: nn.Module) -> str:
        if module not in self._kinds:
            self._kinds[module] = ""
            after_forward(module, OutsideOfCompiledCode(UnpickledHook(self._after_forward)))
        return self._kinds[module]

    def _called_modules(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return [("", `module`)] if `module` ran forward, else (prefix, child) of children that ran."""
        seen = module in self._kinds
        if self._recorded_use(module):
            return [("", module)]
        parts = nn.Module.named_children(module) if seen else ()
        return [(f"{n}.", m) for n, m in parts if not isinstance(m, torch.jit.ScriptModule) and self._recorded_use(m)]

    def _after_forward(self, module: nn.Module, _arguments: Any, output: Any) -> None:
        trains = any(tensor.requires_grad for tensor in tree_tensors(output))
        self._kinds[module] = "training" if trains else self._kinds.get(module) or "evaluation"


def _submodule_parameters(watches: Iterable[WrapperRecorder]) -> list[dict[str, torch.Tensor]]:
    modules = (watch.module for watch in list(watches) if not watch.is_sharded)
    parts = (_parameters(part) for module in modules for part in itertools.islice(nn.Module.modules(module), 1, None))
    return [part for part in parts if part]


def _matches_submodule(tensors: Mapping[str, torch.Tensor], parts: Iterable[Mapping[str, torch.Tensor]]) -> bool:
    """Return True if `tensors` resemble a submodule by shape and, for single layers, direction."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    layers = {name.rpartition(".")[0] for name in tensors}
    candidates = (part for part in parts if {name: tensor.shape for name, tensor in part.items()} == shapes)
    return any(len(layers) > 1 or _have_similar_directions(tensors, part) for part in candidates)


def _matching(
    ours: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], *, by_name: bool
) -> dict[str, torch.Tensor]:
    """Return tensors that match each parameter in `ours`; {} if any match is missing."""
    if not by_name:
        ours = _by_name(list(ours.values())) if len(ours) == len(tensors) else {}
    matched = {n: tensors[n] for n in ours if n in tensors and not (by_name and tensors[n].requires_grad)}
    return matched if len(matched) == len(ours) and all(matched[n].shape == ours[n].shape for n in matched) else {}


def _items(value: Any) -> Iterable[Any]:
    return dict.values(value) if isinstance(value, dict) else list.__iter__(value)


def _shapes(parameters: Mapping[str, torch.Tensor]) -> list[tuple[int, ...]]:
    return sorted(tuple(p.shape) for p in parameters.values())


def _by_name(value: Any) -> dict[str, torch.Tensor]:
    if isinstance(value, dict):
        return {str(name).removeprefix("module."): item for name, item in dict.items(value)}
    return {str(number): item for number, item in enumerate(_items(value))}


def _may_be_weights(copies: Mapping[str, torch.Tensor], ours: Mapping[str, torch.Tensor]) -> bool:
    """Return True if tensors may be weights, not gradient sums, squares or residuals.

    Weights have the direction of the parameters, or (after another initialization) a similar norm and both signs.
    """
    a, b = _largest(copies, ours)
    as_large = b.norm() * _SIMILAR_NORM <= a.norm() <= b.norm() / _SIMILAR_NORM and a.min() < 0 < a.max()
    return bool(torch.dot(a, b) >= _LEAST_COSINE * a.norm() * b.norm() or as_large)


def _have_similar_directions(copies: Mapping[str, torch.Tensor], ours: Mapping[str, torch.Tensor]) -> bool:
    """Return True if copy and original of the largest parameter have similar directions."""
    a, b = _largest(copies, ours)
    is_enough = len(b) >= _FEWEST_NUMBERS and b.min() < 0 < b.max()
    return bool(is_enough and torch.dot(a, b) > _LEAST_COSINE * a.norm() * b.norm())


def _largest(copies: Mapping[str, torch.Tensor], ours: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return leading elements of the copy of the largest parameter, and of the parameter."""
    name = max(ours, key=lambda name: ours[name].numel())
    key = name if name in copies else str(list(ours).index(name))
    a, b = (_as_doubles(t.detach().flatten()[:_MOST_NUMBERS]) for t in (copies[key], ours[name]))
    return a, b


def _as_doubles(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).flatten().cpu().double()


def _parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the named parameters of a module, even if its class overrides `named_parameters`."""
    return dict(nn.Module.named_parameters(module))


def _accepts_hooks(module: nn.Module, trained: Set[int]) -> bool:
    """Return True if a module is initialized, not lazy, not trained, and takes hooks."""
    try:
        if any(id(p) in trained for p in nn.Module.parameters(module)):
            return False
        tensors = [*_parameters(module).values(), *(tensor for _, tensor in nn.Module.named_buffers(module))]
    except AttributeError:  # `__init__` was not called
        return False
    return not isinstance(module, torch.jit.ScriptModule) and not any(map(nn.parameter.is_lazy, tensors))


# Variables


def names_of_parameters(wanted: set[int]) -> dict[int, str]:
    """Return "Class.name" by `id()` of wanted parameters, from all modules of this process."""
    wrapper = nn.parallel.DistributedDataParallel
    kinds = ((item, type(item)) for item in gc.get_objects())
    modules = [item for item, kind in kinds if issubclass(kind, nn.Module) and not issubclass(kind, wrapper)]
    children = {id(child) for module in modules for child in vars(module).get("_modules", {}).values()}
    names: dict[int, str] = {}
    for module in modules:
        if id(module) not in children and "_parameters" in vars(module):
            for name, parameter in module.named_parameters():
                if id(parameter) in wanted:
                    names.setdefault(id(parameter), f"{type(module).__name__}.{name}")
    return names


def names_of_tensors(wanted: set[int]) -> dict[int, str]:
    """Return variable paths of wanted tensors, also in lists, tuples and dicts."""
    names: dict[int, str] = {}
    for path, value, _ in program_variables(depth=1):
        if id(value) in wanted:
            names.setdefault(id(value), path)
        kind = type(value)
        items = enumerate(value) if kind in (list, tuple) else value.items() if kind is dict else ()
        for key, item in itertools.islice(items, _MOST_OBJECTS):
            if id(item) in wanted:
                names.setdefault(id(item), f"{path}[{key!r}]")
    return names


def program_variables(depth: int, nested: int = 0) -> Iterator[tuple[str, Any, Location]]:
    """Yield (path, value, running line) of variables of user functions on the stack.

    Enters objects of user classes and Python modules of the user, up to `depth` attributes deep. Enters short lists,
    tuples and dictionaries, up to `nested` levels deep.
    """
    names: set[str] = set()
    for frame in frames_from(sys._getframe(1)):
        if is_user_file(frame.f_code.co_filename):
            location = location_of(frame)
            for name, value in itertools.chain(variables_of(frame).items(), list(frame.f_globals.items())):
                for path, item in _nested_variables(name, value, depth, nested):
                    if path not in names and len(names) < _MOST_OBJECTS:
                        names.add(path)
                        yield path, item, location


def _nested_variables(path: str, value: Any, depth: int, nested: int) -> Iterator[tuple[str, Any]]:
    yield path, value
    kind = type(value)  # `__class__` and `__getattr__` of an object may run code
    if kind in (list, tuple, dict):
        for key, item in _items_to_search(value) if nested and len(value) <= _MOST_HELD else ():
            yield from _nested_variables(f"{path}[{key!r}]", item, depth, nested - 1)
        return
    file = file_of_module(value) if kind is ModuleType else file_of_class(kind)
    if depth and is_user_file(file) and not issubclass(kind, nn.Module | type):
        with contextlib.suppress(AttributeError):
            for key, item in list(object.__getattribute__(value, "__dict__").items()):
                yield from _nested_variables(f"{path}.{key}", item, depth - 1, nested)


def _items_to_search(container: Any) -> list[tuple[Any, Any]]:
    items = container.copy().items() if type(container) is dict else enumerate(list(container))
    return [(key, item) for key, item in items if not issubclass(type(item), torch.Tensor | str | int | float)]


def line_of_variable(path: str, where: Location) -> Location:
    """Return the line that assigns a variable or path, or `where` if not found."""
    path = path.partition("[")[0]
    anywhere = Location(where.path, sys.maxsize)  # global, or an argument of the same name
    return last_assignment(where, path) or last_assignment(anywhere, path) or where
