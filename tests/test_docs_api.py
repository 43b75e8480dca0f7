"""docs/api.md has every public name: of `ddpcheck`, of the integrations and of the plugin, and the types of values."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import ddpcheck
from ddpcheck import pytest_plugin
from ddpcheck.testing import marks
from tests.readme import DOCS

PAGE = (DOCS / "api.md").read_text(encoding="utf-8")
NAMED = [
    name if name.startswith("ddpcheck.") else f"ddpcheck.{name}"
    for name in re.findall(r"^\.\. auto\w+:: ([\w.]+)", PAGE, re.MULTILINE)
]
INTEGRATIONS = Path(ddpcheck.__file__).parent / "integrations"


def test_every_name_of_the_package_is_there() -> None:
    public = {*ddpcheck.__all__, *ddpcheck._HOMES} - {"__version__"}
    assert {name for name in NAMED if name.count(".") == 1} == {f"ddpcheck.{name}" for name in public}
    assert {f"ddpcheck.rank.{name}" for name in ddpcheck.rank.__all__} <= {*NAMED}


@pytest.mark.parametrize("framework", ["accelerate", "lightning", "mmengine", "transformers"])
def test_every_name_of_an_integration_is_there(framework: str) -> None:
    tree = ast.parse((INTEGRATIONS / f"{framework}.py").read_text(encoding="utf-8"))
    defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    public = {f"ddpcheck.integrations.{framework}.{name}" for name in defined if not name.startswith("_")}
    assert public and public <= {*NAMED}


def test_the_mark_and_the_fixtures_are_there() -> None:
    fixtures = [
        name for name, value in vars(pytest_plugin).items() if type(value).__name__ == "FixtureFunctionDefinition"
    ]
    assert "ddp_world" in fixtures
    mark = re.search(r"@pytest\.mark\.ddp\((.*?)\)", PAGE)
    assert mark and re.findall(r"\w+", mark[1].replace("world_size=2", "world_size")) == sorted(
        marks.OPTIONS, key=pytest_plugin._MARKER.index
    )
    for name in fixtures:
        assert re.search(rf"^\|.*`{name}`.*\|.*\|$", PAGE, re.MULTILINE), name
