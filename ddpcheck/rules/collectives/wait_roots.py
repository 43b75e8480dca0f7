"""Judges of Flight Recorder dumps: the ranks for which all others wait."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import format_ranks, group_by, told_together
from ddpcheck.rules.collectives.ddp402_hang import hang_finding
from ddpcheck.trace.positions import GROUP_ORDER, SEND_ORDER
from ddpcheck.trace.wait_graph import WaitGraph, find_circle


def judge_waits(
    graph: WaitGraph, explained: Collection[int], doing: Mapping[int, str], *, names_missing: bool
) -> list[Finding]:
    """DDP402 and 403: one finding per root cause of waiting ranks.

    `explained`: ranks whose waiting peers are expected, or covered by another finding.
    """
    findings = list[Finding]()
    if ranks := sorted(graph.devices.keys() - explained):
        findings += _of_devices(graph, ranks)
    if ranks := sorted(graph.stopped.difference(explained)):
        fix = (
            f"Inspect the stacks of {format_ranks(ranks)} (py-spy dump --native --pid PID): a lock, native code that "
            "holds the GIL, data loading, a file system, or a branch that other ranks do not take. If a process is "
            "gone, its log says why."
        )
        evidence = told_together((rank, doing[rank]) for rank in ranks)
        findings += hang_finding(graph, ranks, f"{format_ranks(ranks)} stopped calling collectives", fix, evidence)
    if findings or explained:
        return findings
    if graph.missing:
        ranks, who = sorted(graph.missing), format_ranks(graph.missing)
        fix = f"Find out from the log of {who} why there is no dump: the process may have ended or been killed."
        return hang_finding(graph, ranks, f"{who} left no dump", fix) if names_missing else []
    return _of_late(graph) or _of_no_end(graph) or _of_circle(graph)


def _of_devices(graph: WaitGraph, ranks: Sequence[int]) -> list[Finding]:
    """DDP402: device that completes nothing, while its rank still enqueues calls."""
    evidence = []
    for rank in ranks:
        call = graph.devices[rank]
        peers, completed = graph.furthest(rank, call)
        last = max(open_call.number for open_call in graph.open_calls[rank] if open_call.group == call.group)
        evidence.append(
            f"rank {rank} has enqueued calls up to number {last} and not completed {graph.words(call)}; "
            f"{format_ranks(peers)} completed {completed}"
        )
    fix = (
        f"Look at the devices and machines of {format_ranks(ranks)}: Xid errors in dmesg, ECC errors in nvidia-smi -q, "
        "NVLink and network adapters. The collectives match, so that no line of the program is to be changed."
    )
    cause = f"the device stopped on {format_ranks(ranks)}: peers completed collectives that it did not complete"
    return hang_finding(graph, ranks, cause, fix, evidence, graph.devices[ranks[0]])


def _of_late(graph: WaitGraph) -> list[Finding]:
    """DDP402: rank that reached a call long after the other ranks."""
    calls = [
        (rank, call) for rank, calls in graph.open_calls.items() for call in calls if call.created and call.timeout
    ]
    for entries in group_by(calls, lambda item: (graph.group(*item), item[1].between_two, item[1].number)).values():
        first = min((call for _, call in entries), key=lambda call: call.created)
        delays = {rank: call.created - first.created for rank, call in entries if not call.between_two}
        if late := sorted(rank for rank, seconds in delays.items() if seconds >= first.timeout / 2):
            who = format_ranks(late)
            fix = (
                f"Check what {who} did before (loading data, saving a checkpoint, evaluating, compiling), and split "
                "the work equally over all ranks; or increase the timeout: init_process_group(timeout=...)."
            )
            cause = f"{who} came {delays[late[0]]:.0f} s late to {graph.words(first)} (timeout: {first.timeout:.0f} s)"
            return hang_finding(graph, late, cause, fix, call=first)
    return []


def _of_circle(graph: WaitGraph) -> list[Finding]:
    """DDP402 or 403: circular wait of ranks. Runs last, if no wait ends elsewhere."""
    waits = {rank: rank_waits[0] for rank, rank_waits in graph.waits.items() if rank_waits}
    circle = find_circle({rank: (call.call, sorted(peers)) for rank, call, peers in waits.values()})
    if not circle:
        return []
    calls = [waits[rank][1] for rank, _ in circle]
    ranks = sorted(rank for rank, _ in circle)
    evidence = [f"rank {rank} waits for rank {peer} in {graph.words(waits[rank][1])}" for rank, peer in circle]
    code, fix = ("DDP402", SEND_ORDER) if all(call.between_two for call in calls) else ("DDP403", GROUP_ORDER)
    return hang_finding(graph, ranks, f"{format_ranks(ranks)} wait for each other", fix, evidence, calls[0], code)


def _of_no_end(graph: WaitGraph) -> list[Finding]:
    """DDP402: call that all its ranks entered and that does not end."""
    waited_for = {peer for waits in graph.waits.values() for *_, peers in waits for peer in peers}
    idle = waited_for - {rank for rank, waits in graph.waits.items() if waits}
    first = ((rank, calls[0]) for rank, calls in graph.open_calls.items() if calls)
    rank_call = next((item for item in first if item[0] in idle or len(graph.group(*item)[1]) == 1), None)
    if rank_call is None:
        return []
    rank, call = rank_call
    ranks = sorted({rank, call.peer} if call.between_two else graph.group(rank, call)[1])
    fix = f"Look at the devices of {format_ranks(ranks)} and at the network between them (NCCL_DEBUG=INFO)."
    cause = f"{format_ranks(ranks)} entered {graph.words(call)}, which does not end"
    return hang_finding(graph, ranks, cause, fix if len(ranks) > 1 else "", call=call)
