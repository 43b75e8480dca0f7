"""DDP401 rank-raised: error, keeps_gradients, keeps_results

The checked script or recipe raised an exception on a rank.

Why: The rank that raises leaves the others waiting in their next collective. The others fail later, with messages
    such as 'Connection closed by peer' that name the wrong place. The first failure is the one to read.
Fix: Fix the exception shown. The ranks that are listed below it failed as a consequence.
Detected: ddpcheck records when each rank ends. It reports the first exception that is not a consequence of another
    rank's failure, with its traceback.
Ignore: Never.
Checks: run collectives
Example:
    def loss(model, batch):
        return cross_entropy(model(batch["x"]), batch["label"])   # KeyError; right: a key that the batch has
"""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.evidence.endings import Joining
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.wording import format_ranks, one_finding, phrase, unless_all
from ddpcheck.rules.collectives.ddp402_hang import judge_meeting
from ddpcheck.stream.entries import handled_in
from ddpcheck.trace.collectives import EndedThread
from ddpcheck.trace.failures import RENDEZVOUS_SUBJECT, RaisedFacts, is_of_communication, process_name
from ddpcheck.trace.positions import EndingFacts, Position, calls_there, described_call, doing


def explain_by_exception(facts: EndingFacts, raiser: Position, peer: Position) -> list[Finding]:
    """DDP401: collective in a `finally` or `except`. Runs early: it resembles other causes."""
    error = handled_in(raiser.call) if raiser.call is not None else None
    if raiser.call is None or error is None:
        return []
    kind, where, text = error
    if peer.call is not None and (peer_error := handled_in(peer.call)) is not None and peer_error[:2] == (kind, where):
        return []
    summary = f"{kind}{f': {text}' if text else ''}"
    others = [rank.rank for rank in facts.ranks if rank is not raiser.of]
    return one_finding(
        "DDP401",
        ("run",),
        f"Rank {raiser.of.rank} raised {summary.rstrip('.')}{f', at {where}' if where else ''}, and reaches "
        f"{described_call(raiser.call)} in the `finally` or `except` that handles it; {doing(facts, others)}.",
        severity=Severity.ERROR,
        ranks=[raiser.of.rank],
        location=Location.parse(where or raiser.call.location),
        evidence=calls_there(raiser, peer),
        fix=f"Fix the exception{f' at {where}' if where else ''}. Call no collective in a `finally` or `except` that a "
        f"single rank may reach ({described_call(raiser.call)}): if the exception ends the rank, torchrun ends the "
        "others.",
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
    who = format_ranks(ranks) if ranks else process_name(first)
    return one_finding(
        "DDP401",
        RENDEZVOUS_SUBJECT,
        f"{who.capitalize()} raised {first.error.rstrip('.')}, in init_process_group.",
        severity=Severity.ERROR,
        ranks=unless_all(ranks, first.world_size),
        location=Location.parse(first.location),
        evidence=[f"{process_name(p)}: raised {p.error}" for p in raised if p is not first][:8],
    )


def thread_finding(
    thread: EndedThread, raised: Sequence[int], ranks: Sequence[int], suffix: str, evidence: Sequence[str]
) -> list[Finding]:
    outcome, where = phrase(thread.failure).rstrip("."), thread.failure.location
    return one_finding(
        "DDP401",
        ("thread",),
        f"{format_ranks(raised).capitalize()} {outcome}{f', at {where}' if where else ''}, which has ended a thread "
        f"({thread.name}){suffix}.",
        severity=Severity.ERROR,
        ranks=ranks,
        location=Location.parse(where or thread.waits_in.rpartition(" ")[2]),
        evidence=evidence,
        fix=f"Fix the exception{f' at {where}' if where else ''}. Also pass the exception of a thread to the code that "
        "waits for it: concurrent.futures does (future.result() raises it again); Python only prints it.",
    )


_CASTS = {
    "output_dtype=torch.": "the outputs of a part are cast to output_dtype, also as inputs of other parts",
    "cast_forward_inputs=False": "its inputs are not cast (cast_forward_inputs=False)",
}


def explain_dtype(facts: RaisedFacts, _text: str) -> list[Finding]:
    """DDP401: input dtype that differs from the `mp_policy` parameters of `fully_shard`."""
    for wrapper in facts.sharded:
        policies = wrapper.context.sharded.policies if wrapper.context.sharded is not None else {}
        if not any("param_dtype=torch." in text for text in policies.values()):
            continue
        reason = "its input is created in forward, or by a part without parameters"
        if len(policies) > 1:
            reason = "not every part has the same policy"
        for option, words in _CASTS.items():
            if any(option in text for text in policies.values()):
                reason = words
        return facts.one_finding(
            "DDP401",
            ("mp_policy",),
            "The inputs of a layer have a dtype that differs from the one in which fully_shard gathers its parameters "
            f"(param_dtype of mp_policy), and {reason}.",
            location=wrapper.location or Location.parse(facts.first.location),
            evidence=[
                f"raised at {facts.first.location}",
                facts.first.message,
                *(f"{name}: {text}" for name, text in [*policies.items()][:3]),
            ],
            fix="Give each call of fully_shard, including that of the root, the same MixedPrecisionPolicy, and leave "
            "cast_forward_inputs at its default; or cast the inputs of the layer.",
        )
    return []
