"""The command line: parses, calls, renders, exits. The only place that prints and the only place that exits.

This module is light: it never imports torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, Self, TextIO

from ddpcheck import __version__
from ddpcheck.findings.errors import EXIT_CLEAN, EXIT_TARGET, EXIT_USAGE, DdpcheckError, UsageError
from ddpcheck.findings.exception_origin import BUG
from ddpcheck.findings.from_json import IncompleteError
from ddpcheck.findings.report import SCHEMA_VERSION, Report
from ddpcheck.findings.rules import FAMILIES, RULES, Rule, matching_rules
from ddpcheck.render import FORMATS, MATRIX_FORMATS, Format, Medium, renderer_for
from ddpcheck.report.graph.layout import lay_out, picture_format
from ddpcheck.report.matrix.matrix import Matrix, is_matrix
from ddpcheck.report.repro import command_for, demonstration_for, prepare, write_reproduction
from ddpcheck.report.settings import Settings, load_settings, misspelled_variables

if TYPE_CHECKING:
    from ddpcheck.harness import RankHosts
    from ddpcheck.worlds.launchers import LauncherEnv

EXIT_INTERRUPTED = 128 + signal.SIGINT

EPILOG = """\
exit codes: 0 no findings; 1 findings at or above --fail-on; 2 wrong usage or configuration, or a bug in ddpcheck;
3 the target could not be imported, built or run; 4 a hang or a deadline; 130 interrupted by Ctrl-C, 143 ended by
SIGTERM. Where torchrun, mpirun or srun has started several, rank 0 has this exit code and the others 0.
"""

TARGET_HELP = """\
a recipe: `pkg.module:attr`, `path/to/file.py:attr`, `pkg.module` or `path/to/file.py`. attr is a ddpcheck.Recipe, or a
function without arguments that returns one; without attr, the module has functions model, batch and loss
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (that of the process when absent) and return its exit code."""
    parser = _parser()
    debug = False
    previous = _exit_on_sigterm()
    try:
        arguments = parser.parse_args(argv)
        debug = arguments.debug
        code: int = arguments.command(arguments)
        return code
    except DdpcheckError as error:
        if debug:
            raise
        _complain(str(error), error.detail)
        return error.exit_code
    except KeyboardInterrupt:
        if debug:
            raise
        _complain("interrupted")
        return EXIT_INTERRUPTED
    except Exception as error:
        if debug:
            raise
        reason = "".join(traceback.format_exception_only(error)).strip().replace("\n", " ")
        _complain(f"{reason}; {BUG}: please report it with the traceback that --debug shows")
        return EXIT_USAGE
    finally:
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ddpcheck",
        description="Tells whether a model and its training loop are right under PyTorch DistributedDataParallel.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ddpcheck {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(command=lambda arguments: _no_command(parser))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
        made.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )
        made.set_defaults(command=run)
        return made

    report = command("report", _on_ranks(_report), "check a recipe on real processes and print a report")
    what = _add_target(report)
    rules = "rules by code, prefix or name; comma separated or repeated"
    what.add_argument("--select", metavar="RULES", action="append", help=f"report only these {rules}")
    what.add_argument("--ignore", metavar="RULES", action="append", help=f"do not report these {rules}")
    what.add_argument(
        "--matrix",
        action="store_true",
        help="try the options of DistributedDataParallel: which are right, what they cost",
    )
    how = report.add_argument_group("what comes of it")
    how.add_argument("--fail-on", metavar="SEVERITY", help="error, warning, note or never (default error)")
    _add_output(how)
    how.add_argument(
        "--repro",
        metavar="DIR",
        help="write a script there that shows the first finding under plain torchrun, without ddpcheck; overwrites "
        "what ddpcheck wrote there before, and nothing else",
    )

    graph = command(
        "graph", _on_ranks(_graph), "check a recipe and draw its loss's graph, with anomalous parameters in colour"
    )
    how = _add_target(graph)
    how.add_argument("--detail", default="auto", metavar="NAME", help="operations, modules or auto (by size; default)")
    how.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="FILE.dot, FILE.svg or FILE.png; without it, dot source to standard output",
    )

    explain = command("explain", _explain, "say what a rule means, why it matters and what to do")
    explain.add_argument("rules", metavar="RULE", nargs="+", help="a code, the beginning of one, or a name")

    listing = command("rules", _rules, "list all rules")
    listing.add_argument("--format", metavar="NAME", default="text", help="text (default) or json")

    render = command("render", _render, "show a report that was saved as JSON")
    render.add_argument("path", metavar="REPORT.json", help="the file, or - for standard input")
    _add_output(render)
    return parser


def _add_target(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    parser.add_argument("target", metavar="TARGET", help=TARGET_HELP)
    what = parser.add_argument_group("what is checked")
    what.add_argument("--steps", metavar="N", help="training steps (default 3)")
    what.add_argument("--world-size", metavar="N", help="ranks (default 2)")
    what.add_argument("--backend", metavar="NAME", help="gloo or nccl (default: by device)")
    what.add_argument("--device", metavar="NAME", help="cpu or cuda (default cpu)")
    what.add_argument("--timeout", metavar="SECONDS", help="after which a run counts as a hang (default 30)")
    what.add_argument("--seed", metavar="N", help="of all random numbers (default 0)")
    what.add_argument(
        "--launcher",
        metavar="WHEN",
        help="whether to run on ranks that torchrun, mpirun or srun has started: auto (default), on or off",
    )
    modules = "modules that every rank needs, imported once before ranks are forked; comma separated or repeated"
    what.add_argument("--preload", metavar="MODULES", action="append", help=modules)
    return what


def _add_output(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", help="write there instead of to standard output")
    names = ", ".join(FORMATS)
    parser.add_argument("--format", metavar="NAME", help=f"{names} (default: by the extension of FILE, else text)")


def _no_command(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return EXIT_USAGE


_RUN = ("world_size", "backend", "device", "steps", "timeout", "seed", "preload")
_ASKED = (*_RUN, "select", "ignore")


def _settings(arguments: argparse.Namespace, names: Sequence[str], hosts: RankHosts | None) -> Settings:
    """Those that matter for a command, with the number of ranks that there are."""
    settings = load_settings({name: getattr(arguments, name) for name in (*names, "launcher")})
    for sentence in misspelled_variables():
        _complain(sentence, kind="warning")
    if hosts is None:
        return settings
    if arguments.world_size is not None and settings.world_size != hosts.world_size:
        raise UsageError(
            f"--world-size {settings.world_size}, but {hosts.launcher} has started {hosts.world_size} ranks; leave it "
            f"out, or have {hosts.launcher} start as many"
        )
    return replace(settings, world_size=hosts.world_size)


def _report(arguments: argparse.Namespace, hosts: RankHosts | None) -> int:
    if arguments.matrix:
        return _matrix(arguments, hosts)
    settings = _settings(arguments, (*_ASKED, "fail_on"), hosts)
    with (
        _Output(arguments, settings.format) as output,
        _Reproduction(arguments.repro) as reproduction,
        _Progress(sys.stderr) as progress,
    ):
        from ddpcheck.report.checking.check import check  # the rest of the house, only when there is work to do

        asked = {name: getattr(settings, name) for name in _ASKED}
        report = check(arguments.target, progress=progress, hosts=hosts, **asked)
        progress.clear()
        output.show(report)
        reproduction.write(report, arguments.target, progress)
    return report.exit_code(settings.fail_on)


def _matrix(arguments: argparse.Namespace, hosts: RankHosts | None) -> int:
    if arguments.repro is not None:
        raise UsageError("--repro writes the first finding of a report; run it without --matrix")
    settings = _settings(arguments, (*_ASKED, "fail_on"), hosts)
    with _Output(arguments, settings.format, MATRIX_FORMATS) as output, _Progress(sys.stderr) as progress:
        from ddpcheck.report.matrix.check_matrix import check_matrix

        asked = {name: getattr(settings, name) for name in _ASKED}
        matrix = check_matrix(arguments.target, progress=progress, hosts=hosts, **asked)
        progress.clear()
        output.show(matrix)
    return matrix.exit_code(settings.fail_on)


def _graph(arguments: argparse.Namespace, hosts: RankHosts | None) -> int:
    settings = _settings(arguments, _RUN, hosts)
    path = None if arguments.output in (None, "-") else arguments.output
    form = picture_format(path)
    with _File(path) as file, _Progress(sys.stderr) as progress:
        from ddpcheck.report.graph.collapse import fold
        from ddpcheck.report.graph.dot import draw, summary
        from ddpcheck.report.graph.trace_graph import trace_graph

        report, picture, marks = trace_graph(
            arguments.target,
            detail=arguments.detail,
            progress=progress,
            hosts=hosts,
            **{name: getattr(settings, name) for name in _RUN},
        )
        progress("laying out the picture")
        source = draw(fold(picture, marks), marks, report)
        drawn = lay_out(source, form, timeout=settings.timeout)
        progress.clear()
        if path is None:
            _print(source.removesuffix("\n"))
        else:
            file.write(drawn)
        where = f", written to {path}" if path is not None else ""
        print(f"ddpcheck: {summary(picture, marks, report)}{where}", file=sys.stderr)
    if report.error is not None:  # something that would only have explained
        _complain(report.error.message, report.error.detail)
        return report.error.exit_code
    return EXIT_CLEAN


# --- Under a launcher ------------------------------------------------------------------------------------------------

_LAST_WORDS = 2.0  # seconds that rank 0 has for a report after SIGTERM; the others wait a little longer for it
_WITHOUT_LEADER = 3.0


def _on_ranks(run: Callable[[argparse.Namespace, RankHosts | None], int]) -> Callable[[argparse.Namespace], int]:
    """The command on the ranks that a launcher has started, if one has: rank 0 runs it, and the others follow."""

    def command(arguments: argparse.Namespace) -> int:
        launch = _launch(arguments)
        if launch is None:
            return run(arguments, None)
        if launch.rank:
            return _follow(launch)
        from ddpcheck.worlds.launchers import Ending, Leader, explain_exit

        code, sentence = EXIT_USAGE, ""
        with Ending(launch, _LAST_WORDS), Leader(launch) as hosts:
            try:
                code = run(arguments, hosts)
                sentence = "ddpcheck has not crashed: this is what it says of the target, in the report"
            except DdpcheckError as error:
                code, sentence = error.exit_code, f"ddpcheck: error: {error}"
                raise
            finally:
                explain_exit(code, sentence)
        return code

    return command


def _launch(arguments: argparse.Namespace) -> LauncherEnv | None:
    """What the launcher has said, `None` for ranks of our own."""
    try:
        launcher = load_settings({"launcher": arguments.launcher}).launcher
    except DdpcheckError:
        launcher = "auto"  # rank 0 will say what is wrong
    if launcher == "off":
        return None
    from ddpcheck.worlds.launchers import detect, require

    return require() if launcher == "on" else detect()


def _follow(launch: LauncherEnv) -> int:
    """Be another rank than 0: silent, and content with whatever rank 0 comes to, which alone has the exit code."""
    from ddpcheck.worlds.launchers import Ending, follow

    try:
        with Ending(launch, _WITHOUT_LEADER):
            if follow(launch):
                return EXIT_CLEAN
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED  # rank 0 is told the same
    if launch.rank == 1:  # one is enough
        _complain("rank 0 was lost before it could write the report; its launcher knows how")
    return EXIT_TARGET


def _render(arguments: argparse.Namespace) -> int:
    name = "standard input" if arguments.path == "-" else arguments.path
    try:
        text = _standard_input() if arguments.path == "-" else Path(arguments.path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {name}: {_reason(error)}") from error
    saved: type[Report] | type[Matrix] = Matrix if is_matrix(text) else Report
    try:
        report = saved.from_json(text)
    except IncompleteError as error:
        raise UsageError(f"{name} is not a complete report: {error}") from error
    except ValueError as error:
        raise UsageError(f"{name} is not a report: {error}") from error
    with _Output(arguments, load_settings().format, MATRIX_FORMATS if saved is Matrix else FORMATS) as output:
        output.show(report)
    return EXIT_CLEAN


def _standard_input() -> str:
    if sys.stdin is None:
        raise UsageError("cannot read standard input: it is closed")
    return sys.stdin.read()


def _explain(arguments: argparse.Namespace) -> int:
    chosen = {rule.code: rule for pattern in arguments.rules for rule in matching_rules(pattern)}
    _print("\n\n".join(_explanation(rule) for rule in chosen.values()))
    return EXIT_CLEAN


def _explanation(rule: Rule) -> str:
    width = min(Medium.of(sys.stdout).width or 100, 100)
    parts = [f"{rule.code} {rule.name} ({rule.severity.value})", "", textwrap.fill(rule.summary, width)]
    for heading, text in (("Why it matters", rule.why), ("What to do", rule.fix)):
        parts += ["", heading, textwrap.fill(text, width, initial_indent="  ", subsequent_indent="  ")]
    if rule.example:
        parts += ["", "Example", textwrap.indent(rule.example.rstrip(), "  ")]
    return "\n".join(parts)


def _rules(arguments: argparse.Namespace) -> int:
    if arguments.format not in ("text", "json"):
        raise UsageError(f"there is no format {arguments.format!r} for rules; the formats are text, json")
    if arguments.format == "json":
        rules = [{**asdict(rule), "severity": rule.severity.value} for rule in RULES.values()]
        _print(json.dumps({"schema_version": SCHEMA_VERSION, "families": dict(FAMILIES), "rules": rules}, indent=2))
        return EXIT_CLEAN
    lines: list[str] = []
    for prefix, family in FAMILIES.items():
        lines += ["", f"{prefix}xx {family}"] if lines else [f"{prefix}xx {family}"]
        for rule in RULES.values():
            if rule.code.startswith(prefix):
                lines.append(f"  {rule.code} {rule.name:<34} {rule.severity.value:<8} {rule.summary}")
    _print("\n".join([*lines, "", "More on one of them: ddpcheck explain CODE"]))
    return EXIT_CLEAN


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, like every other error of ours."""

    def error(self, message: str) -> NoReturn:
        from ddpcheck.worlds.launchers import BY_HAND, detect

        launch = detect()
        if launch is not None and launch.rank and launch.launcher != BY_HAND:
            raise SystemExit(EXIT_CLEAN)  # rank 0 has been given the same, and says so
        _complain(f"{message} (see `{self.prog} --help`)")
        raise SystemExit(EXIT_USAGE)


