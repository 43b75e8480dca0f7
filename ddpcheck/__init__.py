"""ddpcheck: correctness testing for PyTorch `DistributedDataParallel`.

Imports are lazy: public names, and torch, are loaded on first use. `__init__.pyi` has the names for type checkers.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_NAMES = {
    "recipe.recipe": "Recipe",
    "report.checking.check": "check",
    "extras.matrix.check_matrix": "check_matrix",
    "extras.schedule.check_schedule": "check_schedule",
    "run.checked_script": "check_script",
    "report.matrix.matrix": "Matrix",
    "harness": "World",
    "findings.report": "Report Finding Location",
    "findings.rules": "Severity",
    "findings.selection": "Suppression",
    "anomalous": "detect_anomalous_params",
    "consistency": "check_consistency",
    "monitor.wrapper": "CheckedDistributedDataParallel",
    "monitor.watch": "watch Watch",
    "monitor.reporting": "FindingWarning",
    "testing.assertions.assertions": "assert_parity assert_same_on_all_ranks assert_no_anomalous_params",
    "extras.repro": "write_reproduction",
    "worlds.launchers.init_dist": "init_dist get_dist_info master_only",
    "gather.collectives.allreduce": "allreduce_grads allreduce_params",
    "findings.errors": "DDPCheckError UsageError ConfigError TargetError FindingsError RankError HangError RankFailure",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
__all__ = [*_HOMES, "__version__"]
_RENAMED = {"DdpcheckError": "DDPCheckError"}  # deprecated names
_MODULES = ("rank", "launch")  # public submodules, loaded on attribute access


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if new := _RENAMED.get(name):
        warnings.warn(f"ddpcheck.{name} is deprecated: use {new}", DeprecationWarning, stacklevel=2)
        name = new
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    package, _, module = _HOMES[name].partition(".")
    home = load_extra(module) if package == "extras" else importlib.import_module(f"{__name__}.{_HOMES[name]}")
    value = getattr(home, name)
    globals()[name] = value
    return value


def load_extra(module: str) -> Any:
    """Import a module of `ddpcheck.extras`, the part of ddpcheck that may be absent.

    Raises:
        UsageError: The extra is not installed.
    """
    try:
        return importlib.import_module(f"{__name__}.extras.{module}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(f"{__name__}.extras"):
            raise
        from ddpcheck.findings.errors import UsageError

        extra = f"{__name__}.extras.{module.partition('.')[0]}"
        raise UsageError(f"this needs {extra}, which is not installed") from None


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})


class _Package(ModuleType):
    """Module type that pickle stores by name, so that `ddpcheck` itself can be pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
