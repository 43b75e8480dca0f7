"""The public names: what `dir` lists, what signatures show, and old names that still work."""

from __future__ import annotations

import argparse
import importlib
import inspect
from typing import Any

import pytest

pytest.importorskip("torch")

import ddpcheck
from ddpcheck.harness import World
from ddpcheck.integrations.callback import WatchCallback
from ddpcheck.monitor.reporting import WatchOptions
from ddpcheck.report.checking.check_state import CheckOptions
from ddpcheck.report.settings import Settings
from ddpcheck.run.check_options import add_check_options
from ddpcheck.testing.fixture import DDPWorld
from ddpcheck.worlds.validation import WorldOptions

RENAMED = [
    ("ddpcheck", "DdpcheckError", "DDPCheckError"),
    ("ddpcheck.testing.fixture", "DdpWorld", "DDPWorld"),
    ("ddpcheck.report.matrix.option_sets", "DdpOptions", "DDPOptions"),
    ("ddpcheck.integrations.mmengine", "DdpCheckHook", "DDPCheckHook"),
]


@pytest.mark.parametrize(("module", "old", "new"), RENAMED, ids=lambda item: item)
def test_the_old_name_of_a_class_is_the_class_and_deprecated(module: str, old: str, new: str) -> None:
    home = pytest.importorskip(module) if "integrations" in module else importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=f"^{module}.{old} is deprecated: use {new}$") as warned:
        found = getattr(home, old)
    assert warned[0].filename == __file__
    assert found is getattr(home, new) and found.__name__ == new
    assert old not in dir(ddpcheck)
    with pytest.raises(AttributeError, match="has no attribute 'Ddp'"):
        _ = home.Ddp


def test_a_config_may_name_the_hook_of_mmengine_as_before() -> None:
    registry = pytest.importorskip("mmengine.registry")
    from ddpcheck.integrations.mmengine import DDPCheckHook

    for name in ("DDPCheckHook", "DdpCheckHook"):
        assert type(registry.HOOKS.build({"type": name, "on_finding": "log"})) is DDPCheckHook


def test_dir_lists_public_names_alone_and_signatures_refuse_others() -> None:
    assert set(dir(ddpcheck)) == {*ddpcheck.__all__, "launch", "rank"}
    names = [name for name in ddpcheck.__all__ if name != "__version__"]
    assert [getattr(ddpcheck, name).__name__ for name in names] == names
    with pytest.raises(AttributeError, match="no attribute 'Recipes'"):
        _ = ddpcheck.Recipes
    expected = "world_size backend device timeout startup_timeout start_method process_group threads env preload"
    assert list(inspect.signature(ddpcheck.World).parameters) == expected.split()
    for function in (ddpcheck.check, ddpcheck.check_script, ddpcheck.check_schedule, ddpcheck.check_matrix):
        misspelled = {"timeuot": 1.0}
        with pytest.raises(TypeError, match=f"{function.__name__}: there is no 'timeuot'; did you mean 'timeout'"):
            function("recipe.py", **misspelled)


def defaults(name: str, *functions: Any) -> set[Any]:
    return {inspect.signature(function).parameters[name].default for function in functions}


def test_timeouts_of_one_meaning_have_one_default() -> None:
    checks = (ddpcheck.check, ddpcheck.check_matrix, ddpcheck.check_schedule, ddpcheck.assert_parity, ddpcheck.World)
    assert defaults("timeout", *checks, Settings, World.update_options, WorldOptions, CheckOptions) == {30.0}
    waits = defaults("timeout", ddpcheck.watch, ddpcheck.check_consistency, WatchCallback, WatchOptions)
    assert waits | defaults("check_timeout", ddpcheck.CheckedDistributedDataParallel) == {60.0}
    assert defaults("timeout", ddpcheck.check_script, DDPWorld.check_script) == {600.0}
    parser = argparse.ArgumentParser()
    add_check_options(parser)
    assert parser.get_default("check_timeout") == 60.0
