"""The reports that the README shows: `python -m tests.readme` runs them afresh and writes them there."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path
from unittest.mock import patch

from ddpcheck import cli

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(
    r"<!-- (?P<kind>report|findings|matrix): (?P<target>\S+) -->\n```text\n(?P<text>.*?)```\n", re.DOTALL
)
FLAGS = {"report": [], "findings": [], "matrix": ["--matrix"]}


def printed(target: str, *flags: str) -> tuple[int, str]:
    """Exit code and output of `ddpcheck report` on `target`, as wide as the README."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    plain = patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1", "DDPCHECK_PRELOAD": "sklearn.datasets"})
    with contextlib.chdir(ROOT), plain, contextlib.redirect_stdout(output):
        os.environ.pop("PYTEST_XDIST_WORKER_COUNT", None)  # with another number of threads another tensor rounds worst
        code = cli.main(["report", target, *flags])
    output.seek(0)
    return code, output.read()


def shown(kind: str, target: str) -> str:
    """What the README shows of the report on `target`: all of it, or the findings alone; or of its matrix."""
    return excerpt(kind, target, printed(target, *FLAGS[kind])[1])


def excerpt(kind: str, target: str, text: str) -> str:
    """What the README shows of the output `text`."""
    if kind == "findings":
        end = r"(?=\n\n(?:gradients against|note:|\d+ finding))"
        found = re.search(rf"^DDP\d{{3}} .*?{end}", text, re.DOTALL | re.MULTILINE)
        assert found, text
        text = found.group(0)
    lead = f"$ {' '.join(['ddpcheck report', target, *FLAGS[kind]])}\n" if kind != "findings" else ""
    return lead + text.rstrip() + "\n"


def blocks() -> list[tuple[str, str, str]]:
    """Kind, target and text of each report in the README."""
    return [(m["kind"], m["target"], m["text"]) for m in BLOCK.finditer(README.read_text(encoding="utf-8"))]


def comparable(text: str) -> str:
    """A report without what differs from run to run and from machine to machine."""
    text = re.sub(r"^(  [✓≈] .*?)  +(1|=|\d+\.\d\d \([^)]*\))  +right", r"\1 _ right", text, flags=re.MULTILINE)
    text = re.sub(r"^(costs|gains|safe): .*?(?=^\w|^$)", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\d+(\.\d+)? ms\)", "_ ms)", text)
    text = re.sub(r" +\d+\.\d+ s", " _ s", text)
    text = re.sub(r"python \S+", "python _", text)
    text = re.sub(r"torch \d\S+", "torch _", text)
    text = re.sub(r"-?\d+\.\d+(e[-+]\d+)?", "_", text)
    return re.sub(r"\s+", " ", text)


def update() -> None:
    """Write every report afresh."""

    def fresh(match: re.Match[str]) -> str:
        head = match.group(0)[: match.start("text") - match.start()]
        return f"{head}{shown(match['kind'], match['target'])}```\n"

    README.write_text(BLOCK.sub(fresh, README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    update()
