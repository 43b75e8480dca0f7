"""The documentation holds to the program: its snippets run or are of examples, commands exist, links lead somewhere."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import inspect
import re
import shlex
import textwrap
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest

import ddpcheck
from ddpcheck import cli
from ddpcheck.cli.arguments import make_parser
from ddpcheck.report.settings import Settings
from ddpcheck.run.check_options import add_check_options
from tests.faultsuite.noise import noise, programs
from tests.faultsuite.table import endings, noise_row
from tests.readme import DOCS, README, ROOT, pages

PAGES = [page for page in pages() if page.parent.name != "rules"]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
BLOCK = re.compile(r"(?:<!-- from: (?P<origin>\S+) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)```", re.DOTALL)


def snippets(page: Path, language: str) -> list[tuple[str, str]]:
    """The code of the blocks in `language`, each with the file that it is from, or an empty string."""
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [(match["code"], match["origin"] or "") for match in found if match["language"] == language]


def test_the_table_of_settings_has_each_setting_and_its_variable() -> None:
    text = (DOCS / "configuration.md").read_text(encoding="utf-8")
    rows = {cells[1].strip(" `"): cells for cells in (line.split("|") for line in text.splitlines()) if len(cells) > 6}
    settings = {field.name for field in fields(Settings)}
    assert settings == rows.keys() - {"key", "---"}
    options = {name for action in report_options() for name in action.option_strings}
    for name, cells in rows.items():
        if name in settings - {"suppress"}:
            assert cells[5].strip() == f"`DDPCHECK_{name.upper()}`"
            assert (f"--{name.replace('_', '-')}" in options) == bool(cells[2].strip()), name


def report_options() -> list[argparse.Action]:
    commands = next(one for one in make_parser()._actions if isinstance(one, argparse._SubParsersAction))
    return list(commands.choices["report"]._actions)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_is_in_the_file_that_it_is_from_or_uses_what_ddpcheck_has(page: Path) -> None:
    for code, origin in snippets(page, "python"):
        if origin:
            assert code.strip("\n") in (ROOT / origin).read_text(encoding="utf-8"), f"{origin} does not have: {code}"
        for node in ast.walk(ast.parse("" if origin else textwrap.dedent(code))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ddpcheck":
                assert hasattr(ddpcheck, node.attr), ast.unparse(node)
            if isinstance(node, ast.ImportFrom) and node.module == "ddpcheck":
                assert all(hasattr(ddpcheck, alias.name) for alias in node.names), ast.unparse(node)
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).removeprefix("ddpcheck.")
                _has_keywords(node, getattr(ddpcheck, name, None) if name in ddpcheck.__all__ else None)


def _has_keywords(call: ast.Call, function: object) -> None:
    if not callable(function):
        return
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    assert {keyword.arg for keyword in call.keywords} <= {*parameters}, ast.unparse(call)


PROJECT = """
import torch
def Net():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
def load_samples(step, count):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(count, 3, 4, generator=generator), torch.randint(3, (count,), generator=generator)
"""


def test_the_first_recipe_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my_project.py").write_text(PROJECT)
    (code,) = (code for code, _ in snippets(DOCS / "start.md", "python") if code.startswith("# check_my_model.py"))
    (tmp_path / "check_my_model.py").write_text(code)
    assert cli.main(["report", str(tmp_path / "check_my_model.py")]) == 0
    assert "clean: 6 checks passed" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_and_their_options_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for code, _ in snippets(page, "sh"):
        for line in code.replace("\\\n", " ").splitlines():
            words = shlex.split(re.split(r" (?:>|<|\||&&|;)", line)[0], comments=True)
            if not words:
                continue
            if words[0] == "make":
                assert set(words[1:]) <= targets, line
            if words[0] == "ddpcheck":
                _is_a_command(words[1 : words.index(">") if ">" in words else None], line)


def _is_a_command(words: list[str], line: str) -> None:
    """That the command has these options; what follows the script of `ddpcheck run` is the script's own."""
    from torch.distributed.run import get_args_parser

    parser = make_parser()
    if words[0] == "run":
        parser = get_args_parser()
        add_check_options(parser)
        words = words[1:]
    try:
        parser.parse_args(words)
    except SystemExit:
        pytest.fail(line)


@pytest.mark.parametrize("page", pages(), ids=[page.relative_to(ROOT).as_posix() for page in pages()])
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http", "mailto")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


def test_every_picture_is_shown_and_says_what_it_shows() -> None:
    shown = {
        (page.parent / path).resolve(): text
        for page in pages()
        for text, path in re.findall(r"!\[(.*?)\]\((.*?)\)", page.read_text(encoding="utf-8"))
    }
    assert set(shown) == {*DOCS.rglob("*.svg")}
    assert all(len(text.split()) > 8 for text in shown.values())


