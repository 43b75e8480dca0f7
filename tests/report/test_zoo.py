"""Every recipe of the zoo gets its verdict: silence on the healthy ones, the right code on the broken ones."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.findings.report import Report
from ddpcheck.report.checking.check import check
from tests.reports import assert_healthy, comparable, contradictions, shown
from tests.tiers import one_of, share

ZOO = Path(__file__).parents[1] / "zoo"
HEALTHY = sorted((ZOO / "healthy").glob("*.py"))
BROKEN = sorted((ZOO / "broken").glob("*.py"))
IN_OTHER_WORLDS = {
    *("allgather_contrastive", "conv_syncbn", "dropout_rnn", "nested_losses", "own_shard", "sparse_embedding"),
    *("transformer_tied_dropout", "uneven_batch_weighted"),
}
TWICE = {
    *("healthy/conv_syncbn", "healthy/transformer_tied_dropout", "broken/two_causes", "broken/sum_and_bn"),
    "broken/gather_object_unused_on_rank1",
}


IN_MAKE_TEST = 4  # healthy recipes


def torch_in(path: Path) -> set[str]:
    """The names of torch that a recipe uses."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    names = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    return {name for name in names if name.startswith(("nn.", "torch.", "dist."))}


def most_various(paths: list[Path], count: int) -> list[Path]:
    """Recipes that use as much of torch as so many can: each adds the most to those before it."""
    uses = {path: torch_in(path) for path in paths}
    chosen: list[Path] = []
    while len(chosen) < count:
        seen = set().union(*(uses[path] for path in chosen))
        chosen.append(max(uses.keys() - set(chosen), key=lambda path: (len(uses[path] - seen), path.name)))
    return chosen


# `make test` has these, and every sixteenth broken one; what is compiled takes its time.
QUICK = most_various([path for path in HEALTHY if "torch.compile" not in torch_in(path)], IN_MAKE_TEST)
SOME = [*QUICK, *(path for path in one_of(24, HEALTHY) if path not in QUICK)]
OTHERS = [path for path in HEALTHY if path.stem in IN_OTHER_WORLDS]


def name_of(path: Path) -> str:
    return path.stem


def expected_of(path: Path) -> dict[str, Any]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "EXPECT":
            found: dict[str, Any] = ast.literal_eval(node.value)
            return {"subjects": [], "ranks": [], "severity": None, "also": [], **found}
    raise AssertionError(f"{path.name} has no EXPECT")


@pytest.fixture(autouse=True, scope="module")
def _compiled_code_goes_with_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


def report_on(path: Path, world_size: int = 2) -> Report:
    return check(str(path), world_size=world_size, timeout=20)


@pytest.mark.parametrize("path", share(SOME, QUICK), ids=name_of)
def test_a_healthy_recipe_passes_every_check_without_a_finding(path: Path) -> None:
    report = report_on(path)
    assert_healthy(report)
    compared = [entry for entry in report.parity if entry.reference == "single-process"]
    assert compared and all(entry.relative_error <= entry.tolerance for entry in compared)
    if path.stem.startswith("compiled_"):
        (note,) = report.world["notes"]
        assert "only the steps under the wrapper are repeated with torch.compile, which" in note
        assert ("different random numbers" if "inductor" in path.stem else "the same gradients, within") in note


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("path", OTHERS[::2], ids=name_of)
def test_a_healthy_recipe_is_healthy_in_worlds_of_other_sizes(path: Path, world_size: int) -> None:
    assert_healthy(report_on(path, world_size))


@pytest.mark.parametrize("path", share(BROKEN[::2], BROKEN[::16]), ids=name_of)
def test_a_broken_recipe_gets_its_code_and_no_other(path: Path) -> None:
    expected = expected_of(path)
    report = report_on(path)
    assert report.findings and contradictions(report) == [], shown(report)
    first, *rest = report.findings
    codes = expected["code"] if isinstance(expected["code"], list) else [expected["code"]]
    assert first.code in codes, shown(report)
    assert expected["severity"] in (None, first.severity.value), shown(report)
    assert set(expected["subjects"]) <= set(first.subjects), shown(report)
    assert not expected["ranks"] or first.ranks == tuple(expected["ranks"]), shown(report)
    alarms = [f.code for f in rest if f.severity is first.severity and f.code not in expected["also"]]
    assert alarms == [], shown(report)


def test_the_recipes_named_here_exist() -> None:
    assert IN_OTHER_WORLDS <= {path.stem for path in HEALTHY}
    assert all((ZOO / f"{name}.py").exists() for name in TWICE)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TWICE))
def test_the_same_recipe_gets_the_same_report_twice(name: str) -> None:
    path = ZOO / f"{name}.py"
    assert comparable(report_on(path)) == comparable(report_on(path))


@pytest.mark.slow
def test_a_report_does_not_depend_on_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ZOO / "broken" / "markup_names_unused.py"
    monkeypatch.chdir(ZOO.parent)
    here = report_on(path)
    monkeypatch.chdir(tmp_path)
    there = report_on(path)
    assert [f.message for f in here.findings] == [f.message for f in there.findings]
    assert str(here.findings[0].location).startswith("zoo/broken/markup_names_unused.py:")
    assert str(there.findings[0].location).startswith("markup_names_unused.py:")
