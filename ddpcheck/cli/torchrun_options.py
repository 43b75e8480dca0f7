"""The options of torchrun that `ddpcheck run` was given: those with which no script can be started, each in a sentence.

This module is light: it imports torch only where a script is to be run.
"""

from __future__ import annotations

import argparse
import os
import traceback

from ddpcheck.findings.errors import UsageError


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


def is_refused_option(error: Exception) -> bool:
    """Whether torchrun has raised it while it read its options, before there was an agent."""
    from torch.distributed.run import config_from_args

    return any(frame.f_code is config_from_args.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))
