"""DDP213 buffer-shape-or-dtype: error, stops_ddp, stops_run

The shape or dtype of a buffer differs between ranks.

Why: DDP does not compare buffers. The broadcast copies bytes from rank 0, and aborts if a rank's buffer is smaller.
    The end of a larger buffer keeps its old values. If only the dtype differs, the other ranks read these bytes as
    wrong numbers.
Fix: Give the buffer the same shape and dtype on every rank: pad it, or keep local data out of the buffers.
Detected: Before DDP's first collective, the ranks compare the shapes and dtypes of buffers with the same name.
Ignore: Never while buffers are broadcast.
Line: The line that creates the first buffer. If a variable of the script has the size, the line that assigns the
    variable.
Checks: report consistency, reducer; run replicas; repro layouts
Explains: quietly DDP522 if of graphs
Example:
    self.register_buffer("queue", torch.zeros(len(local_data), 8))   # right: a size that all ranks share
"""

from __future__ import annotations

from ddpcheck.findings.report import Finding
from ddpcheck.findings.wording import format_by_rank, join_names, minority_of_any, new_finding, plural_verb
from ddpcheck.rules.replicas.comparisons import SHAPE, Records
from ddpcheck.trace.replicas import differing_values


def judge_shape_and_dtype(buffers: Records) -> list[Finding]:
    mismatches = differing_values([{b.name: f"{b.dtype} of shape {b.shape}" for b in bufs} for bufs in buffers])
    if not mismatches:
        return []
    names = list(mismatches)
    return new_finding(
        "DDP213",
        names,
        f"{join_names(names)} {plural_verb('does', 'do', names)} not have the same shape and dtype on every rank.",
        ranks=minority_of_any(mismatches.values()),
        evidence=format_by_rank(mismatches),
        tags=(SHAPE,),
    )
