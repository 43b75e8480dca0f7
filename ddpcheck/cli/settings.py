"""The settings of a command: its options, over the environment and pyproject.toml.

This module is light: it never imports torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddpcheck.cli.output import complain
from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.replace import replace
from ddpcheck.report.settings import Settings, load_settings, misspelled_variables

if TYPE_CHECKING:
    from ddpcheck.harness import RankHosts


RUN_SETTINGS = ("world_size", "backend", "device", "steps", "timeout", "seed", "preload")
CHECK_SETTINGS = (*RUN_SETTINGS, "select", "ignore", "suppress")


def command_settings(arguments: argparse.Namespace, names: Sequence[str], hosts: RankHosts | None) -> Settings:
    """The settings of a command, with the number of ranks that a launcher has started."""
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
