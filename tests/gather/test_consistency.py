"""DDP2xx from hand-made descriptions, each with a clean twin, and the same over the store of a real world."""

from typing import Any

import pytest
import torch
from torch import nn

import ddpcheck
from ddpcheck.consistency import check_consistency
from ddpcheck.findings.errors import HangError, UsageError
from ddpcheck.findings.evidence.modules import ModuleDescription, TensorRecord
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding
from ddpcheck.findings.rules import Severity
from ddpcheck.gather.collectives.store_exchange import StoreExchange
from ddpcheck.rules.replicas.descriptions import judge_descriptions, judge_layouts, judge_values_after_wrapping
from ddpcheck.trace.replicas import differing_names
from tests.reports import only


def record(name: str, shape: tuple[int, ...] = (2, 3), **more: Any) -> TensorRecord:
    stride = tuple(int(torch.tensor(shape[i + 1 :]).prod()) for i in range(len(shape)))
    return replace(TensorRecord(name, shape, "float32", stride, True, "cpu"), **more)


A, B, C = record("a"), record("b"), record("c", (5,))
LAYERS = (("", "Model", "", True), ("norm", "BatchNorm1d", "5, eps=1e-05", True), ("drop", "Dropout", "p=0.1", True))
WHOLE = ModuleDescription(
    parameters=(A, B, C),
    buffers=(record("mean", (5,)), record("var", (5,))),
    ties=(("a", "head.a"),),
    modules=LAYERS,
    state=(("cache", (4,), 11),),
)


def judge(*others: ModuleDescription) -> list[Finding]:
    return judge_descriptions([WHOLE, *others])


def with_parameters(*records: TensorRecord) -> ModuleDescription:
    return replace(WHOLE, parameters=records)


def with_buffers(*records: TensorRecord) -> ModuleDescription:
    return replace(WHOLE, buffers=records)


def with_last(*layer: Any) -> ModuleDescription:
    return replace(WHOLE, modules=(*LAYERS[:2], ("drop", *layer)))


def test_a_module_that_is_compiled_on_one_rank_only_is_told_as_that() -> None:
    compiled = replace(
        WHOLE,
        parameters=tuple(replace(tensor, name=f"_orig_mod.{tensor.name}") for tensor in WHOLE.parameters),
        buffers=tuple(replace(tensor, name=f"_orig_mod.{tensor.name}") for tensor in WHOLE.buffers),
        ties=(("_orig_mod.a", "_orig_mod.head.a"),),
        modules=(
            LAYERS[0],
            ("_orig_mod", *LAYERS[0][1:]),
            *((f"_orig_mod.{name}", *rest) for name, *rest in LAYERS[1:]),
        ),
        state=(("_orig_mod.cache", (4,), 11),),
    )
    finding = only(judge_descriptions([WHOLE, compiled, WHOLE]))
    assert (finding.code, finding.subjects, finding.ranks) == ("DDP222", ("(the model)",), (1,))
    assert finding.message == "torch.compile compiles the model on rank 1 only."
    assert judge_descriptions([compiled, compiled]) == []
    fewer = replace(compiled, parameters=compiled.parameters[:2])
    assert [finding.code for finding in judge_descriptions([WHOLE, fewer, WHOLE])] == ["DDP222", "DDP201"]


