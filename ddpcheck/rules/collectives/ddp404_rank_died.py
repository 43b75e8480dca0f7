"""DDP404 rank-died: error, ends_run, keeps_gradients, keeps_results

The process of a rank ended without a Python exception: by a signal, an abort, or for lack of memory.

Why: There is no traceback, because Python could not write one. Causes are a mismatch that aborts inside the backend,
    a segmentation fault in an extension, os._exit, and the kernel's out-of-memory killer (SIGKILL). The other ranks
    see a closed connection.
Fix: Read the signal and the last output: for SIGKILL use less memory or fewer ranks; for SIGABRT look for a mismatch
    (DDP2xx); raise an exception instead of exiting.
Detected: DDP404 is reported if the process of a rank ends by a signal or with an exit code, but without a Python
    exception.
Ignore: Never.
Line: The call of sys.exit or os._exit, if the rank ended by that. Otherwise the line that the rank ran when it died,
    if known.
Checks: run collectives; repro progress
Example:
    os._exit(3)                              # right: raise an exception
"""

from __future__ import annotations

import signal

from ddpcheck.findings.errors import RankFailure
from ddpcheck.findings.evidence.endings import SYSTEM_EXIT
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import format_ranks, new_finding, plural_verb
from ddpcheck.trace.failures import FailureFacts
from ddpcheck.trace.positions import EndingFacts, Position, describe_ranks, divergence_evidence


def explain_by_death(facts: FailureFacts) -> list[Finding]:
    """DDP404: ranks that died or exited first, in the same way. Runs last."""
    if not facts.ended or facts.ended[0].kind == "raised":
        return []
    return facts.new_ended_finding("DDP404", fix=_fix_of_death(facts.ended[0]))


_FIX_OF_DEATH = {  # by exit code; negative for signals
    -signal.SIGSEGV: (
        "Check the C or C++ code that the line calls (an extension, a custom kernel, a library whose version differs "
        "from the one that it was built for), and call it with this rank's data in a separate process."
    ),
    -signal.SIGABRT: (
        "Read the last output of the rank: C or C++ code aborted and says why. If the backend aborted "
        "(gloo::EnforceNotMet), ranks have sent each other tensors that do not match."
    ),
    -signal.SIGTERM: (
        "Find out what sent the signal to this process alone: a scheduler (preemption, a limit), a `kill`, or the "
        "script itself. To end a job, signal the launcher, which ends all ranks."
    ),
    -signal.SIGKILL: (
        "Use less memory (a smaller batch, fewer ranks, --world-size 2) if the machine ran out of it: the kernel's log "
        "(dmesg) says so. If it did not, find out what sent the signal."
    ),
}


def _fix_of_death(failure: RankFailure) -> str:
    if failure.location and (failure.exit_code or 0) > 0:
        return "Raise an exception, which is shown, instead of exiting without a message (sys.exit, os._exit)."
    if failure.exit_code == -signal.SIGSEGV and not failure.location:
        return ""  # no line is known
    return _FIX_OF_DEATH.get(failure.exit_code or 0, "")


def early_exit_finding(facts: EndingFacts, leaver: Position, stayer: Position, where: str) -> list[Finding]:
    called, verbs = leaver.state.exit_at, ("calls", "call")
    if called.startswith(SYSTEM_EXIT):
        verbs = ("raises", "raise")
    if where in stayer.lines:
        return []  # sys.exit(main()): the other rank is still in main()
    exited = [rank.rank for rank in facts.ranks if rank.exit_at == called and rank.ended]
    others = [rank.rank for rank in facts.ranks if rank.rank not in exited]
    return new_finding(
        "DDP404",
        ("exit",),
        f"{format_ranks(exited).capitalize()} {plural_verb(*verbs, exited)} {called} while "
        f"{format_ranks(others)} {plural_verb('continues', 'continue', others)}: {describe_ranks(facts, others)}.",
        ranks=exited if len(exited) < len(facts.ranks) else (),
        location=Location.parse(where),
        evidence=divergence_evidence(leaver, stayer) if stayer.call else facts.states,
        fix="End the script on every rank at the same place: all_reduce the condition before the test, and call "
        "destroy_process_group() on each rank at its end.",
    )


def explain_by_exit(facts: EndingFacts, leaver: Position, stayer: Position) -> list[Finding]:
    """DDP404: `sys.exit` or `os._exit` on a rank while other ranks continue."""
    called, where = leaver.state.exit_at, leaver.state.exit_at.rpartition(" ")[2]
    if not (leaver.state.ended and where and leaver.call is None and stayer.call is not None):
        return []
    if called == SYSTEM_EXIT:
        raises = [block.head for block in facts.enclosing(stayer.lines, "rest") if block.word == "raise"]
        where = raises[0] if len(raises) == 1 else ""
    return early_exit_finding(facts, leaver, stayer, where)


def explain_by_unlogged_exit(facts: EndingFacts) -> list[Finding]:
    """DDP404: `sys.exit` or `os._exit` on a rank while other ranks wait in unlogged calls."""
    exited = [rank for rank in facts.ranks if rank.ended and rank.exit_at]
    waiting = [rank for rank in facts.ranks if rank.waits and rank.lines and not rank.exit_at]
    if not exited or not waiting:
        return []
    where = exited[0].exit_at.rpartition(" ")[2].removeprefix(SYSTEM_EXIT)
    return early_exit_finding(
        facts, Position(exited[0], None, ()), Position(waiting[0], None, facts.current_stack(waiting[0])), where
    )
