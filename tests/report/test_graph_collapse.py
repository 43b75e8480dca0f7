"""Folding: modules that are alike stand once, deep ones fold, and what is wrong stays visible."""

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest

from ddpcheck.findings.evidence.steps import PathEnd
from ddpcheck.findings.report import Location
from ddpcheck.report.graph.drawing_data import (
    FOLD_FROM,
    MOST_NODES,
    Edge,
    GraphView,
    Mark,
    ModuleFact,
    Node,
    ParameterFact,
    fold,
    module_of,
    path_parts,
)


def chain(*modules: tuple[str, str], loss: str = "loss") -> GraphView:
    """A chain of modules, given by path and class, that ends in the loss."""
    nodes = [Node(path, "module", module=path, operations=Counter(linear=1)) for path, _ in modules]
    nodes.append(Node(loss, "loss", name=loss))
    edges = [Edge(one.key, other.key) for one, other in itertools.pairwise(nodes)]
    facts = {path: ModuleFact(name, 9, 1) for path, name in modules}
    parameters = {f"{path}.w": ParameterFact((f"{path}.w",), (9,), (path,)) for path, _ in modules}
    return GraphView(tuple(nodes), tuple(edges), facts, parameters)


def stack(*names: str, depth: int = 12) -> list[tuple[str, str]]:
    return [(f"blocks.{number}.{name}", name.title()) for number in range(depth) for name in names]


def shown(picture: GraphView) -> list[str]:
    return [node.module or node.key for node in picture.nodes]


def arrows(picture: GraphView) -> set[tuple[str, str]]:
    return {(edge.source, edge.target) for edge in picture.edges}


def test_a_small_picture_stays_as_it_is() -> None:
    picture = chain(*stack("norm", "linear", depth=4))
    assert len(picture.nodes) <= FOLD_FROM
    assert fold(picture, ()) is picture


def test_blocks_that_are_alike_stand_once_and_are_counted() -> None:
    picture = fold(chain(("embed", "Embedding"), *stack("norm", "linear", "gelu"), ("head", "Linear")), ())
    assert shown(picture) == ["embed", "blocks.0.norm", "blocks.0.linear", "blocks.0.gelu", "head", "loss"]
    assert picture.stands_for == {"blocks.0": tuple(f"blocks.{number}" for number in range(12))}
    assert arrows(picture) == {
        ("embed", "blocks.0.norm"),
        ("blocks.0.norm", "blocks.0.linear"),
        ("blocks.0.linear", "blocks.0.gelu"),
        ("blocks.0.gelu", "head"),
        ("head", "loss"),
    }


def test_a_pattern_of_layers_is_found_in_a_sequence() -> None:
    layers = [(f"net.{number}", ("Linear", "ReLU")[number % 2]) for number in range(400)]
    picture = fold(chain(*layers), ())
    assert shown(picture) == ["net.0", "net.1", "loss"]
    assert picture.stands_for["net.1"] == tuple(f"net.{number}" for number in range(1, 400, 2))
    assert arrows(picture) == {("net.0", "net.1"), ("net.1", "loss")}


def test_a_block_in_which_something_is_wrong_stands_by_itself() -> None:
    marks = [Mark("blocks.7.linear.w", "DDP101")]
    picture = fold(chain(*stack("norm", "linear", "gelu")), marks)
    assert [len(paths) for paths in picture.stands_for.values()] == [7, 4]
    assert "blocks.7.linear" in shown(picture)
    assert ("blocks.0.gelu", "blocks.7.norm") in arrows(picture)
    assert picture.shown_as["blocks.6.linear"] == "blocks.0.linear"
    assert picture.shown_as["blocks.7.linear"] == "blocks.7.linear"


def test_blocks_in_which_the_same_is_wrong_stand_once() -> None:
    marks = [Mark(f"blocks.{number}.linear.w", "DDP101") for number in range(12)]
    picture = fold(chain(*stack("norm", "linear", "gelu")), marks)
    assert [len(paths) for paths in picture.stands_for.values()] == [12]
    assert picture.parameters["blocks.5.linear.w"].read_by == ("blocks.0.linear",)


