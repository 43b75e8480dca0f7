"""`ddp_world`: real ranks for a test whose body runs in the process that pytest runs in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ddpcheck.findings.deprecation import renamed
from ddpcheck.findings.errors import DDPCheckError, RankError, UsageError, WrongTypeError
from ddpcheck.report.settings import Settings
from ddpcheck.testing import marks, rank_side
from ddpcheck.testing.leases import Lent, WorldLease
from ddpcheck.testing.outcome import TestOutcome
from ddpcheck.worlds import validation

if TYPE_CHECKING:
    from ddpcheck.findings.report import Report
    from ddpcheck.recipe.recipe import Recipe

__getattr__ = renamed(__name__, DdpWorld="DDPWorld")
_OF_WORLD = ("startup_timeout", "start_method", "process_group", "hash_seeds", "watch")
_CHECKED = ("world_size", "backend", "device", "steps", "timeout", "seed", "preload", "select", "ignore", "suppress")


class DDPWorld:
    """Real ranks for a test whose body runs in the parent process.

    The ranks start with the first `run`, and end with the test. Calling it, as in `ddp_world(world_size=4)`, gives
    another world for the same test.
    """

    def __init__(
        self,
        settings: Settings,
        rent: Callable[[dict[str, Any]], WorldLease],
        options: dict[str, Any],
        keep: Callable[[Report], Path | None],
    ) -> None:
        self._settings = settings
        self._keep = keep
        self._rent = rent
        self._lease = rent(options)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        size: int = self._lease.options["world_size"]
        return size

    def __call__(self, **options: Any) -> DDPWorld:
        """Another world; the options are those of `@pytest.mark.ddp`, and of `ddpcheck.World`.

        Raises:
            UsageError: An option has a value that cannot be, or there is none of that name.
        """
        __tracebackhide__ = True
        try:
            marks.check_options(options, "ddp_world", _OF_WORLD)
        except UsageError as error:
            raise error.with_traceback(None) from None
        return DDPWorld(self._settings, self._rent, {**self._lease.options, **options}, self._keep)

    @property
    def world(self) -> Lent:
        """The `ddpcheck.World` behind this fixture.

        It is a fresh one at first, and after one that failed. On ranks that torchrun or mpirun has started, it is what
        stands for a world there.
        """
        return self._lease.world

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank; one result a rank.

        Args:
            fn: Anything callable.
            *args: For it.
            timeout: Seconds that this run may take.
            **kwargs: For it.

        Raises:
            RankError: A rank failed.
            HangError: A rank did not finish in time.
            UsageError: Something cannot be sent to the ranks.
        """
        __tracebackhide__ = True
        if not callable(fn):
            raise WrongTypeError(
                f"The first argument of ddp_world.run must be a function, got {type(fn).__qualname__}."
            )
        try:
            results, verdict, failed = self._lease.run(rank_side.call, fn, args, kwargs, timeout=timeout)
        except DDPCheckError as error:
            raise _better(error, fn, args, kwargs).with_traceback(None) from None  # our frames help nobody
        if verdict.how == "skipped":
            pytest.skip(verdict.headline)
        if verdict.how == "xfailed":
            pytest.xfail(verdict.headline)
        if verdict.how == "failed":
            raise self._lease.explained(_said(verdict, failed), verdict).with_traceback(None) from None
        return list(results.values())

    def check(self, recipe: Recipe | str, **options: Any) -> Report:
        """Check a recipe on a world of this size; the test fails with the report when that is not good enough.

        Args:
            recipe: A recipe or a TARGET.
            **options: Those of `ddpcheck.check`.
        """
        __tracebackhide__ = True
        from ddpcheck.report.checking.check import check

        ours = {name: getattr(self._settings, name) for name in _CHECKED}
        ours |= {name: self._lease.options[name] for name in _CHECKED if name in self._lease.options}
        ours["backend"] = self._settings.backend  # `None` leaves it to the check
        report: Report
        try:
            report = self._lease.ranks.once("ddp_world.check", lambda: check(recipe, **{**ours, **options}))
        except DDPCheckError as error:
            raise error.with_traceback(None) from None
        return self._good_enough(report)

    def check_script(
        self,
        script: str | Path,
        arguments: Sequence[str] = (),
        *,
        world_size: int | None = None,
        parity: bool = True,
        timeout: float = 600.0,
    ) -> Report:
        """Run a script as `ddpcheck run --check-parity` does; the test fails with the report if there are findings.

        The ranks of this world have no part in it.

        Args:
            script: Its path.
            arguments: For the script.
            world_size: The number of ranks; that of this world if it is `None`.
            parity: Whether it also runs in a single process on the same samples, which is compared.
            timeout: Seconds that all runs together may take.

        Raises:
            HangError: They took longer.
            TargetError: There is no report.
        """
        __tracebackhide__ = True
        from ddpcheck.run.checked_script import check_script

        try:
            report = check_script(
                script, arguments, world_size=world_size or self.world_size, parity=parity, timeout=timeout
            )
        except DDPCheckError as error:
            raise error.with_traceback(None) from None
        return self._good_enough(report)

    def _good_enough(self, report: Report) -> Report:
        __tracebackhide__ = True
        from ddpcheck.render import as_text

        if report.exit_code(self._settings.fail_on):
            path = self._lease.ranks.once("the report of ddp_world.check", lambda: self._keep(report))
            page = f"as a page: {path}\n" if path is not None else ""
            # the first line is the only one that pytest's summary shows
            why = report.findings[0].headline if report.error is None else " ".join(report.error.message.split())
            pytest.fail(f"{why}\n\n{as_text(report)}{page}", pytrace=False)
        return report


def _said(verdict: TestOutcome, error: RankError | None) -> RankError:
    """The error itself, unless more can be said than it knew."""
    if error is not None and str(error) == verdict.headline:
        return error
    if error is None:
        return RankError(verdict.headline)
    better = type(error)(verdict.headline, error.failures, detail=error.detail)
    better.results = error.results
    return better


def _better(error: DDPCheckError, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DDPCheckError:
    """The error itself; where something cannot be sent, one that names the argument that is to blame."""
    if isinstance(error, UsageError):
        try:
            validation.pack_task(fn, args, kwargs, "ddp_world.run")
        except UsageError as named:
            return named
    return error