MEAN, VAR = WHOLE.buffers
CASES: dict[str, tuple[ModuleDescription, str, tuple[str, ...]]] = {
    "other names": (with_parameters(A, B, replace(C, name="d")), "DDP201", ("c", "d")),
    "other order": (with_parameters(B, A, C), "DDP202", ("a", "b")),
    "other shape": (with_parameters(A, B, record("c", (6,))), "DDP203", ("c",)),
    "other dtype": (with_parameters(A, B, replace(C, dtype="float64")), "DDP204", ("c",)),
    "other stride": (with_parameters(replace(A, stride=(1, 2)), B, C), "DDP205", ("a",)),
    "frozen": (with_parameters(replace(A, requires_grad=False), B, C), "DDP206", ("a",)),
    "other device": (with_parameters(A, replace(B, device="cuda"), C), "DDP207", ("b",)),
    "not tied": (replace(WHOLE, ties=()), "DDP209", ("a", "head.a")),
    "not tied, and so one more": (
        replace(WHOLE, ties=(), parameters=(A, B, C, record("head.a"))),
        *("DDP209", ("a", "head.a")),
    ),
    "one buffer fewer": (with_buffers(MEAN), "DDP211", ("var",)),
    "buffers in another order": (with_buffers(VAR, MEAN), "DDP212", ("mean", "var")),
    "other buffer shape": (with_buffers(MEAN, record("var", (1,))), "DDP213", ("var",)),
    "other values held": (replace(WHOLE, state=(("cache", (4,), 12),)), "DDP216", ("cache",)),
    "other class": (with_last("Identity", "", True), "DDP222", ("drop",)),
    "other mode": (with_last("Dropout", "p=0.1", False), "DDP222", ("drop",)),
    "other mode everywhere": (
        replace(WHOLE, modules=tuple((*module[:3], False) for module in LAYERS)),
        *("DDP222", ("(the model)",)),
    ),
    "other shape, stride and option": (
        replace(with_last("Linear", "in=3, out=2", True), parameters=(record("a", (3, 2)), B, C)),
        *("DDP203", ("a",)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_module_that_is_not_built_alike_on_one_rank(name: str) -> None:
    other, code, subjects = CASES[name]
    finding = only(judge(WHOLE, other))
    assert (finding.code, finding.subjects, finding.ranks) == (code, subjects, (2,))
    assert finding.severity is (Severity.WARNING if code == "DDP216" else Severity.ERROR) and finding.evidence
    assert name != "other mode everywhere" or "evaluating" in finding.evidence[0]


def test_the_odd_ranks_are_those_in_the_minority_and_it_is_told_what_each_has() -> None:
    other, frozen, cast = (CASES[name][0] for name in ("other shape", "frozen", "other dtype"))
    assert only(judge_descriptions([other, WHOLE, WHOLE, WHOLE])).ranks == (0,)
    assert only(judge_descriptions([WHOLE, other, other, WHOLE, WHOLE])).ranks == (1, 2)
    assert only(judge(other)).evidence == ("c: rank 0: (5,); rank 1: (6,)",)
    assert only(judge(CASES["other order"][0])).evidence == ("parameter number 0: rank 0: a; rank 1: b",)
    assert {finding.code: finding.ranks for finding in judge(frozen, cast)} == {"DDP206": (1,), "DDP204": (2,)}


@pytest.mark.parametrize(
    ("modes", "ranks"),
    [((False, True), (0,)), ((True, False), (1,)), ((True, True, False), (2,)), ((False, False, True), (2,))],
)
def test_of_two_modes_that_as_many_ranks_have_the_one_that_trains_is_right(
    modes: tuple[bool, ...], ranks: tuple[int, ...]
) -> None:
    finding = only(judge_descriptions([with_last("Dropout", "p=0.1", on) for on in modes]))
    assert (finding.code, finding.ranks) == ("DDP222", ranks)


def test_values_that_differ_after_wrapping() -> None:
    same: dict[str, int] = {"a": 1, "b": 2}
    assert judge_values_after_wrapping([same, same], [same, same]) == []
    by_parameter, by_buffer = judge_values_after_wrapping([same, {"a": 1, "b": 3}], [same, same, {"a": 9, "b": 2}])
    assert (by_parameter.code, by_parameter.subjects, by_parameter.ranks) == ("DDP208", ("b",), (1,))
    assert (by_buffer.code, by_buffer.subjects, by_buffer.ranks) == ("DDP214", ("a",), (2,))
    assert {by_parameter.severity, by_buffer.severity} == {Severity.ERROR}
    assert differing_names([{"a": 1, "only": 1}, {"a": 1}]) == {}, "a name that only some ranks have"
    assert differing_names([{"a": 1}, {"a": 2}, {"a": 2}]) == {"a": (0,)}


@pytest.fixture
def asked(rank: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What this rank puts into the store: under which key, and how many bytes of a digest."""
    seen: list[str] = []
    gather = StoreExchange.all_gather

    def watched(self: Any, key: str, data: Any) -> list[Any]:
        seen.append(f"{key} {len(data) if key == 'digest' else 'any'}")
        return gather(self, key, data)

    monkeypatch.setattr(StoreExchange, "all_gather", watched)
    return seen


def checked_twice(module: Any) -> list[Finding]:
    """What every rank is told of the module."""
    found = check_consistency(module, timeout=20)
    assert check_consistency(module, timeout=20) == found, "a second call gives the same answer"
    ddpcheck.assert_same_on_all_ranks(repr(found), timeout=20)
    return found


@pytest.mark.ddp(world_size=3, reuse="module")
def test_equal_modules_exchange_nothing_but_a_digest_of_fixed_size(asked: list[str]) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    assert check_consistency(module, timeout=20) == check_consistency(module, timeout=20) == []
    assert asked == ["digest 32", "digest 32"]


FORMATS = (torch.contiguous_format, torch.channels_last)


@pytest.mark.ddp(reuse="module")
def test_every_rank_is_told_the_same_mismatch(rank: int) -> None:
    for module, code in (
        (nn.Linear(3, 3 + rank), "DDP203"),
        (nn.Linear(3, 3, bias=rank == 0), "DDP201"),
        (nn.Linear(3, 3, dtype=torch.float64 if rank else torch.float32), "DDP204"),
        (nn.Linear(3, 3).requires_grad_(rank == 0), "DDP206"),
        (nn.Conv2d(3, 3, 3).to(memory_format=FORMATS[rank]), "DDP205"),
        (nn.Dropout(0.1 * (rank + 1)), "DDP222"),
    ):
        finding = only(checked_twice(module))
        assert (finding.code, finding.ranks) == (code, (1,))


@pytest.mark.ddp(reuse="module")
def test_values_are_compared_once_the_module_is_wrapped(rank: int) -> None:
    module = nn.Linear(3, 3)
    assert checked_twice(module) == [], "before wrapping, DDP will make the values equal"
    wrapped = nn.parallel.DistributedDataParallel(module)
    assert checked_twice(wrapped) == []
    with torch.no_grad():
        wrapped.module.bias += rank
    finding = only(checked_twice(wrapped))
    assert (finding.code, finding.subjects) == ("DDP208", ("bias",))


@pytest.mark.slow
@pytest.mark.ddp(world_size=3, timeout=15, reuse="module")
def test_a_rank_that_never_calls_it_is_named_within_the_timeout(rank: int) -> None:
    assert check_consistency(nn.Linear(3, 3)) == []  # so that the others are there in time
    if rank != 1:
        with pytest.raises(HangError, match=r"^rank 1 did not take part in check_consistency within 1\.5 s"):
            check_consistency(nn.Linear(3, 3), timeout=1.5)


@pytest.mark.ddp(world_size=3, reuse="module")
def test_only_ranks_of_a_group_are_compared_and_others_stay_in_step(rank: int) -> None:
    pair, ends = torch.distributed.new_group([0, 1]), torch.distributed.new_group([0, 2])
    if rank != 1:
        found = check_consistency(nn.Linear(3, 3 + rank), ends, timeout=20)
        assert found[0].code == "DDP203"
        ddpcheck.assert_same_on_all_ranks(repr(found), group=ends, timeout=20)
    if rank < 2:
        assert [check_consistency(nn.Linear(3, 3), pair, timeout=20) for _ in range(2)] == [[], []]
    finding = only(check_consistency(nn.Linear(3, 3 + (rank == 2)), timeout=20))
    assert (finding.code, finding.ranks) == ("DDP203", (2,))


def test_without_a_process_group_it_says_so() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        check_consistency(nn.Linear(1, 1))


def test_what_a_step_has_changed_on_a_rank_is_told_with_the_step() -> None:
    shorter = with_buffers(record("mean", (4,)), VAR)
    finding = only(judge_layouts([WHOLE, shorter], 2, broadcasts=True))
    assert (finding.code, finding.subjects, finding.ranks, finding.steps) == ("DDP213", ("mean",), (1,), (2,))
    more = with_buffers(MEAN, VAR, record("cache", (1,)))
    assert only(judge_layouts([WHOLE, more], 0, broadcasts=True)).code == "DDP211"
    assert only(judge_layouts([WHOLE, CASES["frozen"][0]], 0, broadcasts=False)).code == "DDP206"
    assert judge_layouts([WHOLE, WHOLE], 2, broadcasts=True) == []
    assert judge_layouts([WHOLE, shorter], 2, broadcasts=False) == [], "it may have the shape of the local batch"
