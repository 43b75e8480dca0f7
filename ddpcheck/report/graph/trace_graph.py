"""`trace_graph(target)`: checks a recipe on real ranks and gathers the graph of its loss, with parameters to mark."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ddpcheck.findings import errors
from ddpcheck.findings.report import Finding, Report
from ddpcheck.findings.wording import format_ranks, format_steps
from ddpcheck.harness import RankHosts, World
from ddpcheck.report import calls
from ddpcheck.report.checking.check import check
from ddpcheck.report.checking.check_worlds import CollectiveMismatchWatch
from ddpcheck.report.graph.dot import CAUSES
from ddpcheck.report.graph.drawing_data import GraphView, Mark

if TYPE_CHECKING:
    from ddpcheck.recipe.recipe import Recipe

_ABSENT = ("DDP104", "DDP105")  # their ranks and steps are those in which the parameter takes no part


def trace_graph(
    target: Recipe | str, *, hosts: RankHosts | None = None, **options: Any
) -> tuple[Report, GraphView, tuple[Mark, ...]]:
    """Check a recipe, and gather the graph of rank 0's loss in the first step.

    Args:
        target: As for `ddpcheck.check`.
        hosts: Processes that a launcher has started.
        **options: The others of `ddpcheck.check`.

    Returns:
        The report of the check, the picture, and the parameters to mark in it.

    Raises:
        TargetError: The target could not be built or run.
        HangError: It hung.
        BugError: ddpcheck itself failed; where only an explanation did, the picture is drawn and the report says so.
        UsageError: An argument is wrong.
    """
    report = check(target, hosts=hosts, **options)
    bug = report.error is not None and report.error.exit_code == errors.EXIT_USAGE
    if report.error is not None and not (bug and all(check.status != "error" for check in report.checks)):
        kinds: Mapping[int, type[errors.DdpcheckError]] = {
            errors.EXIT_TARGET: errors.TargetError,
            errors.EXIT_HANG: errors.HangError,
        }
        raise kinds.get(report.error.exit_code, errors.BugError)(report.error.message, detail=report.error.detail)
    if options.get("progress"):
        options["progress"]("following the tensors")
    lazy = any(finding.code == "DDP110" for finding in report.findings)
    wrapped = any(item.name == "wrapping" and item.status in ("passed", "failed") for item in report.checks)
    settings = {name: report.world[name] for name in ("world_size", "backend", "device", "timeout")}
    try:
        with World(**settings, watch=CollectiveMismatchWatch(), hosts=hosts) as world:
            prepare = partial(calls.graph_phases.prepare, target, report.world["seed"])
            world.run(partial(prepare, wrapped=wrapped and not lazy, materialise=lazy))
            picture = world.run(calls.graph_phases.trace)[0]
    except errors.RankError as error:
        error.raise_cause()
        raise
    assert picture is not None, "rank 0 makes one"
    return report, picture, marks(report.findings)


def marks(findings: tuple[Finding, ...]) -> tuple[Mark, ...]:
    """The parameters to mark: each once, with the first of its findings."""
    found: dict[str, Mark] = {}
    for finding in sorted(findings, key=Finding.sort_key):
        if finding.code in CAUSES:
            ranks = f"on {format_ranks(finding.ranks)}" if finding.ranks else ""
            steps = f"in {format_steps(finding.steps)}" if finding.steps else ""
            absent = "not" if finding.code in _ABSENT and (ranks or steps) else ""
            for name in finding.subjects:
                found.setdefault(name, Mark(name, finding.code, " ".join(filter(None, (absent, ranks, steps)))))
    return tuple(found.values())
