"""The published JSON Schema: what is written fits it, and what is wrong does not."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ddpcheck import cli
from ddpcheck.cli.saved import DOCUMENTS, schema_text
from ddpcheck.findings.difference import compare_reports
from ddpcheck.findings.report import AcceptedFinding, Report
from tests.findings.test_from_json import FOUND, MATRIX, REPORT
from tests.render.test_render import REPORT as SHOWN

ROOT = Path(__file__).parents[2]
ACCEPTED = Report("t", accepted=(AcceptedFinding(FOUND, "suppression", "why"),), ignored=("DDP305",))
MADE = {
    "report": [REPORT, SHOWN, ACCEPTED, Report("t")],
    "matrix": [MATRIX],
    "difference": [compare_reports(SHOWN, REPORT), compare_reports(ACCEPTED, ACCEPTED)],
}


def validator(document: str) -> Any:
    schema = json.loads(schema_text(document))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_is_written_fits_its_schema(document: str) -> None:
    for made in MADE[document]:
        validator(document).validate(json.loads(made.to_json()))
    published = (ROOT / "docs" / "schemas" / f"{document}.schema.json").read_text(encoding="utf-8")
    assert published == schema_text(document) + "\n", "`make schemas` writes it again"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *((["status"], "fine"), (["findings", 0, "severity"], "fatal"), (["findings", 0, "location", "line"], "3")),
        *((["checks", 0, "status"], None), (["findings", 0, "code"], ...)),
    ],
)
def test_what_is_wrong_does_not_fit(path: list[Any], value: object) -> None:
    data = json.loads(REPORT.to_json())
    older, newer = copy.deepcopy(data), copy.deepcopy(data)
    del older["accepted"], older["checks"][0]["asked"]
    newer["colour"] = newer["findings"][0]["colour"] = "red"
    assert validator("report").is_valid(older) and validator("report").is_valid(newer)
    place = data
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    assert not validator("report").is_valid(data)


def test_the_command_prints_it(capsys) -> None:
    assert cli.main(["schema"]) == 0
    assert capsys.readouterr().out == schema_text("report") + "\n"
    with pytest.raises(SystemExit, match="2"):
        cli.main(["schema", "matrx"])
    assert "there is no document 'matrx'; did you mean 'matrix'?" in capsys.readouterr().err
