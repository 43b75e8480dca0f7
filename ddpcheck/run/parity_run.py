"""The runs of a script in a single process, with which `ddpcheck run --check-parity` compares the ranks."""

from __future__ import annotations

import argparse
import copy
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpcheck.findings.evidence.parity import IN_TURN, ParityEnded
from ddpcheck.judge.script_facts import entries_of
from ddpcheck.record.rank.environment import ParityOptions, RunOptions, environment_for
from ddpcheck.run.ending import Ending
from ddpcheck.run.run_folder import holding
from ddpcheck.stream.rank_log import FOLDER, WatchedRank, read_logs

VARIABLE = "DDPCHECK_PARITY"
"""Is "1" in the environment of a single process, so that a script can leave out what must not happen twice."""


@dataclass(frozen=True, slots=True)
class SingleRun:
    """What a run in a single process has left."""

    ranks: Sequence[WatchedRank] = ()
    why_not: str = ""  # in words, if it has not come as far as it should; empty if it has
    output: str = ""  # what it has printed
    has_failed: bool = False  # whether the script has ended with an exit code


class ParityRuns:
    """Runs a script in a single process, in folders below that of the run on ranks."""

    def __init__(
        self, given: argparse.Namespace, folder: Path, run: Callable[[argparse.Namespace, Path], Ending]
    ) -> None:
        """Begin; `run` runs the script with options of torchrun, and a folder for its logs."""
        self._given, self._folder, self._run = given, folder, run
        self._environ = dict(os.environ)
        self._began = time.time()
        self._draws, self._in_turn = True, False

    def options_of_ranks(self) -> ParityOptions:
        """Return how ranks are recorded."""
        return ParityOptions()

    def why_not(self, ranks: Sequence[WatchedRank], ending: Ending) -> str:
        """Return why there is nothing to compare with, in words; empty if there is."""
        if ending.exit_code or ending.hang is not None or ending.interrupted:
            return "the run on ranks has not come to its end"
        if not ranks or len(ranks) < ranks[0].started.world_size:
            return "not all ranks have left a log here"
        if ranks[0].started.world_size < 2:
            return "it has run on one rank"
        if not any(entries_of(rank, ParityEnded) for rank in ranks):
            return "the ranks have left no samples"
        return ""

    def run(self, ranks: Sequence[WatchedRank], *, is_noise: bool = False, as_rank: int = 0) -> SingleRun:
        """Run the script in one process, on the samples of ranks.

        A script may fail with as many random numbers, or accumulate more micro-batches in a smaller world: then it runs
        once more, with random numbers of its own, or on the batches of the ranks in turn.
        """
        made = self._run_once(ranks, is_noise=is_noise, as_rank=as_rank)
        if any(end.why == IN_TURN for rank in made.ranks for end in entries_of(rank, ParityEnded)):
            self._in_turn = True
            made = self._run_once(ranks, is_noise=is_noise, as_rank=as_rank)
        if made.has_failed and self._draws and not as_rank:
            self._draws = False
            again = self._run_once(ranks, is_noise=is_noise, as_rank=as_rank)
            made = made if again.has_failed else again
        return made

    def _run_once(self, ranks: Sequence[WatchedRank], *, is_noise: bool, as_rank: int) -> SingleRun:
        made = tempfile.TemporaryDirectory(prefix=FOLDER, ignore_cleanup_errors=True)
        with made as folder, holding(Path(folder)):
            return self._run_in(Path(folder), ranks, is_noise=is_noise, as_rank=as_rank)

    def _run_in(self, folder: Path, ranks: Sequence[WatchedRank], *, is_noise: bool, as_rank: int) -> SingleRun:
        size = ranks[0].started.world_size
        full = [one.full_at for rank in ranks for one in entries_of(rank, ParityEnded) if one.full_at]
        options = ParityOptions(
            samples=str(self._folder),
            world_size=size,
            order=tuple(reversed(range(size))) if is_noise else tuple(range(size)),
            backwards=min(full, default=0),
            steps=self._given.check_parity_steps,
            in_turn=self._in_turn,
            draws=self._draws,
            since=self._began,
            is_noise=is_noise,
            as_rank=as_rank,
        )
        os.environ.clear()
        os.environ.update(environment_for(RunOptions(str(folder), 0, options), self._environ))
        os.environ[VARIABLE] = "1"
        try:
            ending = self._run(_alone(self._given, folder), folder)
        finally:
            os.environ.clear()
            os.environ.update(self._environ)
        output = "".join(path.read_text(errors="replace") for path in sorted(folder.glob("output/**/std*.log")))
        left = [] if not folder.exists() else _logs(folder)
        return SingleRun(left, _why_ended(ending, left, output), output, bool(ending.exit_code) and ending.hang is None)


def _logs(folder: Path) -> list[WatchedRank]:
    shutil.rmtree(folder / "output", ignore_errors=True)
    shutil.rmtree(folder / "files", ignore_errors=True)  # folders are those of nodes
    return read_logs(folder)


def _alone(given: argparse.Namespace, folder: Path) -> argparse.Namespace:
    """Return options of torchrun for one process on this machine, whose output goes to a file."""
    alone = copy.copy(given)
    alone.nproc_per_node, alone.nnodes, alone.node_rank, alone.standalone = "1", "1:1", 0, True
    alone.max_restarts, alone.redirects, alone.tee, alone.log_dir = 0, "3", "0", str(folder / "output")
    alone.local_ranks_filter = ""
    return alone


def _why_ended(ending: Ending, left: Sequence[WatchedRank], output: str) -> str:
    if ending.interrupted:
        return "it was interrupted"
    if ending.hang is not None:
        return f"it made no progress for {ending.hang.seconds:.0f} s, and was ended"
    if ending.exit_code:
        said = next((line for line in reversed(output.splitlines()) if line.strip()), "")
        return f"it ended with exit code {ending.exit_code}{f': {said.strip()}' if said else ''}"
    if not left:
        return "it joined no process group where ddpcheck could see it"
    size = left[0].started.world_size
    return f"the script starts {size} ranks by itself" if size > 1 else ""
