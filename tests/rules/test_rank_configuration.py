"""DDP221, 223, 503 and 516 from what ranks say in words, and what the ranks say, each with a clean twin."""

from typing import Any

import pytest

from ddpcheck.findings.evidence.gradients import Difference, ShardAnalysis
from ddpcheck.findings.evidence.modules import WrapperFacts
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import Names
from ddpcheck.rules.data.ddp516_rank_dependent_program_data import judge_program_data
from ddpcheck.rules.replicas.comparisons import judge_options
from ddpcheck.rules.replicas.ddp216_unregistered_state import judge_changing_data
from ddpcheck.rules.replicas.ddp503_changed_after_wrapping import judge_changes
from ddpcheck.trace.check_context import JudgeContext, SingleProcessFacts
from tests.reports import assert_says, only

torch = pytest.importorskip("torch")
nn = torch.nn


BUCKETS = {"bucket_cap_mb": ("1", "2")}
SETS = {"group 0 parameters": ("a, b, c", "a, c, d"), "group 0 order": ("a, b, c", "c, d, a")}


@pytest.mark.parametrize(
    ("code", "options", "subjects", "severity", "evidence"),
    [
        ("DDP223", {"lr": ("0.1", None)}, ("lr",), "error", "rank 1: (not set)"),
        ("DDP221", BUCKETS, ("bucket_cap_mb",), "warning", ""),  # how a rank stores its gradients
        ("DDP221", BUCKETS | {"static_graph": ("False", "True")}, ("bucket_cap_mb", "static_graph"), "error", ""),
        ("DDP221", BUCKETS | {"find_unused_parameters": ("True", "True")}, ("bucket_cap_mb",), "error", ""),
        ("DDP221", BUCKETS | {"bucket_cap_mb_list": ("True", "True")}, ("bucket_cap_mb",), "error", ""),
        ("DDP223", {"class": ("SGD", "AdamW"), "group 0 eps": (None, "1e-8")}, ("class",), "error", ""),
        ("DDP223", SETS, ("group 0 parameters",), "error", "group 0 parameters: rank 0: b; rank 1: d"),
        ("DDP223", {"group 0 order": ("a, b, c", "a, c, b")}, ("group 0 order",), "warning", "rank 0: number 1 is b;"),
    ],
)
def test_options_that_differ(code: str, options: Any, subjects: Any, severity: str, evidence: str) -> None:
    ranks = [{name: values[rank] for name, values in options.items() if values[rank] is not None} for rank in (0, 1)]
    assert_says(judge_options(code, ranks, "The wrapper"), f"{code} {severity} {subjects} of ranks (1,) ... {evidence}")
    assert judge_options(code, ranks[:1] * 2, "The wrapper") == []


def derived(*data: dict[str, str], changed: frozenset[str] = frozenset()) -> list[Finding]:
    known = JudgeContext(Names(), WrapperFacts(), 2, program_data=data, changed_data=changed)
    wrong, analysis = (Difference("a", 0.5, 1e-6),), ShardAnalysis()
    facts = SingleProcessFacts(wrong, (1,), 1e-6, analysis, known, ("a: relative error 0.5",))
    return judge_changing_data(facts) or judge_program_data(facts)


def test_a_value_that_the_steps_change_is_state_and_told_before_data() -> None:
    held = ({"t": "0.5", "labels": "{'a': 0}"}, {"t": "1.0", "labels": "{'a': 1}"})
    words = "t changes in the steps ... | t: rank 0: 0.5; rank 1: 1.0 |"
    assert_says(derived(*held, changed=frozenset({"t"})), f"DDP216 error ('t',) ... {words}")
    assert only(derived(*held[:1] * 2, *held[1:])).code == "DDP516"


def test_a_label_map_that_differs_is_named_with_what_each_rank_holds() -> None:
    words = "in steps (1,) ... | labels: rank 0: {'a': 0}; rank 1: {'a': 1} |"
    findings = derived({"labels": "{'a': 0}", "size": "3"}, {"labels": "{'a': 1}", "size": "3"})
    assert_says(findings, f"DDP516 ... ('labels',) of ranks (1,) ... {words}")
    assert_says(derived({"mean": "0"}, {"mean": "7"}), "('mean',)")  # which is not the rank, but for one


