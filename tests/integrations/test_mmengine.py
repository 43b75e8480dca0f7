"""The wrapper and the hook in real mmengine `Runner`s, built from configs on two ranks."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import partial
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


@pytest.fixture
def on_ranks(ddp_world, tmp_path):
    """Call a function with `tests.mmruns` and a new folder on each rank."""

    def call(function):
        def run(folder):
            from tests import mmruns

            return function(mmruns, folder)

        return ddp_world.run(run, tmp_path)

    return call


def finding_of(trained, code):
    """The one finding of a code, the same on both ranks."""
    here, there = ([finding for finding in each.findings if finding.code == code] for each in trained)
    assert here == there and len(here) == 1
    return here[0]


def batch_norm(r):
    return r.Net(r.nn.BatchNorm1d)


# The detector

CAUSES = {  # in the order in which they are found
    "DDP101": ("unused.weight", "unused.bias"),
    "DDP102": ("not_in_loss.weight", "not_in_loss.bias"),
    "DDP103": ("detached.weight", "detached.bias"),
    "DDP106": ("unregistered[0]",),
    "DDP108": ("lost",),
    "DDP104": ("rare.weight", "rare.bias"),
    "DDP107": ("zero.weight", "zero.bias"),
}


def test_each_cause_is_told_once_with_ranks_steps_and_lines_and_training_continues(on_ranks):
    """Seed 2, what mmengine's detector is not.

    The detector is handed a dict of losses although it reads a single tensor. It recurses, so a deep graph ends in
    RecursionError. It does not say which of the two causes applies, or on which ranks or in which steps. It is a full
    walk in each step. A parameter that is detached is not told, one with an all-zero gradient is not told, and one that
    is reached and not registered with the wrapper is not told; nor what does not contribute, since its Function returns
    no gradient.
    """
    first, second = trained = on_ranks(lambda r, folder: r.train(folder, r.Faulty(depth=1500), LOGGING, epochs=3))
    for each in trained:
        assert {finding.code: finding.subjects for finding in each.findings} == CAUSES
        assert [finding.code for finding in each.findings] == list(CAUSES)
        assert (each.raised, len(each.logged)) == ("", 6)
    assert first.log.count("DDP101 unused-parameter at tests/mmruns.py:") == 1 and "DDP" not in second.log
    for code in ("DDP101", "DDP102", "DDP103"):
        finding = finding_of(trained, code)
        assert (finding.location.path, finding.ranks, finding.steps) == ("tests/mmruns.py", (), (0,))
    assert (finding_of(trained, "DDP104").ranks, finding_of(trained, "DDP104").steps) == ((1,), (2,))


def test_errors_are_raised_by_default_on_all_ranks_in_the_same_step(on_ranks):
    for trained in on_ranks(lambda r, folder: r.train(folder, r.Faulty(), r.CHECKED)):
        assert trained.raised.startswith("FindingsError: DDP101 unused-parameter at tests/mmruns.py:")
        assert "DDP106" in trained.raised and (len(trained.logged), trained.files) == (0, [])


# A drop-in


def test_it_trains_as_mmengines_own_wrapper_does(on_ranks):
    """Seed 2, train_step, val_step and test_step: a drop-in for mmengine's wrapper in a real Runner.

    val_step and test_step call the inner module without gradient synchronisation.
    """

    def run(r, folder):
        from mmengine.model import MMDistributedDataParallel, is_model_wrapper

        both = []
        for wrapper in (PLAIN, r.CHECKED):
            r.torch.manual_seed(3)
            optim = {"accumulative_counts": 2, "clip_grad": {"max_norm": 1.0}}
            both.append(r.train(folder / wrapper["type"], r.Net(), wrapper, optim=optim, **r.validation()))
        model = r.CheckedMMDistributedDataParallel(r.Net(), device_ids=[0])
        assert isinstance(model, MMDistributedDataParallel) and is_model_wrapper(model)
        if r.dist.get_rank() == 0:  # alone: if there were a collective in it, this rank would wait for the other
            inputs, targets = data = r.torch.ones(4, 4), r.torch.ones(4, 1)
            for step in ("val_step", "test_step"):
                for batch in (list(data), {"inputs": inputs, "targets": targets}):
                    assert all(map(r.torch.equal, getattr(model, step)(batch), getattr(model.module, step)(batch)))
        r.dist.barrier()
        assert model.watch.step == 0
        return both

    for plain, checked in on_ranks(run):
        assert (plain.wrapper, checked.wrapper) == (PLAIN["type"], "CheckedMMDistributedDataParallel")
        assert plain.logged == checked.logged and len(checked.logged) == 4
        assert set(plain.logged[0]) == {"loss", "loss_main", "loss_parts"}
        for kind in ("weights", "checkpoint"):
            before, after = getattr(plain, kind), getattr(checked, kind)
            assert list(before) == list(after) and all(before[name].equal(after[name]) for name in before)
        assert (checked.raised, checked.findings, checked.warned) == ("", (), [])


def by_iterations(r, count, interval):
    checkpoint = {"type": "CheckpointHook", "by_epoch": False, "interval": interval}
    loop = {"type": "IterBasedTrainLoop", "max_iters": count}
    loader = r.loader("InfiniteSampler")
    return {"train_cfg": loop, "train_dataloader": loader, "default_hooks": {"checkpoint": checkpoint}}


def accumulating(r, *hooks):
    return {"hooks": [HOOK, *hooks], "optim": {"accumulative_counts": 2}, **r.validation()}


NO_BROADCAST = {"broadcast_buffers": False}
BF16 = {"type": "AmpOptimWrapper", "dtype": "bfloat16"}
# Steps, wrapper, and a function of `mmruns` that returns the model and further arguments of `train`.
HEALTHY = {
    "accumulation, an EMA hook and validation": (
        *(2, LOGGING, lambda r: (r.Net(), accumulating(r, {"type": "EMAHook"}))),
    ),
    "bfloat16": (10, LOGGING, lambda r: (r.Net(), {"optim": BF16, "epochs": 5})),
    "heads that take turns": (
        *(10, {**LOGGING, "find_unused_parameters": True}, lambda r: (r.Conditional(), {"epochs": 5})),
    ),
    "plain BatchNorm, brought together before saving": (
        *(2, {**PLAIN, **NO_BROADCAST}, lambda r: (batch_norm(r), accumulating(r, {"type": "SyncBuffersHook"}))),
    ),
    "SyncBN": (4, {**LOGGING, **NO_BROADCAST}, lambda r: (batch_norm(r), {"cfg": {"sync_bn": "torch"}})),
    "another runner": (4, LOGGING, lambda r: (r.Net(), {"runner_class": r.FlexibleRunner})),
    "compiled": (4, LOGGING, lambda r: (r.Net(), {"cfg": {"compile": {"backend": "eager"}}})),
}
SMOKE = "accumulation, an EMA hook and validation"


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.smoke] * (name == SMOKE)) for name in HEALTHY])
def test_a_healthy_run_raises_and_says_nothing(on_ranks, name):
    """Seed 3, converts BatchNorm to SyncBatchNorm when asked: then the statistics are one."""
    steps, wrapper, arguments = HEALTHY[name]

    def run(r, folder):
        model, options = arguments(r)
        with r.as_on_a_gpu():
            return r.train(folder, model, wrapper, **{"hooks": [HOOK], **options})

    ranks = on_ranks(run)
    for trained in ranks:
        assert (trained.raised, trained.findings, trained.warned) == ("", (), [])
        assert trained.wrapper == wrapper["type"]
    assert f"ddpcheck: {steps} steps watched, 0 findings" in ranks[0].log


# The strategy

LOG_HOOK = {**HOOK, "on_finding": "log"}


@pytest.mark.parametrize("flexible", [False, True], ids=["Runner", "FlexibleRunner with DDPStrategy"])
@pytest.mark.parametrize("checked", [False, True], ids=["plain wrapper", "checked wrapper"])
def test_statistics_of_one_rank_in_the_checkpoint_are_told(on_ranks, flexible, checked):
    """Seed 3, broadcast_buffers=False plus unsynchronised BatchNorm: the checkpoint keeps rank 0's statistics.

    And seed 1, one rank writes a checkpoint file.
    """
    wrapper = {**(LOGGING if checked else PLAIN), **NO_BROADCAST}

    def run(r, folder):
        options = {"runner_class": r.FlexibleRunner} if flexible else {}
        return r.train(folder, batch_norm(r), wrapper, hooks=[LOG_HOOK], **options)

    first, second = trained = on_ranks(run)
    drift = finding_of(trained, "DDP214")
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
    assert second.files == [], "the master saves, and no other rank"


def test_statistics_that_the_broadcast_discards_are_told_as_a_warning(on_ranks):
    """Seed 3, with broadcast_buffers=True rank 0's statistics win."""
    first, second = trained = on_ranks(lambda r, folder: r.train(folder, batch_norm(r), r.CHECKED, hooks=[HOOK]))
    assert finding_of(trained, "DDP215").subjects == STATISTICS
    assert len(first.warned) == 1 and second.warned == [] and first.raised == ""


