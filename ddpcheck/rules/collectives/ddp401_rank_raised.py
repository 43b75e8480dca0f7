"""DDP401 rank-raised: error, ends_run, keeps_gradients, keeps_results

The checked script or recipe raised an exception on a rank.

Why: The rank that raises leaves the others waiting in their next collective. The others fail later, with messages
    such as 'Connection closed by peer' that name the wrong place. The first failure is the one to read.
Fix: Fix the exception shown. The ranks that are listed below it failed as a consequence.
Detected: ddpcheck records when each rank ends. It reports the first exception that is not a consequence of another
    rank's failure, with its traceback.
Ignore: Never.
Line: The innermost line of the program in the traceback of the first exception. For input dtypes under mp_policy, the
    call of fully_shard.
Checks: run collectives; repro progress
Example:
    def loss(model, batch):
        return cross_entropy(model(batch["x"]), batch["label"])   # KeyError; right: a key that the batch has
"""

from __future__ import annotations

from collections.abc import Sequence

from ddpcheck.findings.errors import RankFailure
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.stacks import program_lines
from ddpcheck.findings.wording import failure_text, format_ranks, group_by, new_finding, ranks_or_all
from ddpcheck.rules.collectives.ddp402_hang import judge_rendezvous
from ddpcheck.stream.entries import handled_in
from ddpcheck.trace.failures import (
    EndedThread,
    FailureFacts,
    describe_failure,
    follows_from_another_rank,
    is_of_communication,
    process_name,
)
from ddpcheck.trace.positions import EndingFacts, Position, describe_call, describe_ranks, divergence_evidence


def explain_by_exception(facts: EndingFacts, raiser: Position, peer: Position) -> list[Finding]:
    """DDP401: collective called in the `finally` or `except` that handles a rank's exception."""
    error = handled_in(raiser.call) if raiser.call is not None else None
    if raiser.call is None or error is None:
        return []
    kind, where, text = error
    if peer.call is not None and (peer_error := handled_in(peer.call)) is not None and peer_error[:2] == (kind, where):
        return []
    summary = f"{kind}{f': {text}' if text else ''}"
    others = [rank.rank for rank in facts.ranks if rank is not raiser.state]
    return new_finding(
        "DDP401",
        ("run",),
        f"Rank {raiser.state.rank} raised {summary.rstrip('.')}{f', at {where}' if where else ''}, and reaches "
        f"{describe_call(raiser.call)} in the `finally` or `except` that handles it; {describe_ranks(facts, others)}.",
        ranks=[raiser.state.rank],
        location=Location.parse(where or raiser.call.location),
        evidence=divergence_evidence(raiser, peer),
        fix=f"Fix the exception{f' at {where}' if where else ''}. Call no collective in a `finally` or `except` that a "
        f"single rank may reach ({describe_call(raiser.call)}): if the exception ends the rank, torchrun ends the "
        "others.",
    )


def explain_by_rendezvous(facts: FailureFacts) -> list[Finding]:
    """Report failed `init_process_group` calls: DDP402 if processes waited, DDP401 if a process raised."""
    raised = [p for p in facts.joining if p.error]
    others = [p for p in raised if not (is_of_communication(p.error) or p.error.startswith("DistStoreError"))]
    is_incomplete = raised and not others and all(p.started for p in facts.joining)  # single-node job
    if is_incomplete or facts.hang_seconds is not None:
        return judge_rendezvous(facts.joining, facts.hang_seconds or 0.0)
    if not (others := others or raised):
        return []
    first = others[0]
    ranks = sorted({p.rank for p in others if p.error == first.error and p.rank >= 0})
    who = format_ranks(ranks) if ranks else process_name(first)
    return new_finding(
        "DDP401",
        ("init_process_group",),
        f"{who.capitalize()} raised {first.error.rstrip('.')}, in init_process_group.",
        ranks=ranks_or_all(ranks, first.world_size),
        location=Location.parse(first.location),
        evidence=[f"{process_name(p)}: raised {p.error}" for p in raised if p is not first][:8],
    )


