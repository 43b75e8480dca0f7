"""The assertions for tests: each fails on something broken and holds on its twin, with one message on every rank."""

import contextlib
import datetime
import inspect
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

import ddpcheck
from ddpcheck.findings.errors import FindingsError, HangError, UsageError
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Report
from ddpcheck.gather.collectives.store_exchange import StoreExchange
from ddpcheck.harness import World
from ddpcheck.recipe.recipe import Recipe
from ddpcheck.testing.assertions import on_rank
from ddpcheck.testing.fixture import DDPWorld

torch = pytest.importorskip("torch")

nn = torch.nn


# --- The same on all ranks: real ranks ------------------------------------------------------------------------------


@dataclass
class Case:
    """The value of rank r, and the words of the message if there are several ranks; none if all is well."""

    value: Callable[[int], Any]
    words: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    kind: type[Exception] = AssertionError


Pair = namedtuple("Pair", "first second")


@dataclass
class Output:
    logits: Any
    loss: Any = None


def ramp(rank: int = 0, **changes: Any) -> Any:
    """The numbers 1 to 64 in rows of eight; on rank 1 with two other ones."""
    tensor = torch.arange(1.0, 65.0).reshape(8, 8)
    tensor[0, 7] += 0.25 * (rank == 1)
    tensor[0, 0] += 0.125 * (rank == 1)
    return tensor.to(**changes) if changes else tensor


def seeded(rank: int, build: Callable[[], Any]) -> Any:
    torch.manual_seed(rank)
    return build()


def on_1(odd: Any, common: Any) -> Callable[[int], Any]:
    return lambda rank: odd if rank == 1 else common


def sparse(indices: list[int], values: list[float]) -> Any:
    return torch.sparse_coo_tensor([indices], values, (4,))


