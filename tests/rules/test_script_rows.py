"""What `ddpcheck run` finds in the samples of loaders by their contents, judged on evidence: faults and twins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpcheck.findings.evidence.script import LoaderPass, Restored
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.record.data.datasets import SampleRows, first_samples, length_before_slicing
from ddpcheck.rules.data.loaders import judge_loaders
from ddpcheck.trace.data import are_disjoint_shares

LINE, MADE = Location("train.py", 30), Location("train.py", 10)
STAY, HEAD = Location("train.py", 12), Location("train.py", 20)


def epoch(rows: Sequence[int], number: int = 0, **more: Any) -> LoaderPass:
    plain = LoaderPass(
        0, number, LINE, "Texts", -1, {}, -1, 4, "RandomSampler", exhausted=True, trains=True, built_at=MADE
    )
    return replace(plain, **{"rows": tuple(rows), "order": number + 1, **more})


def found(*ranks: Sequence[LoaderPass]) -> list[tuple[str, Location | None]]:
    def shown(finding: Finding) -> tuple[str, Location | None]:
        return finding.code, finding.location

    return list(map(shown, judge_loaders(ranks)))


EVEN, ODD, HALF = range(0, 64, 2), range(1, 64, 2), range(16, 48)


@pytest.mark.parametrize(
    ("mine", "theirs", "code"),
    [
        (epoch(EVEN), epoch(ODD), ""),
        (epoch(EVEN), epoch(EVEN), "DDP505"),
        (epoch(EVEN), epoch(HALF), "DDP505"),  # a stream that each rank shuffles before it takes its part
        (epoch(EVEN, size=32), epoch(HALF, size=32), "DDP516"),  # parts of another order
        (epoch(EVEN, size=32), epoch((*ODD[9:], *EVEN[:9]), size=32), ""),  # what the data has twice
        (epoch(EVEN, exhausted=False), epoch(HALF, exhausted=False), ""),
        (epoch([7] * 32), epoch([7] * 32), ""),  # rows that tell nothing
    ],
)
def test_samples_that_ranks_share_by_their_contents(mine: LoaderPass, theirs: LoaderPass, code: str) -> None:
    assert found([mine], [theirs]) == ([(code, MADE)] if code else [])


def in_turn(*workers: Sequence[int]) -> list[int]:
    """What workers give in batches of four."""
    begun = range(0, max(map(len, workers)), 4)
    return [row for begin in begun for worker in workers for row in worker[begin : begin + 4]]


TWICE = in_turn(range(32), range(32))
AUGMENTED = in_turn([row // 2 for row in range(32)], [16 + row // 2 for row in range(32)])
"""Each worker gives its part of the stream, and each sample twice."""
IN_ROUNDS = in_turn([*range(0, 33, 2), *range(1, 33, 2)], [*range(1, 33, 2), *range(0, 33, 2)])
"""The workers go through the stream twice, in turn."""
SORTED = {"samples": {"items": tuple(range(64))}, "size": 64, "contents": {"0": {0: 1, 9: 2, 5: 3}}}


@pytest.mark.parametrize(
    ("mine", "theirs", "code"),
    [
        (epoch(TWICE, workers=2), epoch([row + 32 for row in TWICE], workers=2), "DDP505 warning"),
        (epoch(TWICE, workers=2), epoch(TWICE, workers=2), "DDP505 error"),  # nor by rank
        (epoch(AUGMENTED, workers=2), epoch([row + 32 for row in AUGMENTED], workers=2), ""),
        (epoch(range(32), workers=1), epoch(range(32, 64), workers=1), ""),
        (epoch(TWICE, workers=2, size=64), epoch([row + 32 for row in TWICE], workers=2, size=64), ""),  # by indices
        (epoch(TWICE, workers=2, exhausted=False), epoch(TWICE, workers=2, exhausted=False), "DDP505 error"),
        (epoch(IN_ROUNDS, workers=2), epoch([row + 33 for row in IN_ROUNDS], workers=2), ""),
        (epoch(TWICE, workers=2), epoch(range(32, 96), workers=2), ""),  # one of them only
        (epoch(AUGMENTED, workers=2, exhausted=False), epoch(AUGMENTED, workers=2, exhausted=False), ""),
    ],
)
def test_workers_that_each_go_through_the_whole_stream(mine: LoaderPass, theirs: LoaderPass, code: str) -> None:
    assert [f"{finding.code} {finding.severity.value}" for finding in judge_loaders([[mine], [theirs]])] == [
        code
    ] * bool(code)


def test_an_order_of_each_ranks_own_where_batches_are_put_together_in_another_one() -> None:
    mine = epoch(EVEN, **SORTED, indices=tuple(EVEN))
    theirs = {**SORTED, "contents": {"0": {0: 4, 9: 5, 5: 6}}}  # a batch is sorted by length, say
    assert found([mine], [epoch(HALF, indices=tuple(HALF), **theirs)]) == [("DDP505", MADE)]
    assert not found([mine], [epoch(ODD, indices=tuple(HALF), **theirs)])  # numbered alike


def half(part: Sequence[int], positions: Sequence[int], number: int = 0, **more: Any) -> LoaderPass:
    """A pass over half of the places of a dataset of 32 rows, which is a rank's own."""
    more = {"samples": {"x": tuple(part)}, "size": 32, "earlier_draws": 5, **more}
    return epoch([part[place] for place in positions], number, indices=tuple(positions), **more)


