"""A report that was mangled is the file's fault: one sentence, exit code 2, and never a traceback."""

import contextlib
import copy
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis", reason="hypothesis is not installed")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddpcheck import cli
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import AcceptedFinding, Report, ReportError
from ddpcheck.report.matrix.matrix import Advice, Matrix, MatrixRow, StepTime
from tests.render.test_render import REPORT as SHOWN
from tests.render.test_render import UNUSED
from tests.tiers import one_of

FOUND = replace(UNUSED, code="DDP104", fix="Mend it.")
REPORT = replace(
    SHOWN,
    findings=(FOUND,),
    world={"world_size": 2, "timeout": 30.0, "notes": ["n"]},
    ignored=("DDP305",),
    timing={"total": 1.0},
    error=ReportError("It raised.", 3, "Traceback"),
    accepted=(AcceptedFinding(FOUND, "baseline", "known"),),
)
TIME = StepTime(1.0, 0.9, 1.1, 0.01, 9)
MATRIX = Matrix(
    "net.py",
    (
        MatrixRow({}, "right", own=True, baseline=True, step_time=TIME, findings=(FOUND,), error=0.1),
        MatrixRow({"static_graph": True}, "stops", code="DDP104", failure=ReportError("It hung.", 4)),
        MatrixRow({"bucket_cap_mb": 1}, "skipped", "hook", reason="no"),
    ),
    (Advice("own", "It is right."),),
    {"torch": "2.13.0"},
    REPORT.world,
    0.1,
    {"total": 1.0},
)
SAVED = {"report": json.loads(REPORT.to_json()), "matrix": json.loads(MATRIX.to_json())}


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything in `data`."""
    yield path
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from places(value, (*path, key))


numbers = st.integers() | st.floats() | st.sampled_from([10**400, -(10**400), 1e308, 2**70])
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=9) | st.sampled_from(["\ud800", "error", "DDP999", "\x00"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def render(text: str, folder: Path, *options: str) -> tuple[int, str, str]:
    out, err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO()
    (folder / "r.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(["render", str(folder / "r.json"), *options])
    out.seek(0)
    return code, out.read(), err.getvalue()


def assert_told(text: str, folder: Path) -> None:
    for options in ((), ("--format", "json")):
        code, out, err = render(text, folder, *options)
        if code == 0:
            assert out and not err
        else:
            said = (code, err.count("\n"), "bug in ddpcheck" in err, "Traceback" in err)
            assert said == (2, 1, False, False) and err.startswith("ddpcheck: error: "), err


@settings(max_examples=len(one_of(4, range(80))), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), kind=st.sampled_from(sorted(SAVED)), more=st.integers(0, 2))
def test_a_mangled_report_is_told_or_shown(data: st.DataObject, kind: str, more: int, tmp_path: Path) -> None:
    mangled = copy.deepcopy(SAVED[kind])
    for _ in range(1 + more):
        path = data.draw(st.sampled_from(list(places(mangled))))
        if not path:
            mangled = data.draw(values)
            continue
        holder = mangled
        for key in path[:-1]:
            holder = holder[key]
        if data.draw(st.booleans()):
            holder[path[-1]] = data.draw(values)
        else:
            del holder[path[-1]]
    assert_told(json.dumps(mangled), tmp_path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"findings": [3]}, "Expected `object`, got `int` - at `$.findings[0]`"),
        ({"checks": [{"name": "x"}]}, "missing required field `status` - at `$.checks[0]`"),
        ({"checks": [{"name": "x", "status": "fine"}]}, "Invalid enum value 'fine' - at `$.checks[0].status`"),
        ({"timing": {"total": True}}, "Expected `float`, got `bool` - at `$.timing"),
        ({"timing": {"total": 10**400}}, "0... is not a number in JSON, or too large"),
        ({"world": {"notes": 3}}, "world.notes must be a list of strings"),
        ({"schema_version": True}, "schema_version True"),
    ],
)
def test_the_sentence_names_the_place(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    code, _, err = render(json.dumps({**SAVED["report"], **change}), tmp_path)
    assert code == 2 and sentence in err, err
    text = json.dumps(SAVED["report"])
    assert_told(text[: len(text) // 2], tmp_path)
    for wrong, sentence in (
        (text.replace("30.0", "NaN"), "NaN is not a number in JSON, or too large"),
        (text.replace("30.0", "1e999"), "1e999 is not a number in JSON, or too large"),
        ("[" * 100_000, "nested too deeply"),
    ):
        assert sentence in render(wrong, tmp_path)[2]


def test_a_report_of_another_version_loses_what_is_unknown_and_misses_nothing_that_was_added(tmp_path: Path) -> None:
    assert Report.from_json(REPORT.to_json()) == REPORT and Matrix.from_json(MATRIX.to_json()) == MATRIX
    assert render("\ufeff" + json.dumps(SAVED["report"]), tmp_path)[0] == 0  # a byte order mark is no fault
    assert_told(json.dumps({**SAVED["matrix"], "timing": {"\n": None}}), tmp_path)
    newer = copy.deepcopy(SAVED["report"])
    newer["more"], newer["checks"][0]["more"], newer["findings"][0]["code"] = 1, 2, "DDP999"
    assert render(json.dumps(newer), tmp_path)[0] == 0
    assert json.loads(render(json.dumps(newer), tmp_path, "--format", "json")[1])["findings"][0]["name"] == ""
    older = copy.deepcopy(SAVED["report"])
    del older["ignored"], older["checks"][1]["asked"]
    read = Report.from_json(json.dumps(older))
    assert (read.ignored, read.checks[1].asked) == ((), True)
