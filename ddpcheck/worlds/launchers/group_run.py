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
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ddpcheck.findings.errors import DdpcheckError, RankError, RankFailure, UsageError
from ddpcheck.findings.replace import replace
from ddpcheck.findings.wording import format_ranks
from ddpcheck.worlds import failures, wire
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
from ddpcheck.worlds.launchers.store import StoreGoneError

_GRACE = 0.3  # seconds after the first failure, for others to fail for reasons of their own
_GIVE_UP = 10.0  # seconds that a rank may take to be freed
_AGAIN = 0.5  # between attempts to free it
_BETWEEN = 1e-3  # from one failure to the next, in units of `RankFailure.when`: closer than what is at the same time
_AFTERWARDS = 1e6  # for `RankFailure.when`: ranks that are stuck are so after whatever has happened
_LATE = b"late"


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """The outcome of a run on one rank.

    Attributes:
        result: Packed, where there is one.
        reply: What `rank.describe` says of an exception.
        failure: How else it failed.
        lost: Whether it could not be freed.
        attachment: What it left for the parent.
    """

    result: bytes | None = None
    reply: dict[str, Any] | None = None
    failure: RankFailure | None = None
    lost: bool = False
    attachment: bytes = b""

    def failed(self, rank: int) -> RankFailure | None:
        """The failure of the rank, if it is one."""
        return self.failure if self.reply is None else failures.raised(rank, self.reply)


