"""The user's project: which of its modules a target imports, and how they read without ddpcheck.

This module is light: it never imports torch.
"""

from __future__ import annotations

import ast
import os
import symtable
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.source_lines import is_user_file, relative_path
from ddpcheck.report.repro.sources import Import, first_line, imports_of, names_in

STAND_IN = '''\
import dataclasses


@dataclasses.dataclass
class {name}:
    """What is trained, and how; stands in for ddpcheck.Recipe."""

    model: object
    batch: object
    loss: object
    shard: object = None
    optimizer: object = None
    ddp_kwargs: dict = dataclasses.field(default_factory=dict)
    wrap: object = None


'''
_PACKAGE = '''\
class {name}:
    """Stands in for the package."""

    Recipe = {recipe}


'''


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
    pending = [("", entry)]
    pending += [(name, path) for name, file in loaded if (path := Path(file)).resolve() != entry]
    while pending:
        name, path = pending.pop()
        if name:
            place = "/".join(name.split(".")) + ("/__init__.py" if path.stem == "__init__" else ".py")
            if place in found or not _is_own(path, roots):
                continue
            found[place] = path
            package = name if path.stem == "__init__" else name.rpartition(".")[0]
        for wanted in _imported(path.read_text(encoding="utf-8"), package):
            for file_of in _files_of(wanted, roots):
                if _is_own(file_of, roots):
                    pending.append((wanted, file_of))
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
            module = _absolute(item.module, package)
            parts = (f"{module}.{item.name}" if item.name else module).split(".")
            if parts[0] != "ddpcheck":
                yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _absolute(module: str, package: str) -> str:
    """A module as an import names it from within `package`, without leading dots."""
    dots = len(module) - len(module.lstrip("."))
    if not dots:
        return module
    base = package.split(".")[: len(package.split(".")) - dots + 1]
    return ".".join(filter(None, [*base, module.lstrip(".")]))


def _files_of(name: str, roots: Iterable[Path]) -> Iterator[Path]:
    for root in roots:
        path = root.joinpath(*name.split("."))
        files = (path / "__init__.py", path.with_name(path.name + ".py"))
        yield from (file for file in files if file.is_file())


@dataclass(frozen=True, slots=True)
class Code:
    """A module of the user's that does without ddpcheck.

    Attributes:
        lines: As they are in the file, with their numbers there; None for those that are new.
        future: What is imported from `__future__` where that has been taken out.
        recipe: The name under which it knows `Recipe`; empty where it does not.
        binds: The names that it defines or imports.
        imports: Its import statements.
    """

    lines: list[tuple[int | None, str]]
    future: tuple[str, ...]
    recipe: str
    binds: frozenset[str]
    imports: frozenset[Import]

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.lines)


def without_ddpcheck(path: Path, *, package: str = "", roots: Iterable[str] | None = None) -> Code:
    """A module of the user's as it is, with a few lines in the place of ddpcheck's `Recipe`.

    Args:
        path: The file.
        package: Where it is to stand alone: the package that its relative imports start from.
        roots: Names in it that are used, where it becomes part of a script: what the others need of ddpcheck goes
            with them, and so does what runs when it is the program.

    Raises:
        UsageError: The code needs more of ddpcheck than that.
    """
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    binds = _bound_names(text, str(path))
    ours = {item.bound: item for node in tree.body for item in imports_of(node) if item.root == "ddpcheck"}
    recipe, stand_in = _stand_in(ours, binds)
    unused = [] if roots is None else _unused_definitions(tree, roots)
    edits: list[tuple[ast.stmt, str]] = []
    future: list[str] = []
    for node in tree.body:
        needs = None
        if ours.keys() & {item.bound for item in imports_of(node)}:
            edits.append((node, _without_ours(node) + stand_in))
            stand_in = ""
        else:
            needs = _need_of_ddpcheck(node, ours)
        if roots is not None and isinstance(node, ast.ImportFrom) and node.module == "__future__":
            future += [alias.name for alias in node.names]
            edits.append((node, ""))
        elif roots is not None and (_is_main_guard(node) or (needs and node in unused)):
            edits.append((node, ""))
        elif needs:
            what, line = needs
            raise UsageError(
                f"{relative_path(str(path))}:{line} needs ddpcheck itself ({what}), so no reproduction can run without "
                "it; keep the recipe in a file that imports only ddpcheck.Recipe"
            )
        elif roots is not None:
            edits += _absolute_imports(node, package)
    imports = frozenset(item for node in tree.body for item in imports_of(node) if item.root != "ddpcheck")
    return Code(_edited(text, edits), tuple(future), recipe, binds, imports)


def stand_in_for_recipe(taken: Container[str]) -> tuple[str, str]:
    """A name for the class that stands in for `Recipe`, which is not `taken`, and the class."""
    name = free_name("Recipe", taken)
    return name, STAND_IN.format(name=name)


