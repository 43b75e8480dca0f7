"""Importing is free, and the rooms of the house import one way."""

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
from ddpcheck.worlds import wire

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ddpcheck"

# The order in which the package is read. A room imports only from rooms before it, at any depth of its code.
ROOMS = """
    __init__ errors reading shortening severity rules
    findings options exchange config evidence wording sameness acceptance picture trials matrix
    advice locate blame nests recipe target worlds worlds.wire worlds.allowed worlds.preloading worlds.rewriting
    worlds.failures worlds.processes worlds.crew compiling rank worlds.verdict worlds.stillness worlds.pending
    worlds.forkserver harness supply launched launchers graph paths zeros collectives lockstep gather gather.alone
    gather.randomness gather.syncbn gather.compare gather.describe gather.construction gather.wrapping
    gather.mode gather.samples gather.holders gather.leaves gather.hooks gather.events gather.coupling gather.influence
    gather.stepping gather.loss_terms gather.surroundings reference shard_terms analysis gather.session gather.exact
    gather.shards gather.program gather.draws gather.local gather.repeat gather.ddp gather.compiled gather.rows
    gather.flow
    gather.operations gather.picture gather.calls consistency program absences anomalous gather.parts loop circumstances
    loss_causes parity reducer compiled causes headings outcome deadlock_watch conduct check sweep depict folding render
    assertions watching wrapper integrations repro cli __main__ testing testing.marks testing.values testing.measuring
    testing.conditions testing.debugging testing.onrank testing.verdict testing.record testing.ranks testing.fixture
    testing.joined testing.session testing.quiet testing.instep pytest_plugin
""".split()

LIGHT = """
    ddpcheck ddpcheck.errors ddpcheck.severity ddpcheck.findings ddpcheck.rules ddpcheck.config ddpcheck.evidence
    ddpcheck.wording
    ddpcheck.options ddpcheck.exchange ddpcheck.lockstep ddpcheck.program ddpcheck.absences ddpcheck.sameness
    ddpcheck.acceptance ddpcheck.assertions ddpcheck.target ddpcheck.harness ddpcheck.supply ddpcheck.rank
    ddpcheck.blame ddpcheck.anomalous ddpcheck.outcome ddpcheck.consistency ddpcheck.loop ddpcheck.circumstances
    ddpcheck.loss_causes ddpcheck.parity ddpcheck.reducer ddpcheck.causes ddpcheck.collectives ddpcheck.check
    ddpcheck.render ddpcheck.gather.calls ddpcheck.deadlock_watch ddpcheck.conduct ddpcheck.testing.marks
    ddpcheck.testing.values ddpcheck.testing.measuring
    ddpcheck.testing.conditions ddpcheck.testing.debugging ddpcheck.testing.onrank ddpcheck.testing.verdict
    ddpcheck.testing.record ddpcheck.testing.ranks ddpcheck.testing.fixture ddpcheck.testing.session ddpcheck.sweep
    ddpcheck.testing.joined ddpcheck.testing.quiet ddpcheck.testing.instep ddpcheck.trials ddpcheck.matrix
    ddpcheck.advice ddpcheck.render.matrix_terminal ddpcheck.picture ddpcheck.depict ddpcheck.folding
    ddpcheck.render.drawing ddpcheck.render.labels ddpcheck.render.layout ddpcheck.render.as_json
    ddpcheck.render.terminal ddpcheck.cli ddpcheck.pytest_plugin ddpcheck.repro ddpcheck.repro.choice
    ddpcheck.repro.sources ddpcheck.repro.projects ddpcheck.repro.script ddpcheck.launched
    ddpcheck.launched.detection ddpcheck.watching ddpcheck.watching.account ddpcheck.watching.verdict
    ddpcheck.watching.telling ddpcheck.watching.normalisation ddpcheck.launched.board ddpcheck.launched.peers
    ddpcheck.launched.freeing ddpcheck.launched.session ddpcheck.launched.run ddpcheck.launched.world
    ddpcheck.launched.slurm ddpcheck.launched.interface ddpcheck.launched.loopback ddpcheck.launched.meeting
    ddpcheck.launched.leading ddpcheck.launched.following ddpcheck.launched.ending
""".split()


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the package by its name within it, `__init__` of a folder by the folder's."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module: str) -> str:
    """A module by itself, or the folder that is one room."""
    first, *rest = module.split(".")
    return f"{first}.{rest[0]}" if rest and first in ("gather", "worlds", "testing") else first


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


def test_every_module_has_its_room() -> None:
    assert {room_of(module) for module in modules()} == set(ROOMS)


