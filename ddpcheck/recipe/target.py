"""Load a TARGET (`pkg.module:attr`, `path/to/file.py:attr`, `pkg.module` or `path/to/file.py`) as a `Recipe`.

torch is imported only when a target is loaded.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.source_lines import relative_path
from ddpcheck.findings.tracebacks import is_own_bug, runs_target

if TYPE_CHECKING:
    from ddpcheck.recipe.recipe import Recipe


_MISSPELLED = 0.85  # similarity of a misspelled name: `optimiser` reaches this value, `losses` does not


def load_target(target: str) -> Recipe:
    """Return the recipe that a TARGET (`file.py:attr`, `module:attr`, `file.py` or `module`) names.

    `attr` is a `Recipe` or a function without arguments that returns a `Recipe`. Without `attr` the module defines the
    recipe: functions `model`, `batch`, `loss`, optionally `shard`, `optimizer`, `wrap`, and a dict `ddp_kwargs`.

    Raises:
        UsageError: There is no such file, module or attribute, or the object is not a recipe.
        TargetError: The user code raised on import or call.
    """
    from ddpcheck.recipe.recipe import Recipe, call_user, describe_type

    source, attribute = split_target(target)
    if not attribute and is_path(source):
        _refuse_script(source)
    value = load_object(target)
    if isinstance(value, ModuleType) and not attribute:
        return _module_as_recipe(value, source)
    if isinstance(value, Recipe):
        return value
    if not callable(value) or isinstance(value, type):
        raise UsageError(
            f"{target} is {describe_type(value)}; it must be a ddpcheck.Recipe or a function that returns one"
        )
    try:
        inspect.signature(value).bind()
    except TypeError:
        raise UsageError(
            f"{target} is a function that needs arguments; it must be a ddpcheck.Recipe or a function without "
            "arguments that returns one"
        ) from None
    except ValueError:
        pass  # no signature available: try the call
    recipe = call_user(f"{target}()", value)
    if not isinstance(recipe, Recipe):
        raise UsageError(f"{target}() returned {describe_type(recipe)}; it must return a ddpcheck.Recipe")
    return recipe


def load_object(target: str) -> Any:
    """Return the object that a TARGET names: an attribute, or without `:attr` the module."""
    source, attribute = split_target(target)
    module = _import_file(source) if is_path(source) else _import_module(source)
    value: Any = module
    for part in filter(None, attribute.split(".")):
        if not hasattr(value, part):
            close = difflib.get_close_matches(part, [name for name in vars(module) if not name.startswith("_")], n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UsageError(f"{source} has no attribute {part!r}{hint}")
        value = getattr(value, part)
    return value


def load_on_rank(target: Recipe | str) -> Recipe:
    """Load `target` on a rank, with `sys.argv` set to the file of the target."""
    if not isinstance(target, str):
        return target
    source, _ = split_target(target)
    sys.argv[:] = [source if is_path(source) else _file_of_module(source)]
    return load_target(target)


def _file_of_module(name: str) -> str:
    """Find the file of a module without importing it; return `name` if not found."""
    _make_working_folder_importable()
    for folder in sys.path:
        base = Path(folder or ".", *name.split("."))
        for file in (base / "__init__.py", Path(f"{base}.py")):
            if file.is_file():
                return str(file)
    return name


def split_target(target: str) -> tuple[str, str]:
    """Return the file or module that `target` names, and the attribute ("" if absent)."""
    source, colon, attribute = target.rpartition(":")
    if not colon or os.sep in attribute:
        source, attribute = target, ""
    if not source:
        raise UsageError(f"TARGET {target!r} names no file or module; write path/to/file.py:attr or pkg.module:attr")
    return source, attribute


def is_path(source: str) -> bool:
    """Return True if `source` is spelled as a file path."""
    return source.endswith(".py") or "/" in source or os.sep in source


def find_file(file: str) -> Path:
    """Return the resolved path of a Python file."""
    path = Path(file)
    if path.is_dir():
        raise UsageError(f"{file} is a folder; TARGET must be a Python file or a module")
    if not path.is_file():
        beside = path.with_name(f"{path.name}.py")
        hint = f"; did you mean {f'{file}.py'!r}?" if beside.is_file() else similar_file_hint(path)
        raise UsageError(f"no such file: {file}{hint}")
    if path.suffix != ".py":
        raise UsageError(f"{file} is no Python file; TARGET must end in .py or be the name of a module")
    if not os.access(path, os.R_OK):
        raise UsageError(f"cannot read {file}: permission denied")
    return path.resolve()


def similar_file_hint(path: Path) -> str:
    """Return a hint with the most similar file in the folder, or ""."""
    names = [file.name for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.7)
    return f"; did you mean {path.with_name(close[0]).as_posix()!r}?" if close else ""


def _import_file(file: str) -> ModuleType:
    path = find_file(file)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = path.stem
    if name in sys.modules or name in sys.stdlib_module_names or not name.isidentifier():
        name = f"ddpcheck_target_{''.join(c if c.isalnum() else '_' for c in path.stem)}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{file} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    from ddpcheck.recipe.recipe import target_error

    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        if isinstance(error, ImportError) and (instead := _package_hint(path, error)):
            raise UsageError(f"{file} imports other parts of the package that it belongs to; {instead}") from None
        raise target_error(f"importing {relative_path(str(path))}", error) from error
    return module


def _package_hint(path: Path, error: ImportError) -> str:
    """Return a hint "use package.module" for a file in a package, or ""."""
    top = path.parent
    while (top / "__init__.py").is_file():
        top = top.parent
    if top == path.parent and Path.cwd() in top.parents:  # a package without __init__.py
        top = Path.cwd()
    names = path.relative_to(top).with_suffix("").parts
    relative = "attempted relative import" in str(error)
    from_itself = error.name is not None and error.name.partition(".")[0] == names[0]
    if len(names) == 1 or not (relative or from_itself) or not all(map(str.isidentifier, names)):
        return ""
    where = "" if top == Path.cwd() else f", with {top} on PYTHONPATH"
    return f"use {'.'.join(names)}{where}"


@runs_target
def _import_module(name: str) -> ModuleType:
    from ddpcheck.recipe.recipe import target_error

    _make_working_folder_importable()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            package, _, last = name.rpartition(".")
            hint = f", or {package}:{last} for an attribute of {package}" if package and error.name == name else ""
            hint += similar_file_hint(Path(*name.split(".")).with_suffix(".py"))
            raise UsageError(
                f"no module named {error.name!r} (for TARGET {name!r}); give a file or a module{hint}"
            ) from None
        raise target_error(f"importing {name}", error) from error
    except (Exception, SystemExit) as error:
        if is_own_bug(error):
            raise
        if isinstance(error, TypeError | ValueError) and not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(f"{name!r} is neither a file that ends in .py nor the name of a module") from None
        raise target_error(f"importing {name}", error) from error


def _make_working_folder_importable() -> None:
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _refuse_script(file: str) -> None:
    """Raise `UsageError` if a file is a training script (calls `init_process_group`), not a recipe."""
    source = find_file(file).read_text(errors="replace")
    if "init_process_group" in source and not re.search(r"\bdef (model|batch|loss)\b|Recipe", source):
        raise UsageError(
            f"{file} is a training script, not a recipe: use `ddpcheck run --standalone --nproc-per-node 2 {file}`"
        )


def _module_as_recipe(module: ModuleType, where: str) -> Recipe:
    from ddpcheck.recipe.recipe import Recipe, describe_type

    if getattr(module, "__file__", None) is None and hasattr(module, "__path__"):
        raise UsageError(f"{where} is a folder without __init__.py; TARGET must be a Python file or a module")
    missing = [name for name in ("model", "batch", "loss") if not hasattr(module, name)]
    if missing:
        others = _defined_in(module)
        close = [(name, similar) for name in missing for similar in difflib.get_close_matches(name, others, n=1)]
        meant = ", ".join(f"{name} is called {similar} there: rename it" for name, similar in close)
        models = [name for name in others if hasattr(getattr(module, name), "register_forward_hook")]
        first = f"; `ddpcheck init {where}:{models[0]}` writes a first recipe for {models[0]}" if models else ""
        raise UsageError(
            f"{where} has no {' and no '.join(missing)}; {f'{meant}, or ' if close else ''}define functions model(), "
            f"batch(step) and loss(model, batch), or name a Recipe in it: {where}:attr{first}"
        )
    wrong = [name for name in ("model", "batch", "loss") if not callable(getattr(module, name))]
    if wrong:
        raise UsageError(f"{where}: {wrong[0]} must be a function, not {describe_type(getattr(module, wrong[0]))}")
    names = [attribute.name for attribute in dataclasses.fields(Recipe)]
    for name in _unused_names(module):
        if (near := difflib.get_close_matches(name, names, n=1, cutoff=_MISSPELLED)) and not hasattr(module, near[0]):
            raise UsageError(f"{where} defines {name}, which nothing uses and no recipe has; did you mean {near[0]!r}?")
    return Recipe(**{name: getattr(module, name) for name in names if hasattr(module, name)})


def _defined_in(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (isinstance(value, dict) or (callable(value) and getattr(value, "__module__", "") == module.__name__))
    ]


def _unused_names(module: ModuleType) -> list[str]:
    """Return callables and dicts that the module does not use: perhaps misspelled recipe names."""
    pending = [value.__code__ for value in vars(module).values() if inspect.isfunction(value)]
    used: set[str] = set()
    for code in pending:  # grows during the loop
        used.update(code.co_names)
        pending += [inner for inner in code.co_consts if inspect.iscode(inner)]
    return [name for name in _defined_in(module) if name not in used]
