"""Messages between the parent and its ranks: length-prefixed pickles on a socket, and functions sent by value.

Three kinds of traffic share this module. Parent and rank exchange tuples on one stream socket a rank. The fork
server reports forks and exits on one stream socket a world. A function with its arguments travels as one
cloudpickle inside a tuple, so that a rank can receive what it cannot import and say so in a sentence.

Bytes of any size go over a store of torch in pieces: a TCPStore closes the connection on a value of more than 8 MiB.
"""

from __future__ import annotations

import builtins
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
"""Environment variable: id of the process that `RANK` and the other variables belong to.

What that process starts inherits the variables and is no rank. Our own ranks have not been launched: they say 0.
"""

MAX_FDS = 100  # file descriptors in one packet to the fork server; the kernel's limit is 253


@dataclass(frozen=True, slots=True)
class ProcessContext:
    """The state of the parent that a rank takes over, as a process would that the parent starts now."""

    environment: Mapping[str, str]  # with what was asked for on top of it
    explicit: frozenset[str]  # names of the variables that were asked for
    cwd: str
    path: tuple[str, ...]  # `sys.path`
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RankConfig:
    """All that a rank needs to know to become one; the first message of its life, after the fork."""

    rank: int
    world_size: int
    backend: str
    device: str
    directory: str
    process_group: bool
    threads: int
    context: ProcessContext
    local_rank: int  # among those of its machine
    local_world_size: int
    sharing: tuple[int, int]  # its number among the ranks that see the same GPUs, and how many those are
    preload: tuple[str, ...] = ()
    store: tuple[str, int] | None = None  # where the ranks of several machines meet; `None`: in a file
    masters: tuple[str, ...] = ()  # the addresses by which these reach the machine of rank 0


def pack(message: object) -> bytes:
    """Return `message` as it goes over a socket."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(body)) + body


def receive(sock: socket.socket) -> Any:
    """Wait for one message on a blocking socket; `None` when the other side is gone."""
    header = read(sock, _HEADER.size)
    if header is None:
        return None
    body = read(sock, _HEADER.unpack(header)[0])
    return None if body is None else pickle.loads(body)


def read(sock: socket.socket, size: int) -> bytearray | None:
    """Wait for so many bytes on a blocking socket; `None` when the other side is gone before."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        try:
            count = sock.recv_into(view, min(len(view), _CHUNK))
        except ConnectionError:
            return None
        if not count:
            return None
        view = view[count:]
    return data


class Outbox:
    """Keeps bytes for a non-blocking socket until it takes them."""

    def __init__(self) -> None:
        self._parts: deque[memoryview] = deque()

    def __bool__(self) -> bool:
        return bool(self._parts)

    def send(self, sock: socket.socket, data: bytes = b"") -> None:
        """Send what the socket takes now, `data` last; where the other side is gone, its exit is told elsewhere."""
        if data:
            self._parts.append(memoryview(data))
        try:
            while self._parts:
                self._parts[0] = self._parts[0][sock.send(self._parts[0]) :]
                if not self._parts[0]:
                    self._parts.popleft()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._parts.clear()


class Inbox:
    """Turns the bytes of a non-blocking socket back into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def drain(self, sock: socket.socket) -> tuple[list[Any], bool]:
        """Read what has arrived, without waiting: complete messages, and whether the other side is still there."""
        alive = True
        while True:
            try:
                chunk = sock.recv(_CHUNK)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                chunk = b""
            if not chunk:
                alive = False
                break
            self._data += chunk
        return list(self._messages()), alive

    def _messages(self) -> Iterator[Any]:
        while len(self._data) >= _HEADER.size:
            end = _HEADER.size + _HEADER.unpack_from(self._data)[0]
            if len(self._data) < end:
                return
            with memoryview(self._data) as view, view[_HEADER.size : end] as body:
                message = pickle.loads(body)
            del self._data[:end]
            yield message


# --- Functions and values that travel ------------------------------------------------------------------------

_registry = threading.Lock()


def dumps(value: object) -> bytes:
    """Pickle anything cloudpickle can, with code of modules that a rank cannot import sent by value."""
    import cloudpickle

    by_value: list[types.ModuleType] = []

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, type) and obj.__module__ == "builtins" and not hasattr(builtins, obj.__name__):
                name = obj.__name__  # pytest.skip and its like say that they are built in
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

    with _registry, io.BytesIO() as file:
        try:
            Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
            return file.getvalue()
        finally:
            for module in by_value:
                cloudpickle.unregister_pickle_by_value(module)


def _with_gradient(obj: Any) -> tuple[Any, ...] | None:
    """The reduction of a leaf together with its gradient, which torch leaves out; `None` for everything else."""
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
    """Those of some values, by name, that cannot be pickled, each with the reason."""
    for name, value in values.items():
        try:
            dumps(value)
        except Exception as reason:
            yield name, value, reason


def loads(data: bytes) -> Any:
    """Undo `dumps`."""
    return pickle.loads(data)


def importable(module: types.ModuleType) -> bool:
    """Whether another process with our `sys.path` would find this very file under the module's name."""
    name = module.__name__
    file = getattr(module, "__file__", None)
    if name == "__main__" or file is None or sys.modules.get(name) is not module:
        return True  # built in, or cloudpickle knows better
    if name.startswith(_OURS) and file.startswith(_HOME):
        return True  # without a look into every folder of the path, which each rank would have to take anew
    key = (name, file, tuple(sys.path))
    if key not in _importable_cache:
        _importable_cache[key] = _find(name, file)
    return _importable_cache[key]


_OURS = __name__.partition(".")[0] + "."
_HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_importable_cache: dict[tuple[str, str, tuple[str, ...]], bool] = {}


def _find(name: str, file: str) -> bool:
    parent, _, _ = name.rpartition(".")
    path = None
    if parent:
        package = sys.modules.get(parent)
        path = getattr(package, "__path__", None)
        package_file = getattr(package, "__file__", None)
        if package is None or path is None or (package_file is not None and not _find(parent, package_file)):
            return False
    finders: list[Any] = [importlib.machinery.PathFinder, *sys.meta_path]
    for finder in finders:
        try:
            spec = finder.find_spec(name, path)
        except Exception:
            continue
        if spec is not None:
            origin = spec.origin
            return origin is not None and os.path.realpath(origin) == os.path.realpath(file)
    return False


_PIECE = 4 << 20  # bytes
_COUNT = 4  # bytes at the beginning of the first piece, which say how many there are


def put_value(put: Callable[[str, bytes], object], name: str, data: bytes) -> None:
    """Write a value; `name` itself last, so that a rank that has waited for it finds all of it."""
    pieces = [data[start : start + _PIECE] for start in range(0, len(data), _PIECE)] or [b""]
    for index, piece in enumerate(pieces[1:], 1):
        put(f"{name}#{index}", piece)
    put(name, len(pieces).to_bytes(_COUNT, "big") + pieces[0])


def get_value(get: Callable[[str], bytes], name: str) -> bytes:
    """Read a value that exists."""
    first = bytes(get(name))
    more = range(1, int.from_bytes(first[:_COUNT], "big"))
    return b"".join([first[_COUNT:], *(bytes(get(f"{name}#{index}")) for index in more)])


def remove_value(delete: Callable[[str], bool], name: str) -> None:
    """Delete a value; `delete` returns whether a key was there."""
    piece = 0
    while delete(f"{name}#{piece}" if piece else name):
        piece += 1
