"""The wrapper and the hook in real mmengine `Runner`s, built from configs on two ranks."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddpcheck.findings.errors import DDPCheckError
from tests.launchers.commands import clean_environment

pytest.importorskip("torch")
from tests.tiers import needs

# Ranks are shared: each run has a model, a folder and a name of its own.
pytestmark = [
    needs("mmengine", "matplotlib"),  # with which its visualizer draws
    pytest.mark.ddp(reuse="module", preload=["tests.mmruns"], timeout=120),
    pytest.mark.slow,  # a framework; `make test` has its smoke tests
]

ROOT = Path(__file__).parents[2]
LOGGING = {"type": "CheckedMMDistributedDataParallel", "detect_anomalous_params": True, "on_finding": "log"}
PLAIN = {"type": "MMDistributedDataParallel", "device_ids": None}
HOOK = {"type": "DDPCheckHook"}
STATISTICS = ("body.1.running_mean", "body.1.running_var")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """What several tests look at: filled by the first."""
    return {"folder": tmp_path_factory.mktemp("shared")}


@pytest.fixture
def faulty(ddp_world, shared):
    """A model with one of each fault, trained by a config that only names the wrapper: what each rank tells."""

    def run(folder):
        from tests import mmruns

        return mmruns.train(folder / "faulty", mmruns.Faulty(depth=1500), LOGGING, epochs=3)

    if "faulty" not in shared:
        shared["faulty"] = ddp_world.run(run, shared["folder"])
    return shared["faulty"]


@pytest.fixture
def of_mmengine(ddp_world, shared):
    """What mmengine's own detector makes of the same model: its log, and how a deep graph and a dict of losses end."""

    def run(folder):
        import torch
        from mmengine.model.utils import detect_anomalous_params

        from tests import mmruns

        own = {**PLAIN, "detect_anomalous_params": True, "find_unused_parameters": True}
        log = mmruns.train(folder / "own", mmruns.Faulty(), own).log
        deep = mmruns.train(folder / "deep", mmruns.Faulty(depth=1500), own).raised
        model = mmruns.Faulty()
        try:
            detect_anomalous_params(model(torch.ones(4, 4), torch.ones(4, 1), mode="loss"), model)
        except AttributeError as error:
            return log, deep, str(error)
        return log, deep, ""

    if "own" not in shared:
        shared["own"] = ddp_world.run(run, shared["folder"])
    return shared["own"]


def told(trained, code):
    """The one finding of a code, the same on both ranks."""
    here, there = ([finding for finding in each.findings if finding.code == code] for each in trained)
    assert here == there and len(here) == 1
    return here[0]


def example(ddp_world, folder, name):
    """Train by a config of `examples/mmengine`, in a folder of its own; returns the log."""

    def run(folder, name):
        import os
        import sys

        from mmengine.config import Config
        from mmengine.runner import Runner

        os.chdir(folder)
        sys.path.insert(0, str(folder))
        Runner.from_cfg(Config.fromfile(f"{name}.py")).train()
        return "\n".join(path.read_text() for path in sorted((folder / "work_dirs").glob("*/*/*.log")))

    shutil.copytree(ROOT / "examples" / "mmengine", folder / "mmengine", ignore=shutil.ignore_patterns("__pycache__"))
    return ddp_world(reuse="test", timeout=60).run(run, folder / "mmengine", name)


# The detector


def test_each_cause_is_told_once_and_training_goes_on(faulty):
    codes = ["DDP101", "DDP102", "DDP103", "DDP106", "DDP108", "DDP104", "DDP107"]
    for trained in faulty:
        assert [finding.code for finding in trained.findings] == codes
        assert (trained.raised, len(trained.logged)) == ("", 6)
    assert faulty[0].log.count("DDP101 unused-parameter at tests/mmruns.py:") == 1 and "DDP" not in faulty[1].log


