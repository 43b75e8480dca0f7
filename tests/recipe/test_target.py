"""The four spellings of a TARGET, and what is said of those that are none. Loading happens in a process of its own."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpcheck.findings.errors import DDPCheckError, TargetError, UsageError
from ddpcheck.recipe.target import find_file, load_target

SOURCE = """
import torch
from torch import nn
from helper_beside_it import WIDTH
import ddpcheck
def model(): return nn.Linear(WIDTH, 1)
def batch(step): return torch.ones(4, WIDTH)
def loss(model, batch): return model(batch).mean()
def optimizer(parameters): return torch.optim.Adam(parameters)
ddp_kwargs = {"static_graph": True}
recipe = ddpcheck.Recipe(model=model, batch=batch, loss=loss)
def make(): return recipe
def make_with(width=3): return recipe
class Holder: recipe = recipe
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    modules, path = dict(sys.modules), list(sys.path)
    folder = tmp_path / "target_package" / "inner"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").touch()
    for at in (folder, tmp_path):
        (at / "recipes.py").write_text(SOURCE)
        (at / "helper_beside_it.py").write_text("WIDTH = 2\n")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - set(modules):
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


@pytest.mark.parametrize(
    "target",
    [
        *("recipes.py", "recipes.py:make", "recipes", "recipes:make_with", "recipes:Holder.recipe"),
        *("target_package/inner/recipes.py", "target_package.inner.recipes", "FOLDER/recipes.py:recipe"),
    ],
)
def test_every_spelling_gives_the_recipe(place: Path, target: str) -> None:
    if target.startswith("target_package."):
        sys.path.insert(0, str(place))  # where its helper is
    recipe = load_target(target.replace("FOLDER", str(place)))
    assert sum(p.numel() for p in recipe.build_model().parameters()) == 3
    assert recipe.ddp_kwargs == ({} if ":" in target else {"static_graph": True})
    assert (recipe.optimizer is None) is (":" in target)


@pytest.mark.parametrize("name", ["torch.py", "1st.py"])
def test_a_file_may_be_called_like_anything(place: Path, name: str) -> None:
    (place / "recipes.py").rename(place / name)
    assert load_target(name).ddp_kwargs == {"static_graph": True}


def test_a_dataclass_with_postponed_annotations_works(place: Path) -> None:
    imports = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    (place / "recipes.py").write_text(f"{imports}{SOURCE}\n@dataclass\nclass Batch:\n    x: torch.Tensor\n")
    assert load_target("recipes.py:make").ddp_kwargs == {}


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (":recipe", "names no file or module"),
        ("recipes.py:recpie", "has no attribute 'recpie'; did you mean 'recipe'?"),
        ("recipes.py:loss", "needs arguments"),
        ("recipes.py:Holder", "must be a ddpcheck.Recipe"),
        ("recipes.py:model", "returned a value of type Linear"),
        ("helper_beside_it", "has no model and no batch and no loss"),
        ("nowhere", "no module named 'nowhere'"),
        ("./recipes", "no such file: ./recipes; did you mean './recipes.py'?"),
        ("recipse", "give a file or a module; did you mean 'recipes.py'?"),
        ("recipes.model", "give a file or a module, or recipes:model for an attribute of recipes"),
        ("folder", "folder is a folder without __init__.py"),
        ("target_package/", "is a folder"),
        ("not a module", "'not a module'"),
        ("..recipes", "'..recipes'"),
    ],
)
def test_what_is_no_recipe_is_wrong_usage(place: Path, target: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_target(target)
    assert words in str(caught.value) and "\n" not in str(caught.value)


USE_RUN = ", not a recipe: use `ddpcheck run --standalone --nproc-per-node 2 misspelled.py`"
MODEL, BATCH, LOSS = "def model(): ...\n", "def batch(step): ...\n", "def loss(model, batch): ...\n"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import torch.distributed as dist\ndist.init_process_group()\nmodel = 1\n", f"a training script{USE_RUN}"),
        (
            "from torch import nn\nclass Tagger(nn.Module): ...\n",
            "`ddpcheck init misspelled.py:Tagger` writes a first rec",
        ),
        (MODEL + LOSS + "def batches(step): ...\n", "no batch; batch is called batches there: rename it"),
        (MODEL + BATCH + LOSS + "ddp_kwarg = {'static_graph': True}\n", "did you mean 'ddp_kwargs'?"),
        ("import ddpcheck\nddpcheck.Recipe(model=1, batches=2, loss=3)\n", "no 'batches'; did you mean 'batch'?"),
    ],
)
def test_a_misspelled_part_of_a_recipe_is_suggested(place: Path, code: str, words: str) -> None:
    (place / "misspelled.py").write_text(code)
    with pytest.raises(DDPCheckError) as caught:
        load_target("misspelled.py")
    assert words in str(caught.value) and "\n" not in str(caught.value)


HELPED = """
from functools import wraps
shards = [1]
def batch(step):
    return [each() for each in (optimizers,)]
def optimizers(): ...
def make_model(): ...
"""


def test_a_helper_with_a_name_like_a_part_is_no_misspelling(place: Path) -> None:
    (place / "helped.py").write_text(MODEL + LOSS + HELPED)
    assert load_target("helped.py").shard is None


@pytest.mark.parametrize("target", ["recipes.py", "recipes"])
def test_an_error_inside_the_target_is_its_own(place: Path, target: str) -> None:
    (place / "recipes.py").write_text("import no_such_dependency\n")
    with pytest.raises(TargetError, match=r"importing recipes.*no_such_dependency.*recipes\.py:1"):
        load_target(target)


def test_a_file_is_found_before_anything_is_loaded(place: Path) -> None:
    assert find_file("recipes.py") == place / "recipes.py"
    (place / "notes.txt").touch()
    with pytest.raises(UsageError, match="no Python file"):
        find_file("notes.txt")
