"""Judges of failed ranks: exceptions, crashes, hangs, threads and messages of torch."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Sequence

from ddpcheck.findings.errors import RankFailure
from ddpcheck.findings.evidence.endings import RankAtEnd
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location, Severity
from ddpcheck.findings.stacks import is_waiting, program_lines
from ddpcheck.findings.wording import agreeing, format_ranks, group_by, one_finding, phrase, unless_all
from ddpcheck.rules.collectives.ddp401_rank_raised import explain_dtype, thread_finding
from ddpcheck.rules.collectives.ddp402_hang import explain_by_hang, explain_timeout
from ddpcheck.rules.collectives.ddp403_collective_mismatch import interleaving_finding
from ddpcheck.rules.collectives.ddp406_marked_ready_twice import explain_marked_twice
from ddpcheck.rules.collectives.first_divergence import judge_divergences
from ddpcheck.rules.gradients.ddp311_saved_tensor_overwritten import explain_overwritten
from ddpcheck.rules.gradients.ddp509_backward_without_forward_pairing import explain_undefined_gradient
from ddpcheck.rules.gradients.ddp521_shard_as_whole import explain_mixed_norms, explain_whole_into_shards
from ddpcheck.rules.parameters.ddp101_unused_parameter import explain_unfinished_reduction
from ddpcheck.rules.parameters.ddp513_static_graph_violated import explain_graph_changed
from ddpcheck.rules.replicas.ddp503_changed_after_wrapping import replaced_after_sharding
from ddpcheck.trace.check_context import first_explanation
from ddpcheck.trace.collectives import EndedThread, first_unequal_call, thread_kind
from ddpcheck.trace.failures import (
    ERRORS_OF_DDP,
    TIMEOUT_PATTERN,
    FailureFacts,
    RaisedFacts,
    describe_failure,
    is_of_communication,
    stack_lines,
)


def judge_failure(
    failures: Sequence[RankFailure], logs: Sequence[Sequence[Call]], world_size: int, finished: Collection[int] = ()
) -> list[Finding]:
    """Return the root cause of a failed run (DDP401 to DDP404); see `FailureFacts`."""
    return first_explanation(EXPLANATIONS, FailureFacts(failures, logs, world_size, finished)) if failures else []


def explain_by_collectives(facts: FailureFacts) -> list[Finding]:
    """DDP403: collectives or call sites that do not match between ranks.

    Runs first, since ranks with mismatched collectives hang or fail with a communication error. Any other exception is
    a separate cause: the rank that raised never reached the next collective.
    """
    at_work = {failure.rank for failure in facts.stuck if not failure.collective}
    mismatch = judge_divergences(facts.logs, at_work)
    if not mismatch or (facts.ended and not _is_of_backend(facts.ended[0])):
        return []
    return [replace(mismatch[0], evidence=(*mismatch[0].evidence, *facts.evidence))]


def explain_by_first_failure(facts: FailureFacts) -> list[Finding]:
    """DDP401 or 404: first rank that raised or died, and similar failures. Runs last."""
    first = facts.ended[0]
    ranks = tuple(failure.rank for failure in facts.ended if (failure.kind, failure.type) == (first.kind, first.type))
    died = first.kind != "raised"
    outcome = phrase(first)
    if len({phrase(failure) for failure in facts.ended if failure.rank in ranks}) > 1:  # messages differ between ranks
        kind, colon, words = outcome.partition(":")
        outcome = f"{kind}; on rank {first.rank}:{words}" if colon else outcome
    if len(ranks) == facts.world_size > 1:
        text = f"Every rank {outcome}"
    else:
        text = f"{format_ranks(ranks).capitalize()} {agreeing(outcome, ranks)}"
    evidence = facts.evidence
    others = [failure for failure in facts.failures if failure.rank not in ranks]
    return one_finding(
        "DDP404" if died else "DDP401",
        (first.place or "run",),
        f"{text.rstrip('.')}{f', in {first.place}' if first.place else ''}.",
        severity=Severity.ERROR,
        ranks=unless_all(ranks, facts.world_size),
        location=Location.parse(first.location),
        evidence=[
            first.noticed,
            *(evidence if len(evidence) > 1 else []),
            *stack_lines([first] if died else []),
        ],
        fix=_fix_of_death(first) if died else _fix_of_exception(facts, others),
        tags=(OF_A_CUT_FILE,)
        if first.type.rpartition(".")[2] in _OF_CUT_FILES or _OF_CUT_ARCHIVES in first.message
        else (),
    )


OF_A_CUT_FILE = "of a cut file"
"""Tag of a finding whose exception is typical of a truncated file."""


_OF_CUT_FILES = ("EOFError", "UnpicklingError", "BadZipFile", "JSONDecodeError")


_OF_CUT_ARCHIVES = "PytorchStreamReader"  # RuntimeError on a truncated torch.save file


EXPLANATIONS = (explain_by_collectives, explain_by_hang, explain_by_first_failure)
"""Explanations in order; the first with findings is reported."""


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
    """Return the fix for a dead rank, or '' for the rule's default."""
    if failure.location and (failure.exit_code or 0) > 0:
        return "Raise an exception, which is shown, instead of exiting without a message (sys.exit, os._exit)."
    if failure.exit_code == -signal.SIGSEGV and not failure.location:
        return ""  # no line is known
    return _FIX_OF_DEATH.get(failure.exit_code or 0, "")


