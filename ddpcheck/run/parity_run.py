"""Single-process runs of a script, as the reference of `ddpcheck run --check-parity`."""

from __future__ import annotations

import argparse
import copy
import math
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from ddpcheck.findings.evidence.parity import IN_TURN, ParityEnded, ParityPass, ParityStep
from ddpcheck.findings.stacks import program_lines
from ddpcheck.record.rank.environment import ParityOptions, RunOptions, environment_for
from ddpcheck.run.ending import Ending
from ddpcheck.run.run_folder import own_folder
from ddpcheck.stream.entries import RankRaised, WatchingFailed
from ddpcheck.stream.rank_log import FOLDER, RESTARTED, RankTrace, read_logs
from ddpcheck.trace.rank_params import RankParams
from ddpcheck.trace.script_facts import entries_of
from ddpcheck.worlds import failures

VARIABLE = "DDPCHECK_PARITY"
"""Environment variable, "1" in the single process, so that a script can skip what must not happen twice."""

INTERRUPTED = "it was interrupted"
_LIMIT_FACTOR = 3  # time limit of the single process, in multiples of world size x duration of the run on ranks
_MOST_OUTPUT = 1 << 16  # characters of output kept, from its end
_MEMORY_ERROR = re.compile(r"out of memory|can't allocate memory|MemoryError|OutOfMemory")
_MEMORY_HINT = (
    "; a global batch in one process needs more memory, and --check-parity-batch makes the batches of all runs smaller"
)


@dataclass(frozen=True, slots=True)
class SingleRun:
    """Result of a run in a single process."""

    ranks: Sequence[RankTrace] = ()
    why_not: str = ""  # reason why the run cannot be compared; "" if it can
    output: str = ""  # tail of the printed output
    has_raised: bool = False  # True after an exception or a nonzero exit code


class ParityRuns:
    """Run a script in a single process on the recorded samples of ranks."""

    def __init__(
        self, args: argparse.Namespace, folder: Path, run: Callable[..., Ending], rank_parameters: Sequence[str] = ()
    ) -> None:
        """Initialize; `run(options, folder, limit=seconds)` runs the script under torchrun with logs in `folder`."""
        self._args, self._folder, self._run = args, folder, run
        self._rank_params = RankParams(rank_parameters)
        self._environ = dict(os.environ)
        self._start_time = time.time()
        self._limit = 0.0
        self._draws, self._in_turn = True, False

    def why_not(self, ranks: Sequence[RankTrace], ending: Ending, nodes: int = 1) -> str:
        """Return why the run cannot be compared with a single process; "" if comparable."""
        if ending.hang is not None:
            return "the ranks waited for each other"
        if ending.exit_code or ending.interrupted:
            reason = "was interrupted" if ending.interrupted else f"ended with exit code {ending.exit_code}"
            return f"the run on ranks {reason}"
        if nodes > 1:
            return f"the ranks have run on {nodes} machines, and left their samples there"
        if not ranks or len(ranks) < ranks[0].started.world_size:
            return "not all ranks have left a log here"
        if ranks[0].started.world_size < 2:
            return "it has run on one rank"
        self._rank_params.without_matches(ranks)
        if self._rank_params.names:
            return f"each rank trains its own parameters{self._rank_params.left_out}"
        ends = [end for rank in ranks for end in entries_of(rank, ParityEnded)]
        if not ends:
            return "the ranks have left no samples"
        return next((f"samples are not recorded: {e.why_full}" for e in ends if e.why_full and not e.full_at), "")

    def begin(self, ranks: Sequence[RankTrace]) -> str:
        """Prepare a single-process run: set its time limit, and return a message announcing it."""
        elapsed = time.time() - self._start_time
        self._limit = max(self._args.check_timeout, _LIMIT_FACTOR * len(ranks) * elapsed)
        sizes = [
            max((math.ceil(entry.rows / max(1, entry.batches)) for entry in entries_of(rank, ParityPass)), default=0)
            for rank in ranks
        ]
        holds = f"the batches of {len(ranks)} ranks together{f' (up to {sum(sizes)} samples)' if all(sizes) else ''}"
        message = f"the script runs again in a single process, which holds {holds}"
        return f"{message}, for {self._limit:.0f} s at most; its output is not shown"

    def run(self, ranks: Sequence[RankTrace], *, measures_noise: bool = False, as_rank: int = 0) -> SingleRun:
        """Run the script in one process on the samples of the ranks.

        The script runs again in two cases. First, if it accumulates world-size times as many micro-batches per step in
        a single process: each micro-batch is then the batch of one rank, and the ranks take turns. Second, if it fails
        with the random numbers recorded on the ranks: it then draws its own random numbers.
        `measures_noise`: reverse the rank order, perturb gradients. `as_rank`: return value of `dist.get_rank()`.
        """
        result = self._run_once(ranks, measures_noise=measures_noise, as_rank=as_rank)
        if any(end.why == IN_TURN for rank in result.ranks for end in entries_of(rank, ParityEnded)):
            self._in_turn = True
            result = self._run_once(ranks, measures_noise=measures_noise, as_rank=as_rank)
        if result.has_raised and result.ranks and self._draws and not as_rank:
            self._draws = False
            retried = self._run_once(ranks, measures_noise=measures_noise, as_rank=as_rank)
            result = result if retried.has_raised else retried
        return result

    def _run_once(self, ranks: Sequence[RankTrace], *, measures_noise: bool, as_rank: int) -> SingleRun:
        try:
            temp_dir = tempfile.TemporaryDirectory(prefix=FOLDER, ignore_cleanup_errors=True)
            with temp_dir as folder, own_folder(Path(folder)):
                return self._run_in(Path(folder), ranks, measures_noise=measures_noise, as_rank=as_rank)
        except OSError as error:
            return SingleRun(
                why_not=f"its folder in {tempfile.gettempdir()} cannot be written: {error.strerror or error}"
            )

    def _run_in(self, folder: Path, ranks: Sequence[RankTrace], *, measures_noise: bool, as_rank: int) -> SingleRun:
        size = ranks[0].started.world_size
        full = [entry.full_at for rank in ranks for entry in entries_of(rank, ParityEnded) if entry.why_full]
        options = ParityOptions(
            samples=str(self._folder),
            world_size=size,
            order=tuple(reversed(range(size))) if measures_noise else tuple(range(size)),
            backwards=min(full, default=0),
            steps=self._args.check_parity_steps,
            in_turn=self._in_turn,
            draws=self._draws,
            since=max([self._start_time, *(path.stat().st_mtime for path in self._folder.glob(f"{RESTARTED}*"))]),
            is_noise=measures_noise,
            as_rank=as_rank,
        )
        environ = environment_for(RunOptions(str(folder), 0, options), self._environ) | {VARIABLE: "1"}
        with mock.patch.dict(os.environ, environ, clear=True):
            ending = self._run(_single_process_options(self._args, folder), folder, limit=self._limit)
        # Standard output first, then standard error.
        paths = sorted(folder.glob("output/**/std*.log"), reverse=True)
        output = "".join(path.read_text(errors="replace")[-_MOST_OUTPUT:] for path in paths)
        logs = read_logs(folder)
        why_not = _why_ended(ending, logs, output, self._limit)
        if not why_not and _has_steps(ranks) and not _has_steps(logs):
            why_not = "no optimizer has stepped in it: the script may start its own processes"
        has_raised = ending.exit_code > 0 and not _signal_of(ending) and ending.hang is None and not ending.interrupted
        return SingleRun(logs, why_not, output, has_raised)


