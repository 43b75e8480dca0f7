"""Recorders of module uses outside of training: writes, loads without effect, evaluation."""

from __future__ import annotations

import ast
import functools
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ddpcheck.findings.evidence.loop import OF_A_COPY, ModuleChanged
from ddpcheck.findings.evidence.replicas import EvalCall, NothingLoaded, digest_of_values
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import (
    is_of_program,
    is_user_file,
    lines_of_program,
    location_of,
    parsed_source,
    user_frame,
    user_location,
)
from ddpcheck.gather.forward_hooks import OutsideOfTraining, after_forward, scripting_in, without_own_hooks
from ddpcheck.gather.patching import Patch, Recorder, guarded, patched
from ddpcheck.gather.state.fingerprints import fingerprint, is_dtensor
from ddpcheck.gather.state.tensor_file import tensor_ref
from ddpcheck.record.loop.wrapper_checks import is_ignored
from ddpcheck.record.rank.environment import when_imported
from ddpcheck.record.rank.wrapper_recorder import WrapperRecorder
from ddpcheck.record.recording import Recording, UnpickledHook
from ddpcheck.stream.rank_report import is_probed

_MOST_LINES = 64  # lines of the script
_MOST_TIMES = 256  # checks per line, which a loop may reach once per parameter
_OPERATORS = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__")
_NO_VALUES = frozenset({"requires_grad_", "detach_", "rename_", "share_memory_", "retain_grad"})
_IGNORED = ".data ="
_NOT_WATCHED = -2  # wrapper number before the first forward pass of a sharded module
_Key = tuple[int, Location]  # (wrapper number, line)


