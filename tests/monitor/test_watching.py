"""The shared core of the wrapper and the integrations, on real ranks under the real reducer."""

import contextlib
import copy
import gc
import linecache
import math
import pickle
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import ddpcheck
from ddpcheck import CheckedDistributedDataParallel, FindingsError

# Ranks are shared: what a test wraps and watches is its own. They import what they test once.
pytestmark = pytest.mark.ddp(world_size=2, reuse="module", preload=["ddpcheck.monitor.wrapper"])


class Net(nn.Module):
    """Takes a way through itself that the caller chooses."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 2)
        self.spare = nn.Linear(8, 2)

    def forward(self, x, way="whole"):
        h = torch.relu(self.body(x))
        if way == "short":
            return self.head(h)
        if way == "detached":
            return self.head(h) + self.spare(h).detach()
        if way == "both":
            return {"main": self.head(h), "spare": self.spare(h)}
        return self.head(h) + self.spare(h)


def train(model, steps, *, way=lambda step: "whole", loss=None, optimizer=None, begin=0):
    """Steps of training; the loss is the sum of what forward returns unless `loss` tells otherwise."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(begin, begin + steps):
        optimizer.zero_grad()
        out = model(torch.randn(3, 4, generator=generator), way(step))
        (loss(out) if loss else out.square().mean()).backward()
        optimizer.step()


def found(model):
    return [(finding.code, finding.subjects, finding.ranks, finding.steps) for finding in model.findings]


def the_same(model):
    """Gradients and parameters are the same on both ranks."""
    for parameter in model.parameters():
        ddpcheck.assert_same_on_all_ranks(parameter)
        if parameter.grad is not None:
            ddpcheck.assert_same_on_all_ranks(parameter.grad)


SPARE = ("spare.weight", "spare.bias")


# Parameters: a broken loop and a healthy one


def test_a_parameter_that_no_operation_reads_is_named_in_the_first_backward_pass_on_every_rank():
    model = CheckedDistributedDataParallel(Net())
    with pytest.raises(FindingsError, match="No operation of the forward pass reads") as raised:
        train(model, 3, way=lambda step: "short")
    assert found(model) == [("DDP101", SPARE, (), (0,))]
    assert raised.value.findings == model.findings
    assert model.findings[0].location.path.endswith("test_watching.py")


def test_a_forward_pass_that_is_called_by_its_name_is_a_step_as_well():
    ways, model = ["whole", "whole", "short"], nn.parallel.DistributedDataParallel(Net())
    entered = nn.parallel.DistributedDataParallel._pre_forward  # of torch
    with ddpcheck.watch(model, on_finding=lambda finding: None) as watch:
        for way in ways:
            model.forward(torch.ones(3, 4), way).sum().backward()
    assert watch.step == len(ways) and nn.parallel.DistributedDataParallel._pre_forward is entered
    assert [(one.code, one.steps) for one in watch.findings] == [("DDP105", (2,))]


def test_what_is_raised_does_not_show_how_it_was_found():
    model = CheckedDistributedDataParallel(Net())
    with pytest.raises(FindingsError) as raised:
        train(model, 1, way=lambda step: "short")
    assert sum("ddpcheck/record" in str(entry.path) for entry in raised.traceback) == 1
    assert not any("ddpcheck/monitor" in str(entry.path) for entry in raised.traceback)


def test_a_detached_path_is_told_with_its_line():
    model = CheckedDistributedDataParallel(Net())
    with pytest.raises(FindingsError, match=r"cut by detach\(\) at .*test_watching.py"):
        train(model, 3, way=lambda step: "detached")
    assert found(model) == [("DDP103", SPARE, (), (0,))]


@pytest.mark.slow
def test_a_path_that_is_cut_before_a_loss_that_forward_returns_is_told_with_the_cut():
    class WithLoss(Net):
        def forward(self, x, way):
            return super().forward(x, way).sum()

    model = CheckedDistributedDataParallel(WithLoss())
    with pytest.raises(FindingsError, match=r"cut by detach\(\) at .*test_watching.py"):
        train(model, 3, way=lambda step: "detached", loss=lambda out: out)
    assert found(model) == [("DDP103", SPARE, (), (0,))]


@pytest.mark.slow
def test_an_output_that_is_cut_off_is_told_with_the_cut_beside_one_that_is_not():
    class TwoOutputs(Net):
        def forward(self, x, way):
            h = torch.relu(self.body(x))
            with torch.no_grad():
                spare = self.spare(h)
            return self.head(h), spare

    model = CheckedDistributedDataParallel(TwoOutputs())
    with pytest.raises(FindingsError, match=r"cut by torch.no_grad\(\) at .*test_watching.py"):
        train(model, 3, loss=lambda outputs: outputs[0].sum() + outputs[1].sum())
    assert found(model) == [("DDP103", SPARE, (), (0,))]


def test_an_output_that_is_not_in_the_loss_is_told_with_the_line_of_its_last_operation():
    model = CheckedDistributedDataParallel(Net())
    with pytest.raises(FindingsError, match="does not reach the loss"):
        train(model, 3, way=lambda step: "both", loss=lambda out: out["main"].sum())
    assert found(model) == [("DDP102", SPARE, (), (0,))]


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_parameter_missing_on_one_rank_raises_on_both_and_hangs_neither(rank, culprit):
    model = CheckedDistributedDataParallel(Net())
    with pytest.raises(FindingsError):
        train(model, 5, way=lambda step: "short" if rank == culprit and step == 2 else "whole")
    assert found(model) == [("DDP104", SPARE, (culprit,), (2,))]
    assert "there no operation of the forward pass reads them" in model.findings[0].evidence


@pytest.mark.slow
def test_a_parameter_missing_in_one_step_is_told_apart_from_one_that_never_takes_part():
    model = CheckedDistributedDataParallel(Net())
    with pytest.raises(FindingsError):
        train(model, 5, way=lambda step: "short" if step == 3 else "whole")
    assert found(model) == [("DDP105", SPARE, (), (3,))]


@pytest.mark.slow
def test_training_goes_on_under_warn_with_zeros_in_the_place_of_what_is_missing(rank):
    model = CheckedDistributedDataParallel(Net(), on_finding="warn", check_parity_every=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, 40, way=lambda step: "short" if rank == 1 and step % 2 else "whole")
    assert found(model) == [("DDP104", SPARE, (1,), (1,))]
    ours = [w for w in caught if issubclass(w.category, ddpcheck.FindingWarning)]
    assert len(ours) == (1 if rank == 0 else 0)
    the_same(model)


