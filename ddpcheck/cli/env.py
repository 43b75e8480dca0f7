"""`ddpcheck env`: versions, devices and variables for a bug report, without secrets."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from importlib.resources import files
from typing import Any

from ddpcheck import __version__
from ddpcheck.cli.output import print_out, wrapped
from ddpcheck.findings.errors import EXIT_CLEAN, DDPCheckError
from ddpcheck.findings.wording import printable
from ddpcheck.render import Medium
from ddpcheck.worlds.validation import WorldOptions

PACKAGES = "cloudpickle rich numpy pytest pytest-xdist shtab lightning transformers accelerate mmengine".split()
_OURS = re.compile(
    r"(DDPCHECK|TORCH|TORCHELASTIC|PYTORCH|NCCL|GLOO|CUDA|MASTER|OMP|MKL|KMP|OMPI_COMM_WORLD|PMI|PYTEST|UCX)_"
    r"|SLURM_(JOB_ID|PROCID|NTASKS|LOCALID|NNODES|NODEID)$"
    r"|(GROUP_|LOCAL_|ROLE_)?(RANK|WORLD_SIZE)$|LOCAL_WORLD_SIZE$|PYTHON(HASHSEED|PATH|WARNINGS)$|NO_COLOR$|CI$"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|APIKEY|(^|_)(KEY|AUTH|PWD|PAT)(_|$)", re.IGNORECASE)
_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
HIDDEN = "(set, not shown)"


def run_env(arguments: argparse.Namespace) -> int:
    """Print the environment, or the path of SKILL.md."""
    if arguments.skill:
        print_out(str(files("ddpcheck") / "SKILL.md"))
        return EXIT_CLEAN
    environment = {
        "ddpcheck": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})",
        "system": " ".join(filter(None, (platform.system(), platform.release(), platform.machine()))),
        "libc": " ".join(platform.libc_ver()) or "unknown",
        "cpus": os.cpu_count(),
        "start method": _start_method(),
        "torch": _torch_facts(),
        "packages": {name: version for name in PACKAGES if (version := version_of(name))},
        "pytest plugins": sorted({f"{ep.name} ({ep.value})" for ep in metadata.entry_points(group="pytest11")}),
        "variables": shown_variables(os.environ),
    }
    width = Medium.detect(sys.stdout).width
    text = "\n".join(wrapped(line, width, "    ") for line in _indented_lines(environment))
    print_out(json.dumps(environment, indent=2) if arguments.format == "json" else text)
    return EXIT_CLEAN


def _indented_lines(values: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Yield a line for each value; nested mappings are indented below their heading."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}:{'' if value else ' none'}"
            yield from _indented_lines(value, indent + "  ")
        else:
            text = ", ".join(value) or "none" if isinstance(value, list) else str(value)
            yield f"{indent}{name}: {printable(text)}"


def shown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that DDP may depend on, with secrets hidden."""
    ours = {name: environ[name] for name in sorted(environ) if _OURS.match(name)}
    return {name: HIDDEN if _SECRET.search(name) else _IN_URL.sub(f"{HIDDEN}@", value) for name, value in ours.items()}


def version_of(package: str) -> str:
    """Return the version of an installed package, or ""."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _start_method() -> str:
    try:
        return WorldOptions(2).start_method or "unknown"
    except DDPCheckError as error:
        return str(error)


def _torch_facts() -> dict[str, Any]:
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:
        return {"error": f"cannot be imported: {type(error).__name__}: {error}"}
    available = dist.is_available()
    backends = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    info: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda or "not built with it",
        "backends": [name for name, is_built in backends.items() if available and is_built()],
    }
    if torch.cuda.is_available():
        info["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        info["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if "nccl" in info["backends"] else "none"
    else:
        info["gpus"] = "none that torch can use"
    return info
