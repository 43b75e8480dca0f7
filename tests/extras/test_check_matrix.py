"""The matrix on real ranks: verdicts are those of a check, and options reach DDP whoever calls it."""

from pathlib import Path

import pytest

import ddpcheck
from ddpcheck.extras.matrix.check_matrix import COMPILED, SYNCED, UNSYNCED, _MatrixRun, variant_rows
from ddpcheck.report.checking.check_run import CheckRun
from ddpcheck.report.checking.check_state import CheckOptions
from ddpcheck.report.matrix.matrix import Matrix, MatrixRow
from tests.faultsuite.cases import FAULTS
from tests.tiers import one_of, share

ZOO = Path(__file__).parents[1] / "zoo"
HEAD = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

def model():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

def batch(step):
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))

def loss(model, batch):
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
"""


def broken(name: str) -> str:
    return f"{FAULTS / name}.py:broken"


def matrix_of(target: Path | str, **options) -> Matrix:
    return ddpcheck.check_matrix(str(target), **{"timeout": 20, "steps": 2, "step_times": False, **options})


def verdicts(matrix: Matrix) -> dict[str, str]:
    return {row.title: f"{row.verdict} {row.code}".strip() for row in matrix.rows}


def said(matrix: Matrix, kind: str) -> str:
    return " ".join(advice.message for advice in matrix.advice if advice.kind == kind)


@pytest.fixture(autouse=True)
def _without_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have tests of their own; tests/test_readme.py runs a whole matrix."""
    monkeypatch.setattr(_MatrixRun, "_try_variants", lambda run: None)


@pytest.fixture
def recipe(tmp_path: Path):
    def write(tail: str) -> Path:
        path = tmp_path / "check_this.py"
        path.write_text(HEAD + tail)
        return path

    return write


@pytest.mark.exhaustive
def test_heads_that_take_turns_need_find_unused_parameters() -> None:
    matrix = matrix_of(ZOO / "healthy" / "alternating_heads_find_unused.py")
    found = verdicts(matrix)
    assert matrix.own is not None and matrix.own.options.arguments == {"find_unused_parameters": True}
    assert (found["defaults"], found["static_graph=True"]) == ("stops DDP105", "stops DDP513")
    assert found["find_unused_parameters=True, gradient_as_bucket_view=True"] == "right"
    assert found["find_unused_parameters=True, skip_all_reduce_unused_params=True"] == "right"
    assert said(matrix, "needs").startswith("It needs find_unused_parameters=True: without, it stops: DDP105 heads.0")
    assert matrix.ok


@pytest.mark.exhaustive
def test_a_layer_in_two_reentrant_checkpoints_needs_static_graph() -> None:
    matrix = matrix_of(broken("running/reentrant_checkpoint"))
    found = verdicts(matrix)
    assert (found["defaults"], found["find_unused_parameters=True"]) == ("stops DDP406", "stops DDP406")
    assert found["static_graph=True"] == "right"
    assert said(matrix, "needs") == "It needs static_graph=True."
    assert matrix.exit_code() == 1


@pytest.mark.slow
def test_fully_shard_is_tried_in_the_place_of_ddp_and_with_replicas_on_four_ranks(recipe) -> None:
    path = recipe(
        """
model = lambda: nn.Linear(8, 6)
batch = lambda step: torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
loss = lambda model, x: model(x).square().mean()
"""
    )
    for world_size, replicas in ((2, []), (4, ["fully_shard, 2 replicas of 2 shards"])):
        rows = ddpcheck.check_matrix(str(path), world_size=world_size, steps=2, step_times=False).rows
        found = {row.title: row.verdict for row in rows if row.label}
        assert found == dict.fromkeys(["fully_shard", *replicas], "right")


@pytest.mark.exhaustive
def test_a_model_that_fully_shard_refuses_is_right_under_ddp_all_the_same(recipe) -> None:
    path = recipe(
        """
def model():
    net = nn.Linear(8, 6)
    net.weight = nn.Parameter(torch.ones(8, 6).t())
    return net

batch = lambda step: torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
loss = lambda model, x: model(x).square().mean()
"""
    )
    matrix = ddpcheck.check_matrix(str(path), steps=2, step_times=False)
    (row,) = (row for row in matrix.rows if row.label)
    assert matrix.ok and matrix.error is None
    assert (row.title, row.verdict) == ("fully_shard", "stops") and "non-contiguous" in row.reason


