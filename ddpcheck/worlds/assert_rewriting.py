"""pytest's assertion rewriting for test modules that a rank imports, so that `assert a == b` says what a and b were.

pytest rewrites in the process that collects. A rank imports the module again, and would see the bare assertion.
All of it is a nicety: with another version of pytest, the module is imported as it stands. This module is light.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any


def rewritten_modules() -> tuple[str, ...]:
    """Return the names of the modules that pytest has rewritten in this process."""
    if "_pytest.assertion.rewrite" not in sys.modules:
        return ()
    loaders = {name: getattr(module, "__loader__", None) for name, module in list(sys.modules.items())}
    return tuple(name for name, loader in loaders.items() if type(loader).__name__ == "AssertionRewritingHook")


@functools.cache
def _hook() -> Any:
    """Pytest's own hook of imports, with as much of a `pytest.Config` as it takes; it rewrites what it is told to."""
    import pytest
    from _pytest.assertion import rewrite

    config: Any = SimpleNamespace(stash=pytest.Stash(), getini=lambda name: ())
    config.stash[rewrite.assertstate_key] = SimpleNamespace(trace=lambda said: None)
    hook = rewrite.AssertionRewritingHook(config)
    sys.meta_path.insert(0, hook)
    explain_comparisons()
    return hook


def rewrite_on_import(names: Iterable[str]) -> None:
    """In a rank: rewrite the assertions of these modules when they are imported."""
    with contextlib.suppress(Exception):  # another version of pytest
        if new := set(names) - sys.modules.keys():
            _hook().mark_rewrite(*new)


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
