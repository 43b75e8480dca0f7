"""What a report of a bug needs to know of a machine: versions, devices, variables, plugins; nothing that is secret.

This module is light: torch is only imported when it is asked for its version.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from ddpcheck import __version__
from ddpcheck.findings.errors import DdpcheckError
from ddpcheck.worlds.validation import WorldOptions

PACKAGES = (
    *("cloudpickle", "rich", "numpy", "pytest", "pytest-xdist", "shtab"),
    *("lightning", "transformers", "accelerate", "mmengine"),
)
_OURS = re.compile(
    r"(DDPCHECK|TORCH|TORCHELASTIC|PYTORCH|NCCL|GLOO|CUDA|MASTER|OMP|MKL|KMP|OMPI_COMM_WORLD|PMI|PYTEST|UCX)_"
    r"|SLURM_(JOB_ID|PROCID|NTASKS|LOCALID|NNODES|NODEID)$"
    r"|(GROUP_|LOCAL_|ROLE_)?(RANK|WORLD_SIZE)$|LOCAL_WORLD_SIZE$|PYTHON(HASHSEED|PATH|WARNINGS)$|NO_COLOR$|CI$"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|APIKEY|(^|_)(KEY|AUTH|PWD|PAT)(_|$)", re.IGNORECASE)
_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
HIDDEN = "(set, not shown)"


def describe_environment(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The environment by heading; every value is a text, a number, a list or a mapping of them.

    Args:
        environ: The variables, `os.environ` when absent.
    """
    environ = os.environ if environ is None else environ
    return {
        "ddpcheck": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})",
        "system": " ".join(filter(None, (platform.system(), platform.release(), platform.machine()))),
        "libc": " ".join(platform.libc_ver()) or "unknown",
        "cpus": os.cpu_count(),
        "start method": _start_method(),
        "torch": _torch(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "pytest plugins": sorted({f"{one.name} ({one.value})" for one in metadata.entry_points(group="pytest11")}),
        "variables": shown_variables(environ),
    }


def shown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a run under DDP may depend on; of those that may be secret, only that they are set."""
    ours = {name: environ[name] for name in sorted(environ) if _OURS.match(name)}
    return {name: HIDDEN if _SECRET.search(name) else _IN_URL.sub(f"{HIDDEN}@", value) for name, value in ours.items()}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _start_method() -> str:
    try:
        return WorldOptions(2).start_method or "unknown"
    except DdpcheckError as error:
        return str(error)


def _torch() -> dict[str, Any]:
    """What torch says of itself, or why it cannot be imported."""
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:
        return {"error": f"cannot be imported: {type(error).__name__}: {error}"}
    available = dist.is_available()
    backends = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    found: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda or "not built with it",
        "backends": [name for name, has in backends.items() if available and has()],
    }
    if torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if "nccl" in found["backends"] else "none"
    else:
        found["gpus"] = "none that torch can use"
    return found
