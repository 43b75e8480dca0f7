"""The cases of the fault suite, read from their files without importing them."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FAULTS = ROOT / "examples" / "faults"


@dataclass(frozen=True)
class Expected:
    """What ddpcheck must say of the broken recipe: the keys of a file's `EXPECT`.

    Attributes:
        code: Of the first finding, which no other finding equals in severity.
        subjects: All of its subjects.
        ranks: Empty: every rank.
        severity: "error", "warning" or "note".
        cause: What its message, evidence or location must contain.
        timeout: Seconds for faults that hang; 0: the default.
        world_size: Ranks that it takes to show.
        steps: Steps that it takes to show.
    """

    code: str
    subjects: tuple[str, ...]
    ranks: tuple[int, ...]
    severity: str
    cause: str = ""
    timeout: float = 0
    world_size: int = 2
    steps: int = 3


@dataclass(frozen=True)
class Case:
    """One file: a fault as a phrase, and what is expected of it."""

    path: Path
    title: str
    expected: Expected

    @property
    def family(self) -> str:
        return self.path.parent.name

    @property
    def options(self) -> dict[str, Any]:
        """What a check needs to be told to find the fault."""
        expected = self.expected
        return {"world_size": expected.world_size, "steps": expected.steps, "timeout": expected.timeout or 20}

    def target(self, twin: str) -> str:
        """The TARGET of one of the two recipes, "broken" or "fixed"."""
        return f"{self.path.relative_to(ROOT)}:{twin}"

    def __str__(self) -> str:
        return f"{self.family}/{self.path.stem}"


def read_case(path: Path) -> Case:
    """The case in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    said = ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXPECT" and said:
            keys = ast.literal_eval(node.value)
            expected = Expected(**{k: tuple(v) if isinstance(v, list) else v for k, v in keys.items()})
            return Case(path, said.splitlines()[0].rstrip("."), expected)
    raise ValueError(f"{path} needs a docstring and EXPECT")


def all_cases() -> list[Case]:
    """Every case, by family and name."""
    return [read_case(path) for path in sorted(FAULTS.glob("*/*.py"))]
