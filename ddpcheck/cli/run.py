"""`ddpcheck run`: run a script with torchrun's agent in this process, then report."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import math
import os
import shlex
import signal
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ddpcheck import load_extra
from ddpcheck.cli.output import ReportOutput, complain, complain_of, format_error, print_error, reason_of, say
from ddpcheck.cli.parsing import Parser, describe_run, near_option
from ddpcheck.cli.saved import load_report
from ddpcheck.findings.errors import EXIT_FINDINGS, EXIT_HANG, EXIT_USAGE, UsageError
from ddpcheck.findings.program_blocks import ProgramSource
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Report
from ddpcheck.findings.wording import join_names
from ddpcheck.gather.patching import Patch, patched
from ddpcheck.recipe.target import similar_file_hint
from ddpcheck.record.rank.environment import ParityOptions, RunOptions, environment_for, unwatched_in
from ddpcheck.report.settings import Settings
from ddpcheck.run.check_options import add_check_options, settings_from_args, split_at_script
from ddpcheck.run.ending import Ending
from ddpcheck.run.flight_dumps import create_dump_folder, write_flight_records
from ddpcheck.run.hang_watch import Hang, HangWatch, NotExited, end_agent, joining_processes
from ddpcheck.run.node_link import NodeLink
from ddpcheck.run.run_folder import own_folder
from ddpcheck.stream.entries import WatchingFailed
from ddpcheck.stream.rank_log import FOLDER, SCRIPT, RankTrace, last_restart, rank_processes, read_logs
from ddpcheck.worlds.failures import is_lost_connection

if TYPE_CHECKING:
    from ddpcheck.run.parity_run import ParityRuns, SingleRun

_AHEAD = 0.5  # seconds after which the agent has started the ranks, which then import torch


def examine_options(args: argparse.Namespace) -> None:
    """Validate the script path and the options of torchrun."""
    from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

    if not args.module and not args.no_python and not os.path.exists(args.training_script):
        raise UsageError(f"no such file: {args.training_script}{similar_file_hint(Path(args.training_script))}")
    ranks = args.nproc_per_node
    try:
        is_valid = determine_local_world_size(ranks) > 0
    except (ValueError, RuntimeError) as error:
        if ranks in ("gpu", "xpu"):
            raise UsageError(f"--nproc-per-node {ranks}: {error}") from None
        is_valid = False
    if not is_valid:
        raise UsageError(f"--nproc-per-node is a number of ranks from 1 on, or auto, cpu or gpu, not {ranks!r}")
    min_nodes, max_nodes = 0, 0
    with contextlib.suppress(ValueError, RuntimeError):
        min_nodes, max_nodes = parse_min_max_nnodes(args.nnodes)
    if not 0 < min_nodes <= max_nodes:
        raise UsageError(f"--nnodes is a number of machines from 1 on, or MIN:MAX, not {args.nnodes!r}")
    if args.max_restarts < 0:
        raise UsageError(f"--max-restarts is a number from 0 on, not {args.max_restarts}")


def run_agent(
    run: Any, args: argparse.Namespace, folder: Path, nodes: NodeLink | None = None, *, limit: float | None = None
) -> Ending:
    """Run the script on ranks of torchrun's agent; return how the ranks ended.

    `Ending.exit_code` is the exit code of the first failed rank, or 128 + the number of the signal that ended the run.
    `limit` is the maximum duration in seconds; if `limit` is set, no messages are printed.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    quiet = limit is not None
    watch = HangWatch(folder, args.check_timeout, end_agent, None if quiet else say, nodes, limit or math.inf)
    try:
        with _keeping_handlers(), _error_file_patch(), _link_nodes_patch(nodes), _sigkill_patch(quiet):
            try:
                run(args)
            finally:
                watch.stop()
                watch.forget_end()
    except ChildFailedError as error:
        if watch.hang is not None:  # the other node ended its ranks first
            return Ending(EXIT_HANG, hang=watch.hang)
        if not quiet:
            print_error(str(error))
        code = code_of_first(error.failures)
        pids = rank_processes(folder)  # the agent may have started a parent of the ranks
        kept = {rank: failure for rank, failure in error.failures.items() if pids.get(rank, failure.pid) == failure.pid}
        return Ending(code, {rank: failure.exitcode for rank, failure in kept.items()})
    except SignalException as error:
        if watch.not_exited is not None:
            return Ending(not_exited=watch.not_exited)
        if watch.hang is not None:
            return Ending(EXIT_HANG, hang=watch.hang)
        if not quiet:
            print_error(f"ddpcheck run: {error}")
        return Ending(128 + int(error.sigval), interrupted=True)
    except Exception as error:
        if _is_refused_option(error):
            raise UsageError(f"torchrun refuses an option: {error}") from error
        if args.debug:
            traceback.print_exception(error)
        complain(f"the agent of torchrun has stopped: {format_error(error)}")
        return Ending(EXIT_FINDINGS)  # as torchrun exits then
    return Ending()


