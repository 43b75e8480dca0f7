"""`init_dist` (default process group under torchrun, `mpirun` or `srun`), `get_dist_info` and `master_only`.

The ranks first exchange their devices over a store, choose backend and GPUs identically, then initialize the group.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ddpcheck.findings.errors import ChoiceError, DDPCheckError, HangError, UsageError, WrongTypeError
from ddpcheck.findings.wording import format_ranks, pluralize_verb
from ddpcheck.worlds.launchers.detection import LAUNCHERS, LauncherEnv, require
from ddpcheck.worlds.launchers.rendezvous import this_machine
from ddpcheck.worlds.launchers.store import LauncherStore, StoreGoneError, open_store
from ddpcheck.worlds.rank_setup import gloo_interface, route
from ddpcheck.worlds.starting import wait_until
from ddpcheck.worlds.validation import check_choice, check_count, check_seconds

P = ParamSpec("P")
R = TypeVar("R")


def get_dist_info(group: Any = None) -> tuple[int, int]:
    """Return rank and world size; (0, 1) without process group, (-1, -1) outside `group`.

    Args:
        group: Process group; default: all ranks.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    return 0, 1


def master_only(function: Callable[P, R]) -> Callable[P, R | None]:
    """Decorate a function to run only on rank 0 and return `None` elsewhere.

    The rank is read at each call; without a process group, it is 0. Other ranks do not wait for rank 0: call
    `torch.distributed.barrier()` if they need its effects. No collective may be called inside. Supports coroutines.

    Raises:
        UsageError: The argument is not a function.
    """
    if not callable(function):
        hint = "; put it below @classmethod or @property" if isinstance(function, (classmethod, property)) else ""  # type: ignore[unreachable]
        raise WrongTypeError(f"master_only decorates a function or method, got {function!r}{hint}.")
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def coroutine(*args: P.args, **kwargs: P.kwargs) -> Any:
            return await function(*args, **kwargs) if get_dist_info()[0] == 0 else None

        return coroutine  # type: ignore[return-value]  # R is already a coroutine type

    @wraps(function)
    def run_on_rank_0(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if get_dist_info()[0] == 0 else None

    return run_on_rank_0


_PATIENCE = 600.0  # seconds to wait for ranks: machines of a job may start minutes apart
_PAUSE = 0.05
_LEAVE_SECONDS = 1.0
_FAILED = "given up"
_RESERVED = ("store", "rank", "world_size", "init_method")

_set_variables: dict[str, str] = {}  # variables set by this module, not by a launcher
_open_stores: list[LauncherStore] = []  # stores at an address that the next process group may reuse


def init_dist(
    launcher: str | None = None,
    backend: str | None = None,
    *,
    timeout: float | timedelta | None = None,
    port: int | None = None,
    **options: Any,
) -> torch.device:
    """Initialize the default process group under a launcher; no-op if initialized.

    Sets `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` for code that reads
    them, and makes the GPU of the local rank current.

    Rendezvous: under torchrun, the store of its agent. On one machine, a free port of the loopback interface, unless
    `port` or `MASTER_PORT` is set. Otherwise `MASTER_ADDR` (default under SLURM: first host of the node list) with
    `port`, `MASTER_PORT`, or under SLURM a port derived from the job and step ids (20000 to 29999).

    Args:
        launcher: `pytorch` (torchrun, or variables set by hand), `mpi` or `slurm`; default: detected.
        backend: As for `torch.distributed.init_process_group`; default: `nccl` if every rank has its own GPU, else
            `gloo`. The choice is the same on all ranks.
        timeout: Seconds, or a `timedelta`, for the rendezvous and for collectives; default: 600 s for the rendezvous,
            torch's default for collectives.
        port: Rendezvous port on the machine of rank 0.
        **options: For `torch.distributed.init_process_group`, for example `device_id`.

    Returns:
        The device of this rank: its GPU, or the CPU if no GPU is visible.

    Raises:
        ChoiceError: Unknown launcher or backend; also a `ValueError`.
        UsageError: No launcher or a different launcher started this process; its variables are incomplete (DDP603); no
            rendezvous address is known; the ranks disagree; or an argument is invalid.
        HangError: A rank did not arrive in time.
        DDPCheckError: The ranks cannot reach each other, or the group cannot be initialized.
    """
    if launcher is not None:
        check_choice("launcher", launcher, tuple(LAUNCHERS))
    backend_name = _check_backend(backend)
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if seconds is not None:
        check_seconds("timeout", seconds)
    if port is not None:
        check_count("port", port, 65535)
    if reserved := [name for name in _RESERVED if name in options]:
        raise UsageError(f"init_dist sees to {', '.join(reserved)} itself; leave that out.")
    _check_options(options)
    if dist.is_initialized():
        uses_gpu = torch.cuda.is_initialized() or "nccl" in str(dist.get_backend_config())
        return torch.device("cuda", torch.cuda.current_device()) if uses_gpu else torch.device("cpu")
    environ = {name: value for name, value in os.environ.items() if _set_variables.get(name) != value}
    if port is not None:
        environ["MASTER_PORT"] = str(port)
    try:
        launch = require(environ, launcher)
    except UsageError as error:
        raise UsageError(f"{error} See `ddpcheck explain DDP603`.") from None
    if seconds is not None:
        options["timeout"] = timedelta(seconds=seconds)
    return _join(launch, backend_name, _PATIENCE if seconds is None else seconds, launch.port > 0, options)


def _check_backend(backend: str | None) -> str:
    """Return the backend in lower case, '' for `None`; raise `ChoiceError` if unavailable."""
    if backend is None:
        return ""
    known = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
    available = [name for name in known if dist.is_backend_available(name)]
    for part in backend.lower().split(","):  # also accepts "cpu:gloo,cuda:nccl"
        if part.rpartition(":")[2] not in available:
            raise ChoiceError(f"backend must be one that this torch has: {', '.join(available)}; got {backend!r}.")
    return backend.lower()


def _check_options(options: dict[str, Any]) -> None:
    params = inspect.signature(dist.init_process_group).parameters
    if any(param.kind is param.VAR_KEYWORD for param in params.values()):
        return
    if unknown := [name for name in options if name not in params]:
        accepted = [name for name in params if name not in (*_RESERVED, "backend", "timeout") and name[0] != "_"]
        raise UsageError(
            f"init_dist takes no argument {', '.join(unknown)}; besides launcher, backend, timeout and port it takes "
            f"the arguments of torch.distributed.init_process_group: {', '.join(accepted)}."
        )


def _join(
    launch: LauncherEnv, requested: str, seconds: float, uses_port: bool, options: dict[str, Any]
) -> torch.device:
    store, close_file = open_store(launch, seconds, uses_port=uses_port)
    rendezvous = _Rendezvous(store, launch, seconds)
    try:
        address, port = store.address
        local_address, master = route(address, port)
        machine = this_machine()
        devices = (machine, launch.local_rank, _visible_gpus(machine), requested, master)
        replies = map(json.loads, rendezvous.gather("call init_dist", json.dumps(devices), close_file))
        all_devices = [RankDevices(host, local, tuple(gpus), *others) for host, local, gpus, *others in replies]
        if launch.rank == 0 and not launch.agent and (uses_port or not launch.one_machine):
            _open_stores.append(store)  # an early rank of the next group could connect to a store that is closing
        backend = choose_backend(all_devices)
        index = choose_gpus(all_devices)[launch.rank]
        if index is not None:
            torch.cuda.set_device(index)
        values = {
            "RANK": str(launch.rank),
            "WORLD_SIZE": str(launch.world_size),
            "LOCAL_RANK": str(local_ranks(all_devices)[launch.rank]),
            "LOCAL_WORLD_SIZE": str(launch.local_world_size or [peer.machine for peer in all_devices].count(machine)),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        interface = gloo_interface(launch.one_machine, local_address, [peer.master for peer in all_devices])
        if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
            values["GLOO_SOCKET_IFNAME"] = interface
        _init_group(rendezvous, backend, values, options)
    except BaseException:
        rendezvous.leave(_LEAVE_SECONDS)
        raise
    finally:
        close_file()
    rendezvous.leave(seconds)
    return torch.device("cpu") if index is None else torch.device("cuda", index)


def _init_group(rendezvous: _Rendezvous, backend: str, values: dict[str, str], options: dict[str, Any]) -> None:
    """Set the environment variables `values` and initialize the group; undo both on failure."""
    launch = rendezvous.launch
    if backend != "mpi":  # which has its own rank and rendezvous
        group = PrefixStore("group", rendezvous.store.store)
        options = {**options, "store": group, "rank": launch.rank, "world_size": launch.world_size}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        try:
            dist.init_process_group(backend, **options)
        except Exception as error:
            text = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
            rendezvous.raise_everywhere(DDPCheckError(f"Rank {launch.rank} could not set up {backend}: {text}"), error)
        rendezvous.gather(f"set up {backend}")  # gloo's init is not a barrier, and rank 0 may own the store
    except BaseException:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
        if dist.is_initialized():
            dist.destroy_process_group()
        raise
    _set_variables.update({name: value for name, value in values.items() if before[name] != value})


def _visible_gpus(machine: str) -> list[str]:
    """Return ids of visible GPUs; a GPU has the same id on all ranks."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)  # not in every torch
        names.append(str(uuid) if uuid else f"{machine} {visible} {index}")
    return names


# --- GPU of each rank, and the backend: computed from the devices of all ranks, so that all ranks agree --------------


@dataclass(frozen=True, slots=True)
class RankDevices:
    """Machine and visible GPUs of one rank."""

    machine: str  # id of the machine
    local_rank: int | None  # set by the launcher; `None` if unknown
    gpus: tuple[str, ...]  # visible GPUs in order, ids unique across machines
    backend: str = ""  # requested backend, or '' for the default
    master: str = ""  # IPv4 address used to reach rank 0's machine, or '' if unknown


def local_ranks(all_devices: Sequence[RankDevices]) -> list[int]:
    """Return each rank's local rank from its launcher, or else by counting per machine."""
    counted: Counter[str] = Counter()
    ranks = []
    for devices in all_devices:
        ranks.append(counted[devices.machine] if devices.local_rank is None else devices.local_rank)
        counted[devices.machine] += 1
    return ranks


def choose_gpus(all_devices: Sequence[RankDevices]) -> list[int | None]:
    """Return the index of each rank's GPU among its visible GPUs, or `None`.

    Ranks with the same visible GPUs take them in order of local rank, round-robin if there are more ranks than GPUs.
    A rank with a single visible GPU, for example under SLURM, takes that GPU.
    """
    taken: Counter[tuple[str, ...]] = Counter()
    chosen: list[int | None] = [None] * len(all_devices)
    for _, rank in sorted(zip(local_ranks(all_devices), range(len(all_devices)), strict=True)):
        if gpus := all_devices[rank].gpus:
            chosen[rank] = taken[gpus] % len(gpus)
            taken[gpus] += 1
    return chosen


def choose_backend(all_devices: Sequence[RankDevices]) -> str:
    """Return the requested backend, else `nccl` with one GPU per rank, else `gloo`."""
    by_backend = {devices.backend: rank for rank, devices in reversed([*enumerate(all_devices)])}
    if len(by_backend) > 1:
        text = ", ".join(f"rank {rank} for {backend or 'none'}" for backend, rank in sorted(by_backend.items()))
        raise UsageError(f"The ranks were asked for different backends: {text}; pass the same on every rank.")
    (backend,) = by_backend
    no_gpu_ranks = [rank for rank, devices in enumerate(all_devices) if not devices.gpus]
    names = [
        "" if index is None else devices.gpus[index]
        for devices, index in zip(all_devices, choose_gpus(all_devices), strict=True)
    ]
    shared = [rank for rank, name in enumerate(names) if name and names.count(name) > 1]
    if "nccl" in backend:
        if no_gpu_ranks:
            raise UsageError(
                f"Backend {backend!r} needs a GPU for every rank, and {format_ranks(no_gpu_ranks)} "
                f"{pluralize_verb('has', no_gpu_ranks)} none; pass backend='gloo', or see torch.cuda.is_available()."
            )
        if shared:
            raise UsageError(
                f"Backend {backend!r} needs a GPU for every rank, and {format_ranks(shared)} would share; "
                "pass backend='gloo', or start no more ranks on a machine than it has GPUs."
            )
    return backend or ("gloo" if no_gpu_ranks or shared else "nccl")


# --- Rendezvous ------------------------------------------------------------------------------------------------------


class _Rendezvous:
    """Exchange of texts between ranks over a store, before the process group exists."""

    def __init__(self, store: LauncherStore, launch: LauncherEnv, seconds: float) -> None:
        self.store, self.launch, self._seconds = store, launch, seconds
        self._deadline = time.monotonic() + seconds

    def gather(self, what: str, data: str = "", close_file: Callable[[], None] = lambda: None) -> list[str]:
        """All-gather `data` in rank order; raise if a rank is late, failed or lost.

        Rank 0 calls `close_file` when all ranks have arrived, before any rank can continue, or retry after a failure.
        """
        keys = [f"{what}/{rank}" for rank in range(self.launch.world_size)]
        try:
            self.store.put(keys[self.launch.rank], data.encode())
            if self.launch.rank == 0:
                self._wait_for_keys(dict(enumerate(keys)), keys, what)
                close_file()
                self.store.put(what, json.dumps([self.store.get(name).decode() for name in keys]).encode())
            self._wait_for_keys({0: what}, keys, what)
            return list(json.loads(self.store.get(what)))
        except StoreGoneError as error:
            raise DDPCheckError(
                f"The store that the ranks met on has ended while rank {self.launch.rank} set up the process group; "
                "see the output of rank 0."
            ) from error

    def _wait_for_keys(self, names: Mapping[int, str], keys: list[str], what: str) -> None:
        """Wait for the keys in `names`; after a timeout, all ranks raise `HangError`."""

        def check(_missing: list[int]) -> None:
            if self.store.has(_FAILED):
                is_late, reason = json.loads(self.store.get(_FAILED))
                raise HangError(reason) if is_late else DDPCheckError(reason)

        if not self.store.wait_for(names, self._deadline, check, longest=_PAUSE):
            return
        missing = [rank for rank, name in enumerate(keys) if not self.store.has(name)] or [0]
        self.raise_everywhere(
            HangError(
                f"{format_ranks(missing).capitalize()} of {self.launch.world_size} did not {what} within "
                f"{self._seconds:g} s; check that {self.launch.launcher} started all of them with the same arguments, "
                "and the output of the missing ones."
            )
        )

    def raise_everywhere(self, error: DDPCheckError, cause: Exception | None = None) -> NoReturn:
        """Raise an error on this rank, and have all other ranks raise it."""
        with contextlib.suppress(StoreGoneError):
            self.store.put(_FAILED, json.dumps([isinstance(error, HangError), str(error)]).encode())
        raise error from cause

    def leave(self, seconds: float) -> None:
        """Leave the store; rank 0 waits up to `seconds` until all ranks have left."""
        with contextlib.suppress(StoreGoneError):
            if self.store.next("left") == self.launch.world_size:
                self.store.put("left/all", b"")
            if self.launch.rank == 0:
                wait_until(lambda: self.store.has("left/all"), seconds, _PAUSE)