class WriteRecorder(Recorder, subjects=("parameters", "replicas")):
    """Recorder of lines that write to parameters (in-place methods, `.data`) outside optimizer steps."""

    def __init__(self, run: Recording) -> None:
        self.stepping = False  # True during an optimizer step, which may write parameters. Set by `step`.
        self._run = run
        self._parameters: dict[int, tuple[Callable[[], Any], int, str]] = {}  # (parameter, wrapper, name), by `id()`
        self._lines: dict[tuple[Any, int], int] = {}  # number of checks, by code and line
        self.seen: dict[_Key, ModuleChanged] = {}  # writes since the start of the last step, by wrapper and line
        self._reported_keys: set[_Key] = set()
        self._early_writes: dict[Location, list[tuple[Callable[[], Any], str]]] = {}  # (parameter, method), by line
        self._patches: dict[tuple[Any, str], Patch] = {}  # by class and method
        self._step_patches: dict[tuple[Any, str], Patch] = {}  # patches of methods that optimizers call
        self._patch_class(nn.Parameter)
        follow = guarded(self._patch_class)
        when_imported(("torch.distributed.tensor",), lambda home: follow(vars(home).get("DTensor")))

    def _patch_class(self, kind: Any) -> None:
        if kind is None:  # torch 2.4 defines DTensor elsewhere
            return
        for name in dir(torch.Tensor):
            if name in _OPERATORS or (name.endswith("_") and not name.startswith("_") and name not in _NO_VALUES):
                self._patches[kind, name] = Patch(kind, name, functools.partial(self._patched_method, kind, name))
        Patch(kind, "data", self._patched_data)

    def patch_for_step(self, *, begins: bool) -> None:
        """Undo the patches if an optimizer step begins; redo the patches if it ends."""
        if begins is self.stepping:  # a step has raised, or is nested
            return
        self.stepping = begins
        for patch in self._step_patches.values():
            (patch.undo if begins else patch.redo)()

    def follow_shard(self, shard: torch.Tensor) -> None:
        """Record writes to a shard of a module that has not run forward yet."""
        self._parameters[id(shard)] = tensor_ref(shard), _NOT_WATCHED, ""

    def follow_wrapper(self, watch: WrapperRecorder) -> None:
        """Record writes to a new wrapper's parameters; log the earlier writes to its shards."""
        for name, parameter in watch.module_parameters():  # frozen parameters, too
            self._parameters[id(parameter)] = tensor_ref(parameter), watch.number, name
        name_of = {id(parameter): name for name, parameter in watch.module_parameters()}
        for location, writes in self._early_writes.items():
            ops = {name_of[id(part)]: op for ref, op in writes if (part := ref()) is not None and id(part) in name_of}
            if ops:
                self._run.add(ModuleChanged(watch.number, "written", next(iter(ops.values())), (*ops,), location))

    def follow_copy(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """Record writes to `tensors`, the parameters of a model copy in variable `name`."""
        for tensor in tensors:
            entry = self._parameters.get(id(tensor))
            if entry is None or entry[0]() is not tensor or entry[1] != OF_A_COPY:
                self._parameters[id(tensor)] = tensor_ref(tensor), OF_A_COPY, name

    def write(self) -> None:
        """Add the recorded writes to the log, before an optimizer step or at exit."""
        if self.seen:
            for key, change in self.seen.items():
                if key not in self._reported_keys:
                    self._reported_keys.add(key)
                    self._run.add(change)
            self.seen.clear()

    def _patched_method(self, kind: Any, name: str, original: Any) -> Any:
        note, wrapped = guarded(self._record_write), self._parameters

        @functools.wraps(original)
        def method(*arguments: Any, **named: Any) -> Any:
            if self.stepping:
                self._step_patches[kind, name] = self._patches[kind, name]
                return original(*arguments, **named)
            result = original(*arguments, **named)
            if id(arguments[0]) in wrapped:
                note(name, arguments[0])
            return result

        return method

    def _patched_data(self, original: Any) -> Any:
        note, wrapped = guarded(self._record_write), self._parameters

        def get(parameter: Any) -> Any:
            if id(parameter) in wrapped and not self.stepping:
                note("", parameter)
            return original.__get__(parameter)

        def put(parameter: Any, value: Any) -> None:
            original.__set__(parameter, value)
            if id(parameter) in wrapped and not self.stepping:
                note(_IGNORED if is_ignored(parameter, value) else ".data", parameter)

        return property(get, put)

    def _record_write(self, how: str, parameter: Any) -> None:
        """Record a write; `how`: name of the method, or "" if `.data` was read."""
        param_ref, number, name = self._parameters[id(parameter)]
        caller = sys._getframe(_CALLER)
        line = caller.f_code, caller.f_lineno
        count = self._lines.get(line, 0)
        if count >= _MOST_TIMES or (not count and len(self._lines) >= _MOST_LINES) or param_ref() is not parameter:
            return
        self._lines[line] = count + 1
        if not how and not (how := _method_on_data(caller)):
            return
        if how == _IGNORED and not is_user_file(caller.f_code.co_filename):
            return
        frame = user_frame(caller)
        if frame is None:
            return
        location = location_of(frame)
        if number == _NOT_WATCHED:
            self._early_writes.setdefault(location, []).append((param_ref, how))
            return
        if (key := (number, location)) in self._reported_keys:
            return
        before = self.seen.get(key)
        names = (name,) if before is None else tuple(dict.fromkeys((*before.names, name)))
        watch = next((w for w in list(self._run.watches) if w.number == number), None)
        if watch is not None or number == OF_A_COPY:
            if watch is not None:
                watch.parameters_written()
            counts = (0, 0) if watch is None else (watch.forwards, watch.step)
            kind = "ignored" if how == _IGNORED else "written"
            self.seen[key] = ModuleChanged(number, kind, how, names, location, *counts)


_CALLER = 3  # frames from `_record_write` to the writing line


def _method_on_data(frame: FrameType) -> str:
    """Return what a line does with `p.data`: "copy_" (a method), ".data" (assignment), "" (read)."""
    code = frame.f_code
    if not is_of_program(code.co_filename):
        return ""
    *_, column, end = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None))
    return _method_in_source(code.co_filename, frame.f_lineno, (column, end))


@functools.cache
def _method_in_source(file: str, number: int, columns: tuple[int | None, int | None]) -> str:
    """Return what writes the `.data` at a position: a method, ".data" or ''."""
    statements = [
        node
        for node in ast.walk(parsed_source(file))
        if isinstance(node, ast.stmt) and node.lineno <= number <= (node.end_lineno or node.lineno)
    ]
    innermost = max(statements, key=lambda node: (node.lineno, -(node.end_lineno or 0)), default=None)

    def has_data(node: ast.AST) -> bool:
        attrs = [child for child in ast.walk(node) if isinstance(child, ast.Attribute) and child.attr == "data"]
        return any((child.col_offset, child.end_col_offset) == columns for child in attrs)

    for node in ast.walk(innermost) if innermost is not None else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr.endswith("_") and has_data(node.func.value):
                return node.func.attr
        targets = node.targets if isinstance(node, ast.Assign) else []
        subscripts = [target for target in targets if isinstance(target, ast.Subscript)]
        if any(map(has_data, [node.target] if isinstance(node, ast.AugAssign) else subscripts)):
            return ".data"
    return ""


