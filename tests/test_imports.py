"""Importing is free, the packages import one way, and no modules import each other in a circle."""

import ast
import functools
import graphlib
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddpcheck
from ddpcheck import cli
from ddpcheck.worlds import wire

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ddpcheck"

# The order in which the house is read. Each imports only from those before it, at any depth of its code.
ORDER = """
    __init__ findings stream recipe worlds rank harness gather launch record trace rules anomalous consistency report
    render run monitor testing pytest_plugin integrations extras cli __main__
""".split()

ONLY = {
    "findings": {"__init__"},
    "trace": {"findings", "stream"},
    "rules": {"findings", "stream", "trace"},
    "stream": {"__init__", "findings"},
    "recipe": {"findings"},
}
"""What a package imports of ddpcheck, at most."""

LIGHT = """
    findings stream recipe worlds trace rules run report render cli testing pytest_plugin harness extras
""".split()
HEAVY = """
    .recipe.recipe. .recipe.pytree. .graph.graph_phases. .matrix.matrix_phases.
    .schedule.schedule_phases. .repro.probe. .repro.harness. .first_recipe.guessing.
    .assertions.on_rank. .launchers.init_dist.
""".split()
"""Of those what runs on ranks, and imports torch."""


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the package by its name within it, `__init__` of a folder by the folder's."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)] = path
    return found


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements in a node, at any depth; expressions, which import nothing, are not visited."""
    for block in ("body", "orelse", "handlers", "finalbody", "cases"):
        for child in getattr(node, block, ()):
            yield child
            yield from statements(child)


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The modules of the package that code imports, at any depth and for types alone too, with line numbers."""
    for node in statements(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, ["ddpcheck" if node.level else "", node.module]))
            names = [f"{base}.{alias.name}" for alias in node.names]
        for name in names:
            package, *parts = name.split(".")
            if package == "ddpcheck":
                while parts and ".".join(parts) not in modules():
                    parts.pop()
                yield ".".join(parts) or "__init__", node.lineno


@functools.cache
def imports_of_modules() -> dict[str, list[tuple[str, int]]]:
    return {module: list(imports(ast.parse(path.read_text("utf-8")))) for module, path in modules().items()}


def top(module: str) -> str:
    """The package, or the module at the top level, that `module` belongs to."""
    return module.partition(".")[0]


def test_packages_import_one_way() -> None:
    assert {top(module) for module in modules()} == set(ORDER)
    for module in modules().keys() - {"__init__"}:
        package = top(module)
        allowed = ONLY.get(package, set(ORDER[: ORDER.index(package)])) | {package}
        wrong = [(name, line) for name, line in imports_of_modules()[module] if top(name) not in allowed]
        assert wrong == [], module


def test_what_records_a_loop_judges_nothing() -> None:
    for module in (module for module in modules() if top(module) == "record"):
        assert not {"trace", "rules"} & {top(name) for name, _ in imports_of_modules()[module]}, module


def test_no_module_outside_of_extras_imports_them() -> None:
    imported = imports_of_modules().items()
    users = {module for module, names in imported if any(top(name) == "extras" for name, _ in names)}
    assert "extras.matrix.check_matrix" in users and {top(module) for module in users} == {"extras"}


def test_a_command_whose_extra_is_absent_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ddpcheck.extras.debug_server", None)
    assert cli.main(["hang", "http://localhost:1"]) == 2
    text = "ddpcheck: error: this needs ddpcheck.extras.debug_server, which is not installed\n"
    assert capsys.readouterr().err == text


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module: {name for name, _ in names} - {module} for module, names in imports_of_modules().items()}
    graph["__init__"].clear()  # it imports others in functions only, as another test holds
    graphlib.TopologicalSorter(graph).prepare()  # raises where there is a circle, and names it


# What is imported is asked in one process, since torch takes seconds: first without torch, then in its forks.
ASKED = """
import importlib, json, os, sys
import ddpcheck

asked = json.load(sys.stdin)
answers = {"of ours": [name for name in sys.modules if name.startswith("ddpcheck.")]}


def in_a_fork(question):
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, json.dumps(question()).encode())
        os._exit(0)
    os.wait()
    os.close(writing)
    with open(reading) as file:
        return json.loads(file.read() or "null")


def first_with_torch(names):
    for name in names:
        importlib.import_module(name)
        if "torch" in sys.modules:
            return name


def has_dynamo():
    known = set(sys.modules)
    import ddpcheck.monitor.wrapper, ddpcheck.monitor.watch
    return "torch._dynamo" in sys.modules.keys() - known


answers["light"] = in_a_fork(lambda: first_with_torch(asked))
answers["torch"] = first_with_torch(["json", "torch.version", "ddpcheck.cli"])
import torch.distributed, torch.nn.parallel, torch.optim
answers["dynamo"] = in_a_fork(has_dynamo)
print(json.dumps(answers))
"""


def test_what_is_imported_with_a_module() -> None:
    light = [f"ddpcheck.{m}" for m in modules() if top(m) in LIGHT and not any(part in f".{m}." for part in HEAVY)]
    command = [sys.executable, "-c", ASKED]
    done = subprocess.run(command, input=json.dumps(light), cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert answers["of ours"] == [], "the package itself imports no module of ours"
    assert answers["light"] is None, "light modules do not import torch"
    assert answers["torch"] == "torch.version", "it can fail"
    assert answers["dynamo"] is False, "the monitor does not import the compiler before there is a wrapper"


def test_the_package_travels_to_ranks_by_name() -> None:
    assert pickle.loads(wire.dumps(ddpcheck)) is ddpcheck, "a function that speaks of it may be sent by value"
