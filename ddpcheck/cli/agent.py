"""torchrun's agent, which starts the ranks of a script, in this process; and how the script has ended, as it saw that.

This module is light: it never imports torch before a script is run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddpcheck.cli.output import complain, named, say
from ddpcheck.cli.torchrun_options import is_refused_option
from ddpcheck.findings.errors import EXIT_FINDINGS, EXIT_HANG, UsageError
from ddpcheck.gather.patching import Patch, patched
from ddpcheck.run.ending import Ending
from ddpcheck.run.hang_watch import HangWatch, end_agent
from ddpcheck.run.node_link import NodeLink
from ddpcheck.stream.watched_rank import rank_processes


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
        if is_refused_option(error):
            raise UsageError(f"torchrun refuses an option: {error}") from error
        if given.debug:
            traceback.print_exception(error)
        complain(f"the agent of torchrun has stopped: {named(error)}")
        return Ending(EXIT_FINDINGS)  # torchrun's own exit code then
    return Ending()


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