def code_of_first(failures: Mapping[int, Any]) -> int:
    """Return the exit code of the first rank that failed on its own.

    A rank that lost a connection or was ended by SIGTERM failed because of another rank. If a rank raised an exception,
    and the agent ended the rank afterwards, the code is 1, as for an exception.
    """
    ordered = sorted(failures.values(), key=lambda proc: proc.timestamp)
    raised = {proc.pid: str(proc.message) for proc in ordered if isinstance(proc.message, dict)}  # from an error file
    lost = [proc.pid for proc in ordered if is_lost_connection(raised.get(proc.pid, ""))]
    by_itself = [proc for proc in ordered if proc.pid not in lost and proc.exitcode != -signal.SIGTERM]
    first = (by_itself or ordered)[0]
    code = EXIT_FINDINGS if first.exitcode == -signal.SIGTERM and first.pid in raised else first.exitcode
    return int(code if code > 0 else 128 - code)


def _is_refused_option(error: Exception) -> bool:
    from torch.distributed.run import config_from_args

    return any(frame.f_code is config_from_args.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


def _link_nodes_patch(nodes: NodeLink | None) -> contextlib.AbstractContextManager[None]:
    """Patch torchrun's agent to reconnect the nodes after each rendezvous (start or restart)."""
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

    def rendezvous(_agent: Any, group: Any) -> Iterator[None]:
        yield
        if nodes is not None:
            nodes.reconnect(group.store, group.group_rank, group.group_world_size)

    return patched(SimpleElasticAgent, "_rendezvous", rendezvous)


@contextlib.contextmanager
def _keeping_handlers() -> Iterator[None]:
    """Restore signal handlers after the block: torchrun's agent leaves handlers that raise."""
    handlers = {signum: signal.getsignal(signum) for signum in signal.valid_signals()}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            if handler is not None and signal.getsignal(signum) is not handler:
                signal.signal(signum, handler)


def _sigkill_patch(kills: bool) -> Patch:
    """Patch torchrun's agent; if `kills`, ranks are ended by SIGKILL, without cleanup."""
    from torch.distributed.elastic.multiprocessing.api import PContext

    def make(close: Any) -> Any:
        return lambda context, number=None, timeout=30: close(context, signal.SIGKILL if kills else number, timeout)

    return Patch(PContext, "close", make)


def _error_file_patch() -> Patch:
    """Patch the agent to ignore truncated error files of killed ranks."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    def before(failure: Any) -> None:
        try:
            failure._get_error_data(json.loads(Path(failure.error_file).read_bytes()))
        except Exception:  # any content
            failure.error_file = ""

    return patched(ProcessFailure, "__post_init__", before)


def _parse_arguments(arguments: argparse.Namespace) -> tuple[argparse.Namespace, list[str]]:
    """Parse `ddpcheck run`; return its options, and the script with its arguments."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.prog = "ddpcheck run"
    add_check_options(parser)
    parser.error = Parser.error.__get__(parser)  # type: ignore[method-assign]
    describe_run(parser, everything="--help-all" in arguments.rest)
    options, script = split_at_script(parser, arguments.rest)
    args, unknown = parser.parse_known_args([*options, *(script[:1] or [""])])
    if unknown:
        hint = near_option(parser, unknown) or "; put arguments of the script after the script"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if not script:
        parser.error("there is no script to run, as in `ddpcheck run --standalone --nproc-per-node 2 train.py`")
    own_options = {name for name in parser._option_string_actions if name.startswith("--check-")}
    if late := [word for word in script[1:] if word.partition("=")[0] in own_options]:
        complain(f"{' '.join(late)} stands after the script, which gets it: put it before {script[0]}", kind="note")
    args.training_script_args = script[1:]
    args.command_line = arguments.command_line
    args.debug = arguments.debug = arguments.debug or args.debug
    return args, script


def run_script(arguments: argparse.Namespace) -> int:
    """Run a script as torchrun does and report; return the exit code."""
    from torch.distributed.run import run

    args, script = _parse_arguments(arguments)
    settings = settings_from_args(args)
    examine_options(args)
    baseline = None if args.check_baseline is None else load_report(args.check_baseline)
    if args.check_record is not None:
        load_extra("run_record")  # before the run, if it is not installed
    if args.check_flight_recorder is not None:
        create_dump_folder(Path(args.check_flight_recorder))
    temp_dir = tempfile.TemporaryDirectory(prefix=FOLDER, ignore_cleanup_errors=True)
    with temp_dir as folder, own_folder(Path(folder)), report_output(args) as output:
        Path(folder, SCRIPT).write_text(shlex.join(script))
        parity = None
        if args.check_parity:
            from ddpcheck.run.parity_run import ParityRuns  # only if used

            parity = ParityRuns(args, Path(folder), functools.partial(run_agent, run), settings.rank_parameters)
        parity_options = ParityOptions(batch=args.check_parity_batch) if args.check_parity else None
        recording = RunOptions(folder, args.check_every, parity_options)
        os.environ.update(environment_for(recording, os.environ))
        nodes = NodeLink(Path(folder))
        # Import the judges while the ranks run and this process is idle.
        timer = threading.Timer(_AHEAD, importlib.import_module, ["ddpcheck.run.script_report"])
        timer.daemon = True
        timer.start()
        ending = run_agent(run, args, Path(folder), nodes)
        timer.cancel()
        if (exit_code := send_logs(nodes, ending)) is not None:
            return exit_code
        ending, exit_code = collect_logs(nodes, ending), EXIT_USAGE
        try:
            singles = () if parity is None else run_single(parity, Path(folder), ending, nodes.size, debug=args.debug)
            report = show_report(shlex.join(script), ending, Path(folder), args, output, settings, baseline, singles)
            exit_code = ending.exit_code or report.exit_code(settings.fail_on)
        except Exception as error:
            if args.debug or not ending.exit_code:
                raise
            complain_of(error)
            exit_code = ending.exit_code
        finally:
            nodes.finish(exit_code)
    return exit_code


def run_single(parity: ParityRuns, folder: Path, ending: Ending, nodes: int, *, debug: bool) -> tuple[SingleRun, ...]:
    """Rerun the script in a single process for comparison; signals end only this run."""
    from ddpcheck.run.parity_run import INTERRUPTED, SingleRun

    with _keeping_handlers():
        for signum in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, signal.default_int_handler)
        try:
            singles = _run_parity(parity, read_logs(folder), ending, nodes)
        except KeyboardInterrupt:  # raised by our handlers while no agent is running
            singles = (SingleRun(why_not=INTERRUPTED),)
    if debug and singles[0].why_not and singles[0].output:
        complain("the single process has said:", singles[0].output, kind="debug")
    return singles


