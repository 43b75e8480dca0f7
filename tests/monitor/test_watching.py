"""The shared core of the wrapper and the integrations, on real ranks: comparisons, attaching and leaving.

What it finds in parameters is in test_watching_parameters.py, and in the loop in test_watching_passes.py.
"""

import contextlib
import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddpcheck
from ddpcheck import CheckedDistributedDataParallel, FindingsError
from tests.monitor.loops import Net, batch, checked, codes, short, train

# Ranks are shared: what a test wraps and watches is its own. They import what they test once.
pytestmark = pytest.mark.ddp(world_size=2, reuse="module", preload=["ddpcheck.monitor.wrapper"])
DDP = nn.parallel.DistributedDataParallel

# Comparisons


def summed(_state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


UNUSED = {"find_unused_parameters": True, "detect_anomalous_params": False}


@pytest.mark.parametrize(("way", "options"), [("whole", {}), (short(step=0), UNUSED)], ids=["all", "more later"])
def test_a_communication_hook_that_does_not_average_is_found(way, options):
    """Seed 4 (mmcv dist_utils): the manual all-reduce is a second, independent path for gradients to compare with."""
    model, findings = checked(check_parity_every=1, **options)
    model.register_comm_hook(None, summed)
    train(model, 2, way=way)
    assert codes(findings) == ["DDP303"]


def normed():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def test_buffers_that_drift_are_found_and_said_to_be_lost_in_a_checkpoint(rank):
    model, findings = checked(normed(), broadcast_buffers=False, check_consistency=2)
    for _ in range(3):
        model(batch() + rank).sum().backward()
    assert codes(findings) == ["DDP214"]
    assert "a checkpoint keeps rank 0's" in findings[0].message


def test_rules_can_be_ignored(rank):
    model = CheckedDistributedDataParallel(normed(), check_consistency=2, ignore=["DDP215"], on_finding="raise")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ddpcheck.FindingWarning)
        for _ in range(3):
            model(batch() + rank).sum().backward()
    with pytest.raises(ddpcheck.UsageError, match="ignore is a list"):
        CheckedDistributedDataParallel(Net(), ignore="DDP215")


def test_compare_can_be_called_at_any_time(rank):
    model = DDP(Net())
    with ddpcheck.watch(model, on_finding="warn") as watch:
        train(model, 2)
        assert watch.compare() == []
        with torch.no_grad():
            model.module.head.bias.add_(rank)
        assert codes(watch.compare()) == ["DDP306"]


# Ranks that stop, or close


@pytest.mark.slow
def test_ranks_that_close_one_after_the_other_judge_together(rank):
    """Check that the last write of a leaving rank does not replace its report on close."""
    for _ in range(12):
        model = DDP(Net(), find_unused_parameters=True)
        with ddpcheck.watch(model, on_finding="warn") as watch:
            train(model, 5, way=short(rank=0))
        assert watch.findings == ()


@pytest.mark.slow
def test_ranks_that_do_not_come_to_a_meeting_are_named_and_delay_no_rank_for_long(rank):
    model = DDP(Net())
    if rank == 1:
        train(model, 4)
        return
    with pytest.warns(UserWarning, match="rank 1 did not answer within 0.5 s"), ddpcheck.watch(model, timeout=0.5):
        train(model, 4)


@pytest.mark.parametrize("failing", [True, False])
def test_a_comparison_does_not_wait_for_a_rank_that_has_stopped(rank, failing):
    model = DDP(Net())
    watch = ddpcheck.watch(model, timeout=600)  # which the test does not have
    train(model, 3)
    if rank == 1:
        with contextlib.suppress(ValueError), watch:
            if failing:
                raise ValueError("no such file")
        return
    reason = r"stopped with ValueError at .*test_watching.py:\d+" if failing else "closed its watch"
    with pytest.warns(UserWarning, match=rf"rank 1 has {reason}; rank 0 met no other rank at .*test_watching.py"):
        assert watch.compare() == []


# Attaching and leaving


def test_a_forward_pass_that_is_called_by_its_name_is_a_step_as_well():
    ways, model = ["whole", "whole", "short"], DDP(Net())
    with ddpcheck.watch(model, on_finding=lambda finding: None) as watch:
        for way in ways:
            model.forward(torch.ones(3, 4), way).sum().backward()
    assert watch.step == len(ways)
    assert [(finding.code, finding.steps) for finding in watch.findings] == [("DDP105", (2,))]


