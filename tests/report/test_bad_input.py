"""Bad input through the command line: one clear sentence, the right exit code, and no traceback of our own code."""

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import ddpcheck
from ddpcheck import cli
from ddpcheck.findings.errors import UsageError
from tests.tiers import share

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
PACKAGE = str(Path(ddpcheck.__file__).parent)

GOOD = """
import os
import sys

import torch
from torch import nn
from tests.tiers import share


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
    """Exit code 3, and a last line that says in one sentence what the target did."""
    assert done.code == 3, done
    assert done.err == ""
    assert done.last_line.startswith("stopped: "), done.out
    assert not [word for word in words if word not in done.last_line], done.last_line


def test_the_recipe_that_all_others_are_made_from_is_healthy(report) -> None:
    done = report()
    assert (done.code, done.err) == (0, "") and done.last_line == "clean: 6 checks passed, no findings"


# --- The target is not there, or is something else -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nowhere.py", ["no such file: nowhere.py"]),
        ("folder/nowhere.py:recipe", ["no such file: folder/nowhere.py"]),
        (".", ["'.'"]),
        ("./", ["folder"]),
        ("no_such_module", ["no module named 'no_such_module'"]),
        ("json.no_such_part:recipe", ["no module named 'json.no_such_part'"]),
        ("recipe.py:modle", ["recipe.py has no attribute 'modle'", "did you mean 'model'?"]),
        ("recipe:modle", ["recipe has no attribute 'modle'", "did you mean 'model'?"]),
        ("recipe.py:loss", ["needs arguments"]),
        ("recipe.py:model", ["returned a value of type Sequential", "it must return a ddpcheck.Recipe"]),
        (
            "recipe.py:sys",
            ["is the module sys", "must be a ddpcheck.Recipe or a function that returns one"],
        ),
        ("recipe.py:NUMBER", ["a value of type int"]),
        (":recipe", ["names no file or module"]),
        ("", ["names no file or module"]),
        ("json", ["json has no model and no batch and no loss"]),
    ],
)
def test_a_target_that_is_not_there_or_is_no_recipe(report, target: str, words: list[str]) -> None:
    assert_usage_error(report(source="NUMBER = 3\n", target=target), *words)


@pytest.mark.parametrize("importing", ["from .parts import WIDTH", "from package.inner.parts import WIDTH"])
@pytest.mark.parametrize("initialised", share([True, False], [True]), ids=["package", "namespace"])
def test_a_file_that_belongs_to_a_package(report, tmp_path: Path, importing: str, initialised: bool) -> None:
    inner = tmp_path / "package" / "inner"
    inner.mkdir(parents=True)
    (inner / "parts.py").write_text("WIDTH = 4\n")
    (inner / "whole.py").write_text(f"{importing}\n{GOOD}")
    if initialised:
        (inner / "__init__.py").touch()
        (inner.parent / "__init__.py").touch()
    if initialised or importing.startswith("from ."):
        done = report(target="package/inner/whole.py")
        assert_usage_error(done, "imports other parts of the package that it belongs to; use package.inner.whole")
    assert report(target="package.inner.whole").code == 0


def test_a_file_that_is_no_python(report, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert_usage_error(report(target="./notes.txt"), "no Python file")


def test_a_module_whose_model_is_no_function(report) -> None:
    assert_usage_error(report(source="model = nn.Linear\nbatch = 3\n"), "batch must be a function", "int")


def test_a_recipe_with_a_wrong_attribute(report) -> None:
    done = report(source="import ddpcheck\ndef recipe(): return ddpcheck.Recipe(model=model, batch=batch, loss=None)\n")
    assert done.code == 0  # the module itself is whole
    done = report(
        source="import ddpcheck\ndef recipe(): return ddpcheck.Recipe(model=model, batch=batch, loss=None)\n",
        target="recipe.py:recipe",
    )
    assert_usage_error(done, "loss must be a function, not None")


# --- Options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--world-size", "0"], ["world", "0"]),
        (["--world-size", "-1"], ["world", "-1"]),
        (["--world-size", "100000"], ["world", "100000"]),
        (["--world-size", "two"], ["world", "'two'"]),
        (["--world-size", "1.5"], ["world", "1.5"]),
        (["--steps", "0"], ["steps", "0"]),
        (["--timeout", "0"], ["timeout", "0"]),
        (["--timeout", "-3"], ["timeout", "-3"]),
        (["--timeout", "nan"], ["timeout", "nan"]),
        (["--timeout", "soon"], ["timeout", "'soon'"]),
        (["--seed", "lucky"], ["seed", "'lucky'"]),
        (["--backend", "mpi"], ["backend", "mpi", "gloo"]),
        (["--device", "tpu"], ["device", "tpu", "cpu"]),
        (["--backend", "nccl"], ["nccl", "GPU"]),
        (["--select", "DDP999"], ["DDP999"]),
        (["--ignore", "unused-paramter"], ["unused-paramter", "unused-parameter"]),
        (["--fail-on", "fatal"], ["fatal", "error"]),
        (["--format", "pdf"], ["pdf", "json"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value[0].startswith("--") else None,
)
def test_a_wrong_option(report, arguments: list[str], words: list[str]) -> None:
    assert_usage_error(report(*arguments), *words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_without_a_gpu(report) -> None:
    assert_usage_error(report("--device", "cuda"), "no GPU")
    assert_usage_error(report("--device", "cuda", "--backend", "nccl"), "GPU")


@pytest.mark.parametrize("path", ["no/such/folder/report.json", "folder.json"])
def test_an_output_that_cannot_be_written_is_told_before_any_work(report, tmp_path: Path, path: str) -> None:
    (tmp_path / "folder.json").mkdir()
    assert_usage_error(report("-o", path, source="raise RuntimeError('work has begun')"), "cannot write", path)


# --- The target fails for a reason of its own ----------------------------------------------------------------------


def raising(name: str) -> str:
    return f"\ndef {name}(*args):\n    raise RuntimeError('the reason')\n"


FAULTS: dict[str, tuple[str, list[str]]] = {
    "import error inside the target": ("import no_such_package\n", ["no_such_package", "recipe.py:"]),
    "any error inside the target": ("1 / 0\n", ["ZeroDivisionError", "recipe.py:"]),
    "syntax error": ("def broken(:\n", ["SyntaxError", "recipe.py:"]),
    "model raises": (raising("model"), ["model() raised RuntimeError: the reason", "recipe.py:"]),
    "batch raises": (raising("batch"), ["batch(0) raised RuntimeError: the reason", "recipe.py:"]),
    "loss raises": (raising("loss"), ["RuntimeError: the reason"]),
    "optimizer raises": (raising("optimizer"), ["optimizer(parameters) raised RuntimeError: the reason"]),
    "shard raises": (raising("shard"), ["shard(batch, rank=", "raised RuntimeError: the reason"]),
    "wrap raises": (raising("wrap"), ["wrap(module, device) raised RuntimeError: the reason"]),
    "model returns None": ("def model(): return None\n", ["model() returned None", "must return a torch.nn.Module"]),
    "model returns a class": ("def model(): return nn.Linear\n", ["model() returned the class Linear"]),
    "batch returns no tensor": ("def batch(step): return [1, 'two']\n", ["batch(0) returned", "without any tensor"]),
    "optimizer returns none": ("def optimizer(p): return 3\n", ["optimizer(parameters)", "not a torch optimizer"]),
    "optimizer needs a closure": (
        "def optimizer(p): return torch.optim.LBFGS(p)\n",
        ["type LBFGS, whose step() needs a closure", "leave optimizer out"],
    ),
    "wrap returns no module": ("def wrap(m, d): return 3\n", ["wrap(module, device) returned a value of type int"]),
    "unknown DDP option": ("ddp_kwargs = {'magic': True}\n", ["DistributedDataParallel", "magic"]),
    "loss takes other arguments": (
        "def loss(model): return 0\n",
        ["loss(model, batch) in step 0 raised TypeError: loss() takes 1 positional argument but 2 were given"],
    ),
    "loss returns a complex number": ("def loss(m, b): return m(b).mean() * 1j\n", ["complex number", ".real or"]),
    "loss returns None": ("def loss(m, b): m(b)\n", ["loss(model, batch) in step 0 returned NoneType"]),
    "loss returns a number": ("def loss(m, b): return m(b).mean().item()\n", ["returned float without any tensor"]),
    "loss is no scalar": ("def loss(m, b): return m(b)\n", ["shape (4, 1)", "scalar"]),
    "loss is NaN": ("def loss(m, b): return m(b).mean() * float('nan')\n", ["loss(model, batch) in step 0 is nan"]),
    "loss is infinite": ("def loss(m, b): return m(b).mean() * float('inf')\n", ["in step 0 is", "inf", "finite"]),
    "loss has no grad": ("def loss(m, b): return m(b).mean().detach()\n", ["does not require grad"]),
    "loss is an integer": ("def loss(m, b): return m(b).argmax()\n", ["does not require grad"]),
    "all parameters frozen": (
        "def model(): return nn.Linear(4, 1).requires_grad_(False)\n",
        ["no parameter of the model requires grad"],
    ),
    "no parameters": ("def model(): return nn.Identity()\n", ["no parameter of the model requires grad"]),
    "batch smaller than the world": (
        "def batch(step): return torch.ones(1, 4)\n",
        ["1 sample cannot be split over 2 ranks", "--world-size"],
    ),
    "batch that does not split": (
        "def batch(step): return {'x': torch.ones(8, 4), 'y': torch.ones(6)}\n",
        ["6 and 8 samples", "shard function"],
    ),
    "batch of packed sequences": (
        "def batch(step): return nn.utils.rnn.pack_sequence([torch.ones(4, 4), torch.ones(4, 4)])\n",
        ["a PackedSequence cannot be split over the ranks by dim 0", "shard function"],
    ),
    "batch in a tuple with a constructor of its own": (
        "class Pair(tuple):\n"
        "    def __new__(cls, *parts): return tuple.__new__(cls, parts)\n"
        "def batch(step): return Pair(torch.ones(4, 4), torch.ones(4))\n",
        ["a Pair cannot be split over the ranks by dim 0", "shard function"],
    ),
    "sparse batch": (
        "def batch(step): return torch.eye(4).to_sparse()\n",
        ["a Tensor cannot be split over the ranks by dim 0", "shard function"],
    ),
    "batch of scalars": ("def batch(step): return torch.tensor(3.0)\n", ["no tensor has a dim 0"]),
    "batch from the operating system": (
        "def batch(step): return torch.tensor(list(os.urandom(32))).reshape(8, 4) / 255\n",
        ["batch(0) is not the same on every call", "seeded"],
    ),
    "exit while imported": ("sys.exit(0)\n", ["exit(0)", "recipe.py:"]),
    "exit in model": ("def model(): sys.exit(0)\n", ["model() called exit(0)", "recipe.py:"]),
    "exit in batch": ("def batch(step): sys.exit(0)\n", ["batch(0) called exit(0)", "recipe.py:"]),
    "exit in loss": ("def loss(m, b): sys.exit(0)\n", ["exit(0)"]),
    "hard exit in loss": ("def loss(m, b): os._exit(0)\n", ["exit"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_target_that_fails_for_a_reason_of_its_own(report, name: str) -> None:
    source, words = FAULTS[name]
    assert_target_error(report(source=source), *words)


@pytest.mark.slow
def test_a_batch_that_counts_its_calls_is_not_deterministic(report) -> None:
    source = "calls = []\ndef batch(step):\n    calls.append(step)\n    return torch.full((8, 4), float(len(calls)))\n"
    assert_target_error(report(source=source), "batch(0) is not the same on every call")


def test_a_batch_that_changes_in_a_later_step_is_told_with_that_step(report) -> None:
    source = """
    def batch(step):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        return x if step == 0 else x + torch.tensor(list(os.urandom(4)))
    """
    assert_target_error(report(source=source), "batch(1) is not the same on every call")


def test_the_traceback_of_the_target_is_shown_and_only_that(report) -> None:
    done = report(source="def helper(): raise KeyError('lost')\ndef model(): return helper()\n")
    assert done.code == 3
    assert "in model" in done.out and "in helper" in done.out and "KeyError: 'lost'" in done.out
    assert "importlib" not in done.out and "recipe.call" not in done.out


@pytest.mark.parametrize("where", ["import", "model"])
def test_what_a_target_printed_before_it_failed_is_shown_once(report, where: str) -> None:
    failing = "raise OSError('no data')"
    source = "print('reading', 'data')\nprint('none found', file=sys.stderr)\n"
    source += f"{failing}\n" if where == "import" else f"def model():\n    print('building')\n    {failing}\n"
    done = report(source=source)
    assert_target_error(done, "OSError: no data")
    assert done.out.count("reading data") == done.out.count("none found") == 1
    assert done.out.count("building") == (where == "model")
    silent = report(source=f"{failing}\n")
    assert "printed" in done.out and "printed" not in silent.out


@pytest.mark.parametrize("target", ["recipe.py", "./recipe.py:recipe", "recipe", "inside.recipe"])
def test_a_target_sees_a_command_line_of_its_own(report, tmp_path: Path, target: str) -> None:
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
    files = {"recipe": tmp_path / "recipe.py", "inside.recipe": tmp_path / "inside" / "recipe.py"}
    file = files.get(target, target.removesuffix(":recipe"))
    assert_target_error(report("--steps", "1", source=source, target=target), f"argv is [{str(file)!r}]")


def test_a_target_that_fails_on_one_rank_names_the_rank(report) -> None:
    source = (
        "def model():\n    if os.environ['RANK'] == '1' and os.environ['WORLD_SIZE'] == '2': raise OSError('no data')\n"
    )
    done = report(source=source + "    return nn.Linear(4, 1)\n")
    assert_target_error(done, "rank 1", "OSError: no data")


# --- Noise, names, values that do not travel -----------------------------------------------------------------------


@pytest.mark.slow
def test_a_target_that_prints_a_megabyte_is_fine(report) -> None:
    source = """
    print('noise ' * 200_000)
    print('noise ' * 200_000, file=sys.stderr)
    os.write(1, b'\\xff\\x00raw bytes' * 10_000)
    def loss(model, batch):
        print('noise ' * 200_000)
        return model(batch).square().mean()
    """
    done = report(source=source)
    assert (done.code, done.err) == (0, "")
    assert "noise" not in done.out and len(done.out) < 5_000


def test_a_target_that_prints_a_megabyte_and_fails_shows_a_little_of_it(report) -> None:
    done = report(source="print('noise ' * 200_000)\nraise RuntimeError('the reason')\n")
    assert_target_error(done, "the reason")
    assert len(done.out) < 20_000


def test_an_error_message_of_a_megabyte_is_cut(report) -> None:
    done = report(source="def model(): raise RuntimeError('x' * 1_000_000)\n")
    assert done.code == 3
    assert len(done.last_line) < 5_000


def test_an_error_that_cannot_be_pickled_or_shown(report) -> None:
    source = """
    class Odd(Exception):
        def __init__(self, one, two): self.lock = __import__('threading').Lock()
        def __str__(self): raise ValueError('no words')
    def loss(m, b): raise Odd(1, 2)
    """
    assert_target_error(report(source=source), "Odd")


def test_a_name_with_markup_survives(report) -> None:
    source = """
    class Marked(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 1)
            self.register_parameter("[red]extra[/red]", nn.Parameter(torch.ones(2)))
            self.register_parameter("[/]", nn.Parameter(torch.ones(2)))
        def forward(self, x): return self.head(x)
    def model(): return Marked()
    """
    done = report(source=source)
    assert done.code == 1 and "[red]extra[/red]" in done.out and "[/]" in done.out
    done = report(source="def model(): raise RuntimeError('[red]not [/markup]')\n")
    assert_target_error(done, "[red]not [/markup]")


def test_a_recipe_that_cannot_be_sent_to_the_ranks() -> None:
    lock = threading.Lock()

    def loss(model, batch):
        with lock:
            return model(batch).mean()

    recipe = ddpcheck.Recipe(model=lambda: torch.nn.Linear(2, 1), batch=lambda step: torch.ones(4, 2), loss=loss)
    with pytest.raises(UsageError, match="lock"):
        ddpcheck.check(recipe)


# --- Nothing is lost -----------------------------------------------------------------------------------------------

UNUSED_THEN = """
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
        THEN
    return model(batch["x"]).square().mean()
