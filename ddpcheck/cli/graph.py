"""`ddpcheck graph`.

This module is light: it never imports torch.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from ddpcheck.cli.output import OutputFile, Progress, complain, print_out, say
from ddpcheck.cli.settings import RUN_SETTINGS, command_settings
from ddpcheck.findings.errors import EXIT_CLEAN
from ddpcheck.report.graph.layout import lay_out, picture_format

if TYPE_CHECKING:
    from ddpcheck.harness import RankHosts


def run_graph(arguments: argparse.Namespace, hosts: RankHosts | None) -> int:
    """Check a recipe and draw the graph of its loss."""
    settings = command_settings(arguments, RUN_SETTINGS, hosts)
    path = None if arguments.output in (None, "-") else arguments.output
    form = picture_format(path)
    with OutputFile(path) as file, Progress(sys.stderr) as progress:
        from ddpcheck.report.graph.collapse import fold
        from ddpcheck.report.graph.dot import draw, summary
        from ddpcheck.report.graph.trace_graph import trace_graph

        report, picture, marks = trace_graph(
            arguments.target,
            progress=progress,
            hosts=hosts,
            **{name: getattr(settings, name) for name in RUN_SETTINGS},
        )
        progress("laying out the picture")
        source = draw(fold(picture, marks), marks, report)
        drawn = lay_out(source, form, timeout=settings.timeout)
        progress.clear()
        if path is None:
            print_out(source.removesuffix("\n"))
        else:
            file.write(drawn)
        where = f", written to {path}" if path is not None else ""
        say(f"{summary(picture, marks, report)}{where}")
    if report.error is not None:  # something that would only have explained
        complain(report.error.message, report.error.detail)
        return report.error.exit_code
    return EXIT_CLEAN
