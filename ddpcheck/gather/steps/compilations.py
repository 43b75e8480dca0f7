"""Record what a rank compiles with `torch.compile`, and why it recompiles.

torch has no public API for it. Each private name used here may be missing: then nothing, or no reason, is recorded.
"""

from __future__ import annotations

import functools
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager
from types import CodeType, ModuleType
from typing import Any
from weakref import WeakSet

import torch

from ddpcheck.findings.evidence.loop import FunctionCompiled
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import is_of_program, relative_path, user_location
from ddpcheck.gather.patching import Patch, Recorder, guarded, patched

_FRAMES, _GRAPHS, _UTILS = (f"torch._dynamo.{name}" for name in ("convert_frame", "output_graph", "utils"))
MODULES = (_FRAMES, _GRAPHS)
"""Modules that are patched while compilations are recorded."""

_MOST = 1024
_LONGEST = 160  # max characters of a reason
_COMPILED_AS = re.compile(r"^\d+/\d+: ")  # prefix with the number of the earlier compilation
_SOURCE = re.compile(r"\s*  # .*")  # comment with the source line, appended by torch
_VALUES = re.compile(r"(?<= (?:==|is|in) ).*|(?<= expected ).*")
_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')

_open_recorders: WeakSet[CompilationRecorder] = WeakSet()
_patches: dict[str, Patch] = {}
_graphs: list[Any] = []  # graphs of the current compilation


class CompilationRecorder(AbstractContextManager[None], Recorder, subjects=("loop",)):
    """Recorder that passes each compilation between `begin` and `close` to `sink`."""

    def __init__(
        self, sink: Callable[[FunctionCompiled], object], trains: Callable[[], bool], steps: Callable[[], int]
    ) -> None:
        """Create a recorder; `trains()`: True if the program trains; `steps()`: optimizer steps so far."""
        self._sink = sink
        self._trains = trains
        self._steps = steps
        self._count = 0

    def begin(self) -> None:
        """Start recording; modules of `MODULES` imported later need a call of `patch_compiler_module`."""
        _open_recorders.add(self)
        for module in filter(None, map(sys.modules.get, MODULES)):
            patch_compiler_module(module)

    def close(self) -> None:
        """Stop recording; may be called repeatedly."""
        _open_recorders.discard(self)
        while _patches and not _open_recorders:
            _patches.popitem()[1].undo()

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_error: object) -> None:
        self.close()

    def note(
        self, code: CodeType, graphs: Iterable[Any], message: str, seconds: float, *, trains: bool, given_up: bool
    ) -> None:
        """Record a compilation, with recompile reason `message`; `given_up`: the recompile limit was hit."""
        self._count += 1
        if self._count > _MOST:
            return
        nodes = [node for graph in graphs for node in graph.nodes]
        reason = _SOURCE.sub("", _COMPILED_AS.sub("", message.partition("\n")[0])).strip()
        self._sink(
            FunctionCompiled(
                code.co_qualname.rpartition("<locals>.")[2],
                Location(relative_path(code.co_filename), code.co_firstlineno),
                _line_in(message) or user_location(),
                self._steps(),
                round(seconds, 3),
                trains=trains and self._trains(),
                guard=_VALUES.sub("", reason).strip()[:_LONGEST],
                reason=reason[:_LONGEST],
                hit_limit=given_up,
                inputs=zlib.crc32(repr([_shape_of(node) for node in nodes if node.op == "placeholder"]).encode()),
                operations=Counter(str(getattr(n.target, "__name__", n.target)) for n in nodes if _has_gradient(n)),
            )
        )


def patch_compiler_module(module: ModuleType) -> None:
    """Patch a module of `torch._dynamo` to record compilations, until the last recorder closes."""
    name, kind = module.__name__, vars(module).get("OutputGraph")
    if name == _FRAMES and name not in _patches and hasattr(module, "_compile"):
        _patches[name] = patched(module, "_compile", _record_compilation)
    if name == _GRAPHS and name not in _patches and hasattr(kind, "call_user_compiler"):
        _patches[name] = Patch(kind, "call_user_compiler", _record_graphs)


def _record_graphs(original: Any) -> Any:
    """Wrap `call_user_compiler` to record graphs, since `patched` has no effect during tracing."""
    note = guarded(_graphs.append)

    @functools.wraps(original)
    def call_user_compiler(graph: Any, module: Any, *arguments: Any, **named: Any) -> Any:
        note(module.graph)
        return original(graph, module, *arguments, **named)

    return call_user_compiler


def _record_compilation(code: CodeType, *_arguments: Any, **_named: Any) -> Generator[None, Any, None]:
    known, began, trains = len(_reasons(code)), time.monotonic(), torch.is_grad_enabled()
    _graphs.clear()
    compiled = None
    try:
        compiled = yield
    finally:
        graphs = _graphs.copy()
        _graphs.clear()
        given_up = compiled is None and _hit_recompile_limit()
        if (graphs and compiled is not None) or given_up:
            reason = (_reasons(code)[known:] or [""])[0]
            for recorder in [*_open_recorders]:
                recorder.note(code, graphs, reason, time.monotonic() - began, trains=trains, given_up=given_up)


def _reasons(code: CodeType) -> list[str]:
    failures = getattr(sys.modules.get(_UTILS), "guard_failures", {})  # private to torch
    return [str(failure) for failure in failures.get(code, ())]


def _hit_recompile_limit() -> bool:
    metrics: list[Any] = getattr(sys.modules.get(_UTILS), "get_compilation_metrics", list)()  # private to torch
    return bool(metrics) and "limit" in str(getattr(metrics[-1], "fail_reason", None)).partition("\n")[0]


def _line_in(message: str) -> Location | None:
    """Return the innermost program line in the stack trace of a recompile reason."""
    lines = [(match["file"], int(match["line"])) for match in _LINE.finditer(message)]
    lines = [(file, line) for file, line in lines if is_of_program(file)]
    return Location(relative_path(lines[-1][0]), lines[-1][1]) if lines else None


def _has_gradient(node: Any) -> bool:
    value = node.meta.get("example_value")
    tensors = value if isinstance(value, tuple | list) else (value,)
    called = node.op.startswith("call_")
    return called and any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors)


def _shape_of(node: Any) -> str:
    value = node.meta.get("example_value")
    return f"{value.dtype} {[*map(str, value.shape)]}" if isinstance(value, torch.Tensor) else node.op
