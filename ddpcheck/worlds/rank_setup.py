"""Setup of a rank: output, environment, seeds, device, process group. Imports torch only inside functions."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import socket
import struct
import sys
import tempfile
from collections.abc import Iterable
from datetime import timedelta
from fcntl import ioctl
from pathlib import Path

from ddpcheck.findings.errors import DDPCheckError, UsageError
from ddpcheck.findings.named_functions import read_named_functions
from ddpcheck.worlds import compilation, wire


def gloo_interface(one_machine: bool, own: str, master: Iterable[str]) -> str:
    """Return the value for `GLOO_SOCKET_IFNAME`, or '' if gloo's default works.

    By default gloo binds to the address of this machine's hostname. On one machine the hostname may not resolve; on
    several machines it must not resolve to the loopback interface, as is common. `own` is this machine's address on
    the route to rank 0, `master` the address under which each rank reaches rank 0's machine, which may be this machine.
    """
    if one_machine:
        with contextlib.suppress(OSError):
            return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")
        return ""
    try:
        addresses = [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)]
    except OSError:
        addresses = []
    if not all(map(_leads_nowhere, addresses)):
        return ""
    names = (_interface_of(address) for address in (own, *master) if not _leads_nowhere(address))
    return next(filter(None, names), "")


def _leads_nowhere(address: str) -> bool:
    return not address or ipaddress.ip_address(address.partition("%")[0]).is_loopback


def route(address: str, port: int) -> tuple[str, str]:
    """Return local and remote IPv4 address of a connection, or ('', '')."""
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


def take_over(config: wire.RankConfig, context: wire.ProcessContext) -> None:
    """Apply the parent's environment, working directory and import path."""
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
    """Reseed every generator, since inherited states are the same on all ranks."""
    random.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    sys.modules["torch"].default_generator.seed()


def choose_device(device: str, backend: str, rank: int, world_size: int) -> tuple[str, bool]:
    """Set the device of a rank; return (device, True if shared), or raise `UsageError`.

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

    meeting: Store
    if config.store is None:
        meeting = FileStore(os.path.join(config.directory, store), config.world_size)
    else:
        meeting = PrefixStore(store, TCPStore(*config.store, None, False, timedelta(minutes=2), False))
    dist.init_process_group(
        config.backend,
        store=meeting,
        rank=config.rank,
        world_size=config.world_size,
        timeout=timedelta(days=1),  # the parent enforces the real timeout
    )
