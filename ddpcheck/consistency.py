"""`check_consistency`: compare a module across ranks over the rendezvous store.

No collective is used, since a collective hangs on a mismatch. Findings are made by
`ddpcheck.rules.replicas`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpcheck.findings.errors import HangError, UsageError, WrongTypeError
from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import format_ranks
from ddpcheck.gather.collectives.store_exchange import RanksTimedOutError, StoreExchange
from ddpcheck.rules.replicas.descriptions import judge_descriptions, judge_values_after_wrapping

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import nn


def check_consistency(
    module: nn.Module, group: dist.ProcessGroup | None = None, *, timeout: float = 60.0
) -> list[Finding]:
    """Compare `module` across ranks, before or after wrapping; call on every rank.

    Each rank sends one digest of fixed size over the store, and the full description only if digests differ. No
    collective is used, so a mismatch cannot cause a hang.

    Args:
        module: The module, wrapped or to be wrapped.
        group: Process group of the ranks to compare; default: all ranks.
        timeout: Seconds to wait for the other ranks.

    Returns:
        Findings, the same on every rank: DDP201 to DDP207, 209, 211 to 213, 216 and 222, and DDP208 or DDP214 if
        values differ and `module` is already wrapped.

    Raises:
        UsageError: There is no process group, or the module is or contains a `FullyShardedDataParallel` (FSDP1).
        HangError: A rank did not answer in time; the message names the ranks.
    """
    import torch.distributed as dist
    from torch import nn

    from ddpcheck.gather.ddp.sharding import refuse_fsdp1
    from ddpcheck.gather.state.fingerprints import fingerprints
    from ddpcheck.gather.state.module_description import describe
    from ddpcheck.recipe.recipe import describe_type

    if not isinstance(module, nn.Module):
        raise WrongTypeError(f"check_consistency takes an nn.Module, not {describe_type(module)}")
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError("check_consistency needs a process group: call torch.distributed.init_process_group first")
    refuse_fsdp1(module, "the module of check_consistency")
    wrapped = hasattr(module, "reducer") and hasattr(module, "module")
    bare: nn.Module = module.module if wrapped else module  # type: ignore[assignment]
    own_description = describe(bare)
    # Trained parameters that DDP ignores may be shards of one model, which differ: DDP111 checks gradients instead.
    ignored = set(getattr(module, "parameters_to_ignore", ()))
    compared = [(name, p) for name, p in bare.named_parameters() if not (p.requires_grad and name in ignored)]
    values = [fingerprints(named) if wrapped else {} for named in (compared, bare.named_buffers())]
    absence = f"take part in check_consistency within {timeout:g} s; every rank must call it, the same number of times"
    all_values = gather_if_different((own_description, values), group, "consistency", timeout, absence)
    if not all_values:
        return []
    findings = judge_descriptions([description for description, _ in all_values])
    if wrapped and not findings:
        findings = judge_values_after_wrapping(*([pair[kind] for _, pair in all_values] for kind in (0, 1)))
    return findings


def gather_if_different(value: Any, group: Any, purpose: str, timeout: float, absence: str) -> list[Any]:
    """Return the `value` of every rank, or [] if the values have equal digests.

    Raises HangError if a rank does not answer in `timeout` seconds; its message is "ranks ... did not {absence}".
    """
    from ddpcheck.gather.state.fingerprints import digest_of

    exchange = StoreExchange.next_exchange(group, purpose, timeout)
    try:
        if len(set(exchange.all_gather("digest", digest_of(value)))) == 1:
            return []
        return exchange.all_gather("detail", value)
    except RanksTimedOutError as error:
        raise HangError(f"{format_ranks(error.ranks)} did not {absence}") from None
