"""The network interface that gloo must talk through, where it would not find that by itself."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from collections.abc import Iterable


def gloo_interface(one_machine: bool, own: str, master: Iterable[str]) -> str:
    """The interface that gloo must be told of, empty where it finds it by itself.

    Gloo tells the other ranks the address that this machine's own name stands for. On one machine the name need not
    stand for any, and on several it must not stand for the loopback interface, as it does on many. `own` is the address
    from which this machine reaches that of rank 0, `master` by which each rank reaches that: one may be ours.
    """
    if one_machine:
        return _loopback()
    try:
        known = [str(one[4][0]) for one in socket.getaddrinfo(socket.gethostname(), None)]
    except OSError:
        known = []
    if not all(map(_leads_nowhere, known)):
        return ""
    names = (_interface_of(address) for address in (own, *master) if not _leads_nowhere(address))
    return next(filter(None, names), "")


def _loopback() -> str:
    try:
        return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")
    except OSError:
        return ""


def _leads_nowhere(address: str) -> bool:
    return not address or ipaddress.ip_address(address.partition("%")[0]).is_loopback


def route(address: str, port: int) -> tuple[str, str]:
    """The IPv4 addresses of this end and the other one of a connection; both empty where there is no way."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))  # sends nothing, but chooses an interface
        return probe.getsockname()[0], probe.getpeername()[0]
    return "", ""


def _interface_of(address: str) -> str:
    """The interface of this machine with an IPv4 address; empty where none has it, or the system does not say."""
    try:
        from fcntl import ioctl
    except ImportError:
        return ""
    query = 0x8915  # SIOCGIFADDR of Linux: netdevice(7)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an address
                if socket.inet_ntoa(ioctl(sock, query, struct.pack("256s", name.encode()[:15]))[20:24]) == address:
                    return name
    return ""
