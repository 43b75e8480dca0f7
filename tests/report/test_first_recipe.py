"""`ddpcheck init`: inputs that forward accepts, a recipe that can be read, and nothing overwritten."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ddpcheck import cli
from ddpcheck.findings.errors import TargetError, UsageError
from ddpcheck.recipe.target import load_object
from ddpcheck.report.first_recipe.first_recipe import Guess, Input, recipe_path
from ddpcheck.report.first_recipe.guessing import make_first_recipe

MODELS = """
import torch
from torch import nn
class Image(nn.Module):
    def __init__(self, hidden=4):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, hidden, 3), nn.Linear(hidden * 26 * 26, 5)
    def forward(self, image):
        return self.fc(self.conv(image).flatten(1))
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.embedding = nn.Linear(4, 3), nn.Embedding(11, 4)
    def forward(self, input_ids, labels):
        return nn.functional.cross_entropy(self.fc(self.embedding(input_ids).mean(1)), labels)
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(5, 2)
    def forward(self, a, b):
        return {"a": self.left(a), "b": self.right(b), "name": "x"}
class Optional(nn.Sequential):
    def __init__(self):
        super().__init__(nn.BatchNorm1d(6), nn.Linear(6, 2))
    def forward(self, x=None, mask=None):
        return (super().forward(x), None)
class Needs(nn.Linear):
    def __init__(self, inputs, *, outputs):
        super().__init__(inputs, outputs)
class Odd(nn.Linear):
    def forward(self, x):
        raise ValueError("no: really\\nnot")
class OfFour(nn.Linear):
    def forward(self, x):
        return super().forward(x).reshape(4, -1)
class Chooses(nn.Linear):
    def forward(self, x):
        return super().forward(x).argmax(1)
class Raises(nn.Module):
    def __init__(self):
        raise OSError("no weights")
def made():
    return nn.Sequential(nn.Linear(7, 1))
def nothing():
    return 3
class NoModule:
    pass
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "models_of_init.py").write_text(MODELS)
    return tmp_path


def guess(name: str, arguments: str = "") -> Guess:
    target = f"models_of_init.py:{name}"
    text, guessed = make_first_recipe(load_object(target), target, arguments, "ddpcheck report check.py")
    ast.parse(text)
    assert max(map(len, text.splitlines())) <= 100
    return guessed


@pytest.mark.parametrize(
    ("name", "inputs", "output"),
    [
        ("Image", (Input("image", (1, 28, 28)),), "tensor"),
        ("Words", (Input("input_ids", (16,), 11), Input("labels", (), 3)), "scalar"),
        ("Two", (Input("a", (3,)), Input("b", (5,))), "mapping"),
        ("Optional", (Input("x", (6,)),), "sequence"),
        ("made", (Input("input", (7,)),), "tensor"),
    ],
)
def test_inputs_are_guessed_by_layers_and_names_and_tried(here: Path, name: str, inputs, output: str) -> None:
    assert guess(name) == Guess(inputs, output)


def test_what_cannot_be_guessed_is_left_open(here: Path) -> None:
    assert guess("Odd", "2, 2") == Guess((Input("x"),), None, 2, "ValueError: no: really")
    assert guess("OfFour", "2, 2").output is None, "what is returned does not grow with the batch"
    assert guess("Chooses", "2, 2").output is None, "no loss can be made of it"


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("Needs", "", "give its arguments, as in --args 'inputs=..., outputs=...'"),
        ("Needs", "3", "argument: 'outputs'; give"),  # which Python 3.13 calls keyword-only
        ("Needs", "open('x')", "only numbers, texts"),
        ("Needs", "3 4", "--args: expected arguments of the constructor"),
        ("NoModule", "", "NoModule is a class, but not a torch.nn.Module"),
    ],
)
def test_a_wrong_model_or_argument(here: Path, name: str, arguments: str, sentence: str) -> None:
    with pytest.raises(UsageError) as raised:
        guess(name, arguments)
    assert sentence in str(raised.value)


def test_a_model_that_fails_is_the_targets_fault(here: Path) -> None:
    with pytest.raises(TargetError, match=r"Raises\(\) raised OSError: no weights"):
        guess("Raises")
    with pytest.raises(TargetError, match=r"nothing\(\) returned a value of type int"):
        guess("nothing")


def test_the_recipe_lies_where_the_model_can_be_imported_from(here: Path) -> None:
    (here / "sub").mkdir()
    (here / "sub" / "net.py").touch()
    (here / "json.py").touch()
    assert recipe_path("sub/net.py:Net") == Path("sub/check_net.py")
    assert recipe_path("pkg.net:Net") == Path("check_net.py")
    assert recipe_path("sub/net.py:Net", "sub/mine.py") == Path("sub/mine.py")
    for model, output, words in (
        ("sub/net.py:Net", "mine.py", "must be in the folder of sub/net.py"),
        ("sub/net.py", None, "names no class; write sub/net.py:Net"),
        ("json.py:Net", None, "cannot be imported by the name 'json'"),
        ("nte.py:Net", None, "no such file: nte.py"),
    ):
        with pytest.raises(UsageError, match=words):
            recipe_path(model, output)


def test_a_recipe_is_written_once_and_checked(here: Path, capsys) -> None:
    assert cli.main(["init", "models_of_init.py:Needs", "--args", "3, outputs=2"]) == 0
    captured = capsys.readouterr()
    assert captured.out.endswith("clean: 6 checks passed, no findings\n")
    assert "says EDIT, then run:\n  ddpcheck report check_models_of_init.py" in captured.err
    written = Path("check_models_of_init.py")
    assert "    return Needs(3, outputs=2)\n" in written.read_text()
    written.write_text("mine")
    assert cli.main(["init", "models_of_init.py:Image"]) == 2 and written.read_text() == "mine"
    assert "already exists; --force overwrites it" in capsys.readouterr().err
    assert cli.main(["init", "models_of_init.py:Imge"]) == 2
    assert "has no attribute 'Imge'; did you mean 'Image'?" in capsys.readouterr().err
    assert cli.main(["init", "models_of_init.py:Odd", "--args", "2, 2", "--force"]) == 3
    assert "2 inputs were tried, the first gave ValueError: no: really" in capsys.readouterr().err
    assert "TODO" in written.read_text()