@pytest.mark.parametrize("module", [module for module in modules() if module != "__init__"])
def test_rooms_import_one_way(module: str) -> None:
    room = room_of(module)
    before = set(ROOMS[: ROOMS.index(room) + 1])
    wrong = [
        f"line {line} imports {imported}, which comes later"
        for imported, line in imports(modules()[module].read_text(encoding="utf-8"))
        if room_of(imported) not in before
    ]
    assert wrong == []


def test_no_modules_import_each_other() -> None:
    sources = {module: path.read_text(encoding="utf-8") for module, path in modules().items()}
    graph = {module: {name for name, _ in imports(source)} for module, source in sources.items()}
    graph["__init__"].clear()  # it names all that is public for type checkers; what it imports when it runs is below
    graphlib.TopologicalSorter(graph).prepare()  # raises where there is a circle, and names it


def test_the_package_itself_imports_no_module_of_ours() -> None:
    code = "import sys, ddpcheck; print([name for name in sys.modules if name.startswith('ddpcheck.')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr


def test_the_import_reader_sees_every_kind_of_import() -> None:
    source = """
import torch, ddpcheck.rules
from ddpcheck import check, __version__
def f():
    from ddpcheck.render.terminal import x
if TYPE_CHECKING:
    from ddpcheck.harness import World
else:
    import ddpcheck.cli
from ddpcheck.gather import calls, local
from . import rank as this_rank
from .worlds.wire import send
"""
    seen = [module for module, _ in imports(source)]
    top = ["check", "__init__", "rules", "rank", "cli", "harness"]
    assert sorted(seen) == sorted([*top, "gather.calls", "gather.local", "render.terminal", "worlds.wire"])


PROBE = """
import dataclasses, enum, importlib, inspect, json, os, pickle, subprocess, sys, tempfile, traceback, typing

codes = {}
for module in sys.argv[1:]:
    pid = os.fork()
    if not pid:
        code = 1
        try:
            importlib.import_module(module)
            code = 10 + ("torch" in sys.modules)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    codes[module] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(json.dumps(codes))
"""


def probe(*modules: str) -> dict[str, int]:
    """Import each module in a process that has imported nothing of ours: 11 where torch comes with it, 10 where not."""
    command = [sys.executable, "-c", PROBE, *modules]  # forks: to start each would take as long as to import it
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    codes: dict[str, int] = json.loads(done.stdout)
    assert set(codes.values()) <= {10, 11}, done.stderr
    return codes


@pytest.fixture(scope="module")
def probed() -> dict[str, int]:
    return probe(*LIGHT)


@pytest.mark.parametrize("module", LIGHT)
def test_a_light_module_does_not_import_torch(module: str, probed: dict[str, int]) -> None:
    assert probed[module] == 10


def test_the_probe_can_fail() -> None:
    assert probe("json", "torch.version", "ddpcheck.rules") == {"json": 10, "torch.version": 11, "ddpcheck.rules": 10}


def test_no_module_shares_a_name_with_the_standard_library() -> None:
    names = {name for module in modules() for name in module.split(".")}
    assert names & sys.stdlib_module_names == set()


def test_every_module_says_what_it_is_for() -> None:
    for module, path in modules().items():
        source = path.read_text(encoding="utf-8")
        assert ast.get_docstring(ast.parse(source)), module


@pytest.mark.parametrize("name", [name for name in ddpcheck.__all__ if name != "__version__"])
def test_every_public_name_is_there_and_listed(name: str) -> None:
    assert getattr(ddpcheck, name).__name__ == name
    assert name in dir(ddpcheck)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Recipes'"):
        ddpcheck.Recipes  # noqa: B018


@pytest.mark.parametrize("first", ["import ddpcheck.check", "from ddpcheck.check import check", "import ddpcheck"])
def test_check_stays_the_function_whoever_imports_its_module(first: str) -> None:
    code = f"{first}; import sys, types, ddpcheck; sys.exit(10 + isinstance(ddpcheck.check, types.FunctionType))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 11, done.stderr


def test_the_version_is_the_one_that_is_installed() -> None:
    metadata = pytest.importorskip("importlib.metadata")
    try:
        installed = metadata.version("ddpcheck")
    except metadata.PackageNotFoundError:
        pytest.skip("ddpcheck is not installed")
    assert installed == ddpcheck.__version__


def test_the_package_travels_to_ranks_by_name() -> None:
    assert pickle.loads(wire.dumps(ddpcheck)) is ddpcheck, "a function that speaks of it may be sent by value"
