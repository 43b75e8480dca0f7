"""Pictures as dot source and folding of modules: built from small values, without a rank and without torch."""

import shutil
from collections import Counter
from collections.abc import Iterable, Mapping

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddpcheck.extras.graph.dot import draw, lay_out, picture_format
from ddpcheck.extras.graph.drawing_data import (
    COLOURS,
    FOLD_FROM,
    MOST_MODULES,
    GraphView,
    MarkedParam,
    ModuleFact,
    Node,
    fold,
    module_of,
    prefixes,
)
from ddpcheck.findings.errors import UsageError
from ddpcheck.findings.evidence.steps import PathEnd
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location, Report
from ddpcheck.findings.rules import RULES, Severity
from tests.dotsource import Dot, parse

needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz's dot is not installed")


def marked(name: str, code: str, *readers: str, where: str = "", shape: tuple[int, ...] = (8, 8)) -> MarkedParam:
    return MarkedParam((code, where), name.rpartition(".")[0], (name,), shape, readers)


def picture(*marks: MarkedParam, name: str = "encoder", reason: str = "detach()") -> GraphView:
    """Return encoder -> detach() -> head -> loss, with a module that is never called."""
    end = PathEnd("cut", reason, Location("net.py", 17), "")
    return GraphView(
        nodes=(
            Node("batch", "input"),
            Node("encoder", "module", module=name, operations=Counter(linear=1)),
            Node("stop", "stop", module="", end=end),
            Node("head", "module", module="head", operations=Counter(linear=1)),
            Node("outside", "module", operations=Counter(mean=1)),
            Node("loss", "loss"),
        ),
        edges={
            ("batch", "encoder"): False,
            ("encoder", "stop"): True,
            ("stop", "head"): False,
            ("head", "outside"): True,
            ("outside", "loss"): True,
        },
        modules={"": ModuleFact("Net", 3, 1)}
        | {path: ModuleFact("Linear", 1, int(path != "idle")) for path in (name, "head", "idle")},
        parameters=marks,
    )


def report(*codes: str, target: str = "net.py") -> Report:
    findings = tuple(Finding(code, ("x",), "It is.", Severity.ERROR) for code in codes)
    return Report(target=target, world={"world_size": 2}, findings=findings)


def drawn(*marks: MarkedParam, codes: Iterable[str] | None = None, **view: object) -> Dot:
    return parse(draw(replace(picture(*marks), **view), report(*(codes or [mark.mark[0] for mark in marks]))))


MARKS = (marked("encoder.weight", "DDP103", "encoder"), marked("idle.weight", "DDP101", shape=(1, 8)))


def test_a_parameter_is_drawn_in_its_module_in_the_colour_of_its_cause() -> None:
    dot = drawn(*MARKS)
    model = "model  Net \u00b7 3 parameters"
    detached, unused = dot.node("detached"), dot.node("unused")
    assert dot.nodes[detached]["label"] == "detached-parameter\nencoder.weight  8\u00d78"
    assert dot.clusters_of(detached) == [model, "encoder  Linear \u00b7 1 parameter"]
    assert dot.clusters_of(unused) == [model, "idle  Linear \u00b7 1 parameter \u00b7 not called"]
    assert [dot.nodes[node]["fillcolor"] for node in (detached, unused)] == [COLOURS["DDP103"], COLOURS["DDP101"]]
    (reader,) = [target for source, target, _ in dot.edges if source == detached]
    assert dot.nodes[reader]["label"] == "linear" and dot.around[reader] == dot.around[detached]
    assert "head.weight" not in "".join(dot.labels())
    assert draw(picture(*MARKS), report("DDP101")) == draw(picture(*MARKS), report("DDP101"))


def test_a_cut_is_between_its_operation_and_the_next_and_an_arrow_back_does_not_turn_the_picture_around() -> None:
    dot = drawn(edges={**picture().edges, ("head", "encoder"): True})
    stop, encoder, head = dot.node("detach()\nat net.py:17"), dot.node("encoder\nLinear"), dot.node("head\nLinear")
    assert dot.nodes[stop]["shape"] == "octagon"
    assert [edge for edge in dot.edges if stop in edge] == [(encoder, stop, {}), (stop, head, {"style": "dashed"})]
    assert [(s, t) for s, t, look in dot.edges if "constraint" in look] == [(head, encoder)]


def test_the_title_has_target_world_size_codes_and_a_legend_of_what_is_drawn() -> None:
    title = drawn(*MARKS, codes=["DDP101", "DDP103", "DDP305"]).title
    assert title.startswith("net.py\nrank 0 of 2") and "DDP305 loss-normalisation: not drawn" in title
    assert f"DDP101 unused-parameter: {RULES['DDP101'].summary}\nDDP103 detached-parameter: " in title
    assert "zero-gradient" not in title and "end of a path" in title
    title = drawn().title
    assert "no findings" in title and "DDP" not in title


