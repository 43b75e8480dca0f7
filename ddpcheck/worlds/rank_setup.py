"""Setup of a rank: imports, output, environment, random states, device, process group.

Imports torch only inside functions.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import os
import random
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import Iterable, Mapping
from datetime import timedelta
from fcntl import ioctl
from pathlib import Path
from typing import Any

from ddpcheck.findings.errors import DDPCheckError, UsageError
from ddpcheck.findings.named_functions import read_named_functions
from ddpcheck.worlds import compilation, wire

DDP_MODULES = (
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
"""Modules that ranks with DDP import; the fork server imports these modules while idle.

Ranks of `World(preload=DDP_MODULES)` are forked only after the import.
"""

NO_PRELOAD = "_DDPCHECK_NO_PRELOAD"
"""Environment variable for our tests: if set, a fork server imports no modules while it is idle."""


def gloo_interface(one_machine: bool, local_address: str, master_addresses: Iterable[str]) -> str:
    """Return the value for `GLOO_SOCKET_IFNAME`, or '' if gloo's default works.

    By default gloo binds to the address of this machine's hostname. On one machine the hostname may not resolve. On
    several machines the hostname often resolves to the loopback interface, which other machines cannot reach.
    `local_address`: this machine on the route to rank 0. `master_addresses`: addresses by which ranks reach rank 0.
    """
    if one_machine:
        with contextlib.suppress(OSError):
            return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")
        return ""
    try:
        addresses = [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)]
    except OSError:
        addresses = []
    if not all(map(_is_unroutable, addresses)):
        return ""
    names = (_interface_of(address) for address in (local_address, *master_addresses) if not _is_unroutable(address))
    return next(filter(None, names), "")


def _is_unroutable(address: str) -> bool:
    return not address or ipaddress.ip_address(address.partition("%")[0]).is_loopback


def route(address: str, port: int) -> tuple[str, str]:
    """Return local and remote IPv4 address of a route to `address`, or ('', '')."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))  # sends nothing, but chooses an interface
        return probe.getsockname()[0], probe.getpeername()[0]
    return "", ""


def _interface_of(address: str) -> str:
    query = 0x8915  # SIOCGIFADDR of Linux: netdevice(7)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # interface without an address
                if socket.inet_ntoa(ioctl(sock, query, struct.pack("256s", name.encode()[:15]))[20:24]) == address:
                    return name
    return ""


def redirect_output(path: Path) -> None:
    """Redirect stdout and stderr of this process to a file."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]


def apply_context(config: wire.RankConfig, context: wire.ProcessContext) -> None:
    """Apply `context` and variables such as `RANK` to this process; reseed random generators."""
    environment = {
        **compilation.ONE_THREAD,
        **context.environment,
        "RANK": str(config.rank),
        "WORLD_SIZE": str(config.world_size),
        "LOCAL_RANK": str(config.local_rank),
        "LOCAL_WORLD_SIZE": str(config.local_world_size),
        wire.NO_LAUNCH: "0",
    }
    if "GLOO_SOCKET_IFNAME" not in environment:
        address = route(*config.store)[0] if config.store else ""
        if interface := gloo_interface(config.store is None, address, config.masters):
            environment["GLOO_SOCKET_IFNAME"] = interface
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    read_named_functions()
    try:
        os.chdir(context.cwd)
    except OSError as error:
        raise DDPCheckError(
            f"The rank could not enter the working directory {context.cwd}: {error.strerror}."
        ) from error
    sys.path[:] = context.path
    sys.argv[:] = context.argv
    sys.path_importer_cache.clear()  # 100 times cheaper than importlib.invalidate_caches() after a fork
    tempfile.tempdir = None
    seed()
    if "TORCH_DISTRIBUTED_DEBUG" in context.explicit:
        import torch.distributed as dist

        dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # not an explicit re-export


def seed() -> None:
    """Reseed every random generator, since forked ranks inherit equal generator states."""
    random.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    sys.modules["torch"].default_generator.seed()


def generators(*, thorough: bool) -> dict[str, Any]:
    """Return the random generator states of torch; if `thorough`, also of Python and numpy."""
    torch, numpy, states = sys.modules.get("torch"), sys.modules.get("numpy.random"), dict[str, Any]()
    if torch is not None and hasattr(torch, "get_rng_state"):  # False while torch is being imported
        states["torch"] = torch.get_rng_state()
        if torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state()
    if thorough:
        states["random"] = random.getstate()
        if numpy is not None:
            states["numpy"] = numpy.get_state()
    return states


def changed_since(before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of random generators (not of GPUs) that differ from `before`."""
    now = generators(thorough=True)
    return {name: now[name] for name in now if name != "cuda" and _as_text(now[name]) != _as_text(before.get(name))}


def _as_text(state: Any) -> str:
    return str(state.tolist() if hasattr(state, "tolist") else state)


def set_generators(states: Mapping[str, Any]) -> None:
    """Restore the states returned by `generators`."""
    if "torch" in states:
        sys.modules["torch"].set_rng_state(states["torch"])
    if "cuda" in states:
        sys.modules["torch"].cuda.set_rng_state(states["cuda"])
    if "random" in states:
        random.setstate(states["random"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])


def choose_device(device: str, backend: str, rank: int, world_size: int) -> tuple[str, bool]:
    """Set the GPU of this rank; return (device, True if shared), or raise `UsageError`.

    `rank` and `world_size` count only the ranks that see the same GPUs.
    """
    if device == "cpu":
        return "cpu", False
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        raise UsageError(
            "device 'cuda' was asked for, but torch finds no GPU; use device='cpu', or see torch.cuda.is_available()."
        )
    if backend == "nccl" and world_size > count:
        raise UsageError(
            f"backend 'nccl' needs a GPU for every rank: {world_size} ranks, {count} GPU{'s' * (count > 1)}; "
            "use backend='gloo' to share, or fewer ranks."
        )
    torch.cuda.set_device(rank % count)
    return f"cuda:{rank % count}", world_size > count


def join_group(config: wire.RankConfig, store: str) -> None:
    """Initialize the default process group with a `FileStore` or `TCPStore` named `store`."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

    torch_store: Store
    if config.store is None:
        torch_store = FileStore(os.path.join(config.directory, store), config.world_size)
    else:
        torch_store = PrefixStore(store, TCPStore(*config.store, None, False, timedelta(minutes=2), False))
    dist.init_process_group(
        config.backend,
        store=torch_store,
        rank=config.rank,
        world_size=config.world_size,
        timeout=timedelta(days=1),  # the parent enforces the real timeout
    )


# --- Imports before ranks start --------------------------------------------------------------------------------------


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
        if name in DDP_MODULES and isinstance(error, ModuleNotFoundError) and error.name == name:
            return ""  # missing in some versions of torch
        lines = str(error).strip().splitlines()
        message = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        return f"preload: the module {name!r} cannot be imported: {message}"
    return ""


def _import_dynamo() -> None:
    """Import `torch._dynamo` with a temporary cache directory, removed after the import."""
    global _scratch
    _scratch = os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="ddpcheck-")
    try:
        importlib.import_module("torch._dynamo")
    finally:
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
        clean_up()


_scratch = ""


def clean_up() -> None:
    """Remove the cache directory of `_import_dynamo`; also called before an early exit."""
    if _scratch:
        shutil.rmtree(_scratch, ignore_errors=True)
