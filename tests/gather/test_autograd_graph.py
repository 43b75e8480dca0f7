"""What the graph can tell: the engine and the walk agree, depth is no trouble, and a cut path is told with its line."""

import gc
import inspect
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ddpcheck.extras.graph.graph_phases import FlowRecorder
from ddpcheck.findings.evidence.steps import PathEnd
from ddpcheck.gather.autograd import autograd_graph as graph
from ddpcheck.gather.autograd.autograd_graph import LossGraph, engine_answers, reached_by, unregistered_tensors
from ddpcheck.gather.autograd.gradient_paths import Explainer, PathRecorder, function_name

ROOT = Path(__file__).parents[2]


OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: a * b,
    "detach": lambda a, b: a.detach() + 1,
    "data": lambda a, b: a.data * b,
    "half": lambda a, b: torch.cat([a, b])[:2],
    "where": lambda a, b: torch.where(torch.tensor([True, False]), a, b),
    "view": lambda a, b: a.view(2, 1).squeeze(1),
    "no grad": lambda a, b: _without_grad(a, b),
    "in place": lambda a, b: a.clone().mul_(b),
}


@torch.no_grad()
def _without_grad(a: Any, b: Any) -> Any:
    return a + b


@st.composite
def small_graphs(draw: st.DrawFn) -> tuple[list[Any], Any]:
    """Some leaves, and a loss that a random program computes from them."""
    frozen = draw(st.lists(st.booleans(), min_size=1, max_size=5))
    leaves = [torch.ones(2, requires_grad=not cold) for cold in frozen]
    values = list(leaves)
    for name in draw(st.lists(st.sampled_from(sorted(OPERATIONS)), max_size=12)):
        one, other = (values[draw(st.integers(0, len(values) - 1))] for _ in range(2))
        values.append(OPERATIONS[name](one, other))
    chosen = draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=3))
    return leaves, sum(values[index].sum() for index in chosen)


@settings(deadline=None, max_examples=60)
@given(small_graphs())
def test_the_engine_the_walk_and_backward_agree(case: tuple[list[Any], Any]) -> None:
    leaves, loss = case
    asked = reached_by(loss, leaves)
    walk = LossGraph([loss])
    assert walk.is_complete and asked == [any(leaf is found for found in walk.leaves) for leaf in leaves]
    assert all(leaf.grad is None for leaf in leaves), "asking changes nothing"
    if loss.requires_grad:
        reached, _ = engine_answers(loss, leaves)
        assert not reached
        loss.backward()
        assert reached == asked
    assert asked == [leaf.grad is not None for leaf in leaves]


def test_a_hook_is_told_whether_the_graph_is_kept() -> None:
    weight, kept = nn.Parameter(torch.ones(2)), []
    loss = (weight * weight).sum()
    loss.register_hook(lambda _gradient: kept.append(graph.keeps_graph()))
    loss.backward(retain_graph=True)
    loss.backward()
    assert kept == [True, False]


def test_the_node_at_which_a_backward_pass_begins_is_known_though_the_engine_does_not_count_it() -> None:
    weight, seen = nn.Parameter(torch.ones(2)), []
    loss = (weight * weight).sum()
    node = loss.grad_fn
    loss.register_hook(lambda _gradient: seen.append((graph.running_node() is node, graph.will_be_reached([node]))))
    loss.backward()
    assert seen == [(True, [False])] and graph.running_node() is None


def test_a_loss_that_is_itself_a_parameter() -> None:
    one, other = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(1.0))
    assert reached_by(one, [one, other]) == [True, False]
    assert reached_by(one.detach(), [one, other]) == [False, False]


def test_asking_leaves_the_hooks_and_the_graph_of_the_loss_as_they_were() -> None:
    weight = nn.Parameter(torch.ones(2))
    loss = (weight * 2).sum()
    calls: list[Any] = []
    loss.register_hook(calls.append)
    for _ in range(3):
        assert reached_by(loss, [weight]) == [True]
    calls.clear()
    loss.backward()
    assert len(calls) == 1 and weight.grad.tolist() == [2.0, 2.0]


