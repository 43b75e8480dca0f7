"""`CheckedDistributedDataParallel` as a wrapper: construction, pickling, state, and mmengine's step methods."""

import copy
import pickle
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune

import ddpcheck
from ddpcheck import CheckedDistributedDataParallel, FindingsError
from tests.monitor.loops import Net, batch, checked, codes, sgd, steps
from tests.monitor.loops import train as train_net

# Ranks are shared: what a test wraps and watches is its own. They import what they test once.
pytestmark = pytest.mark.ddp(world_size=2, reuse="module", preload=["ddpcheck.monitor.wrapper"])

DDP = nn.parallel.DistributedDataParallel


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def train(model, count=2):
    for _ in steps(model, count):
        model(batch()).square().mean().backward()


# Construction: what DDP would hang or abort on, or say nothing about


def more_on_rank_1(rank, layer):
    return nn.Sequential(nn.Linear(4, 4), *([layer] * rank))


def frozen_bias(rank):
    layer = nn.Linear(4, 4)
    layer.bias.requires_grad_(rank > 0)
    return layer


def frozen_of_another_shape(rank):  # which DDP broadcasts too
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3 if rank else 2).requires_grad_(False))


DIFFERENT = {  # a module on a rank, code, and if the construction stops under "warn" too
    "number": (lambda rank: more_on_rank_1(rank, nn.Linear(4, 4)), "DDP201", True),
    "order": (lambda rank: nn.ModuleDict({name: nn.Linear(2, 2) for name in ("ab", "ba")[rank]}), "DDP202", False),
    "shape of what is frozen": (frozen_of_another_shape, "DDP203", True),
    "dtype": (lambda rank: nn.Linear(4, 4).to(torch.float64 if rank else torch.float32), "DDP204", False),
    "requires_grad": (frozen_bias, "DDP206", True),
    "buffers": (lambda rank: more_on_rank_1(rank, nn.BatchNorm1d(4, affine=False)), "DDP211", True),
}


def test_modules_that_differ_raise_on_every_rank_before_ddp_hangs_on_them(rank):
    for name, (module, code, stops) in DIFFERENT.items():
        for on_finding in ("raise", "warn") if stops else ("raise",):
            with pytest.raises(FindingsError) as raised, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                CheckedDistributedDataParallel(module(rank), on_finding=on_finding)
            assert code in codes(raised.value.findings), name


def test_options_that_differ_are_named_before_ddp_hangs_on_them(rank):
    for on_finding in ("raise", "warn"):
        with pytest.raises(FindingsError, match="find_unused_parameters") as raised, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            CheckedDistributedDataParallel(net(), find_unused_parameters=bool(rank), on_finding=on_finding)
        assert codes(raised.value.findings) == ["DDP221"]


def test_parameters_that_start_apart_are_found_where_ddp_does_not_bring_them_together(rank):
    with pytest.raises(FindingsError) as raised:
        CheckedDistributedDataParallel(net(seed=rank), init_sync=False)
    assert codes(raised.value.findings) == ["DDP208"]


def test_a_lazy_module_is_named():
    with pytest.raises(FindingsError, match="no shape yet"):
        CheckedDistributedDataParallel(nn.LazyLinear(4))


def test_other_seeds_are_healthy_since_ddp_broadcasts_what_rank_0_has(rank):
    with warnings.catch_warnings():
        warnings.simplefilter("error", ddpcheck.FindingWarning)
        train(CheckedDistributedDataParallel(net(seed=rank)))