def test_a_function_gets_each_cause_once_on_every_rank(rank):
    told = []
    model = CheckedDistributedDataParallel(Net(), on_finding=told.append)
    train(model, 6, way=lambda step: "short" if rank == 1 else "whole")
    assert [finding.code for finding in told] == ["DDP104"]
    the_same(model)


def test_a_rank_whose_fault_comes_late_is_heard_at_the_next_question(rank):
    told = []
    model = CheckedDistributedDataParallel(Net(), on_finding=told.append)
    train(model, 60, way=lambda step: "short" if rank == 1 and step == 41 else "whole")
    assert [(finding.code, finding.steps) for finding in told] == [("DDP104", (41,))]


class UnregisteredTensor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.extra = [nn.Linear(4, 4)]

    def forward(self, x, way="whole"):
        return self.extra[0](self.layer(x))


def test_layers_in_a_list_are_told_in_the_first_step():
    torch.manual_seed(0)
    model = CheckedDistributedDataParallel(UnregisteredTensor())
    with pytest.raises(FindingsError):
        train(model, 2)
    assert found(model) == [("DDP106", ("extra[0].weight", "extra[0].bias"), (), ())]


class Gated(nn.Module):
    def __init__(self, gate):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.branch = nn.Linear(4, 4)
        self.gate = gate

    def forward(self, x, way="whole"):
        return self.layer(x) + self.gate * self.branch(x)


def test_a_gradient_that_is_always_zero_is_a_warning_and_a_zero_initialised_gate_is_none():
    closed = CheckedDistributedDataParallel(Gated(0.0))
    train(closed, 10)
    assert found(closed) == [("DDP107", ("branch.weight", "branch.bias"), (), ())]
    learnt = CheckedDistributedDataParallel(Gated(nn.Parameter(torch.zeros(()))))
    train(learnt, 10)
    assert found(learnt) == []


@pytest.mark.slow
def test_a_gradient_that_is_zero_while_nothing_moves_is_not_judged():
    model = CheckedDistributedDataParallel(Gated(nn.Parameter(torch.zeros(()))))
    train(model, 10, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    assert found(model) == []


class Swallow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return x * weight.detach().sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Swallowing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x, way="whole"):
        return Swallow.apply(self.layer(x), self.scale)


def test_a_function_that_returns_none_for_a_gradient_is_named():
    model = CheckedDistributedDataParallel(Swallowing())
    with pytest.raises(FindingsError, match=r"Swallow.backward\(\)"):
        train(model, 2)
    assert found(model) == [("DDP108", ("scale",), (), ())]


class LayerDrop(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, x, way="whole"):
        for block in self.blocks:
            if torch.rand(()) > 0.3:
                x = x + block(x)
        return x


def test_blocks_that_are_left_out_at_random_are_one_cause(rank):
    torch.manual_seed(rank + 1)
    told = []
    model = CheckedDistributedDataParallel(LayerDrop(), on_finding=told.append)
    train(model, 20)
    codes = [finding.code for finding in told]  # in the first step, what both left out has not been seen to be used
    assert "DDP104" in codes
    assert len(codes) == len(set(codes)) <= 3
    the_same(model)


def test_what_find_unused_parameters_allows_is_judged_after_some_steps_only(rank):
    never = CheckedDistributedDataParallel(Net(), find_unused_parameters=True)
    train(never, 10, way=lambda step: "short")
    assert found(never) == [("DDP101", SPARE, (), ())]
    assert never.findings[0].severity is ddpcheck.Severity.WARNING
    sometimes = CheckedDistributedDataParallel(Net(), find_unused_parameters=True)
    train(sometimes, 10, way=lambda step: "short" if (step + rank) % 2 else "whole")
    assert found(sometimes) == []
    always = CheckedDistributedDataParallel(Net(), find_unused_parameters=True)
    train(always, 10)
    assert [finding.code for finding in always.findings] == ["DDP109"]


def test_an_output_that_never_reaches_the_loss_is_told_under_find_unused_parameters_too():
    model = CheckedDistributedDataParallel(Net(), find_unused_parameters=True)
    train(model, 10, way=lambda step: "both", loss=lambda out: out["main"].sum())
    assert found(model) == [("DDP102", SPARE, (), ())]


def test_a_static_graph_does_not_allow_for_an_output_that_is_not_in_the_loss():
    model = CheckedDistributedDataParallel(Net(), static_graph=True, on_finding="warn")
    train(model, 10, way=lambda step: "both", loss=lambda out: out["main"].sum())
    assert [(code, subjects) for code, subjects, *_ in found(model)] == [("DDP102", SPARE)]
    assert model.findings[0].severity is ddpcheck.Severity.ERROR  # plain DDP raises in the second step
    unused = CheckedDistributedDataParallel(Net(), static_graph=True, on_finding="warn")
    train(unused, 10, way=lambda step: "short")
    assert [(f.code, f.severity.value) for f in unused.findings] == [("DDP101", "warning")]


def test_a_static_graph_that_changes_is_told():
    told = []
    model = CheckedDistributedDataParallel(Net(), static_graph=True, on_finding=told.append)
    train(model, 8, way=lambda step: "short" if step == 5 else "whole")
    assert [(finding.code, finding.steps) for finding in told] == [("DDP513", (5,))]
    healthy = CheckedDistributedDataParallel(Net(), static_graph=True)
    train(healthy, 8)
    assert found(healthy) == []


def test_a_frozen_parameter_is_told_as_what_it_is(rank):
    model = CheckedDistributedDataParallel(Net())
    train(model, 1)
    model.module.spare.bias.requires_grad_(False)
    with pytest.raises(FindingsError, match="frozen after wrapping"):
        train(model, 2)
    assert [(f.code, f.subjects) for f in model.findings] == [("DDP503", ("spare.bias",))]


@pytest.mark.parametrize("consistency", [0, 1])
@pytest.mark.parametrize("begin", [0, 3])
def test_a_layer_added_after_wrapping_is_told_once_with_its_name_and_not_by_what_comes_of_it(consistency, begin):
    told = []
    model = CheckedDistributedDataParallel(Net(), check_consistency=consistency, on_finding=told.append)
    train(model, begin)
    model.module.spare = nn.Sequential(model.module.spare, nn.Linear(2, 2))  # the old one has another name now
    train(model, 8)
    assert [(f.code, set(f.subjects)) for f in told] == [("DDP503", {"spare.1.weight", "spare.1.bias"})]
    assert "spare.1.weight" in told[0].message


