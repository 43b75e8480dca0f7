"""Folding: modules that are alike stand once, deep ones fold, and what is wrong stays visible."""

from collections.abc import Mapping, Sequence

import pytest

from ddpcheck.extras.graph.drawing_data import FOLD_FROM, MOST_MODULES, fold, module_of, prefixes

FAULT = ("linear.w", "DDP101")


def tree(*paths: str, **kinds: str) -> dict[str, str]:
    """Modules by path, with those that hold them; each is what its own name says, or what `kinds` say."""
    modules = {prefix: "" for path in paths for prefix in prefixes(path)}
    return {path: kinds.get(path.replace(".", "_"), path.rpartition(".")[2].strip("0123456789")) for path in modules}


def stack(*names: str, depth: int = 12) -> list[str]:
    return [f"blocks.{number}.{name}" for number in range(depth) for name in names]


def drawn(shown: Mapping[str, str], *, leaves: bool = True) -> list[str]:
    found = list(dict.fromkeys(shown.values()))
    return [path for path in found if not leaves or not any(module_of(inner) == path for inner in found)]


def blocks(shown: Mapping[str, str]) -> list[int]:
    """How many blocks each drawn one stands for."""
    of_blocks = [first for path, first in shown.items() if module_of(path) == "blocks"]
    return [of_blocks.count(first) for first in dict.fromkeys(of_blocks)]


def test_a_small_model_is_drawn_as_it_is() -> None:
    modules = tree(*stack("norm", "linear", depth=4))
    assert len(modules) <= FOLD_FROM
    assert fold(modules) == {path: path for path in modules}


def test_blocks_that_are_alike_stand_once() -> None:
    shown = fold(tree("embed", *stack("norm", "linear", "gelu"), "head"))
    assert drawn(shown) == ["embed", "blocks.0.norm", "blocks.0.linear", "blocks.0.gelu", "head"]
    assert blocks(shown) == [12] and shown["blocks.7.linear"] == "blocks.0.linear"


def test_modules_that_are_alike_stand_once_only_if_they_follow_each_other() -> None:
    layers = [f"{name}{number}" for number in range(20) for name in ("linear", "relu")]
    assert drawn(fold(tree(*layers))) == layers
    assert drawn(fold(tree(*(f"linear{number}" for number in range(30)), "relu"))) == ["linear0", "relu"]


def test_a_block_in_which_something_is_wrong_stands_by_itself() -> None:
    shown = fold(tree(*stack("norm", "linear", "gelu")), [("blocks.7.linear", FAULT)])
    assert blocks(shown) == [7, 1, 4]
    assert shown["blocks.6.linear"] == "blocks.0.linear" and shown["blocks.7.linear"] == "blocks.7.linear"
    assert shown["blocks.9.linear"] == "blocks.8.linear"


def test_blocks_in_which_the_same_is_wrong_stand_once() -> None:
    modules = tree(*stack("norm", "linear", "gelu"))
    assert blocks(fold(modules, [(f"blocks.{number}.linear", FAULT) for number in range(12)])) == [12]
    assert blocks(fold(modules, [(f"blocks.{number}.linear", (FAULT, number // 6)) for number in range(12)])) == [6, 6]


def test_blocks_of_which_one_holds_another_class_are_not_alike() -> None:
    assert blocks(fold(tree(*stack("norm", "linear", "gelu"), blocks_3_linear="Conv2d"))) == [3, 1, 8]


def nested() -> dict[str, str]:
    """Modules three deep, none like its neighbour."""
    paths = [f"a{i}.b{j}.c{k}" for i in range(6) for j in range(5) for k in range(4)]
    return {path: path for path in tree(*paths)}


def test_deep_modules_fold_into_what_holds_them() -> None:
    shown = fold(nested())
    assert drawn(shown) == [f"a{i}.b{j}" for i in range(6) for j in range(5)]
    assert shown["a3.b1.c2"] == "a3.b1" and len(set(shown.values())) <= MOST_MODULES


def test_a_module_with_a_cut_in_it_stays_open() -> None:
    shown = fold(nested(), cuts=["a3.b1"])
    assert [path for path in drawn(shown) if path.count(".") == 2] == [f"a3.b1.c{k}" for k in range(4)]


@pytest.mark.parametrize(
    ("path", "inside"),
    [("", [""]), ("a", ["", "a"]), ("a.0.b", ["", "a", "a.0", "a.0.b"]), ("a[0].b", ["", "a[0]", "a[0].b"])],
)
def test_a_path_has_prefixes(path: str, inside: Sequence[str]) -> None:
    assert prefixes(path) == inside
    assert module_of(f"{path}.w" if path else "w") == path
