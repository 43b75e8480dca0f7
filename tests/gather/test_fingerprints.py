"""Fingerprints, norms, sketches and nodes of several tensors at once: those that each has alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from ddpcheck.gather.autograd.autograd_graph import gradient_node, gradient_nodes  # noqa: E402
from ddpcheck.gather.state import fingerprints as module  # noqa: E402
from ddpcheck.gather.state.fingerprints import fingerprint, fingerprints, storage_address  # noqa: E402
from ddpcheck.gather.steps.gradient_distance import Kept, norm, norms, short_sketches, sketch, sketches  # noqa: E402  # noqa: E402

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64)
shapes = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from(DTYPES)), max_size=8)


def filled(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Random values of every dtype."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 50
    return made.to(dtype)


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


def test_the_layout_of_a_tensor_does_not_count() -> None:
    plain = {str(n): filled(2, 3, 4, 5, seed=n) for n in range(3)}
    last = {name: one.to(memory_format=torch.channels_last) for name, one in plain.items()}
    assert fingerprints(last.items()) == fingerprints(plain.items())
    assert sketches(last) == sketches(plain) and norms(last) == norms(plain)


@pytest.mark.parametrize("size", [1 << 17, (1 << 17) + 1, 399_617])
def test_a_large_tensor_has_a_fingerprint_whatever_its_size(size: int) -> None:
    one = filled(size)
    other = one.clone()
    assert fingerprint(one) == fingerprint(other) == fingerprints([("w", one)])["w"]
    other[-1] += 1
    assert fingerprint(one) != fingerprint(other)


@settings(deadline=None)
@given(
    octets=st.lists(
        st.lists(st.sampled_from((0, 1, 128)), min_size=1, max_size=12).map(bytes), min_size=1, max_size=9, unique=True
    ),
    zeros=st.integers(0, 9),
)
def test_equal_tensors_have_equal_and_different_tensors_have_different_fingerprints(
    octets: list[bytes], zeros: int
) -> None:
    tensors = {str(n): torch.tensor([*one, *bytes(zeros)], dtype=torch.uint8) for n, one in enumerate(octets)}
    found = fingerprints(tensors.items())
    sizes = {(len(one) + zeros, one + bytes(zeros)) for one in octets}
    assert len(set(found.values())) == len(sizes)
    assert found == fingerprints((name, tensor.clone()) for name, tensor in tensors.items())


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
