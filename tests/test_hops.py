"""What `python -m tests.hops` counts: files that are entered, and the chain of calls in which a finding is made."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddpcheck.findings.evidence.steps import SharedDraw
from ddpcheck.findings.report import Location
from ddpcheck.rules.data.ddp510_shared_augmentation_seed import judge_draws
from tests.hops import ENDS, FOLDER, OWN, follow


def test_the_chain_of_calls_in_which_a_finding_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv(ENDS, "DDP510")
    draw = SharedDraw("bernoulli_", "drop", Location("model.py", 4), 17)
    before = sys.getprofile()
    follow("reports")
    try:
        findings = judge_draws([[draw], [draw]])
    finally:
        assert sys.getprofile() is None
        sys.setprofile(before)
    (written,) = tmp_path.iterdir()
    lines = written.read_text(encoding="utf-8").splitlines()
    assert findings and f"end {OWN}rules/data/ddp510_shared_augmentation_seed.py {OWN}findings/wording.py" in lines
    assert f"file {OWN}findings/wording.py" in lines
