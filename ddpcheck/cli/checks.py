"""Commands on recipes (`ddpcheck report`, `graph`, `init`) and jobs (`hang`, `live`)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpcheck import load_extra
from ddpcheck.cli.output import OutputFile, Progress, ReportOutput, complain, print_out, reason_of, say
from ddpcheck.cli.saved import load_report
from ddpcheck.findings.errors import EXIT_CLEAN, EXIT_FINDINGS, EXIT_HANG, EXIT_TARGET, UsageError
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Report
from ddpcheck.recipe.target import load_object
from ddpcheck.render import FORMATS, MATRIX_FORMATS
from ddpcheck.report.first_recipe.first_recipe import recipe_path
from ddpcheck.report.matrix.matrix import Matrix
from ddpcheck.report.settings import Settings, load_settings, misspelled_variables

if TYPE_CHECKING:
    from ddpcheck.worlds.launchers.leader import Leader

RUN_SETTINGS = ("world_size", "backend", "device", "steps", "timeout", "seed", "preload")
CHECK_SETTINGS = (*RUN_SETTINGS, "select", "ignore", "suppress", "rank_parameters")
_OF_REAL_RANKS = ("world_size", "backend", "device")


def command_settings(arguments: argparse.Namespace, names: Sequence[str], hosts: Leader | None) -> Settings:
    """Load a command's settings; launched ranks (`hosts`) determine the world size."""
    settings = load_settings({name: getattr(arguments, name, None) for name in (*names, "launcher")})
    for sentence in misspelled_variables():
        complain(sentence, kind="warning")
    if hosts is None:
        return settings
    if arguments.world_size is not None and settings.world_size != hosts.world_size:
        raise UsageError(
            f"--world-size {settings.world_size}, but {hosts.launcher} has started {hosts.world_size} ranks; leave it "
            f"out, or have {hosts.launcher} start as many"
        )
    return replace(settings, world_size=hosts.world_size)


def run_report(arguments: argparse.Namespace, hosts: Leader | None) -> int:
    """Run `ddpcheck report` (also with `--matrix` or `--schedule`) and show the report."""
    if arguments.matrix and arguments.repro is not None:
        raise UsageError("--repro writes the first finding of a report; run it without --matrix")
    if arguments.matrix and arguments.baseline is not None:
        raise UsageError("--baseline is for the findings of a report; run it without --matrix")
    scheduled = arguments.schedule is not None
    if scheduled:
        _refuse_beside_schedule(arguments, hosts)
    settings = command_settings(arguments, (*CHECK_SETTINGS, "fail_on"), hosts)
    extra: dict[str, Any] = {} if arguments.baseline is None else {"baseline": load_report(arguments.baseline)}
    with (
        ReportOutput(arguments, settings.format, MATRIX_FORMATS if arguments.matrix else FORMATS) as output,
        Progress(sys.stderr) as progress,
    ):
        if arguments.repro is not None:
            load_extra("repro").prepare(Path(arguments.repro))
        run: Callable[..., Report | Matrix]
        omitted = (*_OF_REAL_RANKS, "rank_parameters") if scheduled else ()
        asked = {name: getattr(settings, name) for name in CHECK_SETTINGS if name not in omitted}
        extra |= {"world_size": arguments.schedule} if scheduled else {"hosts": hosts}
        if arguments.matrix:  # import only the code that is needed
            run = load_extra("matrix.check_matrix").check_matrix
        elif scheduled:
            run = load_extra("schedule.check_schedule").check_schedule
        else:
            from ddpcheck.report.checking.check import check as run
        report = run(arguments.target, progress=progress, **asked, **extra)
        progress.clear()
        output.show(report)
        if arguments.repro is not None and isinstance(report, Report):
            _reproduce(report, arguments.target, Path(arguments.repro), progress)
    return report.exit_code(settings.fail_on)


def _refuse_beside_schedule(arguments: argparse.Namespace, hosts: Leader | None) -> None:
    """Raise a UsageError if options that do not apply to simulated ranks accompany `--schedule`."""
    options = {"--matrix": arguments.matrix, "--repro": arguments.repro}
    options |= {f"--{name.replace('_', '-')}": getattr(arguments, name) for name in _OF_REAL_RANKS}
    if refused := [option for option, value in options.items() if value]:
        raise UsageError(f"{refused[0]} is for real ranks, and --schedule simulates them; leave one of the two out")
    if hosts is not None:
        raise UsageError(
            f"--schedule starts its own processes; run it without {hosts.launcher}, or with --launcher off"
        )