def test_a_dict_of_losses_is_read_and_lists_in_it(faulty, of_mmengine):
    """Seed 2, the detector is handed a dict of losses although it reads a single tensor."""
    assert not [f for f in faulty[0].findings if any(name.startswith(("body", "head")) for name in f.subjects)]
    assert "'dict' object has no attribute 'grad_fn'" in of_mmengine[0][2]


def test_a_graph_of_1500_operations_is_no_recursion(faulty, of_mmengine):
    """Seed 2, it recurses, so a deep graph ends in RecursionError."""
    assert faulty[0].raised == ""
    assert of_mmengine[0][1].startswith("RecursionError")


def test_the_causes_are_told_apart_with_their_lines(faulty, of_mmengine):
    """Seed 2, it does not say which of the two causes applies, or where."""
    unused, outside = told(faulty, "DDP101"), told(faulty, "DDP102")
    assert unused.subjects == ("unused.weight", "unused.bias") and "No operation" in unused.message
    assert outside.subjects == ("not_in_loss.weight", "not_in_loss.bias")
    assert "at tests/mmruns.py:" in outside.message and "does not reach the loss" in outside.message
    for finding in (unused, outside):
        assert finding.location is not None and finding.location.path == "tests/mmruns.py"
    assert "module.unused.weight with shape torch.Size([1, 8]) is not in the computational graph" in of_mmengine[0][0]


def test_ranks_and_steps_are_told(faulty, of_mmengine):
    """Seed 2, it does not say on which ranks or in which steps."""
    rare = told(faulty, "DDP104")
    assert (rare.subjects, rare.ranks, rare.steps) == (("rare.weight", "rare.bias"), (1,), (2,))
    assert told(faulty, "DDP101").ranks == () and told(faulty, "DDP101").steps == (0,)
    assert "rank" not in of_mmengine[0][0].split("module.unused.weight")[1].splitlines()[0]


def test_a_step_is_told_once_and_not_in_every_step(faulty, of_mmengine):
    """Seed 2, a full walk in each step."""
    assert of_mmengine[0][0].count("module.unused.weight with shape") == 4, "once a step"
    assert faulty[0].log.count("DDP101") == 1


def test_a_detached_parameter_is_told_with_what_cuts_it_off(faulty, of_mmengine):
    """Seed 2, a parameter that is detached is not told."""
    detached = told(faulty, "DDP103")
    assert detached.subjects == ("detached.weight", "detached.bias")
    assert "detach() at tests/mmruns.py:" in detached.message
    assert "detach()" not in of_mmengine[0][0]


def test_an_all_zero_gradient_is_told(faulty, of_mmengine):
    """Seed 2, a parameter that is reached with an all-zero gradient is not told."""
    assert told(faulty, "DDP107").subjects == ("zero.weight", "zero.bias")
    assert "zero.weight with shape" not in of_mmengine[0][0]


def test_an_unregistered_parameter_is_told(faulty, of_mmengine):
    """Seed 2, a parameter that is reached and not registered with the wrapper is not told."""
    assert told(faulty, "DDP106").subjects == ("unregistered[0]",)
    assert "unregistered" not in of_mmengine[0][0]


def test_a_gradient_that_a_function_swallows_is_told(faulty, of_mmengine):
    """Seed 2, what does not contribute: a parameter whose Function returns no gradient."""
    assert told(faulty, "DDP108").subjects == ("lost",)
    assert "module.lost" not in of_mmengine[0][0]


def test_errors_are_raised_by_default_on_all_ranks_in_the_same_step(ddp_world, tmp_path):
    def run(folder):
        from tests import mmruns

        return mmruns.train(folder, mmruns.Faulty(), mmruns.CHECKED)

    for trained in ddp_world.run(run, tmp_path):
        assert trained.raised.startswith("FindingsError: DDP101 unused-parameter at tests/mmruns.py:")
        assert "DDP106" in trained.raised and (len(trained.logged), trained.files) == (0, [])


# A drop-in