def test_shares_of_an_array_in_which_neighbours_have_the_same_label_are_other_samples() -> None:
    """`data[rank::world_size]`, where each label is there for as many samples in a row as there are ranks."""
    order, labels = [(7 * n) % 32 for n in range(32)], [(n * n) % 5 for n in range(32)]

    def ranks(**more: Any) -> list[list[LoaderPass]]:
        given = {"indices": tuple(order), "size": 32, "labels": tuple(labels[place] for place in order), **more}
        return [
            [epoch([2 * place + rank for place in order], number, **given) for number in range(2)] for rank in range(2)
        ]

    assert not found(*ranks(base_rows=64))
    assert found(*ranks()) == found(*ranks(base_rows=32)) == [("DDP516", MADE)]
    assert are_disjoint_shares([of_rank[0] for of_rank in ranks(base_rows=64)])
    assert not are_disjoint_shares([ranks(base_rows=64)[0][0]] * 2)  # the same samples


FIRST, SECOND = range(0, 32, 2), range(1, 32, 2)


def test_a_sampler_that_splits_what_is_split_already() -> None:
    assert found([half(EVEN, FIRST)], [half(ODD, SECOND)]) == [("DDP519", MADE)]
    assert not found([half(EVEN, FIRST)], [half(ODD, SECOND, samples={"x": tuple(EVEN)})])  # the same data
    assert not found([half(EVEN, range(32))], [half(ODD, range(32))])  # all of its part
    assert not found([half(EVEN, FIRST)], [half(ODD, FIRST)])  # no split: half of its part each


def test_random_data_of_each_rank_is_no_part_of_the_same() -> None:
    def drawn(*draws: int, **more: Any) -> list[tuple[str, Location | None]]:
        parts = zip((EVEN, ODD), (FIRST, SECOND), draws, strict=True)
        return found(*([half(part, places, earlier_draws=n, **more)] for part, places, n in parts))

    assert not drawn(6, 7) and not drawn(0, 0)
    assert drawn(6, 7, base_rows=64) == [("DDP519", MADE)] and not drawn(6, 7, base_rows=40)  # held back


def test_a_sampler_of_torch_says_that_it_splits() -> None:
    shuffled = [3, 7, 1, 9, 11, 30, 22, 14], [4, 7, 1, 8, 12, 31, 21, 13]
    mine, theirs = (half(p, q, exhausted=False) for p, q in zip((EVEN, ODD), shuffled, strict=True))
    assert not found([mine], [theirs])
    assert found([replace(mine, replicas=2)], [replace(theirs, replicas=2)]) == [("DDP519", MADE)]
    assert not found([replace(mine, replicas=1)], [replace(theirs, replicas=1)])


LATE, EARLY = (*FIRST[:8], *SECOND[:8]), (*FIRST[8:], *SECOND[8:])


def two(part: Sequence[int], *orders: Sequence[int], **more: Any) -> list[LoaderPass]:
    return [half(part, order, number, **{"samples": {}, **more}) for number, order in enumerate(orders)]


def test_places_of_a_dataset_that_are_other_samples_on_each_rank() -> None:
    assert found(two(EVEN, FIRST, LATE), two(ODD, SECOND, EARLY)) == [("DDP519", MADE)]
    assert not found(two(EVEN, FIRST, FIRST), two(ODD, SECOND, SECOND))  # no place in common
    assert not found(two(range(32), FIRST, LATE), two(range(32), SECOND, EARLY))
    augmented = [half(range(100, 132), LATE, 1, samples={}), half(range(200, 232), EARLY, 1, samples={})]
    assert not found([half(EVEN, FIRST, samples={}), augmented[0]], [half(ODD, SECOND, samples={}), augmented[1]])
    labelled = [
        [replace(one, labels=tuple(n % 3 for n in one.indices)) for one in of_rank]
        for of_rank in (two(EVEN, FIRST, LATE), two(ODD, SECOND, EARLY))
    ]
    assert found(*labelled) == [("DDP516", MADE)]  # the same data, which each rank changes in its own way


