"""`ddpcheck graph` on real ranks: what is drawn of a recipe, and what is said where it cannot be."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpcheck import cli
from ddpcheck.extras.calls import MODULES
from ddpcheck.extras.graph import trace_graph as trace_graph
from ddpcheck.extras.graph.drawing_data import COLOURS
from ddpcheck.findings.report import Report
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
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def reports() -> dict[object, Report]:
    return {}


@pytest.fixture
def checked_once(reports: dict[object, Report], monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe that is drawn twice is checked once; what is drawn is made of fresh ranks all the same."""
    check = trace_graph.check

    def remembering(target: str, **options: Any) -> Report:
        key = (target, options["steps"])
        if key not in reports:
            reports[key] = check(target, **options)
        return reports[key]

    monkeypatch.setattr(trace_graph, "check", remembering)


def broken(name: str) -> str:
    return f"{FAULTS / name}.py:broken"


def draw(target: Path | str, *options: str) -> Dot:
    assert cli.main(["graph", str(target), "--steps", "2", "--timeout", "60", "-o", "graph.dot", *options]) == 0
    return parse(Path("graph.dot").read_text(encoding="utf-8"))


def recipe(text: str) -> str:
    Path("net.py").write_text(HEAD + text, encoding="utf-8")
    return "net.py"


@pytest.mark.usefixtures("checked_once")
@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("unused", "DDP101", "old_head.weight"),
        pytest.param("output_not_in_loss", "DDP102", "auxiliary.weight", marks=pytest.mark.slow),
        ("detach", "DDP103", "encoder.weight"),
        ("unused_on_one_rank", "DDP104", "not on rank 1"),
        pytest.param("alternating_heads", "DDP105", "heads.1.weight", marks=pytest.mark.slow),
        ("raw_tensor", "DDP106", "prompt"),
        pytest.param("times_zero", "DDP107", "extra.weight", marks=pytest.mark.slow),
        ("custom_function_none", "DDP108", "scale"),
    ],
)
def test_each_cause_is_drawn_in_its_colour(name: str, code: str, words: str) -> None:
    dot = draw(broken(f"parameters/{name}"))
    assert code in dot.title
    marked = [node for node in dot.nodes.values() if node["label"].startswith(RULES[code].name)]
    assert marked and {node["fillcolor"] for node in marked} == {COLOURS[code]}
    assert any(words in node["label"] for node in marked)


