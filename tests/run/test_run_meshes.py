"""`ddpcheck run` on the loops of tests/mesh_loops.py: faults at their lines, and healthy ones without a finding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.distributed import fsdp

from tests.faultsuite.scripts_page import ROOT, TIMEOUT
from tests.forked_run import run_forked
from tests.tiers import one_of

if not hasattr(fsdp, "fully_shard"):
    pytest.skip("this torch has no fully_shard", allow_module_level=True)

from tests.mesh_loops import FAULTS, HEALTHY

pytestmark = pytest.mark.slow
SCRIPT = "tests/mesh_loops.py"


def report_on(folder: Path, *arguments: str) -> dict[str, list[dict[str, object]]]:
    file = folder / "report.json"
    ours = (f"--check-timeout={TIMEOUT}", f"--check-output={file}")
    ran = run_forked(*ours, SCRIPT, *arguments, ranks=4, timeout=300)
    assert file.exists(), ran.stderr
    report: dict[str, list[dict[str, object]]] = json.loads(file.read_text())
    return report


@pytest.mark.parametrize("name", one_of(14, FAULTS))
def test_a_fault_of_a_mesh_is_told_at_its_line(name: str, tmp_path: Path) -> None:
    expected = FAULTS[name]
    (finding,) = report_on(tmp_path, name)["findings"]
    where = finding["location"]
    assert isinstance(where, dict)
    text = (ROOT / SCRIPT).read_text().splitlines()[where["line"] - 1]
    assert (finding["code"], where["path"]) == (expected.code, SCRIPT)
    assert expected.line in text, finding


def test_loops_of_meshes_without_their_faults_have_no_finding(tmp_path: Path) -> None:
    assert report_on(tmp_path, *one_of(2, FAULTS), "--fixed")["findings"] == []


@pytest.mark.parametrize("kind", one_of(3, ["tp", "fsdp", "ddp"]))
def test_healthy_loops_of_tensor_parallelism_have_no_finding(kind: str, tmp_path: Path) -> None:
    names = one_of(2, [name for name in HEALTHY if name.split("_")[0] == kind])
    assert report_on(tmp_path, *names)["findings"] == []
