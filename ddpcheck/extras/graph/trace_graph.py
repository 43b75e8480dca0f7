"""`trace_graph(target)`: check a recipe and trace the graph of the loss."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ddpcheck.extras import calls
from ddpcheck.extras.graph.drawing_data import COLOURS, GraphView, Mark
from ddpcheck.findings import errors
from ddpcheck.findings.report import Finding, Report
from ddpcheck.findings.rules import RULES
from ddpcheck.findings.wording import format_ranks, format_steps
from ddpcheck.harness import start_world
from ddpcheck.report.checking.check import check
from ddpcheck.report.checking.check_worlds import CollectiveMismatchWatch
from ddpcheck.worlds.launchers.leader import Leader

if TYPE_CHECKING:
    from ddpcheck.recipe.recipe import Recipe


def trace_graph(
    target: Recipe | str, *, autograd: bool = False, hosts: Leader | None = None, **options: Any
) -> tuple[Report, GraphView]:
    """Check a recipe, and trace rank 0's loss graph in the first step.

    `options` are options of `ddpcheck.check`; with `autograd`, the autograd graph is drawn too. If only an explanation
    failed, the graph is still returned, with the error in the report.

    Raises:
        DDPCheckError: The check or the traced forward pass failed.
    """
    report = check(target, hosts=hosts, **options)
    if report.error is not None and (
        report.error.exit_code != errors.EXIT_USAGE or any(check.status == "error" for check in report.checks)
    ):
        kinds = {errors.EXIT_TARGET: errors.TargetError, errors.EXIT_HANG: errors.HangError}
        raise kinds.get(report.error.exit_code, errors.BugError)(report.error.message, detail=report.error.detail)
    if options.get("progress"):
        options["progress"]("following the tensors")
    wrapped = any(item.name == "wrapping" and item.status in ("passed", "failed") for item in report.checks)
    settings = {name: report.world[name] for name in ("world_size", "backend", "device", "timeout")}
    prepare = partial(calls.graph_phases.prepare, target, report.world["seed"])
    try:
        with start_world(**settings, watch=CollectiveMismatchWatch(), hosts=hosts) as world:
            world.run(partial(prepare, wrapped=wrapped))
            view = world.run(partial(calls.graph_phases.trace, marks(report.findings), autograd=autograd))[0]
    except errors.RankError as error:
        error.raise_cause()
        raise
    assert view is not None, "rank 0 makes one"
    return report, view


def marks(findings: tuple[Finding, ...]) -> dict[str, Mark]:
    """Return the mark (rule code, ranks and steps) of each parameter with a finding."""
    marked: dict[str, Mark] = {}
    for finding in sorted(findings, key=Finding.sort_key):
        ranks = [f"on {format_ranks(finding.ranks)}"] if finding.ranks else []
        where = [*ranks, f"in {format_steps(finding.steps)}"] if finding.steps else ranks
        if where and RULES[finding.code].conditional_use:  # ranks and steps are those without the parameter
            where = ["not", *where]
        for name in finding.subjects if finding.code in COLOURS else ():
            marked.setdefault(name, (finding.code, " ".join(where)))
    return marked