def _reproduce(report: Report, target: str, folder: Path, progress: Progress) -> None:
    repro = load_extra("repro")
    if not report.findings:
        say(f"no finding to reproduce, nothing written to {folder}")
    elif why := repro.script.why_none(report.findings[0], report):
        say(f"{why}, nothing written to {folder}")
    else:
        progress("writing a reproduction")
        script = repro.write_reproduction(report, target, folder)
        progress.clear()
        command = repro.command_for(report, script)
        print(f"ddpcheck: wrote {script}; run it with: {command}", file=sys.stderr)  # not wrapped, to be copied


def run_graph(arguments: argparse.Namespace, hosts: Leader | None) -> int:
    """Check a recipe and draw the graph of its loss."""
    settings = command_settings(arguments, RUN_SETTINGS, hosts)
    autograd = arguments.view == "autograd"
    needed = ("graphviz", "torchviz", "distutils") if autograd else ("graphviz",)  # setuptools provides distutils
    if missing := [name for name in needed if find_spec(name) is None]:
        advice = "install its extra `graph` (pip install graphviz torchviz setuptools)"
        raise UsageError(f"`ddpcheck graph` needs {missing[0]}, which is not installed: {advice}")
    dot = load_extra("graph.dot")
    path = None if arguments.output in (None, "-") else arguments.output
    form = dot.picture_format(path)
    with OutputFile(path) as file, Progress(sys.stderr) as progress:
        report: Report
        report, view = load_extra("graph.trace_graph").trace_graph(
            arguments.target,
            autograd=autograd,
            progress=progress,
            hosts=hosts,
            **{name: getattr(settings, name) for name in RUN_SETTINGS},
        )
        progress("laying out the picture")
        source = dot.draw(view, report)
        picture = dot.lay_out(source, form, timeout=settings.timeout)
        progress.clear()
        if path is None:
            print_out(source.removesuffix("\n"))
        else:
            file.write(picture)
        where = f", written to {path}" if path is not None else ""
        say(f"{dot.summary(view, report)}{where}")
    if report.error is not None:  # only an explanation failed
        complain(report.error.message, report.error.detail)
        return report.error.exit_code
    return EXIT_CLEAN


def run_hang(arguments: argparse.Namespace) -> int:
    """Run `ddpcheck hang` (Flight Recorder dumps, or debug server); return 4 if hung."""
    from ddpcheck.report.hang.hang_report import report_on_hang

    _, code = _show(arguments, report_on_hang, arguments.folder)
    return EXIT_HANG if code == EXIT_FINDINGS else code


def run_live(arguments: argparse.Namespace) -> int:
    """Run `ddpcheck live`: report on an active `ddpcheck run`; return 4 if it hangs."""
    from ddpcheck.run.script_report import find_active_run, report_on_run

    try:
        report, code = _show(arguments, report_on_run, find_active_run(arguments.folder))
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {reason_of(error)}") from error
    return EXIT_HANG if report.checks[0].status == "error" else code


def _show(arguments: argparse.Namespace, report_on: Callable[..., Report], source: str | Path) -> tuple[Report, int]:
    settings = load_settings({name: getattr(arguments, name) for name in ("select", "ignore", "fail_on")})
    with ReportOutput(arguments, settings.format) as output:
        report = report_on(source, settings)
        output.show(report)
    return report, report.exit_code(settings.fail_on)


def run_init(arguments: argparse.Namespace) -> int:
    """Write and check a recipe with guessed model inputs; return 3 if guessing failed."""
    path = recipe_path(arguments.model, arguments.output)
    maker = load_object(arguments.model)  # report a wrong name before an existing file
    if path.exists() and not arguments.force:
        raise UsageError(f"{path} already exists; --force overwrites it, -o FILE writes to another file")
    from ddpcheck.report.first_recipe.guessing import make_first_recipe

    check = f"ddpcheck report {path.as_posix()}"
    text, guess = make_first_recipe(maker, arguments.model, arguments.args, check)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {reason_of(error)}") from error
    if guess.output is None:
        names = ", ".join(arg.name for arg in guess.inputs)
        why = f"{guess.tried} inputs were tried, the first gave {guess.error}" if guess.tried else guess.error
        say(f"wrote {path}, without inputs: the inputs of forward({names}) could not be guessed ({why})")
        say(f"fill in batch() where {path} says TODO, then run:\n  {check}")
        return EXIT_TARGET
    inputs = ", ".join(f"{arg.name} = {arg.code}" for arg in guess.inputs)
    say(f"wrote {path}; a guess that forward accepts: {inputs}; now checking it")
    options = dict.fromkeys((*CHECK_SETTINGS, "fail_on", "repro", "baseline", "output", "format"))
    options |= {"target": str(path), "matrix": False, "schedule": None, "launcher": "off", "command_line": check}
    code = run_report(argparse.Namespace(**options), None)
    say(f"the data and the loss are stand-ins: put your own where {path} says EDIT, then run:\n  {check}")
    return code
