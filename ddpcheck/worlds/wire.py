"""Messages between parent and ranks: length-prefixed pickles of tuples, one stream socket per rank.

A function and its arguments are one cloudpickle inside a tuple, so that a rank can report an import error of the
payload. Large values are split for torch stores: a TCPStore closes the connection on a value of more than 8 MiB.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import io
import os
import pickle
import socket
import struct
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_HEADER = struct.Struct("!Q")
_CHUNK = 1 << 18

NO_LAUNCH = "_DDPCHECK_RANK_OF"
"""Environment variable with the pid of the process for which `RANK` etc. were set.

A child process with another pid inherits the variables, but is no rank. The value is 0 in ranks that ddpcheck starts.
"""

MAX_FDS = 100  # file descriptors in one packet to the fork server; the kernel's limit is 253


@dataclass(frozen=True, slots=True)
class ProcessContext:
    """Environment, working directory, import path and arguments of the parent, for a rank."""

    environment: Mapping[str, str]  # including the explicit variables
    explicit: frozenset[str]  # names of the variables set by the `env` option
    cwd: str
    path: tuple[str, ...]  # `sys.path`
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RankConfig:
    """Configuration of a rank, sent as the first message after the fork."""

    rank: int
    world_size: int
    backend: str
    device: str
    directory: str
    process_group: bool
    threads: int
    context: ProcessContext
    local_rank: int  # rank among the ranks on its machine
    local_world_size: int
    sharing: tuple[int, int]  # (index, count) among the ranks that see the same GPUs
    preload: tuple[str, ...] = ()
    store: tuple[str, int] | None = None  # host and port of the TCPStore; `None`: FileStore on one machine
    masters: tuple[str, ...] = ()  # addresses at which ranks reach the machine of rank 0


def pack(message: object) -> bytes:
    """Return `message` as a length-prefixed pickle."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(body)) + body


def receive(sock: socket.socket) -> Any:
    """Receive one message on a blocking socket; `None` if disconnected."""
    header = read_exactly(sock, _HEADER.size)
    if header is None:
        return None
    body = read_exactly(sock, _HEADER.unpack(header)[0])
    return None if body is None else pickle.loads(body)


def read_exactly(sock: socket.socket, size: int) -> bytearray | None:
    """Read `size` bytes from a blocking socket; `None` if disconnected."""
    data = bytearray(size)
    view = memoryview(data)
    with contextlib.suppress(ConnectionError):
        while view and (count := sock.recv_into(view, min(len(view), _CHUNK))):
            view = view[count:]
    return None if view else data


class Outbox:
    """Send buffer of a non-blocking socket."""

    def __init__(self) -> None:
        self._parts: deque[memoryview] = deque()

    def __bool__(self) -> bool:
        return bool(self._parts)

    def send(self, sock: socket.socket, data: bytes = b"") -> None:
        """Append `data` and send as much as possible; discard all if disconnected."""
        if data:
            self._parts.append(memoryview(data))
        try:
            while self._parts:
                self._parts[0] = self._parts[0][sock.send(self._parts[0]) :]
                if not self._parts[0]:
                    self._parts.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._parts.clear()


