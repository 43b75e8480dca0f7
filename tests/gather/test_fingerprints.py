"""Fingerprints, norms, sketches and nodes of several tensors at once: those that each has alone."""

import math
from itertools import combinations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddpcheck.gather.autograd.autograd_graph import gradient_node, gradient_nodes
from ddpcheck.gather.state import fingerprints as module
from ddpcheck.gather.state.fingerprints import fingerprint, fingerprints, storage_address
from ddpcheck.gather.steps.gradient_distance import Kept, norm, norms, short_sketches, sketch, sketches

BITS = (torch.uint8, torch.int16, torch.int32, torch.float16, torch.complex128)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64)
shapes = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from(DTYPES)), max_size=8)


def filled(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Random values of every dtype."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 50
    return made.to(dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, *BITS], ids=str)
def test_equal_bits_give_equal_fingerprints_in_any_layout_and_any_change_another(dtype: torch.dtype) -> None:
    for shape in ((), (0,), (3, 0, 2), (7,), (2, 3, 4, 5)):
        tensor = filled(*shape, dtype=dtype)
        print_of = fingerprint(tensor)
        assert 0 <= print_of < 2**64 and fingerprint(tensor.clone()) == print_of
        for place in range(tensor.numel()):
            changed = tensor.clone()
            flat = changed.view(-1)
            flat[place] = ~flat[place] if dtype is torch.bool else flat[place] + 1
            assert fingerprint(changed) != print_of, (shape, place)
    assert fingerprint(tensor.to(memory_format=torch.channels_last)) == print_of
    assert fingerprint(tensor.transpose(0, 3).contiguous().transpose(0, 3)) == print_of
    padded = torch.cat([tensor.reshape(-1)[:1], tensor.reshape(-1)])
    assert fingerprint(padded[1:].view(2, 3, 4, 5)) == print_of, "a view that starts in the middle"


@settings(deadline=None, max_examples=100)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1))
@example(0, -1)
@example(0, -(2**63))
@example(1, 1 << 32)
@example(-2, 1)
def test_no_two_words_share_a_fingerprint(first: int, second: int) -> None:
    prints = [fingerprint(torch.tensor([5, word, 7], dtype=torch.int64)) for word in (first, second)]
    assert (prints[0] == prints[1]) is (first == second)


def test_swapped_elements_and_other_bits_of_equal_values_change_the_fingerprint() -> None:
    tensor = torch.arange(40.0)
    for pair in combinations(range(40), 2):
        swapped = tensor.clone()
        swapped[[*pair]] = tensor[[*reversed(pair)]]
        assert fingerprint(swapped) != fingerprint(tensor), pair
    assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0]))
    assert fingerprint(torch.tensor([math.nan])) == fingerprint(torch.tensor([math.nan]))