@pytest.mark.ddp(world_size=2, reuse="test")  # on ranks on which no watch of another test may still be alive
def test_watch_attaches_to_a_plain_wrapper_and_leaves_it_as_it_was():
    model = DDP(Net())
    hooks = (len(model._forward_hooks), len(model._forward_pre_hooks))
    methods = (DDP.no_sync, DDP._pre_forward)
    with pytest.raises(FindingsError), ddpcheck.watch(model) as watch:
        train(model, 2, way="short")
    assert codes(watch.findings) == ["DDP101"]
    assert (len(model._forward_hooks), len(model._forward_pre_hooks)) == hooks
    assert (DDP.no_sync, DDP._pre_forward) == methods
    train(model, 2)
    assert watch.report().exit_code() == 1


def test_a_watched_wrapper_can_be_pickled_and_copied():
    model = DDP(Net())
    with ddpcheck.watch(model):
        train(model, 2)
        for duplicate in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            train(duplicate, 2)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_a_watch_without_a_reference_continues_if_training_continues_without_the_wrapper(compiled):
    module, findings = Net(), []
    model = DDP(torch.compile(module, backend="eager") if compiled else module)
    ddpcheck.watch(model, on_finding=findings.append)
    train(model, 2)
    del model
    gc.collect()
    train(module, 5)
    assert codes(findings) == ["DDP501"]


def test_a_module_that_is_trained_alone_after_the_watch_was_closed_is_not_watched():
    model, findings = DDP(Net()), []
    with ddpcheck.watch(model, on_finding=findings.append):
        train(model, 2)
    model = model.module
    train(model, 5)
    assert findings == [] and pickle.loads(pickle.dumps(model)) and "watches" not in str(vars(model))


@pytest.mark.ddp(world_size=2, reuse="test")
def test_a_watched_module_and_its_watch_are_freed_and_leave_one_hook_that_does_nothing():
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    def hooks():
        return len(_global_optimizer_pre_hooks) + len(_global_optimizer_post_hooks)

    before, references = hooks(), []
    for _ in range(3):
        module = Net()
        for _ in range(2):  # wrapped again
            model = CheckedDistributedDataParallel(module)
            train(model, 2)
            references += [weakref.ref(model), weakref.ref(model.watch)]
        references.append(weakref.ref(module))
        pickle.loads(pickle.dumps(module))
        copy.deepcopy(module)
    del module, model
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    assert hooks() == before + 2  # before a step, and after it: the garbage collector must not take them off


# Misuse and failures


def test_what_is_no_ddp_is_refused():
    with pytest.raises(ddpcheck.UsageError, match="watch needs a DistributedDataParallel"):
        ddpcheck.watch(Net())
    with pytest.raises(ddpcheck.UsageError, match="on_finding"):
        ddpcheck.watch(DDP(Net()), on_finding="shout")
    with pytest.raises(ddpcheck.UsageError, match="check_parity_every"):
        ddpcheck.watch(DDP(Net()), check_parity_every=-1)


def test_a_recorder_that_fails_ends_itself_and_the_watch_continues(monkeypatch, recwarn):
    from ddpcheck.record.loop.wrapper_checks import LocalSgdTracker
    from ddpcheck.record.loss.micro_batches import MicroBatches

    def fails(*_arguments, **_named):
        raise ZeroDivisionError("made to fail. It is for a test")

    monkeypatch.setattr(MicroBatches, "_is_accumulating", fails)
    monkeypatch.setattr(LocalSgdTracker, "_add_fingerprint", fails)
    model = DDP(Net())
    with ddpcheck.watch(model, on_finding="warn", check_consistency_every=1) as watch:
        train(model, 3, way="detached")
    (warning,) = [str(each.message) for each in recwarn if "made to fail" in str(each.message)]
    assert warning.startswith("ddpcheck: loss: not watched from step ")
    assert warning.endswith(" on: ZeroDivisionError: made to fail")
    assert codes(watch.findings) == ["DDP103"]
    report = watch.report()
    assert [(check.name, check.status) for check in report.checks] == [("loss", "error")]
    assert report.summary.startswith("loss: not watched to the end; 1 finding")


def test_what_a_function_that_is_told_of_findings_raises_is_the_users():
    def refuse(_finding):
        raise ZeroDivisionError("of the user")

    model = DDP(Net())
    with pytest.raises(ZeroDivisionError, match="of the user"), ddpcheck.watch(model, on_finding=refuse):
        train(model, 3, way="detached")