"""


def test_a_finding_made_before_the_target_raises_is_in_the_report(report, tmp_path: Path) -> None:
    done = report(source=UNUSED_THEN.replace("THEN", "raise RuntimeError('out of luck')"))
    assert_target_error(done, "out of luck")
    assert "DDP101 unused-parameter" in done.out and "extra.weight, extra.bias" in done.out
    done = report("-o", "report.json", source=UNUSED_THEN.replace("THEN", "raise RuntimeError('out of luck')"))
    saved = json.loads((tmp_path / "report.json").read_text())
    assert done.code == 3 and saved["status"] == "error" and "out of luck" in saved["error"]["message"]
    assert "DDP101" in [finding["code"] for finding in saved["findings"]]


def test_a_finding_made_before_a_rank_dies_is_in_the_report(report) -> None:
    done = report(source=UNUSED_THEN.replace("THEN", "os.kill(os.getpid(), 9)"))
    assert done.code == 3 and "SIGKILL" in done.out
    assert "DDP101 unused-parameter" in done.out and "DDP404 rank-died" in done.out


def test_what_was_found_before_wrapping_raises_is_in_the_report(report) -> None:
    source = "RANK = int(os.environ['RANK'])\ndef model(): return nn.Linear(4, 1).train(RANK == 0)\n"
    done = report(source=source + raising("wrap"))
    assert_target_error(done, "the reason")
    assert "DDP222" in done.out


# --- Hangs ---------------------------------------------------------------------------------------------------------

HANG = """
import time
import torch.distributed as dist
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.extra = nn.Linear(4, 1), nn.Linear(4, 1)
    def forward(self, x):
        if dist.is_initialized() and dist.get_rank() == 1:
            time.sleep(600)
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(3))
        return self.head(x)