def test_what_does_not_differ_or_only_names_the_rank_is_no_finding() -> None:
    assert derived({"size": "3"}, {"size": "3"}) == derived({"only_here": "3"}, {}) == derived() == []
    assert derived({"log": "'rank0.log'"}, {"log": "'rank1.log'"}) == derived({"rank": "0"}, {"rank": "1"}) == []


def test_of_a_long_value_only_what_is_around_the_difference_is_shown() -> None:
    words = [f"'word{number}'" for number in range(500)]
    values = (", ".join([*words[:250], middle, *words[251:]]) for middle in (words[250], "'changed'"))
    text = only(derived(*({"vocabulary": value} for value in values))).evidence[0]
    assert "word250" in text and "'changed'" in text and len(text) < 400


def test_changes_after_wrapping_are_one_finding_that_names_what_became_of_which() -> None:
    assert judge_changes([{}, {}]) == []
    words = "DDP503 ... ('a', 'b') of ranks () ... : a was added and b was frozen after wrapping"
    assert_says(judge_changes([{"a": "added"}, {"a": "added", "b": "frozen"}]), words)
    assert_says(judge_changes([{}, {"b": "frozen"}]), "of ranks (1,)")


# --- What a rank says ----------------------------------------------------------------------------------------------


def options(*args: Any, **kwargs: Any) -> dict[str, str]:
    from ddpcheck.gather.ddp.ddp_wrapper import constructor_options

    return constructor_options(nn.parallel.DistributedDataParallel.__init__, None, *args, **kwargs)


def test_the_arguments_of_the_constructor_are_told_by_name_and_defaults_are_what_they_stand_for() -> None:
    module = nn.Linear(2, 2)
    assert options(module) == options(module, broadcast_buffers=True, bucket_cap_mb=25, device_ids=[3])
    assert options(module)["find_unused_parameters"] == "False"
    told = options(module, static_graph=True, delay_all_reduce_named_params=[("bias", module.bias)])
    assert (told["static_graph"], told["delay_all_reduce_named_params"]) == ("True", "['bias']")
    assert options(module, param_to_hook_all_reduce=module.weight)["param_to_hook_all_reduce"] == "'weight'"
    assert options(module, no_such_option=1) == {}


def test_the_variables_of_a_function_are_its_closure_globals_defaults_and_attributes() -> None:
    from ddpcheck.gather.state.reachable import function_variables

    labels = {"a": 0}

    def loss(weight: float = 0.5) -> object:
        return (lambda: nn), labels, weight

    loss.calls = 3  # type: ignore[attr-defined]
    assert {(variable.name, variable.kind, str(variable.value)) for variable in function_variables(loss)} == {
        ("labels", "closure variable", "{'a': 0}"),
        ("nn", "global variable", str(nn)),
        ("weight", "default argument", "0.5"),
        ("loss.calls", "attribute", "3"),
    }


def test_sets_are_spelled_alike_whatever_their_order_and_dicts_are_not() -> None:
    from ddpcheck.gather.phases.program_data import _texts_in

    class Vocabulary:
        def __init__(self) -> None:
            self.words = ["a", "b"]

    forth, back = [str(i) for i in range(50)], [str(i) for i in reversed(range(50))]
    assert _texts_in("x", set(forth), 0) == _texts_in("x", set(back), 0)
    assert _texts_in("x", dict.fromkeys(forth, 1), 0) != _texts_in("x", dict.fromkeys(back, 1), 0)
    assert _texts_in("x", [object()], 0) == _texts_in("x", True, 0) == _texts_in("x", nn.ReLU(), 0) == {}
    assert _texts_in("x", [1, ("a", {2.5})], 0) == {"x": "[1, ('a', {2.5})]"}
    assert _texts_in("vocabulary", Vocabulary(), 0) == {"vocabulary.words": "['a', 'b']"}
