"""`ddpcheck env`: what a report of a bug needs to know of a machine.

This module is light: it never imports torch when it is imported.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from ddpcheck.cli.output import print_out, wrapped
from ddpcheck.findings.errors import EXIT_CLEAN, UsageError
from ddpcheck.findings.wording import suggestion
from ddpcheck.render import Medium
from ddpcheck.report.environment import describe_environment


def run_env(arguments: argparse.Namespace) -> int:
    """Print the environment."""
    if arguments.format not in ("text", "json"):
        hint = suggestion(arguments.format, ("text", "json"), "formats")
        raise UsageError(f"there is no format {arguments.format!r} for the environment; {hint}")
    found = describe_environment()
    width = Medium.of(sys.stdout).width
    text = "\n".join(wrapped(line, width, "    ") for line in _lines(found))
    print_out(json.dumps(found, indent=2) if arguments.format == "json" else text)
    return EXIT_CLEAN


def _lines(found: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """A line for each value; of several, a line for each below their heading."""
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}:{'' if value else ' none'}"
            yield from _lines(value, indent + "  ")
        else:
            text = ", ".join(value) or "none" if isinstance(value, list) else str(value)
            yield f"{indent}{name}: {''.join(c if c.isprintable() else repr(c)[1:-1] for c in text)}"