DEEP = """
import torch
from torch import nn
from ddpcheck.anomalous import detect_anomalous_params
from ddpcheck.gather.autograd.autograd_graph import WALK_LIMIT, reached_by, LossGraph

model = nn.ParameterDict({"used": torch.ones(1), "unused": torch.ones(1)})
y = model["used"]
for _ in range(100_000):
    y = y + 1
loss = y.sum()
del y
assert reached_by(loss, [model["used"], model["unused"]]) == [True, False]
walk = LossGraph([loss])
assert not walk.is_complete
found = detect_anomalous_params(loss, model)
assert found.missing == ("unused",), found
print("found")
del walk, found
if BACKWARD:
    loss.backward()
del loss
print("freed")
"""


def test_following_a_path_makes_no_python_object_for_a_node_of_the_graph() -> None:
    """A chain of such objects is freed recursively: at some 50,000 the process ends."""
    model = nn.ParameterDict({"gate": torch.ones(1)})
    nodes = lambda: {id(thing) for thing in gc.get_objects() if type(thing).__name__ == "MulBackward0"}  # noqa: E731
    of_other_tests = nodes()
    for recorder in (PathRecorder(model, [model["gate"]]), FlowRecorder({id(model): ""})):
        with recorder:
            y = model["gate"]
            for _ in range(50):
                y = y * model["gate"]
            cut = y.detach() * 2
        assert nodes() <= of_other_tests and cut.grad_fn is None


@pytest.mark.slow
@pytest.mark.parametrize("backward", [True, False])
def test_a_chain_of_a_hundred_thousand_nodes_is_answered_and_freed(backward: bool) -> None:
    program = DEEP.replace("BACKWARD", str(backward))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, ["found", "freed"]), done


def test_a_walk_stops_at_its_limit() -> None:
    y = torch.ones(1, requires_grad=True)
    for _ in range(50):
        y = y + 1
    assert not LossGraph([y], limit=20).is_complete and LossGraph([y], limit=20).leaves == ()
    walk = LossGraph([y], limit=200)
    assert walk.is_complete and len(walk.leaves) == 1 and "AddBackward0" in walk.node_names


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 2


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        return self.layer(x).detach()  # <- inner


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head, self.inner = nn.Linear(3, 3), nn.Linear(3, 1), Inner()


def detach(m: Model, x: Any) -> Any:
    hidden = m.layer(x).tanh()
    hidden = hidden.detach()  # <- here
    return m.head(hidden * 2)


def within(switch: Any) -> Callable[[Model, Any], Any]:
    def forward(m: Model, x: Any) -> Any:
        with switch():
            hidden = m.layer(x)  # <- here
        return m.head(hidden.clone())

    return forward


def sampled(m: Model, x: Any) -> Any:
    of_other = m.inner.layer(x)
    drawn = torch.distributions.Normal(of_other, m.layer(x).exp()).sample()  # <- here
    return m.head(drawn + of_other)


def written_through_a_view(m: Model, x: Any) -> Any:
    cache = torch.zeros(4, 3)
    with torch.no_grad():
        cache[1:3] = m.layer(x)  # <- here
    return m.head(cache)


def written_through_data(m: Model, x: Any) -> Any:
    cache = torch.zeros(2, 3)
    cache.data.copy_(m.layer(x))
    return m.head(cache)


def through_shared_memory(m: Model, x: Any) -> Any:
    weight = torch.empty(3, 3)
    weight.data = m.layer.weight.data  # <- here
    return m.head(x @ weight)


def through_a_file(m: Model, x: Any) -> Any:
    file = io.BytesIO()
    torch.save(m.layer(x).detach(), file)  # <- here
    file.seek(0)
    return m.head(x * torch.load(file))


def logged(m: Model, x: Any) -> Any:
    str(m.layer(x).sum().item())
    return m.head(x)


def output_dropped(m: Model, x: Any) -> Any:
    hidden = m.layer(x)
    hidden = hidden.tanh()  # <- here
    return m.head(x)


def never_read(m: Model, x: Any) -> Any:
    return m.head(x)


