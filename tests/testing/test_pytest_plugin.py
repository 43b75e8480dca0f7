"""The plugin in a real inner pytest, alone and under xdist."""

import itertools
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

import ddpcheck.report.checking.check  # noqa: E402, F401
import tests.innerhere  # noqa: E402, F401 - imports what an inner pytest in this process has to share with us
from ddpcheck.findings.errors import UsageError  # noqa: E402
from ddpcheck.findings.report import Report  # noqa: E402
from ddpcheck.render.page.page import data_in  # noqa: E402
from ddpcheck.testing.outcome import file_name, keep_report  # noqa: E402
from ddpcheck.worlds.rank_setup import NO_PRELOAD  # noqa: E402
from tests.innerpytest import PLUGINS, ROOT  # noqa: E402
from tests.tiers import share  # noqa: E402

psutil = pytest.importorskip("psutil", reason="psutil is not installed")
XDIST = ("-n", "2")


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Run an inner pytest, which forks its ranks from our servers."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(source: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(source)
        if "-n" in arguments:  # for the servers of its workers
            monkeypatch.setenv(NO_PRELOAD, "1")
        return pytester.runpytest_inprocess(*PLUGINS, *arguments)

    return run


@pytest.mark.parametrize("workers", share([(), XDIST], [()]), ids=["alone", "xdist"])
def test_tests_run_on_real_ranks_and_leave_no_process(inner, pytester, workers) -> None:
    done = inner(
        """
        import os, pathlib
        import pytest
        from ddpcheck import RankError

        def rank_and_sum(start):
            import torch, torch.distributed as dist
            total = torch.tensor([start + dist.get_rank()])
            dist.all_reduce(total)
            return dist.get_rank(), dist.get_world_size(), int(total), os.getpid()

        def test_two_ranks(ddp_world):
            results = ddp_world.run(rank_and_sum, 10)
            assert [result[:3] for result in results] == [(0, 2, 21), (1, 2, 21)]
            assert os.getpid() not in {result[3] for result in results}
            pathlib.Path("pids").write_text(" ".join(str(result[3]) for result in results))

        def test_a_world_is_fresh_after_one_that_failed_and_another_size_is_beside_it(ddp_world):
            with pytest.raises(RankError):
                ddp_world.run(lambda: 1 / 0)
            assert ddp_world(world_size=3).run(lambda: 1) == [1, 1, 1]
            assert ddp_world.run(lambda: 1) == [1, 1] and ddp_world.world_size == 2

        def broken():
            import torch.distributed as dist
            print("printed by rank", dist.get_rank())
            assert dist.get_rank() != 1, "only here"

        def test_broken(ddp_world):
            ddp_world.run(broken)
        """,
        *workers,
    )
    done.assert_outcomes(passed=2, failed=1)
    done.stdout.fnmatch_lines(["*only here*", "*Captured stdout of rank 1 of 2*", "*printed by rank 1*"])
    pids = [int(pid) for pid in (pytester.path / "pids").read_text().split()]
    assert len(pids) == 2 and not any(psutil.pid_exists(pid) for pid in pids)


STUB = """
import sys, types
from ddpcheck.findings.report import Finding, Report
from ddpcheck.findings.rules import Severity

def check(target, **options):
    severity = Severity(target)
    return Report(f"{target} {options['world_size']}", findings=(Finding("DDP101", ("[red]x",), "No.", severity),))

sys.modules["ddpcheck.report.checking.check"] = types.SimpleNamespace(check=check)
"""


def test_a_check_fails_the_test_with_the_report(
    inner, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "1")  # where pytest cuts off no line
    pytester.makeconftest(STUB)
    done = inner(
        """
        def test_error(ddp_world):
            ddp_world(world_size=4).check("error")

        def test_warning(ddp_world):
            assert ddp_world.check("warning", world_size=3).target == "warning 3"
        """,
        "--ddp-report=pages",
    )
    (page,) = pytester.path.joinpath("pages").iterdir()
    assert page.name.endswith(".py.test_error.html") and "[red]x" in page.read_text(encoding="utf-8")
    report = Report.from_json(str(data_in(page.read_text(encoding="utf-8"))))
    assert [finding.code for finding in report.findings] == ["DDP101"]
    done.stdout.no_fnmatch_line("*leases.py*")
    done.assert_outcomes(passed=1, failed=1)
    lines = ["DDP101 unused-parameter *red]x: No.", "", "ddpcheck report on error 4", "DDP101 unused-parameter  error"]
    done.stdout.fnmatch_lines([*lines, "*red]x*", "1 finding *", "as a page: pages/*"])
    done.stdout.fnmatch_lines(["FAILED *::test_error - *DDP101 unused-parameter *red]x: No."])


