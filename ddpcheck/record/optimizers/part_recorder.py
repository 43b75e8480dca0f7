"""Recorder of tensor parallel models: their ranks, and replicated state at each step.

Also locates the line that takes the norm of gradient shards, only to report it: the scaling is measured.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddpcheck.findings.evidence.replicas import ModelSplit, PartStep
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import assignment_targets, user_frame, user_location
from ddpcheck.gather.ddp.ddp_wrapper import optimizer_params
from ddpcheck.gather.ddp.model_parts import input_layouts, is_partial
from ddpcheck.gather.patching import Recorder, guarded, patched
from ddpcheck.gather.state.fingerprints import fingerprint, fingerprints, is_dtensor
from ddpcheck.gather.steps.gradient_distance import dense, norms, sketches
from ddpcheck.record.data.constructions import seed_line
from ddpcheck.record.loss.loss_source import called_in
from ddpcheck.record.rank.environment import when_imported
from ddpcheck.record.rank.line_recorder import LineRecorder
from ddpcheck.record.recording import UnpickledHook, remove_hooks
from ddpcheck.record.replicas.program_state import names_of_parameters
from ddpcheck.record.source.source_scope import location_in, own_nodes, scopes_from
from ddpcheck.stream.rank_report import is_sampled

_NORMS = ("norm", "vector_norm", "square", "pow", "get_total_norm")
_SHARD_ATTRS = ("to_local", "_local_tensor")
_BINDINGS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For)


def shard_norm_at(frame: FrameType | None, *, plain: bool = False) -> Location | None:
    """Return the first line that computes a norm of gradient shards, or None.

    `plain`: True if shards are plain tensors; False to require `to_local` in the function or in a function it calls.
    """
    for scope, _ in scopes_from(frame):
        for inner, _arguments in ((scope, {}), *called_in(scope)):
            bodies = [inner.body, *(callee.body for callee, _ in called_in(inner))]
            if (plain or any(_mentions(body, _SHARD_ATTRS) for body in bodies)) and (line := _norm_line(inner.body)):
                return location_in(inner, line)
    return None


def _norm_line(body: ast.AST) -> int | None:
    derived: set[str] = set()
    for node in sorted((stmt for stmt in own_nodes(body) if isinstance(stmt, _BINDINGS)), key=lambda stmt: stmt.lineno):
        value = node.iter if isinstance(node, ast.For) else node.value
        if value is None or not (_mentions(value, ("grad",)) or derived & _variable_names(value)):
            continue
        has_power = any(isinstance(child, ast.BinOp) and isinstance(child.op, ast.Pow) for child in ast.walk(value))
        if not isinstance(node, ast.For) and (has_power or _mentions(value, _NORMS)):
            return node.lineno
        for target in [node.target] if isinstance(node, ast.For) else assignment_targets(node):
            derived |= _variable_names(target)
    return None


def _mentions(body: ast.AST, attributes: tuple[str, ...]) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr in attributes for node in ast.walk(body))


def _variable_names(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


_STYLES = "torch.distributed.tensor.parallel.style"  # its styles call `distribute_module`, independent of imports


class PartRecorder(Recorder, subjects=("replicas", "optimizers")):
    """Recorder of optimizer steps of a model split by tensor parallelism."""

    def __init__(
        self,
        sink: Callable[[ModelSplit | PartStep], object],
        watches: Iterable[Any],
        every: int,
        lines: LineRecorder | None = None,
    ) -> None:
        self._sink = sink
        self._watches = watches
        self._interval = every  # steps between two entries
        self._lines = lines  # recorder of optimizer constructors
        self._groups: set[tuple[int, ...]] = set()
        self._split_params: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()  # names by module
        self._steps: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()  # (number, steps) by optimizer
        self._names: dict[int, str] = {}  # parameter names at the first step of their optimizer
        self._norm_at: Location | None = None
        self._script_splits_input = False
        self._handles: list[Any] = []

    def follow_script(self) -> None:
        """Record the modules that `distribute_module` splits from now on."""
        when_imported((_STYLES,), guarded(self._patch_styles))

    def split(self, ranks: tuple[int, ...], parts: Mapping[nn.Module, list[str]], where: Location | None) -> None:
        """Record a model split over `ranks`; `parts`: names of split parameters by module."""
        self._split_params.update(parts)
        if ranks not in self._groups:
            if not self._groups:
                self._handles.append(register_optimizer_step_pre_hook(UnpickledHook(self._before_step)))
            self._groups.add(ranks)
            self._sink(ModelSplit(ranks, where))

    def hook_split_inputs(self, modules: Iterable[nn.Module]) -> None:
        """Hook each of `modules` whose inputs are split, due to an earlier `parallelize_module`."""
        for module in modules:
            for layouts in [*input_layouts(module)]:
                self._hook_split_input(module, layouts)

    def close(self) -> None:
        remove_hooks(self._handles)

    def _patch_styles(self, styles: ModuleType) -> None:
        if hasattr(styles, "distribute_module"):
            patched(styles, "distribute_module", self._note_split)
        for name in ("ColwiseParallel", "RowwiseParallel", "PrepareModuleInput"):
            if (style := getattr(styles, name, None)) is not None and hasattr(style, "_apply"):
                patched(style, "_apply", self._note_style)  # private; if missing, split inputs are not detected

    def _note_style(self, style: Any, module: Any, *_arguments: Any, **_named: Any) -> None:
        if isinstance(module, nn.Module):
            self._hook_split_input(module, getattr(style, "input_layouts", None) or ())

    def _hook_split_input(self, module: nn.Module, layouts: Sequence[Any]) -> None:
        """Hook `module` if it splits an input along any dimension except the last."""
        if parts := [index for index, layout in enumerate(layouts) if getattr(layout, "dim", -1) != -1]:
            hook = UnpickledHook(functools.partial(self._before_forward, parts))
            self._handles.append(module.register_forward_pre_hook(hook, prepend=True))

    def _before_forward(self, parts: Sequence[int], _module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Record that the script itself splits data, if an input requires no grad."""
        inputs = [arguments[index] for index in parts if index < len(arguments)]
        if torch.is_grad_enabled():
            self._script_splits_input |= any(isinstance(t, torch.Tensor) and not t.requires_grad for t in inputs)

    def _note_split(self, module: nn.Module, mesh: Any = None, *_arguments: Any, **named: Any) -> Iterator[None]:
        yield
        mesh = named.get("device_mesh", mesh)
        ranks = tuple(mesh.mesh.flatten().tolist())
        if len(ranks) > 1:
            split: dict[nn.Module, list[str]] = {}
            for part in module.modules():
                params: Iterator[tuple[str, Any]] = part.named_parameters(recurse=False)
                for name, p in params:
                    if is_dtensor(p) and any(not placed.is_replicate() for placed in p.placements):
                        split.setdefault(part, []).append(name)
            self.split(ranks, split, user_location())

    def _before_step(self, optimizer: Any, _arguments: Any, _named: Any) -> None:
        number, count = self._steps.get(optimizer, (len(self._steps), 0))
        self._steps[optimizer] = number, count + 1
        if not is_sampled(count, self._interval):
            return
        params = optimizer_params(optimizer)
        if not count:
            self._norm_at = self._norm_at or shard_norm_at(user_frame(sys._getframe(1)), plain=True)
            watched = {id(p): name for watch in list(self._watches) for name, p in watch.parameters.items()}
            ids = ({id(p) for p in params} | self._split_names().keys()) - watched.keys()
            names = names_of_parameters(ids) if ids and self._lines is not None else {}  # unused without `lines`
            self._names |= {key: name.partition(".")[2] for key, name in names.items()} | watched
        named = {self._names[id(p)]: p for p in params if id(p) in self._names}
        split = self._split_names()
        sharded = {id(p) for watch in list(self._watches) if watch.is_sharded for p in watch.parameters.values()}
        parts = tuple(name for name, p in named.items() if id(p) in split)
        replicated = {name: p for name, p in named.items() if id(p) not in split}
        others = () if self._lines is None else self._lines.optimizers()
        assigned = {id(p) for opt in (*others, optimizer) for p in optimizer_params(opt)}
        gradients = {name: p.grad for name, p in named.items() if p.grad is not None and not is_partial(p.grad)}
        self._sink(
            PartStep(
                number,
                count,
                user_location(),
                None if self._lines is None else self._lines.constructed.get(optimizer),
                parts,
                tuple(name for key, name in split.items() if key not in assigned),
                norms({name: dense(gradient) for name, gradient in gradients.items()}),
                fingerprints(replicated.items()),
                sketches({name: dense(gradients[name]) for name in replicated if name in gradients}),
                tuple(name for name, p in named.items() if id(p) in sharded),
                fingerprint(torch.get_rng_state()),
                seed_line("torch"),
                self._norm_at,
                self._script_splits_input,
            )
        )

    def _split_names(self) -> dict[int, str]:
        """Return names of split parameters by `id()`; DDP may replace the parameters in forward."""
        split_names = {}
        for module, names in list(self._split_params.items()):
            for name in names:
                param = vars(module)["_parameters"].get(name)
                for watch in list(self._watches):
                    path = watch.path_of(module)
                    if path is not None:
                        param = watch.parameters.get(f"{path}.{name}".lstrip("."), param)
                if param is not None:
                    split_names[id(param)] = self._names.get(id(param), name)
        return split_names
