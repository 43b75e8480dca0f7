"""A loop around a real Accelerator on two ranks, watched."""

import warnings
from pathlib import Path

import pytest

pytest.importorskip("torch")

import ddpcheck
from tests.integrations.test_transformers import added, describe, run_example
from tests.tiers import needs

pytestmark = [needs("accelerate"), pytest.mark.slow]  # a framework; `make test` has its smoke tests

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "transformers.md"


def train(*, steps=3, accumulation=1, loss="mean", equal=False, unused=False, every_batch=False, **options):
    """What the watch has found in some steps of a loop, and the FindingWarnings that were shown."""
    import torch
    import torch.distributed as dist
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import GradientAccumulationPlugin
    from torch import nn

    from ddpcheck.integrations.accelerate import watch

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(16, 8)
            self.head = nn.Linear(8, 16)
            if unused:
                self.spare = nn.Linear(8, 16)

        def forward(self, tokens):
            return self.head(self.embedding(tokens))

    AcceleratorState._reset_state()
    GradientState._reset_state()
    plugin = GradientAccumulationPlugin(num_steps=accumulation, sync_each_batch=every_batch)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin, **options)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    model = Model()
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def batch():
        tokens = torch.randint(16, (3, 6), generator=generator)
        lengths = torch.randint(1, 7, (3, 1), generator=generator)
        return tokens, tokens if equal else tokens.where(torch.arange(6) < lengths, torch.tensor(-100))

    with warnings.catch_warnings(record=True) as shown, watch(accelerator, model, on_finding="warn") as watched:
        warnings.simplefilter("always")
        for _ in range(steps):
            batches = [batch() for _ in range(accumulation)]
            total = sum((targets != -100).sum() for _, targets in batches)
            total = accelerator.reduce(total, "sum")
            for tokens, targets in batches:
                with accelerator.accumulate(prepared):
                    logits = prepared(tokens).flatten(0, 1)
                    value = nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction=loss)
                    if loss == "sum":
                        value = value * accumulation * accelerator.num_processes / total
                    accelerator.backward(value)
                    optimizer.step()
                    optimizer.zero_grad()
        watched.compare()
        assert watched.step == steps * (accumulation if every_batch else 1)
    assert not prepared._forward_hooks, "the watch has not let go"
    return describe(watched.findings), sum(issubclass(w.category, ddpcheck.FindingWarning) for w in shown)


@pytest.fixture(scope="module")
def world():
    with ddpcheck.World(world_size=2, timeout=100, preload=["accelerate"]) as world:
        yield world


@pytest.fixture
def trained(world):
    def run(**arguments):
        (findings, shown), (of_rank_1, shown_by_1) = world.run(train, **arguments)
        assert findings == of_rank_1 and not shown_by_1
        return findings, shown

    return run


@pytest.mark.parametrize(
    "case",
    [
        {"loss": "sum", "accumulation": 4},
        {"loss": "sum", "accumulation": 2, "every_batch": True, "steps": 5},
        {"loss": "sum", "accumulation": 2, "mixed_precision": "bf16"},
        {"accumulation": 2, "equal": True},
    ],
    ids=str,
)
def test_a_healthy_loop_is_left_in_peace(trained, case):
    assert trained(**case) == ([], 0)


def test_a_mean_of_means_over_micro_batches_or_ranks_is_found(trained):
    [finding], shown = trained(accumulation=3)
    assert finding.startswith("DDP514 error loss steps 0 targets") and shown == 1
    [finding], _ = trained()
    assert finding.startswith("DDP305 warning loss steps 0 targets")


def train_unwrapped():
    import gc

    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from ddpcheck.integrations.accelerate import watch

    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True)
    model, findings = accelerator.prepare(torch.nn.Linear(4, 2)), []
    watch(accelerator, model, on_finding=findings.append)
    model = accelerator.unwrap_model(model)
    gc.collect()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        accelerator.backward(model(torch.randn(3, 4)).square().mean())
        optimizer.step()
    return [finding.code for finding in findings]


def test_a_model_that_is_unwrapped_and_trained_alone_is_found_though_nobody_holds_the_watch(world):
    assert world.run(train_unwrapped) == [["DDP501"]] * 2


@pytest.mark.smoke
def test_an_unused_layer_is_named_in_the_first_step_under_accumulation(trained):
    [finding], _ = trained(accumulation=2, equal=True, unused=True)
    assert finding.startswith("DDP101 error spare.weight,spare.bias steps 0")


def test_the_example_ends_well_without_ddpcheck_and_is_told_its_fault_with_it(world, tmp_path):
    assert world.run(run_example, "accelerate/language_model.py", str(tmp_path)) == [None, None]
    for error, said in world.run(run_example, "accelerate/language_model_checked.py", str(tmp_path)):
        assert error == "FindingsError" and said.startswith("DDP514 accumulation-scale") and "in step 0" in said
        assert said.partition("  fix: ")[0] in PAGE.read_text(encoding="utf-8")
    assert added("accelerate/language_model") == [
        "from ddpcheck.integrations.accelerate import watch",
        "watched = watch(accelerator, model)",
        "watched.close()",
    ]


def in_one_process():
    from accelerate import Accelerator
    from torch import nn

    from ddpcheck.integrations.accelerate import watch

    accelerator = Accelerator(cpu=True)
    with watch(accelerator, accelerator.prepare(nn.Linear(2, 2))) as watched:
        assert watched.compare() == [] and watched.findings == () and watched.step == 0


def test_in_one_process_there_is_nothing_to_watch():
    with ddpcheck.World(world_size=1, timeout=100, preload=["accelerate"]) as world:
        world.run(in_one_process)


def unprepared():
    from accelerate import Accelerator
    from torch import nn

    from ddpcheck.integrations.accelerate import watch

    with pytest.raises(ddpcheck.UsageError, match=r"there is none for Linear; accelerator\.prepare makes it"):
        watch(Accelerator(cpu=True), nn.Linear(2, 2))


def test_a_model_that_was_not_prepared_is_refused_with_what_to_do(world):
    world.run(unprepared)
