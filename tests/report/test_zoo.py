"""Every recipe of the zoo gets its verdict: silence on the healthy ones, the right code on the broken ones."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpcheck.findings.report import Report
from ddpcheck.report.checking.check import check
from tests.reports import assert_healthy, contradictions, shown
from tests.tiers import one_of, share
from tests.zoo import ZOO, expected_of, targets

HEALTHY, BROKEN = targets("healthy"), targets("broken")
# `make test` has those that use most of torch, apart from what is compiled, which takes its time.
QUICK = ["slots_all_reduced", "scripted_gate", "conv_syncbn"]
SOME = [*QUICK, *(name for name in one_of(24, HEALTHY) if name not in QUICK)]
IN_OTHER_WORLDS = {"allgather_contrastive": 3, "dropout_rnn": 4, "own_shard": 1, "transformer_tied_dropout": 3}


@pytest.fixture(autouse=True, scope="module")
def _compiled_code_goes_with_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


def report_on(target: str, world_size: int = 2) -> Report:
    return check(target, world_size=world_size, timeout=20)


@pytest.mark.parametrize("name", share(SOME, QUICK))
def test_a_healthy_recipe_passes_every_check_without_a_finding(name: str) -> None:
    report = report_on(HEALTHY[name])
    assert_healthy(report)
    compared = [entry for entry in report.parity if entry.reference == "single-process"]
    assert compared and all(entry.relative_error <= entry.tolerance for entry in compared)
    if name.startswith("compiled_"):
        (note,) = report.world["notes"]
        assert "only the steps under the wrapper are repeated with torch.compile, which" in note
        assert ("different random numbers" if "inductor" in name else "the same gradients, within") in note


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world_size"), IN_OTHER_WORLDS.items())
def test_a_healthy_recipe_is_healthy_in_worlds_of_other_sizes(name: str, world_size: int) -> None:
    assert_healthy(report_on(HEALTHY[name], world_size))


@pytest.mark.parametrize("name", share(one_of(2, BROKEN), ["load_balancing"]))
def test_a_broken_recipe_gets_its_code_and_no_other(name: str) -> None:
    expected = expected_of(BROKEN[name])
    report = report_on(BROKEN[name])
    assert report.findings and contradictions(report) == [], shown(report)
    first, *rest = report.findings
    codes = expected["code"] if isinstance(expected["code"], list) else [expected["code"]]
    assert first.code in codes, shown(report)
    assert expected["severity"] in (None, first.severity.value), shown(report)
    assert set(expected["subjects"]) <= set(first.subjects), shown(report)
    assert not expected["ranks"] or first.ranks == tuple(expected["ranks"]), shown(report)
    alarms = [f.code for f in rest if f.severity is first.severity and f.code not in expected["also"]]
    assert alarms == [], shown(report)


@pytest.mark.slow
def test_a_report_does_not_depend_on_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ZOO.parent)
    here = report_on(BROKEN["markup_names_unused"])
    monkeypatch.chdir(tmp_path)
    there = report_on(BROKEN["markup_names_unused"])
    assert [f.message for f in here.findings] == [f.message for f in there.findings]
    assert str(here.findings[0].location).startswith("zoo/broken/markup_names_unused.py:")
    assert str(there.findings[0].location).startswith("markup_names_unused.py:")
