"""The README and the documentation show what ddpcheck prints today; `test_examples.py` holds reports to that, too."""

import pytest

from tests.readme import ROOT, Block, blocks, comparable, excerpt, output_of
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
