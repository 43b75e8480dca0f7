"""The benchmark of the wrapper: what follows from its clocks, and that a quick run works."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

if not sys.platform.startswith("linux"):
    pytest.skip("the benchmark needs Linux", allow_module_level=True)

from benchmarks.wrapper.figures import CPU, WALL, Measured, Record, estimate
from benchmarks.wrapper.table import for_page, for_terminal

ROOT = Path(__file__).parents[1]


def rank(**extra: float) -> dict:
    """Clocks of ten turns that get slower and slower, with each alternative so many per cent above the plain one."""
    plain = [1.0 + turn for turn in range(10)]
    samples = {"plain": [(wall, wall / 2) for wall in plain]}
    for name, more in extra.items():
        samples[name] = [(wall * (1 + more / 100), wall / 2) for wall in plain]
    first = {"plain": [(1.0, 1.0)] * 2, "checked": [(1.5, 1.25), (1.0, 1.0)]}
    own = [(2e-3, 1e-3), (2e-3, 1e-3), (9.0, 9.0)]
    return {"samples": samples, "own": own, "first": [first], "tensors": 10, "weights": 1000}


def measured(**extra: float) -> Measured:
    return Measured("few-1", [rank(**extra), rank(**extra)])


def test_steps_are_compared_within_their_turn() -> None:
    one = measured(checked=0.5, unused=3.0)
    found = one.extra("checked", WALL)
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))
    assert one.extra("checked", CPU).value == pytest.approx(0)
    assert one.extra("mmengine", WALL) is None
    assert (one.step(WALL), one.own(CPU), one.first(WALL)) == pytest.approx((5.5, 1e-3, 25))


def test_the_wall_time_of_a_step_is_that_of_the_slower_rank() -> None:
    one = Measured("few-1", [rank(checked=0.5), rank(checked=2.0)])
    assert one.extra("checked", WALL).value == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("extra", "verdict"),
    [
        ({"checked": 0.5, "unused": 3.0}, "met"),
        ({"checked": 1.5, "unused": 3.0}, "not met"),
        ({"checked": 0.5, "unused": 0.2}, "not met"),
        ({"checked": 0.5}, "met"),
    ],
)
def test_the_aim_is_a_share_of_the_step_and_to_be_below_the_search(extra, verdict) -> None:
    assert measured(**extra).verdict() == verdict


def test_an_interval_that_holds_the_limit_cannot_tell() -> None:
    one = measured(checked=0.5)
    for each in one.ranks:
        each["samples"]["checked"] = [
            (wall * (1 + 0.1 * (turn - 4)), 1.0) for turn, (wall, _) in enumerate(each["samples"]["plain"])
        ]
    assert one.verdict() == "cannot tell"


def test_the_interval_of_a_median_is_the_one_of_order_statistics() -> None:
    found = estimate([float(value) for value in range(1, 21)])
    assert (found.value, found.low, found.high) == (10.5, 6, 15)  # the textbooks' ranks for n = 20
    assert estimate([3.0, 1.0, 2.0]).low == 1


def test_a_saved_run_is_shown_as_it_was(tmp_path: Path) -> None:
    about = {"cores": "2", "system": "Linux", "python": "3.11", "torch": "2.13"}
    record = Record(about, [measured(checked=0.5, unused=3.0), Measured("few-1000", problem="not enough memory here")])
    record.save(tmp_path / "run.json")
    again = Record.load(tmp_path / "run.json")
    assert for_terminal(again) == for_terminal(record)
    assert for_page(again) == for_page(record)
    assert "10 tensors, 1,000 M weights, bfloat16: not enough memory here" in for_page(again)
    assert "+0.5 (+0.5 to +0.5) %" in for_terminal(again)


@pytest.mark.exhaustive
def test_a_quick_run_measures_every_alternative(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.wrapper", "--only", "few-1", "--seconds", "0.1", "--json", "run.json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (one,) = Record.load(tmp_path / "run.json").measurements
    assert {"plain", "checked", "unused", "second"} <= one.ranks[0]["samples"].keys()
    assert one.turns >= 6
    assert one.own(CPU) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