def test_a_checkpoint_by_iterations_is_compared_before_it_is_saved(on_ranks):
    """Seed 3, saves a checkpoint: also one in the middle of an epoch."""

    def run(r, folder):
        wrapper = {**PLAIN, **NO_BROADCAST}
        return r.train(folder, batch_norm(r), wrapper, hooks=[LOG_HOOK], **by_iterations(r, 5, 3))

    trained = on_ranks(run)
    assert "after step 2:" in finding_of(trained, "DDP214").message
    assert trained[0].log.index("DDP214") < trained[0].log.index("Saving checkpoint at 3 iterations")
    assert trained[0].files == ["iter_3.pth", "iter_5.pth"]


def test_what_differs_before_training_is_told(on_ranks):
    """Seed 3, wraps the model: what changes on one rank afterwards is found before the first step."""

    def run(r, folder):
        class Later(r.Hook):
            def before_train(self, runner):
                with r.torch.no_grad():
                    runner.model.module.head.bias.add_(r.dist.get_rank())

        return r.train(folder, r.Net(), PLAIN, hooks=[Later(), HOOK])

    for trained in on_ranks(run):
        assert trained.raised.startswith("FindingsError: DDP208 ") and "head.bias does not have" in trained.raised
        assert len(trained.logged) == 0