def variants_of(path: Path) -> dict[str, MatrixRow]:
    asked = CheckOptions(backend="gloo", timeout=20)
    return {
        row.title: row
        for row in variant_rows(str(path), asked, MatrixRow({}, "right", own=True), lambda _words: None, None)
    }


@pytest.mark.slow
def test_steps_in_micro_batches_and_compiled_are_those_of_the_batch(recipe) -> None:
    found = variants_of(recipe(""))
    assert {title: row.verdict for title, row in found.items()} == dict.fromkeys((UNSYNCED, SYNCED, COMPILED), "right")
    assert all(row.error is not None and row.error < 1e-5 for row in found.values())


@pytest.mark.slow
def test_a_loss_over_a_count_of_the_batch_is_no_mean_over_micro_batches_and_not_all_is_compiled(recipe) -> None:
    path = recipe(
        """
import torch.distributed as dist

class Net(nn.Sequential):
    def forward(self, x):
        if torch.compiler.is_compiling():
            raise ValueError
        return super().forward(x)

def loss(model, batch):
    wanted = (batch[:, 0] > -0.6).float()
    count = wanted.sum()
    dist.all_reduce(count)
    return ((model(batch)[:, 0] - batch.sum(1)).square() * wanted).sum() * 2 / count

model = lambda: Net(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
"""
    )
    found = variants_of(path)
    assert [(row.verdict, row.code) for row in found.values()] == [*[("wrong", "DDP514")] * 2, ("incomplete", "")]
    assert "not a mean over samples" in found[SYNCED].reason
    assert found[COMPILED].reason == "torch.compile has compiled nothing of it"


@pytest.mark.slow
def test_a_step_that_raises_in_micro_batches_under_the_wrapper_costs_its_own_row_only(recipe) -> None:
    path = recipe(
        """
def loss(model, batch):
    if isinstance(model, DistributedDataParallel) and len(batch) < 6:
        raise ValueError("too few")
    return (model(batch)[:, 0] - batch.sum(1)).square().mean()
"""
    )
    found = variants_of(path)
    assert [row.verdict for row in found.values()] == ["stops", "stops", "right"]
    assert "too few" in found[UNSYNCED].reason


