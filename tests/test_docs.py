"""The documentation holds to the program: its snippets run or are of examples, commands exist, links lead somewhere."""

from __future__ import annotations

import argparse
import ast
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
from ddpcheck.cli.arguments import make_parser
from ddpcheck.report.settings import Settings
from ddpcheck.run.check_options import add_check_options
from tests.faultsuite.noise import noise
from tests.faultsuite.table import endings
from tests.readme import DOCS, README, ROOT, pages

PAGES = [page for page in pages() if page.parent.name != "rules"]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
BLOCK = re.compile(r"(?:<!-- from: (?P<origin>\S+) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)```", re.DOTALL)


def snippets(page: Path, language: str) -> list[tuple[str, str]]:
    """The code of the blocks in `language`, each with the file that it is from, or an empty string."""
    blocks = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [(match["code"], match["origin"] or "") for match in blocks if match["language"] == language]


def test_the_table_of_settings_has_each_setting_and_its_variable() -> None:
    text = (DOCS / "configuration.md").read_text(encoding="utf-8")
    rows = {cells[1].strip(" `"): cells for cells in (line.split("|") for line in text.splitlines()) if len(cells) > 6}
    settings = {field.name for field in fields(Settings)}
    assert settings == rows.keys() - {"key", "---"}
    commands = next(action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction))
    options = {name for action in commands.choices["report"]._actions for name in action.option_strings}
    for name, cells in rows.items():
        if name in settings - {"suppress"}:
            assert cells[5].strip() == f"`DDPCHECK_{name.upper()}`"
            assert (f"--{name.replace('_', '-')}" in options) == bool(cells[2].strip()), name


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
    parameters = inspect.signature(function).parameters if callable(function) else {}
    if parameters and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        assert {keyword.arg for keyword in call.keywords} <= {*parameters}, ast.unparse(call)


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
    programs = (DOCS / "programs.md").read_text(encoding="utf-8")
    faults = [
        each for row in re.findall(r"^\| .* \| (.*<br>.*) \|$", programs, re.MULTILINE) for each in row.split("<br>")
    ]
    missed = sum("not found" in fault for fault in faults)
    assert f"Of the {len(faults)} faults, {len(faults) - missed} are found and {missed} are not." in programs


@pytest.mark.slow
def test_the_noise_is_that_of_the_records() -> None:
    assert f"<!-- noise -->\n{noise()}\n<!-- end -->" in (DOCS / "comparison.md").read_text(encoding="utf-8")


def test_messages_are_those_of_the_installed_torch() -> None:
    torch = Path(importlib.util.find_spec("torch").origin).parent  # type: ignore[union-attr, arg-type]
    names = ["nn/parallel/distributed.py", "nn/modules/batchnorm.py", "distributed/rendezvous.py"]
    names += ["distributed/elastic/multiprocessing/errors/__init__.py"]
    texts = [path.read_bytes() for path in (*(torch / "lib").glob("libtorch_cpu*"), *(torch / name for name in names))]
    for title in re.findall(r"^### (.*)$", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE):
        if title.startswith('"') and "Watchdog" not in title:  # of nccl, which the build for CPUs lacks
            words = re.split(r"1800000|RANK|9 \(SIGKILL\)", title.strip('"'))
            assert any(words[0].strip().encode() in text for text in texts), title
