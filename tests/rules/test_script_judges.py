"""What `ddpcheck run` finds around the wrappers, judged on evidence: a fault and its healthy twin each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpcheck.findings.evidence.loop import ModuleChanged, OwnRowsReinserted
from ddpcheck.findings.evidence.modules import ModuleDescription
from ddpcheck.findings.evidence.script import (
    DerivedTable,
    FileUsed,
    GradientsClipped,
    GradientsZeroed,
    Inputs,
    LoaderPass,
    LocalModel,
    LossDifferentiated,
    MetricUsed,
    NumberReduced,
    OptimizerEnd,
    OptimizerStep,
    ReducedInPlace,
    ScaledTerm,
)
from ddpcheck.findings.evidence.steps import DdpStepEvidence
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.rules import Severity
from ddpcheck.findings.wording import make_finding
from ddpcheck.gather.state.fingerprints import fingerprints
from ddpcheck.gather.steps.gradient_distance import sketches
from ddpcheck.rules.data.ddp505_duplicate_data import judge_equal_gradients, judge_inputs
from ddpcheck.rules.data.ddp516_rank_dependent_program_data import judge_tables
from ddpcheck.rules.data.loaders import judge_loaders
from ddpcheck.rules.gradients.ddp301_not_synchronised import judge_scaled_by_hand, judge_step_gradients
from ddpcheck.rules.gradients.ddp310_gradient_changed_before_reduction import judge_clips
from ddpcheck.rules.gradients.ddp508_step_skipped_on_a_rank import judge_pace
from ddpcheck.rules.gradients.ddp517_gradients_discarded import MIN_REPEATS, judge_zeroed
from ddpcheck.rules.gradients.ddp521_shard_as_whole import judge_parts_reduced, judge_shards_saved
from ddpcheck.rules.gradients.wrappers import add_later_buffers, collect_later_buffers
from ddpcheck.rules.loss.ddp303_scaled_gradient import judge_rescaled, judge_second_sum, judge_sums
from ddpcheck.rules.loss.ddp309_collective_without_gradient import judge_reduced_in_place
from ddpcheck.rules.optimizers.ddp223_optimizer_options import judge_optimizer_options, judge_params
from ddpcheck.rules.optimizers.ddp504_stale_optimizer import judge_foreign, name_wrapped_module
from ddpcheck.rules.optimizers.ddp518_unreduced_metric import judge_metrics
from ddpcheck.rules.optimizers.script_optimizers import judge_shard_states, judge_unsynchronized, reduces_in_step
from ddpcheck.rules.program.ddp512_checkpoint_race import judge_files
from ddpcheck.rules.program.restored_state import locate_restored_file
from ddpcheck.rules.registry import judge_view
from ddpcheck.rules.replicas.copies import judge_copied_states
from ddpcheck.rules.replicas.ddp306_state_diverged import judge_optimizer_state
from ddpcheck.stream.entries import ReplicaCaptured, Sketch
from ddpcheck.stream.rank_report import ReplicaState
from ddpcheck.trace.captured import without_later_equal, without_rounding
from ddpcheck.trace.loop import GradientChanges, Loop
from ddpcheck.trace.losses import Losses
from ddpcheck.trace.optimizers import Metrics
from ddpcheck.trace.program import Program
from ddpcheck.trace.unwrapped_params import are_close, are_near
from ddpcheck.trace.view import NotRecorded
from tests.reports import assert_says, codes

LINE = Location("train.py", 30)


def test_buffers_that_differ_later_than_the_ones_that_were_told() -> None:
    def differing(*names: str, code: str = "DDP214") -> Finding:
        return Finding(code, names, "They differ.", Severity.WARNING)

    told, more = differing("moe.load"), dict[str, int]()
    collect_later_buffers(more, [told], [told], 0)
    assert add_later_buffers(told, more) == told
    for step in (1, 2):
        collect_later_buffers(
            more, [told], [differing("moe.load", "moe.bias"), differing("0.weight", code="DDP306")], step
        )
    assert add_later_buffers(told, more).evidence == ("after step 1, moe.bias differs too",)
    assert add_later_buffers(differing("0.weight", code="DDP306"), more).evidence == ()


def captured_of(*values: torch.Tensor, step: int = 0, sketched: bool = True) -> list[ReplicaCaptured]:
    found = []
    for rank, value in enumerate(values):
        seen = DdpStepEvidence(
            rank, step, parameters=fingerprints([("w", value)]), buffers={"load": rank, "bias": rank}
        )
        numbers = sketches({"w": value}) if sketched else {}
        state = ReplicaState(ModuleDescription(), seen)
        found.append(ReplicaCaptured(0, step, state, values={n: Sketch("f", one) for n, one in numbers.items()}))
    return found


def test_parameters_that_are_moved_and_taken_back_differ_by_rounding_alone() -> None:
    start = torch.randn(4096, generator=torch.Generator().manual_seed(0))

    def parted(everyone: Sequence[ReplicaCaptured]) -> bool:
        return len({one.state.values.parameters["w"] for one in without_rounding(everyone)}) > 1

    own = [torch.randn(4096, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    back = [start + 0.05 * move - 0.05 * move for move in own]
    assert not parted(captured_of(*back)) and parted(captured_of(*back, sketched=False))
    assert parted(captured_of(*(start + 1e-4 * move for move in own)))
    assert parted(captured_of(start, start.roll(1)))  # of the same size
    walked = [start, start * (1 + 1e-5)]
    assert parted(captured_of(*walked)) and not parted(captured_of(*walked, step=400))  # what rounding adds up to


def test_buffers_that_are_alike_when_the_next_step_begins() -> None:
    everyone = captured_of(torch.ones(4), torch.ones(4))
    later = [{"load": 0, "bias": rank} for rank in range(2)]
    assert [one.state.values.buffers for one in without_later_equal(everyone, later)] == [{"bias": 0}, {"bias": 1}]
    assert without_later_equal(everyone, later[:1]) == everyone  # of one rank, it is not known


# Data

OTHER_LINE = Location("bar.py", 4)
EVEN, ODD, ALL = range(0, 64, 2), range(1, 64, 2), range(64)
BACK = tuple(reversed(ALL))
OTHER_DATA: dict[str, Any] = {"digest": {}, "contents": {"0": {0: 1, 1: 2, 2: 3, 3: 4}}}
SAME_ROWS: dict[str, Any] = {"digest": {}, "contents": {"0": {0: 9, 1: 8, 2: 7, 3: 6}}}
HOLDS: dict[str, Any] = {"dataset_draws": (1, 1)}
CUT: dict[str, Any] = {"exhausted": False, "batches": 4}


def epoch(indices: Sequence[int], *, number: int = 0, order: int = 1, **more: Any) -> LoaderPass:
    plain = LoaderPass(0, number, LINE, "Photos", 64, {"x": 7}, 8, 4, "DistributedSampler", batches=8, exhausted=True)
    return replace(plain, **{"trains": True, "order": order, "indices": tuple(indices), **more})


def epochs(*parts: Sequence[int], **more: Any) -> list[LoaderPass]:
    """Passes of one rank, each in an order of its own; `more` is of those after the first."""
    return [epoch(part, number=n, order=n + 1, **(more if n else {})) for n, part in enumerate(parts)]


def in_order(*orders: int, **more: Any) -> list[list[LoaderPass]]:
    ranks = tuple(reversed(EVEN)), tuple(reversed(ODD))
    return [[epoch(part, number=n, order=order, **more) for n, order in enumerate(orders)] for part in ranks]


def endless(rank: int, seed: int) -> list[LoaderPass]:
    random = Random(seed)
    order = [index for _ in range(7) for index in random.sample(range(64), 64)]
    return [epoch(order[rank::2][:112], exhausted=False, batches=28, expected=-1)]


def own_rows(*orders: Sequence[int], drawn: bool = True, **more: Any) -> list[list[LoaderPass]]:
    more = {"samples": {"x.0": (1, 2)}, "holds_samples": True, **more}
    contents = [OTHER_DATA | {"draws": {1: 2} if drawn else {}}, SAME_ROWS | {"draws": {5: 6} if drawn else {}}]
    return [[epoch(order, **more, **of_rank)] for order, of_rank in zip(orders, contents, strict=True)]


THRICE = [index for index in Random(0).sample(range(64), 64) for _ in range(3)]
SHARED, OWN = {1: 2, 2: 3}, {7: 8, 8: 9}


@pytest.mark.parametrize(
    ("passes", "words"),
    [
        ([[epoch(EVEN)], [epoch(ODD)]], ""),
        ([[epoch(EVEN)], [epoch(EVEN)]], "DDP505"),
        ([[epoch(ALL, trains=False)], [epoch(ALL, trains=False)]], ""),  # evaluation
        ([[epoch(ALL, replaces=True)], [epoch(BACK, replaces=True)]], ""),
        ([[epoch(ALL, **CUT)], [epoch(BACK, **CUT)]], ""),
        ([[epoch(ALL, exhausted=False, expected=8)], [epoch(BACK, exhausted=False, expected=8)]], "DDP505"),
        ([[epoch(ALL, digest={"x": 1})], [epoch(ALL, digest={"x": 2})]], ""),  # a file of each rank's own
        ([[epoch(ALL, **SAME_ROWS)], [epoch(ALL, **OTHER_DATA)]], ""),
        ([[epoch(range(32))], [epoch((*range(32, 63), 0))]], ""),  # padded
        ([[epoch((*range(26), *range(6)))], [epoch((*range(8, 34), *range(8, 14)))]], ""),  # each drawn anew
        (in_order(1, 1, 1, shuffles=True), "DDP506"),
        (in_order(1, 2, 3, shuffles=True), ""),
        ([epochs(range(16), range(16)), epochs(range(16, 32), range(16, 32))], "DDP519"),
        ([epochs(range(16), range(32, 48)), epochs(range(16, 32), range(48, 64))], ""),  # others each time
        ([endless(0, 0), endless(1, 0)], ""),
        ([[epoch(THRICE[rank::4][:32])] for rank in range(4)], ""),  # each augmented on another rank
        ([epochs(EVEN, range(32), **CUT), epochs(ODD, range(16, 48))], ""),
        ([[epoch(EVEN, subset=tuple(range(48)))], [epoch(EVEN, subset=tuple(range(16, 64)))]], "DDP516"),
        ([[epoch(EVEN, subset=tuple(EVEN))], [epoch(ODD, subset=tuple(ODD))]], ""),  # a shard each
        ([[epoch(EVEN, draws=SHARED)], [epoch(ODD, draws=SHARED)]], "DDP510"),
        ([[epoch(EVEN, draws=SHARED)], [epoch(ODD, draws=OWN)]], ""),
        ([[epoch(part, draws={1: n}, **HOLDS)] for part, n in ((EVEN, 2), (ODD, 3))], ""),  # seeded by sample
        (own_rows(ALL, ALL), "DDP505"),
        (own_rows(ALL, ALL, drawn=False), ""),
        ([[epoch(part)] for part in (EVEN, EVEN, ODD, ODD)], "of ranks () ... likewise ranks 2 and 3, with different"),
        (
            [[epoch(order, epoch=n, epoch_set_at=OTHER_LINE)] for order, n in ((ALL, 3), (BACK, 0))],
            "at bar.py:4 ... in other epochs ... rank 0: 3; rank 1: 0 ... Tell the sampler the same epoch on",
        ),
        ([endless(0, 0), endless(1, 1)], "DDP505 warning ... of the first 32 samples that each takes"),
        ([epochs(EVEN, range(32)), epochs(ODD, range(16, 48))], "DDP505 warning ... share 16 of the 32 samples"),
        ([[epoch(part, draws={1: 2}, **HOLDS)] for part in (EVEN, ODD)], "DDP510 ... that the dataset holds"),
        (  # samples of other sizes take more or fewer numbers, from the same state on
            [[epoch(part, draws={1: n, 2: n + 1}, worker_seed=7, workers=2)] for part, n in ((EVEN, 5), (ODD, 6))],
            "DDP510 ... 2 of 2 states of global random generators",
        ),
        ([[epoch(part, draws=SHARED, worker_seed=-1, workers=2)] for part in (EVEN, ODD)], "DDP510 ... worker_init_fn"),
        ([[epoch(part)] for part in (EVEN, ODD, ODD)], "DDP505 error ... of ranks (1, 2)"),
        ([[epoch(EVEN, location=OTHER_LINE)], [epoch(EVEN)]], "DDP505"),  # one rank shows its progress
        ([epochs(EVEN, range(32)), epochs(ODD, range(32, 64))], ""),
        ([epochs(EVEN, range(32), EVEN), epochs(ODD, range(16, 48), ODD)], ""),
        (own_rows(ALL, ALL, holds_samples=False), ""),  # numbers from which each rank makes its own
    ],
)
def test_samples_that_ranks_share(passes: list[list[LoaderPass]], words: str) -> None:
    assert_says(judge_loaders(passes), words)


def test_loaders_that_one_rank_alone_goes_through_do_not_shift_those_of_training() -> None:
    first, second = (
        [epoch(range(rank, 64 * (n + 1), 2), size=64 * (n + 1), loader=n) for n in range(2)] for rank in range(2)
    )
    validation = epoch(range(9), trains=False, loader=1, location=OTHER_LINE)
    first = [first[0], validation, replace(first[1], loader=2)]
    assert judge_loaders([first, second]) == []
    again = [first, [second[0], replace(first[-1], loader=1)]]
    assert codes(judge_loaders(again)) == ["DDP505"]  # the second one is compared with the second one


def inputs(*samples: Any) -> list[Inputs]:
    return [Inputs(0, step, one if type(one) is tuple else (one, -one), LINE) for step, one in enumerate(samples)]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([inputs((1, 2), (3, 4), (5, 6)), inputs((2, 1), (4, 3), (6, 5))], "DDP505"),
        ([inputs((1, 2), (3, 4), (5, 6)), inputs((1, 2), (3, 4), (5, 7))], ""),
        ([inputs((1,), (1,), (1,))] * 2, ""),  # a grid that is always the same
        ([inputs(1, 2, 8, 9), inputs(1, 2, 3, 4)], ""),  # too few to tell
        ([inputs(7, 8, 9, 10), *[inputs(1, 2, 3, 4)] * 3], "error ... of ranks (1, 2, 3)"),  # the first evaluates
        ([*[inputs(1, 2, 3), inputs(7, 8, 9)] * 2, inputs(4, 5, 6)], "(0, 1, 2, 3) ... likewise ranks 1 and 3"),
        ([inputs(1, 2, 3, 8), inputs(1, 2, 3, 4)], "warning ... of ranks () ... from step 3 on they differ"),
        ([inputs(7, 8, 1, 2, 3), inputs(5, 6, 1, 2, 3)], "warning ... until step 1 they differ ... checkpoint"),
        ([inputs(1, 2, 3), inputs(7, 8, 9)], ""),
        ([inputs(7, 8, 1, 1, 1), inputs(5, 6, 1, 1, 1)], ""),  # one batch, again and again
    ],
)
def test_the_inputs_of_a_wrapper(ranks: list[list[Inputs]], words: str) -> None:
    assert_says(judge_inputs(dict(enumerate(ranks))), words)


def tables(name: str, *ranks: dict[str, str]) -> list[list[DerivedTable]]:
    return [[DerivedTable(name, values, LINE)] for values in ranks]


SWAPPED = {"'a'": "0", "'b'": "1"}, {"'a'": "1", "'b'": "0"}


@pytest.mark.parametrize(
    ("mine", "theirs", "found"),
    [
        ({"'a'": "0", "'b'": "1"}, {"'a'": "1", "'b'": "0"}, ["DDP516"]),
        ({"'a'": "0", "'b'": "1"}, {"'a'": "0", "'b'": "1"}, []),
        ({"'a'": "0", "'b'": "1"}, {"'a'": "0", "'c'": "1"}, []),  # the files of each rank
        ({"0": "41", "1": "43"}, {"0": "43", "1": "41"}, []),  # counts of what two ranks share
        ({"'a'": "7", "'b'": "8", "'c'": "8"}, {"'a'": "8", "'b'": "8", "'c'": "7"}, []),
        ({"'my_rank'": "0", "'peer_rank'": "1"}, {"'my_rank'": "1", "'peer_rank'": "0"}, []),
        ({"'a'": "'cuda:0'", "'b'": "'cuda:1'"}, {"'a'": "'cuda:1'", "'b'": "'cuda:0'"}, []),
        ({"0": "2", "1": "0", "2": "1", "3": "3"}, {"0": "0", "1": "3", "2": "1", "3": "2"}, []),  # a rank's own order
        ({"'a'": "0", "'b'": "1"}, {"'a'": "0", "'b'": "5"}, []),  # measured
        ({"'a'": "0", "'b'": "1", "'c'": "1"}, {"'a'": "1", "'b'": "0", "'c'": "1"}, ["DDP516"]),  # held out of two
        ({"'main'": "True", "'helper'": "False"}, {"'main'": "False", "'helper'": "True"}, []),
        ({"'name'": "'x'", "'a'": "0", "'b'": "1"}, {"'name'": "'x'", "'a'": "1", "'b'": "0"}, []),  # options
    ],
)
def test_tables_that_ranks_derive(mine: dict[str, str], theirs: dict[str, str], found: list[str]) -> None:
    assert codes(judge_tables(tables("numbers", mine, theirs))) == found


def test_a_table_of_ranks_is_known_by_its_name_and_one_that_has_two_names_is_told_once() -> None:
    assert not judge_tables(tables("trainer.peers", *SWAPPED)) and judge_tables(tables("self.labels", *SWAPPED))
    held = zip(tables("numbers", *SWAPPED), tables("data.numbers", *SWAPPED), strict=True)
    assert [finding.subjects for finding in judge_tables([[*a, *b] for a, b in held])] == [("numbers", "data.numbers")]


def test_a_list_of_texts_in_the_order_of_a_set() -> None:
    ranks = {"'a'": "0", "'b'": "1", "'c'": "2"}, {"'a'": "1", "'b'": "2", "'c'": "0"}
    held = tables("Photos.classes.index()", *ranks)
    assert_says(judge_tables(held), "DDP516 ... Photos.classes has the same 3 texts")
    rows, labels = tuple(range(50, 66)), (0, 1, 2, 1) * 4
    same = [[epoch(ALL, rows=rows, labels=labels)]] * 2
    assert not judge_tables(held, same)  # no label is made of it
    assert judge_tables(held, [same[0], [epoch(ALL, rows=rows, labels=(*labels[1:], 0))]])
    assert judge_tables(held, [same[0], [epoch(ALL, rows=tuple(range(16)), labels=labels)]])  # other samples


# Optimizers


def step(count: int = 0, **more: Any) -> OptimizerStep:
    plain = OptimizerStep(0, count, {"class": "SGD", "group 0 lr": "0.1"}, LINE, ("0/w",), count + 1, averaged=True)
    return replace(plain, **more)


LOADS = Location("train.py", 27)
LOWER = {"class": "SGD", "group 0 lr": "0.01"}
NUMBERED = [step(options={"class": "Muon", "group 0 rank": str(rank)}) for rank in range(3)]
BY_HAND = [step(4, reductions=-1, collectives=9), step(4, reductions=-1, collectives=8, options=LOWER)]
RESUMED = step(initial_rates="a", restored_at=LOADS, options=LOWER)
"""Its rate has come down before."""


@pytest.mark.parametrize(
    ("steps", "code", "line", "ranks"),
    [
        ([[step(), step()], [step(4), step(4, options=LOWER)]], "DDP507", LINE, (1,)),  # a schedule
        ([[step(), step(options=LOWER)]], "DDP223", LINE, (1,)),
        ([[replace(step(), restored_at=LOADS), step(options=LOWER)]], "DDP223", LOADS, (0,)),
        ([[RESUMED, step(initial_rates="a")]], "DDP507", LOADS, (0,)),
        ([[step(), replace(step(options=LOWER), reductions=2)]], "", None, ()),  # it is its second batch
        ([NUMBERED], "", None, ()),
        ([[step(), step()], BY_HAND], "DDP508", LINE, ()),  # ranks in other steps of a loop that reduces by hand
        ([[step(), step()], [step(4, options=LOWER), step(4, options=LOWER)]], "", None, ()),
    ],
)
def test_options_of_optimizers(steps: Any, code: str, line: Location | None, ranks: tuple[int, ...]) -> None:
    findings = judge_optimizer_options(steps)
    assert [(one.code, one.location, one.ranks) for one in findings] == [(code, line, ranks)] * bool(code)
    if line == LOADS:
        assert "Load" in findings[0].fix if code == "DDP507" else "on rank 0 only" in findings[0].evidence[-1]


def test_ranks_that_step_on_other_parameters_of_a_wrapper() -> None:
    apart = [step(ddp_params=("0/a", "0/b"), built_at=LINE), step(ddp_params=("0/b", "0/c"))]
    assert_says(judge_params(apart), "DDP223 ... at train.py:30 ... its parameters: rank 0: a; rank 1: c")
    assert judge_params([step(ddp_params=("0/a", "0/b")), step(ddp_params=("0/b", "0/a"))]) == []
    assert judge_params([step(ddp_params=("0/a",)), step(ddp_params=())]) == []


def test_a_rank_that_skips_a_step() -> None:
    assert_says(judge_pace([[step(4, reductions=5), step(4, reductions=6)]], []), "DDP508 ... (1,) ... at train.py:30")
    left_out = judge_pace([[step(4, reductions=5, left_out_at=(LOADS,)), step(4, reductions=6)]], [])
    assert_says(left_out, f"DDP508 ... at train.py:27 ... this line decides if the step at {LINE} is made")
    ended = judge_pace([[step(4), step(4)]], [OptimizerEnd(0, 9, 10), OptimizerEnd(0, 10, 10)])
    assert_says(ended, "DDP508 ... of ranks (0,)")
    assert not judge_pace([[step(4), step(4)]], [OptimizerEnd(0, 10, 10)] * 2)


def test_gradients_that_a_rank_changes_before_the_step() -> None:
    here, there = step(norms={"0/w": 1.0}), step(norms={"0/w": 0.1})
    changed = judge_step_gradients([[replace(one, changed_at=Location("train.py", 5)) for one in (here, there)]])
    assert_says(changed, "DDP301 ... at train.py:5 ... | optimizer steps at train.py:30 |")
    for others in (
        [here, step(norms={"0/w": 1.0 + 1e-6})],
        [here, replace(there, averaged=False)],  # the rank's own, under no_sync
        [here, replace(there, reductions=3)],  # DDP508
        [replace(one, unaveraged=("0/w",)) for one in (here, there)],  # DDP501
        [here, step(norms={"0/w": float("inf")})],  # a gradient scaler skips it
    ):
        assert not judge_step_gradients([others])


def clips(*norms: float, steps: int = 1, limits: tuple[float, ...] = (0.5, 0.5), **more: Any) -> Any:
    return [
        [GradientsClipped(count, norm, LINE, count, limit=limit, **more) for count in range(steps)]
        for norm, limit in zip(norms, limits, strict=True)
    ]


@pytest.mark.parametrize(
    ("clipped", "at_clip"),
    [
        (clips(3.0, 3.0, limits=(0.5, 0.7)), True),
        (clips(3.0, 3.0), False),  # so something else has changed them
        (clips(3.0, 4.0, limits=(0.5, 0.7)), False),  # they differed before
        (clips(0.3, 0.3, limits=(0.5, 0.7)), False),  # nothing is clipped
        (clips(3.0, 4.0, steps=3, of_parts=True), True),  # by a norm of what each rank has of its own
        (clips(3.0, 3.0, steps=3, of_parts=True), False),
        (clips(3.0, 3.0, limits=(0.0, 0.0)), False),  # not known
    ],
)
def test_a_clip_to_a_limit_or_by_a_norm_of_each_rank(clipped: list[list[GradientsClipped]], at_clip: bool) -> None:
    steps = [step(norms={"0/w": norm}, location=OTHER_LINE) for norm in (0.5, 0.7)]
    (found,) = judge_step_gradients([steps], clipped)
    assert (found.code, found.location == LINE) == ("DDP301", at_clip)
    if clipped[0][0].of_parts:
        assert not judge_clips(GradientChanges(clipped, steps=[[(step(), step())] * 3]))  # they differ by right


def test_optimizer_state_that_differs() -> None:
    here, there = step(states={"0/w: momentum_buffer": 1.0}), step(states={"0/w: momentum_buffer": 2.0})
    loaded = [replace(one, restored_at=LOADS) for one in (here, there)]
    reordered = [replace(here, ddp_params=("a", "b")), replace(there, ddp_params=("b", "a"))]
    for steps, words in (
        ([[here, there]], "DDP306"),
        ([[here, step()]], "DDP306"),  # loaded on one rank
        ([[loaded[0], step()]], "of ranks (0,) at train.py:27"),
        ([loaded], "of ranks () at train.py:30"),
        ([[here, here], [here, there]], "| it did not differ in step 0 ... work.wait()"),
        ([reordered], "its parameters in the same order ... rank 1 holds b and a"),
        ([[here, here]], ""),
        ([[here, step(states={"0/v: momentum_buffer": 2.0})]], ""),  # sharded
    ):
        assert_says(judge_optimizer_state(steps), words)


def alone(count: int, value: int, gradient: float, name: str = "Head.w", **more: Any) -> OptimizerStep:
    plain = step(count, ddp_params=(), reductions=-1, local_params={name: value}, gradients={name: [gradient]})
    return replace(plain, **{"marks": (value,), **more})


def unsynchronized(steps: Any, *, wrapped: bool = False, **more: Any) -> list[Finding]:
    return list(judge_unsynchronized(steps, [], wrapped=wrapped, **more))


APART = [[(0, 1, 2.0), (1, 2, 3.0)], [(0, 1, 5.0), (1, 3, 6.0)]]
"""Steps of two ranks, each by its own gradient: the number of the step, the value and the gradient."""


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        (APART, ["DDP501"]),
        ([[(0, 1, 2.0), (1, 2, 3.0)], [(0, 1, 2.0), (1, 2, 3.0)]], []),  # averaged by hand
        ([[(0, 1, 2.0), (1, 2, 3.0)], [(0, 9, 2.0), (1, 8, 3.0)]], ["DDP208"]),
        ([[(0, 1, 0.0), (1, 2, 0.0)], [(0, 9, 0.0), (1, 8, 0.0)]], []),  # it has none at all
        ([[(0, 1, 2.0), (1, 2, 3.0)], [(0, 9, 4.0), (1, 8, 7.0)]], []),  # a model of each rank's own
        ([[*APART[0], (2, 4, 1.0), (3, 5, 1.0)], [*APART[1], (2, 4, 2.0), (3, 6, 2.0)]], []),
    ],
)
def test_parameters_in_no_wrapper(ranks: list[list[tuple[int, int, float]]], found: list[str]) -> None:
    steps = [[alone(*one) for one in at] for at in zip(*ranks, strict=True)]
    assert codes(unsynchronized(steps)) == found


@pytest.mark.parametrize(("after", "found"), [(16, ["DDP306"]), (6, [])])
def test_parameters_that_are_averaged_now_and_then_until_they_are_not(after: int, found: list[str]) -> None:
    def of_rank(rank: int) -> list[OptimizerStep]:
        marks = tuple(n if n % 4 == 0 and n <= 8 else 100 * rank + n for n in range(8 + after))
        return [alone(0, 1, 2.0, marks=()), alone(1, 10 + rank, 3.0 + rank, marks=marks)]

    assert codes(unsynchronized(list(zip(of_rank(0), of_rank(1), strict=True)))) == found


def test_parameters_that_a_wrapper_does_not_know_of_are_told_by_their_names_in_it() -> None:
    steps = [[alone(*one, name="0/head.w") for one in at] for at in zip(*APART, strict=True)]
    assert_says(unsynchronized(steps, wrapped=True), "DDP503 ... ('head.w',)")


def test_what_ranks_add_to_gradients_that_are_reduced_is_not_told_as_no_reduction() -> None:
    steps = [[alone(0, 1, 2.0), alone(0, 1, 5.0)], [alone(1, n, 1.0 + n, collectives=5) for n in (2, 3)]]
    assert_says(unsynchronized(steps), "after the collectives of a step")


def test_what_an_optimizer_that_reduces_in_its_step_leaves_out_is_told_as_that() -> None:
    def steps_of(*values: tuple[int, int]) -> list[list[OptimizerStep]]:
        return [[alone(n, at[rank], 2.0 + rank) for rank in range(2)] for n, at in enumerate(values)]

    reduced, own, idle = steps_of((1, 1), (2, 2)), steps_of((1, 1), (2, 3)), steps_of((1, 1), (1, 1))
    assert [reduces_in_step(one) for one in (reduced, own, idle, [])] == [True, False, False, False]
    assert codes(unsynchronized(reduced, in_step=True)) == []
    (found,) = unsynchronized(own, in_step=True)
    assert found.code == "DDP501" and found.fix.startswith("Have the step reduce every gradient")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (lambda rank, count: count, ["DDP505"]),
        (lambda rank, count: 10 * rank + count, []),
        (lambda rank, count: rank if count == 1 else count, []),  # in one step they are not
        (lambda rank, count: 7, []),  # nothing changes
    ],
)
def test_gradients_that_are_the_same_before_they_are_averaged(given: Any, found: list[str]) -> None:
    steps = [[alone(n, n, 1.0, allreduce_inputs=(given(rank, n),)) for rank in range(2)] for n in range(4)]
    assert codes(judge_equal_gradients(steps)) == found
    assert not judge_equal_gradients(steps[:2])


def test_gradients_of_parts_that_are_reduced_as_if_they_were_replicas() -> None:
    own = [alone(n, n, 1.0, own_reduced=("t.0.weight",), own_reduced_at=OTHER_LINE) for n in range(3)]
    assert_says(judge_parts_reduced([[one, one] for one in own]), "DDP521 ... ('t.0.weight',) ... at bar.py:4")
    assert not judge_parts_reduced([[one, alone(1, 1, 1.0)] for one in own])


def test_gradients_that_are_averaged_by_hand_and_clipped_on_one_rank() -> None:
    def of_ranks(factor: float, *, turned: float = 1.0) -> tuple[OptimizerStep, OptimizerStep]:
        gradients = {"body": [2.0, -1.0], "head": [1.0, 4.0]}
        scaled = {name: [factor * a, turned * factor * b] for name, (a, b) in gradients.items()}
        both = [alone(1, 1, 1.0, local_params=dict.fromkeys(gradients, 1), gradients=g) for g in (gradients, scaled)]
        return both[0], both[1]

    (found,) = judge_scaled_by_hand([of_ranks(1.0), of_ranks(0.2)])
    assert (found.code, found.subjects, found.location) == ("DDP301", ("body", "head"), LINE)
    clips = [[GradientsClipped(0, 5.0, OTHER_LINE, 1, limit=limit)] for limit in (9.0, 1.0)]
    assert judge_scaled_by_hand([of_ranks(0.2)], clips)[0].location == OTHER_LINE
    written = [replace(one, changed_at=OTHER_LINE) for one in of_ranks(0.2)]
    assert judge_scaled_by_hand([written])[0].location == OTHER_LINE
    assert not judge_scaled_by_hand([of_ranks(1.0)]) and not judge_scaled_by_hand([of_ranks(0.2, turned=3.0)])


def test_a_parameter_that_is_never_averaged_where_the_others_are_now_and_then() -> None:
    def looks_at(rank: int) -> list[OptimizerStep]:
        values = enumerate([(0, 0), (1 + rank, 1 + rank), (3, 4 + rank), (5 + rank, 7 + rank)])
        gradients = {name: [1.0 + rank] for name in "ab"}
        return [alone(count, b, 0.0, local_params={"a": a, "b": b}, gradients=gradients) for count, (a, b) in values]

    findings = unsynchronized(list(zip(looks_at(0), looks_at(1), strict=True)))
    assert_says(findings, "('b',) ... is never averaged, while the others are")


def test_gradients_that_are_reduced_after_the_step_that_uses_them() -> None:
    late = Location("train.py", 32)
    steps = [[alone(0, 1, 2.0), alone(0, 1, 5.0)], [alone(1, n, 1.0 + n, late_sum_at=late) for n in (2, 3)]]
    for wrapped in (False, True):
        findings = unsynchronized(steps, wrapped=wrapped)
        assert_says(findings, "DDP501 ... at train.py:32 ... after the optimizer's step")


def test_an_optimizer_of_tensors_that_no_module_has() -> None:
    steps = [[step(loose_params=("? 0 (4,)",), built_at=OTHER_LINE), step(built_at=OTHER_LINE)]]
    assert_says(judge_foreign(steps, {"0/w": False}, set()), "DDP504 ... at bar.py:4")
    assert not judge_foreign(steps, {"0/w": True}, set())  # master copies, written back
    assert not judge_foreign([[step(), step()]], {"0/w": False}, set())


def test_which_of_two_models_it_is_that_never_moves() -> None:
    made = [SimpleNamespace(module=name, location=f"train.py:{line}") for name, line in (("Net", 4), ("Other", 5))]
    wrappers = [SimpleNamespace(number=number, made=one) for number, one in enumerate(made)]
    facts: Any = SimpleNamespace(wrappers=wrappers, moved={"0/w": True, "1/w": False})
    steps = [[step(loose_params=("? 0 (4,)",)), step()]]
    (found,) = name_wrapped_module(judge_foreign(steps, facts.moved, {"0/w"}), facts.wrappers, facts.moved)
    assert found.evidence[0] == "of Other, which is wrapped at train.py:5"
    facts.wrappers = wrappers[:1]
    assert name_wrapped_module([found], facts.wrappers, facts.moved) == [found]


def test_metrics_zeroing_and_reductions() -> None:
    assert codes(judge_metrics(Metrics([[MetricUsed(0, 0, 0.5, LINE)], [MetricUsed(0, 0, 0.6, LINE)]]))) == ["DDP518"]
    assert not judge_metrics(Metrics([[MetricUsed(0, 0, 0.5, LINE)], [MetricUsed(0, 0, 0.5, LINE)]]))
    saves = MetricUsed(0, 0, 0.5, LINE, user="ModelCheckpoint", metric="val_loss")
    (found,) = judge_metrics(Metrics([[saves, replace(saves, count=1)], [replace(saves, value=0.6)] * 2]))
    assert found.subjects == ("ModelCheckpoint", "val_loss") and "sync_dist=True" in found.fix
    assert not judge_metrics(Metrics([[saves], [replace(saves, value=0.500001)]]))  # another device
    assert not judge_metrics(Metrics([[saves], [replace(saves, metric="val_acc", value=0.6)]]))
    assert codes(judge_zeroed(Loop(2, [[GradientsZeroed(0, 3, LINE)]]))) == ["DDP517"]
    in_a_row = [GradientsZeroed(0, 3, LINE, number) for number in (1, MIN_REPEATS)]
    assert not judge_zeroed(Loop(2, [in_a_row[:1]])) and codes(judge_zeroed(Loop(2, [in_a_row]))) == ["DDP517"]


@pytest.mark.parametrize(
    ("uses", "accumulates", "severity"),
    [
        ([(1, 0.5)] * 2, False, Severity.ERROR),
        ([(1, 0.5)] * 2, True, None),  # it may be divided by its micro-batches
        ([(1, 1.0)] * 2, False, None),  # logged before backward
        ([(16,)] * 2, True, Severity.ERROR),  # activations
        ([(16, None, 7, False)] * 2, False, Severity.WARNING),  # the loss of Barlow Twins: a factor is all
        ([(16, None, 7, True)] * 2, False, None),
        ([(16, None, 7, True), (16, None, 8, True)], False, Severity.ERROR),
        ([(16, None, 0, False)] * 2, False, Severity.ERROR),  # a broadcast
        ([(16, None, 7, False)], False, Severity.ERROR),  # the other rank has no such pass
    ],
)
def test_backward_through_what_a_collective_has_overwritten(uses: Any, accumulates: bool, severity: Any) -> None:
    ranks = [[ReducedInPlace("all_reduce", LINE, *use)] for use in uses] + [[]] * (2 - len(uses))
    findings = judge_reduced_in_place(Loop(2, (), ranks, accumulates))
    assert [(one.code, one.severity) for one in findings] == [("DDP309", severity)] * bool(severity)


def test_clipping_before_gradients_are_averaged() -> None:
    for norms, gradients, found in (
        ((1.0, 2.0), (3.0, 3.0), ["DDP310"]),
        ((1.0, 1.0), (3.0, 3.0), []),
        ((1.0, 2.0), (1.0, 2.0), []),  # averaged by nothing: DDP501
    ):
        clips = [[GradientsClipped(count, norm, LINE, count) for count in range(3)] for norm in norms]
        steps = [[alone(count, 1, gradient) for gradient in gradients] for count in range(2)]
        assert codes(judge_clips(GradientChanges(clips, steps=[steps]))) == found


# Losses


def loss(count: int, *terms: ScaledTerm, **more: Any) -> LossDifferentiated:
    return replace(LossDifferentiated(count, 0, terms, LINE, wrappers=(0,)), **more)


def judge_losses(by_rank: Sequence[Sequence[LossDifferentiated]], *fields: Any, **named: Any) -> list[Finding]:
    return judge_view(Losses(by_rank, *fields, **named))


def losses(*by_rank: Sequence[ScaledTerm], **more: Any) -> list[list[LossDifferentiated]]:
    return [[loss(count, *terms, **more) for count in range(3)] for terms in by_rank]


MEAN, TWICE, HALF = (ScaledTerm("mean", factor, 4) for factor in (1.0, 2.0, 0.5))
SELECTED = ScaledTerm("mean", 1.0, 9, is_selected=True)
DIVIDED = replace(HALF, divisors=(2.0,))


def heads(*counts: int) -> list[ScaledTerm]:
    """Terms of single samples, which are each divided by what the sample has."""
    return [ScaledTerm("sum", 1 / (4 * count), 9, head=0) for count in counts]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (losses(heads(7, 3), heads(5, 5)), []),
        (losses([TWICE], [TWICE], scaled_at=LINE), ["DDP303"]),
        (losses([HALF], [HALF], scaled_at=LINE), ["DDP303"]),
        (losses([HALF], [HALF]), []),  # half of the squared error
        (losses([HALF], [HALF], scaled_at=LINE, number=1), []),  # of two micro-batches
        (losses([MEAN], [MEAN], scaled_at=LINE, number=1), []),  # not divided, or by the micro-batches
        (losses([ScaledTerm("sum", 2.0, 4)], [ScaledTerm("sum", 2.0, 4)], scaled_at=LINE), []),
        (losses(*[[DIVIDED, ScaledTerm("sum", 1 / 8, 9, divisors=(4, 2))]] * 2, scaled_at=LINE), ["DDP303"]),
        (losses(*[[DIVIDED, ScaledTerm("sum", 1 / 4, 9, divisors=(4,))]] * 2, scaled_at=LINE), []),  # not the whole
        (losses([ScaledTerm("sum", 1 / 7, 9)], [ScaledTerm("sum", 1 / 5, 9)]), ["DDP305"]),
        (losses([ScaledTerm("sum", 1 / 6, 9)], [ScaledTerm("sum", 1 / 6, 9)]), []),  # of all ranks
        (losses([ScaledTerm("sum", 0.31, 9)], [ScaledTerm("sum", 0.47, 9)]), []),  # no numbers
        (losses([ScaledTerm("sum", 1 / 1269287, 48)], [ScaledTerm("sum", 1 / 1069, 48)]), []),  # not known
        (losses([SELECTED], [replace(SELECTED, count=7)]), ["DDP305"]),
        (losses([replace(SELECTED, factor=9 / 8)], [replace(SELECTED, factor=7 / 8, count=7)]), []),
        (losses([ScaledTerm("mean", 1.0, 9)], [ScaledTerm("mean", 1.0, 7)]), []),  # batches of other sizes
        (losses([MEAN, HALF], [MEAN, HALF], scaled_at=LINE), []),
    ],
)
def test_scales_of_losses(given: list[list[LossDifferentiated]], found: list[str]) -> None:
    assert codes(judge_losses(given)) == found
    assert not judge_losses([[replace(one, wrappers=()) for one in of_rank] for of_rank in given])
    assert "DDP303" not in codes(judge_losses(given, [[OwnRowsReinserted(0)]] * 2))  # of all ranks' features


def test_the_line_of_the_term_that_is_divided_by_own_counts() -> None:
    for lines, where in (((OTHER_LINE,), OTHER_LINE), ((None,), LINE), ((OTHER_LINE, LINE), LINE)):
        terms = [[MEAN, *(ScaledTerm("sum", 1 / count, 9, location=line) for line in lines)] for count in (7, 5)]
        assert [finding.location for finding in judge_losses(losses(*terms))] == [where]


@pytest.mark.parametrize(("weights", "found"), [((5.0, 2.0), ["DDP305"]), ((0.37, 1.9), [])])
def test_terms_of_several_that_are_divided_by_own_counts(weights: tuple[float, float], found: list[str]) -> None:
    ranks = [
        [loss(n, *(ScaledTerm("sum", weight / count, 48) for weight in weights)) for n, count in enumerate(counts)]
        for counts in ((24, 31, 17, 40), (19, 33, 25, 11))
    ]
    assert codes(judge_losses(ranks)) == found


def test_each_loss_of_a_script_is_judged_by_itself() -> None:
    """Passes of a discriminator, whose loss is a mean, come between those of a generator."""
    of_generator = losses([ScaledTerm("sum", 1 / 7, 9)], [ScaledTerm("sum", 1 / 5, 9)])
    judged = losses([MEAN], [MEAN], location=Location("train.py", 7), step=20)
    judged = [[replace(one, step=20 + n) for n, one in enumerate((*of_rank, *of_rank))] for of_rank in judged]
    both = [[*one, *other] for one, other in zip(of_generator, judged, strict=True)]
    assert codes(judge_losses(both)) == ["DDP305"] and not judge_losses(judged)


@pytest.mark.parametrize(
    ("weights", "found"),
    [
        ([(0.5 * 1.05**n, 0.5 * 0.97**n) for n in range(1, 9)], ["DDP305"]),  # adapted to a rank's own samples
        ([(0.5 * 1.05**n, 0.5 * 0.97**n) for n in range(1, 8)], []),  # too few
        ([(0.5 * 1.05**n, 0.5 * 1.05**n * (1 + n / 2000)) for n in range(9)], []),  # of hardly any effect
        ([(0.1, 0.9), (0.6, 0.7), (0.2, 0.8), (0.5, 0.6)] * 3, []),  # drawn for each batch, always more on one rank
        ([(0.5, 0.8)] * 3, ["DDP305"]),  # of each rank's own part of the data
    ],
)
def test_a_number_by_which_each_rank_multiplies_its_loss(weights: list[tuple[float, float]], found: list[str]) -> None:
    def of_rank(rank: int, *, known: bool = True, size: bool = False) -> list[LossDifferentiated]:
        terms = [
            ScaledTerm("mean", own[rank], round(1e6 * own[rank]) if size else 4, multipliers=(own[rank],) * known)
            for own in weights
        ]
        return [loss(n, MEAN, term) for n, term in enumerate(terms)]

    assert codes(judge_losses([of_rank(0), of_rank(1)])) == found
    assert not judge_losses([of_rank(0, known=False), of_rank(1, known=False)])  # made by the model itself
    assert not judge_losses([of_rank(0, size=True), of_rank(1, size=True)])  # what it weighs is its part of the batch


def shared(count: int, *own: float, total: float = 0.0, weight: float = 1.0, **more: Any) -> list[LossDifferentiated]:
    """A backward pass of each rank: a sum, times a weight, divided by what the ranks' own numbers add up to."""
    by = total or sum(own)
    term = ScaledTerm("sum", weight / by, 24, divisors=(by,), multipliers=(weight,))
    return [loss(count, term, allreduce_inputs=(NumberReduced(number, LINE),), **more) for number in own]


