"""Importing is free, the packages import one way, and no modules import each other in a circle."""

import ast
import functools
import graphlib
import inspect
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

LIGHT = (
    "findings",
    "stream",
    "recipe",
    "worlds",
    "trace",
    "rules",
    "run",
    "report",
    "render",
    "cli",
    "testing",
    "pytest_plugin",
    "harness",
    "extras",
)
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


def imports(source: str) -> Iterator[tuple[str, int]]:
    """The modules of the package that `source` imports, at any depth and for types alone too, with line numbers."""
    for node in ast.walk(ast.parse(source)):
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


def top(module: str) -> str:
    """The package, or the module at the top level, that `module` belongs to."""
    return module.partition(".")[0]


def test_everything_at_the_top_level_has_its_place() -> None:
    assert {top(module) for module in modules()} == set(ORDER)
    assert len(ORDER) <= 24


@pytest.mark.parametrize("module", [module for module in modules() if module != "__init__"])
def test_packages_import_one_way(module: str) -> None:
    package = top(module)
    allowed = ONLY.get(package, set(ORDER[: ORDER.index(package)])) | {package}
    wrong = [
        f"line {line} imports {imported}"
        for imported, line in imports(modules()[module].read_text(encoding="utf-8"))
        if top(imported) not in allowed
    ]
    assert wrong == []


def test_what_records_a_loop_judges_nothing() -> None:
    found = [module for module in modules() if top(module) == "record"]
    assert len(found) > 40
    for module in found:
        tops = {top(name) for name, _ in imports(modules()[module].read_text(encoding="utf-8"))}
        assert not {"trace", "rules"} & tops, module


def test_no_module_outside_of_extras_imports_them() -> None:
    users = {
        module
        for module, path in modules().items()
        for imported, _ in imports(path.read_text(encoding="utf-8"))
        if top(imported) == "extras"
    }
    assert "extras.matrix.check_matrix" in users and {top(module) for module in users} == {"extras"}


def test_a_command_whose_extra_is_absent_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ddpcheck.extras.debug_server", None)
    assert cli.main(["hang", "http://localhost:1"]) == 2
    text = "ddpcheck: error: this needs ddpcheck.extras.debug_server, which is not installed\n"
    assert capsys.readouterr().err == text


def test_no_modules_import_each_other_in_a_circle() -> None:
    sources = {module: path.read_text(encoding="utf-8") for module, path in modules().items()}
    graph = {module: {name for name, _ in imports(source)} - {module} for module, source in sources.items()}
    graph["__init__"].clear()  # it imports others in functions only, as the next test holds
    graphlib.TopologicalSorter(graph).prepare()  # raises where there is a circle, and names it


def test_the_package_itself_imports_no_module_of_ours() -> None:
    code = "import sys, ddpcheck; print([name for name in sys.modules if name.startswith('ddpcheck.')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr


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
    seen = [module for module, _ in imports(source)]
    top = ["cli", "__init__", "findings.rules", "rank", "report.settings", "harness"]
    inner = ["gather.phases.model_build", "gather.phases.local_step", "render.terminal", "worlds.wire"]
    assert sorted(seen) == sorted([*top, *inner])


def light_modules() -> list[str]:
    """Those that never import torch when they are imported: the process of a check does without it."""
    return [f"ddpcheck.{m}" for m in modules() if top(m) in LIGHT and not any(part in f".{m}." for part in HEAVY)]


def the_first_with_torch(*names: str) -> str:
    """Import modules one after another in a process of their own; the one after which torch is there."""
    code = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(print(name))
"""
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_light_modules_do_not_import_torch() -> None:
    assert the_first_with_torch(*light_modules()) == ""
    assert the_first_with_torch("json", "torch.version", "ddpcheck.cli") == "torch.version", "it can fail"


def imports_dynamo(code: str) -> bool:
    """Whether code imports `torch._dynamo`, which takes most of a second, beyond what importing torch does."""
    torch_alone = "import sys, torch, torch.distributed, torch.nn.parallel, torch.optim; known = set(sys.modules)"
    ask = "print('torch._dynamo' in set(sys.modules) - known)"
    command = [sys.executable, "-c", "\n".join((torch_alone, code, ask))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip() == "True"


def test_the_monitor_does_not_import_the_compiler_before_there_is_a_wrapper() -> None:
    assert not imports_dynamo("import ddpcheck.monitor.wrapper, ddpcheck.monitor.watch")


def test_no_module_shares_a_name_with_the_standard_library() -> None:
    names = {name for module in modules() for name in module.split(".")}
    assert names & sys.stdlib_module_names == {"trace"}  # what ranks recorded; nobody runs the stdlib one from here


def test_every_module_says_what_it_is_for() -> None:
    for module, path in modules().items():
        source = path.read_text(encoding="utf-8")
        assert ast.get_docstring(ast.parse(source)), module


def test_the_package_lists_public_names_alone_and_its_functions_have_signatures() -> None:
    assert set(dir(ddpcheck)) == {*ddpcheck.__all__, "rank", "launch"}
    assert [*inspect.signature(ddpcheck.Recipe).parameters][:3] == ["model", "batch", "loss"]
    for function in (ddpcheck.check, ddpcheck.check_script, ddpcheck.check_schedule, ddpcheck.check_matrix):
        misspelled = {"timeuot": 1.0}
        with pytest.raises(TypeError, match=f"{function.__name__}: there is no 'timeuot'; did you mean 'timeout'"):
            function("recipe.py", **misspelled)


@pytest.mark.parametrize("name", [name for name in ddpcheck.__all__ if name != "__version__"])
def test_every_public_name_is_there_and_listed(name: str) -> None:
    assert getattr(ddpcheck, name).__name__ == name
    assert name in dir(ddpcheck)


def test_calls_that_the_documentation_names_need_no_other_import() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    texts = [re.sub(r"^\.\. auto.*", "", page.read_text(), flags=re.MULTILINE) for page in pages]  # no calls
    called = {name for text in texts for name in re.findall(r"(?<![\w./-])ddpcheck\.([A-Za-z_][\w.]*)\(", text)}
    assert "rank.current" in called
    code = "import operator, sys, ddpcheck; operator.attrgetter(*sys.argv[1:])(ddpcheck)"
    command = [sys.executable, "-c", code, *sorted(called)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


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


@pytest.mark.parametrize("module", sorted(modules()))
def test_modules_that_texts_name_are_there(module: str) -> None:
    """`rules.gradients.reducer` in a docstring or a comment: a module of ours, or a name in one."""
    known, tops = modules(), "|".join(sorted({top(name) for name in modules()} - {"__init__", "rank", "report"}))
    text = modules()[module].read_text(encoding="utf-8")
    for named in re.findall(rf"`(?:ddpcheck\.)?((?:{tops})\.[a-z_]+(?:\.[a-z_]+)*)[`(. ]", text):
        parts = named.split(".")
        while len(parts) > 1 and ".".join(parts) not in known:
            parts.pop()
        source = known.get(".".join(parts), PACKAGE / "missing")
        assert source.exists() and (
            len(parts) == len(named.split(".")) or named.split(".")[len(parts)] in source.read_text()
        ), named
