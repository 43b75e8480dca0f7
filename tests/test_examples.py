"""Every example is run by the command line as the pages say, and gets the verdict that its docstring promises.

Where a page shows its report, that is the report of today.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.readme import blocks, comparable, excerpt, printed
from tests.tiers import needs, share

pytestmark = needs("sklearn")  # which holds the data of the examples

ROOT = Path(__file__).parents[1]
EXAMPLES = {
    # example: exit code, code of the first finding, what its lines must name
    "digits/healthy.py": (0, None, ["SyncBatchNorm refuses CPU tensors"]),
    "digits/unused_head.py": (1, "DDP101", ["old_head.weight, old_head.bias", "examples/digits/unused_head.py:18"]),
    "digits/auxiliary_not_in_loss.py": (1, "DDP102", ["auxiliary.weight, auxiliary.bias"]),
    "digits/detached_features.py": (1, "DDP103", ["features.0.weight", "detach()", "detached_features.py:17"]),
    "digits/rank_dependent_head.py": (1, "DDP104", ["confidence.weight, confidence.bias", "on rank 1"]),
    "digits/summed_loss.py": (1, "DDP305", ["1/2"]),
    "digits/unsynchronised_batchnorm.py": (0, "DDP304", ["features.1", "warning"]),
    "language_model/healthy.py": (0, None, []),
    "language_model/frozen_by_no_grad.py": (1, "DDP103", ["position.weight", "no_grad()"]),
    "language_model/idle_expert.py": (1, "DDP101", ["blocks.1.feed_forward.experts.2"]),
    "language_model/late_adapter.py": (1, "DDP105", ["adapter.weight, adapter.bias", "step 0"]),
    "language_model/layers_in_a_list.py": (1, "DDP106", ["blocks"]),
    "language_model/token_count_fixed.py": (0, None, []),
    "language_model/token_count_loss.py": (1, "DDP305", ["count"]),
}
# Examples that have tests and pages of their own.
ELSEWHERE = (
    *("many_ranks/", "parity/", "pytest/", "rules/", "training_loop/", "scripts/"),
    *("transformers/", "accelerate/", "lightning/", "mmengine/"),
)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for variable in [*filter(lambda name: name.startswith("DDPCHECK_"), os.environ), "FORCE_COLOR"]:
        monkeypatch.delenv(variable, raising=False)


def findings_in(out: str) -> list[str]:
    return re.findall(r"^(DDP\d{3}) [a-z-]+ ", out, flags=re.MULTILINE)


def test_every_example_is_expected_here() -> None:
    there = {path.relative_to(ROOT / "examples").as_posix() for path in (ROOT / "examples").glob("*/*.py")}
    there = {name for name in there if not name.startswith(ELSEWHERE)}
    assert {name for name in there if not name.endswith("_training.py")} == set(EXAMPLES)


@pytest.mark.parametrize("name", share(EXAMPLES, ["digits/unused_head.py"]))
def test_an_example_gets_the_verdict_that_it_promises(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, finding, words = EXAMPLES[name]
    target = f"examples/{name}"
    ended, out = printed(target)
    assert ended == code and capsys.readouterr() == ("", "")
    assert findings_in(out)[:1] == ([finding] if finding else [])
    assert not [word for word in words if word not in " ".join(out.split())], out
    promised = re.findall(r"DDP\d{3}", (ROOT / "examples" / name).read_text(encoding="utf-8").split('"""')[1])
    assert promised[:1] == ([finding] if finding else [])
    for kind, shown, text in blocks():
        if shown == target and kind in ("report", "findings"):
            assert comparable(excerpt(kind, target, out)) == comparable(text), "run python -m tests.readme"


@pytest.mark.slow
def test_an_example_runs_as_the_readme_spells_it() -> None:
    command = [sys.executable, "-m", "ddpcheck", "report", "examples/digits/unused_head.py", "--timeout", "60"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert (done.returncode, done.stderr) == (1, "")
    assert findings_in(done.stdout) == ["DDP101"] and "[31m" not in done.stdout
