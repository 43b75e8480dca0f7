"""The code of a target: which modules of the user's own project it imports, and what it needs of ddpcheck."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.source_lines import is_user_file, relative_path


def own_modules(entry: Path, package: str, loaded: Sequence[tuple[str, str]]) -> dict[str, Path]:
    """The modules of the user's own project that `entry` needs: path below the folder of the script, and file.

    Own are files below the folder of `entry` or below the working folder that are not installed. What is imported
    inside of functions counts as well.

    Args:
        entry: The file of the target.
        package: The package that it was imported in; empty for a file.
        loaded: Name and file of the modules that were imported when the target was loaded and called.
    """
    top = entry.parents[len(package.split(".")) if package else 0]
    roots = list(dict.fromkeys([top, Path.cwd().resolve()]))
    found: dict[str, Path] = {}
    pending = [("", entry), *((name, Path(file)) for name, file in loaded if Path(file).resolve() != entry)]
    while pending:
        name, path = pending.pop()
        if name:
            place = name.replace(".", "/") + ("/__init__.py" if path.stem == "__init__" else ".py")
            if place in found or not _is_own(path, roots):
                continue
            found[place] = path
            package = name if path.stem == "__init__" else name.rpartition(".")[0]
        for wanted in _imported(path.read_text(encoding="utf-8"), package):
            places = [Path(root, *wanted.split(".")) for root in roots]
            files = [file for place in places for file in (place / "__init__.py", place.with_suffix(".py"))]
            pending += [(wanted, file) for file in files if file.is_file() and _is_own(file, roots)][:1]
    return dict(sorted(found.items()))


def _is_own(path: Path, roots: Iterable[Path]) -> bool:
    path = path.resolve()
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return not installed and is_user_file(str(path)) and any(path.is_relative_to(root) for root in roots)


def _imported(text: str, package: str) -> Iterator[str]:
    """The full names of the modules that a source may import, with the packages that they are in."""
    for node in ast.walk(ast.parse(text)):
        for module, name in imports_of(node).values():
            with contextlib.suppress(ImportError):  # beyond the outermost package
                module = importlib.util.resolve_name(module, package)
                parts = (f"{module}.{name}" if name else module).split(".")
                if parts[0] != "ddpcheck":
                    yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def imports_of(node: ast.AST) -> dict[str, tuple[str, str]]:
    """What an import statement binds: the module, with its dots where it is relative, and the name in it or nothing."""
    if isinstance(node, ast.Import):
        return {a.asname or a.name.partition(".")[0]: (a.name, "") for a in node.names}
    if isinstance(node, ast.ImportFrom):
        return {a.asname or a.name: ("." * node.level + (node.module or ""), a.name) for a in node.names}
    return {}


def names_in(node: ast.AST) -> set[str]:
    """The names that a piece of code mentions, without attributes and arguments."""
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}


def imports_from_ddpcheck(path: Path, roots: Iterable[str] | None = None) -> list[tuple[str, str]]:
    """The modules of ddpcheck that a file of the user's imports, and the names in them; it may use `Recipe` alone.

    Args:
        path: The file.
        roots: Names in it that are used; default: all. What the others need of ddpcheck is not missed, nor what runs
            when the file is the program.

    Raises:
        UsageError: The code needs more of ddpcheck than that.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    ours = {bound: item for node in tree.body for bound, item in imports_of(node).items() if _is_ours(item)}
    unused = [] if roots is None else _unused(tree, roots)
    for node in tree.body:
        needs = None if imports_of(node) or node in unused else _need_of_ddpcheck(node, ours)
        if needs:
            what, line = needs
            raise UsageError(
                f"{relative_path(str(path))}:{line} needs ddpcheck itself ({what}), so no reproduction can run without "
                "it; keep the recipe in a file that imports only ddpcheck.Recipe"
            )
    return list(ours.values())


def _is_ours(item: tuple[str, str]) -> bool:
    return item[0].partition(".")[0] == "ddpcheck"


def _unused(tree: ast.Module, roots: Iterable[str]) -> list[ast.stmt]:
    """What does not run when `roots` are used: functions and classes, tests for example, and the program."""
    unused: dict[str, ast.stmt] = {}
    pending, programs = list(roots), list[ast.stmt]()
    for node in tree.body:
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        if isinstance(node, kinds) and all(ast.unparse(d).startswith("pytest.") for d in node.decorator_list):
            unused[node.name] = node
        elif isinstance(node, ast.If) and sorted(ast.unparse(node.test).split(" == ")) == ["'__main__'", "__name__"]:
            programs.append(node)
        else:
            pending += names_in(node)
    while pending:
        used = unused.pop(pending.pop(), None)
        pending += names_in(used) if used is not None else ()
    return [*unused.values(), *programs]


def _need_of_ddpcheck(node: ast.stmt, ours: Mapping[str, tuple[str, str]]) -> tuple[str, int] | None:
    """The part of ddpcheck beside `Recipe` that a statement mentions, and the line."""
    recipes = {id(item.value) for item in ast.walk(node) if isinstance(item, ast.Attribute) and item.attr == "Recipe"}
    for item in ast.walk(node):
        if any(map(_is_ours, imports_of(item).values())):
            return "an import", getattr(item, "lineno", 0)
        if isinstance(item, ast.Name) and item.id in ours and id(item) not in recipes:
            if ours[item.id][1] != "Recipe":
                return ours[item.id][1] or item.id, item.lineno
    return None
