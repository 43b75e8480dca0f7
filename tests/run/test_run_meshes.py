"""`ddpcheck run` on the loops of tests/mesh_loops.py: faults at their lines, and healthy ones without a finding."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed import fsdp

from tests.forked_run import ROOT
from tests.run.scripts import ScriptRun, run_script
from tests.tiers import one_of

if not hasattr(fsdp, "fully_shard"):
    pytest.skip("this torch has no fully_shard", allow_module_level=True)

from tests.mesh_loops import FAULTS, HEALTHY

pytestmark = pytest.mark.slow


def run_loops(folder: Path, *arguments: str) -> ScriptRun:
    return run_script(folder, ROOT / "tests" / "mesh_loops.py", *arguments, ranks=4)


@pytest.mark.parametrize("name", one_of(6, FAULTS))
def test_a_fault_of_a_mesh_is_told_at_its_line(name: str, tmp_path: Path) -> None:
    run = run_loops(tmp_path, name)
    (finding,) = run.findings
    assert (finding["code"], finding["location"]["path"]) == (FAULTS[name].code, "tests/mesh_loops.py")
    assert FAULTS[name].line in run.places[0], finding


def test_loops_of_meshes_without_their_faults_have_no_finding(tmp_path: Path) -> None:
    assert run_loops(tmp_path, *one_of(3, FAULTS), "--fixed").findings == []


@pytest.mark.parametrize("kind", one_of(3, ["tp", "fsdp", "ddp"]))
def test_healthy_loops_of_tensor_parallelism_have_no_finding(kind: str, tmp_path: Path) -> None:
    names = one_of(2, [name for name in HEALTHY if name.split("_")[0] == kind])
    assert run_loops(tmp_path, *names).findings == []