@pytest.mark.slow
def test_what_cannot_be_split_or_compiled_is_skipped_with_the_reason(recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpcheck.extras.matrix.check_matrix._LONGEST_COMPILATION", 1e-3)
    found = variants_of(recipe("\nbatch = lambda step: torch.ones(10, 8)\n"))
    assert {row.verdict for row in found.values()} == {"skipped"}
    assert found[UNSYNCED].reason == "the 5 samples of a rank cannot be split into 2 equal micro-batches"
    assert found[COMPILED].reason == "to compile it takes more than 0.001 s"


@pytest.mark.exhaustive
def test_no_option_mends_a_loss_that_sums() -> None:
    matrix = matrix_of(broken("gradients/summed_loss"))
    assert {row.code for row in matrix.rows if row.verdict != "skipped"} == {"DDP305"}
    assert "not mended by any option" in said(matrix, "fault")


@pytest.mark.exhaustive
def test_a_buffer_that_broadcasts_overwrite_needs_them_off(recipe) -> None:
    """It has a value for each sample, so that gradients do not depend on which rank has which."""
    path = recipe(
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.register_buffer("mask", torch.ones(6, 1))

    def forward(self, x, masks):
        if masks:
            self.mask = (x[:, :1] > 0).float()
        return self.head(self.body(x).tanh() * self.mask)


model = Net
batch = lambda step: torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
loss = lambda model, x: (model(x, True) + model(x.flip(1), False) - x.sum(1, keepdim=True)).square().mean()
"""
    )
    matrix = matrix_of(path)
    found = {row.title: row for row in matrix.rows}
    assert (found["defaults"].verdict, found["defaults"].code) == ("wrong", "DDP311")
    without = next(row for title, row in found.items() if row.fine)
    assert set(without.arguments.values()) == {False}  # forward_sync_buffers, or broadcast_buffers where there is none
    assert said(matrix, "needs") == f"It needs {without.title}."


@pytest.mark.exhaustive
def test_no_option_mends_a_buffer_of_which_each_rank_needs_another_value() -> None:
    matrix = matrix_of(broken("gradients/buffer_broadcast_between_forwards"))
    assert {row.code for row in matrix.rows if row.verdict != "skipped"} == {"DDP311", "DDP214"}
    assert said(matrix, "fault").startswith("The fault is not mended by any option (DDP311 and DDP214 under all")


@pytest.mark.slow
def test_buffers_that_drift_without_broadcasts_are_told_from_those_that_are_overwritten() -> None:
    matrix = matrix_of(broken("ranks/moving_average_overwritten"))
    codes = {row.title: {finding.code for finding in row.findings} for row in matrix.rows if row.verdict == "right"}
    [off] = [title for title in codes if "sync_buffers" in title or "broadcast" in title]
    assert codes["defaults"] == {"DDP215"} and codes[off] == {"DDP214"}
    assert off in said(matrix, "warns")


@pytest.mark.exhaustive
def test_a_compression_hook_is_right_up_to_its_rounding_and_wrong_if_gradients_vanish_in_it(tmp_path: Path) -> None:
    matrix = matrix_of(ZOO / "healthy" / "bias_without_gradient.py")  # where one is nothing but rounding
    [hooked] = [row for row in matrix.rows if row.hook == "fp16_compress_hook"]
    assert hooked.verdict == "lossy" and 1e-5 < hooked.error < 1e-2
    tiny = (ZOO / "healthy" / "tiny_grads.py").read_text()
    (tmp_path / "small.py").write_text(tiny.replace("1e-40", "1e-12"))  # normal numbers of float32, 0 in float16
    [hooked] = [row for row in matrix_of(tmp_path / "small.py").rows if row.hook == "fp16_compress_hook"]
    assert (hooked.verdict, hooked.code) == ("wrong", "DDP302")
    assert hooked.reason.startswith("what fp16_compress_hook rounds away is up to")


@pytest.mark.slow
def test_a_row_that_fails_costs_its_own_world_only() -> None:
    matrix = matrix_of(ZOO / "healthy" / "expanded_buffer_nobroadcast.py")  # whose buffer DDP cannot broadcast
    found = verdicts(matrix)
    assert found["broadcast_buffers=False"] == "right"
    assert [found[title] for title in ("defaults", "find_unused_parameters=True", "static_graph=True")] == ["stops"] * 3
    assert found["broadcast_buffers=False, gradient_as_bucket_view=True"] == "right"
    assert "broadcast_buffers=False" in said(matrix, "needs")


@pytest.mark.exhaustive
def test_options_that_differ_between_ranks_are_a_fault_of_the_recipes_own_row_only() -> None:
    matrix = matrix_of(broken("ranks/find_unused_on_one_rank"))
    [own, *others] = [row for row in matrix.rows if row.verdict != "skipped"]
    assert (own.verdict, own.code) == ("stops", "DDP221")
    assert {row.verdict for row in others} == {"right", "lossy"}


@pytest.mark.slow
def test_what_a_row_says_does_not_depend_on_optimizers_that_differ() -> None:
    matrix = matrix_of(broken("ranks/learning_rate"))
    assert matrix.own is not None and [finding.code for finding in matrix.own.findings] == ["DDP223"]


@pytest.mark.slow
def test_options_reach_the_wrapper_that_a_recipe_makes_itself(recipe) -> None:
    path = recipe(
        """
def wrap(module, device):
    wrapper = DistributedDataParallel(module, None, find_unused_parameters=True, bucket_cap_mb=7)
    print("made", wrapper.find_unused_parameters, wrapper.static_graph)
    assert not (wrapper.static_graph and wrapper.gradient_as_bucket_view), "both of them"
    return wrapper
"""
    )
    found = verdicts(matrix_of(path))
    assert found["find_unused_parameters=True, bucket_cap_mb=7"] == "right"  # its own
    assert found["static_graph=True, gradient_as_bucket_view=True"] == "stops"
    assert found["defaults"] == found["gradient_as_bucket_view=True"] == "right"


@pytest.mark.exhaustive
def test_what_wrap_sets_after_the_constructor_is_not_attributed_to_other_options(recipe) -> None:
    path = recipe(
        """
def wrap(module, device):
    wrapper = DistributedDataParallel(module)
    wrapper._set_static_graph()
    return wrapper
"""
    )
    matrix = matrix_of(path)
    assert matrix.own is not None and matrix.own.title == "static_graph=True" and matrix.own.verdict == "right"
    found = {row.title: row for row in matrix.rows}
    assert found["defaults"].verdict == "skipped"
    assert "wrap sets static_graph=True after the constructor" in found["defaults"].reason
    assert found["static_graph=True, gradient_as_bucket_view=True"].verdict == "right"


@pytest.mark.slow
def test_the_single_process_runs_for_the_first_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    make_world, made = CheckRun._make_world, list[bool]()

    def counted(checking: CheckRun, *, group: bool):
        made.append(group)
        return make_world(checking, group=group)

    monkeypatch.setattr(CheckRun, "_make_world", counted)
    matrix = matrix_of(broken("gradients/summed_loss"), steps=1)
    ran = [row for row in matrix.rows if row.verdict != "skipped"]
    assert made.count(True) == len(ran) > 3 and made.count(False) == 1
    assert {row.code for row in ran} == {"DDP305"}, "which takes the single process to find"


def test_a_wrapper_that_is_no_ddp_has_one_row() -> None:
    matrix = matrix_of(broken("gradients/wrapper_without_reduction"))
    [own] = matrix.rows
    assert (own.verdict, own.code, own.title) == ("wrong", "DDP301", "as the recipe wraps it")
    assert any("not a DistributedDataParallel" in note for note in matrix.world["notes"])


@pytest.mark.parametrize(
    ("name", "code"),
    [
        pytest.param("running/sleeps_on_one_rank", 4, marks=pytest.mark.slow),
        ("running/raises_everywhere", 3),
        ("ranks/parameter_shape", 1),
    ],
)
def test_what_fails_whatever_the_options_are_is_said_once(name: str, code: int) -> None:
    matrix = matrix_of(broken(name), timeout=2 if code == 4 else 20)
    assert [row.own for row in matrix.rows] == [True] and matrix.rows[0].verdict == "stops"
    assert matrix.exit_code() == code
    assert (matrix.error is None) == (code == 1)


@pytest.mark.exhaustive
def test_where_every_way_hangs_no_further_options_are_tried() -> None:
    matrix = matrix_of(broken("training/inner_module_called_on_a_rank"), timeout=2)
    assert {row.verdict for row in matrix.rows} == {"stops"} and len(matrix.rows) == 3
    assert matrix.exit_code() == 4
    assert any("no further options were tried" in note for note in matrix.world["notes"])


@pytest.mark.parametrize(
    "name",
    share(
        [
            "broken/two_causes",
            "healthy/kl_annealer_object",
            *one_of(3, ["healthy/conv_syncbn", "healthy/global_backbone"]),
        ],
        ["healthy/kl_annealer_object"],
    ),
)
def test_the_recipes_own_row_says_what_a_check_says(name: str) -> None:
    path = ZOO / f"{name}.py"
    report, matrix = ddpcheck.check(str(path), steps=2, timeout=20), matrix_of(path)
    assert matrix.own is not None
    assert matrix.own.findings == report.findings
    assert matrix.exit_code() == report.exit_code()


@pytest.mark.exhaustive
def test_rules_that_are_ignored_decide_nothing() -> None:
    matrix = matrix_of(broken("gradients/summed_loss"), ignore=("DDP305",))
    assert matrix.ok and {row.verdict for row in matrix.rows} == {"incomplete", "skipped"}


@pytest.mark.exhaustive
def test_step_times_are_measured_against_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpcheck.extras.matrix.check_matrix._SECONDS_A_ROW", 0.05)
    seen: list[str] = []
    matrix = ddpcheck.check_matrix(
        str(ZOO / "healthy" / "global_backbone.py"), steps=1, timeout=20, progress=seen.append
    )  # whose model() hands out the same parameters every time
    fine = [row for row in matrix.rows if row.fine]
    assert len(fine) > 5 and all(row.step_time is not None and row.step_time.pairs >= 5 for row in fine)
    assert [row.title for row in fine if row.baseline] == ["defaults"]
    assert matrix.noise is not None
    assert Matrix.from_json(matrix.to_json()) == matrix
    assert any(words.startswith("options 2 of about") for words in seen)
