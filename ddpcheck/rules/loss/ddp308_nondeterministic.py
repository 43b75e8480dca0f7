"""DDP308 nondeterministic: warning, undecided, keeps_results

The same run twice, from the same state and seed, differs by more than rounding.

Why: If two equal runs differ, a difference between DDP and a reference proves nothing. So ddpcheck withholds verdicts
    that depend on such a difference. The usual sources are random numbers from an unseeded generator, state kept
    between calls, and data that changes from one read to the next. (PyTorch docs, 'Reproducibility'.)
Fix: Make model, batch and loss depend only on their arguments and the seed: use torch's default generator, no state
    kept between calls, no time or process id; then check again.
Detected: ddpcheck runs one step twice on a rank, from the same state and with the same seed. DDP308 is reported if
    the gradients differ by more than rounding.
Ignore: If the randomness is intended and cannot be seeded. ddpcheck still withholds the verdicts that need equal
    runs.
Line: No line: the source of the random numbers is not known.
Checks: report parity; repro repetition
Example:
    def batch(step):
        generator = numpy.random.default_rng()             # right: numpy.random.default_rng(step)
        return torch.from_numpy(generator.normal(size=(8, 4)))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpcheck.findings.evidence.gradients import Difference
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import format_ranks, new_finding, ranks_or_all

NOT_COMPARED = "DDP308: the same step run twice differs from itself, so comparisons mean nothing"


def judge_repeat(differences: Mapping[int, Sequence[Difference]], step: int) -> list[Finding]:
    """Report a step that is not reproducible (DDP308); `differences` are by rank."""
    bad = {rank: [item for item in items if item.bad] for rank, items in differences.items()}
    ranks = tuple(sorted(rank for rank, items in bad.items() if items))
    if not ranks:
        return []
    worst = max((item for items in bad.values() for item in items), key=lambda item: item.error)
    return new_finding(
        "DDP308",
        ("loss",),
        f"The same step run twice on {format_ranks(ranks)} gave different gradients, so comparisons mean nothing.",
        ranks=ranks_or_all(ranks, len(differences)),
        steps=(step,),
        evidence=[str(worst), "the generators of torch, numpy and random had the same seed both times"],
    )
