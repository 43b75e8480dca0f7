"""Every judge on the recorded evidence of every fault and its twin: the real check, without a rank and without torch.

What is expected is what the files of the faults expect. `python -m tests.faultsuite.record` records evidence.
"""

import functools
import importlib
import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.findings.errors import EmptyShardError, HangError, OptionsDifferError, RankFailure, TargetError
from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.evidence.modules import WrapperFacts
from ddpcheck.findings.evidence.steps import StepEvidence, UnregisteredTensor
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location, Report
from ddpcheck.findings.rules import RULES, Severity
from ddpcheck.findings.wording import Names
from ddpcheck.render import FORMATS, renderer_for
from ddpcheck.rules.parameters.contribution import judge_parameters
from tests.faultsuite.cases import ROOT, Case, all_cases
from tests.faultsuite.evidence import Encoder, EvidenceError, decode, dumped, fields_that_differ, plain, with_fields
from tests.faultsuite.recorded import FOLDER, Phase, evidence_path, evidence_text, read_evidence, replay, write_evidence
from tests.faultsuite.runs import faults_in, faults_in_twin
from tests.reports import shown
from tests.tiers import first_of_each, share

CASES = all_cases()
ONE_OF_EACH_CODE = first_of_each(CASES, lambda case: [case.expected.code])


read = functools.lru_cache(maxsize=8)(read_evidence)


