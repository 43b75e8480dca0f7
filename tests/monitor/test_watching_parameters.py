"""Parameters without a gradient, as `watch` and the wrapper find them while a loop runs on real ranks."""

import pytest
import torch
from torch import nn

import ddpcheck
from ddpcheck import CheckedDistributedDataParallel, FindingsError
from tests.monitor.loops import (
    SPARE,
    Keeping,
    Layers,
    Net,
    assert_same_model,
    batch,
    checked,
    codes,
    facts,
    sgd,
    short,
    steps,
    towers,
    train,
)

# Ranks are shared: what a test wraps and watches is its own. They import what they test once.
pytestmark = pytest.mark.ddp(world_size=2, reuse="module", preload=["ddpcheck.monitor.wrapper"])


def test_an_unused_parameter_raises_in_the_first_backward_pass_and_the_traceback_is_that_of_the_loop():
    model = CheckedDistributedDataParallel(Net())
    with pytest.raises(FindingsError, match="No operation of the forward pass reads") as raised:
        train(model, 3, way="short")
    assert facts(model.findings) == [("DDP101", SPARE, (), (0,))]
    assert raised.value.findings == model.findings
    assert model.findings[0].location.path.endswith("loops.py")
    assert sum("ddpcheck/record" in str(entry.path) for entry in raised.traceback) == 1
    assert not any("ddpcheck/monitor" in str(entry.path) for entry in raised.traceback)


def deep():
    def forward(self, x):
        x = self.first(x)
        for _ in range(3_000):
            x = x + 1e-9
        return x

    return Layers("first spare", forward)


# Module, arguments of `train`, finding, and words of the error.
RAISED = {
    "detached": (Net, {"way": "detached"}, ("DDP103", SPARE, (), (0,)), r"cut by detach\(\) at .*loops.py"),
    "not in the loss": (
        *(Net, {"way": "both", "loss": lambda out: out["main"].sum()}),
        *(("DDP102", SPARE, (), (0,)), "does not reach the loss"),
    ),
    "missing on rank 1": (Net, {"way": short(step=2, rank=1)}, ("DDP104", SPARE, (1,), (2,)), ""),
    "missing in one step": (Net, {"way": short(step=2)}, ("DDP105", SPARE, (), (2,)), ""),
    "in a deep graph": (deep, {}, ("DDP101", SPARE, (), (0,)), ""),
}


def test_the_cause_of_a_missing_gradient_is_raised_on_every_rank():
    for name, (module, training, finding, words) in RAISED.items():
        torch.manual_seed(0)
        model = CheckedDistributedDataParallel(module())
        with pytest.raises(FindingsError, match=words or None):
            train(model, 3, **training)
        assert facts(model.findings) == [finding], name
        if finding[0] == "DDP104":
            assert "there no operation of the forward pass reads them" in model.findings[0].evidence


def gated(gate):
    module = Layers("layer branch", lambda self, x: self.layer(x) + gate * self.branch(x))
    if isinstance(gate, nn.Parameter):
        module.gate = gate
    return module


BRANCH, RIGHT = ("branch.weight", "branch.bias"), ("right.weight", "right.bias")
UNUSED, STATIC = {"find_unused_parameters": True}, {"static_graph": True}
LEFT_OUT = {"way": "both", "loss": lambda out: out["main"].sum()}
ONE_TOWER = {"loss": lambda out: out[0].square().sum()}
ALTERNATELY = {"way": lambda step: "short" if (step + torch.distributed.get_rank()) % 2 else "whole"}


def of_gate_zero():
    return gated(nn.Parameter(torch.zeros(())))


