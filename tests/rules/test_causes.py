"""One finding a root cause: each relation of the rule table, and what becomes of several at once."""

import pytest

from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding
from ddpcheck.findings.rules import RULES, Severity
from ddpcheck.findings.wording import make_finding
from ddpcheck.rules.causes import find_causes, finding_key, follows_from, is_reported_on_common_tensor
from ddpcheck.rules.collectives.ddp401_rank_raised import FROM_TRUNCATED_FILE
from ddpcheck.rules.collectives.diagnose import diagnose
from ddpcheck.rules.loss.ddp307_nothing_compared import ALL_MISSING
from ddpcheck.rules.parameters.ddp106_unregistered_parameter import MADE_IN_FORWARD
from ddpcheck.trace.collectives import ON_GRADIENTS
from ddpcheck.trace.failures import FailureFacts
from ddpcheck.trace.losses import BY_NORMALISATION
from ddpcheck.worlds import failures
from ddpcheck.worlds.failures import exception_data

RELATIONS = [(rule.code, one, code) for rule in RULES.values() for one in rule.explains for code in one.codes]
APART: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "same subjects": (("head.weight", "head.bias"), ("head.bias",), ()),
    "only the loss": (("head.weight",), ("loss",), ()),
    "of gradients": (("all_reduce",), ("head.weight",), (ON_GRADIENTS,)),
    "made in forward": (("head.weight",), ("other",), (MADE_IN_FORWARD,)),
    "its statistics": (("norm",), ("norm.running_mean",), (BY_NORMALISATION,)),
    "by steps": (("a",), ("step",), ()),
    "always": (("head.weight",), ("other",), ()),
    "an error": (("no_sync",), ("head.weight",), ()),
    "a note": (("head.weight",), ("hook",), ()),
    "of a cut file": (("model.pt",), ("run",), (FROM_TRUNCATED_FILE,)),
    "of graphs": (("parameter",), ("forward",), ("of graphs",)),
    "of a copy": (("head.weight",), ("teacher",), ("of a copy",)),
    "none is there": (("head.weight",), ("loss",), (ALL_MISSING,)),
}
"""By case: the subjects of the cause and of its consequence, and the tags of one of them."""


def finding(code: str, *subjects: str, tags: tuple[str, ...] = (), severity: Severity = Severity.ERROR) -> Finding:
    return replace(make_finding(code, subjects, f"What {code} says."), tags=tags, severity=severity)


def test_a_consequence_is_told_as_evidence_of_its_cause() -> None:
    for code, explains, other in RELATIONS:
        mine, theirs, tags = APART[explains.when]
        severity = Severity.NOTE if explains.when == "a note" else Severity.ERROR
        cause, found = finding(code, *mine, tags=tags), finding(other, *theirs, tags=tags, severity=severity)
        for both in ([cause, found], [found, cause]):
            causes = find_causes(both)
            assert [kept.code for kept in causes.findings] == [code], (code, other)
            assert causes.root_causes == 2 * causes.findings
            (kept,) = causes.findings
            assert (f"with it comes {other}: {found.message}" in kept.evidence) != explains.quietly, (code, other)
            assert (other in kept.tags) != explains.quietly
        assert follows_from(found, [cause, found]) and not follows_from(cause, [cause, found])
        assert not follows_from(found, [replace(cause, severity=Severity.WARNING)])


@pytest.mark.parametrize(
    ("cause", "consequence"),
    [
        (finding("DDP101", "a"), finding("DDP301", "b")),
        (finding("DDP208", "head.weight"), finding("DDP516", "loss", "targets")),
        (finding("DDP106", "table"), finding("DDP312", "head.weight")),
        (finding("DDP304", "norm", tags=(BY_NORMALISATION,)), finding("DDP215", "counter")),
        (finding("DDP304", "Norm"), finding("DDP215", "Norm.running_mean")),
        (finding("DDP502", "a"), finding("DDP508", "a")),
        (finding("DDP303", "a"), finding("DDP302", "a")),
        (finding("DDP502", "no_sync", severity=Severity.WARNING), finding("DDP306", "head.weight")),  # without effect
    ],
)
def test_what_has_another_cause_stays(cause: Finding, consequence: Finding) -> None:
    causes = find_causes([cause, consequence])
    assert causes.findings == causes.root_causes == [cause, consequence]


def test_buffers_that_differ_are_the_cause_of_losses_that_are_normalised_by_them() -> None:
    coupled = finding("DDP304", "norm", tags=(BY_NORMALISATION,))
    assert [one.code for one in find_causes([coupled, finding("DDP214", "seen")]).findings] == ["DDP214"]


@pytest.mark.parametrize(
    ("error", "ranks", "codes"),
    [
        (EOFError("Ran out of input"), (1,), ["DDP512"]),
        (RuntimeError("PytorchStreamReader failed reading zip archive"), (1,), ["DDP512"]),
        (EOFError("Ran out of input"), (0,), ["DDP401", "DDP512"]),  # another rank reads it
    ],
)
def test_a_file_that_is_read_too_early_explains_an_exception_of_one_that_is_cut_off(error, ranks, codes) -> None:
    raised = diagnose(FailureFacts([failures.failure_of_exception(1, exception_data(error, "", ""))], [[], []]))
    early = replace(finding("DDP512", "model.pt"), ranks=ranks)
    assert [item.code for item in find_causes([*raised, early]).findings] == codes


def test_what_comes_of_a_consequence_belongs_to_the_root() -> None:
    root, between, last = finding("DDP501", "module"), finding("DDP208", "a"), finding("DDP302", "b")
    causes = find_causes([last, between, root])
    (kept,) = causes.findings
    assert kept.code == "DDP501" and kept.tags == ("DDP208",)
    assert causes.root_causes == [kept, kept, kept]


def test_the_same_rule_on_fewer_subjects_is_told_once() -> None:
    whole, part, apart = (finding("DDP101", *subjects) for subjects in ("ab", "b", "c"))
    assert find_causes([whole, part]).root_causes == [whole, None]
    assert find_causes([part, apart]).findings == [part, apart]


def test_a_cause_that_takes_the_severity_of_what_comes_of_it() -> None:
    (consequence, *_), *_ = (relation.codes for relation in RULES["DDP215"].explains)
    for severity in (Severity.ERROR, Severity.WARNING):
        both = [finding("DDP215", "x", severity=Severity.WARNING), finding(consequence, "loss", severity=severity)]
        assert find_causes(both).findings[0].severity is severity


def test_a_watch_knows_what_it_has_reported() -> None:
    assert finding_key(finding("DDP104", "blocks.1.weight")) == finding_key(finding("DDP104", "blocks.7.weight"))
    assert finding_key(finding("DDP101", "blocks.1.weight")) != finding_key(finding("DDP101", "blocks.7.weight"))
    for code, subjects, is_reported in (("DDP306", "ab", True), ("DDP306", "b", False), ("DDP302", "ab", False)):
        assert is_reported_on_common_tensor(finding(code, *subjects), [finding(code, "a")]) is is_reported