_MOST_LOADED = 16  # max modules with a load without effect


class LoadRecorder(Recorder, subjects=("files",)):
    """Recorder of `load_state_dict` calls that load nothing because keys differ by a prefix.

    `sink` receives an entry at the next optimizer step or when the script ends, unless a later call loads a tensor.
    """

    def __init__(self, sink: Callable[[NothingLoaded], object]) -> None:
        self._sink = sink
        self.waits = False  # True if `report_loads` may have an entry to report
        self._no_effect: WeakKeyDictionary[nn.Module, NothingLoaded] = WeakKeyDictionary()
        patched(nn.Module, "load_state_dict", self._record_load)

    def _record_load(self, module: nn.Module, *arguments: Any, **named: Any) -> Generator[None, Any, None]:
        state = arguments[0] if arguments else named["state_dict"]
        result = yield
        missing, unexpected = list(result.missing_keys), set(result.unexpected_keys)
        if isinstance(module, torch.jit.ScriptModule) or not missing or not unexpected.issuperset(state):
            for related in [m for m in self._no_effect if _contains_module(module, m) or _contains_module(m, module)]:
                del self._no_effect[related]
        elif (prefix := common_prefix(missing, list(state))) is not None and len(self._no_effect) < _MOST_LOADED:
            name, has_prefix, keys = type(module).__name__, prefix[0], prefix[1]
            self.waits = True
            self._no_effect[module] = NothingLoaded(name, user_location(), keys, has_prefix, len(missing))

    def report_loads(self) -> None:
        """Pass loads without effect to `sink`, before an optimizer step or at exit."""
        for entry in list(self._no_effect.values()):
            self._sink(entry)
        self._no_effect.clear()
        self.waits = False


def _contains_module(module: nn.Module, part: nn.Module) -> bool:
    return any(submodule is part for submodule in module.modules())


def common_prefix(missing: Sequence[str], unexpected: Sequence[str]) -> tuple[bool, str] | None:
    """Return the prefix (such as "module.") by which keys of state and module differ.

    Returns:
        (True if keys of the state have the prefix, prefix), or None if no prefix explains most keys of the smaller set,
        since a state may contain adapters only, and a module may be a part of the saved model.
    """
    fewest, keys_of_module, keys_of_state = min(len(missing), len(unexpected)), set(missing), set(unexpected)
    for key, other_key in itertools.chain(
        itertools.product(missing[:4], unexpected), itertools.product(missing, unexpected[:4])
    ):
        if other_key.endswith(f".{key}"):
            prefix = other_key.removesuffix(key)
            if 2 * sum(f"{prefix}{name}" in keys_of_state for name in missing) > fewest:
                return True, prefix
        elif key.endswith(f".{other_key}"):
            prefix = key.removesuffix(other_key)
            if 2 * sum(f"{prefix}{name}" in keys_of_module for name in unexpected) > fewest:
                return False, prefix
    return None


