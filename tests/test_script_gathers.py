"""DDP309 in a loss over the features of all ranks: what is a constant in it, and what is not."""

from __future__ import annotations

import torch

from ddpcheck.findings.evidence.gathers import GatheredConstant
from ddpcheck.findings.report import Location
from ddpcheck.judge.script_gathers import judge_gathers
from ddpcheck.monitor.script.recording.gather_recorder import _factors, _Gathered, _nodes, _Parts, _puts_back, _rows

LINE = Location("train.py", 8)


def test_it_takes_every_rank_in_several_steps() -> None:
    one, other = (GatheredConstant(step, "all_gather", LINE, 8) for step in (1, 2))
    (finding,) = judge_gathers([[one, other], [one, other]])
    assert (finding.code, finding.location) == ("DDP309", LINE)
    assert not judge_gathers([[one, other], []]) and not judge_gathers([[one], [one]])


def test_the_own_rows_among_the_constants_of_a_loss() -> None:
    weight = torch.randn(5, 3, requires_grad=True)
    features = torch.randn(4, 5) @ weight
    gathered = [_Gathered("all_gather", LINE, (8, 3), _rows(features), features.grad_fn)]

    def constants(everything: torch.Tensor) -> int:
        factors = list(_factors((features @ everything.T).logsumexp(1).mean().grad_fn, gathered))
        return sum(gathered[0].rows <= _rows(factor) for factor in factors)

    others = torch.randn(4, 3)
    assert constants(torch.cat([features.detach(), others])) == 1
    assert constants(torch.cat([features, others])) == 0  # put back
    assert constants(torch.randn(8, 3)) == 0  # a queue


def test_the_own_part_that_is_put_back() -> None:
    features = torch.randn(4, 5) @ torch.randn(5, 3, requires_grad=True)
    parts = [_Parts(2, 1, (8, 3))]

    def joined(everything: torch.Tensor) -> bool:
        root = (features @ everything.T).logsumexp(1).mean().grad_fn
        return any(_puts_back(node, parts, {features.grad_fn}) for node in _nodes(root, {features.grad_fn}))

    others = torch.randn(4, 3)
    assert joined(torch.cat([others, features]))
    whole = torch.randn(8, 3)
    assert not joined(whole)
    whole[4:] = features
    assert joined(whole)
    assert not joined(torch.cat([features, others]))  # in the place of another rank
    assert not joined(torch.cat([features, features]))
