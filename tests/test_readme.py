"""The README shows what ddpcheck prints today; its reports without a matrix are held to that by `test_examples.py`."""

import pytest

from tests.readme import ROOT, blocks, comparable, shown

MATRICES = [block for block in blocks() if block[0] == "matrix"]
# Examples that have tests and pages of their own.
ELSEWHERE = (
    "pytest",
    "training_loop",
    "transformers",
    "accelerate",
    "lightning",
    "mmengine",
    "scripts",
)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "target", "text"), MATRICES, ids=[target for _, target, _ in MATRICES])
def test_the_readme_shows_the_matrix_of_today(
    kind: str, target: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpcheck.report.matrix.check_matrix._SECONDS_A_ROW", 0.05)  # step times are not compared
    assert comparable(shown(kind, target)) == comparable(text)


def test_every_broken_example_is_shown() -> None:
    examples = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "examples").glob("*/*.py")
        if not path.stem.endswith("_training") and path.stem != "healthy" and path.parent.name not in ELSEWHERE
    }
    assert examples == {target for _, target, _ in blocks()} - {"examples/digits/healthy.py"}