def anchors(page: Path) -> set[str]:
    """The anchors of headings, as GitHub and MyST make them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_comparison_is_that_of_the_pages_that_it_counts() -> None:
    page = (DOCS / "comparison.md").read_text(encoding="utf-8")
    assert endings((DOCS / "faults.md").read_text(encoding="utf-8")) in page
    table = re.search(r"<!-- comparison -->.*?<!-- end -->", README.read_text(encoding="utf-8"), re.DOTALL)
    assert table and table.group(0) in page
    rows = re.findall(r"^\| \[\w+\].*? \| (nothing: \w+|after)", (DOCS / "scripts.md").read_text("utf-8"), re.MULTILINE)
    counts = Counter(rows)
    silent, waiting = counts["nothing: exit"], counts["nothing: it"]
    words = (
        f"lists {len(rows)} scripts .* {silent} ended with exit code 0 .* {waiting} waited .* {counts['after']} raised"
    )
    assert re.search(words.replace(" ", r"\s"), page, re.DOTALL), words


@pytest.mark.slow
def test_the_noise_is_that_of_the_records() -> None:
    assert f"<!-- noise -->\n{noise()}\n<!-- end -->" in (DOCS / "comparison.md").read_text(encoding="utf-8")


def test_noise_is_findings_beside_the_first() -> None:
    assert noise_row("x", [1, 3, 0, 1], [0, 2]) == "| x | 4 | 3 | 2 | 1 of 2 |"
    assert programs("| a | x | one: **DDP403 at a.py:3; DDP507 at b.py:4**, 2 s<br>two: not found |") == [2, 0]


MEASURED = re.findall(r"^\| \[.*?\]\((.*?)\) .*\| (.*?) \|$", (DOCS / "measured.md").read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize(("page", "figures"), MEASURED, ids=[page for page, _ in MEASURED])
def test_the_figures_in_the_index_are_those_of_the_page(page: str, figures: str) -> None:
    """A number of a sentence may be a figure of the page that it leads to, or a number of ranks."""
    text = (DOCS / page).read_text(encoding="utf-8")
    for figure in re.findall(r"\d+(?:\.\d+)?", figures):
        assert re.search(rf"(?<![\d.]){re.escape(figure)}(?!\.?\d)", text), f"{page} has no {figure}"


def test_every_page_that_a_measurement_writes_is_in_the_index() -> None:
    written = {
        page.name for page in PAGES if re.search(r"^(<!-- )?Written by `", page.read_text("utf-8"), re.MULTILINE)
    }
    assert written - {"rules.md"} <= {page for page, _ in MEASURED}


def test_the_faults_in_programs_are_counted() -> None:
    page = (DOCS / "programs.md").read_text(encoding="utf-8")
    faults = [each for row in re.findall(r"^\| .* \| (.*<br>.*) \|$", page, re.MULTILINE) for each in row.split("<br>")]
    missed = sum("not found" in fault for fault in faults)
    assert f"Of the {len(faults)} faults, {len(faults) - missed} are found and {missed} are not." in page


SYMPTOM = re.compile(r"^### (?P<title>[^\n]*)\n(?P<text>.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
SYMPTOMS = [match.groups() for match in SYMPTOM.finditer((DOCS / "troubleshooting.md").read_text(encoding="utf-8"))]
# How a silent end, or one that waits, is recorded on the pages of faults and scripts.
ENDINGS = ("silent", "**hangs**", "nothing: exit code 0", "nothing: it waits")
# Messages that come after a timeout, from nccl or from torchrun, or as a warning: those pages do not record them.
NOT_RECORDED = (
    *("Watchdog caught", "Timed out waiting", "Signal 9", "find_unused_parameters=True was", "Your training graph"),
)


@pytest.mark.parametrize(("title", "text"), SYMPTOMS, ids=[title for title, _ in SYMPTOMS])
def test_a_symptom_is_that_of_faults_and_leads_to_their_rules(title: str, text: str) -> None:
    """What plain DDP said of each fault is recorded; that ddpcheck names its rule is held by the tests of the fault."""
    assert "```sh\nddpcheck " in text
    shown = re.search(r"<!-- shown by: (.*?) -->", text)
    if not shown:
        assert re.search(r"DDP60[13]|SyncBatchNorm", text)
        return
    message = title.strip('"') if title.startswith('"') else ""
    for fault in shown[1].split(", "):
        name, code = fault.split()
        said, expected = recorded()[name]
        assert code == expected and (code in text or code == "DDP401"), fault
        if message and not message.startswith(NOT_RECORDED):
            assert message[:60] in said.replace("\\", ""), (fault, said)
        elif not message:
            assert "Connection closed" in said or "Expected to have finished" in said or said.startswith(ENDINGS), said


@functools.cache
def recorded() -> dict[str, tuple[str, str]]:
    """What plain DDP or torchrun said of each fault and script, and the rule that ddpcheck names."""
    rows = re.findall(
        r"^\| \[.*?\]\(\.\./examples/(?:faults/)?(\S+?)\.py\) \| (.*?) \| \*\*(DDP\d{3})\*\*",
        "\n".join((DOCS / page).read_text(encoding="utf-8") for page in ("faults.md", "scripts.md")),
        re.MULTILINE,
    )
    return {name: (said.rpartition(" | ")[2], code) for name, said, code in rows}


def test_messages_are_those_of_the_installed_torch() -> None:
    torch = Path(importlib.util.find_spec("torch").origin).parent  # type: ignore[union-attr, arg-type]
    names = ["nn/parallel/distributed.py", "nn/modules/batchnorm.py", "distributed/rendezvous.py"]
    names += ["distributed/elastic/multiprocessing/errors/__init__.py"]
    texts = [path.read_bytes() for path in (*(torch / "lib").glob("libtorch_cpu*"), *(torch / name for name in names))]
    for title, _ in SYMPTOMS:
        if title.startswith('"') and "Watchdog" not in title:  # of nccl, which the build for CPUs lacks
            words = re.split(r"1800000|RANK|9 \(SIGKILL\)", title.strip('"'))
            assert any(words[0].strip().encode() in text for text in texts), title


def test_the_symptoms_that_people_search_for_are_there() -> None:
    titles = " ".join(title for title, _ in SYMPTOMS)
    assert len(SYMPTOMS) >= 15
    for words in ("finished reduction", "ready only once", "closed by peer", "op.preamble", "Watchdog", "one GPU"):
        assert words in titles