CYCLE: list[Any] = [torch.ones(1)]
CYCLE.append(CYCLE)
VALUES = ("Tensor-likes are not equal on all ranks!", "Rank 1 differs from rank")
NAN = float("nan")
EQUAL_NAN: tuple[tuple[str, ...], dict[str, Any]] = ((), {"equal_nan": True})
NAN_ON_1 = on_1(torch.tensor([1.0, NAN]), torch.tensor([1.0, 2.0]))
FLOAT8_ON_1 = on_1(*(torch.full((4,), value).to(torch.float8_e5m2) for value in (2.0, 1.0)))
EQUAL: dict[str, Callable[[int], Any]] = {
    "8 bits": lambda rank: [
        ramp() > 5,
        *(ramp(dtype=t) for t in (torch.float8_e4m3fn, torch.float8_e8m0fnu)),
    ],
    "empty, uint64": lambda rank: [torch.empty(0, 3), ramp(dtype=torch.uint64)],
    "conjugated": lambda rank: (ramp() * 1j).conj() if rank else (ramp() * 1j).conj().resolve_conj(),
    "sparse, in another order": lambda rank: sparse([0, 2], [1.0, 3.0]) if rank else sparse([2, 0], [3.0, 1.0]),
    "csr, quantized": lambda rank: [ramp().to_sparse_csr(), torch.quantize_per_tensor(ramp(), 0.5, 0, torch.qint8)],
    "a view": lambda rank: ramp().t().contiguous().t() if rank else ramp(),
    "one zero and the other": lambda rank: [torch.zeros(3) * (-1 if rank else 1), torch.tensor(-0.0 if rank else 0.0)],
    "an odd place in memory": lambda rank: torch.ones(9 + rank, dtype=torch.bfloat16)[rank:],
    "requires grad": lambda rank: torch.ones(3, requires_grad=bool(rank)),
    "a module": lambda rank: seeded(0, lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))),
    "a generator": lambda rank: (p for p in seeded(0, lambda: nn.Linear(3, 3)).parameters()),
    "a nest": lambda rank: {"b": [ramp(), None], "a": (1, 2.0, True, "text", torch.float32, torch.device("cpu"))},
    "a nest in another order": lambda rank: {"a": 1, "b": ramp()} if rank else OrderedDict(b=ramp(), a=1),
    "classes": lambda rank: [Pair(ramp(), 1), Output(ramp())],
    "numpy": lambda rank: [ramp().numpy(), ramp().numpy()[0, 0]],
}
REFUSED = {  # with any number of ranks
    "half of a tolerance": Case(ramp, ("rtol", "atol is missing"), {"rtol": 1e-3}, UsageError),
    "a negative tolerance": Case(ramp, ("atol", "-1"), {"rtol": 0, "atol": -1}, UsageError),
    "nothing but None": Case(lambda rank: [None, None], ("compared nothing",)),
    "an empty list": Case(lambda rank: [], ("compared nothing",)),
    "an object": Case(lambda rank: object(), ("of type object", "pass tensors"), kind=UsageError),
    "meta": Case(lambda rank: torch.ones(2, device="meta"), ("meta device",), kind=UsageError),
    "lazy": Case(lambda rank: nn.LazyLinear(3), ("item weight is lazy",), kind=UsageError),
    "a key that is a tensor": Case(lambda rank: {torch.ones(1): 1}, ("a key of type Tensor",), kind=UsageError),
    "a cycle": Case(lambda rank: CYCLE, ("contains itself",), kind=UsageError),
}
CASES: dict[str, Case] = {
    **{f"equal: {name}": Case(value) for name, value in EQUAL.items()},
    **REFUSED,
    "values": Case(
        ramp,
        (*VALUES, "2 / 64 (3.1%) on rank 1 against rank 0", "0.25 at index (0, 7)", "(0, 0): 1.125 instead of 1.0"),
    ),
    "beyond a tolerance": Case(ramp, ("are not close", "1 / 64 (1.6%)", "(up to 0.2"), {"rtol": 0.0, "atol": 0.2}),
    "within a tolerance": Case(ramp, (), {"rtol": 0.0, "atol": 0.25}),
    "other tolerances on a rank": Case(lambda rank: ramp(), ("in different ways",), {"by rank": True}, UsageError),
    "several": Case(
        lambda rank: {"a": ramp(), "b": ramp(rank), "c": ramp(rank)},
        (*VALUES, "occurred for item state['b']", "1 more item is not", "['c']: values, on rank 1"),
        {"name": "state"},
    ),
    "0-dim": Case(lambda rank: torch.tensor(float(rank == 1)), (*VALUES, "Expected 0.0 but got 1.0 on rank 1")),
    "bool": Case(lambda rank: torch.tensor([True, rank == 1]), (*VALUES, "True instead of False", "index (1,)")),
    "complex": Case(on_1(torch.tensor([4 + 4j]), torch.tensor([1 + 0j])), (*VALUES, "difference: 5.0 at index (0,)")),
    "large integers": Case(lambda rank: torch.tensor([2**60 + (rank == 1)]), (*VALUES, "difference: 1 at", "8.673617")),
    "float8 within a tolerance": Case(FLOAT8_ON_1, (), {"rtol": 0.0, "atol": 1.0}),
    "sparse values": Case(lambda rank: sparse([0, 2], [1.0, 2.0 + (rank == 1)]), (*VALUES, "values()", "3.0 instead")),
    "more sparse values": Case(on_1(sparse([0, 1], [1.0] * 2), sparse([0], [1.0])), ("(1, 2) on rank 1", "indices()")),
    "dense and sparse": Case(on_1(torch.eye(2).to_sparse(), torch.eye(2)), ("sparse_coo on rank 1",)),
    "shape": Case(lambda rank: torch.ones(3 + (rank == 1)), ("'shape' do not match", "(4,) on rank 1")),
    "stride": Case(on_1(ramp().t(), ramp().t().contiguous()), ("'stride'", "(1, 8) on rank 1"), {"check_stride": True}),
    "a missing key": Case(on_1({"a": 1, "b": 1}, {"a": 1}), ("mapping of 2 items on", "['b']: only on rank 1")),
    "nothing on one rank": Case(on_1(None, ramp()), ("None on rank 1",)),
    "numbers": Case(on_1(4, 3), ("Scalars are not equal", "4 on rank 1")),
    "numbers beyond a tolerance": Case(on_1(4.0, 3.0), ("are not close", "4.0 on rank 1"), {"rtol": 0, "atol": 0.5}),
    "words": Case(on_1(["a", "b"], ["a", "a"]), ("Values are not equal", "'b' on rank 1", "item [1]")),
    "NaN everywhere": Case(lambda rank: torch.tensor([1.0, NAN]), ("On every rank, 1 / 2 elements", "equal_nan=True")),
    "NaN on one rank": Case(NAN_ON_1, (*VALUES, "1 / 2 (50.0%)", "nan instead of 2.0", "NaN: no element is NaN on")),
    "equal NaN": Case(lambda rank: [torch.tensor([1.0, NAN]), NAN], *EQUAL_NAN),
    "one NaN and another": Case(lambda rank: torch.tensor(0x7FC00000 + rank).int().view(torch.float32), *EQUAL_NAN),
    "modules": Case(lambda rank: seeded(rank == 1, lambda: nn.Linear(3, 3)), (*VALUES, "item weight", "bias: values")),
    "an object on one rank": Case(on_1([object()], [1]), ("item [0] is of type object", "(rank 1)"), kind=UsageError),
    "message": Case(ramp, ("mine: Tensor-likes",), {"msg": lambda text: f"mine: {text}"}),
}


