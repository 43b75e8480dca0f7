"""The matrix without a process: which options are tried, what follows from rows, and how they are shown."""

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ddpcheck import cli
from ddpcheck.extras.matrix.advice import advise
from ddpcheck.extras.matrix.check_matrix import _judge_step, step_time
from ddpcheck.extras.matrix.option_sets import (
    DEFAULTS,
    FIND_UNUSED,
    STATIC_GRAPH,
    DDPOptions,
    ModelFacts,
    OptionSet,
    VariantStep,
    first_option_sets,
    further_option_sets,
)
from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Report, ReportError
from ddpcheck.findings.rules import Severity
from ddpcheck.render import MATRIX_FORMATS, Medium, renderer_for
from ddpcheck.report.matrix.matrix import Matrix, MatrixRow, StepTime
from ddpcheck.rules.loss.ddp514_accumulation_scale import micro_batch_mismatch

SPLIT = Finding("DDP104", ("[red]head",), "[red]head did not contribute on rank 1.", Severity.ERROR, ranks=(1,))
NEEDLESS = Finding("DDP109", ("find_unused_parameters",), "It searches for nothing.", Severity.NOTE)
DRIFT = Finding("DDP214", ("mean",), "1 buffer differs between ranks.", Severity.WARNING)
SUM = Finding("DDP305", ("loss",), "The loss sums over samples.", Severity.ERROR)
VIEW = {"gradient_as_bucket_view": True}


def timed(ratio: float, spread: float = 0.01) -> StepTime:
    return StepTime(ratio, ratio - spread, ratio + spread, 0.012, 41)


def row(verdict: str = "right", finding: Finding | None = None, **options) -> MatrixRow:
    arguments = {name: options.pop(name) for name in list(options) if name not in MatrixRow.__dataclass_fields__}
    if finding is not None and finding.severity is Severity.ERROR:
        options = {"code": finding.code, "reason": finding.message, **options}
    return MatrixRow(arguments, verdict, findings=(finding,) if finding else (), **options)


BRANCHING = (
    row("stops", SPLIT, own=True),
    row(find_unused_parameters=True, baseline=True, step_time=timed(1.0, 0.0)),
    row("stops", SPLIT, static_graph=True),
    row(find_unused_parameters=True, gradient_as_bucket_view=True, step_time=timed(0.8)),
    row("lossy", find_unused_parameters=True, hook="fp16_compress_hook", error=3.9e-4, step_time=timed(1.3)),
    row("skipped", find_unused_parameters=True, bucket_cap_mb=1, reason="all gradients fit into one bucket"),
    row("skipped", find_unused_parameters=True, bucket_cap_mb=100, reason="all gradients fit into one bucket"),
)
MATRIX = Matrix(
    target="net.py",
    rows=BRANCHING,
    advice=advise(BRANCHING, noise=0.015),
    environment={"torch": "2.13.0"},
    world={"world_size": 2, "backend": "gloo", "device": "cpu", "steps": 3, "notes": ["A note."]},
    noise=0.015,
    timing={"total": 1.5},
    tool={"name": "ddpcheck", "version": "0.1.0"},
)


def option_sets(
    facts: ModelFacts, base: DDPOptions = DEFAULTS, graphs: tuple[DDPOptions, ...] = ()
) -> dict[str, OptionSet]:
    return {str(option_set.options): option_set for option_set in further_option_sets(facts, base, graphs)}


def tried(*arguments: Any) -> list[str]:
    return [title for title, option_set in option_sets(*arguments).items() if not option_set.skip_reason]


