"""DDP404 rank-died: error, keeps_gradients, keeps_results

The process of a rank ended without a Python exception: by a signal, an abort, or for lack of memory.

Why: There is no traceback, because Python could not write one. Causes are a mismatch that aborts inside the backend,
    a segmentation fault in an extension, os._exit, and the kernel's out-of-memory killer (SIGKILL). The other ranks
    see a closed connection.
Fix: Read the signal and the last output: for SIGKILL use less memory or fewer ranks; for SIGABRT look for a mismatch
    (DDP2xx); raise an exception instead of exiting.
Detected: DDP404 is reported if the process of a rank ends by a signal or with an exit code, but without a Python
    exception.
Ignore: Never.
Checks: run collectives
Example:
    os._exit(3)                              # right: raise an exception
"""

from __future__ import annotations

from ddpcheck.findings.evidence.endings import SYSTEM_EXIT
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import format_ranks, one_finding, plural_verb
from ddpcheck.trace.positions import EndingFacts, Position, calls_there, doing


def early_exit_finding(facts: EndingFacts, leaver: Position, stayer: Position, where: str) -> list[Finding]:
    called, verbs = leaver.of.exit_at, ("calls", "call")
    if called.startswith(SYSTEM_EXIT):
        verbs = ("raises", "raise")
    if where in stayer.lines:
        return []  # sys.exit(main()): the other rank is still in main()
    exited = [rank.rank for rank in facts.ranks if rank.exit_at == called and rank.ended]
    others = [rank.rank for rank in facts.ranks if rank.rank not in exited]
    return one_finding(
        "DDP404",
        ("exit",),
        f"{format_ranks(exited).capitalize()} {plural_verb(*verbs, exited)} {called} while "
        f"{format_ranks(others)} {plural_verb('continues', 'continue', others)}: {doing(facts, others)}.",
        ranks=exited if len(exited) < len(facts.ranks) else (),
        location=Location.parse(where),
        evidence=calls_there(leaver, stayer)
        if stayer.call
        else [f"rank {rank.rank}: {rank.doing}" for rank in facts.ranks],
        fix="End the script on every rank at the same place: all_reduce the condition before the test, and call "
        "destroy_process_group() on each rank at its end.",
    )
