"""Random numbers that belong to a sample: real ones, and the same in a shard as in the whole batch."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ddpcheck.gather.state.randomness import SampleRandomness, seed_everything
from ddpcheck.gather.steps.training_step import random_numbers, sample_fingerprints
from ddpcheck.recipe.pytree import upcast

SAMPLES = list(range(100, 112))

DRAWS = {
    "rand": lambda rows: torch.rand(rows, 50),
    "rand_like": lambda rows: torch.rand_like(torch.empty(rows, 5, 10)),
    "uniform_": lambda rows: torch.empty(rows, 50).uniform_(-3, 5),
    "randn": lambda rows: torch.randn(rows, 50),
    "normal_": lambda rows: torch.empty(rows, 50).normal_(2, 3),
    "normal of tensors": lambda rows: torch.normal(torch.ones(rows, 50), torch.full((rows, 50), 2.0)),
    "bernoulli": lambda rows: torch.bernoulli(torch.full((rows, 50), 0.3)),
    "bernoulli_": lambda rows: torch.empty(rows, 50, dtype=torch.bool).bernoulli_(0.3),
    "randint": lambda rows: torch.randint(3, 9, (rows, 50)),
    "randint_like": lambda rows: torch.randint_like(torch.empty(rows, 50), 9),
    "random_": lambda rows: torch.empty(rows, 50).random_(2, 7),
    "exponential_": lambda rows: torch.empty(rows, 50).exponential_(2.0),
    "Gumbel softmax": lambda rows: F.gumbel_softmax(torch.zeros(rows, 50)),
    "dropout": lambda rows: F.dropout(torch.ones(rows, 50), 0.3),
    "native_dropout": lambda rows: torch.native_dropout(torch.ones(rows, 50), 0.3, True)[0],
    "dropout of channels": lambda rows: F.dropout2d(torch.ones(rows, 50, 2, 2), 0.3)[:, :, 0, 0],
    "choice": lambda rows: torch.multinomial(torch.arange(60.0).expand(rows, 60), 50),
    "choice with replacement": lambda rows: torch.multinomial(torch.arange(8.0).expand(rows, 8), 50, replacement=True),
    "rows of samples": lambda rows: torch.rand(rows * 5, 10).unflatten(0, (rows, 5)),
}


def drawn(draw: str, samples: list[int], *, times: int = 1) -> Tensor:
    seed_everything(3)
    with SampleRandomness(samples):
        for _ in range(times):
            result = DRAWS[draw](len(samples))
    return result.double()


def test_a_sample_has_the_same_numbers_in_a_shard_and_others_than_its_neighbours_and_at_the_next_draw() -> None:
    for draw in DRAWS:
        whole = drawn(draw, SAMPLES)
        shards = torch.cat([drawn(draw, SAMPLES[:5]), drawn(draw, SAMPLES[5:])])
        assert torch.equal(whole, shards), draw
        assert torch.equal(whole, drawn(draw, SAMPLES[::-1]).flip(0)), draw
        assert len({tuple(row.flatten().tolist()) for row in whole}) == len(SAMPLES), draw
        second = drawn(draw, SAMPLES, times=2)
        assert torch.equal(second[5:], drawn(draw, SAMPLES[5:], times=2)), draw
        assert not torch.equal(whole, second), draw


def test_the_numbers_are_distributed_as_those_of_torch() -> None:
    samples = list(range(400))
    for draw, function in DRAWS.items():
        torch.manual_seed(0)
        ours, torchs = drawn(draw, samples), function(400).double()
        allowed = 6 * float(torchs.std()) / 100  # six standard errors, of 20,000 numbers
        assert abs(float(ours.mean() - torchs.mean())) < allowed, draw
        assert abs(float(ours.std() - torchs.std())) < allowed, draw
        assert abs(float(ours.max() - torchs.max())) < float(torchs.std()) * 4, draw


def test_along_the_second_dimension() -> None:
    seed_everything(3)
    with SampleRandomness(SAMPLES):
        whole = torch.rand(7, 12, 3)
    seed_everything(3)
    with SampleRandomness(SAMPLES[4:8]):
        shard = torch.rand(7, 4, 3)
    assert torch.equal(whole[:, 4:8], shard)


@given(shape=st.sampled_from([(), (7,), (5, 3), (1, 13)]))
def test_what_has_no_part_for_each_sample_is_constant(shape: tuple[int, ...]) -> None:
    with SampleRandomness(SAMPLES):
        assert torch.rand(shape).unique().numel() == 1
        assert torch.randperm(5).tolist() == list(range(5))


class Masked(nn.Module):
    """Counts what its mask leaves, so that a checkpoint complains where the second forward draws another mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), 0.5)[torch.rand(x.shape[:2]) < 0.5].square().sum()


def test_a_checkpoint_draws_the_same_once_more_and_a_model_in_float64_too() -> None:
    model, batch = Masked(), torch.randn(4, 5, 6)
    gradients = []
    for run in ("plain", "checkpointed", "in float64"):
        module, data = (model.double(), upcast(batch)) if run == "in float64" else (model, batch)
        model.zero_grad()
        seed_everything(5)
        with random_numbers("by sample", module, data):
            loss = checkpoint(module, data, use_reentrant=False) if run == "checkpointed" else module(data)
            loss.backward()
        assert module.layer.weight.grad is not None
        gradients.append(module.layer.weight.grad.clone())
    assert torch.equal(gradients[0], gradients[1])
    assert torch.allclose(gradients[0].double(), gradients[2], rtol=1e-4, atol=1e-5)


def test_samples_are_known_by_their_values_whatever_the_dtype() -> None:
    batch = {"x": torch.randn(4, 3), "y": torch.arange(4), "half": torch.randn(4).bfloat16(), "lr": 0.1}
    batch["mask"] = torch.rand(4, 5) > 0.5
    samples = sample_fingerprints(upcast(batch))
    assert len(set(samples)) == 4
    part = {name: value[1:3] if isinstance(value, Tensor) else value for name, value in batch.items()}
    assert sample_fingerprints(part) == sample_fingerprints(batch)[1:3]
    assert sample_fingerprints(upcast(part)) == samples[1:3]
