"""Functions that stand in the place of others (`gather.patching`), and that nothing else puts any there."""

import ast
import signal
import sys
import types
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpcheck.findings.tracebacks import is_own_bug
from ddpcheck.gather.patching import CALLER, ErrorGuard, Patch, patched
from ddpcheck.record.data import constructions
from ddpcheck.record.loop import wrapper_checks

PACKAGE = Path(__file__).parents[2] / "ddpcheck"
ELSEWHERE = {
    "gather/patching.py": "the one place",
    "gather/ddp/sync_batchnorm.py": "is copied into reproductions, which stand alone",
    "worlds/compilation.py": "`worlds` is imported by `gather`",
}


class Base:
    def double(self, number: int) -> int:
        return 2 * number

    @staticmethod
    def fixed() -> str:
        return "fixed"


class Heir(Base):
    pass


def test_a_plain_function_gets_the_arguments_before_the_call() -> None:
    told: list[Any] = []
    with patched(Base, "double", lambda *args, **kwargs: told.append((args[1:], kwargs))):
        assert Base().double(2) + Base().double(number=3) == 10
    assert told == [((2,), {}), ((), {"number": 3})]
    assert Base().double(4) == 8 and len(told) == 2


def test_a_generator_is_sent_the_result() -> None:
    told: list[int] = []

    def around(_own: Base, number: int) -> Generator[None, Any, None]:
        result = yield
        told.append(number + result)

    with patched(Base, "double", around):
        assert Base().double(5) == 10
    assert told == [15]


def test_an_exception_of_the_original_passes_and_closes_the_generator() -> None:
    told: list[str] = []

    def around(*_args: Any) -> Iterator[None]:
        try:
            yield
            told.append("returned")
        finally:
            told.append("over")

    def fails(_original: Any) -> Any:
        raise AssertionError("not called when it is made")

    broken = types.SimpleNamespace(call=lambda: 1 // 0)
    with patched(broken, "call", around), pytest.raises(ZeroDivisionError):
        broken.call()
    assert told == ["over"]
    with pytest.raises(AssertionError):
        Patch(Base, "double", fails)
    assert Base().double(1) == 2


def test_an_error_of_ours_is_taken_and_the_call_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def before(*_args: Any) -> None:
        raise KeyError("ours")

    def after(*_args: Any) -> Iterator[None]:
        yield
        raise KeyError("ours, too")

    with patched(Base, "double", before), pytest.raises(KeyError):
        Base().double(1)
    taken: list[Exception] = []
    monkeypatch.setattr(ErrorGuard, "error_handler", lambda error, _recorder: taken.append(error))
    with patched(Base, "double", before), patched(Base, "double", after):
        assert Base().double(1) == 2
        assert [str(error) for error in taken] == ["'ours'", "'ours, too'"]
        assert Base().double(1) == 2 and len(taken) == 2  # both are off


def test_an_exception_of_a_signal_handler_within_ours_is_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Exception] = []
    monkeypatch.setattr(ErrorGuard, "error_handler", lambda error, _recorder: taken.append(error))
    handlers: dict[str, Any] = {}  # in a file of torch, as its handler of SIGCHLD
    exec(compile("def killed(*_): raise RuntimeError('killed')", torch.__file__, "exec"), handlers)
    before = signal.signal(signal.SIGUSR1, handlers["killed"])
    try:
        with (
            patched(Base, "double", lambda *_: signal.raise_signal(signal.SIGUSR1)),
            pytest.raises(RuntimeError, match="killed") as caught,
        ):
            Base().double(1)
        assert not taken and not is_own_bug(caught.value)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_what_was_inherited_is_inherited_again_and_static_methods_stay_static() -> None:
    with patched(Heir, "double", lambda *_: None), patched(Base, "fixed", lambda: None):
        assert Heir().double(2) == 4 and Base().fixed() == Base.fixed() == "fixed"
    assert "double" not in vars(Heir) and isinstance(vars(Base)["fixed"], staticmethod)


def test_the_caller_is_so_many_frames_away() -> None:
    found: list[str] = []
    with patched(Base, "double", lambda *_: found.append(sys._getframe(CALLER).f_code.co_name)):
        Base().double(1)
    assert found == ["test_the_caller_is_so_many_frames_away"]


def replacements(source: str) -> list[int]:
    """Return the lines that give a module or class of torch another function, in any way but `patching`."""
    nodes = list(ast.walk(ast.parse(source)))
    theirs: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            packages = {alias: getattr(node, "module", None) or alias.name for alias in node.names}
            ours = {alias.asname or alias.name.split(".")[0]: package for alias, package in packages.items()}
            theirs |= {name for name, package in ours.items() if package.split(".")[0] == "torch"}
    lines = []
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and not isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if isinstance(node.value, ast.Name | ast.Attribute) and root(node.value) in theirs:  # another name
                theirs |= {target.id for target in targets if isinstance(target, ast.Name)}
            lines += [node.lineno for target in targets if isinstance(target, ast.Attribute) and root(target) in theirs]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            lines += [node.lineno] if root(node.args[0]) in theirs else []
    return lines


def root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def test_nothing_else_replaces_a_function_of_torch() -> None:
    files = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
    assert ELSEWHERE.keys() <= files.keys()
    found = {name: lines for name, path in files.items() if (lines := replacements(path.read_text()))}
    assert found.keys() - ELSEWHERE.keys() == set(), "use gather.patching"


class Shard:
    data = property(lambda _shard: 0)
    parse = staticmethod(int)


def test_what_stands_in_the_place_of_a_function_is_not_blamed_for_what_that_raises() -> None:
    with Patch(Shard, "parse", constructions._recording_constructor), pytest.raises(ValueError) as of_function:
        Shard.parse("x")
    with Patch(Shard, "data", wrapper_checks._recording_property), pytest.raises(AttributeError) as of_property:
        Shard().data = 1  # which has no setter
    for caught in (of_function, of_property):
        assert [one for one in caught.traceback if PACKAGE in Path(one.path).parents]
        assert not is_own_bug(caught.value)
