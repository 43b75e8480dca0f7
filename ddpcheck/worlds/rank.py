"""Rank of a world: setup, the parent's tasks, results. Imports torch only inside functions."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import shutil
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
from ddpcheck.findings.tracebacks import runs_target
from ddpcheck.stream.log_file import mapped_file
from ddpcheck.worlds import compilation, failures, wire
from ddpcheck.worlds.assert_rewriting import rewrite_on_import
from ddpcheck.worlds.rank_setup import apply_context, choose_device, import_named, join_group, redirect_output


@dataclass(frozen=True)
class RankContext:
    """Rank, device and world of this process."""

    rank: int
    world_size: int
    backend: str  # of the default process group
    device: str  # `cpu`, or `cuda:<index>`
    directory: Path  # the world's scratch directory; removed when the world closes
    shared_gpu: bool  # True if other ranks use the same GPU


state: dict[str, Any] = {}  # for user code; kept between calls of `World.run`

_context: RankContext | None = None
_slots: Slots | None = None


def current() -> RankContext:
    """Return the context of this rank.

    Raises:
        DDPCheckError: When this process is not a rank.
    """
    if _context is None:
        raise DDPCheckError(
            "ddpcheck.rank.current() was called outside a rank; call it in a function given to World.run."
        )
    return _context


# --- Slots: memory-mapped state that the parent can read from a hung or dead rank --------------------------------


class Slots(ctypes.Structure):
    """Status, current collective and compile time of a rank, memory-mapped for the parent process."""

    # Longer texts are truncated.
    _fields_ = (
        ("status_bytes", ctypes.c_char * 2048),
        ("collective_bytes", ctypes.c_char * 2048),
        ("compiled", ctypes.c_double),
        ("compiles_since", ctypes.c_double),
        ("num_status_updates", ctypes.c_uint64),
    )
    status_bytes: bytes
    collective_bytes: bytes
    compiled: float  # compile seconds in this run, without the current compilation
    compiles_since: float  # start of the current compilation by `time.monotonic()`; 0 if none
    num_status_updates: int  # number of `set_status` calls; increases while the rank makes progress

    @property
    def status(self) -> str:
        return self.status_bytes.decode("utf-8", "replace")

    @property
    def collective(self) -> str:
        """The collective that the rank is entering or waiting in, or ''."""
        return self.collective_bytes.decode("utf-8", "replace")

    def compiling(self, now: float) -> float:
        """Return the compile seconds in this run until `now`, including the current compilation."""
        return self.compiled + max(0.0, now - self.compiles_since if self.compiles_since else 0.0)


def set_status(text: str) -> None:
    """Record what this rank is doing, such as `step 1: backward`."""
    if _slots is not None:
        _slots.status_bytes = text.encode("utf-8", "replace")[:2048]
        _slots.num_status_updates += 1


def set_collective(text: str) -> None:
    """Record the collective that this rank is entering, or `""` if none."""
    if _slots is not None:
        _slots.collective_bytes = text.encode("utf-8", "replace")[:2048]


def read_slots(directory: Path, rank: int) -> Slots:
    """Return the `Slots` that a rank writes to its file; empty `Slots` if unreadable."""
    try:
        return Slots.from_buffer_copy((directory / f"rank{rank}.slots").read_bytes())
    except (OSError, ValueError):
        return Slots()


def current_slots() -> Slots:
    """Return the `Slots` (status, collective, compile time) of this rank, empty outside a rank."""
    return _slots or Slots()


# --- Main loop of a rank ------------------------------------------------------------------------------------------


def main(sock: socket.socket) -> NoReturn:
    """Run this process as a rank: serve requests from `sock` until the world closes."""
    code = 0
    try:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until faulthandler has its file
        _serve(sock)
    except BaseException:  # a bug of ddpcheck: show the traceback in `World.output`
        traceback.print_exc()
        code = 70
    finally:
        _flush()
        os._exit(code)  # a normal exit may hang in a fork of a process with torch


def main_spawned(fd: int, parent: int) -> NoReturn:
    """Run `main` in a rank started by exec; exit when the parent dies."""
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    main(sock)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.3)
    if _context is not None:
        shutil.rmtree(_context.directory, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _serve(sock: socket.socket) -> None:
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
                apply_context(config, message[1])
            elif message[0] == "reset_process_group":
                group_resets += 1
                _reset_process_group(config, group_resets)
                sock.sendall(wire.pack(("ready", time.monotonic(), group_resets)))
            else:
                return
    except BaseException as error:
        sock.sendall(wire.pack(("failure", 0, exception_data(error))))
        wire.receive(sock)


def _answer(sock: socket.socket, run: int, payload: bytes) -> bytes:
    global _task
    set_status("")
    set_collective("")
    compilation.reset_compile_time()
    _task = _Task(sock, run)
    pid = os.getpid()
    try:
        data = _run_task(payload)
    except BaseException as error:  # pytest.skip and pytest.fail derive from BaseException
        announced = _task.failure
        reply = wire.pack(
            ("failure", run, announced[1] if announced and announced[0] is error else exception_data(error))
        )
    else:
        reply = wire.pack(("result", run, data))
    finally:
        _task = None
    _flush()
    if os.getpid() != pid:  # a child forked by user code, not the rank
        os._exit(0)
    return reply


def announce(error: BaseException) -> None:
    """Report the failure of this run to the parent before slow error handling.

    Keeps time and message of this failure even if another rank's failure ends the run first. No effect outside a
    rank of a `World`.
    """
    if _task is not None and _task.pid == os.getpid():
        _task.failure = (error, exception_data(error))
        _task.sock.sendall(wire.pack(("failing", _task.run, _task.failure[1])))


@dataclass
class _Task:
    sock: socket.socket
    run: int
    pid: int = field(default_factory=os.getpid)
    failure: tuple[BaseException, dict[str, Any]] | None = None  # sent by `announce`


_task: _Task | None = None


@runs_target
def _run_task(payload: bytes) -> bytes:
    try:
        function, args, kwargs = wire.loads(payload)  # packed by `worlds.validation.pack_task`
    except Exception as error:
        raise DDPCheckError(
            f"The function or its arguments could not be unpickled on the rank ({type(error).__name__}: {error}); "
            "what they refer to must be importable there."
        ) from error
    return packed_result(function(*args, **kwargs))


def packed_result(result: object) -> bytes:
    """Pickle the return value of a task; raise `DDPCheckError` if that fails."""
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
    faulthandler.enable(file=stack, all_threads=True)  # dump the stack on a fatal signal

    import torch

    torch.set_num_threads(config.threads)  # first: an earlier OpenMP operation may hang after a fork
    apply_context(config, config.context)
    compilation.watch_compiling(_slots)
    for name in config.preload:  # no-op after a fork from the server
        if refusal := import_named(name):
            raise UsageError(refusal)
    device, shared = choose_device(config.device, config.backend, *config.sharing)
    _context = RankContext(config.rank, config.world_size, config.backend, device, directory, shared)
    if config.process_group:
        join_group(config, "store")
    set_status("")


def _reset_process_group(config: wire.RankConfig, number: int) -> None:
    import torch
    import torch.distributed as dist

    set_status("leaving the process group")
    set_collective("")
    state.clear()
    gc.collect()  # a DDP object in a reference cycle keeps its process group, threads and sockets alive
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_num_threads(config.threads)
    set_status("starting up")
    join_group(config, f"store{number}")
    set_status("")


def exception_data(error: BaseException) -> dict[str, Any]:
    """Return data on `error`, from which the parent makes a `RankFailure`."""
    return failures.exception_data(error, current_slots().status, current_slots().collective)


# --- Files for the parent ------------------------------------------------------------------------------------------


def save_attachment(data: bytes) -> None:
    """Save `data` for `World.attachment`, readable even if this rank dies; replaces earlier data.

    Raises:
        DDPCheckError: When this process is not a rank.
    """
    _save_atomically(_file_path("attachment"), data)


def save_thread_error(name: str, error: BaseException) -> None:
    """Save the first exception of any thread in a run, for `failures.thread_failure`."""
    if not (path := _file_path("thread")).exists():
        _save_atomically(path, json.dumps([name, {**exception_data(error), "exception": None}]).encode())


def forget_thread_error() -> None:
    """Delete the saved thread error at the start of a run."""
    _file_path("thread").unlink(missing_ok=True)


def _file_path(kind: str) -> Path:
    context = current()
    return context.directory / f"rank{context.rank}.{kind}"


def _save_atomically(path: Path, data: bytes) -> None:
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_bytes(data)
    unfinished.replace(path)  # atomic