def weighed(count: int, *own: float, more: tuple[float, ...] = ()) -> list[LossDifferentiated]:
    """Likewise a mean of each rank, times its own number."""
    by, times = sum(own), math.prod(more)
    terms = [ScaledTerm("mean", times * n / by, 24, divisors=(by,), multipliers=(n, *more)) for n in own]
    return [loss(count, term, allreduce_inputs=(NumberReduced(n, LINE),)) for term, n in zip(terms, own, strict=True)]


NUMBERS = (30, 34), (20, 11), (9, 40)


def thrice(passes: Any, **more: Any) -> list[list[LossDifferentiated]]:
    return [passes(count, *own, **more) for count, own in enumerate(NUMBERS)]


@pytest.mark.parametrize(
    ("passes", "found"),
    [
        (thrice(weighed), ["DDP303"]),
        (thrice(weighed, more=(2.0,)), []),
        ([*thrice(weighed)[:2], [replace(one, allreduce_inputs=()) for one in weighed(2, 9, 40)]], []),
        (thrice(shared), ["DDP303"]),
        ([*thrice(shared)[:2], shared(2, 9, 40, total=32)], []),  # another number by then
        (thrice(shared)[:2], []),  # too few
        ([shared(0, 30, 34, has_hooks=True), *thrice(shared)[1:]], []),  # a hook may multiply gradients
        ([shared(0, 0.5, 0.5), shared(1, 0.25, 0.5), shared(2, 0.5, 0.25)], []),  # no number of elements
        (thrice(shared, weight=2), []),  # the world size
    ],
)
def test_a_sum_divided_by_a_number_of_all_ranks(passes: list[list[LossDifferentiated]], found: list[str]) -> None:
    assert codes(judge_losses(list(zip(*passes, strict=True)))) == found
    besides = [[replace(one, terms=(*one.terms, MEAN)) for one in of_ranks] for of_ranks in passes]
    assert codes(judge_losses(list(zip(*besides, strict=True)))) == found


