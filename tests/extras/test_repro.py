"""Reproductions: what is written, that it runs without ddpcheck, and that it shows a fault if there is one."""

import ast
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddpcheck import cli
from ddpcheck.extras.repro import write_reproduction
from ddpcheck.extras.repro.script import COMPARISONS, imports_from_ddpcheck, tolerance_for, why_none, world_size_for
from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.report import Finding, Location, Report
from ddpcheck.findings.rules import RULES, Severity
from ddpcheck.recipe.recipe import Recipe
from ddpcheck.report.checking.check import check
from ddpcheck.rules.replicas.model_parts import describe_split
from tests.faultsuite.cases import FAULTS, read_case
from tests.launchers.slurm import free_ports
from tests.tiers import one_of, share

ROOT = Path(__file__).parents[2]

# fault of the suite: what each of the two ranks prints for its broken recipe (the same, or "rank 0|rank 1")
SHOWN = {
    "parameters/unused_on_one_rank": "failed in .*of step|extra.weight: step 0: no gradient.*extra.bias: step 0: no",
    "parameters/layers_in_a_list": r"of \(8, 8\): step 1: gradient norm",
    "parameters/needless_find_unused": "find_unused_parameters: step 0: True, unused: 0",
    "ranks/parameter_shape": r"0.weight: start: number 0, \(8, 8\)|0.weight: start: number 0, \(12, 8\)",
    "ranks/moving_average_drifts": "running_mean: step 0: norm",
    "ranks/learning_rate": "lr: start: 0.01|lr: start: 0.02",
    "gradients/batchnorm": "gradient of conv.weight: step 0: relative error 0.58",
    "gradients/summed_loss": r"all gradients together: step 0: 0\.5 times",
    "gradients/nondeterministic": r"relative error 0\.\d",
    "running/raises_on_one_rank": (
        "failed in backward of step 0|failed in forward of step 0: ValueError: a corrupt record in this rank's shard"
    ),
    "running/loops_on_one_rank": "Timed out|in searching",
    "running/metrics_packed_in_another_order": "reduced 0: step 0: ",
    "training/no_sync_not_entered": "no_sync: step 0: called 1 times, 0 of 2 forward passes under it",
    "training/optimizer_before_replacement": "2.weight: step 0: a gradient.*2.bias: step 0: a gradient",
    "training/overlapping_shards": "samples: step 0: 1 of 6 are on another|samples: step 0: 1 of 7 are on another",
    "training/dropout_seeded_in_forward": "drawn 0: step 0: ",
    "training/gradients_zeroed_before_step": "0.weight: .*zeroed before a step.*0.bias: .*zeroed.*2.weight: .*2.bias: ",
}


@dataclass(frozen=True)
class Ran:
    codes: list[int]
    outputs: list[str]

    @property
    def text(self) -> str:
        return "\n".join(self.outputs)


def run(script: Path) -> Ran:
    """Run two ranks as torchrun would, without ddpcheck and with another hash seed each."""
    (port,) = free_ports(1)
    (folder := script.parent / "blocked").mkdir(exist_ok=True)
    (folder / "ddpcheck.py").write_text("raise ImportError('a reproduction imports ddpcheck')")
    common = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    outputs = [folder / f"{rank}.txt" for rank in range(2)]
    ranks = []
    for rank, path in enumerate(outputs):
        of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONHASHSEED": str(rank + 1)}
        with path.open("wb") as output:
            command = [sys.executable, str(script)]
            ranks.append(subprocess.Popen(command, env=common | of_rank, cwd="/", stdout=output, stderr=output))
    end = time.monotonic() + 60
    while time.monotonic() < end and None in (codes := [rank.poll() for rank in ranks]):
        if any(codes):
            end = min(end, time.monotonic() + 3)  # torchrun ends the others as well
        time.sleep(0.02)
    for process in ranks:
        process.kill()
    return Ran([process.wait() for process in ranks], [path.read_text(errors="replace") for path in outputs])


def without_pauses(script: Path) -> Path:
    """Wait less where something hangs, and not for torchrun, which is not there."""
    text = script.read_text().replace("timedelta(seconds=20)", "timedelta(seconds=5)")
    script.write_text(text.replace("time.sleep(4 if lines else 0)", "pass"))
    return script


def small_report(code: str = "DDP101", subject: str = "a", **world: object) -> Report:
    finding = Finding(
        code, (subject,), f"No operation reads {subject}.", Severity.ERROR, location=Location("net.py", 3)
    )
    return Report("t", findings=(finding,), world={"world_size": 2, "steps": 3, **world})


NET = """\
import torch
from torch import nn


def batch(step):
    return torch.randn(8, 2, generator=torch.Generator().manual_seed(step))


def loss(model, x):
    return (model(x)[:, 0] - x.sum(1)).square().mean()


def model():
    return nn.Linear(2, 1)
"""