# Module, options of the wrapper, arguments of `train` for ten steps, findings and their severity.
TOLD = {
    "missing on one rank": (Net, {}, {"way": short(rank=1)}, [("DDP104", SPARE, (1,), (0,))], "error"),
    "an output with layers of its own": (towers, {}, ONE_TOWER, [("DDP102", RIGHT, (), (0,))], "error"),
    "always zero": (lambda: gated(0.0), {}, {}, [("DDP107", BRANCH, (), ())], "warning"),
    "zero at the start": (of_gate_zero, {}, {}, [], ""),
    "never read": (Net, UNUSED, {"way": "short"}, [("DDP101", SPARE, (), ())], "warning"),
    "read sometimes": (Net, UNUSED, ALTERNATELY, [], ""),
    "all read": (Net, UNUSED, {}, [("DDP109", ("find_unused_parameters",), (), ())], "note"),
    "never in the loss": (Net, UNUSED, LEFT_OUT, [("DDP102", SPARE, (), ())], "warning"),
    "never in the loss of a static graph": (Net, STATIC, LEFT_OUT, [("DDP102", SPARE, (), (0,))], "error"),
    "never read in a static graph": (Net, STATIC, {"way": "short"}, [("DDP101", SPARE, (), ())], "warning"),
    "a static graph that changes": (Net, STATIC, {"way": short(step=5)}, [("DDP513", SPARE, (), (5,))], "error"),
}


def test_each_cause_is_told_once_on_every_rank_while_training_continues():
    for name, (module, options, training, expected, severity) in TOLD.items():
        model, findings = checked(module(), **options)
        train(model, 10, **training)
        assert facts(findings) == expected, name
        assert {finding.severity.value for finding in findings} == ({severity} if expected else set()), name
        assert_same_model(model)


def test_a_gradient_that_is_zero_while_nothing_moves_is_not_judged():
    model, findings = checked(of_gate_zero())
    train(model, 10, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    assert findings == []


def test_a_rank_whose_fault_comes_late_is_heard_at_the_next_question():
    model, findings = checked()
    train(model, 60, way=short(step=41, rank=1))
    assert [(finding.code, finding.steps) for finding in findings] == [("DDP104", (41,))]


def test_a_warning_is_shown_on_one_rank_and_what_is_missing_counts_as_zeros(rank, recwarn):
    model = CheckedDistributedDataParallel(Net(), on_finding="warn", check_parity_every=1)
    train(model, 12, way=lambda step: "short" if rank == 1 and step % 2 else "whole")
    assert facts(model.findings) == [("DDP104", SPARE, (1,), (1,))]
    assert len([each for each in recwarn if issubclass(each.category, ddpcheck.FindingWarning)]) == (rank == 0)
    assert_same_model(model)


def test_what_find_unused_parameters_allows_is_judged_when_a_short_run_is_closed():
    model = nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=True)
    with ddpcheck.watch(model, on_finding="warn") as watch:
        train(model, 5, way="short")
        assert watch.findings == ()
    assert [(f.code, f.subjects) for f in watch.findings] == [("DDP101", SPARE)]


def test_a_cause_that_the_replay_cannot_have_seen_is_not_made_up(rank):
    class Counting(Net):
        calls = 0

        def forward(self, x, way):
            self.calls += 1
            return super().forward(x, "short" if self.calls == 3 and way == "counted" else "whole")

    model, findings = checked(Counting())
    train(model, 4, way="counted" if rank == 1 else "whole")
    assert facts(findings) == [("DDP104", SPARE, (1,), (2,))]
    assert not any("there" in fact for fact in findings[0].evidence)


def test_a_loss_that_does_not_come_through_what_forward_returns_is_followed():
    model = CheckedDistributedDataParallel(Keeping())
    with pytest.raises(FindingsError, match=r"spare\.weight"):
        train(model, 2, way="short", loss=lambda out: model.module.loss)


class Empty(Net):
    """Returns a loss without a graph if the batch is empty."""

    def forward(self, x, way):
        loss = super().forward(x).square().mean() if len(x) else torch.zeros((), requires_grad=True)
        return {"loss": loss} if way == "dict" else loss