@pytest.mark.parametrize(
    ("times", "options", "found"),
    [
        (2.0, {"ranks_per_model": 2}, ["DDP303"]),  # two ranks of a model, of which one is here
        (2.0, {}, []),  # another number
        (0.5, {"ranks_per_model": 2}, []),  # right, for an average of two
        (1.0, {"ranks_per_model": 2, "is_for_sums": True}, []),  # right, for a sum
        (1.0, {"ranks_per_model": 3}, ["DDP303"]),  # averaged once more
    ],
)
def test_a_sum_that_counts_elements_for_each_rank_of_a_model(times: float, options: Any, found: list[str]) -> None:
    counts = enumerate(((24, 31), (17, 40), (19, 33)))
    passes = [[loss(step, ScaledTerm("sum", 1 / (times * sum(both)), n)) for n in both] for step, both in counts]
    assert codes(judge_losses(list(zip(*passes, strict=True)), **options)) == found


def test_a_mean_that_is_divided_by_the_ranks_of_a_model() -> None:
    third = losses(*[[ScaledTerm("mean", 1 / 3, 4)]] * 2, scaled_at=LINE)
    assert codes(judge_losses(third, ranks_per_model=3)) == ["DDP303"] and not judge_losses(third)
    assert codes(judge_losses(third[:1], ranks_per_model=3)) == ["DDP303"]
    assert not judge_losses(losses([MEAN], scaled_at=LINE), ranks_per_model=3)
    assert not judge_losses(losses([MEAN], scaled_at=LINE))  # one rank