def explain_by_first_exception(facts: FailureFacts) -> list[Finding]:
    """DDP401: first exception, reported with all ranks that raised the same type. Runs last."""
    if not facts.ended or facts.ended[0].kind != "raised":
        return []
    first, fix = facts.ended[0], ""
    if facts.finished and all(map(follows_from_another_rank, facts.failures)):
        fix = (
            f"The line that raised was still waiting for a call of {format_ranks(facts.finished)}, which had ended the "
            "script: find the call that is missing there. Let every send have its recv, and every rank make the same "
            "calls."
        )
    elif all((failure.kind, failure.type) == ("raised", first.type) for failure in facts.failures):
        fix = "Fix the exception shown."
    return facts.new_ended_finding("DDP401", fix=fix, tags=tags_of_exception(first))


def tags_of_exception(failure: RankFailure) -> tuple[str, ...]:
    """Return the tag `FROM_TRUNCATED_FILE` if an exception is typical of a truncated file."""
    is_typical = failure.type.rpartition(".")[2] in _TRUNCATION_ERRORS or _TRUNCATION_TEXT in failure.message
    return (FROM_TRUNCATED_FILE,) if is_typical else ()


FROM_TRUNCATED_FILE = "of a cut file"
"""Tag of a finding whose exception is typical of a truncated file."""

_TRUNCATION_ERRORS = ("EOFError", "UnpicklingError", "BadZipFile", "JSONDecodeError")
_TRUNCATION_TEXT = "PytorchStreamReader"  # RuntimeError on a truncated torch.save file


def explain_by_awaited_thread(facts: FailureFacts) -> list[Finding]:
    """DDP401: exception in a thread, after which the main thread hangs, waiting for threads."""
    threads = [thread for thread in _threads_that_raised(facts) if thread.waits_in]
    if not threads or not (facts.interrupted or facts.hang_seconds is not None):
        return []
    first, *_ = threads = next(iter(group_by(threads, lambda t: (t.failure.location, t.waits_in)).values()))
    ranks = sorted({thread.failure.rank for thread in threads})
    others = [f"rank {f.rank}: {describe_failure(f)}" for f in facts.failures if f.rank not in ranks]
    waits = f", and the main thread waits for another thread in {first.waits_in}"
    return _thread_finding(first, ranks, ranks_or_all(ranks, len(facts.logs)), waits, others)


def explain_by_ended_thread(facts: FailureFacts, finding: Finding) -> list[Finding]:
    """Return a DDP401 if an exception ended a thread at the line of `finding`."""
    for thread in _threads_that_raised(facts):
        lines = {thread.failure.location, *program_lines(thread.failure.traceback)}
        if thread.failure.rank in finding.ranks and str(finding.location) in lines:
            evidence = [finding.message, *finding.evidence]
            return _thread_finding(thread, [thread.failure.rank], finding.ranks, "", evidence)
    return []


def describe_threads(facts: FailureFacts) -> list[str]:
    """Return evidence: exceptions that ended threads before ranks failed."""
    return [
        f"before that, rank {thread.failure.rank} {failure_text(thread.failure)} in a thread ({thread.name})"
        f"{f' at {thread.failure.location}' if thread.failure.location else ''}"
        for thread in _threads_that_raised(facts)
    ]


def _threads_that_raised(facts: FailureFacts) -> list[EndedThread]:
    return [thread for thread in facts.threads if not follows_from_another_rank(thread.failure)]


def _thread_finding(
    thread: EndedThread, raised: Sequence[int], ranks: Sequence[int], suffix: str, evidence: Sequence[str]
) -> list[Finding]:
    outcome, where = failure_text(thread.failure).rstrip("."), thread.failure.location
    return new_finding(
        "DDP401",
        ("thread",),
        f"{format_ranks(raised).capitalize()} {outcome}{f', at {where}' if where else ''}, which has ended a thread "
        f"({thread.name}){suffix}.",
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


def explain_dtype(facts: FailureFacts) -> list[Finding]:
    """DDP401: input whose dtype differs from the `param_dtype` of `fully_shard`'s `mp_policy`."""
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
        return facts.new_finding(
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


def explain_dtensor_parameters(facts: FailureFacts) -> list[Finding]:
    """DDP401: DDP constructed with DTensor parameters, and without a `device_mesh`."""
    return facts.new_finding(
        "DDP401",
        ("DistributedDataParallel",),
        "DistributedDataParallel is given DTensor parameters, as parallelize_module creates them, and no dimension "
        "of their mesh to average over.",
        fix='Give it device_mesh=mesh["dp"], the dimension of replicas: init_device_mesh(..., '
        'mesh_dim_names=("dp", "tp")).',
    )