def _fix_of_exception(facts: FailureFacts, others: Sequence[RankFailure]) -> str:
    """Return the fix for an exception, or '' for the rule's default."""
    if facts.finished and all(map(follows_from_another_rank, facts.failures)):
        return (
            f"The line that raised was still waiting for a call of {format_ranks(facts.finished)}, which had ended the "
            "script: find the call that is missing there. Let every send have its recv, and every rank make the same "
            "calls."
        )
    return "" if others else "Fix the exception shown."


def _is_of_backend(failure: RankFailure) -> bool:
    """Return True if a rank failed inside the backend, not in its own code."""
    aborted_at_work = failure.kind == "died" and bool(failure.stack) and not is_waiting(failure)
    return not aborted_at_work and is_of_communication(f"{failure.message}\n{failure.traceback}")


def follows_from_another_rank(failure: RankFailure) -> bool:
    """Check for a secondary failure: a wait, a lost peer or a DDP error."""
    text = f"{failure.message}\n{failure.traceback}"
    return failure.kind == "stuck" or _is_of_backend(failure) or any(sentence in text for sentence in ERRORS_OF_DDP)


def judge_threads(ended: Sequence[EndedThread], failures: Sequence[RankFailure], world_size: int) -> list[Finding]:
    """DDP401: exception in a thread while the main thread waits for a thread."""
    waited_for = [thread for thread in ended if thread.waits_in and not follows_from_another_rank(thread.failure)]
    if not waited_for:
        return []
    first, *_ = threads = next(iter(group_by(waited_for, lambda t: (t.failure.location, t.waits_in)).values()))
    ranks = sorted({thread.failure.rank for thread in threads})
    others = [f"rank {f.rank}: {describe_failure(f)}" for f in failures if f.rank not in ranks]
    waits = f", and the main thread waits for another thread in {first.waits_in}"
    return thread_finding(first, ranks, unless_all(ranks, world_size), waits, others)


def judge_left_by_thread(ended: Sequence[EndedThread], story: Finding) -> list[Finding]:
    """DDP401: divergence at a line where an exception ended a thread of the rank."""
    for t in ended:
        lines = {t.failure.location, *program_lines(t.failure.traceback)}
        if t.failure.rank in story.ranks and str(story.location) in lines and not follows_from_another_rank(t.failure):
            return thread_finding(t, [t.failure.rank], story.ranks, "", [story.message, *story.evidence])
    return []


def judge_interleaving(ranks: Sequence[RankAtEnd]) -> list[Finding]:
    """DDP403: collectives of several threads in one process group, ordered differently on each rank.

    Each thread made the same calls on all ranks. Logs are in the order in which calls began. If the order is equal, two
    threads of a rank must still wait: an object collective is several collectives to the backend.
    """
    for group in sorted({call.group for rank in ranks for call in rank.calls if call.thread}):
        by_rank = {rank.rank: [call for call in rank.calls if call.group == group] for rank in ranks}
        logs = list(filter(None, by_rank.values()))
        for kind in {thread_kind(call) for log in logs for call in log}:
            sequences = [[_key(call) for call in log if thread_kind(call) == kind] for log in logs]
            if any(sequence != max(sequences, key=len)[: len(sequence)] for sequence in sequences):
                break  # calls of this thread differ between ranks
        else:
            last = next((tuple(by_rank[rank.rank]) for rank in ranks if rank.in_threads), ())
            index, mismatch = first_unequal_call(logs) or (0, last)
            calls = [call for call in mismatch if call is not None]
            # last call of each kind of thread, then the last two calls
            pair = [
                call for after, call in enumerate(calls, 1) if thread_kind(call) not in map(thread_kind, calls[after:])
            ][-2:]
            if len(pair) == 2 and all({_key(call) for call in log[index:]} >= set(map(_key, pair)) for log in logs):
                return interleaving_finding(ranks, *sorted(pair, key=lambda call: call.thread))
    return []


