"""Importing is free, the packages import one way, and no modules import each other in a circle."""

import ast
import functools
import graphlib
import inspect
import json
import pickle
import re
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
def docstrings_and_imports() -> dict[str, tuple[str | None, list[tuple[str, int]]]]:
    """What is read of each module."""
    trees = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in modules().items()}
    return {module: (ast.get_docstring(tree), list(imports(tree))) for module, tree in trees.items()}


def imports_of_modules() -> dict[str, list[tuple[str, int]]]:
    return {module: imported for module, (_, imported) in docstrings_and_imports().items()}


def top(module: str) -> str:
    """The package, or the module at the top level, that `module` belongs to."""
    return module.partition(".")[0]


def test_everything_at_the_top_level_has_its_place() -> None:
    assert {top(module) for module in modules()} == set(ORDER)
    assert len(ORDER) <= 24


def test_packages_import_one_way() -> None:
    for module in modules().keys() - {"__init__"}:
        package = top(module)
        allowed = ONLY.get(package, set(ORDER[: ORDER.index(package)])) | {package}
        wrong = [(name, line) for name, line in imports_of_modules()[module] if top(name) not in allowed]
        assert wrong == [], module


def test_what_records_a_loop_judges_nothing() -> None:
    recorders = [module for module in modules() if top(module) == "record"]
    assert len(recorders) > 40
    for module in recorders:
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


def test_the_import_reader_sees_every_kind_of_import() -> None:
    source = """
import torch, ddpcheck.findings.rules
from ddpcheck import cli, __version__
def f():
    from ddpcheck.render.terminal import x
if TYPE_CHECKING:
    from ddpcheck.harness import World
else:
    import ddpcheck.report.settings
from ddpcheck.gather.phases import model_build, local_step
from . import rank as this_rank
from .worlds.wire import send
"""
    seen = [module for module, _ in imports(ast.parse(source))]
    top = ["cli", "__init__", "findings.rules", "rank", "report.settings", "harness"]
    inner = ["gather.phases.model_build", "gather.phases.local_step", "render.terminal", "worlds.wire"]
    assert sorted(seen) == sorted([*top, *inner])


def light_modules() -> list[str]:
    """Those that never import torch when they are imported: the process of a check does without it."""
    return [f"ddpcheck.{m}" for m in modules() if top(m) in LIGHT and not any(part in f".{m}." for part in HEAVY)]


# What is imported is asked in one process, since torch takes seconds: first without torch, then in its forks.
ASKED = """
import importlib, json, operator, os, sys
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
    for name in asked["monitor"]:
        importlib.import_module(name)
    return "torch._dynamo" in sys.modules.keys() - known


def absent():
    def is_absent(name):
        try:
            operator.attrgetter(name)(ddpcheck)
        except AttributeError:
            return True

    return [name for name in asked["called"] if is_absent(name)]


answers["light"] = in_a_fork(lambda: first_with_torch(asked["light"]))
answers["torch"] = first_with_torch(["json", "torch.version", "ddpcheck.cli"])
import torch.distributed, torch.nn.parallel, torch.optim
answers["dynamo"] = in_a_fork(has_dynamo)
answers["absent"] = in_a_fork(absent)
print(json.dumps(answers))
"""


def called_in_the_documentation() -> list[str]:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    texts = [re.sub(r"^\.\. auto.*", "", page.read_text(), flags=re.MULTILINE) for page in pages]  # no calls
    return sorted({name for text in texts for name in re.findall(r"(?<![\w./-])ddpcheck\.([A-Za-z_][\w.]*)\(", text)})


def test_what_is_imported_with_a_module() -> None:
    called = called_in_the_documentation()
    assert "rank.current" in called
    monitor = ["ddpcheck.monitor.wrapper", "ddpcheck.monitor.watch"]
    asked = json.dumps({"light": light_modules(), "monitor": monitor, "called": called})
    command = [sys.executable, "-c", ASKED]
    done = subprocess.run(command, input=asked, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert answers["of ours"] == [], "the package itself imports no module of ours"
    assert answers["light"] is None, "light modules do not import torch"
    assert answers["torch"] == "torch.version", "it can fail"
    assert answers["dynamo"] is False, "the monitor does not import the compiler before there is a wrapper"
    assert answers["absent"] == [], "calls that the documentation names need no other import"


def test_no_module_shares_a_name_with_the_standard_library() -> None:
    names = {name for module in modules() for name in module.split(".")}
    assert names & sys.stdlib_module_names == {"trace"}  # what ranks recorded; nobody runs the stdlib one from here


def test_every_module_says_what_it_is_for() -> None:
    assert [module for module, (docstring, _) in docstrings_and_imports().items() if not docstring] == []


def test_the_package_lists_public_names_alone_and_its_functions_have_signatures() -> None:
    assert set(dir(ddpcheck)) == {*ddpcheck.__all__, "rank", "launch"}
    assert [*inspect.signature(ddpcheck.Recipe).parameters][:3] == ["model", "batch", "loss"]
    for function in (ddpcheck.check, ddpcheck.check_script, ddpcheck.check_schedule, ddpcheck.check_matrix):
        misspelled = {"timeuot": 1.0}
        with pytest.raises(TypeError, match=f"{function.__name__}: there is no 'timeuot'; did you mean 'timeout'"):
            function("recipe.py", **misspelled)


def test_every_public_name_is_there_and_listed() -> None:
    names = [name for name in ddpcheck.__all__ if name != "__version__"]
    assert [getattr(ddpcheck, name).__name__ for name in names] == names
    assert set(names) <= set(dir(ddpcheck))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Recipes'"):
        ddpcheck.Recipes  # noqa: B018


def test_no_module_takes_the_place_of_a_public_name() -> None:
    assert not {module for module in modules() if module in ddpcheck.__all__}


def test_the_version_is_the_one_that_is_installed() -> None:
    metadata = pytest.importorskip("importlib.metadata")
    try:
        installed = metadata.version("ddpcheck")
    except metadata.PackageNotFoundError:
        pytest.skip("ddpcheck is not installed")
    assert installed == ddpcheck.__version__


def test_the_package_travels_to_ranks_by_name() -> None:
    assert pickle.loads(wire.dumps(ddpcheck)) is ddpcheck, "a function that speaks of it may be sent by value"


def test_modules_that_texts_name_are_there() -> None:
    """`rules.gradients.reducer` in a docstring or a comment: a module of ours, or a name in one."""
    known, tops = modules(), "|".join(sorted({top(name) for name in modules()} - {"__init__", "rank", "report"}))
    texts = {module: path.read_text(encoding="utf-8") for module, path in known.items()}
    pattern = re.compile(rf"`(?:ddpcheck\.)?((?:{tops})\.[a-z_]+(?:\.[a-z_]+)*)[`(. ]")
    for module, named in {(module, named) for module, text in texts.items() for named in pattern.findall(text)}:
        parts = named.split(".")
        while len(parts) > 1 and ".".join(parts) not in known:
            parts.pop()
        rest = named.split(".")[len(parts) :]
        assert ".".join(parts) in known and (not rest or rest[0] in texts[".".join(parts)]), (module, named)
