"""`ddpcheck graph` on real ranks: the drawing of a recipe, and its refusals."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpcheck import cli
from ddpcheck.extras.graph import trace_graph as trace_graph
from ddpcheck.extras.graph.drawing_data import COLOURS
from ddpcheck.findings.rules import RULES
from tests.dotsource import Dot, parse
from tests.faultsuite.cases import FAULTS, ROOT

ZOO = ROOT / "tests" / "zoo"
HEAD = """
import torch
from torch import nn
def batch(step):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
def model():
    return Net()
def loss(model, batch):
    return model(batch).square().mean()
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def broken(name: str) -> str:
    return f"{FAULTS / name}.py:broken"


def source_of(target: Path | str, *options: str, code: int = 0, steps: int = 2) -> str:
    command = ["graph", str(target), "--steps", str(steps), "--timeout", "60", "-o", "graph.dot", *options]
    assert cli.main(command) == code
    return Path("graph.dot").read_text(encoding="utf-8") if code == 0 else ""


def draw(target: Path | str, steps: int = 2) -> Dot:
    return parse(source_of(target, steps=steps))


def recipe(text: str) -> str:
    Path("net.py").write_text(HEAD + text, encoding="utf-8")
    return "net.py"


def around(dot: Dot, node: str) -> tuple[str, str]:
    """Return the texts before a node and after it: labels, with those of the clusters around them."""

    def labels(names: list[str]) -> str:
        return "\n\n".join("\n".join([dot.nodes[name]["label"], *dot.clusters_of(name)]) for name in names)

    return labels([s for s, t, _ in dot.edges if t == node]), labels([t for s, t, _ in dot.edges if s == node])


def slow(*row: object) -> Any:
    return pytest.param(*row, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("target", "code", "words", "cut"),
    [
        ("detach", "DDP103", "encoder.weight", ("detach()\nat detach.py:30", "anh", "head")),
        ("unused_on_one_rank", "DDP104", "not on rank 1", ()),
        slow("item", "DDP103", "log_temperature", ("item(), which leaves torch\nat item.py:30", "exp", None)),
    ],
    ids=str,
)
def test_each_cause_is_drawn_with_its_cut(target: str, code: str, words: str, cut: tuple[str, str, str | None]) -> None:
    dot = draw(broken(f"parameters/{target}"))
    assert code in dot.title
    marked = [node for node in dot.nodes.values() if node["label"].startswith(RULES[code].name)]
    assert marked and {node["fillcolor"] for node in marked} == {COLOURS[code]}
    assert any(words in node["label"] for node in marked)
    if cut:
        label, source, reader = cut
        before, after = around(dot, dot.node(label))
        assert source in before and (after == "" if reader is None else after and reader in after), (before, after)


def test_a_healthy_recipe_is_drawn_without_a_mark(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no findings" in draw(ZOO / "healthy" / "reused_layer.py").title
    message = r"ddpcheck: \d+ modules drawn, no anomalous parameters, written to graph.dot\n"
    assert re.fullmatch(message, capsys.readouterr().err)


LAZY = """
model = lambda: nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
"""
STACK = """
class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)
        if number == 10:
            self.idle = nn.Linear(4, 4)
    def forward(self, x):
        return x + 1e-3 * self.linear(self.norm(x)).relu()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block(number) for number in range(20)))
    def forward(self, x):
        return self.blocks(x)
"""


def test_a_lazy_module_is_drawn_to_standard_output_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["graph", recipe(LAZY), "--steps", "1"]) == 0
    dot = parse(capsys.readouterr().out)
    assert "DDP110" in dot.title and dot.node("0.weight")


def test_a_stack_of_layers_is_folded_around_the_layer_with_a_finding() -> None:
    dot = draw(recipe(STACK), steps=1)
    titles = [label.split("  ")[0] for label in dot.clusters.values()]
    assert titles == ["model", "blocks", "0 \u2026 9", "10", "idle", "11 \u2026 19"]
    assert "10 \u00d7 Block" in dot.clusters[list(dot.clusters)[2]]
    assert dot.clusters_of(dot.node("blocks.10.idle.weight"))[-1].startswith("idle")


