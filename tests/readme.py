"""The output that the README and the documentation show: `python -m tests.readme` makes it afresh and writes it there.

A block of output follows a comment that says what it is of: `<!-- KIND: TARGET -->`, where KIND is

    report, matrix, findings             `ddpcheck report TARGET`, with --matrix, or its findings alone
    schedule                             `ddpcheck report TARGET --schedule 64`
    run report, run findings             `ddpcheck run` on a script
    hang report, hang findings           `ddpcheck hang` on the Flight Recorder dumps of that run
    pytest                               a failing test
    rule findings                        `ddpcheck run` with the rules of examples/rules/lab_rules.py
    test-rule                            `ddpcheck test-rule TARGET`
    torchrun                             the exception of rank 0 under torchrun

Names of pages may follow on the command line: then only theirs.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from ddpcheck import cli
from ddpcheck.cli import rule_examples
from ddpcheck.findings.report import Report
from tests.forked_run import run_forked

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
BLOCK = re.compile(
    r"<!-- (?P<kind>report|matrix|schedule|findings|(?:run|hang) (?:report|findings)|rule findings|test-rule|pytest|"
    r"torchrun): "
    r"(?P<target>[^\n]+?) -->\n"
    r"```text\n(?P<text>.*?)```\n",
    re.DOTALL,
)
FLAGS = {"matrix": ("--matrix",), "schedule": ("--schedule", "64")}
RULES = {"DDPCHECK_RULES": "examples.rules.lab_rules"}
LAUNCH = ("--standalone", "--nproc-per-node", "2")


class Block(NamedTuple):
    """Output that a page shows."""

    kind: str
    target: str
    text: str


def pages() -> list[Path]:
    """The README and every page of the documentation."""
    return [README, *sorted(DOCS.rglob("*.md"))]


def printed(target: str, *flags: str) -> tuple[int, str]:
    """Exit code and output of `ddpcheck report` on `target`, as wide as a page."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    plain = patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1", "DDPCHECK_PRELOAD": "sklearn.datasets"})
    with contextlib.chdir(ROOT), plain, contextlib.redirect_stdout(output):
        os.environ.pop("PYTEST_XDIST_WORKER_COUNT", None)  # with another number of threads another tensor rounds worst
        code = cli.main(["report", target, *flags])
    output.seek(0)
    return code, output.read()


