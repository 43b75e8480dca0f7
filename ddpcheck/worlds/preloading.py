"""Import of modules before ranks start. Light: imports no torch itself."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile

DDP = (
    "torch._dynamo",  # imported by the first DDP instance: most of a second per rank
    "torch.utils.checkpoint",
    "torch.utils.data",
    "torch.distributed._functional_collectives",  # imported by each rank when collectives are logged
    "torch.utils.serialization",  # imported by the first torch.save or torch.load
    "ddpcheck.recipe.recipe",
    "ddpcheck.gather.autograd.autograd_graph",
    "ddpcheck.findings.source_lines",
    "ddpcheck.gather.state.module_description",
    "ddpcheck.anomalous",
    "ddpcheck.consistency",
    "ddpcheck.rules.loss.single_process",
    "ddpcheck.gather.collectives.collective_log",
    "ddpcheck.gather.phases.single_process",
    "ddpcheck.gather.phases.local_step",
    "ddpcheck.gather.phases.ddp_step",
)
"""Modules that ranks with DDP import. The fork server imports them when it has time.

`World(preload=...)` names them for ranks that need them at once: these are forked after the import.
"""

ONLY_WHAT_IS_ASKED_FOR = "_DDPCHECK_NO_PRELOAD"
"""Environment variable for our tests: a fork server then imports nothing by itself."""


def import_named(name: str) -> str:
    """Import the module `name`; return an error message, or ''."""
    try:
        if sys.modules.get(name) is not None:
            return ""
        if name == "torch._dynamo" and "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
            _import_dynamo()
        else:
            importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if name in DDP and isinstance(error, ModuleNotFoundError) and error.name == name:
            return ""  # missing in some versions of torch
        lines = str(error).strip().splitlines()
        message = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        return f"preload: the module {name!r} cannot be imported: {message}"
    return ""


def _import_dynamo() -> None:
    """Import `torch._dynamo` and remove the cache directory created on import."""
    global _scratch
    _scratch = os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="ddpcheck-")
    try:
        importlib.import_module("torch._dynamo")
    finally:
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
        clean_up()


_scratch = ""


def clean_up() -> None:
    """Remove the scratch directory of an import, also before an early exit."""
    if _scratch:
        shutil.rmtree(_scratch, ignore_errors=True)