class _File:
    """A file to write. Entering finds out whether that can be done, before any work is."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._made = False
        self._written = False

    def __enter__(self) -> Self:
        if self._path is not None:
            self._made = not os.path.lexists(self._path)
            try:
                with open(self._path, "ab"):
                    pass
            except (OSError, ValueError) as error:
                raise UsageError(f"cannot write {self._path}: {_reason(error)}") from error
        return self

    def __exit__(self, *exception: object) -> None:
        if self._path is not None and self._made and not self._written:
            os.unlink(self._path)

    def write(self, content: bytes) -> None:
        assert self._path is not None
        try:
            with open(self._path, "wb") as file:
                file.write(content)
        except OSError as error:
            raise UsageError(f"cannot write {self._path}: {_reason(error)}") from error
        self._written = True


class _Output(_File):
    """Where a report goes: a file, or standard output."""

    def __init__(
        self, arguments: argparse.Namespace, default: str | None, formats: Mapping[str, Format] = FORMATS
    ) -> None:
        super().__init__(None if arguments.output in (None, "-") else arguments.output)
        medium = Medium.of(sys.stdout) if self._path is None else Medium()
        self._renderer = renderer_for(
            arguments.format, path=self._path, medium=medium, formats=formats, default=default
        )

    def show(self, report: Report | Matrix) -> None:
        text = self._renderer.render(report)
        if self._path is None:
            _print(text.removesuffix("\n"))
            return
        self.write(text.encode("utf-8", "backslashreplace"))
        print(f"ddpcheck: {report.summary}, written to {self._path}", file=sys.stderr)


class _Reproduction:
    """Where a reproduction goes. Entering finds out whether that can be written, before any work is done."""

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._made = False

    def __enter__(self) -> _Reproduction:
        if self._folder is not None:
            self._made = prepare(self._folder)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._folder is not None and self._made:
            with contextlib.suppress(OSError):  # not empty: something was written
                self._folder.rmdir()

    def write(self, report: Report, target: str, progress: _Progress) -> None:
        if self._folder is None:
            return
        if not report.findings:
            print(f"ddpcheck: no finding to reproduce, nothing written to {self._folder}", file=sys.stderr)
            return
        first = report.findings[0]
        if demonstration_for(first) is None:
            what = f"{first.code} ({RULES[first.code].name})"
            print(f"ddpcheck: no script shows {what}, nothing written to {self._folder}", file=sys.stderr)
            return
        progress("writing a reproduction")
        script = write_reproduction(report, target, self._folder)
        progress.clear()
        print(f"ddpcheck: wrote {script}; run it with: {command_for(report, script)}", file=sys.stderr)


class _Progress:
    """One line on a terminal that says what is going on, and is gone afterwards; nothing elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._medium = Medium.of(stream)
        self._stream = stream
        self._drawn = False

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.clear()

    def __call__(self, text: str) -> None:
        if self._medium.interactive:
            self.clear()
            line = "".join(c for c in text if c.isprintable())[: (self._medium.width or 80) - 1]
            self._stream.write(line.encode(self._medium.encoding, "replace").decode(self._medium.encoding))
            self._stream.flush()
            self._drawn = True

    def clear(self) -> None:
        if self._drawn:
            self._stream.write("\r" + " " * ((self._medium.width or 80) - 1) + "\r")
            self._stream.flush()
            self._drawn = False


def _print(text: str) -> None:
    if sys.stdout is None:
        raise UsageError("cannot write to standard output: it is closed; name a file with -o")
    encoding = sys.stdout.encoding or "ascii"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:
        # The reader has left, as `| head` does; the exit code stays. Python would complain again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in the buffer would fail again
        raise UsageError(f"cannot write to standard output: {_reason(error)}") from error


def _complain(message: str, detail: str = "", *, kind: str = "error") -> None:
    encoding = sys.stderr.encoding or "ascii"
    text = f"ddpcheck: {kind}: {message}"
    if detail.strip():
        text += "\n" + textwrap.indent(detail.rstrip(), "  ")
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=sys.stderr)


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _exit_on_sigterm() -> Callable[[int, FrameType | None], object] | int | None:
    """Let SIGTERM unwind the stack, so that what was started is ended; returns the handler that was there before."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    try:
        return signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread: whoever embeds us decides
        return None