def report_of(case: Case, twin: str) -> Report:
    return replay(case, twin, read(case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_fault_is_the_first_finding_alone_at_its_severity_and_the_twin_is_clean(case: Case) -> None:
    broken, fixed = report_of(case, "broken"), report_of(case, "fixed")
    assert faults_in(case, broken) == [], shown(broken)
    assert faults_in_twin(fixed) == [], shown(fixed)


@pytest.mark.parametrize("case", share(CASES, ONE_OF_EACH_CODE), ids=str)
def test_a_report_can_be_shown(case: Case) -> None:
    report = report_of(case, "broken")
    for name in FORMATS:
        assert case.expected.code in renderer_for(name).render(report)


def test_there_is_evidence_of_the_faults_that_there_are_and_of_no_others() -> None:
    assert sorted(FOLDER.glob("*/*.json")) == sorted(map(evidence_path, CASES)), "run python -m tests.faultsuite.record"


def test_torch_is_not_needed() -> None:
    names = [str(case) for case in first_of_each(CASES, lambda case: [case.family])]
    code = (
        "import sys\n"
        "from tests.faultsuite.cases import all_cases\n"
        "from tests.faultsuite.recorded import TWINS, read_evidence, replay\n"
        f"cases = [case for case in all_cases() if str(case) in {names}]\n"
        "reports = [replay(case, twin, read_evidence(case)) for case in cases for twin in TWINS]\n"
        "print(len(reports), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [str(2 * len(names)), "False"], done.stderr


def is_missed(case: Case) -> bool:
    """Whether the fault is not found as expected, or the check goes on to other phases, or raises."""
    try:
        return bool(faults_in(case, replay(case, "broken", read(case))))
    except Exception:
        return True


@pytest.mark.exhaustive
def test_a_fault_is_told_otherwise_without_any_one_of_the_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    by_hand = """
        DDP101 DDP102 DDP103 DDP105 DDP108 DDP111 DDP112 DDP202 DDP209 DDP301 DDP303 DDP306 DDP309 DDP310 DDP405 DDP406
        DDP408 DDP501 DDP502 DDP507 DDP508 DDP512 DDP518
    """  # in test_parity.py, test_script_changes.py, test_script_taken.py; each relation in test_causes.py
    idle = set()
    for code, rule in RULES.items():
        if rule.explains:
            with monkeypatch.context() as patch:
                patch.setitem(RULES, code, replace(rule, explains=()))
                if not any(map(is_missed, CASES)):
                    idle.add(code)
    assert idle <= set(by_hand.split())


def test_a_parameter_that_the_search_for_unused_ones_does_not_find_is_told() -> None:
    step = StepEvidence(0, 0, {"head.weight": "contributes"}, hidden_from_ddp=("head.weight",))
    for wrapper, codes in [(WrapperFacts(find_unused_parameters=True), ["DDP406"]), (WrapperFacts(), [])]:
        found = judge_parameters([step, replace(step, rank=1)], wrapper, Names())
        assert [(finding.code, finding.subjects) for finding in found] == [(code, ("head.weight",)) for code in codes]


# --- Evidence that is not that of today ------------------------------------------------------------------------------

CASE = next(case for case in CASES if str(case) == "gradients/summed_loss")


def test_evidence_that_is_missing_or_of_an_earlier_file_or_class_is_told_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match=r"no evidence of .*; run python -m tests.faultsuite.record gradients/su"):
        read_evidence(CASE, tmp_path)
    text = evidence_path(CASE).read_text(encoding="utf-8")
    for before, after, told in [
        (read_evidence(CASE)["source"], "0" * 16, "the file has changed"),
        ('"Location": "path line"', '"Location": "path line column"', r"the fields of Location .*\(column\)"),
        ('"Location": "path line"', '"Place": "path line"', "no class Place"),
    ]:
        assert before in text
        write_evidence(CASE, text.replace(before, after), tmp_path)
        with pytest.raises(EvidenceError, match=told):
            read_evidence(CASE, tmp_path)
    with pytest.raises(EvidenceError, match="other fields"):
        decode({"is": "Location", "row": 3})


def test_other_phases_or_worlds_than_were_recorded_are_told() -> None:
    def replayed(world: list[dict[str, Any]]) -> Report:
        return replay(CASE, "broken", {"broken": [world, *worlds[1:]]})

    worlds = read_evidence(CASE)["broken"]
    first, second, *phases = worlds[0]
    with pytest.raises(EvidenceError, match=r"the check asks for wrap\(\), where it asked for wrap_tw"):
        replayed([first, second | {"asked": "wrap_twice()"}, *phases])
    with pytest.raises(EvidenceError, match=r"where it asked for nothing more .*; .* run python -m"):
        replayed(worlds[0][:-1])
    with pytest.raises(EvidenceError, match=r"the check does not ask for notes"):
        replayed([*worlds[0], worlds[0][-1]])
    with pytest.raises(EvidenceError, match="makes another world"):
        replay(CASE, "broken", {"broken": worlds[:1]})


# --- Values ----------------------------------------------------------------------------------------------------------


def again(value: object) -> object:
    return decode(json.loads(dumped(Encoder().encode(value))))


def test_values_come_back_as_they_were() -> None:
    values = (
        *(None, True, 3, -0.0, math.inf, "text", (), [], {}, [1, (2, {"a": [None]})], {1, 2}, frozenset({"b", "a"})),
        *({(0, "a"): 1, 2: 3}, {"is": "a key", "list": 1}, Path("a/b"), Severity.NOTE, Location("model.py", 3)),
        Difference("a", math.inf, 1e-6, worst_index=(1, 2)),
        StepEvidence(1, 0, {"a": "missing"}, unregistered=(UnregisteredTensor("x", (2,), Location("m.py", 1)),)),
    )
    for value in values:
        assert again(value) == value and type(again(value)) is type(value), value
    assert math.isnan(again(Difference("a", math.nan, 0.1)).error)
    fields = {"is": "Difference", "name": "a", "error": 0.5, "tolerance": 0.1}
    assert Encoder().encode(Difference("a", 0.5, 0.1)) == fields
    # Fingerprints are numbered as they come, so that other machines record the same.
    assert Encoder().encode((2**63, -(2**62), 2**63, 7)) == [10**6, 10**6 + 1, 10**6, 7]
    with pytest.raises(EvidenceError, match="a object is nothing that can be recorded"):
        Encoder().encode([object()])


def test_errors_come_back_as_they_were() -> None:
    empty = EmptyShardError("no samples", 2, detail="lines")
    failures = [
        RankFailure(1, "raised", "rank 1 raised it", 17.5, exception=empty),
        RankFailure(0, "stuck", "rank 0 waits", 18.5, exception=KeyError("key")),
    ]
    error = HangError("ranks wait", failures, detail="more")
    error.results[2] = Location("model.py", 3)
    hang = again(error)
    assert type(hang) is HangError and str(hang) == "ranks wait" and hang.detail == "more"
    assert hang.results == {2: Location("model.py", 3)} and hang.exit_code == HangError.exit_code
    first, second = hang.failures
    assert isinstance(first.exception, EmptyShardError)
    assert (str(first.exception), first.exception.step) == ("no samples", 2)
    assert type(second.exception) is KeyError and first.when == second.when == 0.0
    options = again(OptionsDifferError("they differ", [{"a": "1"}, {"a": "2"}]))
    assert options.options == ({"a": "1"}, {"a": "2"}) and again(TargetError("wrong")).detail == ""
    assert type(again(type("OfTheUser", (Exception,), {})("said"))) is Exception


def test_of_other_ranks_only_what_differs_is_written() -> None:
    first = {"is": "A", "rank": 0, "of": {"is": "B", "x": 1, "y": {"k": 1}}}
    other = {"is": "A", "rank": 1, "of": {"is": "B", "x": 1, "y": {"k": 2}, "z": 3}}
    assert fields_that_differ(first, other) == {"rank": 1, "of": {"y": {"k": 2}, "z": 3}}
    for one, two in [(first, other), (other, first), (first, first), (first, None), (1, first), ({"a": 1}, {"b": 1})]:
        assert with_fields(one, fields_that_differ(one, two)) == two


def test_nothing_of_this_machine_is_recorded() -> None:
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    said = f'File "{torch.origin}", line 1; File "{ROOT}/examples/a.py"; 127.0.0.1:31337; <A at 0x7f3a5b2c1d10>'
    expected = 'File "site-packages/torch/__init__.py", line 1; File "examples/a.py"; 127.0.0.1:0; <A at 0x0>'
    assert plain(said) == expected
    absolute = re.compile(r'[" (]/[^" ]*\.py|/tmp/|/ddpcheck-')
    assert [path for path in FOLDER.glob("*/*.json") if absolute.search(path.read_text(encoding="utf-8"))] == []


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    phases = [Phase("build()", [Location("a.py", 1)] * 2), Phase("wrap()", [None, None])]
    write_evidence(CASE, evidence_text(CASE, {"broken": [phases]}), tmp_path)
    built = {"asked": "build()", "each": {"is": "Location", "path": "a.py", "line": 1}}
    assert read_evidence(CASE, tmp_path)["broken"] == [[built, {"asked": "wrap()"}]]
