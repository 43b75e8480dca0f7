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

from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.evidence.modules import WrapperFacts
from ddpcheck.findings.evidence.steps import StepEvidence, UnregisteredTensor
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Location, Report
from ddpcheck.findings.rules import Severity
from ddpcheck.findings.wording import Names
from ddpcheck.render import FORMATS, renderer_for
from ddpcheck.rules.parameters.contribution import judge_parameters
from tests.faultsuite.cases import ROOT, Case, all_cases
from tests.faultsuite.evidence import Encoder, EvidenceError, decode, dumped, plain
from tests.faultsuite.recorded import FOLDER, evidence_path, read_evidence, replay, write_evidence
from tests.faultsuite.runs import faults_in, faults_in_twin
from tests.reports import shown
from tests.tiers import first_of_each, share

CASES = all_cases()
SHOWN = first_of_each(CASES, lambda case: [case.family, case.expected.code[: 6 if case.expected.code < "DDP2" else 4]])


read = functools.lru_cache(maxsize=8)(read_evidence)


def report_of(case: Case, twin: str) -> Report:
    return replay(case, twin, read(case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_fault_is_the_first_finding_alone_at_its_severity_and_the_twin_is_clean(case: Case) -> None:
    broken, fixed = report_of(case, "broken"), report_of(case, "fixed")
    assert faults_in(case, broken) == [], shown(broken)
    assert faults_in_twin(fixed) == [], shown(fixed)


@pytest.mark.parametrize("case", share(CASES, SHOWN), ids=str)
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


def test_nothing_of_this_machine_is_recorded() -> None:
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    said = f'File "{torch.origin}", line 1; File "{ROOT}/examples/a.py"; 127.0.0.1:31337; <A at 0x7f3a5b2c1d10>'
    expected = 'File "site-packages/torch/__init__.py", line 1; File "examples/a.py"; 127.0.0.1:0; <A at 0x0>'
    assert plain(said) == expected
    absolute = re.compile(r'[" (]/[^" ]*\.py|/tmp/|/ddpcheck-')
    assert [path for path in FOLDER.glob("*/*.json") if absolute.search(path.read_text(encoding="utf-8"))] == []