BY_NUMPY = "numpy(), which leaves torch or detach()"
REENTRANT = "a re-entrant checkpoint of which no input requires grad"
CASES: dict[str, tuple[Callable[[Model, Any], Any], str, str]] = {
    "rebuilt": (lambda m, x: m.head(x @ nn.Parameter(m.layer.weight / 2)), "cut", "nn.Parameter(), a new leaf"),
    "leaf": (lambda m, x: m.head(x @ torch.tensor(m.layer.weight, requires_grad=True)), "cut", "tensor(), a new leaf"),
    "new_tensor": (lambda m, x: m.head(x * x.new_tensor(m.layer(x))), "cut", "new_tensor(), which has no derivative"),
    "format": (lambda m, x: m.head(x * float(f"{m.layer(x).sum():.3f}")), "cut", "format(), which leaves torch"),
    "shared memory": (through_shared_memory, "cut", "what follows .data"),
    "file": (through_a_file, "cut", "what follows detach()"),
    "re-entrant": (lambda m, x: m.head(checkpoint(m.layer, x, use_reentrant=True)), "cut", REENTRANT),
    "detach": (detach, "cut", "detach()"),
    "detached parameter": (lambda m, x: m.head(F.linear(x, m.layer.weight.detach())), "cut", "detach()"),
    "detached after a function": (lambda m, x: m.head(Double.apply(m.layer(x)).detach()), "cut", "detach()"),
    "data": (lambda m, x: m.head(m.layer(x).data), "cut", ".data"),
    "no_grad": (within(torch.no_grad), "cut", "torch.no_grad()"),
    "argmax": (
        lambda m, x: m.head(F.one_hot(m.layer(x).argmax(-1), 3).float() + x),
        *("cut", "argmax(), which is not differentiable"),
    ),
    "item": (lambda m, x: m.head(x * m.layer(x).sum().item()), "cut", "item(), which leaves torch"),
    "numpy": (lambda m, x: m.head(torch.from_numpy(m.layer(x).detach().numpy().copy())), "cut", BY_NUMPY),
    "sampled": (sampled, "cut", "torch.no_grad()"),
    "written through a view": (written_through_a_view, "cut", "torch.no_grad()"),
    "written through data": (written_through_data, "cut", ""),
    "logged": (logged, "unreachable", "item(), which leaves torch"),
    "shape": (lambda m, x: m.head(torch.ones(m.layer(x).shape)), "unreachable", "linear()"),
    "output dropped": (output_dropped, "unreachable", "tanh()"),
    "never read": (never_read, "unused", ""),
}


def marked_line(source: Callable[..., Any] | type, mark: str = "# <- here") -> int | None:
    """The line with the mark, or that of a lambda."""
    lines, first = inspect.getsourcelines(source)
    marked = (first + index for index, line in enumerate(lines) if mark in line)
    return first if source.__name__ == "<lambda>" else next(marked, None)


def explain(forward: Callable[[Model, Any], Any], name: str = "layer.weight") -> PathEnd:
    torch.manual_seed(0)
    model, x = Model(), torch.rand(2, 3) + 0.5
    loss = forward(model, x).sum()
    suspect = dict(model.named_parameters())[name]
    assert reached_by(loss, [suspect, model.head.weight]) == [False, True]
    saved, version = {key: value.clone() for key, value in model.state_dict().items()}, suspect._version
    end = Explainer(model, lambda: [forward(model, x).sum()]).explain({name: suspect})[name]
    assert all(torch.equal(value, saved[key]) for key, value in model.state_dict().items())
    assert suspect._version == version  # which a backward pass that may still come looks at
    return end


@pytest.mark.filterwarnings("ignore:To copy construct", "ignore:None of the inputs")
@pytest.mark.parametrize("name", CASES)
def test_why_a_parameter_does_not_contribute(name: str) -> None:
    forward, cause, reason = CASES[name]
    end = explain(forward)
    assert end.cause == cause and end.reason in (reason or end.reason).split(" or ")
    if (line := marked_line(forward)) is not None:
        assert end.location is not None
        assert (os.path.basename(end.location.path), end.location.line) == (os.path.basename(__file__), line)


def test_the_module_in_which_a_path_is_cut_is_named() -> None:
    end = explain(lambda m, x: m.head(m.inner(x)), "inner.layer.weight")
    assert (end.cause, end.module) == ("cut", "inner")
    assert end.location is not None and end.location.line == marked_line(Inner, "# <- inner")


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.head(Double.apply(m.layer(x))),
        lambda m, x: m.head(m.layer(x)) + m.layer(x).detach().sum(),
        lambda m, x: m.head(torch.zeros(4, 3).index_copy(0, torch.tensor([1, 2]), m.layer(x))),
    ],
    ids=["custom function", "detached beside a whole path", "written with gradient"],
)
def test_a_path_that_is_whole_is_not_missed(forward: Any) -> None:
    model = Model()
    assert reached_by(forward(model, torch.ones(2, 3)).sum(), [model.layer.weight]) == [True]