def said_by(module: str, *arguments: str) -> str:
    """Standard output and error of `python -m MODULE` in a process of its own, as wide as a page."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    for variable in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[variable]
    call = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        call, cwd=ROOT, env=environment, text=True, timeout=400, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return done.stdout


def output_of(kind: str, target: str) -> str:
    """What is printed of `target`."""
    if kind in ("report", "findings", *FLAGS):
        return printed(target, *FLAGS.get(kind, ()))[1]
    if kind == "pytest":
        return said_by("pytest", "-p", "no:cacheprovider", "-n", "0", target)
    if kind == "torchrun":
        return said_by("torch.distributed.run", *LAUNCH, *target.split())
    if kind == "test-rule":
        return said_by("tests.readme", kind, target)
    if kind in ("run findings", "rule findings"):
        rules = RULES if kind == "rule findings" else {}
        return run_forked("--check-timeout=10", *target.split(), COLUMNS="100", NO_COLOR="1", **rules).stderr
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            recorder = [f"--check-flight-recorder={folder}"] if kind.startswith("hang") else []
            text = said_by("ddpcheck", "run", *LAUNCH, "--check-timeout=10", *recorder, *target.split())
            if "terminate called without an active exception" in text:
                continue  # gloo has aborted a healthy process at its exit, as it now and then does
            return said_by("ddpcheck", "hang", folder).replace(folder, "dumps") if recorder else text
    raise AssertionError(text)


def excerpt(kind: str, target: str, text: str) -> str:
    """What a page shows of the output `text`."""
    if kind.endswith("findings"):
        end = r"(?=\n\n(?:gradients against|note:|\d+ findings? ))"
        return _found(rf"^[A-Z]{{3}}\d{{3}} .*?{end}", text).rstrip() + "\n"
    if kind == "pytest":
        shown = _found(r"^_{5,} .*?(?=^={5,} short)", text)
        shown = re.sub(r'"[^"\n]*site-packages/', '"', re.sub(r" +$", "", shown, flags=re.MULTILINE))
        return f"$ pytest {target}\n" + re.sub(
            r"^([_-])+ (.*) [_-]+$", r"\1\1\1\1 \2 \1\1\1\1", shown, flags=re.MULTILINE
        )
    if kind == "torchrun":
        lines = [line.removeprefix("[rank0]: ") for line in text.splitlines() if line.startswith("[rank0]: ")]
        start = next(number for number, line in enumerate(lines) if re.match(r"[\w.]*Error", line))
        return f"$ torchrun {' '.join(LAUNCH)} {target}\n" + "\n".join(lines[start:]) + "\n"
    if kind == "test-rule":
        return f"$ ddpcheck test-rule {target}\n{text}"
    command = {
        "report": ["report", target],
        **{name: ["report", target, *flags] for name, flags in FLAGS.items()},
        "run report": ["run", *LAUNCH, target],
        "hang report": ["hang", "dumps"],
    }[kind]
    return f"$ ddpcheck {' '.join(command)}\n{_found(r'^ddpcheck(?: [0-9]|: ).*', text).rstrip()}\n"


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.DOTALL | re.MULTILINE)
    assert match, text
    return match.group(0)


def blocks() -> list[Block]:
    """What all pages show; what several show is there once."""
    found = [Block(*m.groups()) for page in pages() for m in BLOCK.finditer(page.read_text(encoding="utf-8"))]
    return list(dict.fromkeys(found))


def comparable(text: str) -> str:
    """A report without what differs from run to run and from machine to machine."""
    text = re.sub(r"^(  [✓≈] .*?)  +(1|=|\d+\.\d\d \([^)]*\))  +right", r"\1 _ right", text, flags=re.MULTILINE)
    text = re.sub(r"^(costs|gains|safe): .*?(?=^\w|^$)", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\d+(\.\d+)? ms\)", "_ ms)", text)
    text = re.sub(r" +\d+\.\d+ s", " _ s", text)
    # which parameter is the worst of those that differ by rounding alone
    text = re.sub(r"^(  [\w-]+) +\S+ +\d+ +(?=0\.0e\+00|\d\.\de-(0[6-9]|1\d))", r"\1 _ ", text, flags=re.MULTILINE)
    text = re.sub(r"for \d+ s at most", "for _ s at most", text)
    text = re.sub(r"python \S+", "python _", text)
    text = re.sub(r"torch \d\S+", "torch _", text)
    text = re.sub(r'("torch/\S+", line) \d+', r"\1 _", text)
    text = re.sub(r"(pair\.cc:|\[127\.0\.0\.1\]:)\d+", r"\1_", text)
    text = re.sub(r"-?\d+(\.\d+)?e[-+]\d+|-?\d+\.\d+", "_", text)
    return re.sub(r"\s+", " ", text)


def check_forked(script: Path, *, parity: bool) -> Report:
    """`check_script` on forked ranks, which import torch once for all examples of a rule."""
    run_forked("--check-output=report.json", str(script), cwd=script.parent, **RULES)
    return Report.from_json((script.parent / "report.json").read_text(encoding="utf-8"))


def update(names: list[str]) -> None:
    """Write the output afresh that the pages show, or those named."""

    def fresh(match: re.Match[str]) -> str:
        kind, target = match["kind"], match["target"]
        head = match.group(0)[: match.start("text") - match.start()]
        return f"{head}{excerpt(kind, target, output_of(kind, target))}```\n"

    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (not names or page.name in names) and (new := BLOCK.sub(fresh, text)) != text:
            page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["test-rule"]:
        with patch.object(rule_examples, "check_script", check_forked):
            sys.exit(cli.main(sys.argv[1:]))
    update(sys.argv[1:])