def test_blocks_of_other_sizes_are_not_alike() -> None:
    picture = chain(*stack("norm", "linear", "gelu"))
    facts = {**picture.modules, "blocks.3.linear": ModuleFact("Linear", 10, 1)}
    folded = fold(GraphView(picture.nodes, picture.edges, facts, picture.parameters), ())
    assert [len(paths) for paths in folded.stands_for.values()] == [3, 8]


def nested(*, cut_in: str = "") -> GraphView:
    """Modules three deep, none like its neighbour."""
    paths = [f"a{i}.b{j}.c{k}" for i in range(6) for j in range(5) for k in range(4)]
    whole = chain(*((path, f"Class{number}") for number, path in enumerate(paths)))
    stop = Node("stop", "stop", module=cut_in, end=PathEnd("cut", "detach()", Location("net.py", 1), cut_in))
    return GraphView((*whole.nodes, *([stop] if cut_in else [])), whole.edges, whole.modules, whole.parameters)


def test_deep_modules_fold_into_what_holds_them() -> None:
    picture = fold(nested(), ())
    assert shown(picture) == [*(f"a{i}.b{j}" for i in range(6) for j in range(5)), "loss"]
    assert picture.parameters["a3.b1.c2.w"].read_by == ("module a3.b1",)
    assert picture.shown_as["a3.b1.c2"] == "a3.b1"


def test_a_module_with_a_cut_in_it_stays_open() -> None:
    picture = fold(nested(cut_in="a3.b1"), ())
    assert [path for path in shown(picture) if path.count(".") == 2] == [f"a3.b1.c{k}" for k in range(4)]
    assert "stop" in {node.key for node in picture.nodes}


@pytest.mark.parametrize("count", [500, 3000])
def test_neighbours_that_are_all_different_are_taken_together_but_not_what_is_marked(count: int) -> None:
    layers = [(f"layer{number}", f"Class{number}") for number in range(count)]
    picture = fold(chain(*layers), [Mark("layer200.w", "DDP101")])
    assert len(picture.nodes) <= MOST_NODES
    (together,) = [node for node in picture.nodes if node.name.endswith("more modules")]
    assert "layer200" in shown(picture) and "layer0" in shown(picture) and f"layer{count - 1}" in shown(picture)
    drawn_by_themselves = sum(node.kind == "module" for node in picture.nodes) - 1
    assert together.name == f"{count - drawn_by_themselves:,} more modules"


def test_a_loop_in_a_module_s_own_forward_stands_once() -> None:
    adds = [Node(f"add {part}", "module", module="", operations=Counter(add=1)) for part in range(40)]
    edges = [Edge(one.key, other.key) for one, other in itertools.pairwise(adds)]
    picture = fold(GraphView((*adds, Node("loss", "loss")), (*edges, Edge("add 39", "loss")), {}, {}), ())
    assert [node.key for node in picture.nodes] == ["add 0", "loss"]
    assert arrows(picture) == {("add 0", "loss")}


def test_a_loop_around_blocks_stands_once_and_each_kind_of_block_leads_to_it() -> None:
    blocks = chain(*stack("norm", "linear"))
    nodes, edges = [], []
    for number in range(12):
        norm, linear = blocks.nodes[2 * number : 2 * number + 2]
        nodes += [norm, linear, Node(f"add {number}", "module", module="", operations=Counter(add=1))]
        edges += [Edge(norm.key, linear.key), Edge(linear.key, f"add {number}")]
        edges += [Edge(f"add {number - 1}", norm.key)] if number else []
    view = GraphView(
        (*nodes, Node("loss", "loss")), (*edges, Edge("add 11", "loss")), blocks.modules, blocks.parameters
    )
    picture = fold(view, [Mark("blocks.7.linear.w", "DDP101")])
    assert {("blocks.0.linear", "add 0"), ("blocks.7.linear", "add 0"), ("blocks.8.linear", "add 0")} <= arrows(picture)
    assert ("add 0", "loss") in arrows(picture)


@pytest.mark.parametrize(
    ("path", "parts"),
    [("", []), ("a", ["a"]), ("a.0.b", ["a", "0", "b"]), ("a[0].b", ["a[0]", "b"]), ("a['x.y'].b", ["a['x.y']", "b"])],
)
def test_a_path_has_parts(path: str, parts: Sequence[str]) -> None:
    assert path_parts(path) == parts
    assert module_of(f"{path}.w" if path else "w") == path
