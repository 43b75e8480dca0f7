"""The recipes for continuous integration in the docs, and the hook of pre-commit: their commands are run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddpcheck.cli.arguments import make_parser
from ddpcheck.findings.report import Report
from ddpcheck.findings.selection import Suppression
from ddpcheck.report.settings import load_settings
from tests.findings.test_selection import RECIPE

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
INSTALLED = pytest.mark.skipif(not (BIN / "ddpcheck").exists(), reason="ddpcheck is not installed")


def blocks(page: str) -> list[Any]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]


ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))


def step(index: int, folder: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    """A step of the action, as GitHub runs it with these inputs."""
    values = {name: str(one.get("default", "")) for name, one in ACTION["inputs"].items()} | inputs
    chosen = ACTION["runs"]["steps"][index]
    given = {name: values[re.findall(r"inputs\.([\w-]+)", text)[0]] for name, text in chosen["env"].items()}
    of_job = {"RUNNER_TEMP": str(folder), "GITHUB_STEP_SUMMARY": str(folder / "summary.md")}
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **given, **of_job}
    command = ["bash", "-e", "-o", "pipefail", "-c", chosen["run"]]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@INSTALLED
@pytest.mark.slow
def test_the_action_says_what_is_new(tmp_path: Path) -> None:
    (used,) = [step for step in blocks("ci.md")[0]["jobs"]["ddpcheck"]["steps"] if "with" in step][-1:]
    assert used["uses"].startswith("OWNER/ddpcheck@") and set(used["with"]) <= set(ACTION["inputs"])
    assert 'python -m pip install "$GITHUB_ACTION_PATH"' in ACTION["runs"]["steps"][0]["run"]
    inputs = {**used["with"], "sarif": "found.sarif"}
    (tmp_path / "train_recipe.py").write_text(RECIPE)
    (tmp_path / "baseline.json").write_text(Report("train_recipe.py").to_json())
    done = step(1, tmp_path, **inputs)
    assert done.returncode == 1, done.stderr
    done = step(2, tmp_path, **inputs)
    assert done.returncode == 0 and done.stdout.startswith("::error file=train_recipe.py,line=6,title=DDP101")
    assert (tmp_path / "summary.md").read_text().startswith("## ddpcheck: 1 finding")
    assert "DDP101" in (tmp_path / "found.sarif").read_text()


@INSTALLED
@pytest.mark.slow
def test_the_action_runs_scripts_and_shows_matrices(tmp_path: Path) -> None:
    script = f"{ROOT}/examples/scripts/no_sampler.py --fixed"
    done = step(1, tmp_path, command="run", target=script, arguments="--standalone --nproc-per-node 2")
    assert done.returncode == 0, done.stderr
    assert step(2, tmp_path).stdout.startswith("ddpcheck: clean")
    (tmp_path / "train_recipe.py").write_text(RECIPE)
    matrix = {"target": "train_recipe.py", "arguments": "--matrix"}
    assert step(1, tmp_path, **matrix).returncode in (0, 1)
    done = step(2, tmp_path, **matrix)
    assert (done.returncode, done.stderr) == (0, "") and "combination" in (tmp_path / "summary.md").read_text()
    assert "report or run, not 'check'" in step(1, tmp_path, command="check").stderr


def test_every_command_of_the_recipes_can_be_parsed() -> None:
    commands = re.findall(r"^ *(?:- run: )?(ddpcheck (?:report|render) .*)$", pages(), re.MULTILINE)
    assert len(commands) >= 6
    for command in commands:
        words = shlex.split(command.partition(" >")[0].partition(" #")[0])
        assert make_parser().parse_args(words[1:]).command


def test_the_table_of_the_docs_is_one_that_is_read(tmp_path: Path) -> None:
    (table,) = re.findall(r"```toml\n(.*?)```", pages(), re.DOTALL)
    (tmp_path / "pyproject.toml").write_text(table, encoding="utf-8")
    (one,) = load_settings(environ={}, start=tmp_path).suppress
    assert {field.name for field in fields(Suppression)} == set(re.findall(r"^(\w+) =", table, re.MULTILINE))
    assert one.file == "third_party/*"


def pages() -> str:
    names = ("ci.md", "suppression.md", "formats.md")
    return "\n".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in names)


def test_the_hook_is_a_command_that_takes_the_arguments_of_the_docs() -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    (used,) = blocks("ci.md")[-1]["repos"][0]["hooks"]
    assert used["id"] == hook["id"] and set(used["stages"]) <= set(hook["stages"])
    given = make_parser().parse_args([*shlex.split(hook["entry"])[1:], *used["args"]])
    assert (given.target, given.baseline) == ("train_recipe.py", "baseline.json")
