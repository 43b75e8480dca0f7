"""The same checks with the reducer of a GPU. Needs torch, pytest, numpy and a CUDA device, and nothing else."""

import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ddpcheck.findings.errors import UsageError  # noqa: E402
from ddpcheck.findings.report import Report  # noqa: E402
from ddpcheck.findings.rules import Severity  # noqa: E402
from ddpcheck.harness import World  # noqa: E402
from ddpcheck.recipe.recipe import Recipe  # noqa: E402
from ddpcheck.report.checking.check import check  # noqa: E402
from tests.faultsuite.cases import FAULTS as FOLDER  # noqa: E402
from tests.faultsuite.cases import Case, all_cases  # noqa: E402
from tests.faultsuite.runs import faults_in  # noqa: E402
from tests.reports import shown  # noqa: E402
from tests.zoo import targets  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda.is_available() is False: no CUDA device"),
]

HEALTHY = (
    *("adamw_two_groups", "autocast_bfloat16", "conv_groupnorm", "conv_syncbn", "double_precision", "dropout_rnn"),
    *("embedding_padding_idx", "gradient_as_bucket_view", "lstm", "mixed_dtypes", "transformer_tied_dropout"),
    *("allgather_contrastive", "two_forwards_one_backward", "vae"),
)
FAULTS = {
    *("gradients/summed_loss", "gradients/batchnorm", "gradients/dice_loss", "gradients/unequal_shards"),
    *("parameters/layers_in_a_list", "parameters/times_zero", "parameters/moe_idle_expert", "parameters/item"),
    *("parameters/unused", "parameters/detach", "parameters/unused_on_one_rank", "parameters/sparse_embedding_unused"),
    *("ranks/parameter_shape", "ranks/dtype_double", "ranks/parameter_names_differ", "ranks/activation_differs"),
    *("ranks/buffer_values_from_shard", "ranks/learning_rate", "ranks/find_unused_on_one_rank", "ranks/channels_last"),
    *("running/raises_on_one_rank", "running/reentrant_checkpoint", "running/killed", "ranks/dtype_bfloat16"),
    *("training/comm_hook_forgets_division", "training/comm_hook_overflows", "training/inner_module_called"),
}
NOTE_OF_SHARING = "several ranks share one GPU"


def target_of(name: str) -> str:
    """A healthy recipe of the zoo, or a broken one of the fault suite."""
    fault = FOLDER / f"{name}.py"
    return f"{fault}:broken" if fault.exists() else targets("healthy")[name]


def on_gpu(name: str, **options: Any) -> Report:
    return check(target_of(name), device="cuda", timeout=60, **options)


def assert_healthy(report: Report) -> None:
    assert report.error is None, shown(report)
    assert report.at_or_above(Severity.WARNING) == (), shown(report)
    assert {check.status for check in report.checks} == {"passed"}, shown(report)
    assert report.world["device"] == "cuda"


@pytest.mark.parametrize("name", HEALTHY)
def test_two_ranks_of_a_healthy_recipe_are_clean(name: str) -> None:
    report = on_gpu(name)
    assert_healthy(report)
    assert not any("SyncBatchNorm" in note for note in report.world["notes"]), "no stand-in"
    assert {entry.reference for entry in report.parity} == {"local", "single-process"}


@pytest.mark.parametrize("case", [case for case in all_cases() if str(case) in FAULTS], ids=str)
def test_two_ranks_find_a_fault_of_the_suite_and_pass_its_twin(case: Case) -> None:
    report = check(f"{case.path}:broken", device="cuda", timeout=60)
    assert faults_in(case, report) == [], shown(report)
    assert_healthy(check(f"{case.path}:fixed", device="cuda", timeout=60))


@pytest.mark.parametrize("name", ["conv_syncbn", "lstm"])
def test_one_rank_runs_through_nccl_by_default(name: str) -> None:
    report = on_gpu(name, world_size=1)
    assert report.world["backend"] == "nccl" and not any(NOTE_OF_SHARING in note for note in report.world["notes"])
    assert_healthy(report)


