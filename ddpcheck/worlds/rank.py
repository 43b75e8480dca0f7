"""One rank of a world: sets itself up, does what the parent sends, reports, and leaves without a trace.

What runs in a rank finds itself through `current`, keeps values between runs in `state`, and says where it is
with `set_status` and `set_collective`. Both write to a small file in shared memory, so that the parent can read
them when this process is stuck in C++ or dead.

This module imports torch only inside functions.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ddpcheck.findings.errors import DDPCheckError, UsageError
from ddpcheck.findings.tracebacks import for_target
from ddpcheck.stream.held_file import mapped_file
from ddpcheck.worlds import compilation, failures, wire
from ddpcheck.worlds.assert_rewriting import rewrite_on_import
from ddpcheck.worlds.preloading import import_named
from ddpcheck.worlds.rank_setup import choose_device, join_group, redirect_output, take_over


@dataclass(frozen=True)
class RankContext:
    """This rank: its number, device and world."""

    rank: int  # its number
    world_size: int  # of how many
    backend: str  # of the default process group
    device: str  # `cpu`, or `cuda:<index>`
    directory: Path  # the world's scratch directory; removed when the world closes
    shared_gpu: bool  # whether more ranks than one use this rank's GPU


state: dict[str, Any] = {}  # survives from one run to the next on the same world

_context: RankContext | None = None
_slots: Slots | None = None


def current() -> RankContext:
    """Return what this rank knows about itself.

    Raises:
        DDPCheckError: When this process is not a rank.
    """
    if _context is None:
        raise DDPCheckError(
            "ddpcheck.rank.current() was called outside a rank; call it in a function given to World.run."
        )
    return _context


# --- Slots: what the parent can read when nothing else works ---------------------------------------------------


class Slots(ctypes.Structure):
    """What a rank has said of itself last."""

    # Texts that do not fit are cut off.
    _fields_ = (
        ("place_bytes", ctypes.c_char * 2048),
        ("collective_bytes", ctypes.c_char * 2048),
        ("compiled", ctypes.c_double),
        ("compiles_since", ctypes.c_double),
        ("turns", ctypes.c_uint64),
    )
    place_bytes: bytes
    collective_bytes: bytes
    compiled: float  # seconds that it has compiled in this run, but for what it compiles now
    compiles_since: float  # by `time.monotonic()`; 0 where it does not compile
    turns: int  # how often it has said where it is

    @property
    def place(self) -> str:
        return self.place_bytes.decode("utf-8", "replace")

    @property
    def collective(self) -> str:
        """The collective that it is about to wait in, empty where it is in none."""
        return self.collective_bytes.decode("utf-8", "replace")

    def compiling(self, now: float) -> float:
        """The seconds that the rank has compiled in its last run until `now`."""
        return self.compiled + max(0.0, now - self.compiles_since if self.compiles_since else 0.0)


def set_status(text: str) -> None:
    """Say where this rank is, in words such as `step 1: backward`; nothing happens outside a rank."""
    if _slots is not None:
        _slots.place_bytes = text.encode("utf-8", "replace")[:2048]
        _slots.turns += 1


def set_collective(text: str) -> None:
    """Say which collective this rank is about to wait in, `""` when it is in none."""
    if _slots is not None:
        _slots.collective_bytes = text.encode("utf-8", "replace")[:2048]


def set_compiling(seconds: float, since: float) -> None:
    """Say how long this rank has compiled in this run, and since when, by `time.monotonic()`, it does; 0: not now."""
    if _slots is not None:
        _slots.compiled, _slots.compiles_since = seconds, since


def read_slots(directory: Path, rank: int) -> Slots:
    """Return what a rank has said of itself last; nothing where it never did."""
    try:
        return Slots.from_buffer_copy((directory / f"rank{rank}.slots").read_bytes())
    except (OSError, ValueError):
        return Slots()


def own_slots() -> Slots:
    """Return what this rank has said of itself last."""
    return _slots or Slots()


# --- The life of a rank ------------------------------------------------------------------------------------------


def main(sock: socket.socket) -> NoReturn:
    """Be a rank on `sock` until the parent says that it is over; never returns."""
    code = 0
    try:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there is a file to dump the stack to
        _live(sock)
    except BaseException:  # a bug of ddpcheck: leave a trace where `World.output` finds it
        traceback.print_exc()
        code = 70
    finally:
        _flush()
        os._exit(code)  # after a fork from a process that had imported torch, a normal exit may never end


def main_spawned(fd: int, parent: int) -> NoReturn:
    """Be a rank that was started by exec: watch the parent, which nobody else does, and go on as `main`."""
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    main(sock)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.3)
    if _context is not None:
        import shutil

        shutil.rmtree(_context.directory, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _live(sock: socket.socket) -> None:
    message = wire.receive(sock)
    if message is None or message[0] != "config":
        return
    config: wire.RankConfig = message[1]
    group_resets = 0
    try:
        _set_up(config)
        sock.sendall(wire.pack(("ready", time.monotonic(), group_resets)))
        while (message := wire.receive(sock)) is not None:
            if message[0] == "task":
                rewrite_on_import(message[3])
                sock.sendall(_answer(sock, message[1], message[2]))
            elif message[0] == "context":
                set_status("starting up")
                take_over(config, message[1])
            elif message[0] == "reset_process_group":
                group_resets += 1
                _reset_process_group(config, group_resets)
                sock.sendall(wire.pack(("ready", time.monotonic(), group_resets)))
            else:
                return
    except BaseException as error:
        sock.sendall(wire.pack(("failure", 0, describe(error))))
        wire.receive(sock)


def _answer(sock: socket.socket, run: int, payload: bytes) -> bytes:
    """Do one task and return the reply, whatever happens."""
    global _task
    set_status("")
    set_collective("")
    compilation.forget_time()
    _task = _Task(sock, run)
    own = os.getpid()
    try:
        data = _perform(payload)
    except BaseException as error:  # pytest.skip and pytest.fail are no Exceptions
        announced = _task.failure
        reply = wire.pack(("failure", run, announced[1] if announced and announced[0] is error else describe(error)))
    else:
        reply = wire.pack(("result", run, data))
    finally:
        _task = None
    _flush()
    if os.getpid() != own:  # a process that the user's code has forked, and that does not speak for the rank
        os._exit(0)
    return reply


def announce(error: BaseException) -> None:
    """Tell the parent that this run fails with `error`, before anything is done about it that takes time.

    So it is known when that happened, and what this rank is about, should another rank's failure end the run meanwhile.
    Nothing happens in a process that is no rank of a `World`.
    """
    if _task is not None and _task.pid == os.getpid():
        _task.failure = (error, describe(error))
        _task.sock.sendall(wire.pack(("failing", _task.run, _task.failure[1])))


@dataclass
class _Task:
    """The task of this rank that is under way."""

    sock: socket.socket
    run: int
    pid: int = field(default_factory=os.getpid)
    failure: tuple[BaseException, dict[str, Any]] | None = None  # announced


_task: _Task | None = None


@for_target
def _perform(payload: bytes) -> bytes:
    try:
        function, args, kwargs = wire.loads(payload)  # of `worlds.validation.pack_task`
    except Exception as error:
        raise DDPCheckError(
            f"The function or its arguments could not be unpickled on the rank ({type(error).__name__}: {error}); "
            "what they refer to must be importable there."
        ) from error
    return packed_result(function(*args, **kwargs))


def packed_result(result: object) -> bytes:
    """Pickle what a function has returned; a `DDPCheckError` says that it cannot be."""
    try:
        return wire.dumps(result)
    except Exception as error:
        raise DDPCheckError(
            f"The function returned a {type(result).__qualname__} that cannot be pickled "
            f"({type(error).__name__}: {error}); return plain values or tensors."
        ) from error


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


# --- Setting up ----------------------------------------------------------------------------------------------------


def _set_up(config: wire.RankConfig) -> None:
    global _context, _slots
    directory = Path(config.directory)
    redirect_output(directory / f"rank{config.rank}.out")
    try:
        _slots = Slots.from_buffer(mapped_file(directory / f"rank{config.rank}.slots", ctypes.sizeof(Slots)))
    except OSError as error:
        raise UsageError(
            f"the files of a rank do not fit into {directory} ({error.strerror}): set TMPDIR to a folder with more room"
        ) from None
    set_status("starting up")
    stack = os.open(directory / f"rank{config.rank}.stack", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    faulthandler.enable(file=stack, all_threads=True)  # what a signal of its own kills says where it was

    import torch

    torch.set_num_threads(config.threads)  # first: an OpenMP operation before it may hang after a fork
    take_over(config, config.context)
    compilation.watch_compiling(set_compiling)
    for name in config.preload:  # after a fork it is there already
        if refusal := import_named(name):
            raise UsageError(refusal)
    device, shared = choose_device(config.device, config.backend, *config.sharing)
    _context = RankContext(config.rank, config.world_size, config.backend, device, directory, shared)
    if config.process_group:
        join_group(config, "store")
    set_status("")


def _reset_process_group(config: wire.RankConfig, number: int) -> None:
    """Leave every process group and what refers to them, and join the next default one."""
    import torch
    import torch.distributed as dist

    set_status("leaving the process group")
    set_collective("")
    state.clear()
    gc.collect()  # a DDP object in a cycle keeps its process group, with its threads and sockets
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_num_threads(config.threads)
    set_status("starting up")
    join_group(config, f"store{number}")
    set_status("")


def describe(error: BaseException) -> dict[str, Any]:
    """Return what the parent needs to make a `RankFailure` of `error`."""
    return failures.described(error, own_slots().place, own_slots().collective)


# --- Things that the parent keeps ----------------------------------------------------------------------------------


def save_attachment(data: bytes) -> None:
    """Save `data` for the parent, which finds it with `World.attachment` even when this rank dies; the last one counts.

    Raises:
        DDPCheckError: When this process is not a rank.
    """
    _save_whole(_path("attachment"), data)


def save_thread_error(name: str, error: BaseException) -> None:
    """Save what has ended the first thread of this rank that was ended so: the parent tells it if the rank waits on."""
    if not (path := _path("thread")).exists():
        _save_whole(path, json.dumps([name, {**describe(error), "exception": None}]).encode())


def forget_thread_error() -> None:
    """Another run begins."""
    _path("thread").unlink(missing_ok=True)


def _path(kind: str) -> Path:
    context = current()
    return context.directory / f"rank{context.rank}.{kind}"


def _save_whole(path: Path, data: bytes) -> None:
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_bytes(data)
    unfinished.replace(path)  # whole or not at all
