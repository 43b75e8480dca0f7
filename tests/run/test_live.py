"""`ddpcheck live`: what ranks do while `ddpcheck run` goes on, and what was found so far."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ddpcheck import cli
from ddpcheck.stream.entries import RankStarted
from ddpcheck.stream.rank_log import FOLDER, SCRIPT, RankLog
from tests.run.scripts import BEGIN
from tests.run.test_run import DDPCHECK, ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")

PROGRAM = f"""{BEGIN}
mode, marker = sys.argv[1:]
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
torch.manual_seed(RANK)
for step in range(100_000):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    if step == 20 and RANK == 1:
        open(marker, "w").close()
        while mode == "works":
            pass
        if mode == "waits":
            dist.recv(torch.zeros(1), 0)
        if mode == "writes":
            model.module.weight.data += 1
    if step > 20:
        time.sleep(0.05)
"""


@contextmanager
def running(tmp_path: Path, mode: str) -> Iterator[Path]:
    """The folder of a run that has made twenty steps."""
    script, marker = tmp_path / "train.py", tmp_path / "there"
    script.write_text(PROGRAM)
    command = [*DDPCHECK, "--check-timeout=600", "--standalone", "--nproc-per-node=2", script.name, mode, str(marker)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-m", *command], env=environment, stderr=subprocess.DEVNULL, cwd=tmp_path
    ) as process:
        try:
            deadline = time.monotonic() + 120
            while not marker.exists():
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            time.sleep(2.0)
            (folder,) = tmp_path.glob(f"{FOLDER}*")
            yield folder
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


AT = r"at train.py:\d+"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "code", "script", "faults"),
    [
        ("works", 0, f"rank 0 waits in backward {AT}, after 21 steps; rank 1 is {AT}, after", []),
        ("waits", 4, f"rank 0 waits in backward {AT}, .*; rank 1 waits in recv {AT}", ["DDP402"]),
        ("writes", 1, rf"it is still running: rank(s 0 and 1 were| 0 was) {AT}, and made progress", ["DDP306"]),
    ],
)
def test_what_ranks_do_and_what_was_found_is_told_while_they_go_on(
    mode: str, code: int, script: str, faults: list[str], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with running(tmp_path, mode) as folder:
        assert cli.main(["live", str(folder)]) == code
        out = capsys.readouterr().out
        assert re.search(script, " ".join(out.split())), out
        assert re.findall(r"^(DDP\d+)", out, re.MULTILINE) == faults, out
        assert cli.main(["live", "--format", "json", str(folder)]) == code  # the run is as it was
    assert not folder.exists()


@pytest.mark.slow
def test_the_run_that_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def said(*arguments: str) -> str:
        assert cli.main(["live", *arguments]) == 2
        return capsys.readouterr().err

    assert f"({tmp_path}/{FOLDER}*)" in said() and "no active `ddpcheck run` of user " in said()
    assert f"{tmp_path} is not the folder of an active `ddpcheck run`" in said(str(tmp_path))
    for name in ("a", "b"):
        folder = tmp_path / f"{FOLDER}{name}"
        folder.mkdir()
        (folder / SCRIPT).write_text(f"{name}.py --epochs 3")
        assert f"no live rank has a log in {folder}" in said(str(folder))
        RankLog(folder, RankStarted(0, 2, "gloo"))
    assert f"2 active runs; name the folder of one: {tmp_path}/{FOLDER}a (a.py --epochs 3); " in said()