REPARAMETRISED = {
    "weight norm": nn.utils.weight_norm,
    "spectral norm": nn.utils.spectral_norm,
    "pruned": lambda layer: prune.random_unstructured(layer, "weight", amount=0.5),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_other_seeds_are_healthy_where_a_hook_makes_the_weight_of_each_forward_pass(rank):
    for way, reparametrise in REPARAMETRISED.items():
        module = net(seed=rank)
        module[0] = reparametrise(module[0])
        assert "weight" in vars(module[0]), way  # a plain attribute, made of parameters that DDP brings together
        with warnings.catch_warnings():
            warnings.simplefilter("error", ddpcheck.FindingWarning)
            model = CheckedDistributedDataParallel(module)
            train(model)
        assert ddpcheck.check_consistency(model) == [], way


def test_activations_that_a_model_keeps_with_their_graph_are_no_state(rank):
    model = CheckedDistributedDataParallel(net())
    model.module.kept = model(batch() + rank)
    assert ddpcheck.check_consistency(model) == []


@dataclass
class Output:
    prediction: torch.Tensor


@pytest.mark.parametrize(("static_graph", "expected"), [(True, ["DDP112"]), (False, [])])
def test_a_dataclass_from_forward_is_opaque_under_static_graph_only(rank, static_graph, expected):
    class Predicting(nn.Linear):
        def forward(self, x):
            return Output(super().forward(x))

    model, findings = checked(Predicting(4, 2), static_graph=static_graph)
    model(batch() + rank).prediction.square().mean().backward()
    assert codes(findings) == expected


def test_findings_of_the_construction_are_told_once_and_kept(rank):
    module = net()
    module.note = torch.full((2,), float(rank))
    model, findings = checked(module, check_consistency=1)
    train(model, 3)
    assert codes(findings) == ["DDP216"]
    assert list(model.findings) == findings


def test_a_rank_that_does_not_come_is_named(rank):
    if rank == 0:
        with pytest.raises(ddpcheck.HangError, match="rank 1 did not construct"):
            CheckedDistributedDataParallel(net(), check_timeout=0.5)


REFUSED = {  # by the words of the error
    "on_finding is 'raise'": {"on_finding": "explode"},
    "check_consistency is True": {"check_consistency": "yes"},
    "timeout must be a number of seconds": {"check_timeout": float("nan")},
}


def test_wrong_arguments_are_refused_in_a_sentence():
    for words, options in REFUSED.items():
        with pytest.raises(ddpcheck.UsageError, match=words):
            CheckedDistributedDataParallel(net(), **options)
    for thing in (3, nn.Linear, DDP(net())):
        with pytest.raises(ddpcheck.UsageError, match="CheckedDistributedDataParallel w"):
            CheckedDistributedDataParallel(thing)
    with pytest.raises(TypeError):
        CheckedDistributedDataParallel(net(), no_such_option=1)


def test_names_that_differ_alone_do_not_stop_what_is_only_warned_of(rank):
    _, findings = checked(nn.ModuleDict({"first" if rank else "second": nn.Linear(4, 4)}))
    assert codes(findings) == ["DDP201"]


# A DDP like any other


def test_it_is_a_ddp_whose_state_has_the_same_keys():
    checked, plain = CheckedDistributedDataParallel(net()), DDP(net())
    assert isinstance(checked, DDP)
    assert list(checked.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(checked.state_dict())
    checked.load_state_dict(plain.state_dict())


def test_the_state_of_the_bare_module_can_be_loaded_with_and_without_the_prefix():
    checked, other = CheckedDistributedDataParallel(net()), net(seed=7)
    checked.load_state_dict(other.state_dict())
    assert torch.equal(checked.module[0].weight, other[0].weight)
    with pytest.raises(RuntimeError, match="Missing key"):
        checked.load_state_dict({"0.weight": other[0].weight})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        checked.load_state_dict({"nothing.of.mine": torch.zeros(1)})


def test_arguments_of_ddp_are_passed_through_by_position_and_by_name():
    group = dist.new_group([0, 1])
    model = CheckedDistributedDataParallel(
        net(), None, None, 0, False, process_group=group, bucket_cap_mb=3, gradient_as_bucket_view=True
    )
    assert model.broadcast_buffers is False
    assert model.process_group is group
    assert model.bucket_bytes_cap == 3 * 1024 * 1024
    assert model.gradient_as_bucket_view is True
    train(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_watched_as_the_original_is(copied):
    model = CheckedDistributedDataParallel(Net(), on_finding="raise")
    train_net(model, 2)
    duplicate = copied(model)
    train_net(duplicate, 2)
    with pytest.raises(FindingsError):
        train_net(duplicate, 2, way="short")
    train_net(model, 2)


def test_detection_can_be_left_out():
    model = CheckedDistributedDataParallel(Net(), detect_anomalous_params=False)
    train_net(model, 3, way="short")
    assert model.findings == ()


# mmengine's three steps


class Detector(nn.Module):
    """A module as mmengine has them, without mmengine."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head, self.neck = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        self.use_neck = True

    def forward(self, inputs, targets, mode="loss"):
        features = self.backbone(inputs)
        out = self.head(features) + (self.neck(features) if self.use_neck else 0)
        if mode == "loss":
            losses = {"loss_main": (out - targets).square().mean(), "loss_parts": [out.mean(), out.square().mean()]}
            return {**losses, "acc": out.max()}
        return out.argmax(1)


def data():
    return {"inputs": batch(), "targets": torch.zeros(3, 2)}


def test_train_step_sums_what_is_called_a_loss_and_updates():
    model = CheckedDistributedDataParallel(Detector())
    before = model.module.head.weight.detach().clone()
    log = model.train_step(data(), optimizer := sgd(model))
    assert set(log) == {"loss", "loss_main", "loss_parts", "acc"}
    assert log["loss"].item() == pytest.approx(log["loss_main"].item() + log["loss_parts"].item(), rel=1e-5)
    assert not torch.equal(before, model.module.head.weight)
    ddpcheck.assert_same_on_all_ranks(model.module.head.weight)
    model.module.use_neck = False
    with pytest.raises(FindingsError, match=r"neck.weight and neck.bias"):
        model.train_step(data(), optimizer)


def test_train_step_takes_any_batch_and_refuses_what_is_no_loss():
    model = CheckedDistributedDataParallel(nn.Linear(4, 1))
    optimizer = sgd(model)
    assert set(model.train_step(batch(), optimizer)) == set(model.train_step((batch(),), optimizer)) == {"loss"}
    model.module.forward = lambda inputs: {"accuracy": inputs.sum()}
    with pytest.raises(ddpcheck.UsageError, match="'loss' in its name"):
        model.train_step(batch(), optimizer)


def test_val_and_test_step_predict_on_one_rank_without_the_others(rank):
    model = CheckedDistributedDataParallel(Detector())
    for _ in range(3 * rank):  # a synchronised forward would hang
        assert model.val_step(data()).shape == (3,)
        assert model.test_step(data()).requires_grad is False