def test_it_trains_as_mmengines_own_wrapper_does(ddp_world, tmp_path):
    """Seed 2, train_step, val_step and test_step: a drop-in for mmengine's wrapper in a real Runner."""

    def run(folder):
        import torch
        from mmengine.model import MMDistributedDataParallel, is_model_wrapper

        from tests import mmruns

        found = {}
        for wrapper in (PLAIN, mmruns.CHECKED):
            torch.manual_seed(3)
            name = str(wrapper["type"])
            optim = {"accumulative_counts": 2, "clip_grad": {"max_norm": 1.0}}
            found[name] = mmruns.train(folder / name, mmruns.Net(), wrapper, optim=optim, **mmruns.validation())
        model = mmruns.CheckedMMDistributedDataParallel(mmruns.Net(), device_ids=[0])
        data = [torch.ones(4, 4), torch.ones(4, 1)]
        steps = [getattr(model, step)(data) for step in ("val_step", "test_step")]
        own = [getattr(model.module, step)(data) for step in ("val_step", "test_step")]
        return {
            "both": list(found.values()),
            "isinstance": isinstance(model, MMDistributedDataParallel) and is_model_wrapper(model),
            "as the model's": all(map(torch.equal, [*steps[0], *steps[1]], [*own[0], *own[1]])),
            "synchronised": model.watch.step,
        }

    results = ddp_world.run(run, tmp_path)
    for result in results:
        plain, checked = result.pop("both")
        assert (plain.wrapper, checked.wrapper) == (PLAIN["type"], "CheckedMMDistributedDataParallel")
        assert plain.logged == checked.logged and len(checked.logged) == 4
        assert set(plain.logged[0]) == {"loss", "loss_main", "loss_parts"}
        for kind in ("weights", "checkpoint"):
            before, after = getattr(plain, kind), getattr(checked, kind)
            assert list(before) == list(after) and all(before[name].equal(after[name]) for name in before)
        assert (checked.raised, checked.findings, checked.warned) == ("", (), [])
        assert result == {"isinstance": True, "as the model's": True, "synchronised": 0}
    assert results[0]["isinstance"]


def test_validation_synchronises_nothing(ddp_world, tmp_path):
    """Seed 2, val_step and test_step call the inner module without gradient synchronisation."""

    def run(folder):
        import torch
        import torch.distributed as dist

        from tests import mmruns

        model = mmruns.CheckedMMDistributedDataParallel(mmruns.Net())
        if dist.get_rank() == 0:  # alone: were there a collective in it, this rank would wait for the other
            model.val_step([torch.ones(4, 4), torch.ones(4, 1)])
            model.test_step({"inputs": torch.ones(4, 4), "targets": torch.ones(4, 1)})
        dist.barrier()
        return model.watch.step

    assert ddp_world.run(run, tmp_path) == [0, 0]


HEALTHY = {
    "accumulation, an EMA hook and validation": (
        "Net",
        LOGGING,
        {"hooks": [HOOK, {"type": "EMAHook"}], "validates": 1},
    ),
    "bfloat16": ("Net", LOGGING, {"optim": {"type": "AmpOptimWrapper", "dtype": "bfloat16"}, "epochs": 5}),
    "heads that take turns": ("Conditional", {**LOGGING, "find_unused_parameters": True}, {"epochs": 5}),
    "by iterations": ("Net", LOGGING, {"iterations": 6}),
    "plain BatchNorm, brought together before saving": (
        "BatchNorm",
        {**PLAIN, "broadcast_buffers": False},
        {"hooks": [HOOK, {"type": "SyncBuffersHook"}], "validates": 1},
    ),
    "SyncBN": ("BatchNorm", {**LOGGING, "broadcast_buffers": False}, {"cfg": {"sync_bn": "torch"}}),
    "plain wrapper": ("Net", PLAIN, {}),
    "another runner": ("Net", LOGGING, {"flexible": True}),
    "compiled": ("Net", LOGGING, {"cfg": {"compile": {"backend": "eager"}}}),
}