@settings(deadline=None)
@given(shapes=shapes, together=st.sampled_from((1, 100, 1 << 22)), turned=st.booleans())
def test_tensors_that_are_taken_together_have_the_fingerprints_that_each_has_alone(
    shapes: list[tuple[int, int, torch.dtype]], together: int, turned: bool
) -> None:
    tensors = [filled(rows, columns, dtype=dtype, seed=n) for n, (rows, columns, dtype) in enumerate(shapes)]
    named = {str(n): tensor.t() if turned else tensor for n, tensor in enumerate(tensors)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MOST_STACKED_BYTES", together)
        found = fingerprints(named.items())
    assert found == {name: fingerprint(tensor) for name, tensor in named.items()}
    assert [*found] == [*named]


def test_tensors_of_any_kind_have_fingerprints() -> None:
    odd = {
        "meta": torch.empty(3, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
        "large": filled(1 << 15),
        "a view": filled(11)[1:],
        "a parameter": torch.nn.Parameter(filled(4, 4)),
        "nested": torch.nested.nested_tensor([filled(2), filled(3)]),
    }
    assert fingerprints(odd.items()) == {name: fingerprint(tensor) for name, tensor in odd.items()}
    assert fingerprint(odd["sparse"]) == fingerprint(torch.eye(3))
    z = torch.tensor([1 + 2j, 3 - 1j])
    assert fingerprint(z.conj()) == fingerprint(z.conj().resolve_conj()) != fingerprint(z)


SIZES = st.lists(st.sampled_from((0, 1, 63, 64, 65, 200, 1 << 15)), max_size=6)


@settings(deadline=None, max_examples=40)
@given(sizes=SIZES, dtype=st.sampled_from((torch.float32, torch.float64, torch.bfloat16, torch.complex64)))
def test_sketches_that_are_made_together_are_those_of_each_alone(sizes: list[int], dtype: torch.dtype) -> None:
    gradients = {str(n): filled(size, dtype=dtype, seed=n) for n, size in enumerate(sizes)}
    alone = {name: sketch(gradient).double() for name, gradient in gradients.items()}
    for found in (sketches(gradients), short_sketches({name: Kept.record(one) for name, one in gradients.items()})):
        assert [*found] == [*gradients]
        for name, numbers in found.items():
            assert torch.allclose(torch.tensor(numbers, dtype=torch.float64), alone[name], rtol=1e-4, atol=1e-2)


def test_what_is_kept_of_two_gradients_adds_up_and_does_not_change_with_them() -> None:
    for size in (8, 1 << 15):
        one, other = filled(size, seed=1), filled(size, seed=2)
        kept, want = Kept.record(one) + Kept.record(other), sketch(one + other)
        one.zero_()
        assert torch.allclose(torch.tensor(short_sketches({"w": kept})["w"]), want, rtol=1e-3, atol=1e-2)


def test_what_shares_memory_is_at_one_place_and_what_has_none_is_where_it_is_itself() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    assert storage_address(weight) == storage_address(weight.data) == weight.data_ptr()
    for other in (torch.eye(2).to_sparse(), torch.ones(2, device="meta")):
        assert storage_address(other) == id(other)


@pytest.mark.parametrize("size", [1 << 17, (1 << 17) + 1, 399_617])
def test_a_change_anywhere_in_a_large_tensor_changes_its_fingerprint(size: int) -> None:
    tensor = filled(size)
    assert fingerprint(tensor) == fingerprint(tensor.clone()) == fingerprints([("w", tensor)])["w"]
    changes = [tensor.clone() for _ in range(3)]
    for place, changed in zip((0, 1 << 16, size - 1), changes, strict=True):
        changed[place] += 1
    assert len({*map(fingerprint, [tensor, *changes])}) == 4
    same_place = [torch.zeros(1 << 18) for _ in range(2)]  # of two chunks
    for place, changed in zip((1, (1 << 17) + 1), same_place, strict=True):
        changed[place] = 1.0
    assert fingerprint(same_place[0]) != fingerprint(same_place[1])


@settings(deadline=None, max_examples=40)
@given(sizes=SIZES, dtype=st.sampled_from((torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.uint8)))
def test_norms_of_tensors_that_are_taken_together_are_those_of_each_alone(sizes: list[int], dtype: torch.dtype) -> None:
    tensors = {str(n): filled(size, dtype=dtype, seed=n) for n, size in enumerate(sizes)}
    assert norms(tensors) == {name: pytest.approx(norm(tensor), rel=1e-9) for name, tensor in tensors.items()}


def test_the_nodes_of_several_tensors_are_those_of_each() -> None:
    leaf, frozen = torch.nn.Parameter(filled(2)), torch.nn.Parameter(filled(2), requires_grad=False)
    made = leaf * 2
    with torch.no_grad():
        found = gradient_nodes([leaf, frozen, made, leaf])
    assert found == [gradient_node(leaf), None, gradient_node(made), gradient_node(leaf)]
    assert gradient_nodes([frozen]) == [None] and gradient_nodes([]) == []
