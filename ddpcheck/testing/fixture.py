"""Fixture `ddp_world`: real ranks for a test that runs in pytest's process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ddpcheck.findings.deprecation import renamed
from ddpcheck.findings.errors import DDPCheckError, RankError, UsageError, WrongTypeError
from ddpcheck.report.settings import Settings
from ddpcheck.testing import marks, rank_side
from ddpcheck.testing.leases import Ranks, Record, TestWorld, WorldLease
from ddpcheck.testing.outcome import REPORT_FOLDER, TestOutcome, keep_report
from ddpcheck.worlds import validation

if TYPE_CHECKING:
    from ddpcheck.findings.report import Report
    from ddpcheck.recipe.recipe import Recipe

__getattr__ = renamed(__name__, DdpWorld="DDPWorld")
_WORLD_OPTIONS = ("startup_timeout", "start_method", "process_group", "hash_seeds", "watch")
_SETTINGS = (
    "world_size",
    "backend",
    "device",
    "steps",
    "timeout",
    "seed",
    "preload",
    "select",
    "ignore",
    "suppress",
    "rank_parameters",
)


class DDPWorld:
    """Real ranks for a test whose body runs in pytest's process.

    The ranks start with the first `run` and end with the test. A call such as `ddp_world(world_size=4)` returns
    another world for the same test.
    """

    def __init__(self, ranks: Ranks, record: Record, settings: Settings, options: dict[str, Any]) -> None:
        self._session_ranks = ranks
        self._record = record
        self._settings = settings
        self._lease = WorldLease(ranks, record, options)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(self._lease.options["world_size"])

    def __call__(self, **options: Any) -> DDPWorld:
        """Return another world with options of `@pytest.mark.ddp` and `ddpcheck.World`.

        Raises:
            UsageError: An option is unknown or invalid.
        """
        __tracebackhide__ = True
        try:
            marks.check_options(options, "ddp_world", _WORLD_OPTIONS)
        except UsageError as error:
            raise error.with_traceback(None) from None
        return DDPWorld(self._session_ranks, self._record, self._settings, {**self._lease.options, **options})

    @property
    def world(self) -> TestWorld:
        """The `ddpcheck.World` behind this fixture.

        Started on first use and after a failure. A `LaunchedWorld` if torchrun, mpirun or srun started the ranks.
        """
        return self._lease.world

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank; return one result per rank.

        Args:
            fn: Any callable.
            *args: Positional arguments of `fn`.
            timeout: Timeout of this run in seconds; default: the `timeout` option.
            **kwargs: Keyword arguments of `fn`.

        Raises:
            RankError: A rank failed.
            HangError: A rank did not finish in time.
            UsageError: The function or an argument cannot be pickled.
        """
        __tracebackhide__ = True
        if not callable(fn):
            raise WrongTypeError(
                f"The first argument of ddp_world.run must be a function, got {type(fn).__qualname__}."
            )
        try:
            results, verdict, failed = self._lease.run(rank_side.call_on_rank, fn, args, kwargs, timeout=timeout)
        except DDPCheckError as error:
            raise _name_argument(error, fn, args, kwargs).with_traceback(None) from None  # hide ddpcheck frames
        if verdict.how == "skipped":
            pytest.skip(verdict.headline)
        if verdict.how == "xfailed":
            pytest.xfail(verdict.headline)
        if verdict.how == "failed":
            raise self._lease.record_sections(_with_headline(verdict, failed), verdict).with_traceback(None) from None
        return list(results.values())

    def check(self, recipe: Recipe | str, **options: Any) -> Report:
        """Check a recipe on ranks; fail on findings of severity `fail_on` or higher.

        Args:
            recipe: A recipe or a TARGET.
            **options: Options of `ddpcheck.check`.
        """
        __tracebackhide__ = True
        from ddpcheck.report.checking.check import check

        defaults = {name: getattr(self._settings, name) for name in _SETTINGS}
        defaults |= {name: self._lease.options[name] for name in _SETTINGS if name in self._lease.options}
        defaults["backend"] = self._settings.backend  # `None`: chosen by the check
        report: Report
        try:
            report = self._session_ranks.once("ddp_world.check", lambda: check(recipe, **{**defaults, **options}))
        except DDPCheckError as error:
            raise error.with_traceback(None) from None
        return self._fail_on_findings(report)

    def check_script(
        self,
        script: str | Path,
        arguments: Sequence[str] = (),
        *,
        world_size: int | None = None,
        parity: bool = True,
        timeout: float = 600.0,
    ) -> Report:
        """Run a script as `ddpcheck run --check-parity` does; fail on findings.

        Starts its own ranks instead of the ranks of this world.

        Args:
            script: Path of the script.
            arguments: Arguments of the script.
            world_size: Number of ranks; default: the size of this world.
            parity: If True, also run in a single process on the same samples and compare.
            timeout: Total timeout of all runs in seconds.

        Raises:
            HangError: The runs exceeded the timeout.
            TargetError: The script produced no report.
        """
        __tracebackhide__ = True
        from ddpcheck.run.checked_script import check_script

        try:
            report = check_script(
                script, arguments, world_size=world_size or self.world_size, parity=parity, timeout=timeout
            )
        except DDPCheckError as error:
            raise error.with_traceback(None) from None
        return self._fail_on_findings(report)

    def _fail_on_findings(self, report: Report) -> Report:
        __tracebackhide__ = True
        from ddpcheck.render import as_text

        if report.exit_code(self._settings.fail_on):
            test, numbers = self._record.item, self._record.report_numbers
            folder = test.config.getoption(REPORT_FOLDER, None)
            keep = functools.partial(keep_report, folder, test.nodeid, numbers, report)
            path = self._session_ranks.once("the report of ddp_world.check", keep)
            page = f"as a page: {path}\n" if path is not None else ""
            # pytest's summary shows only the first line
            reason = report.findings[0].headline if report.error is None else " ".join(report.error.message.split())
            pytest.fail(f"{reason}\n\n{as_text(report)}{page}", pytrace=False)
        return report


def _with_headline(verdict: TestOutcome, error: RankError | None) -> RankError:
    if error is not None and str(error) == verdict.headline:
        return error
    if error is None:
        return RankError(verdict.headline)
    new_error = type(error)(verdict.headline, error.failures, detail=error.detail)
    new_error.results = error.results
    return new_error


def _name_argument(error: DDPCheckError, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DDPCheckError:
    """Return `error`, or a `UsageError` naming the argument that cannot be pickled."""
    if isinstance(error, UsageError):
        try:
            validation.pack_task(fn, args, kwargs, "ddp_world.run")
        except UsageError as named:
            return named
    return error
