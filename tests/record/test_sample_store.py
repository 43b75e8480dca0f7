"""Values of ranks in files, and put together along the batch dimension."""

from __future__ import annotations

import resource
from collections import UserDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddpcheck.record.parity import sample_store
from ddpcheck.record.parity.sample_store import (
    ConcatenationError,
    SampleReader,
    SampleWriter,
    is_same,
    join_ranks,
    row_count,
)

Pair = namedtuple("Pair", "x y")
A, B = torch.arange(6.0).reshape(3, 2), torch.arange(4.0).reshape(2, 2) - 9


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        pytest.param(A, B, torch.cat([A, B]), id="tensor"),
        pytest.param([A, A[:, 0]], [B, B[:, 0]], [torch.cat([A, B]), torch.cat([A[:, 0], B[:, 0]])], id="list"),
        pytest.param((A, torch.ones(3)), (B, torch.ones(2)), (torch.cat([A, B]), torch.ones(5)), id="equal labels"),
        pytest.param(
            {"x": A, "name": ["a", "b"]},
            {"x": B, "name": ["c"]},
            {"x": torch.cat([A, B]), "name": ["a", "b", "c"]},
            id="texts",
        ),
        pytest.param(Pair(A, 3), Pair(B, 3), Pair(torch.cat([A, B]), 3), id="named tuple"),
        pytest.param(A.numpy(), B.numpy(), np.concatenate([A.numpy(), B.numpy()]), id="array"),
        pytest.param(UserDict(x=A), UserDict(x=B), UserDict(x=torch.cat([A, B])), id="mapping"),
        pytest.param([A, A], [A.clone(), A.clone()], [A, A], id="the same on both"),
        pytest.param(torch.tensor(2), torch.tensor(2), torch.tensor(2), id="a number on both"),
        pytest.param(
            torch.tensor([[5, 7, 2], [4, 2, 0]]),
            torch.tensor([[8, 2]]),
            torch.tensor([[5, 7, 2], [4, 2, 0], [8, 2, 0]]),
            id="texts of other lengths",
        ),
        pytest.param(
            {"labels": torch.tensor([[0, 1], [0, -100]])},
            {"labels": torch.tensor([[1, 0, 0]])},
            {"labels": torch.tensor([[0, 1, -100], [0, -100, -100], [1, 0, 0]])},
            id="labels of other lengths",
        ),
        pytest.param(
            torch.ones(1, 3, 2),
            torch.tensor([[[1.0, 1], [2, 3]], [[1, 1], [0, 0]]]),
            torch.tensor([[[1.0, 1]] * 3, [[1, 1], [2, 3], [0, 0]], [[1, 1], [0, 0], [0, 0]]]),
            id="frames of other lengths",
        ),
    ],
)
def test_values_are_put_together(one: Any, other: Any, both: Any) -> None:
    made = join_ranks([one, other])
    assert type(made) is type(both) and is_same(made, both)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(A, B[:, :1], id="other shapes"),
        pytest.param(torch.tensor(1), torch.tensor(2), id="numbers"),
        pytest.param({"x": A}, {"y": A}, id="other keys"),
        pytest.param((A,), (A, A), id="other lengths"),
        pytest.param(A, A.numpy(), id="other types"),
        pytest.param("train", "test", id="texts"),
    ],
)
def test_values_without_a_batch_dimension_are_not(one: Any, other: Any) -> None:
    with pytest.raises(ConcatenationError):
        join_ranks([one, other])


def test_rows_are_those_of_the_first_tensor() -> None:
    assert [row_count(value) for value in ([1, (A, B)], {"n": 3, "x": B}, "text", torch.tensor(1.0))] == [3, 2, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_tensors_of_any_kind_come_back(dtype: torch.dtype, tmp_path: Path) -> None:
    value = {"x": torch.arange(6).reshape(2, 3).to(dtype), "t": torch.zeros(0, dtype=dtype), "y": A.T}
    for rank in (0, 1):
        SampleWriter(tmp_path, rank).add("batch#0", value)
    reader = SampleReader(tmp_path, 2)
    assert reader.count("batch#0") == 2 and reader.get("batch#1") == []
    assert all(is_same(one, value) for one in reader.get("batch#0"))


def test_what_is_cut_off_or_too_large_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = SampleWriter(tmp_path, 0)
    writer.add("first#0", A)
    writer.add("second#0", A)
    path = tmp_path / "samples-0"
    path.write_bytes(path.read_bytes()[:-5])  # the rank was killed
    reader = SampleReader(tmp_path, 2)
    assert reader.count("first#0") == 1 and reader.count("second#0") == 0

    monkeypatch.setattr(sample_store, "_LARGEST", 1000)
    writer = SampleWriter(tmp_path, 1)
    for number in range(9):
        writer.add(f"batch#{number}", A)
    assert writer.why_full
    kept = [SampleReader(tmp_path, 2).count(f"batch#{number}") for number in range(9)]
    assert 0 < sum(kept) < 9 and kept == sorted(kept, reverse=True)


def test_what_cannot_be_pickled_is_left_out(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path, 0)
    writer.add("batch#0", {"x": A, "how": lambda x: x})
    writer.add("batch#1", A)
    reader = SampleReader(tmp_path, 1)
    assert reader.count("batch#0") == 0 and is_same(reader.get("batch#1"), [A])


def test_a_start_of_the_ranks_after_another_has_its_own_values(tmp_path: Path) -> None:
    for values in ([A, B], [B]):
        writer = SampleWriter(tmp_path, 0)
        for number, value in enumerate(values):
            writer.add(f"batch#{number}", value)
    reader = SampleReader(tmp_path, 1)
    assert is_same(reader.get("batch#0"), [B]) and reader.get("batch#1") == []


def test_on_a_full_disk_what_was_written_is_kept(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = SampleWriter(tmp_path, 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        for number in range(9):
            writer.add(f"größte#{number}", A)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert writer.why_full == "their file could not be written: File too large"
    assert (tmp_path / "samples-0").stat().st_size == 1000  # a value was cut off
    reader = SampleReader(tmp_path, 1)
    kept = [reader.count(f"größte#{number}") for number in range(9)]
    assert 0 < sum(kept) < 9 and kept == sorted(kept, reverse=True)
    assert is_same(reader.get("größte#0"), [A])
    (tmp_path / "samples-1").mkdir()
    assert SampleWriter(tmp_path, 1).why_full == "their file could not be written: Is a directory"


def test_samples_leave_room_for_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = SampleWriter(tmp_path, 0)
    writer.add("first", A)
    monkeypatch.setattr(sample_store, "_MIN_FREE", 1 << 60)
    writer.add("second", A)
    assert writer.why_full.endswith("MiB are free for temporary files")
    assert [SampleReader(tmp_path, 1).count(key) for key in ("first", "second")] == [1, 0]