@pytest.mark.parametrize(
    ("theirs", "more", "is_found"),
    [
        (range(100, 132), {}, True),
        (range(100, 132), {"draws": {1: 2}}, False),
        (range(100, 132), {"samples": {}}, False),  # other data, perhaps
        (range(100, 132), {"state": {"rank": 1}}, False),
    ],
)
def test_samples_that_a_rank_makes_in_its_own_way(theirs: Sequence[int], more: dict[str, Any], is_found: bool) -> None:
    texts: dict[str, Any] = {"samples": {"texts": tuple(range(32))}, "earlier_draws": 0}
    both = two(range(32), FIRST, LATE, **texts), two(theirs, SECOND, EARLY, **{**texts, **more})
    assert found(*both) == ([("DDP516", MADE)] if is_found else [])


def test_parts_of_ranks_whose_labels_come_in_the_same_order() -> None:
    held = {"contents": {"1": {place: place // 8 for place in range(32)}}}
    parts = [[half(part, range(32), samples={"x": tuple(part)}, **held)] for part in (EVEN, ODD)]
    assert not found(*parts)
    assert found(*([half(EVEN, range(32), samples={}, **held)] for _ in range(2))) == [("DDP505", MADE)]


def test_a_sampler_that_splits_subsets_of_the_ranks() -> None:
    def of(part: Sequence[int], positions: Sequence[int]) -> list[LoaderPass]:
        chosen = tuple(part[place] for place in positions)
        return [epoch(chosen, indices=chosen, subset=tuple(part), size=32, digest={"x": 1})]

    assert found(of(EVEN, range(0, 32, 2)), of(ODD, range(1, 32, 2))) == [("DDP519", MADE)]
    assert not found(of(EVEN, range(32)), of(ODD, range(32)))


def test_workers_that_keep_the_first_epoch() -> None:
    def two(part: Sequence[int], *, again: bool = True, told: bool = True, **more: Any) -> list[LoaderPass]:
        more = {"persistent": True, **more}
        later = part if again else tuple(reversed(part))
        return [epoch(part, state={"epoch": 5}, **more), epoch(later, 1, state={"epoch": 5 + told}, **more)]

    assert found(two(EVEN), two(ODD)) == [("DDP506", MADE)]
    assert not found(two(EVEN, again=False), two(ODD, again=False))
    assert not found(two(EVEN, told=False), two(ODD, told=False))  # no other order was asked for
    assert not found(two(EVEN, persistent=False), two(ODD, persistent=False))


def test_workers_of_a_set_that_is_shuffled_anew_give_the_same_sample_for_an_index() -> None:
    def two(begin: int, change: int = 0, ahead: int = 8, **more: Any) -> list[LoaderPass]:
        first, second = range(begin, begin + 32), range(begin + ahead, begin + ahead + 32)
        rows = [500 + index + change * (index == begin + 20) for index in second]
        plain = {"persistent": True, "size": 128, "persistent_at": STAY}
        later = {"indices": tuple(second), "state": {"stage": 2}, "outdated": True, **more}
        begun = epoch([500 + index for index in first], indices=tuple(first), state={"stage": 1}, **plain)
        return [begun, epoch(rows, 1, **plain, **later)]

    assert found(two(0), two(50)) == [("DDP506", STAY)]
    assert not found(two(0), two(50, change=1))  # one sample is another one
    assert not found(two(0), two(50, outdated=False))  # it is a number that no sample depends on
    assert not found(two(0), two(50, ahead=28))  # too few of the same indices


def test_the_order_of_every_epoch_is_told_at_the_head_of_its_loop() -> None:
    plain = {"size": 64, "indices": EVEN[::-1], "order": 5, "shuffles": True, "has_epoch": True, "epochs_at": HEAD}

    def twice(**more: Any) -> list[LoaderPass]:
        return [epoch((), number, **{**plain, **more}) for number in range(2)]

    assert found(twice(), twice()) == [("DDP506", HEAD)]
    assert found(*[twice(epoch_set_at=LINE)] * 2) == [("DDP506", LINE)]  # with the same epoch
    assert found(*[twice(has_epoch=False)] * 2) == [("DDP506", MADE)]
    (finding,) = judge_loaders([twice(), twice()])
    assert [*map(str, finding.related)] == [f"loop over the loader at {LINE}", f"RandomSampler made at {MADE}"]


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({}, "DDP519"),
        ({"num_samples": 16}, ""),  # it gives each rank no more
        ({"replicas": 0}, ""),  # another sampler, which may leave out what it likes
        ({"exhausted": False}, ""),
    ],
)
def test_a_framework_that_splits_what_a_sampler_has_split(more: dict[str, Any], code: str) -> None:
    def ranks(epochs: int) -> list[list[LoaderPass]]:
        given = {"size": 64, "replicas": 2, "num_samples": 32, "batches": 4, **more}

        def of_rank(rank: int) -> list[LoaderPass]:
            orders = [tuple((number + rank + 2 * n) % 64 for n in range(16)) for number in range(epochs)]
            return [epoch((), number, indices=order, **given) for number, order in enumerate(orders)]

        return [of_rank(0), of_rank(1)]

    assert found(*ranks(3)) == [(code, MADE)] * bool(code)
    assert not found(*ranks(1))  # an epoch that is resumed


def test_a_sample_that_is_dealt_to_several_ranks_is_no_duplicate() -> None:
    same = {"size": 32, "indices": tuple(range(0, 32, 2)), "contents": {"0": {0: 1, 2: 2}}}
    assert not found(*[[epoch((), total_size=96, **same)]] * 3)
    assert found(*[[epoch((), total_size=33, **same)]] * 3) == [("DDP505", MADE)]  # padded
    assert found(*[[epoch((), **same)]] * 3) == [("DDP505", MADE)]


def test_an_epoch_that_is_resumed_in_another_order() -> None:
    def one(order: Sequence[int], number: int, batches: int, skipped: int = 0, **more: Any) -> LoaderPass:
        given = tuple(order[: 4 * batches])
        more = {"indices": given, "batches": batches, "skipped": skipped, "exhausted": batches == 8, "size": 64, **more}
        return epoch((), number, **more)

    first, second, other = EVEN, EVEN[::-1], (*EVEN[7:], *EVEN[:7])

    def both(*passes: LoaderPass) -> list[tuple[str, Location | None]]:
        return found(passes, passes)

    whole, broken = one(first, 0, 8), one(second, 1, 5)
    assert both(whole, broken, one(other, 2, 8, 4)) == [("DDP506", MADE)]
    assert both(whole, broken, one(other, 0, 8, 4, loader=1)) == [("DDP506", MADE)]  # in another loop
    assert not both(whole, broken, one(second, 2, 8, 4))
    assert not both(whole, broken, one(other, 2, 8, 1))  # that may have been copied to a device, and be in use
    again, then = one(first, 2, 8, 4), (one(second, 3, 8), one(other, 3, 8))
    assert not both(whole, broken, again) and not both(whole, broken, again, then[0])  # of a checkpoint before that
    assert not both(whole, broken, one(second, 2, 8, 6))  # further than any has come: the run before it is not known
    assert not both(one(first, 0, 5, 2), one(second, 1, 5, 2))  # each epoch leaves out its first batches
    assert not both(whole, one(second, 1, 5, indices=()), one(other, 2, 8, 4))  # that may have been the epoch
    assert not both(whole, broken, one(other, 2, 8, 4, size=60))
    assert not found([whole, broken, one(other, 2, 8, 4)], [whole, broken, one(second, 2, 8, 4)])


FAR = Restored(32, 0, LINE)


@pytest.mark.parametrize(
    ("restored", "more", "is_found"),
    [
        (FAR, {}, True),
        (Restored(0, 2, LINE), {}, True),
        (Restored(8, 0, LINE), {"skipped": 8, "steps": 8}, False),  # in the middle of the first epoch
        (Restored(0, 1, LINE), {"skipped": 8}, False),  # by a number of the file, counted from 1
        (FAR, {"epoch": -1}, False),
        (FAR, {"shuffles": False}, False),
        (FAR, {"shuffles": False, "indices": EVEN[::-1]}, True),  # of a class of its own
        (FAR, {"trains": False}, False),
        (None, {}, False),
        (Restored(0, 0, LINE), {}, False),  # where it began
        (FAR, {"epoch": 2}, False),
    ],
)
def test_epochs_that_are_counted_from_0_again(restored: Restored | None, more: dict[str, Any], is_found: bool) -> None:
    plain = {"size": 128, "replicas": 2, "shuffles": True, "has_epoch": True, "epoch": 0, "batches": 16, "steps": 16}
    one = epoch((), 1, restored=restored, epoch_set_at=LINE, **{**plain, **more})
    evaluated = epoch((), trains=False, restored=restored)
    of_rank = [epoch((), 0), evaluated, one, epoch((), 2)]
    assert found(of_rank, of_rank) == ([("DDP506", LINE)] if is_found else [])
    assert not found(of_rank, [epoch((), 0)])
    knows_less = replace(one, restored=restored and replace(restored, steps=0, epochs=0))
    assert bool(found(of_rank, [knows_less])) is is_found  # the rank that has not taken the state itself


def test_the_same_samples_with_other_labels() -> None:
    def labelled(rows: Sequence[int], *numbers: int) -> list[LoaderPass]:
        return [
            epoch(part, n, labels=[numbers[row % 3] for row in part]) for n, part in enumerate((rows[:32], rows[32:]))
        ]

    mine, theirs = range(64), range(63, -1, -1)
    assert found(labelled(mine, 0, 1, 2), labelled(theirs, 2, 0, 1)) == [("DDP516", MADE)]
    assert not found(labelled(mine, 0, 1, 2), labelled(theirs, 0, 1, 2))
    assert not found(labelled(mine, 0, 1, 2), labelled(theirs, 5, 5, 5))  # another task


def test_the_rows_of_a_batch_and_what_a_dataset_is_a_part_of() -> None:
    rows = SampleRows()
    rows.note((torch.arange(12.0).reshape(4, 3), torch.tensor([1, 0, 1, 1])), 4)
    assert len(set(rows.rows)) == 4 and len(set(rows.labels)) == 2
    rows.note(["a text", 3], 2)
    assert not rows.rows and not rows.labels
    boxes = [torch.ones(n, 4) for n in (3, 1)]
    for batch in ([{"x": boxes[0], "id": 7}, {"x": boxes[1], "id": 9}], (boxes, (7, 9))):  # as detectors have them
        rows = SampleRows()
        rows.note(batch, 2)
        assert not rows.rows

    class Data:
        def __init__(self, x: object) -> None:
            self.x = x

    whole = torch.randn(8, 3)
    held = (whole, whole[::2], whole[:, :2], whole.numpy()[1:4], ["a", "b"], [1, 2])
    assert [length_before_slicing(Data(one)) for one in held] == [0, 8, 0, 8, -1, 0]


def test_what_a_dataset_holds_of_its_samples(tmp_path: Path) -> None:
    x = torch.randn(8, 3)
    pairs = [(x[n].clone(), n) for n in range(8)]

    class Data(torch.utils.data.Dataset[object]):
        def __init__(self, *held: object) -> None:
            self.held, self.first = held, held[0]

    def fingerprints(dataset: object, size: int = 8) -> dict[str, tuple[int, ...]]:
        return first_samples(dataset, size)[0]

    def names(*held: object) -> list[str]:
        return list(fingerprints(Data(*held)))

    assert names(x, x.numpy(), range(8)) == ["held.0", "held.1", "held.2", "first.0"]
    assert names(pairs, [0, 1] * 4, ["a"] * 8, [object()] * 8, x[:4]) == ["held.0", "first.0"]
    assert names(Data(pairs)) == ["held.0held.0", "held.0first.0", "first.0held.0", "first.0first.0"]
    assert set(fingerprints(x.tolist())) == {".0"} and not fingerprints(Data(x), 4)
    assert fingerprints(Data(x))["first.0"] == fingerprints(Data(x.clone()))["first.0"]
    part = torch.utils.data.Subset(torch.utils.data.TensorDataset(x), [*range(7, -1, -1)])  # its indices are no samples
    assert list(fingerprints(part)) == ["tensors.0"] and not fingerprints(
        torch.utils.data.Subset(Data(object()), [0] * 8)
    )
    assert not set(fingerprints(Data(x + 1))["first.0"]) & set(fingerprints(Data(x))["first.0"])
    photos = [tmp_path / f"{number}.png" for number in range(8)]
    for number, photo in enumerate(photos):
        photo.write_bytes(bytes(number))
    held = (x, torch.randn(8, 2, 4), photos, list(map(str, photos)), [(str(photo), 0) for photo in photos])
    assert [first_samples(Data(one), 8)[1] for one in (*held, [f"{one}" for one in range(8)])] == [
        *(False, True, True, True, True, False)
    ]
    before = fingerprints(Data(photos))
    photos[3].write_bytes(b"other")
    assert fingerprints(Data(photos)) != before
