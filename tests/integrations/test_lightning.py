"""`DDPCheckCallback` in real runs of Lightning's `Trainer` on two ranks: what it finds, and where it is silent.

Most fits are made on ranks of ours, which Lightning takes for those of a launcher; one script is started by its own.
"""

import difflib
import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import ANY

import pytest
import torch
import torch.distributed as dist

from ddpcheck import FindingsError, UsageError

pytestmark = [
    pytest.mark.ddp(world_size=2, preload=["lightning.pytorch", "torchmetrics"], timeout=120, reuse="module"),
    pytest.mark.slow,  # a framework; `make test` has its smoke tests
]

EXAMPLES = Path(__file__).parents[2] / "examples" / "lightning"
PAGE = Path(__file__).parents[2] / "docs" / "lightning.md"
LIGHTNING_SAYS = "It looks like your LightningModule has parameters that were not used in producing the loss"
UNUSED_TRUE = "ddp_find_unused_parameters_true"
BODY, LEFTOVER = ("body.0.weight", "body.0.bias"), ("leftover.weight", "leftover.bias")
AUXILIARY = ("auxiliary.weight", "auxiliary.bias")
WARN = {"on_finding": "warn"}
STATISTICS = ("body.1.running_mean", "body.1.running_var")
EVERY = {"check_consistency_every": 1, "check_parity_every": 1}


@pytest.fixture
def r(rank: int) -> Any:
    """The modules and the runs: imported on ranks alone."""
    from tests import lightning_runs

    return lightning_runs


# Parameters


@pytest.mark.parametrize(
    ("model", "code", "subjects", "says", "precision"),
    [
        ("Unused", "DDP101", LEFTOVER, "No operation of the forward pass reads", 32),
        ("Detached", "DDP103", BODY, "cut by detach() at tests/lightning_runs.py:", "bf16"),
        ("NotInLoss", "DDP102", AUXILIARY, "does not reach the loss", 32),
        ("ManualUnused", "DDP102", LEFTOVER, "do not contribute to the loss", "bf16"),
    ],
)
def test_a_parameter_without_a_part_is_named_in_the_step_itself(r, model, code, subjects, says, precision):
    run = r.fit(getattr(r, model), precision="bf16-mixed" if precision == "bf16" else 32)
    assert isinstance(run.error, FindingsError)
    assert run.trainer.global_step == 0  # no optimizer has stepped
    assert (run.finding.code, run.finding.subjects, run.finding.steps, run.finding.ranks) == (code, subjects, (0,), ())
    assert says in run.finding.message
    assert run.finding.location.path == "tests/lightning_runs.py"
    assert run.finding.message in str(run.error)  # and not the text that Lightning puts in the place of DDP's
    assert run.warned == []


FOUND = {  # the fit, code, subjects and ranks
    "fully_shard": (
        *(lambda r: r.fit(r.ShardedUnused, max_epochs=3, strategy=r.shards(), check=WARN), "DDP102"),
        *(("2.weight", "2.bias"), ()),
    ),
    "in the only step": (lambda r: r.fit(r.NotInLoss, max_steps=1, check=WARN), "DDP102", AUXILIARY, ()),
    "a branch of one rank": (lambda r: r.fit(r.RankOneSkips), "DDP104", ("gate.weight", "gate.bias"), (1,)),
    "unfrozen later": (lambda r: r.fit(r.Net, max_epochs=3, callbacks=[r.Unfreezes()]), "DDP503", BODY, ()),
    "a half of a GAN frozen while the other learns": (lambda r: r.fit(r.Gan), "DDP503", ANY, ()),
    "modules that differ, before DDP stops on them": (lambda r: r.fit(r.MoreOnRankOne), "DDP201", ANY, ANY),
    "buffers that drift": (
        *(lambda r: r.fit(r.Normalised, strategy=r.DDPStrategy(broadcast_buffers=False)), "DDP214", STATISTICS, ANY),
    ),
    "buffers that DDP overwrites": (lambda r: r.fit(r.Normalised), "DDP215", STATISTICS, ANY),
}


@pytest.mark.parametrize(
    ("fit", "code", "subjects", "ranks"),
    [pytest.param(*row, id=name, marks=[pytest.mark.smoke] * ("only" in name)) for name, row in FOUND.items()],
)
def test_a_fault_is_found(r, fit, code, subjects, ranks):
    run = fit(r)
    assert (run.finding.code, run.finding.subjects, run.finding.ranks) == (code, subjects, ranks)
    errors = {"DDP102": [type(None)], "DDP201": [FindingsError]}  # the former are fits that warn
    assert type(run.error) in errors.get(code, [type(None), FindingsError])


