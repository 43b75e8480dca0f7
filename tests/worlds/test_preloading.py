"""Modules that are imported once, before ranks are forked: what comes of them, and of those that cannot be had."""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest

from ddpcheck.extras import calls as extra_calls
from ddpcheck.findings.errors import UsageError
from ddpcheck.harness import World, start_world
from ddpcheck.report import calls
from ddpcheck.report.checking.check import check
from ddpcheck.worlds import starting as processes


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], str]]:
    """Make a module that fork servers which start from now on can import, and their ranks, and nobody afterwards."""
    folder = tmp_path_factory.mktemp("modules")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        processes.shut_down()

        def write(name: str, source: str) -> str:
            (folder / f"{name}.py").write_text(source, encoding="utf-8")
            os.utime(folder, (len(list(folder.iterdir())),) * 2)  # a server that has looked into it looks again
            return name

        yield write
    processes.shut_down()


def imported_by(name: str) -> tuple[int, int]:
    module = sys.modules[name]
    return module.PID, os.getpid()


@pytest.mark.slow
def test_a_module_is_imported_once_and_is_there_in_every_rank(module) -> None:
    name = module("ddpcheck_preloaded_once", "import os\nPID = os.getpid()\n")
    pids = []
    for _ in range(2):
        with start_world(2, preload=[name], hash_seeds=True) as world:
            pids += world.run(imported_by, name)
    servers, ranks = map(set, zip(*pids, strict=True))
    assert len(servers) == 2 and not servers & ranks


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_module_that_cannot_be_imported_is_one_sentence(module, method: Literal["fork", "spawn"]) -> None:
    name = module("ddpcheck_raises", "1 / 0")
    with World(1, preload=[name], start_method=method) as world, pytest.raises(UsageError) as caught:
        world.run(os.getpid)
    assert str(caught.value).startswith(f"preload: the module {name!r} cannot be imported: ZeroDivisionError: division")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_module_that_starts_a_thread_is_refused_and_the_next_world_is_none_the_worse(module) -> None:
    threaded = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    name = module("ddpcheck_threaded", threaded)
    words = "leaves a thread running.* do not preload it"
    with World(1, preload=[name]) as world, pytest.raises(UsageError, match=words):
        world.run(os.getpid)
    with World(2) as world:
        assert len(set(world.run(os.getpid))) == 2


def test_no_phase_imports_anything_of_ours_on_a_rank(tmp_path: Path) -> None:
    target = tmp_path / "recipe.py"
    target.write_text(
        "import sys\nimport torch\n"
        "def ours(): return {name for name in sys.modules if name.partition('.')[0] == 'ddpcheck'}\n"
        "before = ours()\n"
        "def model(): return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(), torch.nn.BatchNorm1d(2))\n"
        "def batch(step):\n"
        "    assert ours() == before, ours() - before\n"
        "    return torch.rand(4, 2)\n"
        "def loss(model, batch): return model(batch).square().sum()\n"
    )
    report = check(str(target), steps=2)
    assert report.error is None, report.error
    assert report.findings, "nothing had to be explained"


@pytest.mark.parametrize("calls", [calls, extra_calls])
def test_what_is_imported_before_ranks_are_forked_are_the_modules_of_the_phases(calls: ModuleType) -> None:
    tree = ast.parse(Path(calls.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = [f"{node.module}.{alias.name}" for node in block.body for alias in node.names]
    assert seen == list(calls.MODULES)
    for module in calls.MODULES:
        assert importlib.import_module(module).__name__ == module


def test_check_hands_it_on_and_its_error_is_one_of_usage() -> None:
    target = str(Path(__file__).parents[1] / "zoo" / "healthy" / "lstm.py")
    with pytest.raises(UsageError, match="preload: the module 'ddpcheck_no_such_module' cannot be imported"):
        check(target, preload=["ddpcheck_no_such_module"])
