"""Bad input through the command line: one clear sentence, the right exit code, and no traceback of our own code."""

import json
import os
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch

import ddpcheck
from ddpcheck import cli
from ddpcheck.findings.errors import UsageError
from ddpcheck.recipe.recipe import Recipe
from ddpcheck.recipe.target import load_target

PACKAGE = str(Path(ddpcheck.__file__).parent)
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")

GOOD = """
import os
import sys
import torch
from torch import nn
def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
def batch(step):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
def loss(model, batch):
    return model(batch).square().mean()
"""


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        return self.out.rstrip().splitlines()[-1]


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run `ddpcheck report` in an empty folder, on a target made of GOOD and what the test adds to it."""
    monkeypatch.chdir(tmp_path)
    for variable in [*filter(lambda name: name.startswith("DDPCHECK_"), os.environ), "FORCE_COLOR"]:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("COLUMNS", "1000")

    def run(*arguments: str, source: str = "", target: str = "recipe.py") -> Done:
        (tmp_path / "recipe.py").write_text(GOOD + textwrap.dedent(source), encoding="utf-8")
        try:
            code = cli.main(["report", target, *arguments])
        except SystemExit as left:
            code = left.code
        done = Done(code, *capsys.readouterr())
        assert PACKAGE not in done.out + done.err, "frames of ddpcheck's own"
        assert "bug in ddpcheck" not in done.err
        return done

    return run


def assert_usage_error(done: Done, *words: str) -> None:
    assert done.code == 2, done
    assert done.out == ""
    assert done.err.startswith("ddpcheck: error: ") and done.err.count("\n") == 1, done.err
    assert not [word for word in words if word not in done.err], done.err


def assert_target_error(done: Done, *words: str) -> None:
    assert done.code == 3, done
    assert done.err == ""
    assert done.last_line.startswith("stopped: "), done.out
    assert not [word for word in words if word not in done.last_line], done.last_line


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nowhere.py", ["no such file: nowhere.py"]),
        ("recipe.py:modle", ["recipe.py has no attribute 'modle'", "did you mean 'model'?"]),
    ],
)
def test_a_target_that_is_not_there(report, target: str, words: list[str]) -> None:
    assert_usage_error(report(target=target), *words)


@pytest.mark.parametrize("importing", ["from .parts import WIDTH", "from package.inner.parts import WIDTH"])
@pytest.mark.parametrize("initialised", [True, False], ids=["package", "namespace"])
def test_a_file_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, importing: str, initialised: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    inner = tmp_path / "package" / "inner"
    inner.mkdir(parents=True)
    (inner / "parts.py").write_text("WIDTH = 4\n")
    (inner / "whole.py").write_text(f"{importing}\n{GOOD}")
    if initialised:
        (inner / "__init__.py").touch()
        (inner.parent / "__init__.py").touch()
    with mock.patch.dict(sys.modules):
        if initialised or importing.startswith("from ."):
            with pytest.raises(UsageError, match=r"imports other parts of the package .*; use package\.inner\.whole"):
                load_target("package/inner/whole.py")
        assert isinstance(load_target("package.inner.whole"), Recipe)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--world-size", "0"], ["world", "0"]),
        (["--backend", "mpi"], ["backend", "mpi", "gloo"]),
        (["--backend", "nccl"], ["nccl", "GPU"]),
        (["--ignore", "unused-paramter"], ["unused-paramter", "unused-parameter"]),
        (["--format", "pdf"], ["pdf", "json"]),
        (["-o", "no/such/folder/report.json"], ["cannot write no/such/folder/report.json"]),
        pytest.param(["--device", "cuda"], ["no GPU"], marks=WITHOUT_GPU),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value[0].startswith("--") else None,
)
def test_a_wrong_option(report, arguments: list[str], words: list[str]) -> None:
    assert_usage_error(report(*arguments), *words)


FAULTS: dict[str, tuple[str, list[str]]] = {
    "import error inside the target": ("import no_such_package\n", ["no_such_package", "recipe.py:"]),
    "loss raises": ("def loss(*args): raise RuntimeError('the reason')\n", ["RuntimeError: the reason"]),
    "loss is NaN": ("def loss(m, b): return m(b).mean() * float('nan')\n", ["loss(model, batch) in step 0 is nan"]),
    "unknown DDP option": ("ddp_kwargs = {'magic': True}\n", ["DistributedDataParallel", "magic"]),
    "batch smaller than the world": (
        "def batch(step): return torch.ones(1, 4)\n",
        ["1 sample cannot be split over 2 ranks", "--world-size"],
    ),
    "batch from the operating system": (
        "def batch(step): return torch.tensor(list(os.urandom(32))).reshape(8, 4) / 255\n",
        ["batch(0) is not the same on every call", "seeded"],
    ),
    "exit while imported": ("sys.exit(0)\n", ["exit(0)", "recipe.py:"]),
    "exit in loss": ("def loss(m, b): sys.exit(0)\n", ["exit(0)"]),
    "hard exit in loss": ("def loss(m, b): os._exit(0)\n", ["exit"]),
    "failure on one rank": (
        "def model():\n"
        "    if os.environ['RANK'] == '1' and os.environ['WORLD_SIZE'] == '2': raise OSError('no data')\n"
        "    return nn.Linear(4, 1)\n",
        ["rank 1", "OSError: no data"],
    ),
    "error that cannot be pickled or shown": (
        "class Odd(Exception):\n"
        "    def __init__(self, first, second): self.lock = __import__('threading').Lock()\n"
        "    def __str__(self): raise ValueError('no words')\n"
        "def loss(m, b): raise Odd(1, 2)\n",
        ["Odd"],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_target_that_fails_for_a_reason_of_its_own(report, name: str) -> None:
    source, words = FAULTS[name]
    assert_target_error(report("--steps", "2", source=source), *words)


def test_the_traceback_of_the_target_is_shown_and_only_that(report) -> None:
    done = report(source="def helper(): raise KeyError('lost')\ndef model(): return helper()\n")
    assert done.code == 3
    assert "in model" in done.out and "in helper" in done.out and "KeyError: 'lost'" in done.out
    assert "importlib" not in done.out and "recipe.call" not in done.out


def test_what_a_target_printed_before_it_failed_is_shown_once(report) -> None:
    source = "print('reading', 'data')\nprint('none found', file=sys.stderr)\n"
    done = report(source=f"{source}def model():\n    print('building')\n    raise OSError('no data')\n")
    assert_target_error(done, "OSError: no data")
    assert [done.out.count(words) for words in ("reading data", "none found", "building")] == [1, 1, 1]


@pytest.mark.parametrize(("target", "file"), [("./recipe.py:recipe", "./recipe.py"), ("inside.recipe", None)])
def test_a_target_sees_a_command_line_of_its_own(report, tmp_path: Path, target: str, file: str | None) -> None:
    (tmp_path / "inside").mkdir()
    source = """
    import argparse, ddpcheck
    seen = list(sys.argv)
    def model():
        argparse.ArgumentParser().parse_args()
        assert sys.argv == seen
        raise LookupError(f"argv is {sys.argv}")
    recipe = ddpcheck.Recipe(model=model, batch=batch, loss=loss)
    """
    (tmp_path / "inside" / "recipe.py").write_text(GOOD + textwrap.dedent(source), encoding="utf-8")
    expected = file or str(tmp_path / "inside" / "recipe.py")
    assert_target_error(report("--steps", "1", source=source, target=target), f"argv is [{expected!r}]")


def test_a_target_that_prints_a_megabyte_and_fails_shows_a_little_of_it(report) -> None:
    done = report(source="print('noise ' * 200_000)\nraise RuntimeError('the reason')\n")
    assert_target_error(done, "the reason")
    assert len(done.out) < 20_000


UNUSED_THEN_RAISES = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.extra = nn.Linear(4, 1), nn.Linear(4, 1)
    def forward(self, x):
        return self.head(x)
def model(): return Model()
def batch(step): return {"x": torch.ones(8, 4), "step": torch.full((8,), step)}
def loss(model, batch):
    if batch["step"][0] == 1:
        raise RuntimeError('out of luck')
    return model(batch["x"]).square().mean()
"""


def test_a_finding_made_before_the_target_raises_is_in_the_report(report, tmp_path: Path) -> None:
    done = report("-o", "report.json", "--format", "json", source=UNUSED_THEN_RAISES)
    saved = json.loads((tmp_path / "report.json").read_text())
    assert done.code == 3 and saved["status"] == "error" and "out of luck" in saved["error"]["message"]
    subjects = {finding["code"]: finding["subjects"] for finding in saved["findings"]}
    assert subjects["DDP101"] == ["extra.weight", "extra.bias"]
