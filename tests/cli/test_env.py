"""`ddpcheck env`: what it shows, and what it never does."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from jinja2 import Environment, StrictUndefined

from ddpcheck import __version__, cli
from ddpcheck.cli.arguments import make_parser
from ddpcheck.cli.env import HIDDEN, shown_variables
from ddpcheck.findings.rules import RULES

ROOT = Path(__file__).parents[2]


def test_only_variables_that_matter_are_shown_and_no_secret() -> None:
    environ = {
        **{"RANK": "1", "NCCL_DEBUG": "INFO", "TORCH_API_TOKEN": "abc1", "PYTORCH_SECRET": "abc2", "NCCL_AUTH": "abc3"},
        **{"DDPCHECK_KEY": "abc4", "TORCH_HUB_URL": "https://me:abc5@example.org/x", "HOME": "/home/me"},
        **{"AWS_SECRET_ACCESS_KEY": "abc6", "RANKING": "3"},
    }
    shown = shown_variables(environ)
    assert "abc" not in str(shown)
    assert shown["TORCH_API_TOKEN"] == HIDDEN and shown["TORCH_HUB_URL"] == f"https://{HIDDEN}@example.org/x"
    assert set(environ) - set(shown) == {"HOME", "AWS_SECRET_ACCESS_KEY", "RANKING"}
    assert shown["RANK"] == "1" and shown["NCCL_DEBUG"] == "INFO"


def test_the_text_for_agents_names_commands_options_and_keys_that_there_are(capsys) -> None:
    assert cli.main(["env", "--skill"]) == 0
    text = Path(capsys.readouterr().out.strip()).read_text(encoding="utf-8")
    commands = re.findall(r"`ddpcheck (\w+)", text)
    assert {"report", "run", "init", "hang", "explain"} <= set(commands)
    assert set(commands) <= set(make_parser()._subparsers._group_actions[0].choices)
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    assert set(re.findall(r"--check-[\w-]+", text)) <= set(re.findall(r"--check-[\w-]+", capsys.readouterr().out))
    assert {f"DDP{code[3]}xx" for code in RULES} == set(re.findall(r"DDP\dxx", text))


def test_the_conda_recipe_renders_and_needs_what_the_package_needs() -> None:
    template = (ROOT / "recipe" / "meta.yaml").read_text(encoding="utf-8")
    recipe = yaml.safe_load(Environment(undefined=StrictUndefined).from_string(template).render(PYTHON="python"))
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project, build = configuration["project"], configuration["build-system"]["requires"]
    conda = {"torch": "pytorch"}  # as conda-forge has it
    needed = [f"python{project['requires-python']}", *project["dependencies"]]
    needed = [f"{conda.get(name, name)} >={version}" for name, version in (need.split(">=") for need in needed)]
    assert recipe["requirements"]["run"] == needed
    assert recipe["requirements"]["host"] == [needed[0], "pip", *(need.replace(">=", " >=") for need in build)]
    assert recipe["package"] == {"name": project["name"], "version": __version__}
    assert recipe["build"]["entry_points"] == [f"{name} = {at}" for name, at in project["scripts"].items()]
    assert recipe["about"]["license"] == project["license"] and (ROOT / recipe["about"]["license_file"]).is_file()
    assert (ROOT / "recipe" / recipe["source"]["path"]).resolve() == ROOT


def test_env_as_text_and_as_json(capsys, monkeypatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO\x1b[2J")
    assert cli.main(["env", "--format", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["torch"]["version"] and shown["variables"]["NCCL_DEBUG"].startswith("INFO")
    assert shown["start method"] in ("fork", "spawn") and shown["packages"]["rich"]
    assert any(plugin.startswith("ddpcheck") for plugin in shown["pytest plugins"])
    assert cli.main(["env"]) == 0
    out = capsys.readouterr().out
    assert r"  NCCL_DEBUG: INFO\x1b[2J" in out and f"  version: {shown['torch']['version']}" in out
    with pytest.raises(SystemExit, match="2"):
        cli.main(["env", "--format", "jsn"])
    assert "did you mean 'json'?" in capsys.readouterr().err