@pytest.mark.parametrize("model", ["Unused", "ManualUnused"])
def test_training_goes_on_where_findings_are_warned_of(r, model, rank):
    run = r.fit(getattr(r, model), check=WARN)
    assert run.error is None
    assert run.trainer.global_step == (8 if model == "ManualUnused" else 4)
    assert len(run.codes) == 1
    assert run.warned == (list(run.callback.findings) if rank == 0 else [])


# Looking for the cause disturbs nothing


def test_a_training_step_that_is_run_again_for_the_cause_leaves_no_trace(r):
    def what_is_kept(*, watched):
        logger = r.Keeps()
        options = {"strategy": UNUSED_TRUE, "max_epochs": 3, "logger": logger, "log_every_n_steps": 1}
        run = r.fit(r.MeasuredDetached, watched=watched, check=WARN, **options)
        assert run.error is None
        assert run.codes == (["DDP103"] if watched else [])
        random = torch.get_rng_state()
        return [run.trainer.lightning_module.kept(), dict(run.trainer.callback_metrics), str(logger.told), random]

    one, other = what_is_kept(watched=False), what_is_kept(watched=True)
    assert one[2] == other[2] != "[]"
    torch.testing.assert_close([one[0], one[1], one[3]], [other[0], other[1], other[3]], rtol=0, atol=0)


def test_no_batch_is_taken_from_an_iterator_to_find_the_cause(r):
    model = r.TakesTheIterator()
    run = r.fit(model, check=WARN)
    assert (run.finding.code, run.finding.subjects) == ("DDP102", LEFTOVER)
    assert model.taken == run.trainer.global_step == 4


# State


@pytest.mark.parametrize("check", [{}, {"check_consistency_every": 1}])
def test_parameters_that_change_on_one_rank_are_found(r, check):
    run = r.fit(r.Net, callbacks=[r.ChangesRankOne()], check=check)
    assert isinstance(run.error, FindingsError)
    assert (run.finding.code, run.finding.subjects) == ("DDP306", ("body.0.weight",))
    assert run.trainer.global_step == (2 if check else 4)


def test_an_optimizer_that_steps_on_some_ranks_is_found_and_so_is_what_a_checkpoint_would_keep(r):
    run = r.fit(
        r.SkipsAStep,
        max_epochs=9,
        enable_checkpointing=True,
        callbacks=[r.callbacks.ModelCheckpoint(every_n_train_steps=3)],
    )
    assert run.codes == ["DDP306"]
    assert run.trainer.global_step < 4  # not at the end of the epoch


def test_a_backward_pass_past_the_strategy_is_never_averaged(r):
    run = r.fit(r.ManualPastTheStrategy)
    assert run.codes == ["DDP306"]
    assert "no backward pass has been averaged" in run.finding.message
    assert run.trainer.global_step == 2  # of two optimizers: in the first batch
    assert r.fit(r.Manual).codes == []


# Accumulation, and the other things that Lightning's strategy does around DDP


def test_a_no_sync_that_never_took_effect_is_found(r):
    """Seed 5, block_backward_sync yields model.no_sync() without entering it, so accumulation synchronises anyway."""
    run = r.fit(r.Net, strategy=r.NeverEnters(), accumulate_grad_batches=2)
    assert run.error is None
    assert run.finding.code == "DDP502"
    assert "never entered" in run.finding.message
    assert run.finding.location.path == "tests/lightning_runs.py"


def test_the_wrapper_is_built_with_the_users_arguments(r):
    """Seed 5, configure_ddp builds the wrapper with the user's keyword arguments, find_unused_parameters=False by
    default."""
    seen = {}

    class Sees(r.DDPStrategy):
        def configure_ddp(self):
            super().configure_ddp()
            seen.update(unused=self.model.find_unused_parameters, view=self.model.gradient_as_bucket_view)

    assert r.fit(r.Sometimes, strategy=Sees(gradient_as_bucket_view=True)).codes == ["DDP101"]
    assert seen == {"unused": False, "view": True}
    assert r.fit(r.Sometimes, strategy=Sees(find_unused_parameters=True)).codes == []
    assert seen == {"unused": True, "view": False}