SMOKE = "accumulation, an EMA hook and validation"


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.smoke] * (name == SMOKE)) for name in HEALTHY])
def test_a_healthy_run_raises_and_says_nothing(ddp_world, tmp_path, name):
    """Seed 3, converts BatchNorm to SyncBatchNorm when asked: then the statistics are one."""
    kind, wrapper, options = HEALTHY[name]

    def run(folder, kind, wrapper, options):
        from tests import mmruns

        options = {"hooks": [HOOK], **options}
        if options.pop("validates", False):
            options |= {"optim": {"accumulative_counts": 2}, **mmruns.validation()}
        if iterations := options.pop("iterations", 0):
            checkpoint = {"type": "CheckpointHook", "by_epoch": False, "interval": 2}
            options |= {"train_cfg": {"type": "IterBasedTrainLoop", "max_iters": iterations}}
            options |= {"train_dataloader": mmruns.loader("InfiniteSampler")}
            options |= {"default_hooks": {"checkpoint": checkpoint}}
        if options.pop("flexible", False):
            options["runner_class"] = mmruns.FlexibleRunner
        model = mmruns.Net(mmruns.nn.BatchNorm1d) if kind == "BatchNorm" else getattr(mmruns, kind)()
        with mmruns.as_on_a_gpu():
            return mmruns.train(folder, model, wrapper, **options)

    for rank, trained in enumerate(ddp_world.run(run, tmp_path, kind, wrapper, options)):
        assert (trained.raised, trained.findings, trained.warned) == ("", (), [])
        assert trained.wrapper == wrapper["type"]
        if rank == 0:
            steps = {"bfloat16": 10, "heads that take turns": 10, "by iterations": 6}.get(name, 4)
            steps //= 1 + bool(options.get("validates"))
            assert f"ddpcheck: {steps} steps watched, 0 findings" in trained.log


# The strategy


@pytest.mark.parametrize("flexible", [False, True], ids=["Runner", "FlexibleRunner with DDPStrategy"])
@pytest.mark.parametrize("checked", [False, True], ids=["plain wrapper", "checked wrapper"])
def test_statistics_of_one_rank_in_the_checkpoint_are_told(ddp_world, tmp_path, flexible, checked):
    """Seed 3, broadcast_buffers=False plus unsynchronised BatchNorm: the checkpoint keeps rank 0's statistics.

    And seed 1, one rank writes a checkpoint file.
    """

    def run(folder, wrapper, flexible):
        from tests import mmruns

        options = {"runner_class": mmruns.FlexibleRunner} if flexible else {}
        model = mmruns.Net(mmruns.nn.BatchNorm1d)
        return mmruns.train(folder, model, wrapper, hooks=[{**HOOK, "on_finding": "log"}], **options)

    wrapper = {**(LOGGING if checked else PLAIN), "broadcast_buffers": False}
    first, second = trained = ddp_world.run(run, tmp_path, wrapper, flexible)
    drift = told(trained, "DDP214")
    assert drift.subjects == STATISTICS and drift.severity.value == "warning"
    assert "nothing synchronises them, and a checkpoint keeps rank 0's" in drift.message
    assert drift.evidence == (
        f"{wrapper['type']}.broadcast_buffers is False",
        "body.1 takes its running statistics from each rank's own samples",
    )
    assert drift.location is not None and drift.location.path == "tests/mmruns.py"
    assert first.log.index("DDP214 buffer-value") < first.log.index("Saving checkpoint at 1 epochs")
    saved = {name.removeprefix("module."): value for name, value in first.checkpoint.items()}  # of a FlexibleRunner
    for name in STATISTICS:  # which is so
        assert saved[name].equal(first.weights[name]) and not saved[name].equal(second.weights[name])
    assert len(first.findings) == 1 and first.files == ["epoch_1.pth", "epoch_2.pth"]
    assert second.files == [], "the master saves, and nobody else"


def test_statistics_that_the_broadcast_discards_are_told_as_a_warning(ddp_world, tmp_path):
    """Seed 3, with broadcast_buffers=True rank 0's statistics win."""

    def run(folder):
        from tests import mmruns

        return mmruns.train(folder, mmruns.Net(mmruns.nn.BatchNorm1d), mmruns.CHECKED, hooks=[HOOK])

    first, second = trained = ddp_world.run(run, tmp_path)
    assert told(trained, "DDP215").subjects == STATISTICS
    assert len(first.warned) == 1 and second.warned == [] and first.raised == ""