@pytest.mark.parametrize("switch", [torch.no_grad, torch.inference_mode])
def test_what_is_cut_in_one_block_is_known_to_be_cut_together(switch: Any) -> None:
    model, x = Model(), torch.ones(2, 3)

    def forward() -> Any:
        with switch():  # <- region
            hidden = model.layer(x)
            hidden = hidden + model.inner.layer(x)
        return [model.head(hidden.clone()).sum()]

    suspects = {name: p for name, p in model.named_parameters() if not name.startswith("head")}
    ends = Explainer(model, forward).explain(suspects).values()
    assert {end.no_grad_location.line for end in ends if end.no_grad_location} == {marked_line(forward, "# <- region")}
    assert len(ends) == 4 and len({end.location for end in ends}) == 2


def test_a_forward_that_refuses_other_values_or_differs_from_itself_still_gets_an_answer() -> None:
    model, x = Model(), torch.ones(2, 3)
    calls: list[int] = []

    def picky() -> Any:
        if model.layer.weight.sum().detach() != before:
            raise ValueError("I do not like this weight")
        return [model.head(x).sum()]

    def restless() -> Any:
        calls.append(1)
        model.layer(x)
        return [model.head(x).sum() + len(calls)]

    before = model.layer.weight.sum().detach().clone()
    suspect = {"layer.weight": model.layer.weight}
    assert Explainer(model, picky).explain(suspect)["layer.weight"].cause in ("unreachable", "cut")
    assert Explainer(model, restless).explain(suspect)["layer.weight"].cause == "unreachable"


class HeadAlone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.idle = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def test_an_idle_parameter_of_a_scripted_module_is_unused() -> None:
    model = torch.jit.script(HeadAlone())
    end = Explainer(model, lambda: [model(torch.ones(2, 3)).sum()]).explain({"idle.bias": model.idle.bias})
    assert end == {"idle.bias": PathEnd("unused")}


def test_the_recorder_is_gone_when_the_forward_pass_raises() -> None:
    model = Model()

    before = nn.Parameter.__new__, torch.inference_mode.__enter__

    def forward() -> list[Any]:
        model.layer(torch.ones(2, 3))
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        Explainer(model, forward).explain({"layer.weight": model.layer.weight})
    from torch.nn.modules import module as hooks

    assert not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks
    assert torch.overrides._get_current_function_mode() is None
    assert (nn.Parameter.__new__, torch.inference_mode.__enter__) == before
    assert type(nn.Parameter(torch.ones(2))) is nn.Parameter


def test_tensors_that_are_held_without_being_registered_are_found_by_name() -> None:
    class Helper:
        def __init__(self) -> None:
            self.table, self.back = torch.zeros(2), self

    model = Model()
    model.layers = [nn.Linear(1, 1, bias=False), nn.Sequential(nn.Linear(1, 1, bias=False))]
    model.by_name = {"key": torch.zeros(3)}
    model.inner.raw = torch.zeros(4, requires_grad=True)
    model.helper = Helper()
    model.register_buffer("registered", torch.zeros(5))
    model.alias = model.registered
    model.text, model.number, model.itself = "text", 3, [model]
    assert [name for name, _ in unregistered_tensors(model)] == [
        *("layers[0].weight", "layers[1].0.weight", "by_name['key']", "helper.table", "inner.raw")
    ]
    assert list(unregistered_tensors(nn.Linear(2, 2))) == []


class Forget(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, None


def test_the_custom_function_nearest_to_a_parameter_is_named() -> None:
    weight, x = torch.ones(3, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    assert LossGraph([Double.apply(Forget.apply(x, weight.t() * 2)).sum()]).nearest_functions(weight) == (Forget,)
    assert set(LossGraph([(Double.apply(weight) + Forget.apply(x, weight).sum()).sum()]).nearest_functions(weight)) == {
        Double,
        Forget,
    }
    assert LossGraph([(x @ weight).sum()]).nearest_functions(weight) == ()
    assert LossGraph([Double.apply(x).sum()]).nearest_functions(weight) == ()


def test_a_property_has_the_name_that_torch_gives_it() -> None:
    overridable = [f for functions in torch.overrides.get_overridable_functions().values() for f in functions]
    properties = [f for f in overridable if getattr(f, "__name__", "") in ("__get__", "__set__")]
    said = {str(torch.overrides.resolve_name(f)): function_name(f) for f in properties}
    assert said["torch.Tensor.data.__get__"] == "data" and len(said) > 20
    assert [name for name, ours in said.items() if name.split(".")[-2] != ours] == []