class Inbox:
    """Receive buffer of a non-blocking socket, decoded into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def drain(self, sock: socket.socket) -> tuple[list[Any], bool]:
        """Return the complete messages received so far, and True if still connected; non-blocking."""
        connected = False
        try:
            while chunk := sock.recv(_CHUNK):
                self._data += chunk
        except BlockingIOError:
            connected = True
        except OSError:
            pass
        messages = []
        while len(self._data) >= _HEADER.size:
            end = _HEADER.size + _HEADER.unpack_from(self._data)[0]
            if len(self._data) < end:
                break
            with memoryview(self._data) as view, view[_HEADER.size : end] as body:
                messages.append(pickle.loads(body))
            del self._data[:end]
        return messages, connected


# --- Pickling of functions and values ------------------------------------------------------------------------

_pickle_lock = threading.Lock()


def dumps(value: object) -> bytes:
    """Pickle with cloudpickle; code that ranks cannot import is pickled by value."""
    import cloudpickle

    by_value: list[types.ModuleType] = []

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, type) and obj.__module__ == "builtins" and not hasattr(builtins, obj.__name__):
                name = obj.__name__  # pytest.skip and similar claim module "builtins"
                outcomes = sys.modules.get("_pytest.outcomes")
                if outcomes is not None and getattr(outcomes, name, None) is obj:
                    return getattr, (outcomes, name)
            if (with_gradient := _with_gradient(obj)) is not None:
                return with_gradient
            if isinstance(obj, (type, types.FunctionType)):
                module = sys.modules.get(getattr(obj, "__module__", None) or "")
                if module is not None and module not in by_value and not importable(module):
                    cloudpickle.register_pickle_by_value(module)
                    by_value.append(module)
            return super().reducer_override(obj)

    with _pickle_lock, io.BytesIO() as file:
        try:
            Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
            return file.getvalue()
        finally:
            for module in by_value:
                cloudpickle.unregister_pickle_by_value(module)


def _with_gradient(obj: Any) -> tuple[Any, ...] | None:
    """Return the reduce tuple of a leaf tensor with its gradient; `None` without gradient."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(obj, torch.Tensor) or not obj.is_leaf or obj.grad is None:
        return None
    make, arguments, *state = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return _restored, (make, arguments, obj.grad), *state


def _restored(make: Any, arguments: tuple[Any, ...], gradient: Any) -> Any:
    tensor = make(*arguments)
    tensor.grad = gradient
    return tensor


def unsendable(values: Mapping[str, Any]) -> Iterator[tuple[str, Any, Exception]]:
    """Yield name, value and error of each value that cannot be pickled."""
    for name, value in values.items():
        try:
            dumps(value)
        except Exception as reason:
            yield name, value, reason


def loads(data: bytes) -> Any:
    """Unpickle a value that `dumps` pickled."""
    return pickle.loads(data)


def importable(module: types.ModuleType) -> bool:
    """Return True if ranks can import the module: its name loads the same file."""
    name = module.__name__
    file = getattr(module, "__file__", None)
    if name == "__main__" or file is None or sys.modules.get(name) is not module:
        return True  # built in, or handled by cloudpickle
    if name.startswith(_PACKAGE) and file.startswith(_HOME):
        return True  # skip the search of sys.path, which each rank would repeat
    key = (name, file, tuple(sys.path))
    if key not in _importable_cache:
        _importable_cache[key] = _is_found(name, file)
    return _importable_cache[key]


_PACKAGE = __name__.partition(".")[0] + "."
_HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_importable_cache: dict[tuple[str, str, tuple[str, ...]], bool] = {}


def _is_found(name: str, file: str) -> bool:
    parent, _, _ = name.rpartition(".")
    path = None
    if parent:
        package = sys.modules.get(parent)
        path = getattr(package, "__path__", None)
        package_file = getattr(package, "__file__", None)
        if path is None or (package_file is not None and not _is_found(parent, package_file)):
            return False
    finders: list[Any] = [importlib.machinery.PathFinder, *sys.meta_path]
    for finder in finders:
        with contextlib.suppress(Exception):
            if (spec := finder.find_spec(name, path)) is not None:
                return spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(file)
    return False


_PIECE = 4 << 20  # bytes
_COUNT = 4  # bytes of the piece count at the start of the first piece


def put_value(put: Callable[[str, bytes], object], name: str, data: bytes) -> None:
    """Write a value in 4 MiB pieces; the key `name`, written last, signals completion."""
    pieces = [data[start : start + _PIECE] for start in range(0, len(data), _PIECE)] or [b""]
    for index, piece in enumerate(pieces[1:], 1):
        put(f"{name}#{index}", piece)
    put(name, len(pieces).to_bytes(_COUNT, "big") + pieces[0])


def get_value(get: Callable[[str], bytes], name: str) -> bytes:
    """Read a value that `put_value` wrote; the value must exist."""
    head = bytes(get(name))
    indices = range(1, int.from_bytes(head[:_COUNT], "big"))
    return b"".join([head[_COUNT:], *(bytes(get(f"{name}#{index}")) for index in indices)])


def remove_value(delete: Callable[[str], bool], name: str) -> None:
    """Delete all pieces of a value; `delete` returns True if the key existed."""
    piece = 0
    while delete(f"{name}#{piece}" if piece else name):
        piece += 1
