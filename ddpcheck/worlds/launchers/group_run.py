"""One run on the ranks of a launcher: this rank's part of it, and what has come of it on every rank.

Each rank's outcome is written to the store once, by itself or, when it cannot, by the first that notices; so all ranks
read the same, and say the same. The order of failures is that of their arrival there: no clocks are compared.

This module is light: it imports torch only where a process group is made.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from ddpcheck.findings.errors import DdpcheckError, UsageError
from ddpcheck.worlds import rank as ranks
from ddpcheck.worlds.launchers.interrupt import (
    Interrupted,
    Interruption,
    abort_groups,
    end_connections,
    main_stack,
    open_sockets,
)
from ddpcheck.worlds.launchers.rank_group import RankGroup

GRACE = 0.3  # seconds after the first failure, for others to fail for reasons of their own
_GIVE_UP = 10.0  # seconds that a rank may take to be freed
_AGAIN = 0.5  # between attempts to free it
_BETWEEN = 1e-3  # from one failure to the next, in units of `RankFailure.when`
_LATE = b"late"


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """The outcome of a run on one rank.

    Attributes:
        kind: `result`, `failure`, `stuck`, `gone` (its process has ended) or `lost` (it could not be freed).
        order: When it arrived, counted from 1.
        data: A packed result.
        reply: What `rank.describe` says of a failure.
        stack: Of a stuck rank, as `faulthandler` writes it.
        place: Where it was in its own words.
        collective: That it waits in, where it is known.
        reason: The end of its process, in words.
        code: The exit code of its process, where it is known.
        attachment: What it left for the parent.
    """

    kind: str
    order: int = 0
    data: bytes = b""
    reply: Mapping[str, Any] | None = None
    stack: str = ""
    place: str = ""
    collective: str = ""
    reason: str = ""
    code: int | None = None
    attachment: bytes = b""

    @property
    def when(self) -> float:
        """For `RankFailure.when`: closer than what counts as at the same time."""
        return self.order * _BETWEEN


class Run:
    """One run of one function on the first `world_size` ranks of a session."""

    def __init__(self, session: RankGroup, context: ranks.RankContext | None, world_size: int, timeout: float) -> None:
        """Take part with a context, or only learn what comes of it without one."""
        self._session = session
        self._context = context
        self._members = range(world_size)
        self._timeout = timeout
        self._name = f"run/{session.point}"
        self._store = session.store
        self._interruption = Interruption()
        self._inside = False
        self._free_at: float | None = None
        self._stuck: RankOutcome | None = None
        self._next_attempt = 0.0
        self._sockets = open_sockets()
        self._deadline = time.monotonic() + timeout
        self._freeing = False

    def _out(self, rank: int) -> str:
        return f"{self._name}/out/{rank}"

    # --- This rank's part ----------------------------------------------------------------------------------------

    def perform(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Call the function in a process group of its own, and write what comes of it; wait for the other ranks.

        Raises:
            KeyboardInterrupt: Once the others know.
        """
        interrupt = None
        with self._session.attended(self._check):
            if self._context is not None:
                with contextlib.ExitStack() as undo:
                    undo.callback(self._end_group)  # not before all outcomes are there: the end of a group is felt
                    try:
                        outcome, interrupt = self._attempt(fn, args, kwargs, self._context)
                    except OSError as error:  # no room for our own files: nobody shall wait for us
                        outcome = RankOutcome("failure", self._order(), reply=ranks.describe(error))
                    self._claim(self._context.rank, outcome)
                    if outcome.kind != "result":
                        self._store.put(f"{self._name}/failed", b"failed")
                    self._await_all()
            else:
                self._await_all()
        if interrupt is not None:
            raise interrupt

    def _attempt(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], context: ranks.RankContext
    ) -> tuple[RankOutcome, KeyboardInterrupt | None]:
        interrupt, reply, data = None, None, b""
        own = os.getpid()
        with _environment(context, self._session), ranks.acting_as_rank(context):
            try:
                with self._interruption.allowed():
                    self._inside = True
                    ranks.set_status("starting up")
                    self._begin_group(context)
                    ranks.set_status("")
                    result = fn(*args, **kwargs)
                    self._inside = False
                data = ranks.packed_result(result)
            except Interrupted:
                pass
            except BaseException as error:  # pytest.skip and sys.exit are no Exceptions
                self._inside = False
                order = self._order()  # before the description, which takes time
                reply = ranks.describe(error)
                interrupt = error if isinstance(error, KeyboardInterrupt) else None
            finally:
                if (
                    os.getpid() != own
                ):  # a process that the user's code has forked, and that does not speak for the rank
                    os._exit(0)
                self._inside = False
        attachment = _read(context.directory / f"rank{context.rank}.attachment")
        # What it raises once it was found stuck is due to its being freed, or to another that was: gloo says the same.
        if self._stuck is not None and (self._freeing or reply is not None) and interrupt is None:
            return replace(self._stuck, attachment=attachment), None
        if reply is not None:
            return RankOutcome("failure", order, reply=reply, attachment=attachment), interrupt
        return RankOutcome("result", data=data, attachment=attachment), None

    def _begin_group(self, context: ranks.RankContext) -> None:
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore

        if dist.is_initialized():
            raise UsageError(
                "The default process group exists already, and each run makes one of its own: "
                "call torch.distributed.destroy_process_group() before."
            )
        # A connection of its own, so that a rendezvous with a rank that died can be ended like a collective.
        store = PrefixStore(f"{self._store.prefix}/{self._name}", self._store.reopen())
        seconds = self._timeout + GRACE + _GIVE_UP / 2  # for what nothing else frees: a receive from any rank
        dist.init_process_group(
            context.backend,
            store=store,
            rank=context.rank,
            world_size=context.world_size,
            timeout=timedelta(seconds=seconds),
        )

    def _end_group(self) -> None:
        import torch.distributed as dist

        if self._free_at is not None:
            abort_groups()
            end_connections(self._sockets)  # a traceback, say, may keep the group alive
        with contextlib.suppress(Exception):  # after a failure it may complain, and that is no news
            if dist.is_initialized():
                dist.destroy_process_group()

    # --- Outcomes ------------------------------------------------------------------------------------------------

    def _order(self) -> int:
        return self._store.next(f"{self._name}/order")

    def _claim(self, rank: int, outcome: RankOutcome) -> None:
        self._store.claim(self._out(rank), pickle.dumps(outcome))

    def _await_all(self) -> None:
        def claim_for_others(missing: list[int]) -> None:
            for rank in missing:
                if rank in self._session.gone:
                    reason, code = self._session.gone[rank]
                    self._claim(rank, RankOutcome("gone", self._order(), reason=reason, code=code))
                elif time.monotonic() > self._last_moment():
                    self._claim(rank, RankOutcome("lost", self._order()))

        self._store.wait_for({rank: self._out(rank) for rank in self._members}, math.inf, claim_for_others)

    def _last_moment(self) -> float:
        """When to stop waiting for a rank that cannot even say that it is stuck."""
        since = self._deadline if self._free_at is None else min(self._free_at, self._deadline)
        return since + _GIVE_UP + 2.0

    def outcomes(self) -> dict[int, RankOutcome]:
        """The outcome on each rank; every rank reads the same."""
        return {rank: pickle.loads(self._store.claimed(self._out(rank))) for rank in self._members}

    def outcomes_without_store(self) -> dict[int, RankOutcome]:
        """The outcomes that are known where the store has ended with the rank that kept it."""
        gone = self._session.gone
        return {
            rank: RankOutcome("gone", 1, reason=gone[rank][0], code=gone[rank][1])
            for rank in self._members
            if rank in gone
        }

    # --- Watching: all of this runs in the session's own thread -----------------------------------------------------

    def _check(self) -> None:
        now = time.monotonic()
        if self._free_at is None and not self._must_free(now):
            return
        assert self._free_at is not None
        if self._context is None or not self._inside or now < self._free_at:
            return
        if self._stuck is None:
            place, collective = ranks.own_slots()
            self._stuck = RankOutcome("stuck", stack=main_stack(), place=place, collective=collective)
            self._store.put(self._noted(self._context.rank), b"")
        if not self._freeing:  # it would be felt by those that have not noted yet where they are
            self._freeing = now > self._free_at + GRACE or self._all_noted()
        if not self._freeing or not self._inside:
            return
        if now > self._free_at + _GIVE_UP:
            self._claim(self._context.rank, RankOutcome("lost", self._order(), stack=self._stuck.stack))
        elif now >= self._next_attempt:
            self._next_attempt = now + _AGAIN
            abort_groups()
            end_connections(self._sockets)
            self._interruption.send()

    def _must_free(self, now: float) -> bool:
        """Whether ranks are to be freed, and from when on: at once when time is up, else after a while."""
        name = f"{self._name}/failed"
        late, session = now >= self._deadline, self._session
        if not late and (failed := self._store.has(name)):
            late = self._store.get(name) == _LATE
        elif not late:
            failed = any(rank in session.gone for rank in self._members) or session.terminated is not None
        if not late and not failed:
            return False
        self._free_at = now if late else now + GRACE
        if late:
            self._store.put(name, _LATE)
        return True

    def _noted(self, rank: int) -> str:
        return f"{self._name}/noted/{rank}"

    def _all_noted(self) -> bool:
        return all(
            rank in self._session.gone or self._store.has(self._noted(rank)) or self._store.has(self._out(rank))
            for rank in self._members
        )


@contextlib.contextmanager
def _environment(context: ranks.RankContext, session: RankGroup) -> Iterator[None]:
    """The environment variables of a rank, and gloo's network interface, for one run."""
    launch = session.launch
    values = {
        "RANK": str(context.rank),
        "WORLD_SIZE": str(context.world_size),
        "LOCAL_RANK": str(session.local_rank),
        "LOCAL_WORLD_SIZE": str(min(launch.local_world_size or context.world_size, context.world_size)),
    }
    if session.interface and "GLOO_SOCKET_IFNAME" not in os.environ:
        values["GLOO_SOCKET_IFNAME"] = session.interface
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        path.unlink()
    except OSError:
        return b""
    return data


def check_thread() -> None:
    """Refuse a run that could not be interrupted.

    Raises:
        DdpcheckError: This is not the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise DdpcheckError("On the ranks of a launcher, run() must be called in the main thread.")