def written(folder: Path, text: str = NET) -> str:
    (folder / "net.py").write_text(text)
    return str(folder / "net.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", one_of(4, SHOWN))  # `make test-all` has every fourth
def test_the_script_shows_the_fault_and_not_on_its_repaired_twin(name: str, tmp_path: Path) -> None:
    case = read_case(FAULTS / f"{name}.py")
    broken, fixed = f"{case.path}:broken", f"{case.path}:fixed"
    report = check(broken, timeout=5 if case.expected.timeout else 30)
    assert report.findings[0].code == case.expected.code
    script = without_pauses(write_reproduction(report, broken, tmp_path / "broken"))
    ran = run(script)
    assert any(ran.codes), ran.text
    for number, (output, words) in enumerate(zip(ran.outputs, (SHOWN[name].split("|") * 2)[:2], strict=True)):
        assert re.search(rf"(?s)^rank {number}: .*{words}", output, flags=re.MULTILINE), ran.text
        assert "Traceback" not in output
    twin = without_pauses(write_reproduction(report, fixed, tmp_path / "fixed", finding=report.findings[0]))
    assert twin.name == script.name
    ran = run(twin)
    assert ran.codes == [0, 0], ran.text
    assert all(f"rank {number}: " in output for number, output in enumerate(ran.outputs))


@pytest.mark.slow
def test_the_command_line_writes_a_script_that_torchrun_fails_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "new & other" / "repro"
    assert cli.main(["report", "examples/faults/parameters/unused.py:broken", "--repro", str(folder)]) == 1
    out, err = capsys.readouterr()
    script = folder / "repro_ddp101.py"
    command = f"torchrun --standalone --nproc-per-node 2 '{script}'"
    assert err == f"ddpcheck: wrote {script}; run it with: {command}\n" and "DDP101" in out
    assert [path.name for path in folder.iterdir()] == ["repro_ddp101.py"]
    text = script.read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert "torchrun --standalone --nproc-per-node 2 repro_ddp101.py" in docstring
    line = re.search(r"unused.py:26, line (\d+) here", docstring)
    assert line and "self.old_head = " in text.splitlines()[int(line[1]) - 1]
    assert str(ROOT) not in text and (ROOT / "examples/faults/parameters/unused.py").read_text() in text
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script.name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=script.parent, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    for rank in (0, 1):
        for name in ("old_head.weight", "old_head.bias"):
            assert f"rank {rank}: {name}: step 0: no gradient; step 1: no gradient" in done.stdout
        assert f"rank {rank}: failed in forward of step 1: RuntimeError" in done.stdout


def test_only_files_of_ddpcheck_are_overwritten_and_a_docstring_has_any_name(tmp_path: Path) -> None:
    target, out = written(tmp_path), tmp_path / "out"
    report = small_report("DDP304", subject='a"""b\\n[red]\x1b{x}"')
    script = write_reproduction(report, target, out)
    text = script.read_text()
    assert "[red]" in (ast.get_docstring(ast.parse(text)) or "") and "\x1b" not in text
    assert write_reproduction(report, target, out) == script
    script.write_text("mine")
    with pytest.raises(UsageError, match="already exists, and ddpcheck did not write it; choose another folder"):
        write_reproduction(report, target, out)
    assert script.read_text() == "mine"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("    return nn.Lin", "    import ddpcheck\n\n    return nn.Lin"), "net.py:15 needs ddpcheck itself"),
        (("Linear(2, 1)", "Linear(2, len(RULES))"), "net.py:15 needs ddpcheck itself (RULES)"),
    ],
)
def test_a_target_that_needs_ddpcheck_is_refused(tmp_path: Path, change: tuple[str, str], sentence: str) -> None:
    text = NET.replace("import torch\n", "import torch\nfrom ddpcheck.findings.rules import RULES\n", 1)
    with pytest.raises(UsageError) as caught:
        write_reproduction(small_report(), written(tmp_path, text.replace(*change)), tmp_path / "out")
    assert sentence in str(caught.value) and not (tmp_path / "out").exists()


