"""Pictures as dot source: built from small values, without a rank and without torch."""

import shutil
import subprocess
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpcheck.extras.graph.dot import draw, lay_out, picture_format, summary
from ddpcheck.extras.graph.drawing_data import COLOURS, DARK, GraphView, MarkedParam, ModuleFact, Node
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
    """encoder -> detach() -> head -> loss, with a module that is never called."""
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
        modules={"": ModuleFact("Net", 3, 1), name: ModuleFact("Linear", 1, 1), "head": ModuleFact("Linear", 1, 1)}
        | {"idle": ModuleFact("Linear", 1, 0)},
        parameters=marks,
    )


def report(*codes: str, target: str = "net.py") -> Report:
    return Report(
        target=target,
        world={"world_size": 2},
        findings=tuple(Finding(code, ("x",), "It is.", Severity.ERROR) for code in codes),
    )


MARKS = (marked("encoder.weight", "DDP103", "encoder"), marked("idle.weight", "DDP101", shape=(1, 8)))


def drawn() -> Dot:
    return parse(draw(picture(*MARKS), report("DDP101", "DDP103", "DDP305")))


def test_a_parameter_stands_at_its_module_in_the_colour_of_its_cause() -> None:
    dot = drawn()
    detached, unused = dot.node("detached"), dot.node("unused")
    assert dot.nodes[detached]["fillcolor"] == COLOURS["DDP103"]
    assert dot.nodes[detached]["label"] == "detached-parameter\nencoder.weight  8\u00d78"
    assert dot.clusters_of(detached) == ["model  Net \u00b7 3 parameters", "encoder  Linear \u00b7 1 parameter"]
    (reader,) = [target for source, target, _ in dot.edges if source == detached]
    assert dot.nodes[reader]["label"] == "linear" and dot.around[reader] == dot.around[detached]
    assert dot.nodes[unused]["fillcolor"] == COLOURS["DDP101"]
    assert dot.clusters_of(unused) == [
        "model  Net \u00b7 3 parameters",
        "idle  Linear \u00b7 1 parameter \u00b7 not called",
    ]
    assert "head.weight" not in "".join(dot.labels())


def test_a_cut_stands_between_what_was_computed_and_where_the_path_would_have_gone_on() -> None:
    dot = parse(draw(picture(), report()))
    stop = dot.node("detach()\nat net.py:17")
    assert dot.nodes[stop]["shape"] == "octagon"
    (before,) = [edge for edge in dot.edges if edge[1] == stop]
    (after,) = [edge for edge in dot.edges if edge[0] == stop]
    assert before[0] == dot.node("encoder\nLinear") and before[2] == {}
    assert after[1] == dot.node("head\nLinear") and after[2]["style"] == "dashed"


def test_an_arrow_to_what_runs_again_does_not_turn_the_picture_around() -> None:
    view = picture()
    dot = parse(draw(replace(view, edges={**view.edges, ("head", "encoder"): True}), report()))
    assert [(s, t) for s, t, look in dot.edges if "constraint" in look] == [
        (dot.node("head\nLinear"), dot.node("encoder\nLinear"))
    ]


def test_a_module_that_stands_for_others_is_counted_and_what_one_of_them_calls() -> None:
    facts = {"": ModuleFact("Net", 9, 1), "a": ModuleFact("List", 9, 0)}
    facts["a.0"] = ModuleFact("Block", 3, 1, ("a.0", "a.1", "a.2"))
    parts = [Node(f"part {n}", "module", "a.0", Counter(add=3 * n)) for n in (1, 2)]
    dot = parse(draw(GraphView(tuple(parts), {}, facts), report()))
    assert dot.labels() == ["add", "add \u00d72"]
    assert dot.clusters_of("n1")[1:] == [
        "a  List \u00b7 9 parameters",
        "0 \u2026 2  3 \u00d7 Block \u00b7 3 parameters each",
    ]


def test_many_marked_modules_share_nodes() -> None:
    marks = [marked(f"{side}.{n}.weight", "DDP101") for side in ("left", "right") for n in range(9)]
    dot = parse(draw(picture(*marks), report("DDP101")))
    labels = [label for label in dot.labels() if label.startswith("unused")]
    assert [label.splitlines()[1].split(".")[0] for label in labels] == ["left", "right"]
    assert all(label.endswith("and 3 more") for label in labels)


def test_the_title_has_target_world_size_codes_and_a_legend_of_what_is_there() -> None:
    title = drawn().title
    assert title.splitlines()[0] == "net.py"
    assert "rank 0 of 2" in title
    assert "DDP305 loss-normalisation: not drawn" in title
    assert f"DDP101 unused-parameter: {RULES['DDP101'].summary}\nDDP103 detached-parameter: " in title
    assert "zero-gradient" not in title and "end of a path" in title
    clean = parse(draw(picture(), report()))
    assert "no findings" in clean.title and "DDP" not in clean.title


