"""`check(recipe)`: decides the options of a check, runs it on real ranks, and returns its report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ddpcheck.findings.errors import WrongTypeError
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Report
from ddpcheck.findings.selection import Suppression
from ddpcheck.findings.wording import suggests_names
from ddpcheck.recipe.target import find_file, is_path, split_target
from ddpcheck.report.checking.check_report import report_of
from ddpcheck.report.checking.check_run import CheckRun
from ddpcheck.report.checking.check_state import CheckOptions
from ddpcheck.report.settings import rule_patterns
from ddpcheck.worlds import validation as allowed
from ddpcheck.worlds.launchers.leader import Leader

if TYPE_CHECKING:
    from ddpcheck.recipe.recipe import Recipe

MOST_STEPS = 10_000


@suggests_names("check")
def check(
    target: Recipe | str,
    *,
    world_size: int = 2,
    backend: str | None = None,
    device: str = "cpu",
    steps: int = 3,
    timeout: float = 30.0,
    seed: int = 0,
    preload: Sequence[str] = (),
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    suppress: Sequence[Suppression] = (),
    baseline: Report | None = None,
    progress: Callable[[str], None] | None = None,
    hosts: Leader | None = None,
) -> Report:
    """Check a recipe on `world_size` real ranks with the real DDP reducer.

    The ranks are new processes, also in a program that a launcher has started: there each process that calls this makes
    a check of its own. It is the command line that runs on the ranks of a launcher.

    Args:
        target: A `Recipe`, or a TARGET ("path/to/file.py:attr"), which is loaded on the ranks and not here.
        world_size: Number of ranks.
        backend: "gloo" or "nccl"; default: nccl where every rank has a GPU of its own, else gloo.
        device: "cpu" or "cuda".
        steps: Training steps to run.
        timeout: Seconds that one phase of the check may take before it counts as a hang.
        seed: Of all random numbers.
        preload: Modules that are imported once, before ranks are forked; see `World`.
        select: Codes, prefixes or names of the rules to report; default: all.
        ignore: Those not to report.
        suppress: Findings that are shown with a reason, and do not count.
        baseline: An earlier report; what it has is shown as known, and does not count.
        progress: Called with a few words at the beginning of each phase, and where it waits for ranks.
        hosts: Processes that a launcher has started, which start the ranks instead; for the command line.

    Returns:
        The report. A target that fails, or hangs, is in `Report.error`; what was found before is not lost.

    Raises:
        UsageError: An argument is wrong, or `target` names no recipe.
    """
    given = CheckOptions(
        world_size=world_size,
        backend=backend or "",
        device=device,
        steps=steps,
        timeout=timeout,
        seed=seed,
        preload=preload,
        select=select,
        ignore=ignore,
        suppress=suppress,
        baseline=baseline,
    )
    return report_of(CheckRun(target, decided(given, target, hosts), progress=progress, hosts=hosts).run())


def decided(given: CheckOptions, target: Recipe | str, hosts: Leader | None = None) -> CheckOptions:
    """The options of a check of `target`, with the defaults that depend on the machine filled in.

    Raises:
        UsageError: One of them is wrong, or `target` names no file.
    """
    if not isinstance(target, str):
        from ddpcheck.recipe.recipe import require_target

        require_target(target)
    allowed.check_count("steps", given.steps, MOST_STEPS)
    if isinstance(given.seed, bool) or not isinstance(given.seed, int):
        raise WrongTypeError(f"seed must be a whole number, not {given.seed!r}")
    if isinstance(target, str) and is_path(place := split_target(target)[0]):
        find_file(place)
    sharing = given.world_size if hosts is None else hosts.sharing
    preload = allowed.check_modules(given.preload)
    select, ignore = rule_patterns("select", given.select), rule_patterns("ignore", given.ignore)
    for one in given.suppress:
        if not isinstance(one, Suppression):
            raise WrongTypeError(f"suppress must be ddpcheck.Suppression values, not {one!r}")
    return replace(
        given,
        target=target if isinstance(target, str) else "recipe",
        backend=given.backend or ("nccl" if given.device == "cuda" and _has_gpus(sharing) else "gloo"),
        preload=preload,
        select=select,
        ignore=ignore,
        suppress=tuple(given.suppress),
        launcher=hosts.launcher if hosts is not None else None,
    )


def _has_gpus(ranks: int) -> bool:
    """Whether each of so many ranks has a GPU of its own."""
    import torch

    return isinstance(ranks, int) and 0 < ranks <= torch.cuda.device_count()
