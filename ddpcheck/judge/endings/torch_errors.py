"""DDP101, 311, 401, 402, 406, 501, 503, 509, 513 and 521: causes of torch errors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpcheck.findings.errors import RankFailure
from ddpcheck.findings.evidence.loop import ModuleChanged
from ddpcheck.findings.evidence.replicas import WrapperBegun
from ddpcheck.findings.evidence.steps import Call
from ddpcheck.findings.replace import replace
from ddpcheck.findings.report import Finding, Location
from ddpcheck.findings.wording import counted, format_ranks, join_names, one_finding, plural_verb, unless_all
from ddpcheck.judge.replicas.script_changes import replaced_after_sharding
from ddpcheck.stream.entries import DDP_BACKWARD, DDP_FORWARD, WrapperMade


@dataclass(frozen=True, slots=True)
class RaisedFacts:
    """Failures of ranks, first failure first, and related records."""

    failures: Sequence[RankFailure]  # ranks that failed by themselves
    logs: Sequence[Sequence[Call]]  # collectives of each rank
    begun: Sequence[WrapperBegun] = ()  # wrappers of the rank that failed first
    # by rank terminated while running: its program lines, innermost first
    at_work: Mapping[int, Sequence[str]] = field(default_factory=dict)
    checkpoint: Location | None = None  # line that calls activation checkpointing, if any
    replaced: Sequence[ModuleChanged] = ()  # assignments over shards on the rank that failed first
    sharded: Sequence[WrapperMade] = ()  # `fully_shard` modules of the rank that failed first
    clipped: Sequence[Sequence[str]] = ()  # names in clip_grad_norm_: shards, whole parameters

    @property
    def first(self) -> RankFailure:
        return self.failures[0]

    @property
    def ranks(self) -> list[int]:
        """Ranks that raised the same exception type."""
        return sorted(f.rank for f in self.failures if f.type == self.first.type and f.kind == "raised")

    def one_finding(self, code: str, subjects: Sequence[str], message: str, **more: Any) -> list[Finding]:
        """Create a finding at the raising line and ranks, unless `more` overrides."""
        first, ranks = self.first, unless_all(self.ranks, len(self.logs))
        raised = Location.parse(first.location)
        defaults = {"ranks": ranks, "location": raised, "related": {"raised": raised}, "evidence": [first.message]}
        return one_finding(code, subjects, message, **{**defaults, **more})


def judge_torch_errors(facts: RaisedFacts) -> list[Finding]:
    """Return at most one finding, if the first failure is a known torch error."""
    if not facts.failures or facts.first.kind != "raised":
        return []
    text = f"{facts.first.message}\n{facts.first.traceback}"
    for sentence, explain in _SENTENCES.items():
        if re.search(sentence, text):
            return explain(facts, text)
    return []


def _marked_twice(facts: RaisedFacts, text: str) -> list[Finding]:
    """DDP406: gradient of a parameter marked ready twice in one backward pass."""
    reentrant = "torch/utils/checkpoint.py" in text  # re-entrant backward of a checkpoint
    unused = any(wrapper.options.get("find_unused_parameters") == "True" for wrapper in facts.begun)
    forwards = _count_forwards(facts)
    where, cause, fix = Location.parse(facts.first.location), "", ""
    if reentrant:
        where = facts.checkpoint or where
        cause = ": it is an output of a re-entrant checkpoint, which runs a separate backward pass"
        if unused:
            cause += ", and find_unused_parameters=True has marked its parameters as unused before"
        fix = "Pass use_reentrant=False to checkpoint (in transformers: gradient_checkpointing_kwargs)."
    elif forwards > 1:
        cause = f": the wrapper's forward was called {forwards} times before this backward pass"
        fix = "Call forward once, with concatenated inputs, or backward after each forward (no_sync but the last)."
    elif unused:
        cause = ": a parameter that find_unused_parameters=True takes for unused is used after all, outside of forward"
        fix = "Use parameters inside the wrapper's forward only, so that DDP finds them in its output."
    names = tuple(dict.fromkeys(re.findall(r"parameter (?:name|at index \d+ with name) (\S+)", text)))
    return facts.one_finding(
        "DDP406",
        names or ("backward",),
        f"A gradient that DDP had marked ready arrived again in the same backward pass{cause}.",
        location=where,
        fix=fix,
    )


def _overwritten(facts: RaisedFacts, text: str) -> list[Finding]:
    """DDP311: tensor needed by backward overwritten in place; cause by shape and forward count."""
    match = re.search(r"\[[\w.]*Tensor \[([\d, ]*)\]\]", text)
    shape = tuple(int(size) for size in match[1].split(",") if size.strip()) if match else None
    buffers, parameters = (
        [
            tensor.name
            for begun in facts.begun
            for tensor in getattr(begun.description, kind)
            if shape is not None and sorted(tensor.shape) == sorted(shape)  # a weight may have been transposed
        ]
        for kind in ("buffers", "parameters")
    )
    broadcasts = [wrapper for wrapper in facts.begun if wrapper.options.get("broadcast_buffers") != "False"]
    forwards = _count_forwards(facts)
    cause, fix, names = "", "", [*buffers, *parameters]
    if buffers and broadcasts and forwards > 1:
        names = buffers
        cause = (
            f": the wrapper's forward was called {forwards} times before this backward pass, and each call writes "
            "buffers again (DDP broadcasts those of rank 0, a layer updates its own)"
        )
        fix = (
            "Call forward once, with the inputs concatenated; or backward after each forward; or pass "
            "broadcast_buffers=False, if the buffers are the same on all ranks anyway."
        )
    elif parameters and not buffers:
        cause = ": it has the shape of a parameter, which an optimizer's step or an in-place update has written"
        fix = "Update parameters after the backward passes that need them: move the step or the update behind them."
    which = f" ({'one of ' if len(names) > 1 else ''}{join_names(names)}, by its shape)" if names else ""
    return facts.one_finding(
        "DDP311",
        names or ("backward",),
        f"A tensor that backward needs was overwritten after the forward pass had read it{which}{cause}.",
        fix=fix,
    )


def _graph_changed(facts: RaisedFacts, _text: str) -> list[Finding]:
    """DDP513: graph that differs from the first step under static_graph=True."""
    return facts.one_finding(
        "DDP513",
        ("backward",),
        "The graph differs from the one that DDP recorded in the first step, which static_graph=True does not allow.",
    )


def _undefined(facts: RaisedFacts, _text: str) -> list[Finding]:
    """DDP509: gradient after the end of a reduction, which DDP counts for the next."""
    return facts.one_finding(
        "DDP509",
        ("backward",),
        "A second backward pass of an earlier step delivered gradients after the reduction of that step: DDP takes "
        "them for the start of the next reduction, and waits for the rest.",
    )


def _not_finished(facts: RaisedFacts, text: str) -> list[Finding]:
    """DDP101: gradients missing since the previous backward, by the indices in the message."""
    match = re.search(r"did not receive grad for rank \d+: ([\d ]+)", text)
    numbers = [int(number) for number in match[1].split()] if match else []
    trained = [[param.name for param in begun.description.parameters if param.requires_grad] for begun in facts.begun]
    candidates = {tuple(row[index] for index in numbers) for row in trained if numbers and max(numbers) < len(row)}
    names = candidates.pop() if len(candidates) == 1 else ()  # DDP does not say which of several wrappers
    location = next((begun.lines[names[0]] for begun in facts.begun if names and names[0] in begun.lines), None)
    who = join_names(names, most=4) if names else counted(len(numbers), "parameter") if numbers else "A parameter"
    return facts.one_finding(
        "DDP101",
        names or ("parameters",),
        f"{who} did not contribute to the previous backward pass: DDP still waits for the gradient, and raises at its "
        "next forward.",
        location=location or Location.parse(facts.first.location),
    )


def _timed_out(facts: RaisedFacts, text: str) -> list[Finding]:
    """DDP402: process group timeout while waiting for a rank that was running."""
    waited = [f.rank for f in facts.failures if re.search(_TIMED_OUT, f"{f.message}\n{f.traceback}")]
    log = facts.logs[facts.first.rank]
    late = [rank for rank in range(len(facts.logs)) if rank not in waited and facts.first.rank != rank]
    if not log or not late or any(not _is_behind(facts.logs[rank], log) for rank in late):
        return []
    arrived = {f.rank: f for f in facts.failures if f.rank in late}
    if any(len(facts.logs[rank]) < len(log) if rank in arrived else rank not in facts.at_work for rank in late):
        return []  # the late rank waits or failed elsewhere
    rank, call = late[0], log[-1]
    milliseconds = next((int(n) for n in re.search(_TIMED_OUT, text).groups() if n), 0)  # type: ignore[union-attr]
    limit = f" of {milliseconds / 1000:g} s" if milliseconds else ""
    of_group, where_set = " of the process group", "init_process_group"
    if call.operation == "monitored_barrier":
        of_group, where_set = "", call.operation
    lines = facts.at_work.get(rank, ())
    where = Location.parse(lines[0]) if lines else None
    state = f"was still at work at {lines[0]}" if lines else ""
    if rank in arrived:
        before = facts.logs[rank][-2:-1]
        since = f" after {before[0].operation} at {before[0].location}" if before else ""
        delay = arrived[rank].when - facts.first.when
        state = f"came to it {max(delay, 0.0):.0f} s after that, and was at work{since} until then"
        where = Location.parse(before[0].location if before else call.location)
    return facts.one_finding(
        "DDP402",
        (call.operation,),
        f"{format_ranks(waited).capitalize()} waited in {call.operation} at {call.location} for longer than the "
        f"timeout{limit}{of_group}, and {format_ranks(late)} {state}.",
        ranks=unless_all(late, len(facts.logs)),
        location=where,
        evidence=[
            *(f"{format_ranks([r])} was at {' called from '.join(stack[:4])}" for r, stack in facts.at_work.items()),
            f"{format_ranks(waited)} and {format_ranks(late)} have reached the same {counted(len(log), 'collective')}",
            facts.first.message,
        ],
        fix=f"Give the others that time: {where_set}(timeout=...) longer than what {format_ranks(late)} "
        f"{plural_verb('does', 'do', late)} there; or split the work over all ranks; or do it outside of training.",
    )


def _is_behind(log: Sequence[Call], other_log: Sequence[Call]) -> bool:
    """Return True if a log equals `other_log`, or lacks only its last call."""
    is_prefix = [(c.operation, c.group) for c in log] == [(c.operation, c.group) for c in other_log[: len(log)]]
    return is_prefix and len(other_log) - 1 <= len(log) <= len(other_log)


def _count_forwards(facts: RaisedFacts) -> int:
    """Count the wrapper forwards that broadcast buffers before the failed backward pass."""
    calls = [call.operation for call in facts.logs[facts.first.rank]]
    if calls and calls[-1] == DDP_BACKWARD:
        calls = calls[:-1]
    count = 0
    while calls and calls[-1] == DDP_FORWARD:
        calls.pop()
        count += 1
    return count


def _given_shards(facts: RaisedFacts, text: str) -> list[Finding]:
    """DDP501: operation on a shard outside of forward, where the parameter is not gathered.

    DDP401 in the constructor of DDP (parameters split by tensor parallelism); DDP521 if values are loaded or copied,
    or in the optimizer or gradient clipping.
    """
    if "load_state_dict" in text or "aten.copy_." in text:
        return _whole_into_shards(facts, "copied into")
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
        return _mixed_norms(facts)
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


def _mixed_norms(facts: RaisedFacts) -> list[Finding]:
    """DDP521: one norm over sharded (DTensor) and whole gradients."""
    shards, whole = facts.clipped if len(facts.clipped) == 2 else ((), ())
    split, others = (f" ({join_names(names)})" if names else "" for names in (shards, whole))
    return facts.one_finding(
        "DDP521",
        shards or ("gradients",),
        f"One norm is computed over gradients that are split over the ranks{split}, which are DTensors, and over whole "
        f"gradients{others}, which are plain tensors.",
        fix="Take the norm of each kind by get_total_norm, that of the DTensors with .full_tensor(); put the two "
        "together (the root of the sum of their squares), and give that to clip_grads_with_norm_ for each kind.",
    )


def _no_shard(facts: RaisedFacts, text: str) -> list[Finding]:
    """DDP503: plain tensor in place of a shard; DDP521 if load_state_dict assigned it."""
    if "_fully_shard" not in text:
        return []
    if "load_state_dict" in text:
        return _whole_into_shards(facts, "assigned instead of")
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


_CASTS = {
    "output_dtype=torch.": "the outputs of a part are cast to output_dtype, also as inputs of other parts",
    "cast_forward_inputs=False": "its inputs are not cast (cast_forward_inputs=False)",
}


def _other_dtype(facts: RaisedFacts, _text: str) -> list[Finding]:
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


def _whole_into_shards(facts: RaisedFacts, verb: str) -> list[Finding]:
    return facts.one_finding(
        "DDP521",
        ("parameters",),
        f"Whole tensors are {verb} parameters that fully_shard has sharded: each rank has a part of each (DTensor).",
        fix="Load whole values before fully_shard; or after it, on all ranks, by set_model_state_dict(model, values, "
        "options=StateDictOptions(full_state_dict=True)), with broadcast_from_rank0=True if only rank 0 has them. For "
        "a single parameter: distribute_tensor(value, parameter.device_mesh, parameter.placements).",
    )


_TIMED_OUT = r"[Tt]imed out waiting (\d+) ?ms|Timeout\(ms\)=(\d+)|timed out after (\d+) ?ms"
_SENTENCES = {
    "mark a variable ready only once": _marked_twice,
    "gradient which is undefined, but still allreduced": _undefined,
    "modified by an inplace operation": _overwritten,
    "training graph has changed in this iteration": _graph_changed,
    "Expected to have finished reduction in the prior iteration": _not_finished,
    "got mixed torch.Tensor and DTensor": _given_shards,
    "object has no attribute '_local_tensor'": _no_shard,
    r"(?s)(?=.*(BFloat16|Half)).*(must have the same dtype|expected scalar type|should be the same)": _other_dtype,
    _TIMED_OUT: _timed_out,
}
"""Explanation by regex of torch's error message; torch has no error codes."""
