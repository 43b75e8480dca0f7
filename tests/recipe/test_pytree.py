"""Nests of tensors: their types survive, and shards put together are the whole."""

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpcheck.findings.errors import TargetError
from ddpcheck.recipe.pytree import batch_size, shard_batch, to_device, tree_map, tree_tensors, upcast


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any = 0


def nests(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(OrderedDict),
            st.builds(Pair, inner, inner),
            st.builds(Frozen, inner, inner),
        ),
        max_leaves=6,
    )


def shape_of(nest: Any) -> Any:
    if isinstance(nest, Mapping):
        return type(nest), {key: shape_of(value) for key, value in nest.items()}
    if isinstance(nest, list | tuple):
        return type(nest), [shape_of(item) for item in nest]
    if isinstance(nest, Frozen):
        return type(nest), shape_of(nest.x), shape_of(nest.y)
    return type(nest)


@settings(deadline=None, max_examples=30)
@given(data=st.data(), size=st.integers(5, 12), world_size=st.integers(1, 5))
def test_the_shards_of_any_nest_put_together_are_the_whole(data: st.DataObject, size: int, world_size: int) -> None:
    leaf = st.one_of(
        st.integers(0, 3).map(lambda width: torch.arange(size * width).reshape(size, width)),
        st.just(b"text"),  # a list with a word for each sample is split, and has a test of its own
        st.just(None),
        st.just(2.5),
        st.just(torch.tensor(7)),
    )
    batch = Pair(torch.arange(size), data.draw(nests(leaf)))
    shards = [shard_batch(batch, rank, world_size) for rank in range(world_size)]
    assert all(shape_of(shard) == shape_of(batch) for shard in shards)
    parts = [list(tree_tensors(shard)) for shard in shards]
    for index, whole in enumerate(tree_tensors(batch)):
        pieces = [part[index] for part in parts]
        if whole.ndim == 0:
            assert all(torch.equal(piece, whole) for piece in pieces)
        else:
            assert torch.equal(torch.cat(pieces), whole)
            sizes = [len(piece) for piece in pieces]
            assert sizes[0] - sizes[-1] <= 1 and sizes == sorted(sizes, reverse=True)


@settings(deadline=None, max_examples=60)
@given(nest=nests(st.integers()))
def test_a_mapped_nest_keeps_its_types_and_shares_nothing_that_can_change(nest: Any) -> None:
    before = repr(nest)
    copied = tree_map(lambda leaf: leaf + 1, nest)
    assert shape_of(copied) == shape_of(nest) and repr(nest) == before
    assert repr(tree_map(lambda leaf: leaf - 1, copied)) == before


def test_dicts_with_something_of_their_own_keep_it() -> None:
    counted = defaultdict(list, x=torch.ones(4))
    shard = shard_batch({"counted": counted, "read only": MappingProxyType({"x": numpy.arange(4)})}, 1, 2)
    assert len(shard["counted"]["x"]) == 2 and shard["counted"]["not there"] == []
    assert len(counted["x"]) == 4, "the whole batch is left alone"
    assert type(shard["read only"]) is dict and shard["read only"]["x"].tolist() == [2, 3]


def test_tensors_that_disagree_on_the_number_of_samples_cannot_be_split() -> None:
    with pytest.raises(TargetError, match="6 and 8 samples in dim 0"):
        batch_size([torch.ones(8), torch.ones(6, 2)])
    with pytest.raises(TargetError, match="no tensor has a dim 0"):
        batch_size({"a": torch.tensor(1), "b": "text"})
    assert batch_size([torch.ones(8), torch.tensor(1), "text"]) == 8
    with pytest.raises(TargetError, match="1 sample cannot be split over 2 ranks"):
        shard_batch(torch.ones(1), 0, 2)


def test_leaves_are_moved_and_widened_where_that_means_something() -> None:
    nest = [*(torch.ones(1, dtype=dtype) for dtype in (torch.bfloat16, torch.complex64, torch.int8)), "a"]
    wide = upcast(nest)
    assert [leaf.dtype for leaf in wide[:3]] == [torch.float64, torch.complex128, torch.int8] and wide[3] == "a"
    assert to_device(nest, torch.device("cpu"))[3] == "a"


def test_a_list_with_a_word_for_each_sample_is_split_and_one_of_another_length_is_not() -> None:
    batch = {"x": torch.arange(4), "words": ["a", "b", "c", "d"], "names": ["left", "right"]}
    assert shard_batch(batch, 1, 2)["words"] == ["c", "d"]
    assert shard_batch(batch, 1, 2)["names"] == ["left", "right"]


class Track(tuple):
    def __new__(cls, *parts: Any) -> "Track":
        return super().__new__(cls, parts)


class Growing(list):
    def __init__(self, size: int) -> None:
        super().__init__(range(size))
        self.size = size


def test_subclasses_of_tuples_and_lists_keep_their_type_and_what_they_carry() -> None:
    track = Track(1, 2)
    track.note = "kept"
    again = tree_map(lambda leaf: leaf + 1, track)
    assert (type(again), again, again.note) == (Track, Track(2, 3), "kept")
    grown = tree_map(lambda leaf: leaf + 1, Growing(3))
    assert (type(grown), grown, grown.size) == (Growing, [1, 2, 3], 3)
    largest = tree_map(lambda leaf: leaf + 1, torch.max(torch.zeros(3, 2), 0))
    assert largest.values.tolist() == [1.0, 1.0] and largest.indices.tolist() == [1, 1]


def test_a_packed_sequence_is_moved_and_upcast_and_not_split() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    assert to_device({"x": packed}, torch.device("cpu"))["x"] is packed
    doubled = upcast(packed)
    assert type(doubled) is type(packed) and doubled.data.dtype == torch.float64
    assert doubled.batch_sizes.tolist() == [2, 2, 1]
    meta = to_device((packed,), torch.device("meta"))[0]
    assert meta.data.device.type == "meta" and meta.batch_sizes.device.type == "cpu"
    for batch in (packed, [torch.ones(4), packed], Track(torch.ones(4)), torch.eye(4).to_sparse()):
        with pytest.raises(TargetError, match=r"a (PackedSequence|Track|Tensor) cannot be split .* a shard function"):
            shard_batch(batch, 0, 2)
    assert shard_batch((torch.ones(4), Track(1, 2)), 0, 2)[1] == Track(1, 2)  # without a tensor it goes to every rank