def test_the_connection_is_that_of_the_cluster_environment(r, rank):
    """Seed 5, init_ddp_connection: address, port and world size from a cluster environment, gloo without a GPU."""
    run = r.fit(r.Net)
    environment = run.trainer.strategy.cluster_environment
    assert (
        (environment.world_size(), environment.global_rank()) == (2, rank) == (dist.get_world_size(), dist.get_rank())
    )
    assert run.trainer.strategy.process_group_backend == dist.get_backend() == "gloo"


def test_the_batch_that_is_moved_to_the_device_is_the_one_that_is_run_again(r):
    """Seed 5, moves the batch to the device before forward."""

    class Moves(r.Detached):
        def __init__(self):
            super().__init__()
            self.moved = 0

        def transfer_batch_to_device(self, batch, device, index):
            self.moved += 1
            return {"x": batch[0].to(device), "y": batch[1].to(device)}

        def training_step(self, batch, index):
            return r.cross_entropy(self(batch["x"]), batch["y"])

    run = r.fit(Moves, max_steps=1, check=WARN)
    assert run.codes == ["DDP103"]
    assert run.trainer.lightning_module.moved == 1


def test_the_model_is_unwrapped_and_bare_after_fit_and_after_an_exception(r):
    """Seed 5, unwraps the model."""
    for model, failed in ((r.Net(), False), (r.Unused(), True)):
        before = r.left_behind(model)
        run = r.fit(model)
        assert (run.error is not None) == failed
        assert run.trainer.strategy.model is model
        assert r.left_behind(model) == before
        assert "forward" not in vars(model) or vars(model)["forward"] == model.forward
        assert not {"log", "log_dict", "print"} & vars(model).keys()


def test_the_samples_are_those_of_a_distributed_sampler(r):
    """Seed 5, sampler arguments: each rank trains on its own half, and the gradients are the average."""

    class Keeps(r.Net):
        seen = ()

        def training_step(self, batch, index):
            self.seen = (*self.seen, *batch[0][:, 0].tolist())
            return super().training_step(batch, index)

    run = r.fit(Keeps, check=EVERY)
    assert run.codes == []
    seen = [None, None]
    dist.all_gather_object(seen, run.trainer.lightning_module.seen)
    assert len({*seen[0], *seen[1]}) == 32


