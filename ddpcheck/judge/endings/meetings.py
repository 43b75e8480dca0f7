"""DDP401 and 402: processes that hang or raise in `init_process_group`."""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.evidence.endings import Joining
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import counted, format_ranks, group_by, one_finding, plural_verb, unless_all
from ddpcheck.judge.endings.rank_failure import is_of_communication

_SUBJECT = ("init_process_group",)


def judge_meeting(waiting: Sequence[Joining], seconds: float) -> list[Finding]:
    """DDP402: reason for an incomplete rendezvous, from the arguments of each process."""
    if not waiting:
        return []
    message, fix, ranks = _reason(waiting)
    states = [
        f"{_process_name(p)} {'waited' if p.error else 'waits'} at {p.address}, world size {p.world_size}"
        f"{f', and raised {p.error}' if p.error else ''}"
        for p in waiting[:8]
    ]
    first = next((p for p in waiting if p.rank in ranks), waiting[0])
    return one_finding(
        "DDP402",
        _SUBJECT,
        message,
        ranks=ranks,
        location=Location.parse(first.location),
        evidence=[*states, f"none of them has made progress for {seconds:.0f} s" if seconds else ""],
        fix=fix,
    )


def judge_unmet(waiting: Sequence[Joining]) -> list[Finding]:
    """DDP402 if the errors come from an incomplete rendezvous, else DDP401."""
    raised = [p for p in waiting if p.error]
    others = [p for p in raised if not (is_of_communication(p.error) or p.error.startswith("DistStoreError"))]
    if raised and not others and all(p.started for p in waiting):  # single-node job
        return judge_meeting(waiting, 0.0)
    if not (others := others or raised):
        return []
    first = others[0]
    ranks = sorted({p.rank for p in others if p.error == first.error and p.rank >= 0})
    who = format_ranks(ranks) if ranks else _process_name(first)
    return one_finding(
        "DDP401",
        _SUBJECT,
        f"{who.capitalize()} raised {first.error.rstrip('.')}, in init_process_group.",
        severity=Severity.ERROR,
        ranks=unless_all(ranks, first.world_size),
        location=Location.parse(first.location),
        evidence=[f"{_process_name(p)}: raised {p.error}" for p in raised if p is not first][:8],
    )


def _reason(waiting: Sequence[Joining]) -> tuple[str, str, tuple[int, ...]]:
    """Return the message, the fix and the ranks that differ."""
    numbers = [p.rank for p in waiting]
    for noun, values, fix in (
        ("world sizes", {p.rank: p.world_size for p in waiting}, "Pass the same world_size on every rank."),
        (
            "addresses",
            {p.rank: p.address for p in waiting},
            "Pass the same init_method, or set the same MASTER_ADDR and MASTER_PORT, on every rank; if the port is "
            "chosen at run time, one process chooses it before it starts the others.",
        ),
    ):
        groups = group_by(values, values.__getitem__)
        if len(groups) > 1:
            groups_in_words = ", ".join(f"{value} on {format_ranks(ranks)}" for value, ranks in groups.items())
            message = f"Processes wait in init_process_group with different {noun}: {groups_in_words}."
            fewest, second_fewest, *_ = sorted(groups.values(), key=len)
            return message, fix, tuple(fewest) if len(fewest) < len(second_fewest) else ()
    size, address, agent = waiting[0].world_size, waiting[0].address, waiting[0].agent
    if twice := sorted({rank for rank in numbers if numbers.count(rank) > 1}):
        missing = sorted(set(range(size)) - set(numbers))
        nobody = f", and none is {format_ranks(missing)}" if missing else ""
        return (
            f"{numbers.count(twice[0])} processes say in init_process_group that they are rank {twice[0]}{nobody}.",
            'Give each process a different rank: under torchrun int(os.environ["RANK"]), not LOCAL_RANK.',
            tuple(twice),
        )
    if missing := sorted(set(range(size)) - set(numbers)):
        wait = plural_verb("waits", "wait", waiting)
        return (
            f"{counted(len(waiting), 'process')} {wait} in init_process_group, and the world size is {size}: "
            f"{format_ranks(missing)} {plural_verb('is', 'are', missing)} missing.",
            "Call init_process_group in every process, and start as many as world_size says; or leave world_size and "
            "rank out: torchrun sets them.",
            (),
        )
    if agent and address not in (agent, f"tcp://{agent}"):
        return (
            f"All ranks wait in init_process_group for a store at {address}, but no rank starts one there: under "
            f"torchrun, ranks use the store of its agent, at {agent}.",
            "Leave init_method, rank and world_size out, or pass init_method='env://': torchrun sets the address.",
            (),
        )
    return (
        f"All {counted(len(waiting), 'rank')} wait in init_process_group, and do not meet at {address}.",
        "Check that rank 0 can serve that address and that the others can reach it: host name, port, firewall, and the "
        "network interface (GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME).",
        (),
    )


def _process_name(process: Joining) -> str:
    return f"rank {process.rank}" if process.rank >= 0 else f"process {process.pid}"