def test_files_of_reports_have_the_names_of_tests(tmp_path) -> None:
    assert file_name("tests/test_a.py::TestB::test_c[2-x]") == "tests.test_a.py.TestB.test_c[2-x]"
    odd = {file_name(f"a.py::test[{name}]") for name in ("x y", "x-y", "x?y", "x/y", "x.y", "x\0y", "x" * 999)}
    assert len(odd) == 7 and all(len(name) < 200 and "?" not in name for name in odd)
    folder, report, numbers = tmp_path / "new", Report("net.py"), itertools.count(1)
    kept = [keep_report(str(folder), "a.py::test", numbers, report) for _ in range(2)]
    assert [path.name for path in kept if path is not None] == ["a.py.test.html", "a.py.test-2.html"]
    assert keep_report(None, "a.py::test", numbers, report) is None
    with pytest.raises(UsageError, match="cannot write"):
        keep_report(str(folder / "a.py.test.html"), "b", numbers, report)


@pytest.mark.parametrize(("arguments", "ini", "size"), [(("--ddp-world-size=3",), "2", 3), ((), "2", 2), ((), "", 1)])
def test_flag_over_ini_over_environment(inner, pytester, monkeypatch, arguments, ini, size) -> None:
    pytester.makeini(f"[pytest]\nddp_world_size = {ini}")
    pytester.path.joinpath("pyproject.toml").write_text("[tool.ddpcheck]\nworld-size = 4\n")
    monkeypatch.setenv("DDPCHECK_WORLD_SIZE", "1")
    done = inner(f"def test_size(ddp_world): assert ddp_world.world_size == {size}", *arguments)
    done.assert_outcomes(passed=1)


def test_a_stray_variable_stops_no_test_and_is_warned_of_once(inner, monkeypatch) -> None:
    monkeypatch.setenv("DDPCHECK_WORLDSIZE", "1")
    monkeypatch.setenv("DDPCHECK_LICENCE", "none")
    done = inner("def test_a(ddp_world): pass\ndef test_b(ddp_world): pass", "-q", "-W", "error")
    done.assert_outcomes(passed=2)
    told = [line for line in done.outlines if line.startswith("ddpcheck: warning:")]
    assert len(told) == 1 and "DDPCHECK_WORLDSIZE is ignored" in told[0] and "'DDPCHECK_WORLD_SIZE'" in told[0]


def test_a_wrong_option_is_told_by_its_name_and_only_to_tests_that_use_the_fixture(inner) -> None:
    done = inner("def test_a(ddp_world): pass\ndef test_b(): pass", "--ddp-timeout=never")
    done.assert_outcomes(passed=1, errors=1)
    done.stdout.fnmatch_lines(["*--ddp-timeout: expected a number of seconds greater than 0, got 'never'*"])


def test_trace_is_refused_in_a_sentence(inner) -> None:
    done = inner("import pytest\n@pytest.mark.ddp\ndef test_it(): pass", "--trace")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["--trace stops in pytest's own process, and test_it runs on ranks; put breakpoint() *"])


@pytest.mark.skipif(
    "ddpcheck" not in {each.name for each in entry_points(group="pytest11")}, reason="ddpcheck is not installed"
)
@pytest.mark.parametrize("option", ["no:ddpcheck", "no:ddpcheck.pytest_plugin", "ddpcheck.pytest_plugin"])
def test_the_plugin_is_named_ddpcheck_and_loaded_once(option: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-p", option, "-p", "no:cacheprovider", "--fixtures", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert "Error" not in done.stderr, done.stderr
    assert ("ddp_world" in done.stdout) is not option.startswith("no:")
