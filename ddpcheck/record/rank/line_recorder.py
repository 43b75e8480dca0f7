"""Recorders of lines where a script creates optimizers and modules, and changes wrapped modules."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as registration

from ddpcheck.findings.evidence.loop import ModuleChanged
from ddpcheck.findings.evidence.replicas import SizedVariable, WrapperBegun
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import code_of, frames_from, is_of_program, location_of, user_location, variables_of
from ddpcheck.gather.ddp.ddp_wrapper import constructor_options, optimizer_params
from ddpcheck.gather.patching import CALLER, Recorder, guarded, patched
from ddpcheck.gather.state.fingerprints import digest_of
from ddpcheck.gather.state.module_description import class_name, structure_of
from ddpcheck.record.data.constructions import seed_line
from ddpcheck.record.rank.wrapper_recorder import WrapperRecorder
from ddpcheck.record.recording import Recording, UnpickledHook
from ddpcheck.record.replicas.program_state import program_variables
from ddpcheck.record.replicas.tables import is_order_of_a_set
from ddpcheck.record.source.source_scope import assignment_in_program

_MOST_CHANGES = 256  # entries, one per wrapper, kind and line
_MOST_TIMES = 8  # checks per line with `eval`, which may run in each step on an unwrapped model
_APPLY: Any = nn.Module.apply.__code__


class LineRecorder(Recorder, subjects=("optimizers",)):
    """Recorder of lines that construct optimizers or change wrapped modules."""

    optimizer_count = 0  # number of optimizers that the script has constructed
    # torch seed at the first parameter registration, and the line that set the seed
    seeded: tuple[int | None, Location | None] = (None, None)

    def __init__(self, run: Recording) -> None:
        self._run = run
        self._seen: set[tuple[int, str, Location | None]] = set()
        self._eval_counts: dict[Location | None, int] = {}  # number of calls, by line
        self.constructed: WeakKeyDictionary[Any, Location] = WeakKeyDictionary()  # line that constructed an optimizer
        self.rates: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # digest of the initial rates
        self.restored: WeakKeyDictionary[Any, Location] = WeakKeyDictionary()  # line of the last `load_state_dict`
        self.scaler: Any = None  # enabled GradScaler whose step() is running
        self._hooks: dict[Any, Location] = {}  # registration line of a tensor hook, by code object
        patched(torch.optim.Optimizer, "__init__", self._record_optimizer)
        patched(torch.optim.Optimizer, "load_state_dict", self._record_load)
        patched(torch.amp.GradScaler, "load_state_dict", self._record_load)
        patched(torch.amp.GradScaler, "step", self._record_scaler_step)
        patched(nn.Module, "load_state_dict", functools.partial(self._record_new_values, "load_state_dict"))
        patched(nn.Module, "apply", functools.partial(self._record_new_values, "apply"))
        for name in ("register_hook", "register_post_accumulate_grad_hook"):
            patched(torch.Tensor, name, self._record_tensor_hook)
        patched(nn.Module, "eval", self._record_eval)  # not `train`, which recurses into children
        patched(nn.Module, "requires_grad_", self._record_requires_grad)
        patched(nn.Parameter, "requires_grad_", self._record_requires_grad)
        patched(nn.parallel.DistributedDataParallel, "register_comm_hook", self._record_comm_hook)
        hook = UnpickledHook(self._record_registration)
        registration.register_module_parameter_registration_hook(hook)
        registration.register_module_module_registration_hook(hook)

    def optimizers(self) -> list[Any]:
        """Return the optimizers that the script constructed and still references."""
        return [optimizer for optimizer in list(self.constructed) if hasattr(optimizer, "param_groups")]

    def note_changes(self, watch: WrapperRecorder, kinds: Sequence[str]) -> None:
        """Record the line that changed `requires_grad`, if `kinds` of changes include "frozen" or "unfrozen"."""
        if {"frozen", "unfrozen"}.isdisjoint(kinds) or any(
            key[:2] == (watch.number, "requires_grad") for key in self._seen
        ):
            return
        location = assignment_in_program("requires_grad", "unfrozen" in kinds)
        self._record_change(watch, "requires_grad", "requires_grad", (), location)

    def _record_optimizer(self, optimizer: Any, *_arguments: Any, **_named: Any) -> Iterator[None]:
        if (location := user_location()) is not None:
            self.constructed[optimizer] = location
            self.optimizer_count += 1
        yield
        self.rates[optimizer] = digest_of([float(group["lr"]) for group in optimizer.param_groups if "lr" in group])

    def _record_load(self, optimizer: Any, *_arguments: Any, **_named: Any) -> None:
        if (location := user_location()) is not None:
            self.restored[optimizer] = location

    def _record_scaler_step(self, scaler: Any, *_arguments: Any, **_named: Any) -> Iterator[None]:
        self.scaler = scaler if scaler.is_enabled() else None
        yield
        self.scaler = None

    def _record_new_values(self, how: str, module: nn.Module, *_arguments: Any, **_named: Any) -> None:
        if sys._getframe(CALLER).f_code is not _APPLY:  # `apply` recurses into children
            self._record_parameters("values", how, module)

    def _record_eval(self, module: nn.Module) -> None:
        watches = list(self._run.watches)
        if not watches or len(self._seen) >= _MOST_CHANGES:
            return
        location = user_location()
        count = self._eval_counts[location] = self._eval_counts.get(location, 0) + 1
        for watch in watches if count <= _MOST_TIMES else ():
            if (watch.number, "mode", location) not in self._seen and (path := _path_in(watch, module)) is not None:
                self._record_change(watch, "mode", "eval", (path,), location)

    def _record_requires_grad(self, obj: Any, *_arguments: Any, **_named: Any) -> None:
        self._record_parameters("requires_grad", "requires_grad_", obj)

    def _record_comm_hook(self, wrapper: Any, *_arguments: Any, **_named: Any) -> None:
        for watch in list(self._run.watches):
            if watch.module is wrapper.module:
                self._record_change(watch, "hook", "register_comm_hook", tuple(watch.parameters), user_location())

    def _record_tensor_hook(self, _tensor: torch.Tensor, hook: Any) -> None:
        code = None if isinstance(hook, UnpickledHook) else code_of(hook)
        if code is not None and code not in self._hooks and (location := user_location()) is not None:
            self._hooks[code] = location

    def note_step_in_backward(self, optimizer: Any) -> None:
        """Record an optimizer step during backward, before DDP has averaged the gradients."""
        param_ids = {id(p) for p in optimizer_params(optimizer)}
        hooks = (self._hooks.get(frame.f_code) for frame in frames_from(sys._getframe(1)))
        location = next(filter(None, hooks), None) or user_location()
        for watch in list(self._run.watches):
            if not watch.is_sharded and (names := tuple(n for n, p in watch.module_parameters() if id(p) in param_ids)):
                self._record_change(watch, "stepped", f"{type(optimizer).__name__}.step", names, location)

    def _record_parameters(self, what: str, how: str, obj: Any) -> None:
        watches = list(self._run.watches)
        if not watches or len(self._seen) >= _MOST_CHANGES:
            return
        where = user_location()
        if all((watch.number, what, where) in self._seen for watch in watches):
            return
        changed = {id(p) for p in obj.parameters()} if isinstance(obj, nn.Module) else {id(obj)}
        for watch in watches:
            if names := tuple(name for name, p in watch.module_parameters() if id(p) in changed):
                self._record_change(watch, what, how, names, where)

    def _record_registration(self, module: nn.Module, name: str, _obj: Any) -> None:
        if self.seeded[0] is None:
            self.seeded = torch.initial_seed(), seed_line("torch")
        if len(self._seen) < _MOST_CHANGES:
            for watch in list(self._run.watches):
                if (path := watch.path_of(module)) is not None:
                    self._record_change(watch, "parameters", f"{path}.{name}".lstrip("."), (), user_location())

    def _record_change(
        self, watch: WrapperRecorder, what: str, how: str, names: tuple[str, ...], where: Location | None
    ) -> None:
        key = watch.number, what, where
        if where is not None and key not in self._seen:
            self._seen.add(key)
            self._run.add(ModuleChanged(watch.number, what, how, names, where, watch.forwards, watch.step))


def _path_in(watch: WrapperRecorder, module: nn.Module) -> str | None:
    """Return `module`'s path in the wrapped module; "" if `module` contains the wrapped module."""
    path = watch.path_of(module)
    return "" if path is None and any(part is watch.module for part in module.modules()) else path


