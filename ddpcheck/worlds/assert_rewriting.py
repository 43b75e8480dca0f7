"""pytest's assertion rewriting for test modules that a rank imports, so that `assert a == b` says what a and b were.

pytest rewrites in the process that collects. A rank imports the module again, and would see the bare assertion.
All of it is a nicety: whatever goes wrong, the module is imported as it stands. This module is light.
"""

from __future__ import annotations

import ast
import importlib.machinery
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any


def rewritten_modules() -> tuple[str, ...]:
    """Return the names of the modules that pytest has rewritten in this process."""
    if "_pytest.assertion.rewrite" not in sys.modules:
        return ()
    loaders = {name: getattr(module, "__loader__", None) for name, module in list(sys.modules.items())}
    return tuple(name for name, loader in loaders.items() if type(loader).__name__ == "AssertionRewritingHook")


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType | None:
        try:
            return _rewritten_code(Path(self.path))
        except Exception:
            return super().get_code(fullname)


def _rewritten_code(path: Path) -> CodeType:
    from _pytest.assertion import rewrite

    try:
        cached = rewrite.get_cache_dir(path) / (path.name[: -len(".py")] + rewrite.PYC_TAIL)
        if (code := rewrite._read_pyc(path, cached)) is not None:
            return code
    except Exception:
        pass  # then without the cache
    source = path.read_bytes()
    tree = ast.parse(source, filename=str(path))
    rewrite.rewrite_asserts(tree, source, str(path))
    return compile(tree, str(path), "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None and os.path.splitext(spec.origin)[1] == ".py":
            spec.loader = _Loader(name, spec.origin)
        return spec


_finder = _Finder()


def rewrite_on_import(names: Iterable[str]) -> None:
    """In a rank: rewrite the assertions of these modules when they are imported."""
    if not _finder.names.issuperset(names):
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
            explain_comparisons()
        _finder.names.update(names)


def explain_comparisons(verbosity: int = 0, ini: Mapping[str, Any] | None = None) -> None:
    """In a rank: show what differs in `left == right`, as pytest does with this verbosity and these ini options."""
    try:
        from _pytest import assertion
        from _pytest.assertion import truncate, util
    except ImportError:
        return
    # As much of `pytest.Config`, and of an item that has one, as it takes to explain a comparison; a rank has none.
    config: Any = SimpleNamespace(
        get_verbosity=lambda kind=None: verbosity,
        getini={"assertion_text_diff_style": "ndiff", **(ini or {})}.get,
        get_terminal_writer=lambda: SimpleNamespace(_highlight=lambda source, lexer="": source),
        pluginmanager=SimpleNamespace(has_plugin=lambda name: False),
    )
    config.config = config

    def explain(op: str, left: object, right: object) -> str | None:
        try:
            lines = assertion.pytest_assertrepr_compare(config, op, left, right) or []
            if hasattr(truncate, "truncate_if_required"):  # pytest 8; later ones have done it by now
                lines = truncate.truncate_if_required(lines, config)
        except Exception:  # another version of pytest: the values themselves must do
            return None
        return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%") or None

    util._reprcompare = explain
    util._config = config  # which says how much of a value is shown