def test_the_backend_follows_the_number_of_gpus_and_sharing_is_said() -> None:
    report = on_gpu("conv_groupnorm", world_size=2)
    shared = torch.cuda.device_count() < 2
    assert report.world["backend"] == ("gloo" if shared else "nccl")
    assert any(NOTE_OF_SHARING in note for note in report.world["notes"]) is shared
    more = torch.cuda.device_count() + 1
    report = on_gpu("conv_groupnorm", world_size=more)
    assert report.world["backend"] == "gloo" and any(NOTE_OF_SHARING in note for note in report.world["notes"])
    assert_healthy(report)


def test_nccl_with_more_ranks_than_gpus_is_wrong_usage() -> None:
    more = torch.cuda.device_count() + 1
    with pytest.raises(UsageError, match=f"nccl.*GPU for every rank.*{more} ranks"):
        on_gpu("conv_groupnorm", world_size=more, backend="nccl")


def test_parameters_and_batches_are_on_the_device_of_the_rank() -> None:
    def loss(model: Any, batch: Any) -> Any:
        assert batch["x"].device.type == "cuda" and next(model.parameters()).device.type == "cuda"
        return model(batch["x"]).square().mean()

    torch.zeros(1, device="cuda")  # a world can be made after this process has used the GPU
    recipe = Recipe(
        model=lambda: torch.nn.Linear(4, 1),
        batch=lambda step: {"x": torch.randn(8, 4)},
        loss=loss,
    )
    assert_healthy(check(recipe, device="cuda", timeout=60))


def test_fingerprints_are_the_same_on_both_devices() -> None:
    from ddpcheck.gather.state.fingerprints import fingerprint

    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.bool):
        for shape in ((), (0,), (5, 7), ((1 << 20) + 3,)):
            tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
            assert fingerprint(tensor.cuda()) == fingerprint(tensor), (dtype, shape)


def test_silenced_random_numbers_are_the_same_on_shards_on_the_gpu() -> None:
    from ddpcheck.gather.state.randomness import QuietRandomness, without_rnn_dropout

    encoder = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True).cuda()
    lstm = torch.nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True).cuda()
    x = torch.randn(6, 5, 8, device="cuda")
    for layer in (encoder, lambda x: lstm(x)[0], torch.nn.Dropout(0.5)):
        with without_rnn_dropout(lstm), QuietRandomness():
            whole, shards = layer(x), torch.cat([layer(x[:4]), layer(x[4:])])
        torch.testing.assert_close(whole, shards, rtol=1e-3, atol=1e-4)


@pytest.mark.ddp
def test_a_rank_on_the_cpu_does_not_touch_the_gpu() -> None:
    assert not torch.cuda.is_initialized()


def gpu_users() -> set[int]:
    """The processes that have a device file of the driver open, which every CUDA context needs."""
    users = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                links = [os.readlink(link) for link in (folder / "fd").iterdir()]
            except OSError:
                continue
            if any(link.startswith("/dev/nvidia") for link in links):
                users.add(int(folder.name))
    return users


def parents_of_ranks() -> tuple[int, int]:
    torch.zeros(1, device="cuda")
    return os.getpid(), os.getppid()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_the_fork_server_never_opens_the_gpu_while_its_ranks_do() -> None:
    with World(2, device="cuda", start_method="fork", timeout=60) as world:
        found = world.run(parents_of_ranks)
        users = gpu_users()
    ranks, servers = {pid for pid, _ in found}, {parent for _, parent in found}
    assert ranks <= users, "both ranks have a CUDA context"
    assert len(servers) == 1 and not servers & (users | {os.getpid()})


def test_the_same_recipe_gets_the_same_verdict_on_both_devices() -> None:
    for name in ("parameters/unused", "gradients/summed_loss", "lstm"):
        reports = [on_gpu(name), check(target_of(name), timeout=60)]
        assert len({tuple((f.code, f.subjects, f.ranks) for f in report.findings) for report in reports}) == 1
