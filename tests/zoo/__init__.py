"""The recipes of the zoo, read from their files without importing them."""

import ast
from pathlib import Path
from typing import Any

ZOO = Path(__file__).parent
NOT_FIXED = {"subjects": [], "ranks": [], "severity": None, "also": []}


def assigned(path: Path) -> dict[str, ast.expr]:
    """The values of the names that a file assigns at its top level."""
    nodes = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.Assign)]
    return {target.id: node.value for node in nodes for target in node.targets if isinstance(target, ast.Name)}


def names_of(path: Path) -> list[str]:
    """The names of the recipes in a file; none if the file is one."""
    calls = {name: value.func for name, value in assigned(path).items() if isinstance(value, ast.Call)}
    return [name for name, call in calls.items() if isinstance(call, ast.Name) and call.id in ("recipe", "hooked")]


def targets(kind: str) -> dict[str, str]:
    """The TARGETs of "healthy" or "broken" recipes, by name."""
    found: dict[str, str] = {}
    for path in (ZOO / kind).glob("*.py"):
        found |= {name: f"{path}:{name}" for name in names_of(path)} or {path.stem: str(path)}
    return dict(sorted(found.items()))


def expected_of(target: str) -> dict[str, Any]:
    """What a broken recipe must give: see the README."""
    file, _, name = target.partition(":")
    values = assigned(Path(file))
    expected = values["EXPECT"]
    if name and isinstance(expected, ast.Dict):
        of_names = {ast.literal_eval(key): value for key, value in zip(expected.keys, expected.values, strict=True)}
        expected = of_names[name]
    shared = values[expected.id] if isinstance(expected, ast.Name) else expected
    return NOT_FIXED | ast.literal_eval(shared)