def test_a_checkpoint_by_iterations_is_compared_before_it_is_saved(ddp_world, tmp_path):
    """Seed 3, saves a checkpoint: also one in the middle of an epoch."""

    def run(folder):
        from tests import mmruns

        checkpoint = {"type": "CheckpointHook", "by_epoch": False, "interval": 3}
        options = {"train_cfg": {"type": "IterBasedTrainLoop", "max_iters": 5}}
        options |= {"train_dataloader": mmruns.loader("InfiniteSampler")}
        options |= {"default_hooks": {"checkpoint": checkpoint}, "hooks": [{**HOOK, "on_finding": "log"}]}
        wrapper = {**PLAIN, "broadcast_buffers": False}
        return mmruns.train(folder, mmruns.Net(mmruns.nn.BatchNorm1d), wrapper, **options)

    trained = ddp_world.run(run, tmp_path)
    assert "after step 2:" in told(trained, "DDP214").message
    assert trained[0].log.index("DDP214") < trained[0].log.index("Saving checkpoint at 3 iterations")
    assert trained[0].files == ["iter_3.pth", "iter_5.pth"]


def test_what_differs_before_training_is_told(ddp_world, tmp_path):
    """Seed 3, wraps the model: what changes on one rank afterwards is found before the first step."""

    def run(folder):
        import torch.distributed as dist

        from tests import mmruns

        class Later(mmruns.Hook):
            def before_train(self, runner):
                with mmruns.torch.no_grad():
                    runner.model.module.head.bias.add_(dist.get_rank())

        return mmruns.train(folder, mmruns.Net(), PLAIN, hooks=[Later(), HOOK])

    for trained in ddp_world.run(run, tmp_path):
        assert trained.raised.startswith("FindingsError: DDP208 ") and "head.bias does not have" in trained.raised
        assert len(trained.logged) == 0


def test_setting_a_run_up(ddp_world, tmp_path):
    """Seed 3, initialises the process group once, wraps unless wrapped already, takes the user's own wrapper class.

    And seed 3, an unknown kind of SyncBatchNorm is an error that names the choices.
    """

    def run(folder):
        from tests import mmruns

        wrapped = mmruns.CheckedMMDistributedDataParallel(mmruns.Net(), on_finding="log")
        log = {**HOOK, "on_finding": "log"}
        unknown = {"cfg": {"sync_bn": "apex"}}
        batch = mmruns.nn.BatchNorm1d
        return {
            "wrapped": mmruns.train(folder / "wrapped", wrapped, None, hooks=[log]),
            "own": mmruns.train(folder / "own", mmruns.Faulty(rarely=False), {**LOGGING, "type": "Own"}, hooks=[log]),
            "unknown": mmruns.train(folder / "unknown", mmruns.Net(batch), LOGGING, **unknown),
        }

    for result in ddp_world.run(run, tmp_path):
        wrapped, own, unknown = result["wrapped"], result["own"], result["unknown"]
        assert wrapped.same_group and wrapped.wrapper == "CheckedMMDistributedDataParallel"
        assert "head.weight" in wrapped.weights, "wrapped once"
        assert own.wrapper == "Own" and "DDP101" in [finding.code for finding in own.findings]
        assert unknown.raised == 'ValueError: sync_bn should be "torch" or "mmcv", but got apex'


def test_each_of_several_wrappers_in_a_model_is_watched(ddp_world, tmp_path):
    """Seed 3, wraps the model by the user's own wrapper class: one that wraps each part of it."""

    def run(folder):
        from tests import mmruns

        wrapper = {"type": "MMSeparateDistributedDataParallel", "device_ids": None}
        return mmruns.train(folder, mmruns.Apart(), wrapper, hooks=[{**HOOK, "on_finding": "log"}])

    for trained in ddp_world.run(run, tmp_path):
        assert [(f.code, f.subjects) for f in trained.findings] == [("DDP101", ("1.weight", "1.bias"))]