def test_a_finding_that_cannot_be_reproduced_is_refused_in_a_sentence(tmp_path: Path) -> None:
    recipe = Recipe(model=lambda: None, batch=lambda step: None, loss=lambda model, batch: None)  # type: ignore
    with pytest.raises(UsageError, match="a Recipe built in Python cannot be written to a file"):
        write_reproduction(small_report(), recipe, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the report has no finding"):
        write_reproduction(Report("t"), "t.py", tmp_path)
    with pytest.raises(UsageError, match=r"no script shows DDP512 \(checkpoint-race\)"):
        write_reproduction(small_report("DDP512"), "t.py", tmp_path)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["report", "nowhere.py", "--repro", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err == f"ddpcheck: error: cannot write to the folder {tmp_path / 'file'}: File exists\n"


def test_a_report_without_a_script_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    for report, code, sentence in (
        (Report("t"), 0, "no finding to reproduce"),
        (small_report("DDP512"), 1, "no script shows DDP512 (checkpoint-race)"),
    ):
        monkeypatch.setattr("ddpcheck.report.checking.check.check", lambda *_, report=report, **__: report)
        assert cli.main(["report", "t.py", "--repro", str(out)]) == code
        assert capsys.readouterr().err == f"ddpcheck: {sentence}, nothing written to {out}\n" and not out.exists()


def test_every_code_that_a_detector_may_emit_has_a_comparison_that_exists() -> None:
    harness = (ROOT / "ddpcheck" / "extras" / "repro" / "harness.py").read_text()
    known = set(re.findall(r"(?:    def |self\.)(\w+)", harness))
    for name, (steps, facts, at_fault, prints) in COMPARISONS.items():
        assert steps in ("named", "first", "next", "two", "all") and prints, name
        assert set(re.findall(r"rank\.(\w+)", f"{facts} {at_fault}")) <= known, name
        ast.parse(f"lambda ranks: {at_fault}")
    emitted = {rule.code for rule in RULES.values() if "report" in rule.checks}
    emitted -= {"DDP521", "DDP522"}  # found by `run` and `watch` only, and only in compiled code
    shown = {rule.code for rule in RULES.values() if rule.repro}
    assert len(emitted) > 50 and emitted <= shown and {RULES[code].repro for code in shown} == set(COMPARISONS)


@pytest.mark.parametrize(("code", "shown"), [("DDP101", True), ("DDP104", False), ("DDP305", False)])
def test_a_model_that_is_split_over_ranks_has_scripts_for_some_findings(code: str, shown: bool) -> None:
    report = small_report(code, world_size=4, notes=[describe_split([(0, 1), (2, 3)])])
    (finding,) = report.findings
    assert ("tensor parallelism" in why_none(finding, report)) is not shown
    assert world_size_for(finding, report) == 4 and why_none(finding, small_report(code)) == ""


def test_the_world_is_as_small_as_the_finding_allows() -> None:
    report = Report("t", world={"world_size": 4})
    assert world_size_for(Finding("DDP101", (), "", Severity.ERROR), report) == 2
    assert world_size_for(Finding("DDP104", (), "", Severity.ERROR, ranks=(3,)), report) == 4
    assert tolerance_for(Finding("DDP305", (), "", Severity.ERROR), report) == 1e-3


MIXED = """\
from __future__ import annotations

import pytest; from ddpcheck import Recipe as R
import torch, ddpcheck.findings.errors
from ddpcheck import World, assert_parity, check

from .parts import (
    late,
)

broken = R(model=lambda: late.Net(), batch=lambda step: torch.ones(4, 2), loss=lambda model, x: model(x).sum())


def make() -> R:
    from . import other
    from pack.other import KIND

    assert KIND is other.KIND is ddpcheck.Recipe is R
    return broken


def in_a_world(world: World | None = None):
    return check(broken, world_size=world.world_size)


@pytest.mark.ddp
def test_it(ddp_world) -> None:
    assert_parity(broken)


if __name__ == "__main__":
    print(check(broken))
"""


LATE = """\
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.head = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)

    def forward(self, x):
        return self.used(x)
"""


@pytest.mark.parametrize("runs", share([False, True], [False]))
def test_a_package_is_copied_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: bool) -> None:
    package = tmp_path / "pack"
    (package / "parts").mkdir(parents=True)
    files = {
        "__init__.py": "",
        "other.py": "from ddpcheck.recipe.recipe import Recipe as KIND\n",
        "parts/__init__.py": "",
    }
    files |= {"parts/late.py": LATE, "task.py": MIXED, "not_needed.py": ""}
    for name, text in files.items():
        (package / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    script = write_reproduction(small_report(), "pack.task:make", out)
    text = script.read_text()
    assert "ddpcheck.recipe.recipe" in text, "a module of ddpcheck that a copied file imports"
    assert MIXED.partition("\n\n")[2] in text and text.count("from __future__ import annotations\n") == 1
    copies = {path.relative_to(out).as_posix(): path.read_text() for path in out.rglob("*.py")}
    assert sorted(copies) == sorted(["repro_ddp101.py", *(f"pack/{name}" for name in [*files][:4])])
    late = copies["pack/parts/late.py"]
    assert late.endswith(LATE) and "written by ddpcheck" in late.splitlines()[0]
    with pytest.raises(UsageError, match=r"task.py:28 needs ddpcheck itself \(assert_parity\)"):
        imports_from_ddpcheck(package / "task.py", roots=["test_it"])
    shutil.rmtree(package)
    if runs:
        ran = run(script)
        assert ran.codes == [1, 1] and ran.text.count("head.weight: step 0: no gradient") == 2, ran.text