def message_of(assertion: Callable[..., Any], *args: Any, **options: Any) -> tuple[str, str]:
    """The class and message of what an assertion raises."""
    try:
        assertion(*args, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def on_ranks() -> dict[str, tuple[str, str]]:
    rank = torch.distributed.get_rank()
    messages = {}
    for name, case in CASES.items():
        options = {"rtol": float(rank), "atol": 0.0} if "by rank" in case.options else case.options
        messages[name] = message_of(ddpcheck.assert_same_on_all_ranks, case.value(rank), timeout=30, **options)
    return messages


@pytest.fixture(scope="module")
def by_world() -> dict[int, list[dict[str, tuple[str, str]]]]:
    messages = {}
    for world_size in (1, 2, 3):
        with World(world_size, timeout=120) as world:
            messages[world_size] = world.run(on_ranks)
    return messages


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_get_the_same_message(by_world: Any, name: str) -> None:
    case = CASES[name]
    for world_size, by_rank in by_world.items():
        expected = case.words if world_size > 1 or name in REFUSED else ()
        messages = {messages[name] for messages in by_rank}
        assert len(messages) == 1, "a rank with another message runs ahead, and the others wait for it"
        ((kind, message),) = messages
        assert kind == (case.kind.__name__ if expected else "")
        assert all(words in message for words in expected), message


def test_without_a_process_group_there_is_nothing_to_differ_from() -> None:
    ddpcheck.assert_same_on_all_ranks(ramp())
    with pytest.raises(UsageError, match="give both rtol and atol"):
        ddpcheck.assert_same_on_all_ranks(ramp(), atol=1.0)
    with pytest.raises(AssertionError, match="compared nothing") as caught:
        ddpcheck.assert_same_on_all_ranks([p.grad for p in nn.Linear(2, 2).parameters()])
    shown = caught.traceback.filter(caught)
    assert [entry.path.name for entry in shown] == ["test_assertions.py"], "no line of ours"


@pytest.mark.ddp(reuse="module")
def test_equal_values_cost_one_digest_and_other_ones_their_details(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, int]] = []
    gather = StoreExchange.all_gather

    def watched(self: Any, key: str, data: Any) -> list[Any]:
        sent.append((key, len(str(data))))
        return gather(self, key, data)

    monkeypatch.setattr(StoreExchange, "all_gather", watched)
    ddpcheck.assert_same_on_all_ranks([ramp()] * 100)
    assert sent == [("digest", 32)]
    sent.clear()
    with pytest.raises(AssertionError, match="Mismatched"):
        ddpcheck.assert_same_on_all_ranks(ramp(rank))
    assert [key for key, _ in sent] == ["digest", "detail", "measured"]


