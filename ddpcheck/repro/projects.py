"""The user's project: which of its modules a target imports, and how its files read without ddpcheck.

This module is light: it never imports torch.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ddpcheck.errors import UsageError
from ddpcheck.locate import is_user_file, relative_path
from ddpcheck.repro.sources import Import, Source, Statement, imports_of, joined, read_source, spelled_imports

RECIPE = '''\
@dataclass
class {name}:
    """What is trained, and how."""

    model: Any
    batch: Any
    loss: Any
    shard: Any = None
    optimizer: Any = None
    ddp_kwargs: dict = field(default_factory=dict)
    wrap: Any = None
'''
RECIPE_IMPORTS = (
    Import("dataclasses", "dataclass", "dataclass"),
    Import("dataclasses", "field", "field"),
    Import("typing", "Any", "Any"),
)


def own_modules(entry: Path, package: str, loaded: Sequence[tuple[str, str]]) -> dict[str, Path]:
    """The modules of the user's own project that `entry` needs: path below the folder of the script, and file.

    Own are files below the folder of `entry` or below the working folder that are not installed. What is imported
    inside of functions counts as well.

    Args:
        entry: The file of the target.
        package: The package that it was imported in; empty for a file.
        loaded: Name and file of the modules that were imported when the target was loaded and called.
    """
    roots = _roots(entry, package)
    found: dict[str, Path] = {}
    pending = [("", entry, package)]
    for name, file in loaded:
        path = Path(file)
        if _is_own(path, roots) and path.resolve() != entry:
            pending.append((name, path, name if path.stem == "__init__" else name.rpartition(".")[0]))
    while pending:
        name, path, package = pending.pop()
        if name:
            place = "/".join(name.split(".")) + ("/__init__.py" if path.stem == "__init__" else ".py")
            if place in found:
                continue
            found[place] = path
        for wanted in _imported(path.read_text(encoding="utf-8"), package):
            for root in roots:
                file_of = _file_of(root, wanted)
                if file_of is not None and _is_own(file_of, roots):
                    pending.append((wanted, file_of, _package_of(wanted, file_of)))
                    break
    return dict(sorted(found.items()))


def _roots(entry: Path, package: str) -> list[Path]:
    top = entry.parent
    for _ in filter(None, package.split(".")):
        top = top.parent
    return list(dict.fromkeys([top, Path(os.getcwd()).resolve()]))


def _is_own(path: Path, roots: Iterable[Path]) -> bool:
    path = path.resolve()
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return not installed and is_user_file(str(path)) and any(path.is_relative_to(root) for root in roots)


def _imported(text: str, package: str) -> Iterator[str]:
    """The full names of the modules that a source may import, with the packages that they are in."""
    for node in ast.walk(ast.parse(text)):
        for item in imports_of(node):
            module = absolute(item.module, package)
            whole = f"{module}.{item.name}" if item.name else module
            parts = whole.split(".")
            if parts[0] != "ddpcheck":
                yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def absolute(module: str, package: str) -> str:
    """A module as an import names it from within `package`, without leading dots."""
    dots = len(module) - len(module.lstrip("."))
    if not dots:
        return module
    base = package.split(".")[: len(package.split(".")) - dots + 1]
    return ".".join(filter(None, [*base, module.lstrip(".")]))


def _file_of(root: Path, name: str) -> Path | None:
    path = root.joinpath(*name.split("."))
    for file in (path / "__init__.py", path.with_name(path.name + ".py")):
        if file.is_file():
            return file
    return None


def _package_of(name: str, path: Path) -> str:
    return name if path.stem == "__init__" else name.rpartition(".")[0]


def without_ddpcheck(
    imports: Sequence[Import], statements: Sequence[Statement], path: Path
) -> tuple[list[Import], list[Statement], str]:
    """Put a few lines into the place of `ddpcheck.Recipe`.

    Returns:
        The imports and statements without ddpcheck, and the name of the class that stands in; empty where there is
        no need of one.

    Raises:
        UsageError: The code needs more of ddpcheck than that.
    """
    name = ""
    kept: list[Import] = []
    used = set().union(*(statement.uses for statement in statements))
    for item in imports:
        if item.root != "ddpcheck":
            kept.append(item)
        elif item.name == "Recipe":
            name = item.bound
        elif item.bound in used and item.name:
            raise _needs_ddpcheck(item.name, path, _line_of(item.bound, statements))
    whole = {item.bound for item in imports if item.root == "ddpcheck" and not item.name}
    changed = []
    for statement in statements:
        for node in ast.walk(statement.node):
            if any(item.root == "ddpcheck" for item in imports_of(node)):
                raise _needs_ddpcheck("an import", path, getattr(node, "lineno", statement.first))
        for module in whole & statement.uses:
            name = name or "Recipe"
            statement.text = re.sub(rf"(?<![.\w]){module}\.(recipe\.)?Recipe\b", name, statement.text)
            if re.search(rf"(?<![.\w]){module}\.\w", statement.text):
                raise _needs_ddpcheck(module, path, _line_of(module, [statement]))
        changed.append(statement)
    return kept, changed, name


def _line_of(name: str, statements: Sequence[Statement]) -> int:
    nodes = (node for statement in statements for node in ast.walk(statement.node))
    return min((node.lineno for node in nodes if isinstance(node, ast.Name) and node.id == name), default=1)


def _needs_ddpcheck(what: str, path: Path, line: int) -> UsageError:
    return UsageError(
        f"{relative_path(str(path))}:{line} needs ddpcheck itself ({what}), so no reproduction can run without it; "
        "keep the recipe in a file that imports only ddpcheck.Recipe"
    )


def beside(path: Path, script: str) -> str:
    """The text of a module of the user's that is written beside the script."""
    text = path.read_text(encoding="utf-8")
    mark = f"# From {relative_path(str(path))}, for {script}; written by ddpcheck.\n"
    if not any(item.root == "ddpcheck" for node in ast.walk(ast.parse(text)) for item in imports_of(node)):
        return mark + text
    source: Source = read_source(text)
    kept, statements, name = without_ddpcheck(source.imports, source.statements, path)
    parts = [f"from __future__ import {', '.join(source.future)}"] if source.future else []
    parts.append(spelled_imports([*kept, *(RECIPE_IMPORTS if name else ())]))
    stand_in = RECIPE.format(name=name) if name else ""
    body, _ = joined(statements)
    return mark + "\n\n".join(filter(None, parts)) + "\n\n\n" + "\n\n".join(filter(None, [stand_in, body])) + "\n"