def test_a_tied_parameter_is_drawn_once_with_all_its_names() -> None:
    view = picture(MarkedParam(("DDP101", ""), "idle", ("idle.weight", "other.weight"), (1, 8)))
    assert parse(draw(view, report("DDP101"))).node("idle.weight = other.weight")
    assert summary(view, report("DDP101")) == "2 modules drawn, 1 anomalous parameter (DDP101)"


def test_a_tensor_of_no_module_has_a_box_that_says_nothing_of_calls_and_a_node_of_its_own() -> None:
    view = picture(MarkedParam(("DDP106", ""), "Config", ("batch",)))
    dot = parse(draw(view, report("DDP106")))
    assert dot.clusters_of(dot.node("unregistered-parameter\nbatch"))[1:] == ["Config"]
    assert "batch" in dot.labels() and dot.edges[0][0] == "n1"


def test_ranks_and_steps_are_said_on_the_node() -> None:
    view = picture(marked("head.weight", "DDP104", where="not on rank 1 in step 0"))
    assert "not on rank 1 in step 0" in parse(draw(view, report("DDP104"))).nodes["n7"]["label"]


def test_every_rule_on_parameters_has_a_colour_of_its_own() -> None:
    of_parameters = {code for code in RULES if code.startswith("DDP1")} - {"DDP109", "DDP112"}  # an option; an output
    assert set(COLOURS) == of_parameters and len(set(COLOURS.values())) == len(COLOURS)


@pytest.mark.parametrize("code", COLOURS)
def test_the_text_on_a_colour_can_be_read(code: str) -> None:
    def luminance(colour: str) -> float:  # https://www.w3.org/TR/WCAG21/#dfn-relative-luminance
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    text = "#FFFFFF" if code in DARK else "#000000"
    light, dark = sorted((luminance(COLOURS[code]), luminance(text)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5


HARD = [
    "[red]",
    "a<b>",
    "</B>",
    'say "x"',
    "it's &amp;",
    "\\N",
    "\\",
    "a\\",
    "two\nlines",
    "tab\t",
    "\x00",
    "\ud800",
    "ü→∑",
    "<>",
    "%",
]


def shown(name: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in name)


def assert_survives(name: str) -> None:
    mark = marked(f"{name}.{name}", "DDP103", "encoder")
    dot = parse(draw(picture(mark, name=name, reason=name), report("DDP103", target=name)))
    labels = "\n".join(dot.labels())
    assert f"detached-parameter\n{shown(name)}.{shown(name)}  8\u00d78" in labels
    assert f"{shown(name)}\nat net.py:17" in labels
    assert f"{shown(name)}  Linear \u00b7 1 parameter" in dot.clusters.values()
    assert dot.title.startswith(shown(name))


@pytest.mark.parametrize("name", HARD)
def test_a_name_with_markup_survives(name: str) -> None:
    assert_survives(name)


@given(st.text(st.characters(exclude_characters=".[]"), min_size=1, max_size=12))
def test_any_name_survives(name: str) -> None:
    assert_survives(name)


@needs_dot
def test_dot_reads_what_is_written_and_shows_names_as_they_are() -> None:
    import html

    for name in HARD:
        source = draw(picture(marked(f"{name}.{name}", "DDP103"), name=name), report("DDP103"))
        done = subprocess.run(["dot", "-Tsvg"], input=source.encode(), capture_output=True, timeout=60, check=True)
        assert done.stderr == b""
        assert f">{shown(name)}.{shown(name)}  8\u00d78<" in html.unescape(done.stdout.decode()).replace("\xa0", " ")


def test_the_same_picture_gives_the_same_text() -> None:
    assert draw(picture(*MARKS), report("DDP101")) == draw(picture(*MARKS), report("DDP101"))


@pytest.mark.parametrize(("path", "form"), [(None, "dot"), ("x.dot", "dot"), ("x.GV", "dot"), ("a.b/x.DOT", "dot")])
def test_the_extension_says_the_format(path: str | None, form: str) -> None:
    assert picture_format(path) == form


@pytest.mark.parametrize("path", ["x.pdf", "x", ".svg", "x.svg.txt"])
def test_an_unknown_extension_is_said_with_the_choices(path: str) -> None:
    with pytest.raises(UsageError, match=r"use \.dot, \.svg or \.png$"):
        picture_format(path)


@needs_dot
@pytest.mark.parametrize(("form", "begins"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_dot_lays_it_out(form: str, begins: bytes) -> None:
    assert lay_out(draw(picture(*MARKS), report()), form, timeout=60).startswith(begins)


@needs_dot
def test_a_failure_of_dot_is_one_sentence() -> None:
    with pytest.raises(UsageError, match=r"dot failed with exit code 1: .*syntax error"):
        lay_out("digraph {", "svg", timeout=60)


@needs_dot
def test_dot_has_a_deadline() -> None:
    with pytest.raises(UsageError, match=r"within 0\.001 s.*-o graph\.dot"):
        lay_out(draw(picture(*MARKS), report()), "svg", timeout=0.001)
