"""torchrun's agent, which starts the ranks of a script, in this process: its options, and how the script has ended."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddpcheck.cli.output import complain, named, say
from ddpcheck.findings.errors import EXIT_FINDINGS, EXIT_HANG, UsageError
from ddpcheck.gather.patching import Patch, patched
from ddpcheck.run.ending import Ending
from ddpcheck.run.hang_watch import HangWatch, end_agent
from ddpcheck.run.node_link import NodeLink
from ddpcheck.stream.watched_rank import rank_processes


def examine_options(given: argparse.Namespace) -> None:
    """Look whether the script and the ranks can be as they were asked for.

    Raises:
        UsageError: One of them cannot; the sentence has the option and its value.
    """
    from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

    if not given.module and not given.no_python and not os.path.exists(given.training_script):
        raise UsageError(f"no such file: {given.training_script}")
    ranks = given.nproc_per_node
    try:
        enough = determine_local_world_size(ranks) > 0
    except (ValueError, RuntimeError) as error:
        if ranks in ("gpu", "xpu"):
            raise UsageError(f"--nproc-per-node {ranks}: {error}") from None
        enough = False
    if not enough:
        raise UsageError(f"--nproc-per-node is a number of ranks from 1 on, or auto, cpu or gpu, not {ranks!r}")
    try:
        least, most = parse_min_max_nnodes(given.nnodes)
    except (ValueError, RuntimeError):
        least, most = 0, 0
    if not 0 < least <= most:
        raise UsageError(f"--nnodes is a number of machines from 1 on, or MIN:MAX, not {given.nnodes!r}")
    if given.max_restarts < 0:
        raise UsageError(f"--max-restarts is a number from 0 on, not {given.max_restarts}")


def run_agent(run: Any, given: argparse.Namespace, folder: Path, nodes: NodeLink | None = None) -> Ending:
    """Run the script; its exit code is that of the rank that failed first; 128 and the signal, as in a shell.

    Raises:
        UsageError: torchrun refuses an option.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    watch = HangWatch(folder, given.check_timeout, end_agent, tell=say, nodes=nodes)
    try:
        with _handlers_kept(), _without_broken_error_files(), _meeting(nodes):
            try:
                run(given)
            finally:
                watch.stop()
                watch.forget_end()
    except ChildFailedError as error:
        if watch.hang is not None:  # and another node has ended its ranks before
            return Ending(EXIT_HANG, hang=watch.hang)
        print(error, file=sys.stderr)
        _, first = error.get_first_failure()
        code = first.exitcode if first.exitcode > 0 else 128 - first.exitcode
        own = rank_processes(folder)  # what the agent has started may be a process that starts the ranks
        known = {rank: failure for rank, failure in error.failures.items() if own.get(rank, failure.pid) == failure.pid}
        return Ending(code, {rank: failure.exitcode for rank, failure in known.items()})
    except SignalException as error:
        if watch.unended is not None:
            return Ending(unended=watch.unended)
        if watch.hang is not None:
            return Ending(EXIT_HANG, hang=watch.hang)
        print(f"ddpcheck run: {error}", file=sys.stderr)
        return Ending(128 + int(error.sigval), interrupted=True)
    except Exception as error:
        if _is_refused_option(error):
            raise UsageError(f"torchrun refuses an option: {error}") from error
        if given.debug:
            traceback.print_exception(error)
        complain(f"the agent of torchrun has stopped: {named(error)}")
        return Ending(EXIT_FINDINGS)  # torchrun's own exit code then
    return Ending()


def _is_refused_option(error: Exception) -> bool:
    """Whether torchrun has raised it while it read its options, before there was an agent."""
    from torch.distributed.run import config_from_args

    return any(frame.f_code is config_from_args.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


def _meeting(nodes: NodeLink | None) -> contextlib.AbstractContextManager[None]:
    """Have the nodes meet wherever torchrun's agents do: at the start, and when they start the ranks again."""
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

    def rendezvous(_agent: Any, group: Any) -> Iterator[None]:
        yield
        if nodes is not None:
            nodes.meet(group.store, group.group_rank, group.group_world_size)

    return patched(SimpleElasticAgent, "_rendezvous", rendezvous)


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Put the handlers of signals back in the end: the agent's make exceptions, also when it has ended."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _without_broken_error_files() -> Patch:
    """Have the agent do without an error file that a rank could not finish, since it was killed."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    def before(failure: Any) -> None:
        try:
            failure._get_error_data(json.loads(Path(failure.error_file).read_bytes()))
        except Exception:  # whatever it holds
            failure.error_file = ""

    return patched(ProcessFailure, "__post_init__", before)