@pytest.mark.slow
def test_what_no_operation_reads_in_the_first_steps_is_not_said_to_be_of_no_use():
    told = []
    model = CheckedDistributedDataParallel(Net(), on_finding=told.append)
    train(model, 6, way=lambda step: "short" if step == 0 else "whole")
    assert [f.code for f in told] == ["DDP101"]
    assert told[0].message.endswith("in step 0.") and told[0].fix.startswith("If other steps read it")


def test_a_checkpoint_that_one_rank_has_loaded_is_not_told_of_its_forward_pass(rank):
    torch.manual_seed(rank)
    told = []
    model = CheckedDistributedDataParallel(Net(), check_consistency=1, on_finding=told.append)
    if rank == 1:
        model.module.load_state_dict(Net().state_dict())
    train(model, 3)
    assert [(f.code, f.ranks) for f in told] == [("DDP515", (1,))]
    assert (
        "were changed on rank 1 after the wrapper" in told[0].message and "forward or backward" not in told[0].message
    )


@pytest.mark.slow
def test_a_checkpoint_that_every_rank_loads_is_no_finding():
    with silent() as wrap:
        model = wrap(Net())
        torch.manual_seed(0)
        model.load_state_dict(Net().state_dict())
        train(model, 4)


# The loop


def line_of(finding):
    """The text of the line that a finding names."""
    return linecache.getline(str(Path(__file__).parents[2] / finding.location.path), finding.location.line)


def test_a_second_backward_pass_without_a_forward_of_its_own_is_told():
    told = []
    model = CheckedDistributedDataParallel(Net(), on_finding=told.append)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        first, second = model(torch.randn(3, 4)), model(torch.randn(3, 4))
        first.sum().backward()
        second.sum().backward()
        optimizer.step()
    assert [finding.code for finding in told] == ["DDP509"]
    assert "second.sum().backward()" in line_of(told[0])
    assert "the step runs forward, forward, backward, backward" in told[0].evidence


@pytest.mark.parametrize("unused", [False, True])
def test_a_second_backward_pass_through_another_output_is_told_and_no_parameter_of_it(unused):
    told = []
    model = CheckedDistributedDataParallel(Net(), on_finding=told.append, find_unused_parameters=unused)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(1 if unused else 10):  # in the next step DDP raises
        optimizer.zero_grad()
        out = model(torch.randn(3, 4), "both")
        out["main"].sum().backward(retain_graph=True)
        out["spare"].sum().backward()
        optimizer.step()
    assert [finding.code for finding in told] == ["DDP509"]
    assert 'out["spare"].sum().backward()' in line_of(told[0])


@pytest.mark.slow
def test_of_three_backward_passes_the_one_that_comes_too_late_is_told_alone():
    class Three(Net):
        def __init__(self):
            super().__init__()
            self.alone = nn.Linear(4, 2)

        def forward(self, x):
            return {"alone": self.alone(x), **super().forward(x, "both")}

    told = []
    model = CheckedDistributedDataParallel(Three(), on_finding=told.append)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = model(torch.randn(3, 4))
    out["main"].sum().backward(retain_graph=True)
    out["alone"].sum().backward()
    out["spare"].sum().backward()
    optimizer.step()
    assert [finding.code for finding in told] == ["DDP509"]


@pytest.mark.slow
def test_an_output_that_is_not_in_the_loss_is_told_though_the_graph_is_kept():
    told = []
    model = CheckedDistributedDataParallel(Net(), on_finding=told.append)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(3, 4), "both")["main"].sum().backward(retain_graph=True)
        optimizer.step()
    assert [(finding.code, finding.subjects) for finding in told] == [("DDP102", SPARE)]