def summed(*names: str, **more: Any) -> list[list[OptimizerStep]]:
    return [[step(count, summed=names, **more) for _ in range(2)] for count in range(3)]


def test_gradients_that_are_summed_by_hand() -> None:
    means = losses([MEAN], [MEAN], wrappers=())
    assert codes(judge_sums(summed("w"), means)) == ["DDP303"]
    assert not judge_sums(summed(), means)
    assert not judge_sums(summed("w"), losses([HALF], [HALF], wrappers=()))
    assert not judge_sums(summed("w", options={"class": "AdamW"}), means)  # the scale does not matter


@pytest.mark.parametrize(
    ("used", "unclipped", "kind", "found"),
    [
        ((2.0, 6.0), None, "SGD", [Severity.ERROR]),  # the sum of what the ranks have
        ((1.0, 3.0), None, "SGD", []),  # the average
        ((0.1, 0.3), (2.0, 6.0), "SGD", [Severity.ERROR]),  # clipped
        ((0.1, 0.3), (1.0, 3.0), "SGD", []),
        ((2.0, 6.0), None, "Adam", []),  # which takes the same steps
        ((0.1, 0.3), (2.0, 6.0), "Adam", [Severity.WARNING]),  # but for the clip
        ((2.0, 5.0), None, "SGD", []),  # another direction
        ((0.1, 0.3), None, "SGD", []),  # something else: less of the average, or clipped by hand
    ],
)
def test_gradients_that_are_summed_in_one_buffer(used: Any, unclipped: Any, kind: str, found: list[Severity]) -> None:
    local = (2.0, 2.0), (0.0, 4.0)
    more = {} if unclipped is None else {"unclipped": {"w": unclipped}}
    options = {"class": kind, "module": "torch.optim"}
    steps = [
        [step(count, local={"w": own}, gradients={"w": used}, options=options, summed_at=LINE, **more) for own in local]
        for count in range(1, 4)
    ]
    findings = judge_sums([[step(0), step(0)], *steps], losses([MEAN], [MEAN], wrappers=()))
    assert [(one.code, one.severity, one.location) for one in findings] == [("DDP303", one, LINE) for one in found]