def test_setting_a_run_up(on_ranks):
    """Seed 3, initialises the process group once, wraps unless wrapped already, takes the user's own wrapper class.

    That may be one that wraps each part of the model. And seed 3, an unknown kind of SyncBatchNorm is an error that
    names the choices.
    """

    def run(r, folder):
        wrapped = r.CheckedMMDistributedDataParallel(r.Net(), on_finding="log")
        own, separate = {**LOGGING, "type": "Own"}, {"type": "MMSeparateDistributedDataParallel", "device_ids": None}
        return (
            r.train(folder / "wrapped", wrapped, None, hooks=[LOG_HOOK]),
            r.train(folder / "own", r.Faulty(rarely=False), own, hooks=[LOG_HOOK]),
            r.train(folder / "separate", r.Apart(), separate, hooks=[LOG_HOOK]),
            r.train(folder / "unknown", batch_norm(r), LOGGING, cfg={"sync_bn": "apex"}),
        )

    for wrapped, own, separate, unknown in on_ranks(run):
        assert wrapped.same_group and wrapped.wrapper == "CheckedMMDistributedDataParallel"
        assert "head.weight" in wrapped.weights, "wrapped once"
        assert own.wrapper == "Own" and "DDP101" in [finding.code for finding in own.findings]
        assert [(f.code, f.subjects) for f in separate.findings] == [("DDP101", ("1.weight", "1.bias"))]
        assert unknown.raised == 'ValueError: sync_bn should be "torch" or "mmcv", but got apex'


@pytest.mark.ddp(world_size=1)
def test_a_run_without_ddp_is_told_that_nothing_is_watched(on_ranks):
    (trained,) = on_ranks(lambda r, folder: r.train(folder, r.Net(), None, hooks=[HOOK], launcher="none"))
    assert trained.raised == "" and "no DistributedDataParallel in the model" in trained.log


def test_a_function_travels_through_a_config_as_text_and_another_choice_is_refused(on_ranks):
    def run(r, folder):
        from ddpcheck.findings.errors import UsageError

        for refuse in (r.DDPCheckHook, partial(r.CheckedMMDistributedDataParallel, r.Net())):
            with pytest.raises(UsageError, match="on_finding is 'raise', 'warn', 'log' or a function"):
                refuse(on_finding="print")
        with pytest.raises(UsageError, match=r"names no function: 'no\.such:function'"):
            r.DDPCheckHook(on_finding="no.such:function")
        by_name = {"on_finding": "ddpcheck.integrations.mmengine:log_finding"}
        wrapper = {**LOGGING, **by_name, **NO_BROADCAST}
        return r.train(folder, batch_norm(r), wrapper, hooks=[{**HOOK, **by_name}])

    assert finding_of(on_ranks(run), "DDP214").subjects == STATISTICS


# The example


NEEDS_DIGITS = needs("sklearn")


def train_example(ddp_world, folder, name):
    """Train by a config of `examples/mmengine`, in its own folder; returns the log."""

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


@NEEDS_DIGITS
def test_the_plain_config_leaves_one_rank_waiting(ddp_world, tmp_path):
    with pytest.raises(DDPCheckError, match="rank 0") as caught:
        train_example(ddp_world, tmp_path, "digits")
    said = str(caught.value) + "".join(failure.message for failure in getattr(caught.value, "failures", ()))
    assert "Expected to have finished reduction" in said or "rank 0 is in backward" in said


@NEEDS_DIGITS
def test_the_checked_config_trains_once_it_is_repaired(ddp_world, tmp_path):
    log, _ = train_example(ddp_world, tmp_path, "digits_repaired")  # rank 0 writes it; another may read half of it
    assert "- ERROR -" not in log and "ddpcheck: 20 steps watched, 0 findings" in log


@NEEDS_DIGITS
@pytest.mark.launchers
def test_torchrun_of_the_checked_config_says_what_the_guide_shows(tmp_path):
    """Seed 2, a drop-in on an unmodified config: only the wrapper is another."""
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
