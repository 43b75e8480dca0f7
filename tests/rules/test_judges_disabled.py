"""Each judge is protected: some test turns red if the judge finds nothing.

Nothing lists which test protects which judge. All tests that need no fixture and start no process run once; that tells
which judges find something in which test. Then each judge is disabled in turn, and the tests in which it finds
something run until one is red.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from unittest import mock

import pytest
from _pytest.mark.structures import ParameterSet

from ddpcheck.findings.report import Finding
from ddpcheck.findings.rules import Severity
from tests.faultsuite.breaking import finding_nothing, judges, seeing
from tests.tiers import share

TESTS = Path(__file__).parents[1]
SUBJECTS = sorted({judge.__module__.split(".")[2] for judge in judges().values()} - {"others"})  # needs files of rules
IN_TEST_ALL = ("evaluation", "parameters", "replicas")
STARTED = pytest.skip.Exception("starts a process")


def modules_of_tests() -> Iterator[ModuleType]:
    """Import the modules of tests/rules, and others that name a judge."""
    for path in sorted(TESTS.rglob("test_*.py")):
        if path != Path(__file__) and (path.parent.name == "rules" or "ddpcheck.rules" in path.read_text("utf-8")):
            yield importlib.import_module(".".join(path.relative_to(TESTS.parent).with_suffix("").parts))


def cases_of(test: FunctionType) -> list[dict[str, object]]:
    """Return the arguments of each case of a test of `make test`; of none that needs a fixture or has another mark."""
    cases: list[dict[str, object]] = [{}]
    for mark in getattr(test, "pytestmark", ()):
        if mark.name != "parametrize":
            return []
        names = [name.strip() for name in mark.args[0].split(",")] if isinstance(mark.args[0], str) else mark.args[0]
        sets = [ParameterSet.extract_from(values, force_tuple=len(names) == 1) for values in mark.args[1]]
        unmarked = [dict(zip(names, each.values, strict=True)) for each in sets if not each.marks]
        cases = [case | arguments for case in cases for arguments in unmarked]
    return cases if cases and cases[0].keys() == inspect.signature(test).parameters.keys() else []


@functools.cache
def candidates() -> list[tuple[str, Callable[[], None]]]:
    """Return the cases of all tests with the source of their module; tests with few cases, which are cheap, first."""
    tests = []
    for module in modules_of_tests():
        source = "" if hasattr(module, "pytestmark") else inspect.getsource(module)
        for name, test in vars(module).items():
            if source and name.startswith("test_") and getattr(test, "__module__", "") == module.__name__:
                tests.append((source, test, cases_of(test)))
    tests.sort(key=lambda entry: len(entry[2]))
    return [(source, functools.partial(test, **case)) for source, test, cases in tests for case in cases]


def is_red(test: Callable[[], None]) -> bool:
    with mock.patch("subprocess.Popen.__init__", side_effect=STARTED), mock.patch("os.fork", side_effect=STARTED):
        try:
            test()
        except (Exception, pytest.fail.Exception):
            return True
    return False


@functools.cache
def judges_in(test: Callable[[], None]) -> frozenset[str]:
    """Return the judges that find something in a test; none if it is red, is skipped or starts a process."""
    with seeing(judges()) as seen:
        try:
            return frozenset() if is_red(test) else frozenset(seen)
        except pytest.skip.Exception:
            return frozenset()


def protects(test: Callable[[], None], judge: FunctionType) -> bool:
    """Return True if a test is red without the judge, and green with it again: nothing is left of the one run."""
    with finding_nothing(judge):
        try:
            red = is_red(test)
        except pytest.skip.Exception:
            return False
    return red and not is_red(test)


def without_protection(names: Iterable[str]) -> list[str]:
    """Return the judges without which every test is green. Tests whose module imports one of theirs run first."""
    open_judges = {name: judges()[name] for name in names}
    modules = {judge.__module__ for judge in open_judges.values()}
    for _, test in sorted(candidates(), key=lambda entry: not any(module in entry[0] for module in modules)):
        for name in judges_in(test) & open_judges.keys():
            if protects(test, open_judges[name]):
                del open_judges[name]
        if not open_judges:
            break
    return sorted(open_judges)


@pytest.mark.slow
@pytest.mark.parametrize("subject", share(SUBJECTS, IN_TEST_ALL, pytest.mark.exhaustive))
def test_some_test_is_red_without_any_one_of_the_judges(subject: str) -> None:
    names = [name for name, judge in judges().items() if judge.__module__.split(".")[2] == subject]
    assert names and without_protection(names) == [], "each needs a fault, a script or a test made by hand"


def test_a_judge_that_no_test_needs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge_found() -> list[Finding]:
        return [Finding("DDP101", ("w",), "Found.", Severity.ERROR)]

    def needs_it() -> None:
        assert judge_found()

    def needs_it_not() -> None:
        judge_found()

    def is_red_anyway() -> None:
        assert not judge_found()

    judge_found.__annotations__["return"] = "list[Finding]"
    monkeypatch.setattr(f"{__name__}.judges", lambda: {"a.judge_found": judge_found})
    for tests, names in [([needs_it_not, is_red_anyway], ["a.judge_found"]), ([needs_it_not, needs_it], [])]:
        monkeypatch.setattr(f"{__name__}.candidates", lambda tests=tests: [("", test) for test in tests])
        assert without_protection(["a.judge_found"]) == names
