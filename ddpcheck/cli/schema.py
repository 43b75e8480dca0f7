"""`ddpcheck schema`: the JSON Schema of what ddpcheck saves.

This module is light: it never imports torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from ddpcheck.cli.output import print_out
from ddpcheck.findings.difference import ReportDifference
from ddpcheck.findings.errors import EXIT_CLEAN, UsageError
from ddpcheck.findings.json_schema import literal, schema_of
from ddpcheck.findings.report import Report, Status
from ddpcheck.findings.wording import suggestion
from ddpcheck.report.matrix.matrix import Matrix

DOCUMENTS: Mapping[str, tuple[type, Mapping[str, Any]]] = {
    "report": (Report, {"status": literal(Status)}),
    "matrix": (Matrix, {"kind": {"const": "matrix"}}),
    "difference": (ReportDifference, {"kind": {"const": "difference"}}),
}
"""By name: the class of a document, and the schemas of what it writes beside its fields."""


def run_schema(arguments: argparse.Namespace) -> int:
    """Print a schema."""
    if arguments.document not in DOCUMENTS:
        hint = suggestion(arguments.document, list(DOCUMENTS), "documents")
        raise UsageError(f"there is no document {arguments.document!r}; {hint}")
    print_out(schema_text(arguments.document))
    return EXIT_CLEAN


def schema_text(document: str) -> str:
    """The schema of one of the documents."""
    kind, extra = DOCUMENTS[document]
    return json.dumps(schema_of(kind, document, extra), indent=2, ensure_ascii=False)
