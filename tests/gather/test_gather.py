"""Gathering evidence: fingerprints, silenced random numbers, distances, tolerances, state, synchronised statistics."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddpcheck.findings.errors import TargetError
from ddpcheck.gather.ddp.sync_batchnorm import synchronised_on_cpu
from ddpcheck.gather.state import randomness
from ddpcheck.gather.state.fingerprints import digest_of
from ddpcheck.gather.state.module_description import describe
from ddpcheck.gather.state.module_state import capture_state, copied_module
from ddpcheck.gather.state.randomness import QuietRandomness, mixed_seed, seed_everything, without_rnn_dropout
from ddpcheck.gather.steps.gradient_distance import difference, eps_of, fit, norm, scales, tolerances
from ddpcheck.gather.steps.training_step import compute_gradients, compute_loss, visible_tensors
from ddpcheck.recipe.recipe import Recipe

quickly = settings(deadline=None, max_examples=60)


def filled(dtype: Any, *shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_a_description_is_equal_for_modules_that_are_built_alike() -> None:
    first, second = (nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(2))
    assert describe(first) == describe(second) and digest_of(describe(first)) == digest_of(describe(second))
    second[1].eval()
    assert digest_of(describe(first)) != digest_of(describe(second))
    model = nn.ModuleDict({"lazy": nn.LazyLinear(2), "a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    model.cache = torch.ones(4)
    described = describe(model)
    assert described.uninitialised == ("lazy.weight", "lazy.bias")
    assert described.ties == (("a.weight", "b.weight"),)
    assert [(name, shape) for name, shape, _ in described.state] == [("cache", (4,))]


class Tokens(nn.Module):
    def __init__(self, kind: Any, *sizes: int, **options: Any) -> None:
        super().__init__()
        self.layer = kind(6, *sizes, dropout=0.5, batch_first=True, **options)

    def forward(self, x: Any) -> Any:
        output = self.layer(x.unsqueeze(1) * torch.arange(1.0, 5.0).view(1, 4, 1))
        return (output[0] if isinstance(output, tuple) else output).flatten(1)


def attend(x: Any) -> Any:
    tokens = (x.unsqueeze(1) * torch.arange(1.0, 5.0).view(1, 4, 1)).unsqueeze(1)
    return F.scaled_dot_product_attention(tokens, tokens, tokens, dropout_p=0.5).flatten(1)


RANDOM: dict[str, Callable[[], Callable[[Any], Any]]] = {
    "dropout": lambda: nn.Dropout(0.5),
    "fused dropout": lambda: lambda x: torch.native_dropout(x, 0.5, True)[0],
    "dropout of channels": lambda: lambda x: F.dropout2d(x.view(-1, 2, 3, 1), 0.5).flatten(1),
    "alpha dropout": lambda: nn.AlphaDropout(0.5),
    "feature alpha dropout": lambda: nn.FeatureAlphaDropout(0.5),
    "rrelu": lambda: lambda x: F.rrelu(x - 0.7, training=True),
    "rand_like": lambda: lambda x: x * torch.rand_like(x),
    "rand": lambda: lambda x: x * torch.rand(x.shape),
    "randn_like": lambda: lambda x: x + x * torch.randn_like(x),
    "normal": lambda: lambda x: x * torch.normal(x.detach(), 1.0),
    "uniform_": lambda: lambda x: x * torch.empty_like(x).uniform_(0.5, 2.0),
    "exponential_": lambda: lambda x: x * torch.empty_like(x).exponential_(),
    "bernoulli of probabilities": lambda: lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "bernoulli_ of a number": lambda: lambda x: x * torch.empty_like(x).bernoulli_(0.5),
    "bernoulli_ of a tensor": lambda: lambda x: x * torch.empty_like(x).bernoulli_(torch.full_like(x, 0.5)),
    "drop path": lambda: lambda x: x * (torch.rand(x.shape[0], 1) < 0.8),
    "randperm of features": lambda: lambda x: x[:, torch.randperm(x.shape[1])],
    "randint": lambda: lambda x: x * torch.randint(1, 5, (x.shape[0], 1)),
    "multinomial": lambda: lambda x: x.gather(1, torch.multinomial(x.softmax(1), 2)),
    "gumbel softmax": lambda: lambda x: F.gumbel_softmax(x, hard=False),
    "scaled dot product attention": lambda: attend,
    "encoder layer": lambda: Tokens(nn.TransformerEncoderLayer, 2, 8),
    "lstm": lambda: Tokens(nn.LSTM, 6, num_layers=2),
    "gru": lambda: Tokens(nn.GRU, 6, num_layers=2),
    "rnn": lambda: Tokens(nn.RNN, 6, num_layers=2),
    "checkpointed dropout": lambda: lambda x: checkpoint(F.dropout, x, 0.5, use_reentrant=False),
    "mixup": lambda: lambda x: 0.75 * x + 0.25 * x * torch.distributions.Beta(0.4, 0.4).sample((1,)),
}


def gradient_of(layer: Any, x: Any) -> tuple[Any, Any]:
    x = x.clone().requires_grad_()
    output = layer(x)
    (output * torch.arange(1.0, output[0].numel() + 1).view_as(output[0])).sum().backward()
    return output.detach(), x.grad


def is_random(layer: Any, x: Any) -> bool:
    first, *others = [gradient_of(layer, x)[0] for _ in range(6)]
    return any(not torch.equal(first, other) for other in others)


@pytest.mark.parametrize("name", RANDOM)
def test_silenced_random_layers_compute_the_same_on_shards_and_on_the_whole(name: str) -> None:
    torch.manual_seed(0)
    layer = RANDOM[name]()
    x = torch.rand(7, 6) + 0.1
    module = layer if isinstance(layer, nn.Module) else nn.Identity()
    assert is_random(layer, x)
    with without_rnn_dropout(module), QuietRandomness():
        whole, shards = gradient_of(layer, x), [gradient_of(layer, part) for part in (x[:4], x[4:])]
    for index in (0, 1):
        torch.testing.assert_close(torch.cat([shard[index] for shard in shards]), whole[index])
    assert float(whole[1].abs().sum()) > 0, "silence must not silence the gradient"
    assert is_random(layer, x), "again"


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.45])
def test_a_layer_dropped_at_the_usual_rates_is_kept_in_silence(rate: float) -> None:
    with QuietRandomness():
        for kept in (
            torch.rand(3, 1) < 1 - rate,
            torch.rand(3, 1) > rate,
            (1 - rate + torch.rand(3, 1)).floor(),
            torch.empty(3, 1).bernoulli_(1 - rate),
        ):
            assert kept.float().tolist() == [[1.0]] * 3


SEEDED_BUT_MADE_OF_OTHERS = {
    # these are made of operations that are silenced, or draw nothing by themselves
    *("alpha_dropout", "cauchy", "dropout", "exponential", "geometric", "log_normal", "rrelu"),
    *("gru", "lstm", "rnn_relu", "rnn_tanh"),  # by without_rnn_dropout
    *("_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_cudnn_attention_backward"),
    # these have no kernel where DDP runs, or are made by a compiler
    *("_fused_dropout", "_scaled_dot_product_attention_math_for_mps", "_flash_attention_forward_no_dropout_inplace"),
    *("_scaled_dot_product_fused_attention_overrideable", "rrelu_with_noise_functional", "normal_functional"),
}


def test_every_operation_that_torch_marks_as_seeded_is_silenced() -> None:
    seeded = set()
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in getattr(packet, "overloads", list)():
            if torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags:
                seeded.add(name)
    assert {"bernoulli", "native_dropout", "randperm"} <= seeded
    assert seeded - set(randomness._QUIET) - set(randomness._DETERMINISTIC) - SEEDED_BUT_MADE_OF_OTHERS == set()


def test_layers_get_their_dropout_back_even_when_something_raises() -> None:
    layer = nn.LSTM(2, 2, num_layers=2, dropout=0.3)
    with pytest.raises(KeyError), without_rnn_dropout(layer):
        assert layer.dropout == 0.0
        raise KeyError
    assert layer.dropout == 0.3


def test_a_seed_covers_all_generators_and_a_draw_is_seen() -> None:
    cpu = torch.device("cpu")
    draws: list[Callable[[], Any]] = [random.random, numpy.random.rand, lambda: torch.rand(1).item()]
    for draw in draws:
        seed_everything(3)
        states = randomness.generator_states(cpu)
        assert randomness.generator_states(cpu) == states
        first = draw()
        assert randomness.generator_states(cpu) != states
        seed_everything(3)
        assert draw() == first


@pytest.mark.parametrize("alone", [True, False])
def test_seeding_is_that_of_torch_with_and_without_other_devices(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(randomness, "_has_only_cpu", lambda: alone)
    torch.manual_seed(5)
    expected = torch.get_rng_state()
    torch.manual_seed(6)
    seed_everything(5)
    assert torch.equal(torch.get_rng_state(), expected)


@quickly
@given(st.integers(-(2**70), 2**70), st.integers(0, 1000), st.integers(0, 64))
def test_seeds_for_different_purposes_differ(seed: int, step: int, rank: int) -> None:
    seeds = [mixed_seed(seed, 3, s, r) for s, r in {(step, rank), (step + 1, rank), (step, rank + 1), (rank, step)}]
    assert len(set(seeds)) == len(seeds) and all(0 <= value < 2**31 for value in seeds)


def test_a_distance_is_relative_and_names_the_worst_element() -> None:
    want = torch.ones(2, 3)
    got = want.clone()
    got[1, 2] = 4.0
    found = difference("w", got, want, scale=norm(want), tolerance=1e-6)
    assert found.bad and found.error == pytest.approx(3 / math.sqrt(6))
    assert (found.worst_index, found.worst_got, found.worst_want) == ((1, 2), 4.0, 1.0)
    assert (found.elements, found.elements_beyond) == (6, 1)
    same = difference("w", want, want, scale=norm(want), tolerance=0.0)
    assert not same.bad and same.error == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("factor", [0.5, 2.0, -1.0])
def test_a_constant_factor_is_measured(dtype: Any, factor: float) -> None:
    want = filled(dtype, 5, 3)
    found = difference("w", want * factor, want, scale=norm(want), tolerance=1e-6)
    assert found.ratio == pytest.approx(factor) and found.residual < 1e-9
    assert found.error == pytest.approx(abs(1 - factor))


@pytest.mark.parametrize("value", [math.nan, math.copysign(math.nan, -1.0), math.inf, -math.inf])
def test_what_is_not_finite_is_never_within_tolerance_and_goes_into_json(value: float) -> None:
    got = torch.ones(3)
    got[1] = value
    found = difference("w", got, torch.ones(3), scale=1.0, tolerance=1.0)
    assert found.bad and found.worst_index == (1,)
    json.dumps([found.error, found.ratio, found.residual, found.worst_got], allow_nan=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_difference_below_the_smallest_normal_number_is_none(dtype: torch.dtype) -> None:
    least = torch.finfo(dtype).smallest_normal
    want = torch.full((64,), least * 0.75, dtype=dtype)  # which some devices flush to zero
    assert not difference("w", torch.zeros(64, dtype=dtype), want, scale=norm(want), tolerance=1e-6).bad
    assert difference("w", want * 100, want * 50, scale=norm(want) * 50, tolerance=1e-6).bad


def test_float16_is_compared_below_its_smallest_normal_number_but_for_rounding() -> None:
    want = torch.full((64,), 1e-5, dtype=torch.float16)
    assert not difference("w", want + 2**-24, want, scale=norm(want), tolerance=10 * 2**-10).bad
    assert difference("w", want * 2, want, scale=norm(want), tolerance=10 * 2**-10).bad


def test_a_gradient_that_is_missing_counts_as_zeros() -> None:
    want = torch.full((4,), 2.0)
    assert difference("w", None, want, scale=norm(want), tolerance=0.1).error == pytest.approx(1.0)
    assert difference("w", want, None, scale=norm(want), tolerance=0.1).bad
    assert not difference("w", None, None, scale=1.0, tolerance=0.1).bad
    assert not difference("w", None, torch.zeros(4), scale=0.0, tolerance=0.1).bad
    assert difference("w", torch.ones(2), torch.ones(3), scale=1.0, tolerance=0.1).bad
    assert difference("w", torch.ones(2), torch.zeros(2), scale=0.0, tolerance=0.1).bad
    assert not difference("w", torch.ones(2).to_sparse(), torch.ones(2), scale=1.0, tolerance=0.0).bad


def test_a_gradient_that_is_zero_but_for_rounding_is_measured_by_its_siblings() -> None:
    reference = {"norm.weight": torch.full((4,), 2.0), "norm.bias": torch.full((4,), 1e-9), "other": torch.zeros(4)}
    scale = scales(reference)
    assert scale["norm.weight"] == pytest.approx(4.0) and scale["norm.bias"] == pytest.approx(4.0)
    assert scale["other"] > 0.0, "a zero gradient beside others has a scale"
    assert scales({"alone": torch.zeros(3)}) == {"alone": 0.0}


def test_tolerances_follow_the_rounding_that_was_measured() -> None:
    reference = {name: torch.ones(4) for name in "abc"}
    scale = dict.fromkeys(reference, 2.0)
    eps = eps_of(torch.float32)
    assert tolerances(reference, scale, dict.fromkeys(reference, 0.0)) == dict.fromkeys(reference, 16 * eps)
    noisy = tolerances(reference, scale, {"a": 2e-3, "b": 2e-5, "c": 0.0})
    assert noisy["a"] == pytest.approx(3e-3) and noisy["b"] == noisy["c"] == pytest.approx(3e-5)
    unmeasured = tolerances(reference, scale, None)
    assert 16 * eps < unmeasured["a"] < 1e-3, "still finds the smallest real fault"
    half = tolerances({"a": torch.ones(4, dtype=torch.bfloat16)}, {"a": 2.0}, None)
    assert eps_of(torch.bfloat16) < half["a"] < 0.5


@quickly
@given(st.lists(st.floats(-2, 2), min_size=1, max_size=4))
def test_the_weights_of_shards_are_found(weights: list[float]) -> None:
    numbers = range(len(weights))
    parts = [{"w": filled(torch.float64, 9, seed=i), "b": filled(torch.float64, 3, seed=9 + i)} for i in numbers]
    target = {key: sum(w * part[key] for w, part in zip(weights, parts, strict=True)) for key in ("w", "b")}
    found, residual = fit(target, parts)
    assert found == pytest.approx(weights, abs=1e-9) and residual < 1e-6
    unrelated = {key: filled(torch.float64, *value.shape, seed=99) for key, value in target.items()}
    assert fit(unrelated, parts)[1] > 0.1


def recipe(loss: Callable[[Any, Any], Any] = lambda model, batch: model(batch).mean()) -> Recipe:
    return Recipe(model=lambda: nn.Linear(2, 1), batch=lambda step: torch.ones(4, 2), loss=loss)


def test_every_nest_of_scalars_is_a_loss_and_of_two_precisions_the_better_one_is_kept() -> None:
    model, batch = nn.Linear(2, 1), torch.ones(4, 2)
    for make in (
        lambda value: value,
        lambda value: value.reshape(1, 1),
        lambda value: {"a": value / 2, "b": [value / 4, value / 4]},
        lambda value: (value, torch.tensor(7)),
        lambda value: ((value * 0).bfloat16(), value),
        lambda value: (value, (value * 0).bfloat16()),
    ):
        loss = compute_loss(recipe(lambda m, b, make=make: make(m(b).mean() + 1 / 3)), model, batch, step=0, seed=0)
        assert loss.value == pytest.approx(model(batch).mean().item() + 1 / 3, rel=1e-5) and not loss.drew


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda m, b: None, "returned NoneType without any tensor"),
        (lambda m, b: m(b), "shape (4, 1)"),
        (lambda m, b: m(b).mean() * 1j, "a complex number, which has no gradient; take its .real or"),
        (lambda m, b: m(b).mean().detach(), "does not require grad"),
        (lambda m, b: m(b).mean() / 0 * 0, "step 5 is nan"),
        (lambda m, b: m(b).mean() * math.inf, "inf: gradients that are not finite"),
        (lambda m: 0, "in step 5 raised TypeError: "),
    ],
    ids=["none", "no scalar", "complex", "no grad", "nan", "inf", "arguments"],
)
def test_what_is_no_loss_is_told(loss: Callable[..., Any], words: str) -> None:
    with pytest.raises(TargetError) as caught:
        compute_loss(recipe(loss), nn.Linear(2, 1), torch.ones(4, 2), step=5, seed=0)
    assert words in str(caught.value)


def test_gradients_start_from_nothing_and_a_draw_is_noticed() -> None:
    model, batch = nn.Linear(2, 1), torch.ones(4, 2)
    first, _ = compute_gradients(recipe(), model, batch, step=0, seed=0)
    second, _ = compute_gradients(recipe(), model, batch, step=1, seed=0)
    assert all(torch.equal(first[name], second[name]) for name in first)
    noisy = recipe(lambda m, b: F.dropout(m(b)).mean())
    assert compute_loss(noisy, model, batch, step=0, seed=0).drew


def test_state_comes_back_with_buffers_counters_and_what_nobody_registered() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.calls, model.cache = 0, torch.zeros(2)
    state = capture_state(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model(torch.randn(5, 2))
    model.calls += 1
    model.cache += 1
    with torch.no_grad():
        model[0].weight += 1
    identities = [id(tensor) for tensor in (*model.parameters(), *model.buffers())]
    state.restore(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.calls == 0 and model.cache.tolist() == [0.0, 0.0]
    assert [id(tensor) for tensor in (*model.parameters(), *model.buffers())] == identities


def test_a_copy_of_a_module_that_holds_tensors_with_a_graph() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    model.kept = model(torch.randn(5, 2))
    copied = copied_module(model)
    assert torch.equal(copied.kept, model.kept) and not copied.kept.requires_grad and model.kept.requires_grad
    ours = {t.data_ptr() for t in (*model.parameters(), model.kept)}
    assert not ours & {t.data_ptr() for t in (*copied.parameters(), copied.kept)}
    assert all(p.requires_grad for p in copied.parameters())


@dataclass
class Output:
    tensor: Any


class Named(dict[str, Any]):
    pass


@pytest.mark.parametrize("make", [lambda t: {"a": [t]}, Output, lambda t: Named(a=t), lambda t: SimpleNamespace(a=t)])
def test_the_tensors_that_ddp_would_find_in_an_output(make: Callable[[Any], Any]) -> None:
    tensor = torch.ones(1, requires_grad=True) * 2
    output = make(tensor)
    for static_graph, hidden in ((False, type(output) is SimpleNamespace), (True, type(output) is not dict)):
        found, opaque = visible_tensors([output], static_graph=static_graph)
        assert found == ([] if hidden else [tensor])
        assert opaque.endswith(type(output).__name__) if hidden else opaque == ""
    assert visible_tensors([torch.ones(1)]) == visible_tensors([None]) == ([], "")


VARIANTS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "vectors": ((3,), {}),
    "images": ((3, 4, 2), {}),
    "sequences": ((3, 5), {"momentum": 0.3}),
    "cumulative average": ((3,), {"momentum": None}),
    "no affine": ((3,), {"affine": False}),
    "no running statistics": ((3,), {"track_running_stats": False}),
}


def normalise(layer: Any, x: Any, weight: Any) -> tuple[Any, ...]:
    """Two training steps and one evaluation: outputs, gradients of input and parameters, statistics."""
    found = []
    for _ in range(2):
        x = x.detach().clone().requires_grad_()
        output = layer(x)
        for parameter in layer.parameters():
            parameter.grad = None
        (output * weight).sum().backward()
        found.append((output.detach(), x.grad, [p.grad for p in layer.parameters()]))
    statistics = [buffer.clone() for buffer in layer.buffers()]
    layer.eval()
    return found, statistics, layer(x).detach() if statistics else None


@pytest.mark.ddp(reuse="module")
@pytest.mark.parametrize("name", VARIANTS)
def test_synchronised_statistics_are_those_of_the_whole_batch(name: str, rank: int) -> None:
    shape, options = VARIANTS[name]
    x, weight = filled(torch.float64, 8, *shape), filled(torch.float64, 8, *shape, seed=1)
    kind = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d}[len(shape)]
    plain, plain_statistics, plain_evaluated = normalise(kind(3, dtype=torch.float64, **options), x, weight)

    for split in (4, 5):  # even and uneven
        mine = slice(0, split) if rank == 0 else slice(split, None)
        original = nn.SyncBatchNorm.forward
        with synchronised_on_cpu() as used:
            layer = nn.SyncBatchNorm(3, dtype=torch.float64, **options)
            steps, statistics, evaluated = normalise(layer, x[mine], weight[mine])
            nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(1, 1), nn.SyncBatchNorm(1)))
        assert used == ["SyncBatchNorm"] and nn.SyncBatchNorm.forward is original

        for (output, of_input, of_parameters), (whole, of_whole, plain_parameters) in zip(steps, plain, strict=True):
            torch.testing.assert_close(output, whole[mine])
            torch.testing.assert_close(of_input, of_whole[mine])
            for gradient in of_parameters:
                torch.distributed.all_reduce(gradient)
            torch.testing.assert_close(of_parameters, plain_parameters)
        torch.testing.assert_close(statistics, plain_statistics)
        if plain_evaluated is not None:
            torch.testing.assert_close(evaluated, plain_evaluated[mine])


@pytest.mark.ddp(reuse="module")
def test_the_stand_in_keeps_to_half_precision_inputs_and_refuses_what_torch_refuses() -> None:
    with synchronised_on_cpu():
        assert nn.SyncBatchNorm(3)(torch.randn(4, 3).bfloat16()).dtype is torch.bfloat16
        with pytest.raises(ValueError, match="expected at least 2D input"):
            nn.SyncBatchNorm(3)(torch.randn(3))


@pytest.mark.ddp(world_size=1)
def test_the_stand_in_works_in_a_group_of_one() -> None:
    x = filled(torch.float32, 6, 3)
    with synchronised_on_cpu():
        torch.testing.assert_close(nn.SyncBatchNorm(3)(x), nn.BatchNorm1d(3)(x))
