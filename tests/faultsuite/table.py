"""What was heard of the faults, as tables: pure functions from rows to Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ddpcheck.findings.report import Finding
from ddpcheck.findings.rules import RULES
from tests.faultsuite.runs import Heard, Row, faults_in, faults_in_twin

FAMILIES = {
    "parameters": "Parameters and the loss",
    "ranks": "The same on every rank",
    "gradients": "Gradients",
    "running": "Running",
    "training": "The training loop and the wrapper",
}
TOOLS = {"plain": "plain DDP", "debug": "`TORCH_DISTRIBUTED_DEBUG`", "mmengine": "mmengine's `detect_anomalous_params`"}
_LONGEST = 110


def faults_page(rows: Sequence[Row], versions: str) -> str:
    """The page of all faults: what plain DDP does, what ddpcheck says."""
    missed = sum(bool(faults_in(row.case, row.report)) for row in rows)
    flagged = sum(bool(faults_in_twin(row.twin)) for row in rows)
    silent = sum(row.tools["plain"].ending == "trains on" for row in rows)
    stuck = sum(row.tools["plain"].ending in ("hangs", "aborts") for row in rows)
    lines = [
        "# Faults under plain DDP and ddpcheck",
        "",
        "Written by `make faults`, which runs each of these on real ranks; nothing here is typed. Each fault is a file",
        "with a broken recipe and its clean twin, short enough to read. Plain DDP is a training loop of a few steps",
        "without ddpcheck; where it *hangs*, a rank was still waiting after six seconds, and would have waited for the",
        "30 minutes of the default timeout.",
        "",
        f"{versions}. {len(rows)} faults: plain DDP trains to the end without a message on {silent}, and hangs or dies",
        f"without a Python traceback on {stuck}. ddpcheck misses {missed} of them, and flags {flagged} of the twins.",
        "",
    ]
    for family, heading in FAMILIES.items():
        chosen = [row for row in rows if row.case.family == family]
        if not chosen:
            continue
        lines += [f"## {heading}", "", "| fault | plain DDP | ddpcheck | seconds |", "|---|---|---|---|"]
        for row in chosen:
            link = f"[{cell(row.case.title)}](../examples/faults/{row.case}.py)"
            lines.append(f"| {link} | {plain_cell(row)} | {our_cell(row)} | {row.seconds:.2f} |")
        lines.append("")
    return "\n".join(lines)


def comparison(rows: Sequence[Row]) -> str:
    """The table of tools for the README: of how many faults each one says what."""
    total = len(rows)
    lines = [
        "| | names the culprit | stops without naming it | hangs or dies | trains on in silence | false alarms |",
        "|---|---|---|---|---|---|",
    ]
    for tool, name in TOOLS.items():
        kinds = [kind_of(row, row.tools[tool]) for row in rows]
        alarms = sum(is_alarm(row.twins[tool]) for row in rows)
        counts = " | ".join(str(kinds.count(kind)) for kind in ("names", "stops", "hangs", "silent"))
        lines.append(f"| {name} | {counts} | {alarms} |")
    found = sum(not faults_in(row.case, row.report) for row in rows)
    silent = sum(not row.report.findings for row in rows)
    alarms = sum(bool(faults_in_twin(row.twin)) for row in rows)
    lines.append(f"| **ddpcheck** | **{found}** | {total - found - silent} | 0 | {silent} | {alarms} |")
    return "\n".join(lines)


def noise_row(name: str, faults: Sequence[int], healthy: Sequence[int] = ()) -> str:
    """A row of the table of noise, from the numbers of findings on faults and on healthy programs."""
    found = [number for number in faults if number]
    flagged = f"{sum(map(bool, healthy))} of {len(healthy)}" if healthy else "-"
    return f"| {name} | {len(faults)} | {len(found)} | {sum(found) - len(found)} | {flagged} |"


def endings(page: str) -> str:
    """How plain DDP ended, counted by family, from the page of all faults."""
    lines = ["| faults | in silence | raises | hangs | aborts or exits | all |", "|---|---|---|---|---|---|"]
    total = Counter[str]()
    for section in page.split("\n## ")[1:]:
        found = re.findall(
            r"^\| \[.*?\]\(\S+\) \| (?:\*\*)?(silent|raises|hangs|aborts|exits)\b", section, re.MULTILINE
        )
        counts = Counter("aborts" if ending == "exits" else ending for ending in found)
        total += counts
        lines.append(_counted(section.partition("\n")[0], counts))
    return "\n".join([*lines, _counted("all", total)])


def _counted(name: str, counts: Counter[str]) -> str:
    numbers = [counts[ending] for ending in ("silent", "raises", "hangs", "aborts")]
    return f"| {name} | {' | '.join(map(str, [*numbers, sum(numbers)]))} |"


def kind_of(row: Row, heard: Heard) -> str:
    """What a tool has done for someone with this fault: "names" it, "stops", "hangs", or is "silent"."""
    if heard.names(row.case.expected.subjects):
        return "names"
    if heard.ending in ("hangs", "aborts"):
        return "hangs"
    return "silent" if heard.ending == "trains on" else "stops"


def is_alarm(heard: Heard) -> bool:
    """Whether a tool complained about a clean twin."""
    return heard.ending != "trains on" or "is not in the computational graph" in re.sub(r"\s+", " ", heard.text)


def plain_cell(row: Row) -> str:
    """How a plain run ended, on which ranks, in which words."""
    heard = row.tools["plain"]
    if heard.ending == "trains on":
        return "silent"
    world = row.case.expected.world_size
    where = f" on rank {', '.join(map(str, heard.ranks))}" if heard.ranks and len(heard.ranks) < world else ""
    words = f": “{cell(shortened(heard.words))}”" if heard.words else ""
    return f"**{heard.ending}**{where}{words}"


def our_cell(row: Row) -> str:
    """The leading finding."""
    if not row.report.findings:
        return "nothing"
    found: Finding = row.report.findings[0]
    ranks = f" (rank {', '.join(map(str, found.ranks))})" if found.ranks else ""
    return f"**{found.code}** {RULES[found.code].name}{ranks}: {cell(shortened(found.message, longest=240))}"


def shortened(words: str, *, longest: int = _LONGEST) -> str:
    """The beginning of a message."""
    words = re.sub(r"\[.*?\.(cc|cpp|h):\d+\]\s*", "", words)  # where in C++: a path of the machine that built torch
    words = re.sub(r"\s+", " ", words).strip()
    return words if len(words) <= longest else words[: words.rfind(" ", 0, longest)] + " …"


def cell(text: str) -> str:
    """Text that Markdown leaves as it is in a cell of a table."""
    return re.sub(r"([|*_`<>\[\]\\])", r"\\\1", re.sub(r"\s+", " ", text))


def put(page: Path, mark: str, table: str) -> None:
    """Put a table into the place that a page has for it."""
    place = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- end -->)", re.DOTALL)
    text, count = place.subn(rf"\g<1>{table}\n\g<2>", page.read_text(encoding="utf-8"))
    assert count == 1, f"{page.name} has no place for the table"
    page.write_text(text, encoding="utf-8")