@pytest.mark.parametrize(
    ("name", "code", "sentence"),
    [
        slow("sleeps_on_one_rank", 4, "did not finish within 2 s"),
        ("raises_everywhere", 3, "raised"),
    ],
)
def test_a_target_that_fails(name: str, code: int, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.dot").write_text("mine", encoding="utf-8")
    for file in ("mine.dot", "x.dot")[: 2 if code == 3 else 1]:
        timeout = "2" if code == 4 else "20"
        assert cli.main(["graph", broken(f"running/{name}"), "-o", file, "--timeout", timeout]) == code
        assert sentence in capsys.readouterr().err.splitlines()[0]
    assert Path("mine.dot").read_text(encoding="utf-8") == "mine" and not Path("x.dot").exists()


PACKAGE = "`ddpcheck graph` needs {}, which is not installed: install its extra `graph` ("
NO_DOT = "SVG needs the `dot` executable of Graphviz, which is not on the PATH; install it ("


@pytest.mark.parametrize(
    ("options", "missing", "sentence"),
    [
        (["-o", "x.pdf"], "", "cannot tell a picture's format from the name 'x.pdf': use .dot, .svg or .png\n"),
        (["-o", "nowhere/x.dot"], "", "cannot write nowhere/x.dot: No such file or directory\n"),
        (
            *(["-o", "x.dot", "--world-size", "none"], ""),
            "--world-size: expected a whole number of at least 1, got 'none'\n",
        ),
        (["-o", "x.svg"], "dot", NO_DOT),
        ([], "graphviz", PACKAGE.format("graphviz")),
        (["--view", "autograd"], "torchviz", PACKAGE.format("torchviz")),
    ],
)
def test_wrong_usage_is_refused_before_the_check(
    options: list[str], missing: str, sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_graph, "check", None)  # calling it fails
    if missing == "dot":
        monkeypatch.setenv("PATH", "")
    elif missing:
        monkeypatch.setitem(sys.modules, missing, None)
    assert cli.main(["graph", broken("parameters/unused"), *options]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"ddpcheck: error: {sentence}") and message.count("\n") == 1
    assert ("-o graph.dot" in message) is (missing == "dot") and not Path("x.dot").exists()


@pytest.mark.slow
def test_the_picture_of_the_documentation_is_up_to_date(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    (target,) = re.findall(r"^PICTURE .*:= (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    drawn = tmp_path / "graph.dot"
    assert cli.main(["graph", target, "--steps", "1", "--timeout", "60", "-o", str(drawn)]) == 0
    committed = ROOT / "docs" / "graph.dot"
    assert drawn.read_text(encoding="utf-8") == committed.read_text(encoding="utf-8"), "run `make pictures`"
    assert (ROOT / "docs" / "graph.svg").exists()


# The autograd graph, by torchviz


def autograd_source(target: str, code: int = 0) -> str:
    pytest.importorskip("torchviz")
    return source_of(target, "--view", "autograd", code=code, steps=1)


def test_the_autograd_graph_has_findings_ends_and_what_is_not_in_it() -> None:
    source = autograd_source(broken("parameters/detach"))
    assert "DDP103 detached-parameter" in source and "detach()\nat detach.py:30" in source
    (weight,) = re.findall(r'(n\d+) \[label="encoder\.weight\n[^"]*DDP103', source)
    assert f"{weight} -> stop0" in source and not re.search(rf"{weight} -> n\d", source)
    source = autograd_source(broken("parameters/unused"))
    (unused,) = re.findall(r'(n\d+|"?[\w.]+"?) \[label="old_head\.weight\n[^"]*DDP101', source)
    assert not re.search(rf"(^|\s){re.escape(unused)} ->", source, re.MULTILINE)