def _single_process_options(args: argparse.Namespace, folder: Path) -> argparse.Namespace:
    options = copy.copy(args)
    options.nproc_per_node, options.nnodes, options.node_rank, options.standalone = "1", "1:1", 0, True
    options.max_restarts, options.redirects, options.tee, options.log_dir = 0, "3", "0", str(folder / "output")
    options.local_ranks_filter = ""
    return options


def _signal_of(ending: Ending) -> int:
    code = next(iter(ending.exit_codes.values()), 0)
    return -code if code < 0 else ending.exit_code - 128 if ending.exit_code == 128 + signal.SIGKILL else 0


def _why_ended(ending: Ending, logs: Sequence[RankTrace], output: str, limit: float) -> str:
    if ending.interrupted:
        return INTERRUPTED
    if ending.hang is not None:
        where = _first_line(ending.hang.stacks.values())
        reason = "has not ended within" if ending.hang.seconds >= limit else "made no progress for"
        return f"it {reason} {ending.hang.seconds:.0f} s, and was stopped{where}"
    if signum := _signal_of(ending):
        where = _first_line(rank.stack for rank in logs)  # faulthandler writes stacks at SIGSEGV etc.
        return f"it was ended by signal {signum}{where}{_MEMORY_HINT if signum == signal.SIGKILL else ''}"
    if ending.exit_code:
        message = f"it ended with exit code {ending.exit_code}: {_last_message(logs, output)}".rstrip(": ")
        return message + (_MEMORY_HINT if _MEMORY_ERROR.search(message) else "")
    if errors := [entry for rank in logs for entry in entries_of(rank, WatchingFailed)]:
        return f"{errors[0].recorder} of ddpcheck has failed in it: {errors[0].why}"
    return ""


def _has_steps(ranks: Sequence[RankTrace]) -> bool:
    return any(entries_of(rank, ParityStep) for rank in ranks)


def _first_line(stacks: Iterable[str]) -> str:
    return "".join(f" at {line}" for stack in stacks for line in program_lines(stack)[:1])


def _last_message(logs: Sequence[RankTrace], output: str) -> str:
    """Return the exception that ended a process, or the last printed line."""
    for entry in (item for rank in logs for item in entries_of(rank, RankRaised)):
        failure = failures.failure_of_exception(0, dict(entry.reply))
        text = failure.message.removeprefix("rank 0 raised ")
        return f"{text} at {failure.location}" if failure.location else text
    lines = [line.removeprefix("[rank0]: ") for line in output.splitlines() if line.strip()]
    starts = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    messages = [line for line in lines[starts[-1] + 1 :] if not line.startswith(" ")] if starts else lines[-1:]
    return next(iter(messages), "").strip()
