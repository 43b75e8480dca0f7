"""`ddpcheck run` on the loops of tests/mesh_loops.py: faults at their lines, and healthy ones without a finding."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed import fsdp

from tests.faultsuite.scripts_page import ROOT, TIMEOUT
from tests.run.scripts import run_script
from tests.tiers import one_of

if not hasattr(fsdp, "fully_shard"):
    pytest.skip("this torch has no fully_shard", allow_module_level=True)

from tests.mesh_loops import FAULTS, HEALTHY

pytestmark = pytest.mark.slow
SCRIPT = ROOT / "tests" / "mesh_loops.py"
TIMED = (f"--check-timeout={TIMEOUT}",)


@pytest.mark.parametrize("name", one_of(14, FAULTS))
def test_a_fault_of_a_mesh_is_told_at_its_line(name: str, tmp_path: Path) -> None:
    run = run_script(tmp_path, SCRIPT, name, options=TIMED, ranks=4)
    assert run.codes == [FAULTS[name].code]
    assert run.findings[0]["location"]["path"] == "tests/mesh_loops.py" and FAULTS[name].line in run.places[0]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([*one_of(2, FAULTS), "--fixed"], id="without their faults"),
        *(
            pytest.param(one_of(2, [name for name in HEALTHY if name.split("_")[0] == kind]), id=kind)
            for kind in one_of(3, ["tp", "fsdp", "ddp"])
        ),
    ],
)
def test_healthy_loops_of_meshes_have_no_finding(names: list[str], tmp_path: Path) -> None:
    assert run_script(tmp_path, SCRIPT, *names, options=TIMED, ranks=4).findings == []
