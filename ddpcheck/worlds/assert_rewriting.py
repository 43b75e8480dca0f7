"""pytest's assertion rewriting for test modules on ranks, not only in the collecting process.

If the private pytest API differs, modules are imported without rewriting. This module is light.
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
    """Install and return pytest's import hook, with a minimal stand-in for `pytest.Config`."""
    import pytest
    from _pytest.assertion import rewrite

    config: Any = SimpleNamespace(stash=pytest.Stash(), getini=lambda name: ())
    config.stash[rewrite.assertstate_key] = SimpleNamespace(trace=lambda message: None)
    hook = rewrite.AssertionRewritingHook(config)
    sys.meta_path.insert(0, hook)
    explain_comparisons()
    return hook


def rewrite_on_import(names: Iterable[str]) -> None:
    """Have pytest rewrite the assertions of modules `names` when a rank imports the modules."""
    with contextlib.suppress(Exception):  # another version of pytest
        if new_names := set(names) - sys.modules.keys():
            _hook().mark_rewrite(*new_names)


def explain_comparisons(verbosity: int = 0, ini: Mapping[str, Any] | None = None) -> None:
    """Make a failed `assert left == right` show pytest's explanation, under these pytest options."""
    try:
        from _pytest import assertion
        from _pytest.assertion import truncate, util
    except ImportError:
        return
    # Minimal stand-in for `pytest.Config` and for a test item; a rank has neither.
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
            if hasattr(truncate, "truncate_if_required"):  # pytest 8; later versions have truncated already
                lines = truncate.truncate_if_required(lines, config)
        except Exception:  # another version of pytest: no explanation
            return None
        return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%") or None

    util._reprcompare = explain
    util._config = config  # sets how much of a value is shown
