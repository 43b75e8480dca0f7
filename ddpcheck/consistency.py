"""`check_consistency`: whether a module is the same on every rank, asked over the rendezvous store.

Never by a collective, which would hang on the very mismatch that it looks for. The findings are those of
`ddpcheck.judge.replicas.descriptions`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpcheck.findings.errors import HangError, UsageError, WrongTypeError
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import format_ranks
from ddpcheck.gather.collectives.store_exchange import RanksTimedOutError, StoreExchange
from ddpcheck.judge.replicas.descriptions import judge_descriptions, judge_values_after_wrapping

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import nn


def check_consistency(
    module: nn.Module, group: dist.ProcessGroup | None = None, *, timeout: float = 60.0
) -> list[Finding]:
    """Compare `module` across the ranks of `group`, before or after it is wrapped; every rank must call this.

    One digest of fixed size a rank goes over the store; details follow only when the digests differ. Nothing here is
    a collective, so a mismatch cannot make it hang.

    Args:
        module: The module that is, or will be, wrapped.
        group: The ranks to compare; default: all.
        timeout: Seconds to wait for the other ranks.

    Returns:
        Findings, the same on every rank, of DDP201 to DDP207, 209, 211 to 213, 216 and 222, and of DDP208 or DDP214
        if values differ and `module` is wrapped already.

    Raises:
        UsageError: There is no process group, or the module is or holds a `FullyShardedDataParallel` (FSDP1).
        HangError: A rank did not answer in time; names the ranks.
    """
    import torch.distributed as dist
    from torch import nn

    from ddpcheck.gather.ddp.sharding import refuse_fsdp1
    from ddpcheck.gather.state.fingerprints import fingerprints
    from ddpcheck.gather.state.module_description import describe
    from ddpcheck.recipe.recipe import kind_of

    if not isinstance(module, nn.Module):
        raise WrongTypeError(f"check_consistency takes an nn.Module, not {kind_of(module)}")
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError("check_consistency needs a process group: call torch.distributed.init_process_group first")
    refuse_fsdp1(module, "the module of check_consistency")
    wrapped = hasattr(module, "reducer") and hasattr(module, "module")
    bare: nn.Module = module.module if wrapped else module  # type: ignore[assignment]
    mine = describe(bare)
    # What is trained and not averaged may be a part of a model of all ranks: its gradients tell (DDP111).
    ignored = set(getattr(module, "parameters_to_ignore", ()))
    compared = [(name, p) for name, p in bare.named_parameters() if not (p.requires_grad and name in ignored)]
    values = [fingerprints(named) if wrapped else {} for named in (compared, bare.named_buffers())]
    absence = f"take part in check_consistency within {timeout:g} s; every rank must call it, the same number of times"
    everyone = gather_if_different((mine, values), group, "consistency", timeout, absence)
    if not everyone:
        return []
    findings = judge_descriptions([description for description, _ in everyone])
    if wrapped and not findings:
        findings = judge_values_after_wrapping(*([of_rank[kind] for _, of_rank in everyone] for kind in (0, 1)))
    return findings


def gather_if_different(value: Any, group: Any, purpose: str, timeout: float, absence: str) -> list[Any]:
    """The values of all ranks of `group`, after their digests; none where those are the same.

    Args:
        value: Plain data, of this rank.
        group: As of `check_consistency`.
        purpose: As of `StoreExchange.over`.
        timeout: Seconds to wait for the other ranks.
        absence: What a rank has not done that does not answer, and what it must do.

    Raises:
        HangError: A rank did not answer in time; names the ranks.
    """
    from ddpcheck.gather.state.fingerprints import digest_of

    exchange = StoreExchange.over(group, purpose, timeout)
    try:
        if len(set(exchange.all_gather("digest", digest_of(value)))) == 1:
            return []
        return exchange.all_gather("detail", value)
    except RanksTimedOutError as error:
        raise HangError(f"{format_ranks(error.ranks)} did not {absence}") from None