@pytest.mark.slow
def test_second_backward_passes_of_which_no_step_uses_anything_are_no_finding():
    with silent() as wrap:
        model = wrap(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            out, x = model(torch.randn(3, 4), "both"), torch.randn(3, 4)
            torch.autograd.grad(out["main"].sum(), model.module.body.weight, retain_graph=True)
            (out["main"].sum() + out["spare"].sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            with model.no_sync():
                out = model(x, "both")
                out["main"].sum().backward(retain_graph=True)
                out["spare"].sum().backward()
            out = model(x, "both")
            (out["main"].sum() + out["spare"].sum()).backward(retain_graph=True)
            optimizer.zero_grad()
            out["main"].sum().backward()  # looked at
            optimizer.zero_grad()
            train(model, 1, optimizer=optimizer)


def test_a_no_sync_that_is_never_entered_is_told_with_its_line():
    told = []
    model = CheckedDistributedDataParallel(Net(), on_finding=told.append)
    for _ in range(4):
        model.no_sync()
        train(model, 1)
    assert [finding.code for finding in told] == ["DDP502"]
    assert told[0].location.path.endswith("test_watching.py")


@pytest.mark.slow
def test_a_no_sync_around_the_backward_pass_alone_is_told():
    told = []
    model = CheckedDistributedDataParallel(Net(), on_finding=told.append)
    for _ in range(3):
        loss = model(torch.randn(3, 4)).sum()
        with model.no_sync():
            loss.backward()
    assert [finding.code for finding in told] == ["DDP502"]
    assert "model.no_sync()" in line_of(told[0])


@pytest.mark.parametrize(("code", "way"), [("DDP502", "no_sync"), ("DDP501", "inner module")])
def test_an_optimizer_that_only_gets_gradients_of_its_own_rank_is_told(code, way):
    told = []
    model = CheckedDistributedDataParallel(Net(), on_finding=told.append)
    with model.no_sync() if way == "no_sync" else contextlib.nullcontext():
        train(model if way == "no_sync" else model.module, 5)
    assert [finding.code for finding in told] == [code]


def accumulate(model, windows, *, synchronises, micro=4, late=False, optimizer=None, begin=0):
    """Accumulation with `require_backward_grad_sync` set by hand: before each forward, or (`late`) after it."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(begin, windows * micro):
        if not late:
            model.require_backward_grad_sync = synchronises(index)
        loss = model(torch.randn(3, 4)).square().mean() / micro
        if late:
            model.require_backward_grad_sync = synchronises(index)
        loss.backward()
        if index % micro == micro - 1:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("late", "synchronises"),
    [(True, lambda i: i % 4 == 3), (False, lambda i: i % 4 == 0), (False, lambda i: i % 4 == 2)],
    ids=["set after forward", "the first one", "the last but one"],
)
def test_a_last_micro_batch_that_is_not_synchronised_is_told(late, synchronises):
    torch.manual_seed(dist.get_rank())
    told = []
    model = CheckedDistributedDataParallel(Net(), on_finding=told.append)
    accumulate(model, 3, synchronises=synchronises, late=late)
    assert [(f.code, f.ranks, f.severity.value) for f in told] == [("DDP502", (), "error")]
    assert told[0].location.path.endswith("test_watching.py")


def test_a_last_micro_batch_that_is_not_synchronised_on_one_rank_is_told_with_the_rank(rank):
    told = []
    model = CheckedDistributedDataParallel(Net(), on_finding=told.append)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
        if rank:
            with model.no_sync():
                model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    assert [(f.code, f.ranks) for f in told] == [("DDP502", (1,))]


@pytest.mark.slow
def test_one_step_under_no_sync_among_others_is_told():
    told = []
    model = CheckedDistributedDataParallel(Net(), on_finding=told.append)
    for step in range(6):
        with model.no_sync() if step == 3 else contextlib.nullcontext():
            train(model, 1, begin=step)
    assert [finding.code for finding in told] == ["DDP502"]


@pytest.mark.slow
def test_an_unfinished_window_that_is_stepped_on_at_the_end_is_told_when_the_watch_is_closed():
    model = nn.parallel.DistributedDataParallel(Net())
    told = []
    with ddpcheck.watch(model, on_finding=told.append):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulate(model, 2, synchronises=lambda i: i % 4 == 3, optimizer=optimizer)
        with model.no_sync():
            model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        assert told == []
    assert [finding.code for finding in told] == ["DDP502"]


def test_an_optimizer_whose_closure_runs_passes_that_are_not_synchronised_is_told():
    told = []
    model = CheckedDistributedDataParallel(Net(), on_finding=told.append)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure(synchronises):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        with contextlib.nullcontext() if synchronises else model.no_sync():
            loss = model(torch.randn(3, 4)).square().mean()
            loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(lambda: closure(True))
    assert told == []
    for _ in range(2):
        optimizer.step(lambda: closure(False))
    assert [finding.code for finding in told] == ["DDP502"]


class Empty(Net):
    """Returns a loss that hangs on nothing where there is nothing in the batch."""

    def forward(self, x, way="whole"):
        if len(x) == 0:
            return (
                {"loss": torch.zeros((), requires_grad=True)} if way == "dict" else torch.zeros((), requires_grad=True)
            )
        loss = super().forward(x).square().mean()
        return {"loss": loss} if way == "dict" else loss


@pytest.mark.parametrize("way", ["whole", "dict"])
def test_a_loss_that_hangs_on_nothing_on_one_rank_is_told_before_the_others_wait_for_it(rank, way):
    model = CheckedDistributedDataParallel(Empty())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(FindingsError):
        for step in range(4):
            optimizer.zero_grad()
            out = model(torch.randn(0 if rank == 1 and step == 2 else 3, 4), way)
            (out["loss"] * 1.0 if way == "dict" else out).backward()
            optimizer.step()
    assert [(code, ranks, steps) for code, _, ranks, steps in found(model)] == [("DDP104", (1,), (2,))]
    assert len(model.findings[0].subjects) == 6
    assert model.findings[0].message.startswith("No parameter has a part in the loss of rank 1 in step 2")


def test_a_cast_after_wrapping_that_loses_the_hooks_of_ddp_is_told():
    told = []
    model = CheckedDistributedDataParallel(Net(), on_finding=told.append)
    model.double().float()
    train(model, 2)
    assert [finding.code for finding in told] == ["DDP503"]


@pytest.mark.slow
def test_derivatives_inside_of_the_forward_pass_are_no_gradients_of_the_step():
    class Adapting(Net):
        def forward(self, x, way="whole"):
            inner = super().forward(x).square().mean()
            (slope,) = torch.autograd.grad(inner, self.head.weight, create_graph=True)
            return super().forward(x) + (self.head.weight - 0.1 * slope).sum()

    with silent() as wrap:
        train(wrap(Adapting()), 5)


# Healthy programs of many kinds, on which nothing may be said


@contextlib.contextmanager
def silent(**settings):
    """A function that wraps a module, all checks on; in the end nothing has been found, and no warning was shown."""
    made = []

    def wrap(module, **more):
        made.append(
            CheckedDistributedDataParallel(module, check_consistency=2, check_parity_every=2, **{**settings, **more})
        )
        return made[-1]

    with warnings.catch_warnings():
        warnings.simplefilter("error", ddpcheck.FindingWarning)
        yield wrap
    for model in made:
        assert found(model) == []
        the_same(model)


def test_an_ordinary_loop_is_silent():
    with silent() as wrap:
        train(wrap(Net()), 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 0.0001},
        {"static_graph": True},
        {"broadcast_buffers": False},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    ],
    ids=str,
)
def test_options_of_ddp_are_silent(options):
    with silent() as wrap:
        model = wrap(Net(), **options)
        train(model, 7)


def test_gradient_accumulation_under_no_sync_is_silent_and_right():
    with silent() as wrap:
        model = wrap(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            with model.no_sync():
                model(torch.randn(3, 4)).sum().backward()
                model(torch.randn(3, 4), "short").sum().backward()
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()


@pytest.mark.slow
def test_what_only_micro_batches_under_no_sync_use_is_used():
    with silent() as wrap:
        model = wrap(Net(), find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(10):
            optimizer.zero_grad()
            with model.no_sync():
                model(torch.randn(3, 4), "whole").square().mean().backward()
            model(torch.randn(3, 4), "short").square().mean().backward()
            optimizer.step()
            the_same(model)


def test_accumulation_that_ends_synchronised_is_silent():
    with silent() as wrap:
        accumulate(wrap(Net()), 4, synchronises=lambda i: i % 4 == 3)
        model = wrap(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(3):  # of ten batches: the last window of each has two, and ends synchronised
            for index in range(10):
                with contextlib.nullcontext() if index % 4 == 3 or index == 9 else model.no_sync():
                    model(torch.randn(3, 4)).square().mean().backward()
                if index % 4 == 3 or index == 9:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=bool(epoch % 2))
        for _ in range(3):  # what an unfinished window has left goes into the next reduction
            with model.no_sync():
                model(torch.randn(3, 4)).square().mean().backward()
            train(model, 1, optimizer=optimizer)


@pytest.mark.slow
def test_passes_under_no_sync_that_no_step_uses_are_silent():
    """Sharpness-aware minimisation, a measurement of gradients, and the other half of a GAN."""
    with silent() as wrap:
        model, critic = wrap(Net()), wrap(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        judges = torch.optim.SGD(critic.parameters(), lr=0.1)
        for _ in range(4):
            with model.no_sync():
                model(torch.randn(3, 4)).square().mean().backward()
            optimizer.zero_grad()
            judges.zero_grad()
            critic(model(torch.randn(3, 4)).detach()).mean().backward()
            judges.step()
            with critic.no_sync():
                critic(model(torch.randn(3, 4))).mean().backward()
            optimizer.step()
        critic.zero_grad()


@pytest.mark.slow
def test_lbfgs_with_accumulation_in_its_closure_is_silent():
    with silent() as wrap:
        model = wrap(Net())
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        x = torch.randn(4, 3, 4)

        def closure():
            optimizer.zero_grad()
            with model.no_sync():
                model(x[0]).square().mean().backward()
            loss = model(x[1]).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)


@pytest.mark.slow
def test_inputs_that_forward_returns_and_that_get_gradients_are_silent():
    class Echo(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x):
            return self.layer(x), x

    with silent() as wrap:
        model = wrap(Echo())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            out, x = model(torch.randn(3, 4, requires_grad=True))
            (out.mean() + x.square().mean()).backward()
            optimizer.step()


def test_accumulation_without_no_sync_is_silent():
    with silent() as wrap:
        model = wrap(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            for _ in range(3):
                model(torch.randn(3, 4)).sum().backward()
            optimizer.step()


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        return self.left(x), self.right(x)


@pytest.mark.slow
@pytest.mark.parametrize("retain", [False, True])
def test_losses_with_parameters_of_their_own_may_each_have_a_backward_pass(retain):
    with silent() as wrap:
        model = wrap(Towers())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            optimizer.zero_grad()
            losses = [out.square().sum() for out in model(torch.randn(3, 4))]
            losses[0].backward(retain_graph=retain)
            losses[1].backward()
            optimizer.step()


@pytest.mark.slow
def test_a_tower_that_gets_no_backward_pass_is_told_when_the_optimizer_steps():
    told = []
    model = CheckedDistributedDataParallel(Towers(), on_finding=told.append)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(3, 4))[0].square().sum().backward()
        optimizer.step()
    assert [(f.code, f.subjects) for f in told] == [("DDP102", ("right.weight", "right.bias"))]
    the_same(model)


@pytest.mark.slow
def test_two_forwards_and_one_backward_pass_are_silent():
    with silent() as wrap:
        model = wrap(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            (model(torch.randn(3, 4)).sum() + model(torch.randn(3, 4)).square().sum()).backward()
            optimizer.step()


def test_a_gan_is_silent():
    with silent() as wrap:
        generator, critic = wrap(nn.Linear(4, 4)), wrap(nn.Linear(4, 1))
        makers = torch.optim.SGD(generator.parameters(), lr=0.1)
        judges = torch.optim.SGD(critic.parameters(), lr=0.1)
        for _ in range(5):
            judges.zero_grad()
            made = generator(torch.randn(3, 4))
            critic(torch.randn(3, 4)).mean().backward()
            critic(made.detach()).mean().neg().backward()
            judges.step()
            makers.zero_grad()
            for parameter in critic.parameters():
                parameter.requires_grad_(False)
            critic(made).mean().backward()
            for parameter in critic.parameters():
                parameter.requires_grad_(True)
            makers.step()


def test_a_gradient_penalty_is_silent():
    with silent() as wrap:
        model = wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            x = torch.randn(3, 4, requires_grad=True)
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            (out.mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
            optimizer.step()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_are_silent(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, way="whole"):
            return checkpoint(self.second, torch.relu(self.first(x)), use_reentrant=reentrant)

    with silent() as wrap:
        train(wrap(Checkpointed()), 6)


@pytest.mark.slow
def test_a_parameter_unused_beside_a_reentrant_checkpoint_is_told_alone():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, way="whole"):
            return checkpoint(self.second, torch.relu(self.first(x)), use_reentrant=True)

    model = CheckedDistributedDataParallel(Checkpointed())
    with pytest.raises(FindingsError):
        train(model, 2)
    assert found(model) == [("DDP101", ("third.weight", "third.bias"), (), (0,))]


def test_autocast_and_a_grad_scaler_are_silent():
    with silent() as wrap:
        model = wrap(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(torch.randn(3, 4)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.slow
def test_a_cause_is_found_under_autocast_too():
    model = CheckedDistributedDataParallel(Net())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(3, 4), "detached").float().sum()
    with pytest.raises(FindingsError, match=r"detach\(\)"):
        loss.backward()


def test_validation_with_and_without_gradients_is_silent():
    with silent() as wrap:
        model = wrap(Net())
        for step in range(4):
            train(model, 1, begin=step)
            model.eval()
            model(torch.randn(3, 4), "short")
            with torch.no_grad():
                model(torch.randn(3, 4), "short")
            model.train()


def test_sparse_and_tied_parameters_are_silent():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 4, sparse=True)
            self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)
            self.outer.weight = self.inner.weight

        def forward(self, x):
            return self.outer(self.inner(self.table(x)))

    with silent() as wrap:
        model = wrap(Tied())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randint(10, (3,))).square().mean().backward()
            optimizer.step()


def test_a_sparse_table_that_one_rank_does_not_use_hangs_nobody(rank):
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.layer = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4)

        def forward(self, x, use):
            return self.layer(self.table(x) if use else torch.ones(3, 4))

    told = []
    model = CheckedDistributedDataParallel(Table(), on_finding=told.append)
    for _ in range(2):
        model(torch.randint(10, (3,)), rank == 0).sum().backward()
    assert [(f.code, f.subjects, f.ranks) for f in told] == [("DDP104", ("table.weight",), (1,))]


class Opaque:
    def __init__(self, value):
        self.value = value


@pytest.mark.slow
def test_an_output_in_an_object_of_the_users_own_is_followed():
    class Boxed(Net):
        def forward(self, x, way="whole"):
            return Opaque(super().forward(x, way))

    with silent() as wrap:
        train(wrap(Boxed()), 5, loss=lambda out: out.value.sum())
    model = CheckedDistributedDataParallel(Boxed())
    with pytest.raises(FindingsError):
        train(model, 2, way=lambda step: "short", loss=lambda out: out.value.sum())


@pytest.mark.slow
def test_a_deep_graph_is_no_trouble():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, way="whole"):
            x = self.layer(x)
            for _ in range(30_000):
                x = x + 1e-9
            return x

    model = CheckedDistributedDataParallel(Deep())
    with pytest.raises(FindingsError):
        train(model, 1)
    assert found(model) == [("DDP101", ("spare.weight", "spare.bias"), (), (0,))]


def test_uneven_inputs_under_join_are_silent(rank):
    model = CheckedDistributedDataParallel(Net(), check_consistency=2, check_parity_every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for _ in range(3 + 2 * rank):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
    assert found(model) == []
    for parameter in model.parameters():
        ddpcheck.assert_same_on_all_ranks(parameter)


@pytest.mark.slow
def test_a_compiled_module_and_a_compiled_wrapper_are_silent_and_watched():
    with silent() as wrap:
        inner = wrap(torch.compile(Net(), backend="aot_eager"))
        train(inner, 3)
        outer = wrap(Net())
        train(torch.compile(outer, backend="aot_eager"), 3)
    assert inner.watch.step == outer.watch.step == 3
    broken = CheckedDistributedDataParallel(torch.compile(Net(), backend="aot_eager"))
    with pytest.raises(FindingsError):
        train(broken, 3, way=lambda step: "short")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(1,), ()])
def test_what_one_rank_alone_compiles_again_and_again_is_told_after_32_steps(ranks):
    torch._dynamo.reset()
    told = []
    net = torch.compile(Net(), backend="eager", dynamic=False)
    model = CheckedDistributedDataParallel(net, on_finding=told.append)
    for step in range(33):
        model(torch.randn(3 + step % 3 * (dist.get_rank() in ranks), 4)).sum().backward()
    said = [(one.code, one.subjects, one.ranks) for one in told]
    assert said == ([("DDP522", ("Net.forward",), ranks)] if ranks else [])


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).detach())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_detached_parameter_of_a_compiled_module_is_named_and_told_as_in_the_code(backend):
    model = CheckedDistributedDataParallel(torch.compile(Detached(), backend=backend), on_finding="warn")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.randn(3, 4)).sum().backward()
    assert found(model) == [("DDP103", ("first.weight", "first.bias"), (), ())]
    assert "cut by detach()" in model.watch.findings[0].message
    assert not [one for one in shown if "global hooks" in str(one.message)]


def test_ddp_in_a_subgroup_of_the_ranks_is_silent():
    mine = [dist.new_group([r]) for r in range(2)][dist.get_rank()]
    model = CheckedDistributedDataParallel(Net(), process_group=mine, check_parity_every=2, check_consistency=2)
    train(model, 5)
    assert found(model) == []


@pytest.mark.slow
def test_wrapping_again_is_silent_also_while_the_first_wrapper_lives():
    with silent() as wrap:
        module = Net()
        for _ in range(3):
            train(wrap(module), 6)
        part = wrap(module.head)
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            part(torch.randn(3, 8)).sum().backward()
            optimizer.step()


def test_a_wrapper_that_nobody_holds_is_freed():
    model = CheckedDistributedDataParallel(Net())
    train(model, 2)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.slow
def test_derivatives_with_respect_to_parameters_are_silent():
    with silent() as wrap:
        model = wrap(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(3, 4)).square().mean()
            (slope,) = torch.autograd.grad(loss, model.module.head.weight, create_graph=True)
            (loss + slope.square().mean()).backward()
            optimizer.step()


@pytest.mark.slow
def test_a_checkpoint_around_everything_is_silent():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, way="whole"):
            return checkpoint(self.layer, x.requires_grad_(), use_reentrant=True)

    with silent() as wrap:
        model = wrap(Whole())
        train(model, 6)
    assert model.watch.step == 6


@pytest.mark.slow
@pytest.mark.parametrize("wraps_again", [False, True])
def test_layers_added_after_wrapping_are_told_where_all_that_was_wrapped_is_frozen(wraps_again):
    told = []
    model = CheckedDistributedDataParallel(Net(), on_finding=told.append)
    adapter = nn.Linear(2, 2)  # of a LoRA, say
    model.module.requires_grad_(False)
    model.module.adapter = adapter
    model.module.register_forward_hook(lambda module, _inputs, out: module.adapter(out))
    again = nn.parallel.DistributedDataParallel(model.module) if wraps_again else model
    optimizer = torch.optim.SGD(adapter.parameters(), 0.1)
    for _ in range(4):
        optimizer.zero_grad()
        again(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
    assert [(f.code, set(f.subjects)) for f in told] == (
        [] if wraps_again else [("DDP503", {"adapter.weight", "adapter.bias"})]
    )


@pytest.mark.slow
def test_a_loss_that_does_not_come_through_what_forward_returns_is_followed():
    class Keeping(Net):
        def forward(self, x, way="whole"):
            self.loss = super().forward(x, way).square().mean()

    with silent() as wrap:
        model = wrap(Keeping())
        train(model, 6, loss=lambda out: model.module.loss)
    assert model.watch.step == 6
    broken = CheckedDistributedDataParallel(Keeping())
    with pytest.raises(FindingsError, match=r"spare\.weight"):
        train(broken, 2, way=lambda step: "short", loss=lambda out: broken.module.loss)


@pytest.mark.slow
def test_a_parameter_frozen_between_the_looks_is_told_as_that():
    told = []
    model = CheckedDistributedDataParallel(Net(), on_finding=told.append)
    train(model, 3)
    model.module.spare.requires_grad_(False)
    train(model, 1)
    assert [(f.code, f.subjects) for f in told] == [("DDP503", SPARE)]


def test_a_parameter_unfrozen_between_the_looks_is_told():
    told = []
    module = Net()
    module.spare.requires_grad_(False)
    model = CheckedDistributedDataParallel(module, on_finding=told.append)
    train(model, 5)
    module.spare.requires_grad_(True)
    train(model, 3)
    assert [(f.code, f.subjects) for f in told] == [("DDP503", SPARE)]


def test_a_cause_that_the_replay_cannot_have_seen_is_not_made_up(rank):
    class Counting(Net):
        calls = 0

        def forward(self, x, way="whole"):
            self.calls += 1
            return super().forward(x, "short" if self.calls == 3 and way == "counted" else "whole")

    model = CheckedDistributedDataParallel(Counting(), on_finding=lambda finding: None)
    train(model, 4, way=lambda step: "counted" if rank == 1 else "whole")
    assert found(model) == [("DDP104", SPARE, (1,), (2,))]
    assert not any("there" in fact for fact in model.findings[0].evidence)


@pytest.mark.slow
def test_a_static_graph_that_grows_is_named_before_ddp_raises():
    told = []
    model = CheckedDistributedDataParallel(Net(), static_graph=True, on_finding=told.append)
    with pytest.raises(RuntimeError, match="training graph has changed"):
        train(model, 4, way=lambda step: "whole" if step == 2 else "short")
    assert [(f.code, f.subjects) for f in told if f.severity.value == "error"] == [("DDP513", SPARE)]


def test_rules_can_be_ignored():
    model = CheckedDistributedDataParallel(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), check_consistency=2, ignore=["DDP215"], on_finding="raise"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", ddpcheck.FindingWarning)
        for _ in range(3):
            model(torch.randn(3, 4) + dist.get_rank()).sum().backward()
    with pytest.raises(ddpcheck.UsageError, match="ignore is a list"):
        CheckedDistributedDataParallel(Net(), ignore="DDP215")


def test_what_find_unused_parameters_allows_is_judged_when_a_short_run_is_closed():
    model = nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=True)
    with ddpcheck.watch(model, on_finding="warn") as watch:
        train(model, 5, way=lambda step: "short")
        assert watch.findings == ()
    assert [(f.code, f.subjects) for f in watch.findings] == [("DDP101", SPARE)]


@pytest.mark.slow
def test_ranks_that_close_one_after_the_other_judge_together(rank):
    """What a rank writes when it leaves must not stand in the place of what it reports when it closes."""
    for _ in range(12):
        model = nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=True)
        with ddpcheck.watch(model, on_finding="warn") as watch:
            train(model, 5, way=lambda step: "short" if rank else "whole")
        assert watch.findings == ()


def test_the_text_of_a_finding_has_all_its_names(rank):
    model = CheckedDistributedDataParallel(Net(), check_consistency=1)
    with torch.no_grad():
        model.module.head.bias.add_(rank)
    with pytest.raises(FindingsError, match=r"head\.bias"):
        train(model, 2)


# Comparisons


def summing(_state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def test_a_communication_hook_that_forgets_to_divide_is_found(rank):
    told = []
    model = CheckedDistributedDataParallel(Net(), check_parity_every=1, on_finding=told.append)
    model.register_comm_hook(None, summing)
    train(model, 2)
    assert [finding.code for finding in told] == ["DDP303"]


def test_a_wrong_reduction_of_more_gradients_is_the_one_that_was_reported(rank):
    told = []
    options = {"find_unused_parameters": True, "detect_anomalous_params": False}
    model = CheckedDistributedDataParallel(Net(), check_parity_every=1, on_finding=told.append, **options)
    model.register_comm_hook(None, summing)
    train(model, 2, way=lambda step: "whole" if step else "short")
    assert [finding.code for finding in told] == ["DDP303"]


@pytest.mark.slow
def test_a_hook_that_communicates_nothing_is_found():
    def silent_hook(_state, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    told = []
    model = CheckedDistributedDataParallel(Net(), check_parity_every=2, on_finding=told.append)
    model.register_comm_hook(None, silent_hook)
    train(model, 2)
    assert [finding.code for finding in told] == ["DDP301"]


@pytest.mark.slow
def test_a_reducer_that_mixes_up_gradients_is_found():
    """Seed 4 (mmcv dist_utils): the manual all-reduce is a second, independent path for gradients to compare with."""

    def shuffling(_state, bucket):
        buffer = bucket.buffer()
        work = dist.all_reduce(buffer.div_(2), async_op=True)
        return work.get_future().then(lambda future: future.value()[0].flip(0))

    told = []
    model = CheckedDistributedDataParallel(Net(), check_parity_every=1, on_finding=told.append)
    model.register_comm_hook(None, shuffling)
    train(model, 1)
    assert [finding.code for finding in told] == ["DDP302"]


def test_a_gradient_that_one_rank_changes_after_the_reduction_is_found(rank):
    told = []
    model = CheckedDistributedDataParallel(Net(), check_consistency=1, on_finding=told.append)
    model = CheckedDistributedDataParallel(Net(), check_consistency=2, on_finding=told.append)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1))
    train(model, 4, optimizer=optimizer)
    assert [finding.code for finding in told][:1] == ["DDP306"]


def test_buffers_that_drift_are_found_and_said_to_be_lost_in_a_checkpoint(rank):
    told = []
    model = CheckedDistributedDataParallel(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        broadcast_buffers=False,
        check_consistency=2,
        on_finding=told.append,
    )
    for _ in range(3):
        model(torch.randn(3, 4) + rank).sum().backward()
    assert [finding.code for finding in told] == ["DDP214"]
    assert "a checkpoint keeps rank 0's" in told[0].message


def test_compare_can_be_called_at_any_time(rank):
    model = nn.parallel.DistributedDataParallel(Net())
    with ddpcheck.watch(model, on_finding="warn") as watch:
        train(model, 2)
        assert watch.compare() == []
        with torch.no_grad():
            model.module.head.bias.add_(rank)
        assert [finding.code for finding in watch.compare()] == ["DDP306"]


@pytest.mark.slow
def test_a_parameter_that_forward_sets_from_its_own_batch_is_told_as_that(rank):
    class Initialising(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.centre = nn.Linear(4, 4), nn.Parameter(torch.zeros(4))
            self.done = False

        def forward(self, x, way="whole"):
            if not self.done:
                self.centre.data.copy_(x.mean(0))
                self.done = True
            return self.layer(x - self.centre)

    told = []
    train(CheckedDistributedDataParallel(Initialising(), check_consistency=1, on_finding=told.append), 4)
    assert [(finding.code, finding.subjects) for finding in told] == [("DDP515", ("centre",))]


def test_what_a_fault_leads_to_is_not_told_beside_it():
    told = []
    model = CheckedDistributedDataParallel(Net(), check_consistency=1, check_parity_every=1, on_finding=told.append)
    model.module.extra = nn.Linear(2, 2)
    model.module.register_forward_hook(lambda module, _inputs, out: module.extra(out))
    train(model, 6)
    assert [finding.code for finding in told] == ["DDP503"]


# Attaching and leaving


@pytest.mark.slow
def test_what_no_rank_was_asked_for_any_more_is_told_when_the_watch_is_closed(rank, monkeypatch):
    from ddpcheck.monitor import alarms as board

    monkeypatch.setattr(board, "_LONG", math.inf)  # after a long step ranks ask each other; none is, on a busy machine
    model = nn.parallel.DistributedDataParallel(Net())
    told = []
    with ddpcheck.watch(model, on_finding=told.append):
        train(model, 36, way=lambda step: "short" if rank == 1 and step == 34 else "whole")
        assert told == []
    assert [(f.code, f.steps) for f in told] == ([("DDP105", (34,))] if rank else [])


@pytest.mark.slow
def test_ranks_that_do_not_come_to_a_meeting_are_named_and_hold_up_nobody_for_long(rank):
    model = nn.parallel.DistributedDataParallel(Net())
    if rank == 1:
        train(model, 4)
        return
    with pytest.warns(UserWarning, match="rank 1 did not answer within 0.5 s"), ddpcheck.watch(model, timeout=0.5):
        train(model, 4)


@pytest.mark.parametrize("failing", [True, False])
def test_a_comparison_does_not_wait_for_a_rank_that_has_stopped(rank, failing):
    model = nn.parallel.DistributedDataParallel(Net())
    watch = ddpcheck.watch(model, timeout=600)  # which the test does not have
    train(model, 3)
    if rank == 1:
        with contextlib.suppress(ValueError), watch:
            if failing:
                raise ValueError("no such file")
        return
    said = r"stopped with ValueError at .*test_watching.py:\d+" if failing else "closed its watch"
    with pytest.warns(UserWarning, match=rf"rank 1 has {said}; rank 0 met no other rank at .*test_watching.py"):
        assert watch.compare() == []


@pytest.mark.ddp(world_size=2, reuse="test")  # on ranks on which no watch of another test may still be alive
def test_watch_attaches_to_a_plain_wrapper_and_leaves_it_as_it_was():
    model = nn.parallel.DistributedDataParallel(Net())
    hooks = (len(model._forward_hooks), len(model._forward_pre_hooks))
    no_sync = nn.parallel.DistributedDataParallel.no_sync
    with pytest.raises(FindingsError), ddpcheck.watch(model) as watch:
        train(model, 2, way=lambda step: "short")
    assert [finding.code for finding in watch.findings] == ["DDP101"]
    assert (len(model._forward_hooks), len(model._forward_pre_hooks)) == hooks
    assert nn.parallel.DistributedDataParallel.no_sync is no_sync
    train(model, 2)
    assert watch.report().exit_code() == 1


def test_a_watched_wrapper_can_be_pickled_and_copied():
    model = nn.parallel.DistributedDataParallel(Net())
    with ddpcheck.watch(model):
        train(model, 2)
        for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            train(other, 2)


@pytest.mark.slow
@pytest.mark.parametrize("door", ["watch", "wrapper", "compiled"])
def test_a_watch_that_nobody_holds_goes_on_where_training_goes_on_without_the_wrapper(door):
    told = []
    if door == "wrapper":
        model = CheckedDistributedDataParallel(Net(), on_finding=told.append)
    else:
        model = nn.parallel.DistributedDataParallel(
            torch.compile(Net(), backend="eager") if door == "compiled" else Net()
        )
        ddpcheck.watch(model, on_finding=told.append)
    train(model, 2)
    model = model.module._orig_mod if door == "compiled" else model.module
    gc.collect()
    train(model, 5)
    assert [finding.code for finding in told] == ["DDP501"]


def test_a_module_that_is_trained_alone_after_the_watch_was_closed_is_left_in_peace():
    told = []
    model = nn.parallel.DistributedDataParallel(Net())
    with ddpcheck.watch(model, on_finding=told.append):
        train(model, 2)
    model = model.module
    train(model, 5)
    assert told == [] and pickle.loads(pickle.dumps(model)) and "watches" not in str(vars(model))


@pytest.mark.ddp(world_size=2, reuse="test")
def test_a_watched_module_and_its_watch_are_freed_and_leave_one_hook_that_does_nothing():
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    def hooks():
        return len(_global_optimizer_pre_hooks) + len(_global_optimizer_post_hooks)

    before, gone = hooks(), []
    for _ in range(3):
        module = Net()
        for _ in range(2):  # wrapped again
            model = CheckedDistributedDataParallel(module)
            train(model, 2)
            gone += [weakref.ref(model), weakref.ref(model.watch)]
        gone.append(weakref.ref(module))
        pickle.loads(pickle.dumps(module))
        copy.deepcopy(module)
    del module, model
    gc.collect()
    assert [found() for found in gone] == [None] * len(gone)
    assert hooks() == before + 2  # before a step, and after it: the garbage collector must not take them off


@pytest.mark.ddp(world_size=2, reuse="test")
def test_a_wrapper_that_is_collected_while_torch_goes_through_its_hooks_is_no_error():
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def collect(*_):
        gc.collect()

    handle = register_optimizer_step_pre_hook(collect)
    try:
        for _ in range(3):
            train(CheckedDistributedDataParallel(Net()), 2)
    finally:
        handle.remove()


def test_what_is_no_ddp_is_refused():
    with pytest.raises(ddpcheck.UsageError, match="watch needs a DistributedDataParallel"):
        ddpcheck.watch(Net())
    with pytest.raises(ddpcheck.UsageError, match="on_finding"):
        ddpcheck.watch(nn.parallel.DistributedDataParallel(Net()), on_finding="shout")
    with pytest.raises(ddpcheck.UsageError, match="check_parity_every"):
        ddpcheck.watch(nn.parallel.DistributedDataParallel(Net()), check_parity_every=-1)


def test_a_recorder_that_fails_after_its_watch_was_freed_is_a_warning(monkeypatch):
    from ddpcheck.gather.patching import Recorder
    from ddpcheck.monitor.watch import _unwatched

    monkeypatch.setitem(_unwatched.__globals__, "_at_exit", weakref.WeakSet())
    late = type("Late", (Recorder,), {})()
    with pytest.warns(ddpcheck.FindingWarning, match="Late: .*made to fail"):
        _unwatched(ZeroDivisionError("made to fail"), late)


def test_a_recorder_that_fails_ends_itself_and_the_watch_goes_on(monkeypatch):
    from ddpcheck.record.loop.wrapper_checks import ApartMarks
    from ddpcheck.record.loss.micro_batches import MicroBatches

    def fails(*_arguments, **_named):
        raise ZeroDivisionError("made to fail. It is for a test")

    monkeypatch.setattr(MicroBatches, "_is_accumulating", fails)
    monkeypatch.setattr(ApartMarks, "_add", fails)
    net = nn.parallel.DistributedDataParallel(Net())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with ddpcheck.watch(net, on_finding="warn", check_consistency_every=1) as watch:
            train(net, 3, way=lambda step: "detached")
    (said,) = [str(one.message) for one in warned if "made to fail" in str(one.message)]
    assert said.startswith("ddpcheck: loss: not watched from step ")
    assert said.endswith(" on: ZeroDivisionError: made to fail")
    assert [one.code for one in watch.findings] == ["DDP103"]
    report = watch.report()
    assert [(one.name, one.status) for one in report.checks] == [("loss", "error")]
    assert report.summary.startswith("loss: not watched to the end; 1 finding")


def test_what_a_function_that_is_told_of_findings_raises_is_the_users():
    def refuse(_finding):
        raise ZeroDivisionError("of the user")

    net = nn.parallel.DistributedDataParallel(Net())
    with pytest.raises(ZeroDivisionError, match="of the user"), ddpcheck.watch(net, on_finding=refuse):
        train(net, 3, way=lambda step: "detached")