@pytest.mark.ddp(world_size=1)
def test_a_run_without_ddp_is_told_that_nothing_is_watched(ddp_world, tmp_path):
    def run(folder):
        from tests import mmruns

        return mmruns.train(folder, mmruns.Net(), None, hooks=[HOOK], launcher="none")

    (trained,) = ddp_world.run(run, tmp_path)
    assert trained.raised == "" and "no DistributedDataParallel in the model" in trained.log


def test_a_choice_that_there_is_not_is_refused_at_once(ddp_world):
    def run():
        from ddpcheck.findings.errors import UsageError
        from tests import mmruns

        with pytest.raises(UsageError, match="on_finding is 'raise', 'warn', 'log' or a function"):
            mmruns.DDPCheckHook(on_finding="print")
        with pytest.raises(UsageError, match="on_finding is 'raise', 'warn', 'log' or a function"):
            mmruns.CheckedMMDistributedDataParallel(mmruns.Net(), on_finding="print")
        with pytest.raises(UsageError, match=r"names no function: 'no\.such:function'"):
            mmruns.DDPCheckHook(on_finding="no.such:function")

    ddp_world.run(run)


def test_a_function_travels_through_a_config_as_text(ddp_world, tmp_path):
    def run(folder):
        from tests import mmruns

        name = "ddpcheck.integrations.mmengine:log_finding"
        wrapper = {**LOGGING, "on_finding": name, "broadcast_buffers": False}
        model = mmruns.Net(mmruns.nn.BatchNorm1d)
        return mmruns.train(folder, model, wrapper, hooks=[{**HOOK, "on_finding": name}])

    assert told(ddp_world.run(run, tmp_path), "DDP214").subjects == STATISTICS


# The example


def test_the_plain_config_leaves_one_rank_waiting(ddp_world, tmp_path):
    pytest.importorskip("sklearn", reason="scikit-learn, which holds the digits, is not installed")
    with pytest.raises(DDPCheckError, match="rank 0") as caught:
        example(ddp_world, tmp_path, "digits")
    said = str(caught.value) + "".join(failure.message for failure in getattr(caught.value, "failures", ()))
    assert "Expected to have finished reduction" in said or "rank 0 is in backward" in said


def test_the_checked_config_trains_once_it_is_repaired(ddp_world, tmp_path):
    pytest.importorskip("sklearn", reason="scikit-learn, which holds the digits, is not installed")
    log = example(ddp_world, tmp_path, "digits_repaired")[0]  # rank 0 writes it, and another might read half of it
    assert "- ERROR -" not in log and "ddpcheck: 20 steps watched, 0 findings" in log


@pytest.mark.launchers
def test_torchrun_of_the_checked_config_says_what_the_guide_shows(tmp_path):
    """Seed 2, a drop-in on an unmodified config: only the wrapper is another."""
    pytest.importorskip("sklearn", reason="scikit-learn, which holds the digits, is not installed")
    for path in (ROOT / "examples" / "mmengine").glob("*.py"):
        shutil.copy(path, tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "train.py", "digits_checked.py"],
        cwd=tmp_path,
        env=clean_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1
    page = (ROOT / "docs" / "mmengine.md").read_text(encoding="utf-8")
    shown = next(block.split("```")[0] for block in page.split("```text\n") if "FindingsError" in block.split("```")[0])
    assert len(shown.splitlines()) == 7
    for rank in (0, 1):
        said = re.findall(rf"^\[rank{rank}\]: (.*)$", done.stderr, re.MULTILINE)
        assert shown.strip() in "\n".join(said)


def test_the_guide_shows_the_configs_of_the_example():
    page = (ROOT / "docs" / "mmengine.md").read_text(encoding="utf-8")
    checked = (ROOT / "examples" / "mmengine" / "digits_checked.py").read_text(encoding="utf-8")
    assert checked.split('"""\n\n')[1].strip() in page
