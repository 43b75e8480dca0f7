"""The README shows what ddpcheck prints today."""

import pytest

from tests.readme import ROOT, blocks, comparable, shown


@pytest.mark.parametrize(("kind", "target", "text"), blocks(), ids=[f"{kind} {target}" for kind, target, _ in blocks()])
def test_the_readme_shows_the_report_of_today(
    kind: str, target: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpcheck.sweep._SECONDS_A_ROW", 0.05)  # step times are not compared
    assert comparable(shown(kind, target)) == comparable(text)


def test_every_broken_example_is_shown() -> None:
    examples = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "examples").glob("*/*.py")
        if not path.stem.endswith("_training") and path.stem != "healthy"
    }
    assert examples == {target for _, target, _ in blocks()} - {"examples/digits/healthy.py"}
