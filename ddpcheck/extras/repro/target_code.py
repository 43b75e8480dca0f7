"""Analyze the imports of a target: user modules and names of ddpcheck."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.source_lines import is_user_file, relative_path


def own_modules(entry: Path, package: str, loaded: Sequence[tuple[str, str]]) -> dict[str, Path]:
    """Return the source files of user modules, by path relative to the script.

    User modules are files below the folder of `entry` or the working folder that are not installed. Includes imports
    inside functions, and the modules `loaded` (name and file) by the target in `package`.
    """
    roots = [entry.parents[len(package.split(".")) if package else 0], Path.cwd().resolve()]
    modules: dict[str, Path] = {}
    pending = [("", entry), *((name, Path(file).resolve()) for name, file in loaded)]
    while pending:
        name, path = pending.pop()
        if name:
            is_package = path.stem == "__init__"
            relative = name.replace(".", "/") + ("/__init__.py" if is_package else ".py")
            installed = {"site-packages", "dist-packages"} & set(path.parts) or not is_user_file(str(path))
            if relative in modules or path == entry or installed or not any(map(path.is_relative_to, roots)):
                continue
            modules[relative], package = path, name if is_package else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for module, item in imports_of(node).values():
                with contextlib.suppress(ImportError):  # relative import beyond the top-level package
                    parts = f"{importlib.util.resolve_name(module, package)}.{item}".rstrip(".").split(".")
                    for count in range(1, len(parts) + 1) if parts[0] != "ddpcheck" else ():
                        stems = [Path(root, *parts[:count]) for root in roots]
                        files = [file for stem in stems for file in (stem / "__init__.py", stem.with_suffix(".py"))]
                        pending += [(".".join(parts[:count]), file.resolve()) for file in files if file.is_file()][:1]
    return dict(sorted(modules.items()))


def imports_of(node: ast.AST) -> dict[str, tuple[str, str]]:
    """Return (module, name in the module) by name bound in an import statement."""
    if isinstance(node, ast.Import):
        return {a.asname or a.name.partition(".")[0]: (a.name, "") for a in node.names}
    if isinstance(node, ast.ImportFrom):
        return {a.asname or a.name: ("." * node.level + (node.module or ""), a.name) for a in node.names}
    return {}


def names_in(node: ast.AST) -> set[str]:
    """Return the identifiers (`ast.Name`) in a piece of code."""
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}


def imports_from_ddpcheck(path: Path, roots: Iterable[str] | None = None) -> list[tuple[str, str]]:
    """Return the (module, name) imports from ddpcheck in a user file.

    With `roots`, code that does not run if only these names are used is exempt, such as tests and the
    `__name__ == "__main__"` block.

    Raises:
        UsageError: The code uses other names of ddpcheck.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    ours = {name: item for node in tree.body for name, item in imports_of(node).items() if _is_ours(item)}
    idle = [node for node in tree.body if roots is not None and _is_not_run_on_import(node)]
    wanted = {*(roots or ()), *(name for node in tree.body if node not in idle for name in names_in(node))}
    while used := [node for node in idle if getattr(node, "name", "") in wanted]:
        idle = [node for node in idle if node not in used]
        wanted.update(name for node in used for name in names_in(node))
    for item in (item for node in tree.body if node not in idle and not imports_of(node) for item in ast.walk(node)):
        what = "an import" if any(map(_is_ours, imports_of(item).values())) else ""
        if isinstance(item, ast.Attribute) and item.attr == "Recipe" and isinstance(item.value, ast.Name):
            item.value.id = "Recipe"  # an attribute of any object
        elif isinstance(item, ast.Name) and item.id in ours and ours[item.id][1] != "Recipe":
            what = ours[item.id][1] or item.id
        if what:
            raise UsageError(
                f"{relative_path(str(path))}:{getattr(item, 'lineno', 0)} needs ddpcheck itself ({what}), so no "
                "reproduction can run without it; keep the recipe in a file that imports only ddpcheck.Recipe"
            )
    return list(ours.values())


def _is_ours(item: tuple[str, str]) -> bool:
    return item[0].partition(".")[0] == "ddpcheck"


def _is_not_run_on_import(node: ast.stmt) -> bool:
    """Return True if importing the file need not execute this statement.

    It is a `__main__` block, or a function or class that is undecorated or decorated only by pytest.
    """
    if isinstance(node, ast.If):
        return sorted(ast.unparse(node.test).split(" == ")) == ["'__main__'", "__name__"]
    marks = getattr(node, "decorator_list", None)
    return marks is not None and all(ast.unparse(mark).startswith("pytest.") for mark in marks)