@pytest.mark.ddp(reuse="module")
def test_values_that_travel_in_pieces_are_measured_as_a_whole(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = ramp(rank)
    tensor[5, 3] += 0.5 * (rank == 1)
    tensor[7, 7] -= 0.25 * (rank == 1)
    _, whole = message_of(ddpcheck.assert_same_on_all_ranks, tensor)
    monkeypatch.setattr(on_rank, "_PIECE", 100)  # bytes: 25 elements, of 64
    _, in_pieces = message_of(ddpcheck.assert_same_on_all_ranks, tensor)
    assert in_pieces == whole
    assert "4 / 64" in whole and "0.5 at index (5, 3)" in whole and "0.125 at index (0, 0)" in whole
    ddpcheck.assert_same_on_all_ranks(whole)


def test_the_ranks_of_groups_are_compared_apart_and_in_any_order(ddp_world: DDPWorld) -> None:
    def compare() -> list[str]:
        import torch.distributed as dist

        value = torch.ones(2) * (dist.get_rank() == 2)
        groups = [dist.new_group(members) for members in ([0, 1], [1, 2], [0, 1, 2])]
        return [message_of(ddpcheck.assert_same_on_all_ranks, value, group=group, timeout=20)[1] for group in groups]

    first, second, third = ddp_world(world_size=3).run(compare)
    assert first[0] == second[0] == "" and "this rank is not in the group" in third[0]
    assert "Rank 2 differs from rank 1." in second[1] and second[1] == third[1]
    assert "Rank 2 differs from ranks 0 and 1." in first[2] and first[2] == second[2] == third[2]


@pytest.mark.slow
@pytest.mark.ddp(world_size=3, timeout=30, reuse="module")
def test_a_rank_that_never_asks_is_named_within_the_timeout_of_the_group(rank: int) -> None:
    group = torch.distributed.new_group([0, 1, 2], timeout=datetime.timedelta(seconds=1.5))
    ddpcheck.assert_same_on_all_ranks(ramp())  # so that the others are there in time
    if rank == 1:
        return
    with pytest.raises(HangError) as caught:
        ddpcheck.assert_same_on_all_ranks(ramp(), name="loss", group=group)
    assert str(caught.value).startswith("rank 1 did not call assert_same_on_all_ranks('loss') within 1.5 s; every rank")


@pytest.mark.ddp(reuse="module")
def test_ranks_that_ask_at_different_lines_are_told_so(rank: int) -> None:
    with pytest.raises(AssertionError, match="The ranks did not ask at the same line:") as caught:
        if rank:
            ddpcheck.assert_same_on_all_ranks(ramp())
        else:
            ddpcheck.assert_same_on_all_ranks([ramp()])
    assert str(caught.value).count("test_assertions.py:") == 2
    ddpcheck.assert_same_on_all_ranks(str(caught.value))


@pytest.mark.ddp(reuse="module")
def test_nothing_of_many_assertions_is_left_in_the_store() -> None:
    store = torch.distributed.distributed_c10d._get_default_store()
    for _ in range(3):
        ddpcheck.assert_same_on_all_ranks(1)
    before = store.num_keys()
    for _ in range(20):
        ddpcheck.assert_same_on_all_ranks(1)
    assert store.num_keys() - before <= 2


# --- Parity: real checks --------------------------------------------------------------------------------------------


def net(middle: Any = None, unused: bool = False) -> Any:
    model = nn.Sequential(nn.Linear(4, 6), middle or nn.Tanh(), nn.Linear(6, 1))
    if unused:
        model.register_parameter("spare", nn.Parameter(torch.ones(1)))
    return model


HEALTHY = Recipe(
    model=net,
    batch=lambda step: torch.randn(8, 4, generator=torch.Generator().manual_seed(step)),
    loss=lambda model, samples: model(samples).square().mean(),
)


def test_a_healthy_recipe_holds_and_gives_its_report() -> None:
    report = ddpcheck.assert_parity(HEALTHY, steps=1)
    assert isinstance(report, Report) and report.ok
    assert all(entry.elements and entry.reference_norm > 0 for entry in report.parity)
    assert Report.from_json(report.to_json()).parity == report.parity


@pytest.mark.slow
def test_a_broken_recipe_fails_with_its_findings() -> None:
    coupled = replace(HEALTHY, model=lambda: net(nn.BatchNorm1d(6)))
    with pytest.raises(FindingsError, match=r"(?s)not close.*DDP304") as caught:
        ddpcheck.assert_parity(coupled, steps=2)
    assert isinstance(caught.value, AssertionError) and "ddpcheck" in caught.value.detail
    assert [entry.path.name for entry in caught.traceback.filter(caught)] == ["test_assertions.py"]
    ddpcheck.assert_parity(coupled, steps=1, ignore="batch-coupled")
    with pytest.raises(FindingsError, match="could not be compared"):
        ddpcheck.assert_parity(replace(HEALTHY, model=lambda: net(unused=True)), steps=1, ignore=["DDP101"])
    ddpcheck.assert_parity(coupled, steps=1, rtol=10.0, atol=0.0)


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        (HEALTHY, {"rtol": 1e-3}, "atol is missing"),
        (HEALTHY, {"rtol": 1e-3, "atol": "a"}, "'a'"),
        (HEALTHY, {"select": ["DDP999"]}, "DDP999"),
        ("missing.py", {}, r"missing\.py"),
    ],
)
def test_wrong_use_of_assert_parity_is_refused(target: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ddpcheck.assert_parity(target, **options)


@pytest.mark.ddp(reuse="module")
def test_assert_parity_is_refused_on_a_rank() -> None:
    with pytest.raises(UsageError, match="call it in a plain test"):
        ddpcheck.assert_parity("x.py")


# --- Anomalous parameters -------------------------------------------------------------------------------------------


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.hidden = [nn.Parameter(torch.ones(3))]

    def forward(self, x: Any, how: str = "all") -> Any:
        from torch.utils.checkpoint import checkpoint

        x = self.body(x)
        if how == "checkpoint":
            return checkpoint(self.head, x, use_reentrant=True) * self.scale
        if how == "checkpoint of a method":
            return checkpoint(lambda y: self.head(y), x, use_reentrant=True) * self.scale
        x = x if how == "unused" else self.head(x.detach() if how == "cut" else x)
        return x * self.scale * (self.hidden[0] if how == "hidden" else 1)


def line_of(text: str) -> int:
    lines, first = inspect.getsourcelines(Gated)
    return first + next(number for number, line in enumerate(lines) if text in line)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("all", ()),
        ("checkpoint", ()),
        ("checkpoint of a method", ()),
        ("unused", ("2 parameters get no gradient", "head.weight of shape (3, 3)", "head.bias")),
        ("cut", ("2 parameters get no gradient", "body.weight", "body.bias")),
        ("hidden", ("1 tensor gets a gradient", "hidden[0]", "DDP106")),
    ],
)
def test_parameters_without_gradient_are_listed_in_any_process(how: str, expected: tuple[str, ...]) -> None:
    model = Gated()
    loss = model(torch.ones(2, 3), how).sum()
    with pytest.raises(AssertionError) if expected else contextlib.nullcontext() as caught:
        ddpcheck.assert_no_anomalous_params(loss, model)
    assert caught is None or all(words in str(caught.value) for words in expected)
    loss.backward()  # the graph is as it was