def _key(call: Call) -> tuple[str, str, str]:
    return thread_kind(call), call.operation, call.payload


def told_of_threads(ended: Sequence[EndedThread]) -> list[str]:
    """Return evidence: exceptions that ended threads before ranks failed."""
    return [
        f"before that, rank {thread.failure.rank} {phrase(thread.failure)} in a thread ({thread.name})"
        f"{f' at {thread.failure.location}' if thread.failure.location else ''}"
        for thread in ended
        if not follows_from_another_rank(thread.failure)
    ]


def judge_torch_errors(facts: RaisedFacts) -> list[Finding]:
    """Return at most one finding, if the first failure is a known torch error."""
    if not facts.failures or facts.first.kind != "raised":
        return []
    text = f"{facts.first.message}\n{facts.first.traceback}"
    for sentence, explain in _SENTENCES.items():
        if re.search(sentence, text):
            return explain(facts, text)
    return []


def explain_shards(facts: RaisedFacts, text: str) -> list[Finding]:
    """DDP501: operation on a shard outside of forward, where the parameter is not gathered.

    DDP401 in the constructor of DDP (parameters split by tensor parallelism); DDP521 if values are loaded or copied,
    or in the optimizer or gradient clipping.
    """
    if "load_state_dict" in text or "aten.copy_." in text:
        return explain_whole_into_shards(facts, "copied into")
    if text.rpartition('File "')[2].startswith("torch/optim/"):
        return facts.one_finding(
            "DDP521",
            ("state",),
            "The optimizer's state has plain tensors for parameters that are shards (DTensor): it belongs to whole "
            "parameters, or was created before fully_shard was called.",
            fix="Load the state of whole parameters on all ranks by set_optimizer_state_dict(model, optimizer, state, "
            "options=StateDictOptions(full_state_dict=True)) of torch.distributed.checkpoint.state_dict; and construct "
            "the optimizer after fully_shard.",
        )
    if "torch/nn/utils/clip_grad.py" in text or "get_total_norm" in text:
        return explain_mixed_norms(facts)
    for begun in facts.begun[-1:]:
        if str(begun.location) != facts.first.location:
            continue
        if begun.options.get("device_mesh", "None") != "None":
            return []  # e.g. DDP leaves the second name of a tied parameter as is
        return facts.one_finding(
            "DDP401",
            ("DistributedDataParallel",),
            "DistributedDataParallel is given DTensor parameters, as parallelize_module creates them, and no dimension "
            "of their mesh to average over.",
            fix='Give it device_mesh=mesh["dp"], the dimension of replicas: '
            'init_device_mesh(..., mesh_dim_names=("dp", "tp")).',
        )
    return facts.one_finding(
        "DDP501",
        ("forward",),
        "An operation mixes a plain tensor and a shard (DTensor): outside of the forward of a module that fully_shard "
        "was called on, each rank has only its shards of the parameters.",
        fix="Call the module, not its forward or another of its methods; or register that method with "
        "torch.distributed.fsdp.register_fsdp_forward_method(module, name). Other computations on parameters use "
        "parameter.full_tensor(), before forward.",
    )


def explain_missing_shard(facts: RaisedFacts, text: str) -> list[Finding]:
    """DDP503: plain tensor in place of a shard; DDP521 if load_state_dict assigned it."""
    if "_fully_shard" not in text:
        return []
    if "load_state_dict" in text:
        return explain_whole_into_shards(facts, "assigned instead of")
    where = next((change.location for change in facts.replaced), None)
    names = [name for change in facts.replaced if change.location == where for name in change.names]
    return [
        replace(
            finding,
            ranks=unless_all(facts.ranks, len(facts.logs)),
            evidence=(facts.first.message,),
        ).relocated(where, "raised")
        for finding in replaced_after_sharding(
            names or ["parameters"], Location.parse(facts.first.location), later=False
        )
    ]


_SENTENCES = {
    "mark a variable ready only once": explain_marked_twice,
    "gradient which is undefined, but still allreduced": explain_undefined_gradient,
    "modified by an inplace operation": explain_overwritten,
    "training graph has changed in this iteration": explain_graph_changed,
    "Expected to have finished reduction in the prior iteration": explain_unfinished_reduction,
    "got mixed torch.Tensor and DTensor": explain_shards,
    "object has no attribute '_local_tensor'": explain_missing_shard,
    r"(?s)(?=.*(BFloat16|Half)).*(must have the same dtype|expected scalar type|should be the same)": explain_dtype,
    TIMEOUT_PATTERN: explain_timeout,
}
"""Explanation by regex of torch's error message; torch has no error codes."""