def test_gradients_that_are_summed_by_hand_after_the_average() -> None:
    assert codes(judge_second_sum(summed("0/w"), 2)) == ["DDP303"]
    assert not judge_second_sum(summed("0/w", averaged=False), 2)  # by hand alone
    assert not judge_second_sum(summed("criterion.w"), 2)  # of what no wrapper averages
    assert not judge_second_sum([*summed("0/w"), [step(3), step(3)]], 2)  # now and then


@pytest.mark.parametrize(
    ("factors", "more", "found"),
    [
        ((0.5, 0.5, 0.5), {}, ["DDP303"]),
        ((1.0, 1.0, 1.0), {}, []),
        ((0.5, 0.5, 0.4), {}, []),  # a clip
        ((0.5, 0.5), {}, []),  # too few
        ((0.5, 0.5, 0.5), {"scaled_at": LINE}, []),  # the loss is multiplied by it
        ((0.5, 0.5, 0.5), {"line": None}, []),  # half of a gradient may be meant otherwise
        ((0.5, 0.5, 0.5), {"name": "AdamW"}, []),  # whose steps do not depend on the scale
        ((0.5, 0.5, 0.5), {"elements": 65}, []),  # of whose norm the sketch is an estimate
        ((0.25, 0.25, 0.25), {}, []),  # nothing that the number of ranks explains
    ],
)
def test_averaged_gradients_that_are_divided_once_more(factors: Sequence[float], more: Any, found: list[str]) -> None:
    numbers, options = [1.0] * more.get("elements", 9), {"class": more.get("name", "SGD")}
    of_loss = {name: value for name, value in more.items() if name == "scaled_at"}
    state = ReplicaState(ModuleDescription(), DdpStepEvidence(0, 0))
    norm, line = math.hypot(*numbers), more.get("line", LINE)
    steps = [step(n, options=options, rescaled_at=line, norms={"0/w": by * norm}) for n, by in enumerate(factors)]
    used = [(one, ReplicaCaptured(0, n, state, averaged={"w": numbers})) for n, one in enumerate(steps)]
    assert codes(judge_rescaled([used, used], losses([MEAN], [MEAN], **of_loss), 2)) == found