def test_lines_are_told_and_the_cause_where_the_loss_can_be_computed_again() -> None:
    model, x = Gated(), torch.ones(2, 3)
    with pytest.raises(AssertionError) as caught:
        ddpcheck.assert_no_anomalous_params(model(x, "unused").sum(), model)
    assert f"test_assertions.py:{line_of('self.head =')}" in str(caught.value) and "DDP101: " not in str(caught.value)
    with pytest.raises(AssertionError) as caught:
        ddpcheck.assert_no_anomalous_params(model(x, "cut").sum(), model, replay=lambda: model(x, "cut").sum())
    assert f"is cut by detach() at tests/testing/test_assertions.py:{line_of('x.detach()')}" in str(caught.value)
    assert [entry.path.name for entry in caught.traceback.filter(caught)] == ["test_assertions.py"]


def test_ignored_parameters_may_be_missing_and_must_exist() -> None:
    model = Gated()
    loss = model(torch.ones(2, 3), "unused").sum()
    ddpcheck.assert_no_anomalous_params(loss, model, ignore="head.*")
    ddpcheck.assert_no_anomalous_params(loss, model, ignore=["head.weight", "head.bias"])
    with pytest.raises(AssertionError, match=r"1 parameter gets[^:]*:[^:]*:\s+head.bias"):
        ddpcheck.assert_no_anomalous_params(loss, model, ignore=["head.weight"], msg=lambda text: f"mine\n{text}")
    with pytest.raises(UsageError, match=r"'tail\.\*'"):
        ddpcheck.assert_no_anomalous_params(loss, model, ignore=["tail.*"])


def test_what_has_no_gradient_at_all_is_wrong_use() -> None:
    with pytest.raises(UsageError, match="no tensor that requires grad"):
        ddpcheck.assert_no_anomalous_params(torch.ones(()), Gated())
    with pytest.raises(UsageError, match=r"model is an nn\.Module, not Tensor"):
        ddpcheck.assert_no_anomalous_params(nn.Linear(2, 1), torch.ones(2))
    with pytest.raises(UsageError, match="no parameter of the model requires grad"):
        ddpcheck.assert_no_anomalous_params(torch.ones((), requires_grad=True), Gated().requires_grad_(False))


@pytest.mark.ddp(world_size=3, reuse="module")
@pytest.mark.parametrize("wrap", [False, True], ids=["bare", "wrapped"])
def test_all_ranks_are_told_of_parameters_that_some_miss(wrap: bool, rank: int) -> None:
    messages = []
    for how in ("all", "unused", "all/unused/all", "hidden/all", "all/none/all"):  # on each rank, if not on all
        model = Gated()
        wrapped = nn.parallel.DistributedDataParallel(model) if wrap else model
        here = how.split("/")[min(rank, how.count("/"))]
        loss = torch.ones(()) if here == "none" else wrapped(torch.ones(2, 3), here).sum()
        messages.append(message_of(ddpcheck.assert_no_anomalous_params, loss, wrapped, timeout=30)[1])
    ddpcheck.assert_same_on_all_ranks(messages)
    healthy, unused, on_one, hidden, none = messages
    assert healthy == "" and "2 parameters get no gradient" in unused and "module.head" not in unused
    assert "2 parameters contribute on some ranks only" in on_one and "not on rank 1" in on_one and "DDP104" in on_one
    assert "hidden[0] of shape (3,), on rank 0" in hidden
    assert "requires grad" in none and "(rank 1)" in none
