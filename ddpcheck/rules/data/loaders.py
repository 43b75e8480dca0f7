"""Order of the judges of samples: the first that applies is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ddpcheck.findings.evidence.script import LoaderPass
from ddpcheck.findings.evidence.steps import LocalStep
from ddpcheck.findings.report import Finding
from ddpcheck.rules.data import ddp505_duplicate_data as ddp505
from ddpcheck.rules.data import ddp506_sampler_epoch as ddp506
from ddpcheck.rules.data import ddp510_shared_augmentation_seed as ddp510
from ddpcheck.rules.data import ddp516_rank_dependent_program_data as ddp516
from ddpcheck.rules.data import ddp519_samples_left_out as ddp519
from ddpcheck.rules.registry import rule
from ddpcheck.trace.data import Data, Loader, line_of_selection, match_loaders

_Judge = Callable[[Loader], list[Finding]]
_DUPLICATE_JUDGES = (ddp505.judge_overlap, ddp505.judge_later_overlap, ddp505.judge_rows, ddp505.judge_workers)
_WHOLE_BATCH_JUDGES = (*_DUPLICATE_JUDGES, ddp519.judge_unused_samples, ddp519.judge_sharded_twice)
"""Judges that do not apply if every rank loads the whole batch and takes a slice of it."""

_JUDGES_IN_ORDER: Sequence[Sequence[_Judge]] = (
    (
        *(ddp516.judge_split, ddp505.judge_overlap, ddp505.judge_later_overlap, ddp519.judge_unused_samples),
        *(ddp516.judge_differing_values, ddp519.judge_sharded_twice, ddp505.judge_rows, ddp516.judge_differing_order),
        *(ddp505.judge_workers, ddp516.judge_labels),
    ),
    (ddp506.judge_epoch_order, ddp506.judge_stale_workers),
    (ddp510.judge_shared_draws,),
)
"""Judges of one loader; of each row, only the first judge with findings is used."""


def explain_loaders(
    passes: Sequence[Sequence[LoaderPass]], ranks: Sequence[int] = ()
) -> Iterator[tuple[_Judge | None, Finding]]:
    """Yield (judge, finding) pairs on data loaders; the judge is None for resumed training.

    Of the judges of one problem, only the first that finds something reports. `passes`: loader passes by rank.
    """
    if len(passes) > 1:
        yield from ((None, finding) for finding in ddp506.judge_resumed(passes) or ddp506.judge_restarted(passes))
    for loader in match_loaders(passes, ranks):
        for judges in _JUDGES_IN_ORDER:
            judged = ((judge, judge(loader)) for judge in judges)
            judge, findings = next((pair for pair in judged if pair[1]), (None, []))
            yield from ((judge, finding) for finding in findings)


def judge_loaders(passes: Sequence[Sequence[LoaderPass]], ranks: Sequence[int] = ()) -> list[Finding]:
    return [finding for _, finding in explain_loaders(passes, ranks)]


@rule
def judge_data(data: Data) -> list[Finding]:
    """Judge samples by data loaders and random draws, else by inputs, targets or gradients."""
    tables = ddp516.judge_tables(data.tables, data.passes)
    findings: list[Finding] = []
    judges = []
    for group in data.groups:
        for judge, finding in explain_loaders(group.passes, group.ranks):
            if finding not in findings and not (group.takes_slices and judge in _WHOLE_BATCH_JUDGES):
                judges.append(judge)
                if (
                    not tables or judge is not ddp516.judge_differing_values
                ):  # a table that differs explains other values
                    findings.append(finding)
    draws = ddp510.judge_step_draws(data.draws, data.inputs, loads_others=data.has_own_samples)
    draws = draws or ddp510.judge_added_noise(data.draws, data.inputs)
    findings += draws
    duplicates: list[Finding] = []
    has_duplicates = any(judge in _DUPLICATE_JUDGES for judge in judges)
    for step_draws, inputs, evaluated in () if draws or has_duplicates else data.wrappers:
        duplicates += (
            ddp505.judge_inputs(inputs, step_draws)
            or ddp505.judge_streams(step_draws, inputs, evaluated)
            or ddp505.judge_delayed_samples(inputs)
        )
    is_explained = has_duplicates or draws or duplicates or ddp510.judge_shared_draws in judges
    if not is_explained and not data.has_own_samples and not data.repeats_samples:
        duplicates = ddp505.judge_same_targets(data.losses, data.inputs, data.draws)
    if not has_duplicates and not duplicates:
        line = line_of_selection(data.draws)
        duplicates = [f for steps in data.optimizers for f in ddp505.judge_equal_gradients(steps, line)][:1]
    return [*findings, *duplicates, *tables]


def judge_samples(local: Sequence[LocalStep], *, gradients_differ: bool) -> list[Finding]:
    """Report duplicate samples of a step (DDP505), else samples on no rank (DDP519).

    `gradients_differ`: True if the average over ranks is not the gradient of the global batch.
    """
    if len(local) < 2 or not local[0].global_sample_fingerprints or not all(item.sample_fingerprints for item in local):
        return []
    repeated = ddp505.judge_repeated_samples(local, gradients_differ=gradients_differ)
    return repeated or ddp519.judge_samples_on_no_rank(local, gradients_differ=gradients_differ)
