"""The matrix on real ranks: verdicts are those of a check, and options reach DDP whoever calls it."""

from pathlib import Path
from typing import Any

import pytest

import ddpcheck
from ddpcheck.extras.matrix.check_matrix import COMPILED, SYNCED, UNSYNCED, _MatrixRun, variant_rows
from ddpcheck.report.checking.check_state import CheckOptions
from ddpcheck.report.matrix.matrix import Matrix, MatrixRow
from tests.faultsuite.cases import FAULTS

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


def case(mark: str, name: str, target: Path | str, verdicts: dict[str, str], **more) -> Any:
    """Make a row of the test below; `mark` is "" for `make test`."""
    return pytest.param(target, verdicts, more, marks=[getattr(pytest.mark, mark)] if mark else [], id=name)


OWN_WRAP = """
def wrap(module, device):
    wrapper = DistributedDataParallel(module, None, find_unused_parameters=True, bucket_cap_mb=7)
    print("made", wrapper.find_unused_parameters, wrapper.static_graph)
    assert not (wrapper.static_graph and wrapper.gradient_as_bucket_view), "both of them"
    return wrapper
"""


@pytest.mark.parametrize(
    ("target", "expected", "more"),
    [
        case(
            *("slow", "its own wrapper", OWN_WRAP),
            {
                "find_unused_parameters=True, bucket_cap_mb=7": "right",  # its own
                "static_graph=True, gradient_as_bucket_view=True": "stops",
                "defaults": "right",
                "gradient_as_bucket_view=True": "right",
            },
        ),
        case(
            *("", "no DDP", broken("gradients/wrapper_without_reduction"), {"as the recipe wraps it": "wrong DDP301"}),
            rows=1,
            note="not a DistributedDataParallel",
            code=1,
        ),
        case("slow", "hangs", broken("running/sleeps_on_one_rank"), {"defaults": "stops DDP402"}, rows=1, code=4),
        case("", "shapes", broken("ranks/parameter_shape"), {"defaults": "stops DDP203"}, rows=1, code=1),
    ],
)
def test_verdicts_and_advice(recipe, target: Path | str, expected: dict[str, str], more) -> None:
    path = recipe(target) if "\n" in str(target) else target
    matrix = matrix_of(path, timeout=2 if more.get("code") == 4 else 20)
    assert {title: verdict for title, verdict in verdicts(matrix).items() if title in expected} == expected
    assert matrix.exit_code() == more.get("code", 0)
    assert (matrix.error is None) is (more.get("code", 0) < 3)
    assert len(matrix.rows) == more.get("rows", len(matrix.rows))
    assert any(more.get("note", "") in note for note in [*matrix.world["notes"], ""])


@pytest.mark.slow
def test_fully_shard_is_tried_in_place_of_ddp_with_and_without_replicas(recipe) -> None:
    path = recipe(SHARDED)
    rows = matrix_of(path, world_size=4).rows
    labels = {row.title: row.verdict for row in rows if row.label}
    assert labels == dict.fromkeys(["fully_shard", "fully_shard, 2 replicas of 2 shards"], "right")


SHARDED = """
def model():
    return nn.Linear(8, 6)

batch = lambda step: torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
loss = lambda model, x: model(x).square().mean()
"""


COUNTED = """
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tail", "results", "micro_batches", "compiled"),
    [
        ("", ["right"] * 3, "", ""),
        (
            *(COUNTED, ["wrong DDP514", "wrong DDP514", "incomplete"]),
            *("not a mean over samples", "torch.compile has compiled nothing of it"),
        ),
    ],
    ids=["right", "a loss over a count"],
)
def test_micro_batches_and_compiled(recipe, tail: str, results: list[str], micro_batches: str, compiled: str) -> None:
    asked, base = CheckOptions(backend="gloo", timeout=20), MatrixRow({}, "right", own=True)
    rows = [*variant_rows(str(recipe(tail)), asked, base, lambda _words: None, None)]
    assert [row.title for row in rows] == [UNSYNCED, SYNCED, COMPILED]
    assert [f"{row.verdict} {row.code}".strip() for row in rows] == results
    assert all(row.error is not None and row.error < 1e-5 for row in rows if row.verdict == "right")
    assert micro_batches in rows[0].reason and rows[2].reason == compiled


@pytest.mark.slow
def test_the_recipes_own_row_has_the_findings_of_a_check() -> None:
    path = ZOO / "broken" / "two_causes.py"
    report, matrix = ddpcheck.check(str(path), steps=2, timeout=20), matrix_of(path)
    assert matrix.own is not None and matrix.own.findings == report.findings
    assert matrix.exit_code() == report.exit_code()