# Models beside the wrappers


def looks(*values: int, **more: Any) -> list[LocalModel]:
    plain = LocalModel(0, 0, "ema", "Net", {}, is_copy=True, is_called=False, location=LINE)
    return [replace(plain, **{"count": count, "values": {"w": value}, **more}) for count, value in enumerate(values)]


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ([looks(1, 2, 3), looks(4, 2, 3)], []),  # the same in the end
        ([looks(1, 2, 3), []], []),  # on rank 0 only
        ([looks(1, 2, 3), looks(9, 9, 9)], []),  # rank 1 does nothing with it
        ([looks(1, 2, 3), looks(9, 9, 9, is_called=True)], ["DDP306"]),
        ([looks(1, 2, 3, is_copy=False), looks(4, 5, 6, is_copy=False)], ["DDP214"]),
        ([looks(1, 2, 3), looks(4, 5, 6, values={"a part": 4})], []),  # a copy of what another wrapper holds
        ([looks(1, 2, 3), looks(4, 5, 6)], ["DDP306"]),
    ],
)
def test_models_that_are_held_beside_the_wrappers(ranks: list[list[LocalModel]], found: list[str]) -> None:
    assert codes(judge_copied_states(ranks)) == found


def test_a_copy_that_a_collective_brings_together_now_and_then() -> None:
    ranks = [looks(1, 2, 3, 4), looks(1, 5, 6, 7)]
    assert codes(judge_copied_states(ranks)) == ["DDP306"]
    merged = [[replace(one, syncs=one.count // 2) for one in of_rank] for of_rank in ranks]
    assert not judge_copied_states(merged)


# Files


def used(writes: bool, began: int, collectives: int = 0, **more: Any) -> FileUsed:
    return replace(FileUsed("/data/last.pt", writes, began, began + collectives, LINE), **more)


def write(began: int) -> FileUsed:
    return used(True, began)


def read(began: int, **more: Any) -> FileUsed:
    return used(False, began, **{"maps_location": True, **more})


OPENED = used(True, 5, by_torch=False)


def test_states_that_ranks_have_loaded_from_other_files() -> None:
    apart = [[read(0, path="/run/2.pt")], [read(0, path="/run/1.pt")]]
    state, left = make_finding("DDP306", ("momentum",), "It differs.", steps=(0,)), make_finding("DDP405", (), "Left.")
    later = replace(state, steps=(4,))
    told, ended, same = locate_restored_file([state, left, later], apart)
    assert told.location == LINE and "rank 0: run/2.pt; rank 1: run/1.pt" in told.message and same == later
    assert ended.message == "Left." and "run/2.pt" in ended.evidence[-1]
    assert locate_restored_file([state], [[read(0)], [read(0)]]) == [state] == locate_restored_file([state], [[], []])
    another = read(0, path="/run/all.pt", location=Location("train.py", 3))  # of random states, then
    assert locate_restored_file([state], [[*of_rank, another] for of_rank in apart]) == [state]


@pytest.mark.parametrize(
    ("uses", "found"),
    [
        ([[write(5)], [write(5)]], ["DDP512"]),
        ([[write(5)], [write(6)]], []),  # a collective is between
        ([[write(5)], [read(5)]], ["DDP512"]),
        ([[write(5)], [replace(read(5), path="/data/other.pt")]], []),
        ([[write(5), write(9)], [write(5), write(9)]], ["DDP512"]),  # once a line
        ([[write(5), OPENED], [write(6), OPENED]], []),  # opened for torch.save
        ([[read(0), write(5)], [read(0)]], []),  # what was left by the last run
        ([[write(5), read(6)], []], []),
    ],
)
def test_files_that_ranks_use_at_the_same_time(uses: list[list[FileUsed]], found: list[str]) -> None:
    assert codes(judge_files(Program(uses))) == found


def opened(name: str, began: int, *, writes: bool = False, **more: Any) -> FileUsed:
    return used(writes, began, path=f"/data/{name}", by_torch=False, **more)


CACHE = opened("x.npy", 2, writes=True)


@pytest.mark.parametrize(
    ("writer", "reader", "found"),
    [
        ([CACHE], [opened("x.npy", 2)], ["DDP512"]),
        ([CACHE], [opened("x.npy", 3)], []),  # a collective is between
        ([CACHE], [opened("x.npy", 2, has_waited=True)], []),  # a lock, say
        ([CACHE, opened("x.npy", 2)], [], []),
        ([CACHE, opened("done", 2, writes=True)], [opened("x.npy", 2)], []),  # for which the reader may have waited
        ([CACHE, opened("y.npy", 2, writes=True)], [opened("x.npy", 2), opened("y.npy", 2)], ["DDP512"]),
        ([opened("x.tmp", 2, writes=True)], [opened("x.npy", 2)], []),  # put in its place when it is complete
        ([CACHE, opened("done", 2, has_waited=True)], [opened("x.npy", 2)], []),  # likewise: it is touched
    ],
)
def test_files_that_one_rank_makes_and_another_reads(writer: Any, reader: Any, found: list[str]) -> None:
    assert codes(judge_files(Program([writer, reader]))) == found


def test_a_file_that_is_only_touched_is_no_race() -> None:
    for touched in ([opened("done", 2, writes=True)], [opened("done", 2)]):
        assert codes(judge_files(Program([[opened("done", 2, writes=True)], touched]))) == ["DDP512"]
        assert not judge_files(Program([[opened("done", 2, writes=True)], touched], {"/data/done"}))


def test_a_checkpoint_that_is_loaded_onto_the_device_of_another_rank() -> None:
    own: dict[str, Any] = {"devices": ("cuda:1",), "device": "cuda:1"}
    other = {**own, "devices": ("cuda:0",)}
    assert codes(judge_files(Program([[], [read(6, maps_location=False, **other)]]))) == ["DDP512"]
    assert not judge_files(Program([[], [read(6, **other)]]))
    assert not judge_files(Program([[], [read(6, maps_location=False, **own)]]))


def saved(*shards: int) -> list[list[FileUsed]]:
    """By rank of three, what saves its shard of two; negative of a rank that saves something else."""
    return [[replace(write(5), shard=(shard, 2) if shard >= 0 else None)] for shard in shards]


def test_shards_that_some_ranks_alone_save() -> None:
    assert_says(judge_shards_saved(Program([*saved(0, -1), []])), "DDP521 ... of ranks (0,) at train.py:30")
    assert judge_shards_saved(Program(saved(0, 1, -1))) == judge_shards_saved(Program(saved(-1, -1, -1))) == []
    with pytest.raises(NotRecorded, match="has not reached its end"):
        judge_shards_saved(Program([*saved(0, -1), []], ended=False))


def test_parameters_in_no_group_of_shards() -> None:
    steps = [[alone(0, 1, 2.0), alone(0, 1, 5.0)], [alone(1, 2, 3.0), alone(1, 3, 6.0)]]
    assigned = ModuleChanged(0, "module", "head", tuple(steps[0][0].local_params), Location("train.py", 77))
    for changes, words in (
        ([], "DDP111 ... at train.py:30 ... not DistributedDataParallel"),
        ([assigned], "DDP111 ... at train.py:77 ... and replaces a sharded module"),
    ):
        assert_says(unsynchronized(steps, wrapped=True, sharded_at=LINE, assigned=changes), words)


ADAM = {"0/w: step": 12.0, "0/w: exp_avg": 0.5, "0/w: exp_avg_sq": 0.1}


@pytest.mark.parametrize(
    ("states", "restored", "code"),
    [
        ([ADAM, {}], [LINE, None], "DDP306"),
        ([ADAM, ADAM], [LINE, LINE], "DDP521"),
        ([ADAM, {**ADAM, "0/w: exp_avg": 0.4}], [LINE, LINE], ""),
        ([ADAM, {**ADAM, "0/w: exp_avg": 0.4}], [LINE, None], ""),  # steps were counted alike
        ([ADAM, ADAM], [None, None], ""),  # never loaded
        ([{"0/w: sum": 0.2}, {"0/w: sum": 0.2}], [LINE, LINE], ""),  # as it is filled at first, say
    ],
)
def test_optimizers_of_shards_load_their_own_parts(states: Any, restored: Any, code: str) -> None:
    steps = [
        OptimizerStep(0, 0, {}, LINE, shards=1, shard_states=state, restored_at=where)
        for state, where in zip(states, restored, strict=True)
    ]
    assert codes(judge_shard_states([steps])) == [code] * bool(code)


def test_gradients_that_float32_rounds_coarsely_are_the_same() -> None:
    coarse = [(2.8e-45, 7e-45), (4.2e-45, 5.6e-45)]
    assert are_near(coarse) and are_close([2.8e-45, 4.2e-45])
    assert not are_near([[value * 1e40 for value in of_rank] for of_rank in coarse])
    assert not are_close([2.8e-5, 4.2e-5])
