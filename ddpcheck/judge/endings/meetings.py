"""DDP402: processes that wait in `init_process_group` for others, or for a store, that never come."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from ddpcheck.findings.evidence.endings import Joining
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import counted, format_ranks, group_by, one_finding, plural_verb

_SUBJECT = ("init_process_group",)


def judge_meeting(waiting: Sequence[Joining], seconds: float) -> list[Finding]:
    """DDP402: why those that are there do not meet, as far as what they say of themselves tells."""
    if not waiting:
        return []
    message, fix, ranks = _reason(waiting)
    said = [f"{_who(one)} waits at {one.address}, world size {one.world_size}" for one in waiting[:8]]
    first = next((one for one in waiting if one.rank in ranks), waiting[0])
    return one_finding(
        "DDP402",
        _SUBJECT,
        message,
        ranks=ranks,
        location=Location.parse(first.location),
        evidence=[*said, f"none of them has got on for {seconds:.0f} s"],
        fix=fix,
    )


def _reason(waiting: Sequence[Joining]) -> tuple[str, str, tuple[int, ...]]:
    """What is wrong, what to do, and the ranks that are not as the others."""
    numbers = [one.rank for one in waiting]
    for what, values, fix in (
        ("world sizes", {one.rank: one.world_size for one in waiting}, "Pass the same world_size on every rank."),
        (
            "addresses",
            {one.rank: one.address for one in waiting},
            "Pass the same init_method, or set the same MASTER_ADDR and MASTER_PORT, on every rank; a free port is for "
            "one process to choose, before it starts the others.",
        ),
    ):
        if len(set(values.values())) > 1:
            message = f"Processes wait in init_process_group with different {what}: {_told(values)}."
            fewest, other, *_ = sorted(group_by(values, values.__getitem__).values(), key=len)
            return message, fix, tuple(fewest) if len(fewest) < len(other) else ()
    size, address, agent = waiting[0].world_size, waiting[0].address, waiting[0].agent
    if twice := sorted({rank for rank in numbers if numbers.count(rank) > 1}):
        missing = sorted(set(range(size)) - set(numbers))
        nobody = f", and none is {format_ranks(missing)}" if missing else ""
        return (
            f"{numbers.count(twice[0])} processes say in init_process_group that they are rank {twice[0]}{nobody}.",
            'Give each process a rank of its own: under torchrun int(os.environ["RANK"]), and not LOCAL_RANK.',
            tuple(twice),
        )
    if missing := sorted(set(range(size)) - set(numbers)):
        wait = plural_verb("waits", "wait", waiting)
        return (
            f"{counted(len(waiting), 'process')} {wait} in init_process_group, and the world size is {size}: "
            f"{format_ranks(missing)} {plural_verb('is', 'are', missing)} not there.",
            "Call init_process_group in every process, and start as many as world_size says; or leave world_size and "
            "rank out: torchrun gives them.",
            (),
        )
    if agent and address not in (agent, f"tcp://{agent}"):
        return (
            f"All ranks wait in init_process_group for a store at {address}, which none of them serves: under "
            f"torchrun they take the one at {agent}, of its agent, for all there is.",
            "Leave init_method, rank and world_size out, or pass init_method='env://': torchrun says where to meet.",
            (),
        )
    return (
        f"All {counted(len(waiting), 'rank')} wait in init_process_group, and do not meet at {address}.",
        "See whether rank 0 can serve that address and the others reach it: host name, port, firewall, and the network "
        "interface (GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME).",
        (),
    )


def _who(one: Joining) -> str:
    return f"rank {one.rank}" if one.rank >= 0 else f"process {one.pid}"


def _told(values: Mapping[int, Hashable]) -> str:
    groups = group_by(values, values.__getitem__)
    return ", ".join(f"{value} on {format_ranks(ranks)}" for value, ranks in groups.items())