def free_name(name: str, taken: Container[str]) -> str:
    """`name`, or one like it that is not `taken`."""
    while name in taken:
        name += "_"
    return name


def _stand_in(ours: Mapping[str, Import], binds: Container[str]) -> tuple[str, str]:
    """The name of the class that stands in for `Recipe`, and the code in the place of the imports from ddpcheck."""
    names = [item.bound.replace("*", "Recipe") for item in ours.values() if item.name in ("Recipe", "*")]
    packages = [item.bound for item in ours.values() if not item.name]
    if not names and not packages:
        return "", ""
    recipe = names[0] if names else free_name("Recipe", binds)
    text = STAND_IN.format(name=recipe) + "".join(f"{name} = {recipe}\n\n\n" for name in names[1:])
    return recipe, text + "".join(_PACKAGE.format(name=name, recipe=recipe) for name in packages)


def _without_ours(node: ast.stmt) -> str:
    """The line of an import statement of ddpcheck that imports something else as well."""
    names = node.names if isinstance(node, ast.Import) else []
    others = [alias for alias in names if alias.name.partition(".")[0] != "ddpcheck"]
    return f"{ast.unparse(ast.Import(others))}\n" if others else ""


def _bound_names(text: str, file: str) -> frozenset[str]:
    """The names that a module defines or imports."""
    symbols = symtable.symtable(text, file, "exec").get_symbols()
    return frozenset(s.get_name() for s in symbols if s.is_assigned() or s.is_imported())


def _unused_definitions(tree: ast.Module, roots: Iterable[str]) -> list[ast.stmt]:
    """The functions and classes that nothing names which runs when `roots` are used; tests are some."""
    unused: dict[str, ast.stmt] = {}
    pending = list(roots)
    for node in tree.body:
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        if isinstance(node, kinds) and all(ast.unparse(d).startswith("pytest.") for d in node.decorator_list):
            unused[node.name] = node
        elif not _is_main_guard(node):
            pending += names_in(node)
    while pending:
        used = unused.pop(pending.pop(), None)
        pending += names_in(used) if used is not None else ()
    return list(unused.values())


def _is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("__name__ == '__main__'", "'__main__' == __name__")


def _need_of_ddpcheck(node: ast.stmt, ours: Mapping[str, Import]) -> tuple[str, int] | None:
    """The part of ddpcheck beside `Recipe` that a statement mentions, and the line."""
    recipes = {id(item.value) for item in ast.walk(node) if isinstance(item, ast.Attribute) and item.attr == "Recipe"}
    for item in ast.walk(node):
        if isinstance(item, ast.Import | ast.ImportFrom) and any(i.root == "ddpcheck" for i in imports_of(item)):
            return "an import", item.lineno
        if isinstance(item, ast.Name) and item.id in ours and id(item) not in recipes:
            if ours[item.id].name != "Recipe":
                return ours[item.id].name or item.id, item.lineno
    return None


def _absolute_imports(node: ast.stmt, package: str) -> Iterator[tuple[ast.stmt, str]]:
    """The relative imports in a statement, and what they are outside of `package`."""
    for item in ast.walk(node):
        if isinstance(item, ast.ImportFrom) and item.level:
            module = _absolute("." * item.level + (item.module or ""), package)
            yield item, ast.unparse(ast.ImportFrom(module, item.names, 0))


def _edited(text: str, edits: Iterable[tuple[ast.stmt, str]]) -> list[tuple[int | None, str]]:
    """The lines of `text` and their numbers, after each statement of `edits` has become what stands beside it."""
    lines: list[tuple[int | None, str]] = [*enumerate(text.split("\n"), 1)]
    for node, new in sorted(edits, key=lambda edit: (edit[0].lineno, edit[0].col_offset), reverse=True):
        first, last = first_line(node) - 1, node.end_lineno or node.lineno
        before = lines[node.lineno - 1][1].encode()[: node.col_offset].decode()
        after = lines[last - 1][1].encode()[node.end_col_offset :].decode()
        added: list[tuple[int | None, str]] = [(None, line) for line in new.splitlines()]
        if before.strip() or after.partition("#")[0].strip():  # it shares its line with others
            inside = new if "\n" not in new and new else "pass"
            added = [*(added if "\n" in new else ()), (node.lineno, before + inside + after)]
        elif len(added) == 1:
            added = [(node.lineno, before + new)]
        else:
            blank_before = first == 0 or not lines[first - 1][1].strip()
            while last < len(lines) and not lines[last][1].strip() and (added or blank_before):
                last += 1
        lines[first:last] = added
    while lines and not lines[0][1].strip():
        lines.pop(0)
    while lines and not lines[-1][1].strip():
        lines.pop()
    return lines