@pytest.mark.usefixtures("checked_once")
@pytest.mark.parametrize(
    ("target", "said", "before", "after"),
    [
        (broken("parameters/detach"), "detach()\nat detach.py:30", "anh", "head"),
        pytest.param(
            *(broken("parameters/data_attribute"), ".data\nat data_attribute.py:30", "anh", "head"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(ZOO / "broken" / "detached_parameter.py", "detach()\nat detached_parameter.py:19", "encoder.weight", ""),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(broken("parameters/argmax"), "argmax(), which is not differentiable\nat argmax.py:31", "gate", ""),
            marks=pytest.mark.slow,
        ),
        (broken("parameters/item"), "item(), which leaves torch\nat item.py:30", "xp", None),
        pytest.param(
            broken("parameters/output_not_in_loss"),
            "linear()\nat output_not_in_loss.py:29\ndoes not reach the loss",
            "auxiliary",
            None,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["detach", "data", "detached parameter", "argmax", "item", "output not in loss"],
)
def test_a_cut_stands_between_what_was_computed_and_what_would_have_gone_on(
    target: Path | str, said: str, before: str, after: str | None
) -> None:
    dot = draw(target)
    into, out = around(dot, dot.node(said))
    assert any(before in text for text in into), into
    assert (out == []) if after is None else any(after in text for text in out), out


def around(dot: Dot, node: str) -> tuple[list[str], list[str]]:
    """What is before a node and what is after it: labels, with those of the clusters around them."""

    def told(name: str) -> str:
        return "\n".join([dot.nodes[name]["label"], *dot.clusters_of(name)])

    into = [told(source) for source, target, _ in dot.edges if target == node]
    return into, [told(target) for source, target, _ in dot.edges if source == node]


@pytest.mark.slow
@pytest.mark.usefixtures("checked_once")
def test_each_layer_that_a_region_cuts_off_has_its_own_end() -> None:
    dot = draw(broken("parameters/frozen_by_no_grad"))
    ends = [name for name, node in dot.nodes.items() if "torch.no_grad()\nat frozen_by_no_grad.py:30" in node["label"]]
    layers = [dot.clusters_of(end)[-1].split("  ")[0] for end in ends]
    assert sorted(layers) == ["0", "2"]
    for end, layer in zip(ends, layers, strict=True):
        into, out = around(dot, end)
        assert any(f"\n{layer}  Linear" in text for text in into), into
        assert any(("1\nTanh" if layer == "0" else "head") in text for text in out), out


@pytest.mark.slow
def test_the_same_recipe_gives_the_same_file() -> None:
    for target in ("broken/two_causes.py", "healthy/transformer_tied_dropout.py"):
        draw(ZOO / target, "--steps", "1")
        first = Path("graph.dot").read_bytes()
        draw(ZOO / target, "--steps", "1")
        assert Path("graph.dot").read_bytes() == first


def test_a_healthy_recipe_is_drawn_without_a_mark(capsys: pytest.CaptureFixture[str]) -> None:
    dot = draw(ZOO / "healthy" / "reused_layer.py")
    assert "no findings" in dot.title
    assert re.fullmatch(
        r"ddpcheck: \d+ modules drawn, no anomalous parameters, written to graph.dot\n", capsys.readouterr().err
    )


def test_a_lazy_module_is_drawn_with_the_shapes_of_its_first_forward() -> None:
    Path("lazy.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def model():\n    return nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))\n\n"
        "def batch(step):\n    return torch.randn(8, 4)\n\n"
        "def loss(model, batch):\n    return model(batch).mean()\n"
    )
    dot = draw(Path("lazy.py"))
    assert "DDP110" in dot.title and "0.weight" in str(dot)


@pytest.mark.slow
def test_several_losses_are_drawn_by_name_and_with_what_is_unused_under_find_unused() -> None:
    dot = draw(
        recipe(
            """
ddp_kwargs = {"find_unused_parameters": True}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(4))
    def forward(self, x):
        x = self.body(x).relu()
        return self.a(x), self.b(x)
def loss(model, batch):
    a, b = model(batch)
    return {"first<1>": a.square().mean(), "second": b.abs().mean(), "logged": a.detach().mean()}
"""
        )
    )
    octagons = [node["label"] for node in dot.nodes.values() if node.get("shape") == "doubleoctagon"]
    assert octagons == ["loss['first<1>']", "loss['second']"]
    assert dot.node("unused-parameter\nc.weight  4\u00d74\nc.bias  4")


DEEP = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.body, self.idle = (nn.Parameter(torch.ones(4)) for _ in range(3))
    def forward(self, x):
        y = x * self.gate
        for _ in range({before}):
            y = y * self.gate
        y = y.detach()
        for _ in range({after}):
            y = y * self.body
        return y * self.body
def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=1e-9)
def loss(model, batch):
    return model(batch).square().mean()
"""


@pytest.mark.slow
def test_a_graph_beyond_the_recursion_limit_is_drawn() -> None:
    dot = draw(recipe(DEEP.format(before=1100, after=20)), "--steps", "1")
    assert len(dot.nodes) < 12
    assert dot.joined("mul \u00d71101", "detach()")
    assert dot.joined("detach()", "mul \u00d721")


def test_a_stack_of_layers_is_folded_around_the_one_in_which_something_is_wrong() -> None:
    dot = draw(
        recipe(
            """
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
def loss(model, batch):
    return model(batch).square().mean()
"""
        )
    )
    titles = [label.split("  ")[0] for label in dot.clusters.values()]
    assert titles == ["model", "blocks", "0 \u2026 9", "10", "idle", "11 \u2026 19"]
    assert "10 \u00d7 Block" in dot.clusters[list(dot.clusters)[2]]
    assert dot.clusters_of(dot.node("blocks.10.idle.weight"))[-1].startswith("idle")


@pytest.mark.slow
def test_layers_in_a_list_have_their_place() -> None:
    dot = draw(broken("parameters/layers_in_a_list"))
    marked = [name for name, node in dot.nodes.items() if node["label"].startswith("unregistered")]
    readers = {dot.clusters_of(target)[-1] for source, target, _ in dot.edges if source in marked}
    assert marked and readers == {dot.clusters_of(name)[-1] for name in marked} and all("[" in it for it in readers)


@pytest.mark.slow
def test_what_a_reentrant_checkpoint_computes_carries_gradient() -> None:
    dot = draw(ZOO / "healthy" / "checkpoint_reentrant_once.py")
    plain = [(s, t) for s, t, attributes in dot.edges if "style" not in attributes]
    loss = next(name for name, node in dot.nodes.items() if node.get("shape") == "doubleoctagon")
    reaching = {loss}
    for _ in dot.nodes:
        reaching |= {source for source, target in plain if target in reaching}
    modules = {name for name in dot.nodes if "Linear" in dot.nodes[name]["label"]}
    assert modules and modules <= reaching


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("raises_on_one_rank", 3, "rank 1 raised ValueError: a corrupt record in this rank's shard"),
        pytest.param("sleeps_on_one_rank", 4, "did not finish within 2 s", marks=pytest.mark.slow),
    ],
)
def test_a_target_that_fails_is_one_sentence_and_leaves_no_file(
    name: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    timeout = "2" if code == 4 else "20"
    assert cli.main(["graph", broken(f"running/{name}"), "-o", "x.dot", "--timeout", timeout]) == code
    assert said in capsys.readouterr().err.splitlines()[0]
    assert not Path("x.dot").exists()


def test_a_failure_leaves_the_file_that_was_there() -> None:
    Path("x.dot").write_text("mine", encoding="utf-8")
    assert cli.main(["graph", broken("running/raises_everywhere"), "-o", "x.dot"]) == 3
    assert Path("x.dot").read_text(encoding="utf-8") == "mine"


@pytest.fixture
def no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*args: object, **options: object) -> None:
        raise AssertionError("work was done")

    monkeypatch.setattr("ddpcheck.extras.graph.trace_graph.check", check)


@pytest.mark.usefixtures("no_check")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-o", "x.pdf"], "cannot tell a picture's format from the name 'x.pdf': use .dot, .svg or .png"),
        (["-o", "nowhere/x.dot"], "cannot write nowhere/x.dot: No such file or directory"),
        (["-o", "x.dot", "--world-size", "none"], "--world-size: expected a whole number of at least 1, got 'none'"),
    ],
)
def test_wrong_usage_is_said_before_any_work(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["graph", broken("parameters/unused"), *options]) == 2
    assert capsys.readouterr().err == f"ddpcheck: error: {said}\n"
    assert not Path("x.dot").exists()


@pytest.mark.usefixtures("no_check")
def test_without_dot_a_picture_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert cli.main(["graph", broken("parameters/unused"), "-o", "x.svg"]) == 2
    said = capsys.readouterr().err
    assert "needs the `dot` executable of Graphviz" in said and "-o graph.dot" in said and said.count("\n") == 1


@pytest.mark.usefixtures("no_check")
@pytest.mark.parametrize(
    ("package", "options"),
    [("graphviz", []), ("graphviz", ["-o", "x.dot"]), ("torchviz", ["--view", "autograd"])],
)
def test_without_its_packages_the_extra_is_named(
    package: str, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert cli.main(["graph", broken("parameters/unused"), *options]) == 2
    said = f"ddpcheck: error: `ddpcheck graph` needs {package}, which is not installed: install its extra `graph` ("
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.slow
def test_ranks_do_without_the_packages_of_pictures() -> None:
    code = "import sys; sys.modules.update(graphviz=None, torchviz=None)\nimport ddpcheck.extras.graph.trace_graph"
    done = [sys.executable, "-c", f"{code}, {', '.join(MODULES)}"]
    assert subprocess.run(done, cwd=ROOT, timeout=120).returncode == 0


@pytest.mark.slow
def test_without_a_file_dot_source_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["graph", broken("parameters/unused"), "--steps", "1"]) == 0
    out, err = capsys.readouterr()
    assert parse(out).node("old_head.weight")
    assert err == "ddpcheck: 3 modules drawn, 2 anomalous parameters (DDP101)\n"


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz's dot is not installed")
def test_a_picture_is_written_as_svg() -> None:
    assert cli.main(["graph", broken("parameters/unused"), "--steps", "1", "-o", "x.svg"]) == 0
    assert "old_head.weight" in Path("x.svg").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_picture_of_the_readme_is_that_of_today(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    (target,) = [
        line.partition(":= ")[2]
        for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
        if line.startswith("PICTURE ")
    ]
    fresh = tmp_path / "graph.dot"
    assert cli.main(["graph", target, "--steps", "1", "--timeout", "60", "-o", str(fresh)]) == 0
    committed = ROOT / "docs" / "graph.dot"
    assert fresh.read_text(encoding="utf-8") == committed.read_text(encoding="utf-8"), "run `make pictures`"
    assert (ROOT / "docs" / "graph.svg").exists()


# The autograd graph, by torchviz


def autograd_source(target: str, code: int = 0) -> str:
    pytest.importorskip("torchviz")
    command = ["graph", target, "--view", "autograd", "--steps", "1", "--timeout", "60", "-o", "graph.dot"]
    assert cli.main(command) == code
    return Path("graph.dot").read_text(encoding="utf-8") if code == 0 else ""


def test_the_autograd_graph_has_findings_ends_and_what_is_not_in_it() -> None:
    source = autograd_source(broken("parameters/detach"))
    assert "DDP103 detached-parameter" in source and "detach()\nat detach.py:30" in source
    (weight,) = re.findall(r'(n\d+) \[label="encoder\.weight\n[^"]*DDP103', source)
    assert f"{weight} -> stop0" in source and not re.search(rf"{weight} -> n\d", source)
    source = autograd_source(broken("parameters/unused"))
    (unused,) = re.findall(r'(n\d+|"?[\w.]+"?) \[label="old_head\.weight\n[^"]*DDP101', source)
    assert not re.search(rf"(^|\s){re.escape(unused)} ->", source, re.MULTILINE)


CHAIN = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
    def forward(self, x):
        x = self.layer(x)
        for _ in range({times}):
            x = x + 0.001
        return x
def loss(model, batch):
    return model(batch).mean()
"""


@pytest.mark.slow
def test_an_autograd_graph_that_is_deep_is_drawn_and_a_large_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert autograd_source(recipe(CHAIN.format(times=2000))).count("AddBackward0") == 2000
    autograd_source(recipe(CHAIN.format(times="4_000")), code=2)  # another size: bytecode has whole seconds
    assert re.search(r"the autograd graph of the loss has 4,\d\d\d nodes", capsys.readouterr().err)