@pytest.mark.parametrize("way", ["whole", "dict"])
def test_a_loss_without_a_graph_on_one_rank_is_told_before_the_others_wait_for_it(rank, way):
    model = CheckedDistributedDataParallel(Empty())
    with pytest.raises(FindingsError):
        for step in steps(model, 4):
            out = model(batch(0 if rank == 1 and step == 2 else 3), way)
            (out["loss"] * 1.0 if way == "dict" else out).backward()
    assert [(code, ranks, at) for code, _, ranks, at in facts(model.findings)] == [("DDP104", (1,), (2,))]
    assert len(model.findings[0].subjects) == 6
    assert model.findings[0].message.startswith("No parameter has a part in the loss of rank 1 in step 2")


def test_a_sparse_table_that_one_rank_does_not_use_hangs_no_rank(rank):
    module = Layers("layer", lambda self, x: self.layer(self.table(x) if x.dtype == torch.int64 else x))
    module.table = nn.Embedding(10, 4, sparse=True)
    model, findings = checked(module)
    for _ in range(2):
        model(torch.randint(10, (3,)) if rank == 0 else torch.ones(3, 4)).sum().backward()
    assert [(f.code, f.subjects, f.ranks) for f in findings] == [("DDP104", ("table.weight",), (1,))]


# Parameters that change after wrapping


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_parameter_that_is_frozen_or_unfrozen_between_the_looks_is_told(requires_grad):
    module = Net()
    module.spare.requires_grad_(not requires_grad)
    model, findings = checked(module)
    train(model, 5)
    module.spare.requires_grad_(requires_grad)
    train(model, 3)
    assert [(f.code, f.subjects) for f in findings] == [("DDP503", SPARE)]


@pytest.mark.parametrize(("consistency", "begin"), [(1, 0), (0, 3)])
def test_a_layer_added_after_wrapping_is_told_once_with_its_name_and_without_consequences(consistency, begin):
    model, findings = checked(check_consistency=consistency)
    train(model, begin)
    model.module.spare = nn.Sequential(model.module.spare, nn.Linear(2, 2))  # the old one has another name now
    train(model, 8)
    assert [(f.code, set(f.subjects)) for f in findings] == [("DDP503", {"spare.1.weight", "spare.1.bias"})]
    assert "spare.1.weight" in findings[0].message


@pytest.mark.slow
@pytest.mark.parametrize("wraps_again", [False, True])
def test_layers_added_after_wrapping_are_told_if_all_that_was_wrapped_is_frozen(wraps_again):
    model, findings = checked()
    model.module.requires_grad_(False)
    model.module.adapter = adapter = nn.Linear(2, 2)  # of a LoRA, for example
    model.module.register_forward_hook(lambda _module, _inputs, out: adapter(out))
    train(nn.parallel.DistributedDataParallel(model.module) if wraps_again else model, 4, optimizer=sgd(adapter))
    assert codes(findings) == ([] if wraps_again else ["DDP503"])


def test_a_cast_after_wrapping_that_loses_the_hooks_of_ddp_is_told():
    model, findings = checked()
    model.double().float()
    train(model, 2)
    assert codes(findings) == ["DDP503"]


def test_a_checkpoint_that_one_rank_has_loaded_is_not_told_of_its_forward_pass(rank):
    torch.manual_seed(rank)
    model, findings = checked(check_consistency=1)
    if rank == 1:
        model.module.load_state_dict(Net().state_dict())
    train(model, 3)
    assert [(f.code, f.ranks) for f in findings] == [("DDP515", (1,))]
    assert "were changed on rank 1 after the wrapper" in findings[0].message


@pytest.mark.slow
def test_a_parameter_that_a_compiled_module_does_not_read_is_raised():
    with pytest.raises(FindingsError):
        train(CheckedDistributedDataParallel(torch.compile(Net(), backend="aot_eager")), 3, way="short")