def test_every_rule_on_parameters_has_its_own_colour() -> None:
    of_parameters = {code for code in RULES if code.startswith("DDP1")} - {"DDP109", "DDP112"}  # an option; an output
    assert set(COLOURS) == of_parameters and len(set(COLOURS.values())) == len(COLOURS)


HARD = ["a<b>", "</B>", 'say "x"', "it's &amp;", "\\N", "a\\", "two\nlines", "\x00", "\ud800", "ü→∑"]


def printed(name: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in name)


@given(st.text(st.characters(exclude_characters=".[]"), min_size=1, max_size=12))
def test_any_name_survives(name: str) -> None:
    mark = marked(f"{name}.{name}", "DDP103", "encoder")
    dot = parse(draw(picture(mark, name=name, reason=name), report("DDP103", target=name)))
    labels, text = "\n".join(dot.labels()), printed(name)
    assert f"detached-parameter\n{text}.{text}  8\u00d78" in labels and f"{text}\nat net.py:17" in labels
    assert f"{text}  Linear \u00b7 1 parameter" in dot.clusters.values()
    assert dot.title.startswith(text)


for _name in HARD:
    test_any_name_survives = example(_name)(test_any_name_survives)


def test_the_extension_of_a_file_is_its_format_and_an_unknown_one_is_refused_with_the_choices() -> None:
    assert {picture_format(path) for path in (None, "x.dot", "x.GV", "a.b/x.DOT")} == {"dot"}
    with pytest.raises(UsageError, match=r"use \.dot, \.svg or \.png$"):
        picture_format("x.svg.txt")


@needs_dot
def test_dot_lays_it_out_before_a_deadline_and_its_failure_is_one_sentence() -> None:
    source = draw(picture(*MARKS), report())
    assert lay_out(source, "svg", timeout=60).startswith(b"<?xml")
    assert lay_out(source, "png", timeout=60).startswith(b"\x89PNG")
    with pytest.raises(UsageError, match=r"dot failed with exit code 1: .*syntax error"):
        lay_out("digraph {", "svg", timeout=60)
    with pytest.raises(UsageError, match=r"within 0\.001 s.*-o graph\.dot"):
        lay_out(source, "svg", timeout=0.001)


# Folding

FAULT = ("linear.w", "DDP101")


def tree(*paths: str, **kinds: str) -> dict[str, str]:
    """Return modules by path, with their parents; each has the kind of its name, or as in `kinds`."""
    modules = {prefix: "" for path in paths for prefix in prefixes(path)}
    return {path: kinds.get(path.replace(".", "_"), path.rpartition(".")[2].strip("0123456789")) for path in modules}


def stack(depth: int = 12, **kinds: str) -> dict[str, str]:
    names = ("norm", "linear", "gelu")
    return tree(*(f"blocks.{number}.{name}" for number in range(depth) for name in names), **kinds)


def leaves(shown: Mapping[str, str]) -> list[str]:
    drawn = dict.fromkeys(shown.values())
    return [path for path in drawn if not any(module_of(inner) == path for inner in drawn)]


def blocks(shown: Mapping[str, str]) -> list[int]:
    return [*Counter(target for path, target in shown.items() if module_of(path) == "blocks").values()]


def test_a_small_model_is_drawn_unfolded_and_equal_blocks_once() -> None:
    modules = stack(depth=4)
    assert len(modules) <= FOLD_FROM and fold(modules) == {path: path for path in modules}
    shown = fold(tree("embed") | stack() | tree("head"))
    assert leaves(shown) == ["embed", "blocks.0.norm", "blocks.0.linear", "blocks.0.gelu", "head"]
    assert blocks(shown) == [12] and shown["blocks.7.linear"] == "blocks.0.linear"


@pytest.mark.parametrize(
    ("faults", "kinds", "counts"),
    [
        ([FAULT] * 12, {}, [12]),
        ([(FAULT, number == 7) for number in range(12)], {}, [7, 1, 4]),
        ([], {"blocks_3_linear": "Conv2d"}, [3, 1, 8]),
    ],
    ids=["the same fault", "another fault", "another class"],
)
def test_blocks_with_equal_faults_and_classes(faults: list[object], kinds: dict[str, str], counts: list[int]) -> None:
    by_path = [(f"blocks.{number}.linear", fault) for number, fault in enumerate(faults)]
    assert blocks(fold(stack(**kinds), by_path)) == counts


def test_deep_modules_fold_into_their_parents_except_around_a_cut() -> None:
    paths = tree(*(f"a{i}.b{j}.c{k}" for i in range(6) for j in range(5) for k in range(4)))
    modules = {path: path for path in paths}  # none is like its neighbour
    shown = fold(modules)
    assert leaves(shown) == [f"a{i}.b{j}" for i in range(6) for j in range(5)]
    assert shown["a3.b1.c2"] == "a3.b1" and len(set(shown.values())) <= MOST_MODULES
    shown = fold(modules, cuts=["a3.b1"])
    assert [path for path in leaves(shown) if path.count(".") == 2] == [f"a3.b1.c{k}" for k in range(4)]