def _run_parity(parity: ParityRuns, ranks: Sequence[RankTrace], ending: Ending, nodes: int) -> tuple[SingleRun, ...]:
    """Rerun the script in a single process, for comparison with its run on ranks.

    If the results differ, a second run measures noise. If training differs beyond noise, a third run, as rank 1, shows
    if the script computes with the rank number.
    """
    from ddpcheck.run.parity_run import SingleRun
    from ddpcheck.trace.divergences import Parity

    if why := parity.why_not(ranks, ending, nodes):
        return (SingleRun(why_not=why),)
    say(parity.begin(ranks))
    single = parity.run(ranks)
    if single.why_not or Parity(ranks, single.ranks[0]).is_equal:
        return (single,)
    say("the two runs differ: running again in a single process, to measure rounding and random numbers")
    noise = parity.run(ranks, measures_noise=True)
    singles: tuple[SingleRun, ...] = single, noise
    if not noise.why_not and Parity(ranks, single.ranks[0], noise.ranks[0]).training_diverges:
        say("running again as another rank, to check if the script computes with the number of the rank")
        singles = single, noise, parity.run(ranks, as_rank=1)
    last = singles[-1]
    if last.why_not and not (last.has_raised and last is not noise):  # a script may reject rank 1 of world size 1
        failed = "it differs, perhaps only by noise, but the run that measures noise has failed"
        return (replace(last, why_not=f"{failed}: {last.why_not}"),)
    return singles


def report_output(args: argparse.Namespace) -> ReportOutput:
    """Return the destination of the report, from the options of the run."""
    args.output, args.format = args.check_output, args.check_format
    return ReportOutput(args, None, to_stderr=True)