_MOST_MODULES = 64  # modules with a hook
_MOST_CALLING_LINES = 64  # calling lines per module
_MOST_FEATURES = 16  # features of a BatchNorm layer
_NORMS: tuple[Any, ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_MOST_CONSECUTIVE = 4  # recorded uses per line; then fewer and fewer


@dataclass(slots=True)
class _FollowedModule:
    name: str
    location: Location | None
    wrapped: bool
    loaded: int | None = None  # digest of the parameters loaded since the last optimizer step
    step: int = -1  # optimizer step of the last use
    recent_lines: set[tuple[str, ...]] = field(default_factory=set)  # lines that used the module since that step
    uses: Counter[tuple[str, ...]] = field(default_factory=Counter)  # number of steps with a use, by line


class UseRecorder(Recorder, subjects=("replicas",)):
    """Recorder of evaluations with wrapped modules, copies, and modules with a loaded state.

    Records calls in eval mode or under `no_grad`: per line, the first call after an optimizer step or a load.
    """

    def __init__(self, run: Recording, params: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._run = run
        self._params = params  # returns the parameters of all optimizers
        self._followed_modules: WeakKeyDictionary[nn.Module, _FollowedModule] = WeakKeyDictionary()
        self._resets: WeakKeyDictionary[nn.Module, Location | None] = WeakKeyDictionary()  # line that reset a layer
        patched(nn.Module, "load_state_dict", self._record_load)
        for kind in _NORMS:
            patched(kind, "reset_running_stats", self._record_reset)
        Patch(torch.jit, "script", functools.partial(scripting_in, without_own_hooks))

    def follow(self, module: nn.Module, name: str, location: Location | None, *, wrapped: bool = False) -> None:
        """Record evaluations with a module, unless it is sharded (shards differ between ranks)."""
        if module in self._followed_modules or len(self._followed_modules) >= _MOST_MODULES:
            return
        if not any(map(is_dtensor, nn.Module.parameters(module))):
            entry = _FollowedModule(name, location, wrapped)
            for layer in _layers(module):
                if layer not in self._followed_modules:
                    self._followed_modules[layer] = entry
                    after_forward(layer, OutsideOfTraining(UnpickledHook(self._record_evaluation)))

    def follow_wrapped(self) -> None:
        for watch in list(self._run.watches):
            if not watch.is_sharded:
                self.follow(watch.module, type(watch.module).__name__, None, wrapped=True)

    def _record_load(self, module: nn.Module, *_arguments: Any, **_named: Any) -> Iterator[None]:
        yield
        if not self._run.steps or isinstance(module, torch.jit.ScriptModule):
            return
        for layer in module.modules() if self._resets else ():
            self._resets.pop(layer, None)
        self.follow_wrapped()
        shapes = _shapes(module)
        if not shapes or all(_shapes(watch.module) != shapes for watch in list(self._run.watches)):
            return
        self.follow(module, type(module).__name__, None)
        for entry in (self._followed_modules[layer] for layer in _layers(module) if layer in self._followed_modules):
            entry.loaded, entry.step, entry.location = _digest(module), -1, user_location()

    def _record_reset(self, layer: nn.Module) -> None:
        if self._run.steps:
            self._resets[layer] = user_location()

    def _record_evaluation(self, module: nn.Module, *_arguments: Any) -> None:
        use, step = self._followed_modules.get(module), self._run.steps
        if use is None or not step or not _is_evaluation(module, use):
            return
        if use.step != step:
            use.loaded = use.loaded if use.step == -1 else None
            use.step, use.recent_lines = step, set()
        lines = lines_of_program(sys._getframe(1))
        if lines in use.recent_lines or not lines or (lines not in use.uses and len(use.uses) >= _MOST_CALLING_LINES):
            return
        use.recent_lines.add(lines)
        use.uses[lines] += 1
        if use.uses[lines] > _MOST_CONSECUTIVE and not is_probed(use.uses[lines]):
            return
        if not use.wrapped and not {id(p) for p in self._params()}.isdisjoint(map(id, nn.Module.parameters(module))):
            return  # trained by an optimizer
        digest = _digest(module)
        reset = next((layer for layer in module.modules() if layer in self._resets), None) if self._resets else None
        statistics, line = ((), None) if reset is None else (_statistics(reset), self._resets[reset])
        self._run.add(
            EvalCall(step, use.name, lines, digest, use.wrapped, digest == use.loaded, use.location, statistics, line)
        )


def _digest(module: nn.Module) -> int:
    return digest_of_values(fingerprint(p.detach()) for _, p in nn.Module.named_parameters(module))


def _statistics(layer: nn.Module) -> tuple[float, ...]:
    """Return running means and variances of the first features; () in training mode."""
    tensors = [getattr(layer, name) for name in ("running_mean", "running_var")]
    if layer.training or any(tensor is None for tensor in tensors):
        return ()
    return tuple(torch.cat([tensor[:_MOST_FEATURES] for tensor in tensors]).tolist())


def _is_evaluation(module: nn.Module, use: _FollowedModule) -> bool:
    # a wrapped module may be trained in eval mode, with frozen statistics
    return not torch.is_grad_enabled() or (not module.training and (use.loaded is not None or not use.wrapped))


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module, then each inner module that has all parameters of the module."""
    count, pending = len(_shapes(module)), [module]
    for layer in pending:  # grows in the loop
        yield layer
        pending += [child for child in layer.children() if len(_shapes(child)) == count][:1]


def _shapes(module: nn.Module) -> list[tuple[int, ...]]:
    return sorted(tuple(p.shape) for _, p in nn.Module.named_parameters(module))
