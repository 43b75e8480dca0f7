"""From a name to the line that made it, and from a stack to the line of the user."""

import copy
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

import ddpcheck
from ddpcheck.findings import source_lines
from ddpcheck.findings.report import Location
from ddpcheck.findings.source_lines import (
    assignment_of,
    exception_location,
    file_of_module,
    is_user_file,
    last_assignment,
    relative_path,
    user_location,
    variables_of,
)

torch = pytest.importorskip("torch")

from ddpcheck.gather.state.module_description import record_origins  # noqa: E402

nn = torch.nn

HERE = relative_path(__file__)


def this_line() -> int:
    return sys._getframe(1).f_lineno


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first_line = this_line() + 1
        self.encoder = nn.Linear(2, 2)
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(2))


def test_parameters_buffers_and_modules_are_found_at_the_lines_that_made_them() -> None:
    with record_origins() as origins:
        model = Model()
    first = model.first_line
    for name, line in [
        ("encoder", first),
        ("encoder.weight", first),
        ("blocks.1.bias", first + 1),
        ("scale", first + 2),
        ("mean", first + 3),
    ]:
        assert origins.line_by_name(model, name) == Location(HERE, line), name
    before = Model()
    with record_origins() as origins:
        model = nn.Sequential()
        line = this_line() + 1
        model.add_module("late", nn.Linear(1, 1))
        model.layers = nn.ModuleList(copy.deepcopy(before.encoder) for _ in range(2))
    assert origins.line_by_name(model, "late.weight") == Location(HERE, line)
    assert origins.line_by_name(model, "layers.1.weight") == Location(HERE, line + 1)
    assert [origins.line_by_name(*item) for item in ((before, "scale"), (model, "nowhere.at.all"))] == [None, None]
    assert origins.line_by_name(Model(), "scale") is None


def test_whose_file_it_is() -> None:
    package = Path(ddpcheck.__file__).parent
    assert is_user_file(__file__) and is_user_file("train.py")
    assert not is_user_file(torch.__file__) and not is_user_file(os.__file__)
    assert not is_user_file(str(package / "graph.py")) and not is_user_file(str(package / "gather" / "local.py"))
    assert not is_user_file("<string>") and not is_user_file("<frozen importlib._bootstrap>")
    other_library = os.path.join(sysconfig.get_path("purelib"), "timm", "layers.py")
    assert is_user_file(other_library), "a library of models is what the user wants to see"


def test_the_line_of_the_user_is_the_innermost_one() -> None:
    def hook(*_: object) -> None:
        lines.append(user_location(sys._getframe()))

    lines: list[Location | None] = []
    layer = nn.Linear(1, 1)
    layer.register_forward_hook(hook)
    layer(torch.ones(1, 1))
    assert lines == [Location(HERE, hook.__code__.co_firstlineno + 1)]
    assert file_of_module(None) == "" and file_of_module(sys.modules[__name__]) == __file__


def test_paths_are_relative_and_never_lead_upwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert relative_path(str(tmp_path / "below" / "inner" / "model.py")) == "inner/model.py"
    assert relative_path(str(tmp_path / "model.py")) == "model.py"
    assert relative_path(torch.__file__) == "torch/__init__.py"
    (tmp_path / "below").rmdir()  # as a script may do with its own
    assert relative_path(f"{tmp_path}/below/other.py") == "other.py"


def test_an_exception_is_at_the_innermost_line_of_the_user() -> None:
    def loss() -> None:
        nn.Linear(2, 2)(torch.ones(1, 3))

    with pytest.raises(RuntimeError) as caught:
        loss()
    assert exception_location(caught.value) == Location(HERE, loss.__code__.co_firstlineno + 1)
    with pytest.raises(SyntaxError) as syntax:
        compile("def (", "train.py", "exec")
    assert exception_location(syntax.value) == Location("train.py", 1)


def test_an_exception_in_a_framework_is_at_the_line_of_the_program_that_calls_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = tmp_path / "site-packages" / "framework" / "runner.py"
    made: dict[str, Any] = {}
    exec(compile("def run(options):\n    return options['epochs']", str(installed), "exec"), made)
    with pytest.raises(KeyError) as caught:
        made["run"]({})
    assert exception_location(caught.value) == Location("runner.py", 2)
    monkeypatch.setattr(source_lines, "_passes_over_packages", True)
    here = caught.value.__traceback__
    assert here is not None and exception_location(caught.value) == Location(HERE, here.tb_lineno)
    caught.value.__traceback__ = here.tb_next  # of the framework's frame alone, in a thread of it, say
    assert exception_location(caught.value) == Location("runner.py", 2)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first_line = this_line() + 1
        self.prompt = torch.ones(2)
        self.hidden: list[object] = [nn.Linear(2, 2)]
        self.criterion = nn.Identity()


criterion = nn.Linear(2, 2)
LINE_OF_CRITERION = this_line() - 1


def loss_with_a_global() -> object:
    return criterion


def test_where_an_unregistered_tensor_or_a_global_of_the_loss_is_assigned() -> None:
    model = nn.Sequential(Holder())
    first = model[0].first_line
    assert assignment_of(model, "0.prompt") == Location(HERE, first)
    assert assignment_of(model, "0.hidden[0].weight") == Location(HERE, first + 1)
    assert assignment_of(model[0], "hidden[0].weight") == Location(HERE, first + 1)
    assert assignment_of(model, "0.nothing") is None
    where = Location(HERE, LINE_OF_CRITERION)
    assert assignment_of(nn.Sequential(), "criterion.weight", beside=loss_with_a_global) == where
    assert assignment_of(Holder(), "criterion.weight", beside=loss_with_a_global) == where
    assert assignment_of(nn.Sequential(), "elsewhere.weight", beside=loss_with_a_global) is None
    assert assignment_of(nn.Sequential(), "criterion.weight", beside=len) is None


CLASSES = """\
class Info:
    rows: list
    classes: int = 0

def read(rows):
    return Info(rows, classes=len(set(rows)))

def build(classes, width):
    late: int
    return Layer(classes, width)

def main():
    width = 8
    info = read([1, 2])
    return build(info.classes, width)
"""


def test_the_line_that_has_last_assigned_a_variable(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("def f():\n    n = 1\n\ndef g(a):\n    n = 2\n    n, m = 3, 4\n    use(n)\n    n = 5\nk = 6\n")
    at = Location(str(file), 7)
    assert [getattr(last_assignment(at, name), "line", None) for name in "nmka"] == [6, 6, None, None]
    assert last_assignment(Location(str(file), 9), "k") == Location(str(file), 9)
    file = tmp_path / "classes.py"
    file.write_text(CLASSES)
    at = Location(str(file), 10)
    names = ("classes", "info.classes", "width", "rows", "late")
    assert [getattr(last_assignment(at, name), "line", None) for name in names] == [6, 6, 13, None, None]


def test_to_ask_for_variables_in_a_profile_function_leaves_them_as_they_are() -> None:
    def added() -> int:
        first, second = 1, 2
        sys.setprofile(lambda frame, _event, _function: variables_of(frame) and None)
        try:
            length = len((first, second))
        finally:
            sys.setprofile(None)
        return first + second + length

    assert added() == 5
