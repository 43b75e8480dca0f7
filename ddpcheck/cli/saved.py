"""Commands on saved documents: `ddpcheck render`, `diff` and `schema`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from ddpcheck import load_extra
from ddpcheck.cli.output import ReportOutput, print_out, reason_of
from ddpcheck.findings.difference import ReportDifference, compare_reports
from ddpcheck.findings.errors import EXIT_CLEAN, UsageError
from ddpcheck.findings.files import MOST_BYTES, check_size, decompress, read_file
from ddpcheck.findings.from_json import parse
from ddpcheck.findings.json_schema import literal, schema_of
from ddpcheck.findings.report import Report, Status
from ddpcheck.findings.wording import printable
from ddpcheck.render import DIFFERENCE_FORMATS, FORMATS, MATRIX_FORMATS
from ddpcheck.render.page.page import data_in
from ddpcheck.report.matrix.matrix import Matrix
from ddpcheck.report.settings import load_settings

DOCUMENTS: Mapping[str, tuple[type, Mapping[str, Any]]] = {  # class, and schemas of keys that are not fields of it
    "report": (Report, {"status": literal(Status)}),
    "matrix": (Matrix, {"kind": {"const": "matrix"}}),
    "difference": (ReportDifference, {"kind": {"const": "difference"}}),
}


def load_saved(path: str) -> Report | Matrix:
    """Load a report, matrix or recorded run; "-" reads standard input."""
    name = "standard input" if path == "-" else path
    if path == "-" and sys.stdin is None:
        raise UsageError("cannot read standard input: it is closed")
    try:
        if path == "-":
            text = check_size(sys.stdin.read(MOST_BYTES + 1))
        else:
            text = decompress(read_file(path)).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {name}: {reason_of(error)}") from error
    try:
        if text.startswith('{"kind": "run"'):
            judged: Report = load_extra("run_record").judge_record(text)  # imports all judges of `run`
            return judged
        text = data_in(text) or text
        data = parse(text)
        is_matrix = isinstance(data, dict) and data.get("kind") == "matrix"
        return Matrix.from_json(text) if is_matrix else Report.from_json(text)
    except ValueError as error:
        raise UsageError(f"{name} is not a report: {printable(str(error))}") from error


def load_report(path: str) -> Report:
    """Load a report; raise `UsageError` for a matrix."""
    report = load_saved(path)
    if isinstance(report, Matrix):
        raise UsageError(f"{path} is a matrix, not a report; save one with `ddpcheck report TARGET -o FILE.json`")
    return report


def run_render(arguments: argparse.Namespace) -> int:
    """Show a saved report, matrix or recorded run."""
    report = load_saved(arguments.path)
    formats = MATRIX_FORMATS if isinstance(report, Matrix) else FORMATS
    arguments.command_line = ""  # keep the command line stored in the report
    with ReportOutput(arguments, load_settings().format, formats) as output:
        output.show(report)
    return EXIT_CLEAN


def run_diff(arguments: argparse.Namespace) -> int:
    """Show new, fixed and remaining findings; return 1 if new findings reach `--fail-on`."""
    settings = load_settings({"fail_on": arguments.fail_on})
    if arguments.old == arguments.new == "-":
        raise UsageError("only one of the two reports can come from standard input")
    names = (arguments.old, arguments.new)
    difference = compare_reports(load_report(arguments.old), load_report(arguments.new), names=names)
    default = settings.format if settings.format in DIFFERENCE_FORMATS else None
    with ReportOutput(arguments, default, DIFFERENCE_FORMATS) as output:
        output.show(difference)
    return difference.exit_code(settings.fail_on)


def run_schema(arguments: argparse.Namespace) -> int:
    """Print the JSON Schema of a document."""
    print_out(schema_text(arguments.document))
    return EXIT_CLEAN


def schema_text(document: str) -> str:
    """Return the JSON Schema of a document as text."""
    kind, extra = DOCUMENTS[document]
    return json.dumps(schema_of(kind, document, extra), indent=2, ensure_ascii=False)