def show_report(
    script: str,
    ending: Ending,
    folder: Path,
    args: argparse.Namespace,
    output: ReportOutput,
    settings: Settings,
    baseline: Report | None,
    singles: Sequence[SingleRun] = (),
) -> Report:
    """Show the report on a finished script; a clean result normally is one line."""
    from ddpcheck.run.script_report import report_on_script

    ranks = read_logs(folder)
    for entry in (entry for rank in ranks for entry in rank.entries if args.debug):
        if isinstance(entry, WatchingFailed):
            complain(entry.error, kind="debug")
    unmet_ranks = () if ranks else joining_processes(folder)
    ending = replace(ending, joining=unmet_ranks, restart=last_restart(folder), unwatched=unwatched_in(folder))
    if args.check_flight_recorder is not None:
        try:
            write_flight_records(Path(args.check_flight_recorder), ranks, ending)
        except OSError as error:
            complain(f"cannot write to {args.check_flight_recorder}: {reason_of(error)}")
    source = ProgramSource()
    report = report_on_script(script, ending, ranks, settings, baseline=baseline, source=source, singles=singles)
    if args.check_record is not None:
        save_record(args.check_record, script, ending, ranks, source, report)
    is_brief = args.check_output is None and args.check_format is None and not args.verbose
    if is_brief and (report.status == "clean" or not (ranks or report.findings)):
        for note in report.world.get("notes", ()):
            complain(note, kind="note")
        say(f"clean: {report.checks[0].detail}" if report.status == "clean" else report.checks[-1].detail)
        for check in report.checks:
            if singles and check.name == "parity":
                say(check.detail)
    else:
        output.show(report)
    return report


def save_record(
    path: str, script: str, ending: Ending, ranks: Sequence[RankTrace], source: ProgramSource, report: Report
) -> None:
    """Save the recorded run with pseudonyms; print findings that the pseudonyms make undetectable."""
    try:
        judged = load_extra("run_record").write_record(Path(path), script, ending, ranks, source)
    except OSError as error:
        complain(f"cannot write {path}: {reason_of(error)}")
        return
    say(f"the recorded run is in {path}, with names replaced; `ddpcheck render {path}` shows its report")
    if lost := sorted({finding.code for finding in report.findings} - {finding.code for finding in judged.findings}):
        complain(f"without the names of the program, {join_names(lost)} is not found in it", kind="note")


def send_logs(link: NodeLink, ending: Ending) -> int | None:
    """Send this node's logs to node 0; return None if this node must report."""
    if not link.is_joined or link.number == 0:
        return None
    exit_code = link.hand_over(msgspec.msgpack.encode(ending))
    if exit_code is None:
        complain("node 0 did not accept the logs of this node; a separate report follows", kind="note")
        return None
    say(f"node {link.number} of {link.size}: the report on all ranks is that of node 0, on {link.host}")
    return ending.exit_code or exit_code


def collect_logs(link: NodeLink, ending: Ending) -> Ending:
    """Receive the logs of the other nodes on node 0; return the merged `Ending`."""
    if not link.is_joined:
        return ending
    endings = [ending]
    for number, data in link.collect(interrupted=ending.interrupted).items():
        try:
            endings.append(msgspec.msgpack.decode(data, type=Ending))
        except msgspec.MsgspecError as error:
            complain(f"the exit of node {number} is not known: {error}", kind="note")
    for number, why in link.refused.items():
        complain(f"the logs of node {number} were not accepted: {why}", kind="note")
    return merge_endings(endings)


def merge_endings(endings: list[Ending]) -> Ending:
    """Merge the endings of several nodes; the first nonzero exit code wins."""
    hangs = [ending.hang for ending in endings if ending.hang is not None]
    unended = [ending.not_exited for ending in endings if ending.not_exited is not None]
    exit_codes: Mapping[int, int] = {rank: code for ending in endings for rank, code in ending.exit_codes.items()}
    stacks = {rank: stack for hang in hangs for rank, stack in hang.stacks.items()}
    ranks = sorted({rank for node in unended for rank in node.ranks})
    return replace(
        endings[0],
        exit_code=next((ending.exit_code for ending in endings if ending.exit_code), 0),
        exit_codes=exit_codes,
        hang=Hang(max(hang.seconds for hang in hangs), stacks) if hangs else None,
        interrupted=any(ending.interrupted for ending in endings),
        not_exited=NotExited(max(node.seconds for node in unended), tuple(ranks)) if unended else None,
    )