_CONTAINERS = (dict, list, tuple, set, frozenset)
_MOST_SIZES = 512  # variables whose size is written
_MOST_FRAMES = 4  # innermost user functions at the registration of a parameter
_LARGEST_OFFSET = 4  # padding, unknown, begin and end tokens of a vocabulary


class ConstructionRecorder(Recorder):
    """Recorder of lines that register parameters, buffers and submodules, and of variable sizes there."""

    def __init__(self) -> None:
        # by id(): `torch.compile` would trace into a WeakKeyDictionary, and a module may define __eq__
        self._lines: dict[int, tuple[ref[nn.Module], dict[str, Location]]] = {}
        self._sizes: dict[SizedVariable, None] = {}
        hook: Any = guarded(self._record_registration)
        registration.register_module_parameter_registration_hook(hook)
        registration.register_module_buffer_registration_hook(hook)
        registration.register_module_module_registration_hook(hook)

    def wrapper_entry(
        self, arguments: tuple[Any, ...], named: Mapping[str, Any], construct: Any
    ) -> WrapperBegun | None:
        """Return an entry that describes the module to wrap; `arguments` begin with the wrapper."""
        module = named.get("module", arguments[1] if len(arguments) > 1 else None)
        options = constructor_options(construct, *arguments, **named)
        if not isinstance(module, nn.Module) or not options:
            return None  # the constructor raises its own error
        group = named.get("process_group") or dist.group.WORLD
        mesh = named.get("device_mesh")
        if mesh is not None:
            group = mesh.get_group(mesh_dim=0)
        ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        description = structure_of(module)
        listings = description.parameters, description.buffers
        parameters, buffers = (tuple(t for t in tensors if t.name not in ignored) for tensors in listings)
        description = replace(description, parameters=parameters, buffers=buffers)
        shapes = {size for param in description.parameters for size in param.shape}
        shapes |= {len(part._modules) for part in module.modules()}
        now = (v for path, item, where in program_variables(depth=1) for v in _sized_variables([(path, item)], where))
        sizes = dict.fromkeys((*self._sizes, *now))
        return WrapperBegun(
            class_name(module),
            tuple(dist.get_process_group_ranks(group)),
            description,
            options,
            user_location(),
            self._registration_lines(module),
            tuple(_modules_in_set_order(module)),
            tuple(v for v in sizes if _is_near_size(v.size, shapes))[:_MOST_SIZES],
        )

    def _record_registration(self, module: nn.Module, name: str, obj: Any) -> None:
        frame = sys._getframe(1)
        location = user_location(frame)
        if location is None:
            return
        entry = self._lines.get(id(module))
        if entry is None or entry[0]() is not module:
            entry = self._lines[id(module)] = (ref(module), {})
        entry[1][name] = location
        if isinstance(obj, nn.Parameter) and not nn.parameter.is_lazy(obj) and len(self._sizes) < _MOST_SIZES:
            sizes = set(obj.shape)
            frames = (f for f in frames_from(frame) if is_of_program(f.f_code.co_filename))
            functions = (f for f in frames if f.f_code.co_name != "<module>")
            for user_frame in itertools.islice(functions, _MOST_FRAMES):
                variables = _sized_variables(variables_of(user_frame).items(), location_of(user_frame))
                self._sizes.update((variable, None) for variable in variables if _is_near_size(variable.size, sizes))

    def _registration_lines(self, module: nn.Module) -> dict[str, Location]:
        """Return, by path, registration lines that differ from the parent module's registration line."""
        locations: dict[str, Location] = {}
        nearest: dict[str, Location | None] = {}  # registration line by module path, inherited from the parent
        for path, part in module.named_modules():
            parent, _, child = path.rpartition(".")
            nearest[path] = locations.get(path, nearest.get(parent) if child else None)
            entry = self._lines.get(id(part))
            if entry is not None and entry[0]() is part:
                for name, location in entry[1].items():
                    if location != nearest[path]:
                        locations[f"{path}.{name}".lstrip(".")] = location
        return locations


def _is_near_size(size: int, wanted: set[int]) -> bool:
    return any(size + offset in wanted for offset in range(_LARGEST_OFFSET + 1))


def _sized_variables(variables: Iterable[tuple[str, Any]], where: Location) -> Iterator[SizedVariable]:
    """Yield variables whose size (above 1) may explain a model's shape: integers and containers."""
    for name, value in variables:
        kind = type(value)  # exact type: a subclass may define its own `__len__`
        if kind is int or kind in _CONTAINERS:
            size = value if kind is int else len(value)
            if size > 1:
                yield SizedVariable(name, kind.__name__, size, where)


def _modules_in_set_order(module: nn.Module) -> Iterator[str]:
    """Yield paths of modules whose children were added in a set's (random) order."""
    for path, part in module.named_modules():
        names = [name for name, _ in part.named_children()]
        if len(names) > 2 and not all(name.isdigit() for name in names) and is_order_of_a_set(names):
            yield path