def test_only_options_of_the_installed_torch_are_tried() -> None:
    old = ModelFacts(known=("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "broadcast_buffers"))
    assert first_option_sets(old) == [DEFAULTS, FIND_UNUSED, STATIC_GRAPH]
    assert tried(replace(old, buffers=1), DEFAULTS, (FIND_UNUSED,)) == [
        "gradient_as_bucket_view=True",
        "find_unused_parameters=True, gradient_as_bucket_view=True",
        "broadcast_buffers=False",
        "fp16_compress_hook",
    ]


SKIPPING = "find_unused_parameters=True, skip_all_reduce_unused_params=True"


@pytest.mark.parametrize(
    ("facts", "option", "reason"),
    [
        (ModelFacts(), "forward_sync_buffers=False", "no buffers"),
        (ModelFacts(buffers=1), "broadcast_buffers=False", "the same buffers"),
        (ModelFacts(gradient_bytes=340), "bucket_cap_mb=1", "(340 bytes) fit into one bucket"),
        (ModelFacts(own_hook="mine"), "fp16_compress_hook", "a hook (mine)"),
        (ModelFacts(bits=16), "fp16_compress_hook", "no more than 16 bits"),
        (ModelFacts(), "bf16_compress_hook", "only with nccl"),
        (ModelFacts(), SKIPPING, "nothing to skip"),
    ],
)
def test_options_that_make_no_difference_are_skipped(facts: ModelFacts, option: str, reason: str) -> None:
    assert reason in option_sets(facts)[option].skip_reason


def test_skipping_all_reduces_is_not_tried_if_ranks_leave_out_different_parameters() -> None:
    absent = {(0, 0): frozenset("a"), (0, 1): frozenset("a"), (1, 0): frozenset("b"), (1, 1): frozenset("b")}
    option_set = option_sets(ModelFacts(absent=absent))[SKIPPING]
    assert not option_set.skip_reason and not option_set.unsafe
    (finding,) = option_sets(ModelFacts(absent={**absent, (1, 1): frozenset()}))[SKIPPING].unsafe
    assert finding.message.startswith("rank 1 and rank 0 leave out different parameters in step 1")


def test_a_step_time_is_a_median_of_ratios_with_an_interval_around_it() -> None:
    many = step_time([(1.0, ratio / 100) for ratio in range(60, 161)])
    assert (many.ratio, many.pairs) == (1.1, 101) and 0.9 < many.low < 1.1 < many.high < 1.3
    few = step_time([(1.0, 2.0), (1.0, 1.9), (2.0, 4.2)])
    assert (few.ratio, few.low, few.high) == (2.0, 1.9, 2.1)


def test_a_difference_must_be_more_than_noise_and_chance() -> None:
    longer = StepTime(1.10, 1.06, 1.14, 1.0, 41)
    assert longer.differs(0.01) and not longer.differs(0.12), "the baseline differs by 0.12 from itself"
    assert not StepTime(1.10, 0.98, 1.24, 1.0, 5).differs(0.01), "may be chance"
    assert not StepTime(1.01, 1.005, 1.015, 1.0, 101).differs(0.001), "nobody would notice"


UNUSED = Finding("DDP101", ("head",), "No operation reads head.", Severity.ERROR)
MENDS_NOT = "The fault is not mended by any option (DDP305 under all of them). "
TIMED = {"step_time": timed(1.0)}
SAFE = "and without a measurable difference in step time: "


@pytest.mark.parametrize(
    ("rows", "advice"),
    [
        (
            BRANCHING,
            {
                "own": "The model stops with the recipe's own options (defaults): DDP104 [red]head did not contribute",
                "needs": "It needs find_unused_parameters=True.",
                "costs": "find_unused_parameters=True, fp16_compress_hook is right and slower: a step takes 1.30",
                "gains": "find_unused_parameters=True, gradient_as_bucket_view=True is faster: a step takes 0.80 times",
            },
        ),
        (
            (row("stops", UNUSED, own=True), row(find_unused_parameters=True), row(static_graph=True)),
            {
                "own": "The model stops with the recipe's own options (defaults): DDP101 No operation",
                "needs": (
                    "It needs find_unused_parameters=True or static_graph=True. It avoids the error of DDP, but trains "
                    "nothing more. To fix that: Use the parameter"
                ),
                "safe": "Safe: find_unused_parameters=True; static_graph=True.",
            },
        ),
        (
            (row("wrong", SUM, own=True), row("wrong", SUM, find_unused_parameters=True), row("wrong", SUM, **VIEW)),
            {"own": "The model trains to the end and is wrong", "fault": f"{MENDS_NOT}Sum the local loss"},
        ),
        (
            (
                row(own=True, baseline=True, step_time=timed(1.0, 0.0)),
                row(finding=NEEDLESS, find_unused_parameters=True, step_time=timed(1.2)),
                row(finding=NEEDLESS, find_unused_parameters=True, step_time=timed(1.2), **VIEW),
                row(**TIMED, **VIEW),
                row("lossy", hook="fp16_compress_hook", error=4e-4, **TIMED),
                row(finding=DRIFT, forward_sync_buffers=False, **TIMED),
                row("wrong", SUM, static_graph=True),
            ),
            {
                "own": "The model is right with the recipe's own options (defaults).",
                "wrong": "static_graph=True is wrong for it: DDP305 The loss sums over samples.",
                "costs": (
                    "find_unused_parameters=True is needless: every parameter contributes in every step on every rank; "
                    "a step takes 1.20 times as long (1.19 to 1.21) here."
                ),
                "warns": "forward_sync_buffers=False is right, with a warning: DDP214: 1 buffer",
                "safe": f"Safe, {SAFE}gradient_as_bucket_view=True.",
                "lossy": (f"Right except for rounding, {SAFE}fp16_compress_hook (rounds gradients by up to 4.0e-04)."),
            },
        ),
    ],
    ids=["needs", "needs a fix", "no option", "costs"],
)
def test_advice_follows_from_the_rows(rows: Sequence[MatrixRow], advice: dict[str, str]) -> None:
    """Each kind of advice begins with these words; a text that ends in a full stop is whole."""
    messages: dict[str, str] = {}
    for item in advise(rows, noise=0.015):
        messages[item.kind] = f"{messages.get(item.kind, '')} {item.message}".strip()
    assert [*messages] == [*advice]
    for kind, words in advice.items():
        assert messages[kind] == words if words.endswith(".") else messages[kind].startswith(words)


def test_a_matrix_survives_json() -> None:
    matrix = replace(MATRIX, rows=(*BRANCHING, row("stops", SPLIT, own=False, failure=ReportError("stuck", 4, "x"))))
    assert Matrix.from_json(matrix.to_json()) == matrix
    assert json.loads(matrix.to_json())["schema_version"] == 1


@pytest.mark.parametrize("text", ["[]", Report("t").to_json(), '{"kind": "matrix", "schema_version": 99}'])
def test_what_is_no_matrix_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="matrix"):
        Matrix.from_json(text)


@pytest.mark.parametrize(
    ("rows", "error", "fail_on", "code"),
    [
        ((row(own=True), row("wrong", SUM, **VIEW)), None, Severity.ERROR, 0),  # only the recipe's own options count
        ((row("wrong", SUM, own=True), row(**VIEW)), None, Severity.ERROR, 1),
        ((row("wrong", SUM, own=True),), None, None, 0),
        ((row(finding=DRIFT, own=True),), None, Severity.WARNING, 1),
        ((row("stops", own=True, failure=ReportError("stuck", 4)),), None, None, 4),
        ((), ReportError("model() raised", 3), Severity.ERROR, 3),
    ],
)
def test_the_recipes_own_options_decide_the_exit_code(rows, error, fail_on, code) -> None:
    matrix = Matrix("t", rows=rows, error=error)
    assert matrix.exit_code(fail_on) == code
    assert matrix.ok == (matrix.exit_code() == 0)


def as_text(matrix: Matrix, **medium) -> str:
    return renderer_for("text", medium=Medium(**medium), formats=MATRIX_FORMATS).render(matrix)


def test_a_matrix_as_a_log_shows_it() -> None:
    text = as_text(MATRIX)
    assert text.startswith(
        "ddpcheck 0.1.0 matrix of DDP options on net.py\n  2 ranks · gloo · cpu · 3 steps\n  torch 2.13.0\n"
    )
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "! defaults (the recipe's own) stops DDP104: [red]head did not contribute on rank 1." in lines
    assert "✓ find_unused_parameters=True 1 right" in lines
    assert "✓ find_unused_parameters=True, gradient_as_bucket_view=True 0.80 (0.79 to 0.81) right" in lines
    assert "- bucket_cap_mb=1; bucket_cap_mb=100 skipped: all gradients fit into one bucket" in lines
    assert "needs: It needs find_unused_parameters=True." in lines
    assert "note: A note." in lines
    assert (
        lines[-1]
        == "stops: the recipe's own options; 5 combinations of options: 2 right, 1 lossy, 2 stops, and 2 not run"
    )
    assert "baseline differs from itself by up to 1.5%" in text


def test_a_matrix_keeps_to_the_width_and_to_ascii() -> None:
    text = as_text(MATRIX, encoding="ascii", width=40)
    assert max(map(len, text.splitlines())) <= 40
    assert text.isascii() and "STOP" in text and "ok" in text


def test_a_long_reason_is_shortened_in_the_table() -> None:
    table = as_text(Matrix("t", rows=(row("stops", replace(SPLIT, message="word " * 200), own=True),)))
    assert "word ..." in table.partition("\n\n")[2] and len(table) < 900


@pytest.fixture
def stub_sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    calls = []

    def check_matrix(target, **options):
        calls.append((target, options))
        return MATRIX

    module = type(sys)("ddpcheck.extras.matrix.check_matrix")
    module.check_matrix = check_matrix
    monkeypatch.setitem(sys.modules, "ddpcheck.extras.matrix.check_matrix", module)
    return calls


def test_the_command_shows_and_saves_the_matrix_and_fails_for_the_recipes_own_options(stub_sweep, capsys) -> None:
    assert cli.main(["report", "net.py", "--matrix", "--steps", "2", "--ignore", "DDP107"]) == 1
    assert capsys.readouterr().out.startswith("ddpcheck 0.1.0 matrix of DDP options on net.py")
    [(target, options)] = stub_sweep
    assert (target, options["steps"], options["ignore"]) == ("net.py", 2, ("DDP107",))
    assert cli.main(["report", "net.py", "--matrix", "-o", "m.json", "--fail-on", "never"]) == 0
    assert "2 right, 1 lossy, 2 stops, and 2 not run, written to m.json" in capsys.readouterr().err
    saved = Matrix.from_json(Path("m.json").read_text(encoding="utf-8"))
    assert saved == replace(MATRIX, command="ddpcheck report net.py --matrix -o m.json --fail-on never")
    assert cli.main(["render", "m.json"]) == 0
    assert "matrix of DDP options on net.py" in capsys.readouterr().out


def test_a_step_of_a_variant_is_wrong_if_its_gradients_differ_between_ranks_or_from_the_plain_step() -> None:
    def judged(*steps: VariantStep) -> tuple[str, str]:
        row = _judge_step(steps, partial(MatrixRow, {}))
        return row.verdict, row.code

    bad, good = Difference("head.weight", 0.5, 1e-5), Difference("head.weight", 1e-6, 1e-5)
    assert judged(VariantStep({"head.weight": 1}), VariantStep({"head.weight": 2})) == ("wrong", "DDP301")
    assert judged(*2 * [VariantStep({"head.weight": 1}, (bad,))]) == ("wrong", "DDP302")
    assert judged(*2 * [VariantStep({"head.weight": 1}, (good,))]) == ("right", "")
    assert micro_batch_mismatch(bad, 2).code == "DDP514"