def test_the_ranks_compared_are_those_of_the_data_parallel_group(r):
    """Seed 5, the data-parallel group."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    strategy = r.DDPStrategy(
        process_group=alone
    )  # each rank averages with itself, so parameters part, as they were told
    assert r.fit(r.Net, strategy=strategy, check={"check_consistency_every": 1}).codes == []


def test_a_run_that_goes_on_from_a_checkpoint_with_optimizer_state_is_clean(r, tmp_path):
    """Seed 5, optimizer state."""

    class Momentum(r.Net):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.1)

    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    path = f"{folder[0]}/saved.ckpt"
    first = r.fit(Momentum, saves=path)
    second = r.fit(Momentum, max_epochs=2, ckpt_path=path, check=EVERY)
    assert (first.codes, second.codes, second.trainer.global_step) == ([], [], 8)


def test_each_manual_backward_is_a_reduction_of_its_own(r):
    """Seed 5, prepares and resets the reducer around a manual backward; manual optimisation."""
    for model, averaged in ((r.Manual, 4), (r.ManualTwice, 8), (r.ManualAccumulation, 2)):
        run = r.fit(model, check=EVERY)
        assert (run.error, run.codes, run.averaged) == (None, [], averaged)


# Healthy runs


def checkpoints(r, *others, **options):
    callbacks = [r.callbacks.ModelCheckpoint(monitor="val", **options), *others]
    return r.fit(r.Net, val=True, max_epochs=2, enable_checkpointing=True, callbacks=callbacks)


HEALTHY = {
    "automatic": lambda r: r.fit(r.Net, max_epochs=3),
    "accumulation": lambda r: r.fit(r.Net, accumulate_grad_batches=2, check=EVERY),
    "bf16-mixed": lambda r: r.fit(r.Net, precision="bf16-mixed", check=EVERY),
    "clipping": lambda r: r.fit(r.Net, gradient_clip_val=0.1, check=EVERY),
    "manual, bf16-mixed": lambda r: r.fit(r.ManualAccumulation, precision="bf16-mixed"),
    "static graph": lambda r: r.fit(r.Net, strategy=r.DDPStrategy(static_graph=True), check=EVERY),
    "fully_shard": lambda r: r.fit(r.Sharded, max_epochs=2, strategy=r.shards()),
    "gan": lambda r: r.fit(r.Gan, max_epochs=3, strategy=UNUSED_TRUE),
    "a condition": lambda r: r.fit(r.Sometimes, max_epochs=3, strategy=UNUSED_TRUE),
    "checkpoints": lambda r: checkpoints(r, r.callbacks.EarlyStopping("val"), save_last=True),
    "swa": lambda r: r.fit(
        r.Net, max_epochs=3, callbacks=[r.callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1)]
    ),
    "ema": lambda r: checkpoints(r, r.callbacks.EMAWeightAveraging()),
}


@pytest.mark.parametrize(
    "fit",
    [pytest.param(fit, id=name, marks=[pytest.mark.smoke] * (name == "automatic")) for name, fit in HEALTHY.items()],
)
def test_of_a_healthy_run_nothing_is_said(r, fit):
    run = fit(r)
    assert run.error is None, run.error
    assert run.codes == []
    assert run.warned == []


# The callback itself


def test_a_callback_serves_a_second_fit_and_tells_of_it_afresh(r):
    callback = r.DDPCheckCallback(on_finding="warn")
    for _ in range(2):
        r.fit(r.Unused, watched=False, callbacks=[callback])
        assert [finding.code for finding in callback.findings] == ["DDP101"]


def test_without_ddp_there_is_nothing_to_do_and_with_more_processes_it_says_so(r):
    run = r.fit(r.Unused, strategy="auto", devices=1)
    assert (run.error, run.codes) == (None, [])


@pytest.mark.smoke
def test_an_argument_that_is_no_choice_is_refused_at_once(r):
    with pytest.raises(UsageError, match="on_finding"):
        r.DDPCheckCallback(on_finding="log")


def test_it_works_where_only_pytorch_lightning_is_installed(monkeypatch):
    import lightning.pytorch

    for name in [name for name in sys.modules if name.split(".")[0] == "lightning"]:
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not there
    monkeypatch.setitem(sys.modules, "pytorch_lightning", lightning.pytorch)
    found = importlib.util.find_spec("ddpcheck.integrations.lightning")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    assert issubclass(module.DDPCheckCallback, lightning.pytorch.Callback)


# The examples, and the page that shows them


def run_here(script: str) -> BaseException:
    """What ends a script that runs on these ranks, which a launcher has started as far as Lightning knows."""
    with mock.patch.dict(os.environ):  # Lightning takes some variables out and puts some in
        try:
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        except Exception as error:
            return error
    raise AssertionError(f"{script} runs to the end")


def as_on_the_page(text: str) -> bool:
    return " ".join(text.split()) in " ".join(PAGE.read_text("utf-8").split())


def test_the_page_shows_what_lightning_says_of_the_example_and_what_the_callback_says():
    before, after = run_here("train.py"), run_here("train_checked.py")
    assert type(before) is RuntimeError
    assert [finding.code for finding in after.findings] == ["DDP101", "DDP103"]
    assert as_on_the_page(str(before))
    assert as_on_the_page(str(after))


def test_the_drop_in_is_an_import_and_an_argument(ddp_world):
    plain, checked = ((EXAMPLES / name).read_text("utf-8") for name in ("train.py", "train_checked.py"))
    added = [line[2:].strip() for line in difflib.ndiff(plain.splitlines(), checked.splitlines()) if line[0] == "+"]
    program = [line for line in added if line][2:]  # after the docstring
    assert program == [
        "from ddpcheck.integrations.lightning import DDPCheckCallback",
        "callbacks=[DDPCheckCallback()],",
    ]


@pytest.mark.launchers
def test_a_script_that_lightning_itself_starts_on_two_processes_stops_with_the_findings(ddp_world):
    outside = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "examples/lightning/train_checked.py"],
        cwd=EXAMPLES.parents[1],
        env={**outside, "PYTHONPATH": str(EXAMPLES.parents[1])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1
    assert "DDP101 unused-parameter at examples/lightning/train_checked.py:19" in done.stderr
    assert "cut by detach() at examples/lightning/train_checked.py:24" in done.stderr
    assert LIGHTNING_SAYS not in done.stderr