class Run:
    """One run on the first `world_size` ranks of a session; without a context, this rank only learns the outcome."""

    def __init__(self, session: RankGroup, context: ranks.RankContext | None, world_size: int, timeout: float) -> None:
        self._session = session
        self._context = context
        self._members = range(world_size)
        self._timeout = timeout
        self._name = f"run/{session.point}"
        self._store = session.store
        self._interruption = Interruption()
        self._free_at: float | None = None
        self._stuck: RankFailure | None = None
        self._next_attempt = 0.0
        self._sockets = open_sockets()
        self._deadline = time.monotonic() + timeout
        self._freeing = False

    def _out(self, rank: int) -> str:
        return f"{self._name}/out/{rank}"

    # --- This rank's part ----------------------------------------------------------------------------------------

    def perform(self, fn: Callable[[], Any]) -> dict[int, RankOutcome]:
        """Call the function in a process group of its own; return the outcome on each rank, on every rank the same.

        Where the store has ended with the rank that kept it, the outcomes that are known; a `RankError` where none is.
        A `KeyboardInterrupt` is raised once the others know.
        """
        interrupt = None
        try:
            with self._session.attended(self._check), contextlib.ExitStack() as undo:
                if self._context is not None:
                    undo.callback(self._end_group)  # not before all outcomes are there: the end of a group is felt
                    try:
                        outcome, interrupt = self._attempt(fn, self._context)
                    except OSError as error:  # no room for our own files: nobody shall wait for us
                        outcome = RankOutcome(reply={**ranks.describe(error), "when": self._now()})
                    self._claim(self._context.rank, outcome)
                    if outcome.result is None:
                        self._store.put(f"{self._name}/failed", b"failed")
                self._await_all()
                outcomes = {rank: pickle.loads(self._store.claimed(self._out(rank))) for rank in self._members}
                died = [one.failure.message for one in outcomes.values() if one.failure and one.failure.kind == "died"]
                if died:  # said before this rank is idle, for the launcher ends it now: that is no news of its own
                    self._session.mark_broken("; ".join(died) + ".")
            if interrupt is not None:
                raise interrupt
            return outcomes
        except StoreGoneError as error:
            lost = self._session.lost_store(error)
            if not any(rank in self._session.watch.gone for rank in self._members):
                raise lost from None
            return {rank: self._gone(rank, _BETWEEN) for rank in self._members if rank in self._session.watch.gone}

    def _attempt(
        self, fn: Callable[[], Any], context: ranks.RankContext
    ) -> tuple[RankOutcome, KeyboardInterrupt | None]:
        interrupt, reply, data = None, None, b""
        own = os.getpid()
        os.environ.update(self._variables(context))
        with ranks.acting_as_rank(context):
            try:
                with self._interruption.allowed():
                    ranks.set_status("starting up")
                    self._begin_group(context)
                    ranks.set_status("")
                    result = fn()
                data = ranks.packed_result(result)
            except Interrupted:
                pass
            except BaseException as error:  # pytest.skip and sys.exit are no Exceptions
                when = self._now()  # before the description, which takes time
                reply = {**ranks.describe(error), "when": when}
                interrupt = error if isinstance(error, KeyboardInterrupt) else None
            finally:
                if os.getpid() != own:  # the user's code has forked a process, which does not speak for the rank
                    os._exit(0)
        attachment = _read(context.directory / f"rank{context.rank}.attachment")
        # What it raises once it was found stuck is due to its being freed, or to another that was: gloo says the same.
        if self._stuck is not None and (self._freeing or reply is not None) and interrupt is None:
            return RankOutcome(failure=self._stuck, attachment=attachment), None
        if reply is not None:
            return RankOutcome(reply=reply, attachment=attachment), interrupt
        return RankOutcome(data, attachment=attachment), None

    def _variables(self, context: ranks.RankContext) -> dict[str, str]:
        """The environment variables of a rank, and gloo's network interface."""
        session, size = self._session, context.world_size
        values = {
            "RANK": str(context.rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(session.placement.local_rank),
            "LOCAL_WORLD_SIZE": str(min(session.launch.local_world_size or size, size)),
        }
        if session.placement.interface:
            values["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", session.placement.interface)
        return values

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
        seconds = self._timeout + _GRACE + _GIVE_UP / 2  # for what nothing else frees: a receive from any rank
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

    def _now(self) -> float:
        """For `RankFailure.when`: the order of arrival at the store."""
        return self._store.next(f"{self._name}/order") * _BETWEEN

    def _claim(self, rank: int, outcome: RankOutcome) -> None:
        self._store.claim(self._out(rank), pickle.dumps(outcome))

    def _await_all(self) -> None:
        def claim_for_others(missing: list[int]) -> None:
            for rank in missing:
                if rank in self._session.watch.gone:
                    self._claim(rank, self._gone(rank, self._now()))
                elif time.monotonic() > self._last_moment():
                    self._claim(rank, _lost(failures.stuck(rank, _AFTERWARDS, "", "", "")))

        self._store.wait_for({rank: self._out(rank) for rank in self._members}, math.inf, claim_for_others)

    def _last_moment(self) -> float:
        """When to stop waiting for a rank that cannot even say that it is stuck."""
        since = self._deadline if self._free_at is None else min(self._free_at, self._deadline)
        return since + _GIVE_UP + 2.0

    def _gone(self, rank: int, when: float) -> RankOutcome:
        reason, code = self._session.watch.gone[rank]
        return RankOutcome(failure=RankFailure(rank, "died", reason, when, exit_code=code))

    # --- Watching: all of this runs in the session's own thread -----------------------------------------------------

    def _check(self) -> None:
        now = time.monotonic()
        if self._free_at is None and not self._must_free(now):
            return
        assert self._free_at is not None
        if self._context is None or not self._interruption.armed or now < self._free_at:
            return
        if self._stuck is None:
            self._stuck = failures.stuck(self._context.rank, _AFTERWARDS, main_stack(), *ranks.own_slots())
            self._store.put(self._noted(self._context.rank), b"")
        if not self._freeing:  # it would be felt by those that have not noted yet where they are
            self._freeing = now > self._free_at + _GRACE or self._all_noted()
        if not self._freeing or not self._interruption.armed:
            return
        if now > self._free_at + _GIVE_UP:
            self._claim(self._context.rank, _lost(self._stuck))
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
            failed = any(rank in session.watch.gone for rank in self._members) or session.watch.terminated is not None
        if not late and not failed:
            return False
        self._free_at = now if late else now + _GRACE
        if late:
            self._store.put(name, _LATE)
        return True

    def _noted(self, rank: int) -> str:
        return f"{self._name}/noted/{rank}"

    def _all_noted(self) -> bool:
        return all(
            rank in self._session.watch.gone or self._store.has(self._noted(rank)) or self._store.has(self._out(rank))
            for rank in self._members
        )


def _lost(failure: RankFailure) -> RankOutcome:
    return RankOutcome(failure=replace(failure, message=f"{failure.message}, and could not be freed"), lost=True)


def results_of(outcomes: dict[int, RankOutcome], seconds: float) -> list[Any]:
    """Return the results of a run that might take so many seconds, or raise what has come instead."""
    found = [failure for rank, outcome in outcomes.items() if (failure := outcome.failed(rank)) is not None]
    results: dict[int, Any] = {}
    for rank, outcome in outcomes.items():
        if outcome.result is not None:
            try:
                results[rank] = wire.loads(outcome.result)
            except Exception as error:
                if not found:
                    raise DdpcheckError(
                        f"The result of rank {rank} could not be unpickled here ({type(error).__name__}: {error}); "
                        "return plain values or tensors."
                    ) from error
    if not found:
        return [results[rank] for rank in sorted(results)]
    for outcome in outcomes.values():
        if outcome.reply is not None and outcome.reply["usage"] and outcome.reply["place"] == "starting up":
            raise UsageError(outcome.reply["text"])
    late = [one.rank for one in found if one.kind == "stuck"]
    failed: RankError
    if len(late) == len(found):
        failed = failures.hang(found, f"{format_ranks(late)} did not finish within {seconds:g} s")
    else:
        failed = failures.error(found)
    failed.results = results
    raise failed


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        path.unlink()
    except OSError:
        return b""
    return data
