"""`ddpcheck test-rule`: run the examples of rules that are not part of ddpcheck."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from pathlib import Path

from ddpcheck.cli.output import print_out
from ddpcheck.findings.errors import EXIT_CLEAN, EXIT_FINDINGS, DDPCheckError, UsageError
from ddpcheck.findings.report import Report
from ddpcheck.findings.wording import plural
from ddpcheck.run.checked_script import check_script


def run_test_rule(arguments: argparse.Namespace) -> int:
    """Run examples of a user's rules; return 1 if any is missing or fails."""
    from ddpcheck.rules.others import load_rules

    file = Path(arguments.file).absolute()
    if not file.is_file() or file.suffix != ".py" or not file.stem.isidentifier():
        raise UsageError(f"{arguments.file} is not a Python file that can be imported")
    sys.path.insert(0, str(file.parent))
    codes = load_rules(file.stem)
    functions = vars(sys.modules[file.stem])
    faults = 0
    for code in codes:
        for kind, expected in (("broken", 1), ("fixed", 0)):
            function = f"{kind}_{code.lower()}"
            if callable(functions.get(function)):
                fault, text = _run_example(file, function, code, expected)
            else:
                fault, text = True, f"no example: write a function {function}()"
            print_out(f"{code} {kind}: {text}")
            faults += fault
    return EXIT_FINDINGS if faults else EXIT_CLEAN


def _run_example(file: Path, function: str, code: str, expected: int) -> tuple[bool, str]:
    """Run an example on two ranks; return (True if the test failed, description)."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        script = Path(folder, f"{function}.py")
        script.write_text(f"import {file.stem}\n\n{file.stem}.{function}()\n", encoding="utf-8")
        path = os.pathsep.join(filter(None, (str(file.parent), *sys.path)))
        previous = dict(os.environ)
        os.environ.update({"DDPCHECK_RULES": file.stem, "PYTHONPATH": path})
        try:
            report = check_script(script, parity=False)
        except DDPCheckError as error:
            return True, str(error)
        finally:
            os.environ.clear()
            os.environ.update(previous)
    count = sum(finding.code == code for finding in report.findings)
    text = plural(count, "finding") if count else "no finding"
    obstacles = _obstacles(report, code)
    if count == expected and (expected or not obstacles):  # a defect may end the script
        return False, text
    expectation = "" if count == expected else f", expected {expected or 'none'}"
    return True, "; ".join(
        [f"{text}{expectation}", *obstacles, *(f"{f.code}: {f.message}" for f in report.findings[:3])]
    )


def _obstacles(report: Report, code: str) -> list[str]:
    """Return errors and notes that say why a rule may not have run."""
    errors = [f"{check.name}: {check.detail}" for check in report.checks if check.status == "error"]
    return [*errors, *(note for note in report.world.get("notes", ()) if note.startswith(f"{code} "))]