def model(): return Model()
"""


@pytest.mark.slow
def test_a_hang_is_told_within_the_timeout_with_the_place_of_each_rank(report) -> None:
    done = report("--timeout", "3", source=HANG)
    assert done.code == 4 and done.err == ""
    assert "DDP402 hang" in done.out and done.last_line.startswith("stopped: ") and "3 s" in done.last_line
    evidence = [line.strip() for line in done.out.splitlines()]
    assert any(line.startswith("rank 0: waits in all_reduce(float32 of shape (3,))") for line in evidence), done.out
    assert any(line.startswith("rank 1: still in step 0: forward, at recipe.py:") for line in evidence), done.out


@pytest.mark.slow
def test_a_rank_that_finished_is_named_beside_the_one_that_hangs(report) -> None:
    source = (
        "import time\ndef model():\n    if os.environ['RANK'] == '1': time.sleep(600)\n    return nn.Linear(4, 1)\n"
    )
    done = report("--timeout", "2", source=source)
    assert done.code == 4 and "DDP402 hang" in done.out
    assert "rank 1" in done.last_line and "building the model" in done.last_line
    assert "rank 0" in done.out, "where the other rank is matters as much"


@pytest.mark.slow
def test_a_hang_in_the_single_process_does_not_hang_the_check(report) -> None:
    source = """
    def loss(model, batch):
        while len(batch) == 8:
            pass
        return model(batch).mean()
    """
    begun = time.monotonic()
    done = report("--timeout", "2", source=source)
    assert time.monotonic() - begun < 20 and done.code in (0, 4)
    assert "single process" in done.out and "did not finish within 2 s" in done.out


# --- In a process of its own ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "check"),
    [
        (["nowhere.py"], 2, lambda done: done.stdout == "" and done.stderr.count("\n") == 1),
        pytest.param(
            *(["recipe.py"], 3, lambda done: "stopped: " in done.stdout and done.stderr == ""), marks=pytest.mark.slow
        ),
    ],
    ids=["usage", "target"],
)
def test_the_exit_code_reaches_the_shell(tmp_path: Path, arguments: list[str], code: int, check: Callable) -> None:
    (tmp_path / "recipe.py").write_text("import sys\nsys.exit(0)\n")
    command = [sys.executable, "-m", "ddpcheck", "report", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == code and check(done), done
    assert "Traceback" not in done.stderr
