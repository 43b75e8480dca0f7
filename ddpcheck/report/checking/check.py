"""`check(recipe)`: resolve options, run the check on real ranks, return its report."""

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
from ddpcheck.report.settings import check_patterns
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
    rank_parameters: Sequence[str] = (),
    baseline: Report | None = None,
    progress: Callable[[str], None] | None = None,
    hosts: Leader | None = None,
) -> Report:
    """Check a recipe on `world_size` real ranks with the real DDP reducer.

    The ranks are new processes, even under a launcher such as torchrun: every process that calls this function runs its
    own check. Only the command line runs on the ranks of a launcher.

    Args:
        target: A `Recipe`, or a TARGET ("path/to/file.py:attr") that is loaded on the ranks only.
        world_size: Number of ranks.
        backend: "gloo" or "nccl"; default: nccl if every rank has its own GPU, else gloo.
        device: "cpu" or "cuda".
        steps: Training steps to run.
        timeout: Seconds before one phase of the check counts as a hang.
        seed: Seed of all random number generators.
        preload: Modules imported once, before ranks are forked; see `World`.
        select: Codes, prefixes or names of the rules to report; default: all.
        ignore: Codes, prefixes or names of the rules not to report.
        suppress: Findings that are shown with a reason and not counted.
        rank_parameters: Patterns for names of parameters that are each rank's own, and are not compared.
        baseline: Earlier report, whose findings are shown as known and not counted.
        progress: Called with a short text at the start of each phase, and while waiting for ranks.
        hosts: Processes of a launcher that start the ranks instead; for the command line.

    Returns:
        The report. `Report.error` is set if the target fails or hangs; earlier findings are kept.

    Raises:
        UsageError: An argument is invalid, or `target` names no recipe.
    """
    options = CheckOptions(
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
        rank_parameters=rank_parameters,
    )
    return report_of(CheckRun(target, resolve_options(options, target, hosts), progress=progress, hosts=hosts).run())


def resolve_options(options: CheckOptions, target: Recipe | str, hosts: Leader | None = None) -> CheckOptions:
    """Validate the options of a check of `target`, and fill in machine-dependent defaults."""
    if not isinstance(target, str):
        from ddpcheck.recipe.recipe import require_target

        require_target(target)
    allowed.check_count("steps", options.steps, MOST_STEPS)
    if isinstance(options.seed, bool) or not isinstance(options.seed, int):
        raise WrongTypeError(f"seed must be a whole number, not {options.seed!r}")
    if isinstance(target, str) and is_path(path := split_target(target)[0]):
        find_file(path)
    sharing = options.world_size if hosts is None else hosts.sharing
    preload = allowed.check_modules(options.preload)
    select, ignore = check_patterns("select", options.select), check_patterns("ignore", options.ignore)
    for suppression in options.suppress:
        if not isinstance(suppression, Suppression):
            raise WrongTypeError(f"suppress must be ddpcheck.Suppression values, not {suppression!r}")
    return replace(
        options,
        target=target if isinstance(target, str) else "recipe",
        backend=options.backend or ("nccl" if options.device == "cuda" and _has_gpus(sharing) else "gloo"),
        preload=preload,
        select=select,
        ignore=ignore,
        suppress=tuple(options.suppress),
        rank_parameters=check_patterns("rank_parameters", options.rank_parameters),
        launcher=hosts.launcher if hosts is not None else None,
    )


def _has_gpus(ranks: int) -> bool:
    import torch

    return isinstance(ranks, int) and 0 < ranks <= torch.cuda.device_count()
