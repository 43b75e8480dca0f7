"""The README and the documentation show what ddpcheck prints today; `test_examples.py` holds reports to that, too."""

import pytest

from tests.readme import README, ROOT, Block, blocks, comparable, excerpt, output_of
from tests.tiers import one_of

EXAMPLES = ("examples/digits/", "examples/language_model/")  # whose reports `test_examples.py` compares
OTHERS = [
    block for block in blocks() if block.kind not in ("report", "findings") or not block.target.startswith(EXAMPLES)
]


@pytest.mark.slow
@pytest.mark.parametrize("block", one_of(6, OTHERS), ids=lambda block: f"{block.kind} {block.target}")
def test_a_page_shows_the_output_of_today(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpcheck.extras.matrix.check_matrix._SECONDS_A_ROW", 0.05)  # step times are not compared
    text = excerpt(block.kind, block.target, output_of(block.kind, block.target))
    assert comparable(text) == comparable(block.text), "run python -m tests.readme"


def test_every_broken_example_is_shown() -> None:
    examples = {
        path.relative_to(ROOT).as_posix()
        for folder in EXAMPLES
        for path in (ROOT / folder).glob("*.py")
        if not path.stem.endswith("_training") and path.stem != "healthy"
    }
    assert examples <= {block.target for block in blocks()}


def test_the_readme_is_read_in_two_minutes() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 115
    assert "make report " in text and "make test " in text


def test_the_readme_says_what_a_clean_run_covers_and_what_fails() -> None:
    part = README.read_text(encoding="utf-8").partition("\n## ")[0]
    assert "--check-fail-on warning" in part
    assert "docs/run-reference.md#what-it-checks" in part and "docs/run-reference.md#what-it-does-not-see" in part


def test_the_readme_says_on_what_ddpcheck_has_not_run() -> None:
    assert "none of it has run on a GPU" in " ".join(README.read_text(encoding="utf-8").split())
