"""The line that takes a norm of the shards of gradients, by the source of the functions that lead to a step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.findings.report import Location
from ddpcheck.record.optimizers.part_recorder import shard_norm_at

LINES = Path(__file__).read_text().splitlines()


def local(tensor: Any) -> Any:
    return tensor.to_local()


class Clipper:
    def __call__(self, parameters: Any) -> None:
        if parameters:
            gradients = [local(p.grad) for p in parameters]
            _ = sum(part.square().sum() for part in gradients)  # in a class


def by_an_object(clip: Any = Clipper()) -> Location | None:  # noqa: B008
    clip(())
    return shard_norm_at(sys._getframe())


def by_itself(parameters: Any = ()) -> Location | None:
    loss = sum(p.square() for p in parameters)
    shards = [p.grad.to_local() for p in parameters]
    total = loss
    for shard in shards:
        total += shard.norm() ** 2  # by itself
    return shard_norm_at(sys._getframe())


def of_whole_gradients(parameters: Any = ()) -> Location | None:
    _ = sum(p.grad.norm() ** 2 for p in parameters)
    return shard_norm_at(sys._getframe())


def of_the_loss(parameters: Any = ()) -> Location | None:
    _ = [local(p) for p in parameters]
    _ = sum(p.square() for p in parameters)
    return shard_norm_at(sys._getframe())


@pytest.mark.parametrize(
    ("step", "mark"),
    [(by_an_object, "# in a class"), (by_itself, "# by itself"), (of_whole_gradients, ""), (of_the_loss, "")],
)
def test_the_line_that_takes_a_norm_of_shards(step: Callable[[], Location | None], mark: str) -> None:
    found = step()
    assert LINES[found.line - 1].endswith(mark) if found is not None else not mark
